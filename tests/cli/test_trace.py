"""`everydepth trace` and `everydepth report`: from a model on disk to a page, and clear errors."""

from __future__ import annotations

import io
import json
import shlex
import sys
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from rich.console import Console
from tests.helpers.tokenizing import sentencepiece
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    ViTConfig,
    ViTForImageClassification,
    ViTModel,
)

from everydepth.architectures.residual_mlp import ResidualMLP, ResidualMLPConfig
from everydepth.cli import main as main_module
from everydepth.cli.loading import preprocessing_of
from everydepth.cli.showing import show, show_table, sparkline
from everydepth.cli.source import Source
from everydepth.data import Texts
from everydepth.errors import DataError, SettingError
from everydepth.results import Table
from everydepth.results.table import shown
from everydepth.runs import Run
from everydepth.tracing import Trace, trace

SIZES: dict[str, Any] = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
}
WORDS = ["[UNK]", "[PAD]", "once", "upon", "a", "time", "there", "was", "one", "good", "film"]


def vit(**changes: Any) -> ViTForImageClassification:
    settings = {"image_size": 8, "patch_size": 4, "num_channels": 1, "num_labels": 10, **SIZES}
    return ViTForImageClassification(ViTConfig(**{**settings, **changes}))


@pytest.fixture
def digits_model(tmp_path: Path) -> Path:
    vit().save_pretrained(tmp_path / "vit")
    return tmp_path / "vit"


@pytest.fixture
def language_model(tmp_path: Path) -> Path:
    folder = tmp_path / "llama"
    config = LlamaConfig(vocab_size=len(WORDS), max_position_embeddings=64, **SIZES)
    LlamaForCausalLM(config).save_pretrained(folder)
    _tokenizer().save_pretrained(folder)
    return folder


