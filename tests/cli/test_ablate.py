"""`everydepth ablate` and `everydepth audit`: tables, run directories, pages, errors."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers as hf
from typer.testing import CliRunner

from everydepth.ablations import Ablation, Audit
from everydepth.cli.main import build_app
from everydepth.errors import DepthError, SettingError


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("model")
    config = hf.ViTConfig(
        image_size=8,
        patch_size=4,
        num_channels=1,
        num_labels=10,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=16,
    )
    hf.ViTForImageClassification(config).save_pretrained(folder)
    return str(folder)


def run(*arguments: str) -> str:
    result = CliRunner().invoke(build_app(), list(arguments), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_ablate_prints_tables_and_writes_a_run_that_can_be_reported(
    model: str, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    shown = run(
        "ablate", model, "--data", "digits", "--max-samples", "40", "--c", "0,1", "-o", str(out)
    )
    assert "Accuracy" in shown
    assert "untouched: " in shown
    found = Ablation.load(out / "ablation")
    assert found.layers == (1, 2)
    assert found.samples == 40
    page = tmp_path / "page.html"
    run("report", str(out), "-o", str(page))
    assert "with the skips of one layer multiplied" in page.read_text()


def test_audit_shows_the_rows_to_review(model: str, tmp_path: Path) -> None:
    out = tmp_path / "run"
    common = ("--data", "digits", "--max-samples", "60", "--top", "5")
    shown = run("audit", model, *common, "--held-out", "-o", str(out))
    assert "estimated share of wrong labels" in shown
    assert Audit.load(out / "audit").calibrated
    page = tmp_path / "page.html"
    run("report", str(out), "-o", str(page))
    assert "Labels to review first" in page.read_text()
    assert "not calibrated" in run("audit", model, *common)


def test_bad_options_are_named(model: str) -> None:
    for options, error, words in (
        (("--layers", "3"), DepthError, "layer 3, but the layers of .* are 1 to 2"),
        (
            ("--layers", "one"),
            SettingError,
            "--layers 'one'; give whole numbers",
        ),
        (("--which", "conv"), SettingError, "which='conv', but layer 1"),
        (("--which", "skip"), SettingError, "use one of both, attention"),
        (("--c", "nan"), SettingError, "c=.*nan.*; use a number"),
    ):
        with pytest.raises(error, match=words):
            run("ablate", model, "--data", "digits", "--max-samples", "8", *options)
