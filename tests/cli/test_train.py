"""`everydepth train`: presets, files of options, a dry run, a run directory."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoTokenizer, GPT2LMHeadModel
from typer.testing import CliRunner, Result

from everydepth.cli.main import build_app
from everydepth.cli.presets import PRESETS, Facts
from everydepth.cli.train import _data
from everydepth.config import settings_of
from everydepth.data import Batches, batches, load_digits
from everydepth.data.byte_tokens import byte_tokenizer
from everydepth.data.reading import Absent
from everydepth.errors import DataError, EveryDepthError, SettingError
from everydepth.runs import Run
from everydepth.stream import as_stream
from everydepth.training import FitConfig, RunConfig


def run(*words: object) -> Result:
    result = CliRunner().invoke(
        build_app(), ["train", *map(str, words)], env={"COLUMNS": "200", "TERM": "dumb"}
    )
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


SMALL = ("--blocks", 2, "--steps", 2, "--max-samples", 40, "--batch-size", 20)


def test_a_preset_trains_and_leaves_a_run_with_a_model(tmp_path: Path) -> None:
    result = run("-m", "vit-tiny", "-d", "digits", *SMALL, "--run", tmp_path / "run")
    assert result.exit_code == 0, result.output
    assert "finished after 2 steps" in result.output
    made = Run.open(tmp_path / "run")
    assert made.config["about"] == {
        "model": "vit-tiny",
        "data": "digits",
        "blocks": 2,
        "max_samples": 40,
        "max_length": 128,
        "valid_split": "auto",
    }
    assert len(made.results()["valid"]["accuracy"]) == 2


@pytest.mark.parametrize(
    ("error", "refused"), [(DataError("dev.tsv is truncated"), True), (Absent("no dev.tsv"), False)]
)
def test_validation_data_that_cannot_be_read_is_an_error_and_not_absent(
    error: DataError, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jaxtyping.config.jaxtyping_disable", True)  # only these rows are asked for

    class Cut:
        one_file = False

        def check_part(self, *_: str) -> None: ...

        def batches(self, *_: Any, split: str, batch_size: int) -> Batches:
            if split != "train":
                raise error
            return batches(load_digits().subset(range(8)), batch_size)

    def asked() -> Any:
        return _data("", None, Cut(), FitConfig(epochs=1, batch_size=4), "auto")

    if refused:
        with pytest.raises(DataError, match=r"dev\.tsv is truncated"):
            asked()
    else:
        assert asked()[1] is None


def test_one_file_is_learned_and_validates_nothing(tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    file.write_text("to be or not to be, that is the question; " * 40)
    words = ("-m", "gpt2-tiny", "-d", file, "--steps", 1, "--batch-size", 2)
    assert "there was no validation data" in run(*words, "-o", tmp_path / "run").output
    with pytest.raises(
        SettingError, match=r"--valid-split test, but .* is a single file, used entirely"
    ):
        run(*words, "--valid-split", "test", "-o", tmp_path / "other")


def test_without_validation_it_says_why_there_are_no_figures(tmp_path: Path) -> None:
    words = (
        "-m",
        "vit-tiny",
        "-d",
        "digits",
        *SMALL,
        "--valid-split",
        "none",
        "-o",
        tmp_path / "run",
    )
    said = run(*words).output
    assert "no metrics by depth, since there was no validation data" in said
    assert "--data" in said


def test_a_trained_run_can_be_trained_further_by_its_folder(tmp_path: Path) -> None:
    run("-m", "vit-tiny", "-d", "digits", *SMALL, "--run", tmp_path / "one")
    words = ("--steps", 1, "--max-samples", 40)
    result = run("-m", tmp_path / "one", "-d", "digits", *words, "--run", tmp_path / "two")
    assert result.exit_code == 0, result.output
    assert Run.open(tmp_path / "two").config["model"]["depth"] == 2


def test_a_language_model_on_bytes_is_saved_with_its_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.txt").write_text("to be or not to be, that is the question; " * 40)
    words = ("--steps", 2, "--blocks", 2, "--max-length", 16, "--batch-size", 8)
    result = run("-m", "gpt2-tiny", "-d", tmp_path / "data", *words, "--run", tmp_path / "run")
    assert result.exit_code == 0, result.output
    model = GPT2LMHeadModel.from_pretrained(tmp_path / "run" / "model")
    tokenizer: Any = AutoTokenizer.from_pretrained(tmp_path / "run" / "model")
    assert model.config.vocab_size == len(tokenizer) == 257
    assert tokenizer.decode(tokenizer("née")["input_ids"]) == "née"


def test_flags_override_the_file_which_overrides_the_defaults(tmp_path: Path) -> None:
    file = tmp_path / "options.yaml"
    options = {"model": "vit-tiny", "data": "digits", "batch-size": 7, "lr": 0.5, "epochs": 3}
    file.write_text(yaml.safe_dump({**options, "objective": {"name": "lpa", "early": 0.3}}))
    output = run("--config", file, "--lr", 0.25, "--steps", 4, "--dry-run").output
    shown = yaml.safe_load(output.split("depth")[0])
    assert (shown["batch_size"], shown["lr"], shown["optimizer"]) == (7, 0.25, "adamw")
    assert (shown["steps"], shown["epochs"]) == (4, None)
    assert shown["objective"]["parts"] == [{"part": "lpa", "early": 0.3}]


def test_a_json_file_does_as_well(tmp_path: Path) -> None:
    file = tmp_path / "options.json"
    file.write_text(json.dumps({"model": "vit-tiny", "data": "digits", "epochs": 1}))
    assert "vit-tiny" in run("--config", file, "--dry-run").output


def test_a_dry_run_shows_parameters_memory_and_time_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    output = run("-m", "vit-tiny", "-d", "digits", *SMALL, "--dry-run").output
    assert "run: runs/vit-tiny-digits-lpa" in output
    counts = [int(n.replace(",", "")) for n in re.findall(r"^ +[012] +([\d,]+)$", output, re.M)]
    model = PRESETS["vit-tiny"]("vit-tiny", Facts(classes=10, channels=1, size=8), 2)
    assert counts[2] == sum(p.numel() for p in model.parameters())
    assert counts[2] - counts[1] == counts[1] - counts[0] > 0
    assert "memory: about" in output
    assert "for 2 steps" in output
    assert not list(tmp_path.iterdir())


def test_resuming_with_another_option_says_what_changed(tmp_path: Path) -> None:
    words = ("-m", "vit-tiny", "-d", "digits", *SMALL, "--run", tmp_path / "run")
    run(*words)
    assert "finished after 2 steps" in run(*words, "--resume").output
    with pytest.raises(EveryDepthError, match=r"other settings: lr None -> 0\.5\. Resume it"):
        run(*words, "--resume", "--lr", 0.5)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["-m", "mlp", "-d", "digits"], "preset 'mlp' is for points of a regression"),
        (["-m", "gpt2-tiny", "-d", "digits"], "preset 'gpt2-tiny' is for text"),
        (
            ["-m", "vit-tiny", "-d", "digits", "--objective", "lap"],
            "has no objective 'lap'. Did you mean 'lpa'",
        ),
    ],
)
def test_what_cannot_be_is_said_in_a_sentence(words: list[str], message: str) -> None:
    with pytest.raises((SettingError, DataError), match=message):
        run(*words, "--steps", 1, "--run", "unused")


def test_an_unknown_option_in_the_file_lists_the_known(tmp_path: Path) -> None:
    file = tmp_path / "options.yaml"
    file.write_text("modle: vit-tiny\n")
    with pytest.raises(SettingError, match=r"train has no option 'modle'. Did you mean 'model'"):
        run("--config", file)


@pytest.mark.parametrize("name", ["model", "data"])
def test_what_neither_the_command_nor_the_file_gives_is_asked_for(name: str) -> None:
    given = {"model": "vit-tiny", "data": "digits"}
    words = [word for key, value in given.items() if key != name for word in (f"--{key}", value)]
    found = run(*words)
    assert found.exit_code == 2
    assert f"Missing option '--{name}'" in found.output


def test_the_options_of_training_are_the_fields_of_its_configs() -> None:
    text = run("--help").output
    for config in (FitConfig, RunConfig):
        for name, about in settings_of(config).items():
            flags = about.flags or (f"--{name.replace('_', '-')}",)
            assert about.hidden or flags[0] in text


def test_a_number_that_yaml_takes_for_a_word_is_a_number(tmp_path: Path) -> None:
    file = tmp_path / "options.yaml"
    file.write_text("model: vit-tiny\ndata: digits\nlr: 1e-3\nblocks: 2\n")
    shown = yaml.safe_load(run("--config", file, "--dry-run").output.split("depth")[0])
    assert (shown["lr"], shown["blocks"], shown["epochs"]) == (0.001, 2, 10)


def test_a_dry_run_is_a_file_of_options(tmp_path: Path) -> None:
    words = ("-m", "vit-tiny", "-d", "digits", *SMALL, "--objective", "lpa+annealed:by=0.5")
    text = run(*words, "--dry-run").output.split("depth")[0]
    file = tmp_path / "options.yaml"
    file.write_text(text.rstrip())
    again = run("--config", file, "--dry-run").output.split("depth")[0]
    assert yaml.safe_load(again) == yaml.safe_load(text)


def test_a_seed_is_of_the_run_and_not_of_the_process() -> None:
    before = torch.get_rng_state()
    run("-m", "vit-tiny", "-d", "digits", *SMALL, "--seed", 3, "--dry-run")
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("content", ["- a\n- b\n", "a: [1\n"])
def test_a_file_that_holds_no_options_is_named(tmp_path: Path, content: str) -> None:
    file = tmp_path / "options.yaml"
    file.write_text(content)
    with pytest.raises(SettingError, match=r"options\.yaml (holds a list|cannot be read)"):
        run("--config", file)


def test_blocks_are_for_presets_only(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="--blocks is for presets"):
        run("-m", tmp_path, "-d", "digits", "--blocks", 2, "--steps", 1)


FACTS = {
    "images": Facts(classes=3, channels=1, size=28),
    "points of a regression (surface:...)": Facts(inputs=2, outputs=1),
    "texts with classes": Facts(classes=3, text=True),
    "text": Facts(text=True),
}


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_a_stream_of_as_many_blocks_as_asked_for(name: str) -> None:
    preset = PRESETS[name]
    for blocks in (None, 3):
        stream = as_stream(preset(name, FACTS[preset.needs], blocks))
        assert stream.depth == (blocks or preset.blocks)


def test_the_byte_tokenizer_needs_no_file_and_loses_nothing() -> None:
    tokenizer = byte_tokenizer()
    text = "Grüße, 世界!\n\t  two  spaces"
    ids = tokenizer(text)["input_ids"]
    assert len(ids) == len(text.encode())
    assert tokenizer.decode(ids) == text