def _tokenizer() -> PreTrainedTokenizerFast:
    made = Tokenizer(WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    made.pre_tokenizer = Whitespace()  # pyright: ignore[reportAttributeAccessIssue]
    return PreTrainedTokenizerFast(
        tokenizer_object=made, unk_token="[UNK]", pad_token="[PAD]", eos_token="[PAD]"
    )


def everydepth(*words: str | Path) -> None:
    """The command as typed in a shell."""
    before, sys.argv = sys.argv, ["everydepth", *map(str, words)]
    try:
        main_module.main()
    except SystemExit as stop:
        if stop.code:
            raise
    finally:
        sys.argv = before


def test_a_model_is_traced_shown_and_reported(
    digits_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, page = tmp_path / "run", tmp_path / "page.html"
    chosen = ["--metrics", "accuracy, loss", "--max-samples", "40"]
    everydepth("trace", digits_model, "--data", "digits", "-o", run, *chosen)
    shown = capsys.readouterr().out
    assert "2 blocks, 40 samples, 3 metrics" in shown
    assert "depth accuracy loss (nat) parameters" in " ".join(shown.split())
    found = Trace.load(run / "trace")
    assert set(found) == {"accuracy", "loss", "parameters"}
    assert found.samples == 40
    config = Run.open(run).config
    assert config["command"].startswith("everydepth trace ")
    assert shlex.split(config["command"])[2] == str(digits_model)

    everydepth("report", f"mine={run}", "-o", page)
    assert "wrote" in capsys.readouterr().out
    content = page.read_text()
    assert ">mine</bdi>" in content
    assert f"everydepth report mine={run} -o {page}" in content


def test_the_trace_of_a_trained_run_joins_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run.create(tmp_path / "run", {"command": "everydepth train"})
    vit().save_pretrained(run.path / "model")
    for _ in range(2):  # a second trace replaces the first
        everydepth("trace", run.path, "--data", "digits", "--metrics", "loss", "--max-samples", "8")
    assert list(Trace.load(run.path / "trace")) == ["loss", "parameters"]
    assert f"everydepth report {run.path}" in capsys.readouterr().out.replace("\n", "")
    assert Run.open(run.path).config == {"command": "everydepth train"}


def test_a_language_model_also_says_what_each_depth_would_say(
    language_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "story.txt").write_text("once upon a time there was one good film " * 40)
    words = ["--data", tmp_path / "story.txt", "--max-length", "16", "--max-samples", "3"]
    more = ["--metrics", "perplexity", "--prompt", "once upon", "-o", tmp_path / "run"]
    everydepth("trace", language_model, *words, *more)
    found = Trace.load(tmp_path / "run" / "trace")
    assert found.samples == 3
    assert set(found) == {"perplexity", "token_grid", "text_at_depth", "parameters"}
    assert found.results["token_grid"].arrays["tokens"][:2].tolist() == ["once", "upon"]
    output = capsys.readouterr().out
    assert all(f"depth {depth}: once upon" in output for depth in range(1, found.depth + 1))


def test_the_vectors_of_an_encoder_without_a_head_are_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ViTModel(vit().config).save_pretrained(tmp_path / "encoder")
    words = ("trace", tmp_path / "encoder", "--data", "digits", "--max-samples", "8")
    everydepth(*words, "--task", "embedding", "-o", tmp_path / "run")
    found = Trace.load(tmp_path / "run" / "trace")
    assert found.about["task"] == "embedding"
    assert found["cos"].shape == (3, 3)


def test_a_taken_place_is_refused_before_the_work(
    digits_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit):
        everydepth("trace", digits_model, "--data", "digits", "-o", tmp_path)
    assert f"error: {tmp_path} is not an empty directory; give a new one" in capsys.readouterr().err


def test_a_trace_without_a_place_gets_a_new_one_each_time(
    digits_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        everydepth(
            "trace", digits_model, "--data", "digits", "--metrics", "loss", "--max-samples", "8"
        )
    assert sorted(p.name for p in (tmp_path / "runs").iterdir()) == ["trace-vit", "trace-vit-2"]


def test_two_runs_of_one_name_are_an_error_and_folders_are_told_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from everydepth.cli.report import _named  # pyright: ignore[reportPrivateUsage]

    for name in ("a/run", "b/run", "c=d"):
        (tmp_path / name).mkdir(parents=True)
    given = [str(tmp_path / name) for name in ("a/run", "b/run", "c=d")]
    assert list(_named(given)) == ["run", "run (2)", "c=d"]
    with pytest.raises(SystemExit):
        everydepth("report", "x=a", "x=b")
    assert "'x' names two runs" in capsys.readouterr().err


# -- models and data ------------------------------------------------------------------------------


def batches(data: str | Path, name: str | Path, model: Any, **settings: Any) -> Any:
    """The test split, as inputs of the model in the folder `name`."""
    source = Source(data=str(data), **settings)
    return source.batches(str(name), model, split="test", batch_size=32)


def test_images_are_brought_to_the_size_channels_and_scale_of_the_model(tmp_path: Path) -> None:
    model = vit(image_size=16, num_channels=3)
    model.save_pretrained(tmp_path)
    settings = {"image_mean": [0.5] * 3, "image_std": [0.25] * 3, "do_normalize": True}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings))
    (batch, *_) = batches("digits", tmp_path, model, max_samples=5)
    pixels = batch["pixel_values"]
    assert pixels.shape == (5, 3, 16, 16)
    assert float(pixels.min()) == pytest.approx(-2)  # (0 - 0.5) / 0.25
    (tmp_path / "preprocessor_config.json").unlink()
    (plain, *_) = batches("digits", tmp_path, model, max_samples=5)
    torch.testing.assert_close((plain["pixel_values"] - 0.5) / 0.25, pixels)


def test_points_and_texts_become_batches(tmp_path: Path) -> None:
    mlp = ResidualMLP(ResidualMLPConfig(num_hidden_layers=2, hidden_size=8))
    (batch, *_) = batches("surface:standing_wave_grid", "", mlp, max_samples=7)
    assert batch["inputs"].shape == (7, 2)
    (tmp_path / "a.txt").write_text("once upon a time")
    with pytest.raises(DataError, match=r"has no tokenizer"):
        batches(tmp_path / "a.txt", tmp_path, mlp)
    (tmp_path / "t.tsv").write_text("a\tb\n1\t2\n")
    with pytest.raises(DataError, match=r"a table with the columns a, b; give the one .* --text"):
        batches(tmp_path / "t.tsv", tmp_path, mlp)


def test_a_text_shorter_than_a_block_is_one_block(tmp_path: Path) -> None:
    sentencepiece().save_pretrained(str(tmp_path))
    (tmp_path / "a.txt").write_text("once upon a time")
    config = LlamaConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, vocab_size=400)
    (batch,) = batches(tmp_path / "a.txt", tmp_path, LlamaForCausalLM(config))
    assert batch["input_ids"].shape == (1, len(sentencepiece().tokenize("once upon a time")))


