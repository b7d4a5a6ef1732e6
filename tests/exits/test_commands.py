"""`everydepth profile` and `everydepth export`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers as hf
from typer.testing import CliRunner, Result

from everydepth.cli.main import build_app
from everydepth.errors import BudgetError, ExportError, SettingError
from everydepth.exits import Confidence, Profile, load
from everydepth.stream import as_stream


def run(*arguments: str) -> Result:
    return CliRunner().invoke(build_app(), list(arguments), env={"COLUMNS": "200"})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random ViT for the digits, with a tokenizer file beside it."""
    path = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = hf.ViTConfig(
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=2,
        intermediate_size=48,
        image_size=8,
        patch_size=4,
        num_channels=1,
        num_labels=10,
    )
    hf.ViTForImageClassification(config).save_pretrained(path)
    (path / "vocab.txt").write_text("zero")
    return path


def test_profile_prints_every_depth_writes_json_and_figure_and_chooses(
    folder: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    budget = ("--max-drop", "1", "--repeats", "1", "--max-samples", "20")
    result = run("profile", str(folder), "--data", "digits", "--run", str(out), *budget)
    assert result.exit_code == 0, result.output
    assert "depth 1 fits the budget" in result.output
    found = Profile.load(out / "profile")
    assert (found.metric, found.samples, len(found.depths)) == ("accuracy", 20, 3)
    assert (out / "profile.png").read_bytes().startswith(b"\x89PNG")


def test_profile_reads_every_token_if_asked(folder: Path, tmp_path: Path) -> None:
    options = ("--repeats", "1", "--max-samples", "4", "--depths", "1,2", "--tokens")
    place = ("--data", "digits", "--run", str(tmp_path / "run"))
    result = run("profile", str(folder), *place, *options, "all")
    assert result.exit_code == 0, result.output
    found = Profile.load(tmp_path / "run" / "profile")
    assert [depth.depth for depth in found.depths] == [1, 2, 3]
    assert found.about["asked"]["tokens"] == "all"
    result = run("profile", str(folder), *place[:-1], str(tmp_path / "other"), *options, "few")
    assert "tokens='few'" in str(result.exception)


def test_profile_explains_a_budget_that_cannot_be_met(folder: Path, tmp_path: Path) -> None:
    options = ("--max-bytes", "3", "--repeats", "1", "--max-samples", "4")
    place = ("--run", str(tmp_path / "run"))
    result = run("profile", str(folder), "--data", "digits", *place, *options)
    assert isinstance(result.exception, BudgetError)
    assert "no depth of ViTForImageClassification meets bytes=3" in str(result.exception)


def test_export_writes_a_depth_with_what_lies_beside_the_model(
    folder: Path, tmp_path: Path
) -> None:
    out = tmp_path / "small"
    result = run("export", str(folder), str(out), "--depth", "2")
    assert result.exit_code == 0, result.output
    assert (out / "vocab.txt").read_text() == "zero"
    x = torch.randn(2, 1, 8, 8)
    with torch.no_grad():
        expected = as_stream(load(folder)).observe(x).logits(2)
        torch.testing.assert_close(load(out)(x).logits, expected)
    again = run("export", str(folder), str(out), "--depth", "1")
    assert isinstance(again.exception, ExportError)
    assert run("export", str(folder), str(out), "--depth", "1", "--overwrite").exit_code == 0


def test_export_takes_a_policy(folder: Path, tmp_path: Path) -> None:
    Confidence(threshold=0.5).save(tmp_path / "policy.json")
    result = run(
        "export", str(folder), str(tmp_path / "out"), "--policy", str(tmp_path / "policy.json")
    )
    assert result.exit_code == 0, result.output
    assert (tmp_path / "out" / "exit_policy.json").is_file()


def test_export_to_onnx_asks_for_data(folder: Path, tmp_path: Path) -> None:
    result = run("export", str(folder), str(tmp_path / "out"), "--format", "onnx")
    assert isinstance(result.exception, SettingError)
    assert "--format onnx needs --data" in str(result.exception)
    assert not (tmp_path / "out").exists()


def test_export_writes_onnx(folder: Path, tmp_path: Path) -> None:
    options = ("--depth", "1", "--format", "onnx", "--data", "digits", "--max-samples", "3")
    result = run("export", str(folder), str(tmp_path / "out"), *options)
    assert result.exit_code == 0, result.output
    assert (tmp_path / "out" / "model.onnx").is_file()