@pytest.mark.parametrize(
    ("head", "columns", "found"),
    [
        ("text,label", {}, ("good", None, "1")),
        ("label,sentence", {}, ("1", None, "good")),
        ("id,text,label,x", {}, ("1", None, "2")),
        ("premise,hypothesis,label", {}, ("good", "1", "2")),
        ("words", {}, ("good", None, None)),
        ("words,stars", {"text": "words", "label": "stars"}, ("good", None, "1")),
    ],
)
def test_the_columns_of_a_table_are_named_or_the_usual_ones(
    head: str, columns: dict[str, str], found: tuple[str, str | None, str | None], tmp_path: Path
) -> None:
    file = tmp_path / "table.csv"
    cells = ["good", "1", "2", "3"][: head.count(",") + 1]
    file.write_text(f"{head}\n{','.join(cells)}\n")
    texts = Source(data=str(file), **columns).read("train")
    assert isinstance(texts, Texts)
    text, pair, label = found
    assert texts.texts == (text,)
    assert texts.pairs == (None if pair is None else (pair,))
    assert texts.classes == (() if label is None else (label,))


def test_columns_that_cannot_be_told_or_do_not_exist_are_said(tmp_path: Path) -> None:
    file = tmp_path / "table.csv"
    file.write_text("a,b,c\n1,2,3\n")
    with pytest.raises(DataError, match=r"a table with the columns a, b, c; give the one with"):
        Source(data=str(file)).read("train")
    with pytest.raises(DataError, match=r"column 'd', but .*table\.csv has 'a', 'b', 'c'"):
        Source(data=str(file), text="d").read("train")
    with pytest.raises(SettingError, match="'digits' is not a table; leave out"):
        Source(data="digits", text="a").read("train")


def test_a_part_that_lacks_a_class_numbers_them_as_the_training_part(tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text("text,label\nx,bad\ny,fair\nz,good\n")
    (tmp_path / "test.csv").write_text("text,label\nx,good\n")
    found = Source(data=str(tmp_path)).read("test")
    assert (found.classes, found.labels.tolist()) == (("bad", "fair", "good"), [2])


def test_columns_of_a_parquet_file_are_chosen_as_those_of_a_csv_file(tmp_path: Path) -> None:
    columns = {"title": ["a", "b"], "review": ["good", "bad"], "stars": ["5", "1"]}
    for split, rows in (("train", [0, 1]), ("test", [0])):
        part = {name: [cells[row] for row in rows] for name, cells in columns.items()}
        datasets.Dataset.from_dict(part).to_parquet(str(tmp_path / f"{split}.parquet"))
    found = Source(data=str(tmp_path), text="review", label="stars").read("test")
    assert isinstance(found, Texts)
    assert (found.texts, found.pairs, found.classes) == (("good",), None, ("1", "5"))
    assert found.labels is not None
    assert found.labels.tolist() == [1]
    with pytest.raises(DataError, match="a table with the columns title, review, stars; give"):
        Source(data=str(tmp_path)).read("test")


def test_parts_in_parquet_share_the_classes_of_the_training_part(tmp_path: Path) -> None:
    for split, labels in (("train", ["bad", "fair", "good"]), ("test", ["good"])):
        part = {"text": ["x"] * len(labels), "label": labels}
        datasets.Dataset.from_dict(part).to_parquet(str(tmp_path / f"{split}.parquet"))
    found = Source(data=str(tmp_path)).read("test")
    assert isinstance(found, Texts)
    assert found.labels is not None
    assert (found.classes, found.labels.tolist()) == (("bad", "fair", "good"), [2])


# -- small parts ----------------------------------------------------------------------------------


def at_the_end(found: Trace) -> dict[str, float]:
    """Every curve's value at the last depth, if it has one."""
    last: dict[str, float] = {}
    for name, result in found.results.items():
        for series in result.series if result.kind in ("curve", "histogram") else ():
            title = name if series == result.series[0] else f"{name}.{series}"
            value = np.ma.asarray(result.arrays[series])[-1]
            if result.x(series)[-1] == found.depth and value is not np.ma.masked:
                last[title] = float(value)
    return last


@pytest.mark.parametrize("layers", [2, 40])
def test_the_table_fits_a_narrow_terminal_with_every_number_whole(layers: int) -> None:
    model = vit(num_hidden_layers=layers)
    random = torch.Generator().manual_seed(0)
    data = {
        "pixel_values": torch.randn(12, 1, 8, 8, generator=random),
        "labels": torch.arange(12) % 10,
    }
    found = trace(model, data, progress=False)
    console = Console(width=80, file=io.StringIO())
    show(found, console)
    every = console.file.getvalue().splitlines()
    assert max(map(len, every)) <= 80
    lines = [line for line in every[1:] if ": " not in line]  # neither title nor notes
    # Few depths are listed with as many measurements as fit; the others are summed up below.
    listed = [line.split() for line in lines if line.split()[0].isdigit()]
    assert [row[0] for row in listed] == (
        [str(k) for k in range(layers + 1)] if layers < 40 else []
    )
    table = found.table()
    in_full = len(listed[0]) if listed else 1
    assert [tuple(row) for row in listed] == [row[:in_full] for row in table.cells if listed]
    units = dict(zip(table.headings, table.units, strict=True))
    last = at_the_end(found)
    below = {n: v for n, v in last.items() if n not in table.headings[1:in_full]}
    ends = [line.split()[-1] for line in lines if any(block in line for block in "▁▂▃▄▅▆▇█")]
    whole = [end for end in ends if end[0] not in "▁▂▃▄▅▆▇█"]  # a long sparkline is folded
    assert whole == [shown(value, units.get(name, "")) for name, value in below.items()]


@pytest.mark.parametrize(
    ("values", "cells"),
    [
        ((1.5, 12.25), ("1.50", "12.25")),
        ((0.7, 0.0156), ("0.7000", "0.0156")),
        ((1.0, 1e-7), ("1", "1e-07")),  # equal decimals would show the second as nothing
        ((12345.6, 1.0), ("1.235e+04", "1")),
        ((1.0, 64.0), ("1", "64")),
        ((0.5, None, float("nan")), ("0.5000", "-", "-")),
        ((3, 2.5), ("3", "2.500")),
    ],
)
def test_numbers_of_a_column_have_equal_decimals(
    values: tuple[float, ...], cells: tuple[str, ...]
) -> None:
    table = Table(headings=("depth", "x"), rows=tuple(enumerate(values)))
    assert tuple(row[1] for row in table.cells) == cells


def test_rows_of_different_things_keep_their_own_decimals() -> None:
    mixed = Table(headings=("what", "value"), rows=(("depths", 0.0), ("share", 0.25)))
    assert mixed.cells == (("depths", "0"), ("share", "0.25"))


def test_a_table_of_words_that_is_too_wide_is_shown_row_by_row() -> None:
    says = "Trained by LPA, a network's error decreases with every block it has, and so on."
    table = Table(
        title="Claims",
        headings=("claim", "mean", "note", "says"),
        rows=(("monotone", 0.5, "", says),),
        notes=("one claim",),
    )
    console = Console(width=40, file=io.StringIO())
    show_table(table, console)
    (title, name, numbers, *more) = console.file.getvalue().splitlines()
    assert [line.rstrip() for line in (title, name, numbers)] == [
        "Claims",
        "monotone",
        "  mean: 0.5",
    ]
    assert " ".join(" ".join(more).split()) == f"says: {says} one claim"
    assert max(map(len, more)) <= 40


def test_a_sparkline_has_a_block_per_depth() -> None:
    assert sparkline([0.0, 1.0, None, 0.5, float("nan"), 1.0]) == "▁█ ▅ █"
    assert sparkline([2.0, 2.0]) == "▁▁"
    assert sparkline([]) == ""


def test_a_damaged_preprocessing_is_named(tmp_path: Path) -> None:
    (tmp_path / "preprocessor_config.json").write_text('{"image_mean": [0.5')
    with pytest.raises(DataError, match=r"preprocessor_config.json is not JSON"):
        preprocessing_of(str(tmp_path))
