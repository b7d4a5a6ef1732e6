"""Whatever is wrong with an argument, a batch, a path or a file is said by an error of ours."""

from __future__ import annotations

import copy
import json
import os
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from PIL import Image
from tests.fuzz.values import Letters, writing
from tests.helpers.tokenizing import byte_level
from torch import Tensor
from torch.optim import AdamW

import everydepth as ed
import everydepth.data
from everydepth.ablations import folds, label_prompts
from everydepth.ablations.taps import tapped
from everydepth.errors import (
    BatchError,
    DataError,
    DepthError,
    EveryDepthError,
    ExportError,
    LabelError,
    NonFiniteError,
    PolicyError,
    RunError,
    SettingError,
    UnsupportedModelError,
)
from everydepth.exits.load import load_tokenizer
from everydepth.files import explained, parse_json
from everydepth.growth import score
from everydepth.results import curve
from everydepth.results import rows as table_rows
from everydepth.serving import Price, Recipe
from everydepth.stream import chosen_depths
from everydepth.tracing import BatchMetric

QUIET: dict[str, Any] = {"progress": False}
LONG = "x" * 300
DEEP = "[" * 100_000 + "]" * 100_000
UNEQUAL = {"a": np.zeros(1), "b": np.zeros(2)}
IGNORED = torch.full((12,), -100)
IMAGES = np.zeros((4, 1, 8, 8), dtype=np.float32)


@pytest.fixture(autouse=True)
def _untyped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As outside of the tests, where no type is checked before the function is called."""
    monkeypatch.setattr("jaxtyping.config.jaxtyping_disable", True)
    monkeypatch.chdir(tmp_path)
    Path("file").write_text(DEEP)
    Path("folder").mkdir()
    for name in ("config.json", "measured.json"):
        Path("folder", name).write_text(DEEP)


@pytest.fixture(scope="module")
def model() -> hf.PreTrainedModel:
    torch.manual_seed(0)
    config = hf.ViTConfig(
        image_size=8,
        patch_size=4,
        num_channels=1,
        num_labels=3,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=16,
    )
    return hf.ViTForImageClassification(config).eval()


def rows(**more: Any) -> dict[str, Any]:
    return {"pixel_values": torch.zeros(12, 1, 8, 8), "labels": torch.arange(12) % 3, **more}


def measured(model: Any) -> ed.Results:
    return ed.trace(model, rows(), ["loss"], **QUIET)


def fit(model: Any, batch: Any = None, **settings: Any) -> Any:
    return ed.fit(ed.EveryDepth(model), [batch or rows()], steps=1, **settings, **QUIET)


def writer(_: Any) -> hf.PreTrainedModel:
    sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2}
    config = hf.LlamaConfig(
        vocab_size=20, num_attention_heads=2, num_key_value_heads=2, pad_token_id=0, **sizes
    )
    return hf.LlamaForCausalLM(config).eval()


def trimmed(_: Any) -> Any:
    mask = torch.ones(2, 3, dtype=torch.long)
    batch: dict[str, Any] = {"input_ids": np.ones((2, 3)), "attention_mask": mask}
    return ed.data.trim_padding(batch)


def headless(model: Any) -> Any:
    changed = copy.deepcopy(model)
    changed.classifier.to("meta")
    return changed


def broken(model: Any) -> Any:
    changed = copy.deepcopy(model)
    changed.classifier.weight.data.fill_(torch.nan)
    return changed


def ids() -> dict[str, Tensor]:
    tokens = torch.ones(2, 5, dtype=torch.int64)
    return {"input_ids": tokens, "labels": tokens}


COMPLEX = torch.ones(1, 3, dtype=torch.complex64)
Case = tuple[Callable[[Any], Any], type[EveryDepthError], str]
CASES: dict[str, Case] = {
    # what the fuzzer found
    "growing with an optimizer of another model": (
        lambda m: ed.grow(m, rows(), rows(), optimizer=AdamW(writer(m).parameters()), **QUIET),
        SettingError,
        "21 of the optimizer's 21 parameters do not belong to the network",
    ),
    "tokens without rows": (
        lambda m: ed.ablate(writer(m), [(torch.ones(5).long(), torch.ones(5).long())], **QUIET),
        BatchError,
        r"tokens have shape \(5,\); pass \(rows, length\)",
    ),
    "a batch whose keys have no order": (
        lambda m: ed.as_stream(m).observe({1: 2, "a": 3}),  # type: ignore[dict-item]
        BatchError,
        r"the batch has keys \['1', 'a'\], but ViTForImageClassification needs 'pixel_values'",
    ),
    "a tokenizer that is none": (
        lambda m: ed.as_stream(m, tokenizer=3),
        SettingError,
        "tokenizer=3; pass the tokenizer itself",
    ),
    "a score on ignored labels": (
        lambda m: score(m, rows(), test=rows(labels=IGNORED), **QUIET),
        LabelError,
        "the data has no labels: all are -100",
    ),
    "a line search on ignored labels": (
        lambda m: ed.growth.jumpboard(
            m, rows(labels=IGNORED), scored=score(m, rows(), **QUIET), **QUIET
        ),
        LabelError,
        "the data has no labels: all are -100",
    ),
    "images that are None": (
        lambda m: ed.data.Images(None, None, ()),  # type: ignore[arg-type]
        SettingError,
        r"Images\(pixel_values=None\); use UInt8",
    ),
    "texts that are None": (
        lambda m: ed.data.Texts(None, labels=torch.tensor([0])),  # type: ignore[arg-type]
        SettingError,
        r"Texts\(texts=None\); use several, each a string",
    ),
    "a column of one number": (
        lambda m: ed.data.Table({"a": 1}),  # type: ignore[dict-item]
        DataError,
        "column 'a' is 1; give its texts as a tuple",
    ),
    "columns that are None": (
        lambda m: ed.data.Table(None),  # type: ignore[arg-type]
        SettingError,
        r"Table\(columns=None\); use Mapping",
    ),
    "rows of another width than the headings": (
        lambda m: ed.results.Table(headings=("a",), rows=((1, 2),)),
        SettingError,
        r"row \(1, 2\), but the table has 1 headings; give one for each",
    ),
    "headings that are numbers": (
        lambda m: ed.results.Table(headings=range(1, 3), rows=()),  # type: ignore[arg-type]
        SettingError,
        "1 among headings, units and notes; use strings",
    ),
    "units of another width than the headings": (
        lambda m: ed.results.Table(headings=("a",), rows=(), units=("s", "s")),
        SettingError,
        r"units \('s', 's'\), but the table has 1 headings; give one for each",
    ),
    "a damaged tokenizer": (
        lambda m: (
            byte_level().save_pretrained("words"),
            Path("words/tokenizer.json").write_text(
                Path("words/tokenizer.json").read_text().replace("ByteLevel", "Else")
            ),
            load_tokenizer("words"),
        ),
        DataError,
        "words is not a tokenizer .*; save the tokenizer again with save_pretrained",
    ),
    "a grid without tokens": (
        lambda m: curve("x", [0], [[1]], kind="grid"),  # type: ignore[arg-type]
        SettingError,
        "x has no array 'text', which a grid needs",
    ),
    "a family without columns": (
        lambda m: curve("x", [0, 1], [[1, 2, 3]] * 2, kind="family"),
        SettingError,
        r"'value' is of shape \(2, 3\), but a family needs \(2, 2\) here",
    ),
    "a curve of tables": (
        lambda m: curve("x", [0, 1], [[1, 2, 3]] * 2),
        SettingError,
        r"'value' is of shape \(2, 3\), but a curve needs \(2,\) here",
    ),
    "columns of different lengths": (
        lambda m: replace(table_rows("x", {"a": [1], "b": [1]}), arrays=UNEQUAL),
        SettingError,
        r"'b' is of shape \(2,\), but a rows needs \(1,\) here",
    ),
    "a scalar of no number": (
        lambda m: ed.results.Result(
            name="x", kind="scalar", series=("a",), arrays={"a": np.zeros(0)}
        ),
        SettingError,
        "x: 'a' holds no number; give one",
    ),
    "a run's line that is not JSON": (
        lambda m: ed.Run.create("run", {}).log({"a": object()}),
        RunError,
        "a line of metrics must be JSON .*object",
    ),
    "a run's results that are not JSON": (
        lambda m: ed.Run.create("run", {}).write_results({"a": object()}),
        RunError,
        "the results of a run must be JSON .*object",
    ),
    "another config that is not JSON": (
        lambda m: ed.Run.create("run", {}).check_config({"a": object()}),
        RunError,
        "the config of a run must be JSON .*object",
    ),
    "a run at no path": (
        lambda m: ed.Run.check_free(None),  # type: ignore[arg-type]
        SettingError,
        r"Run.check_free\(path=None\); use a string or a path",
    ),
    "weights of a depth below none": (
        lambda m: ed.lpa().weights(0, 10, -1),
        SettingError,
        r"Objective.moment\(depth=-1\); use a whole number of 0 or more",
    ),
    "an objective for a depth below none": (
        lambda m: ed.ladder().check(-2),
        SettingError,
        r"Objective.check\(depth=-2\); use a whole number of 0 or more",
    ),
    "labels of no batch": (
        lambda m: ed.EveryDepth(m, ed.lpa()).check_labels(None),  # type: ignore[arg-type]
        SettingError,
        r"EveryDepth.check_labels\(batch=None\); use Mapping",
    ),
    "no list of depths": (
        lambda m: ed.EveryDepth(m, ed.lpa())(**rows(), depths=None),
        DepthError,
        "depths=None; give several, each 0 to 2",
    ),
    "rows of a cursor beyond it": (
        lambda m: ed.as_stream(m).start(rows()).select(torch.tensor([99])),
        BatchError,
        "the cursor has rows 0 to 11; use these",
    ),
    "rows of a cursor that are floats": (
        lambda m: ed.as_stream(m).start(rows()).select(torch.zeros(2)),
        BatchError,
        r"rows are float32 of shape \(2,\); pass a vector of integers",
    ),
    "results whose arrays have a malformed header": (
        lambda m: malformed(measured(m).save("measured")),
        DataError,
        "the results in measured are incomplete",
    ),
    "a damaged cell of a sweep": (
        lambda m: damaged_cell({"cell": {"a": 1}, "result": None}),
        RunError,
        "does not hold the result of a cell; delete it to do the cell again",
    ),
    "a cell of a sweep with another figure": (
        lambda m: damaged_cell({"cell": {"a": 1}, "result": {"b": 2}, "checksum": "0"}),
        RunError,
        "is damaged: its checksum differs; delete it to do the cell again",
    ),
    "the seconds of a provenance in words": (
        lambda m: ed.results.provenance(seconds="1"),
        SettingError,
        "seconds='1'",
    ),
    "a cell of a sweep whose settings are gone": (
        lambda m: damaged_cell({"cfll": {"a": 1}, "result": {"b": 2}, "checksum": "0"}),
        RunError,
        "is damaged: its checksum differs; delete it to do the cell again",
    ),
    "a curve without series": (
        lambda m: ed.results.curve("c", [1, 2], {}, kind="histogram"),
        DataError,
        "c: y is an empty mapping; give the values of one series or more",
    ),
    "a cell of a sweep that is a list": (
        lambda m: damaged_cell([]),
        RunError,
        "does not hold the result of a cell; delete it to do the cell again",
    ),
    "an objective without parts": (
        lambda m: ed.Objective.from_json({"name": "x", "parts": None}),
        SettingError,
        "is no objective; it has a name, and a list as parts",
    ),
    "an objective without a name": (
        lambda m: ed.Objective.from_json({"parts": []}),
        SettingError,
        "is no objective; it has a name, and a list as parts",
    ),
    "an objective with a part that is none": (
        lambda m: ed.Objective.from_json({"name": "x", "parts": [None]}),
        SettingError,
        "None is no part of an objective; use a name, or its JSON",
    ),
    "a policy of any model": (
        lambda m: ed.Patience(threshold=1, model=True),  # type: ignore[arg-type]
        SettingError,
        r"Patience\(model=True\); use Identity or None",
    ),
    "thresholds for a number": (
        lambda m: ed.Confidence(threshold=0.5).for_stream(1.5),  # type: ignore[arg-type]
        SettingError,
        r"Policy.for_stream\(stream=1.5\); use ResidualStream",
    ),
    "weights at a step that is none": (
        lambda m: ed.lpa().weights("1", 10, 2),  # type: ignore[arg-type]
        SettingError,
        r"Objective.moment\(step='1'\); use a whole number",
    ),
    "a batch of words": (
        lambda m: ed.data.load_digits("test").batch(["a"]),  # type: ignore[arg-type]
        SettingError,
        r"Rows.batch\(indices=\['a'\]\); use several",
    ),
    "images normalized by a number": (
        lambda m: ed.data.load_digits("test").normalized(0.5, [0.5]),
        SettingError,
        r"Images.normalized\(mean=0.5\); use several",
    ),
    "rows of a cursor by name": (
        lambda m: ed.as_stream(m).start(rows()).select("a"),  # type: ignore[arg-type]
        SettingError,
        r"Cursor.select\(rows='a'\); use Tensor",
    ),
    "a network saved in a number": (
        lambda m: ed.EveryDepth(m, ed.lpa()).save_pretrained(0.5),  # type: ignore[arg-type]
        SettingError,
        r"EveryDepth.save_pretrained\(directory=0.5\); use a string or a path",
    ),
    "a set of labels": (
        lambda m: ed.data.flip_labels(set(), 0.1),  # type: ignore[arg-type]
        SettingError,
        r"flip_labels\(labels=set\(\)\); use several, each a whole number or Tensor",
    ),
    "a set of tokens": (
        lambda m: ed.data.token_blocks(set(), 4),  # type: ignore[arg-type]
        SettingError,
        r"token_blocks\(ids=set\(\)\); use",
    ),
    "folds of a damaged label": (
        lambda m: folds([10**15, 0, 0, 0, 0, 0], 2),
        DataError,
        "class 1000000000000000 has 1 sample",
    ),
    "folds of no rows": (
        lambda m: ed.audit((), None, folds=[]),
        SettingError,
        "folds= is empty; give the fold of every row",
    ),
    "one number as the labels of texts": (
        lambda m: label_prompts(["a"], torch.tensor(1), ["x"], Letters(), max_length=8),
        BatchError,
        r"labels is int64 of shape \(\); pass a vector of integers",
    ),
    "tokens without storage": (
        lambda m: tapped(
            ed.as_stream(writer(m)), {**ids(), "input_ids": ids()["labels"].to("meta")}
        ),
        SettingError,
        r"tapped\(batch=.*\); use numbers, in memory",
    ),
    "a dry run in a folder with a long name": (
        lambda m: ed.sweep({"a": [1]}, lambda a: {"b": a}, run=LONG, dry_run=True),
        RunError,
        "the finished cells cannot be read: File name too long",
    ),
    "a class that is no policy": (
        lambda m: ed.calibrate(m, rows(), risk=0.2, policy=int, **QUIET),  # type: ignore[arg-type]
        SettingError,
        r"calibrate\(policy=<class 'int'>\); use a string or a class of Policy",
    ),
    "text without rows": (
        lambda m: ed.fit(writer(m), torch.ones(4, dtype=torch.bool), steps=1, **QUIET),
        EveryDepthError,
        r"shape \(4,\)",
    ),
    "classes for a model without a head": (
        lambda m: ed.trace(m.vit, rows(), ["accuracy"], **QUIET),
        LabelError,
        r'If ViTModel has no head, .*as_stream\(model, task="embedding"\)',
    ),
    "complex prompt": (
        lambda m: ed.generate(writer(m), COMPLEX),
        BatchError,
        "complex64; pass whole numbers",
    ),
    "complex draft words": (
        lambda m: ed.generate(
            writer(m), torch.ones(1, 3).long(), draft_depth=1, draft_words=COMPLEX
        ),
        SettingError,
        "draft_words has 3 values of torch.complex64",
    ),
    "text labels of a probe": (
        lambda m: ed.linear_probe(m, rows(labels=["a"] * 12), rows(), **QUIET),
        LabelError,
        "labels",
    ),
    "bytes to write on": (
        lambda m: ed.text_at_depth(writer(m), Letters(), b"x"),
        BatchError,
        "pass a string or a list of strings",
    ),
    "held-out rows that are ignored": (
        lambda m: ed.growth.paired(m, m, rows(labels=torch.full((12,), -100))),
        LabelError,
        "the data has no labels",
    ),
    "compile": (
        lambda m: fit(m, compile="x"),
        SettingError,
        "compile='x'; use True or one of .*inductor",
    ),
    "no labels of a probe": (
        lambda m: ed.linear_probe(m, rows(labels=None), rows(), **QUIET),
        LabelError,
        "a linear probe needs labels",
    ),
    "ignored labels of a probe": (
        lambda m: ed.linear_probe(m, rows(labels=torch.full((12,), -100)), rows(), **QUIET),
        LabelError,
        "all 12 labels are -100 .*; pass classes",
    ),
    "metrics without axes": (
        lambda m: ed.trace(m, rows(), np.array(3), **QUIET),  # type: ignore[arg-type]
        SettingError,
        r"trace\(metrics=array\(3\)\); use a string or Metric or Iterable",
    ),
    "data without values": (
        lambda m: ed.fit(writer(m), torch.zeros(3, device="meta"), steps=1, **QUIET),
        BatchError,
        r"a tensor of shape \(3,\) is on the 'meta' device",
    ),
    "export, null": (
        lambda m: ed.export(m, "a\0b", depth=1),
        ExportError,
        "cannot be written: a path cannot hold a null character",
    ),
    "bytes to tokenize": (
        lambda m: ed.data.tokenized(b"x", Letters(), 4),  # type: ignore[arg-type]
        SettingError,
        r"tokenized\(data=b'x'\); use Texts or several, each a string",
    ),
    "a grid of nothing": (
        lambda m: ed.sweep({}, lambda a: {"b": a}, **QUIET),
        SettingError,
        "the grid has no cells; give every name at least one value",
    ),
    # what a stranger tried
    "a flag for a number": (
        lambda m: ed.trace(m, rows(), ["loss"], batch_size=True, **QUIET),
        SettingError,
        r"trace\(batch_size=True\); use a whole number",
    ),
    "a criterion by name": (
        lambda m: ed.EveryDepth(m, criterion="mse"),  # type: ignore[arg-type]
        SettingError,
        r"EveryDepth\(criterion='mse'\); use a function",
    ),
    "an argument that is none": (
        lambda m: ed.profile(m, rows(), repeats=1, **QUIET).choose(latency=3),  # type: ignore[call-arg]
        SettingError,
        "choose has no argument 'latency'. Did you mean 'latency_ms'",
    ),
    "an option of another reader": (
        lambda m: ed.data.load("digits", foo=1),
        SettingError,
        "load_digits has no argument 'foo'. It has split, seed, fractions",
    ),
    "an option of a reader of folders": (
        lambda m: (pictures(), ed.data.load("pictures", size=8)),
        SettingError,
        "load_files has no argument 'size'. It has path, split, text, pair, label, classes",
    ),
    "a label that is no column": (
        lambda m: (pictures(), ed.data.load("pictures", label=3)),
        SettingError,
        r"load_files\(label=3\); use a string",
    ),
    "an option of a reader of archives": (
        lambda m: (
            Path("20newsgroups").mkdir(),
            Path("20newsgroups/20news-bydate.tar").touch(),
            ed.data.load("20newsgroups", root=".", foo=1),
        ),
        SettingError,
        "load_newsgroups has no argument 'foo'",
    ),
    "an argument that is given twice": (
        lambda m: (Path("t.txt").write_text("a"), ed.data.load("t.txt", path="b.txt")),
        SettingError,
        r"load_text got 'path' twice, also as 'b.txt'; leave it out",
    ),
    "rows that are none": (
        lambda m: ed.data.batches([1, 2], 2),  # type: ignore[arg-type]
        SettingError,
        r"batches\(data=\[1, 2\]\); use Rows",
    ),
    "padding that is no token": (
        lambda m: ed.generate(writer(m), [[3]], max_new_tokens=1, pad_token_id=-5),
        SettingError,
        "pad_token_id=-5, but LlamaForCausalLM knows 20 tokens; use 0 to 19",
    ),
    "an end that is no token": (
        lambda m: ed.generate(writer(m), [[3]], max_new_tokens=1, eos_token_id=[2, 99]),
        SettingError,
        "eos_token_id=99, but LlamaForCausalLM knows 20 tokens; use 0 to 19",
    ),
    "an end that is a flag": (
        lambda m: ed.generate(writer(m), [[3]], max_new_tokens=1, eos_token_id=True),
        SettingError,
        "eos_token_id=True; pass the number of a token",
    ),
    "a prompt of flags": (
        lambda m: ed.generate(writer(m), torch.ones(1, 3, dtype=torch.bool)),
        BatchError,
        "type torch.bool; pass whole numbers",
    ),
    "an empty stop": (
        lambda m: ed.generate(writer(m), "ab", tokenizer=Letters(), stop=["x", ""]),
        SettingError,
        "every text contains the empty string",
    ),
    "an option without a depth": (
        lambda m: (m.save_pretrained("m"), ed.load("m", dtype="float99")),
        SettingError,
        "dtype was given without a depth",
    ),
    "no depth to leave at": (
        lambda m: ed.calibrate(m, rows(), risk=0.3, depths=[], **QUIET),
        SettingError,
        "depths is empty; name at least one",
    ),
    "a mask of other numbers": (
        lambda m: ed.as_stream(writing().model).observe(
            {"input_ids": torch.ones(2, 4).long(), "attention_mask": torch.full((2, 4), 0.5)}
        ),
        BatchError,
        "attention_mask holds 0.5; use 1 for a token, 0 for padding",
    ),
    "a batch that is a list": (
        lambda m: ed.as_stream(m).observe([1, 2]),  # type: ignore[arg-type]
        BatchError,
        "a batch is list; pass a mapping, or one tensor",
    ),
    "a head without values": (
        lambda m: ed.trace(headless(m), rows(), ["loss"], **QUIET),
        UnsupportedModelError,
        "classifier.weight of ViTForImageClassification is on the 'meta' device",
    ),
    "NaN to grow": (
        lambda m: ed.insert(broken(m), 1),
        NonFiniteError,
        "ViTForImageClassification predicts NaN or infinity even on numbers made up",
    ),
    "arrays to trim": (trimmed, BatchError, "input_ids is a ndarray; pass a tensor"),
    "training where nothing is learned": (
        lambda m: torch.inference_mode()(fit)(m),
        SettingError,
        r"gradients are needed, but torch.inference_mode\(\) is on",
    ),
    "gradients where there are none": (
        lambda m: torch.inference_mode()(ed.growth.score)(m, rows(), **QUIET),
        SettingError,
        r"gradients are needed, but torch.inference_mode\(\) is on",
    ),
    "folds of negative labels": (
        lambda m: folds([-1, 0, 1], 2),
        DataError,
        "label -1; use 0 or more, one label for each row",
    ),
    "an accuracy for no depth": (
        lambda m: ed.tracing.effective_depth(np.zeros(0), 0.1),
        SettingError,
        r"accuracy has shape \(0,\); give one number for each depth",
    ),
    "text as accuracies": (
        lambda m: ed.tracing.effective_depth(np.array(["a"]), 0.1),
        SettingError,
        r"effective_depth\(accuracy=array\(\['a'\].*; use numbers, in memory",
    ),
    "an encoder without a tokenizer": (
        lambda m: (m.save_pretrained("m"), ed.tracing.sentence_encoder("m")),
        DataError,
        "no tokenizer in m; save the encoder's there",
    ),
    "labels that are shifted already": (
        lambda m: ed.trace(
            writer(m),
            {"input_ids": (i := torch.arange(1, 20)[None])[:, :-1], "labels": i[:, 1:]},
            ["loss"],
            **QUIET,
        ),
        LabelError,
        r"labels are input_ids shifted by one, .*\(labels = input_ids\)",
    ),
    # settings: types, ranges, finiteness
    "a size below zero": (
        lambda m: ed.growth.scaling.shape(-7e9),
        SettingError,
        r"shape\(parameters=-7000000000.0\); use a number above 0",
    ),
    "a schedule that ends below zero": (
        lambda m: ed.training.Cosine(final=-1.0),
        SettingError,
        "final=-1.0; use a number of 0 or more",
    ),
    "a warmup before nothing": (
        lambda m: ed.training.Warmup(steps=3, after="x"),
        SettingError,
        "schedule='x'; use 'constant'",
    ),
    "a price in words": (
        lambda m: Price(call="cheap", token=0.1, readout=0.1),  # type: ignore[arg-type]
        SettingError,
        r"Price\(call='cheap'\); use a number",
    ),
    "rounds": (
        lambda m: ed.grow(m, rows(), rows(), rounds=-1, **QUIET),
        SettingError,
        "rounds=-1; use a whole number of 0 or more",
    ),
    "save_every": (
        lambda m: fit(m, run="run", save_every=0),
        SettingError,
        "save_every=0; use a whole number of 1 or more",
    ),
    "a rate beyond all tensors": (
        lambda m: fit(m, lr=1e300),
        SettingError,
        r"lr=1e\+300; use a number above 0, up to 1e\+30",
    ),
    "huge": (lambda m: fit(m, lr=10**400), SettingError, "lr=1000.*; use a number above 0"),
    "seed": (lambda m: fit(m, seed=10**30), SettingError, "seed=1000.*; use a whole number"),
    "class weights": (
        lambda m: ed.EveryDepth(m, class_weights=[1.0, -1.0, 1.0]),
        SettingError,
        r"class_weights are \[1.0, -1.0, 1.0\]; use numbers of 0 or more",
    ),
    "class weights, NaN": (
        lambda m: ed.EveryDepth(m, class_weights=[1.0, float("nan"), 1.0]),
        SettingError,
        "class_weights are .*nan.*; use numbers of 0 or more",
    ),
    "patience": (
        lambda m: ed.Patience(threshold=1.5),
        SettingError,
        "Patience with threshold 1.5; use a whole number of 1 or more",
    ),
    "threshold": (
        lambda m: ed.Confidence(threshold="much"),  # type: ignore[arg-type]
        SettingError,
        "Confidence with threshold 'much'; use 0 to 1",
    ),
    "register": (
        lambda m: ed.register(type(m), 3),  # type: ignore[arg-type]
        SettingError,
        r"register\(factory=3\); use a function",
    ),
    "register, class": (
        lambda m: ed.register("x", ed.as_stream),  # type: ignore[arg-type]
        SettingError,
        r"register\(model_class='x'\); use a class of Module",
    ),
    "register_metric": (
        lambda m: ed.register_metric(3),  # type: ignore[type-var]
        SettingError,
        "3 is neither a BatchMetric nor a FeatureMetric",
    ),
    "metric": (lambda m: ed.trace(m, rows(), [3], **QUIET), SettingError, "there is no metric 3"),
    "metric without a name": (
        lambda m: ed.register_metric(BatchMetric),
        SettingError,
        r"BatchMetric has no name; add name = \"...\" to the class",
    ),
    "metric without a method": (
        lambda m: ed.register_metric(type("Own", (BatchMetric,), {"name": "own"})),
        SettingError,
        r"Own has no compute\(\); define it",
    ),
    "threshold, array": (
        lambda m: ed.Confidence(threshold=np.zeros(2)),  # type: ignore[arg-type]
        SettingError,
        r"Confidence with threshold array\(.*; use 0 to 1",
    ),
    "optimizer": (
        lambda m: fit(m, optimizer=None),
        SettingError,
        "optimizer=None; use one of adamw, adam, sgd, or an optimizer object",
    ),
    "tracker": (lambda m: fit(m, trackers=[1]), SettingError, "there is no tracker 1; cho"),
    "trackers": (lambda m: fit(m, trackers={1: None}), SettingError, "None}; use a name such as"),
    "seed below 0": (
        lambda m: ed.growth.paired(m, m, rows(), seed=-3),
        SettingError,
        r"paired\(seed=-3\); use a whole number of 0 or more",
    ),
    "confidence": (
        lambda m: ed.growth.paired(m, m, rows(), confidence=-1.0),
        SettingError,
        r"paired\(confidence=-1.0\); use a number above 0.5 and below 1",
    ),
    # what is not of the annotated type
    "objective": (
        lambda m: ed.EveryDepth(m, objective="lpa"),  # type: ignore[arg-type]
        SettingError,
        r"EveryDepth\(objective='lpa'\); use Objective",
    ),
    "weights": (
        lambda m: ed.weighted("1"),
        SettingError,
        "the weight of depth 0 is '1'; use a number of 0 or more",
    ),
    "results": (
        lambda m: ed.Results(results=False),  # type: ignore[arg-type]
        SettingError,
        r"Results\(results=False\); use Mapping",
    ),
    "policy, path": (
        lambda m: ed.evaluate(m, rows(), Path("policy.json"), **QUIET),  # type: ignore[arg-type]
        SettingError,
        r"evaluate\(policy=PosixPath\('policy.json'\)\); use Policy",
    ),
    "flipped": (
        lambda m: ed.memorization(m, rows(), flipped=[0.5], **QUIET),
        BatchError,
        "flipped is float32 .*; pass a vector of integers",
    ),
    "an array for a number": (
        lambda m: ed.data.token_blocks([1, 2, 3], np.array(2)),  # type: ignore[arg-type]
        SettingError,
        r"token_blocks\(length=array\(2\)\); use a whole number",
    ),
    "a tensor for a number": (
        lambda m: ed.data.flip_labels([0, 1], torch.tensor(1)),  # type: ignore[arg-type]
        SettingError,
        r"flip_labels\(fraction=tensor\(1\)\); use a number",
    ),
    "flipped, text": (
        lambda m: ed.memorization(m, rows(), flipped=np.array(["a"]), **QUIET),
        BatchError,
        r"flipped is array\(\['a'\].*, not numbers; pass a vector of integers",
    ),
    "no values": (
        lambda m: ed.profile(
            m, rows(pixel_values=torch.zeros(12, 1, 8, 8, device="meta")), **QUIET
        ),
        BatchError,
        r"a tensor of shape \(12, 1, 8, 8\) is on the 'meta' device",
    ),
    "no row": (
        lambda m: ed.as_stream(m).observe(torch.tensor(1.0)),
        BatchError,
        r"the batch is empty: 'pixel_values' has shape \(\); pass at least one row",
    ),
    "table, null": (
        lambda m: ed.data.load_columns("a\0b"),
        DataError,
        "the file cannot be read: a path cannot hold a null character",
    ),
    "encoder": (
        lambda m: ed.text_at_depth(writing().model, Letters(), ["a"], new_tokens=1, encoder=LONG),
        DataError,
        "the encoder cannot be read: .*too long",
    ),
    "tokens, float": (
        lambda m: ed.trace(writing().model, {"input_ids": torch.ones(2, 4)}, ["loss"], **QUIET),
        BatchError,
        "tokens are float32; pass integers",
    ),
    "device": (
        lambda m: ed.trace(m, rows(), ["loss"], device="warp9", **QUIET),
        SettingError,
        r"device 'warp9' cannot be used here \(Invalid device.*\); use one of cpu",
    ),
    "end, text": (
        lambda m: ed.generate(writing().model, [[3]], max_new_tokens=1, eos_token_id="</s>"),
        SettingError,
        "eos_token_id='</s>'; pass the number of a token",
    ),
    "device, meta": (
        lambda m: ed.trace(m, rows(), ["loss"], device="meta", **QUIET),
        SettingError,
        r"device 'meta' cannot be used here \(.*\); use one of cpu",
    ),
    "device of a server": (
        lambda m: (m.save_pretrained("m"), Recipe(model="m", device="x").network()),
        SettingError,
        r"device 'x' cannot be used here \(.*\); use one of cpu",
    ),
    "tokens, no axis": (
        lambda m: ed.data.token_blocks(torch.tensor(1), 4),
        DataError,
        r"ids have shape \(\) and type torch.int64 .*; give the tokens of one text after the other",
    ),
    "tokens, broken": (
        lambda m: ed.data.token_blocks([1.5, 2.5, 3.5], 2),
        DataError,
        r"ids have shape \(3,\) and type torch.float32 .* whole numbers in one row",
    ),
    # batches
    "meta": (
        lambda m: ed.trace(copy.deepcopy(m).to("meta"), rows(), ["loss"], **QUIET),
        UnsupportedModelError,
        "ViTForImageClassification is on the 'meta' device, where weights have no values; load",
    ),
    "meta, trained": (
        lambda m: fit(copy.deepcopy(m).to("meta")),
        UnsupportedModelError,
        "ViTForImageClassification is on the 'meta' device, where weights have no values; load",
    ),
    "label": (
        lambda m: ed.calibrate(
            m, {"pixel_values": rows()["pixel_values"], "label": [0] * 12}, risk=0.3
        ),
        LabelError,
        r"the batch has keys \['label', 'pixel_values'\]: rename 'label' to 'labels'",
    ),
    "mask, short": (
        lambda m: ed.as_stream(writing().model).observe(
            {"input_ids": torch.ones(2, 4).long(), "attention_mask": torch.ones(2, 3).long()}
        ),
        BatchError,
        r"attention_mask has shape \(2, 3\), input_ids \(2, 4\); give one value per token",
    ),
    "shares": (
        lambda m: fit(m, rows(labels=torch.randn(12, 3))),
        LabelError,
        r"labels of shape \(12, 3\) are taken as class probabilities, but one is negative, or",
    ),
    "shares, measured": (
        lambda m: ed.trace(m, rows(labels=torch.ones(12, 3)), ["loss"], **QUIET),
        LabelError,
        "a row does not sum to 1; normalize them",
    ),
    "risk, NaN": (
        lambda m: ed.calibrate(
            m, rows(), risk=0.3, risk_of=lambda z, labels: torch.full((len(z),), torch.nan), **QUIET
        ),
        SettingError,
        "risk_of returned shape .* return one number from 0 to 1",
    ),
    "numpy": (
        lambda m: ed.as_stream(m).observe({"pixel_values": IMAGES}),
        BatchError,
        r"pixel_values is ndarray; pass a tensor: torch.as_tensor\(pixel_values\)",
    ),
    "color": (
        lambda m: ed.trace(m, rows(pixel_values=torch.zeros(12, 3, 8, 8)), ["loss"], **QUIET),
        BatchError,
        r"cannot run on this batch \(pixel_values \(\d+, 3, 8, 8\) float32\): .*; check sizes",
    ),
    "labels (N, 1)": (
        lambda m: fit(m, rows(labels=torch.zeros(12, 1, dtype=torch.long))),
        LabelError,
        r"labels have shape \(12, 1\).*give one class per prediction",
    ),
    "labels, float": (
        lambda m: ed.audit(m, rows(labels=torch.zeros(12)), **QUIET),
        LabelError,
        "labels are float32, .*pass integers",
    ),
    "labels, too few": (
        lambda m: ed.ablate(m, rows(labels=torch.zeros(5, dtype=torch.long)), **QUIET),
        LabelError,
        r"labels have shape \(5,\), but the batch has 12 rows",
    ),
    "no mask": (
        lambda m: ed.data.trim_padding({"input_ids": torch.zeros(1, 2)}),
        BatchError,
        "no attention_mask in a batch of input_ids; use Tokens",
    ),
    "color, held out": (
        lambda m: ed.growth.paired(m, m, rows(pixel_values=torch.zeros(12, 3, 8, 8))),
        BatchError,
        "cannot run on this batch",
    ),
    "budget": (
        lambda m: ed.profile(m, rows(), repeats=1, **QUIET).choose(max_drop=float("nan")),
        SettingError,
        r"choose\(max_drop=nan\); use a number",
    ),
    "budget, text": (
        lambda m: ed.profile(m, rows(), repeats=1, **QUIET).choose(latency_ms="x"),  # type: ignore[arg-type]
        SettingError,
        r"choose\(latency_ms='x'\); use a number",
    ),
    # paths
    "run": (lambda m: fit(m, run=LONG), RunError, "too long .*; use a shorter name"),
    "run, null": (
        lambda m: ed.Run.create("a\0b", {}),
        RunError,
        "a path cannot hold a null character",
    ),
    "run below a file": (
        lambda m: ed.Run.create("file/run", {}),
        RunError,
        "could not be started in file/run: Not a directory; a file is in the way",
    ),
    "sweep": (
        lambda m: ed.sweep({"a": [1]}, lambda a: {"b": a}, run=LONG, **QUIET),
        RunError,
        "too long",
    ),
    "save": (lambda m: measured(m).save(LONG), DataError, "the results cannot be saved: .*too lo"),
    "save below a file": (
        lambda m: measured(m).save("file/x"),
        DataError,
        r"the results cannot be saved: Not a directory \(file/x\); a file is in the way",
    ),
    "load": (lambda m: ed.Results.load(LONG), DataError, "the results cannot be read: .*too long"),
    "model": (lambda m: ed.load(LONG), DataError, "the model cannot be read: .*too long"),
    "data": (lambda m: ed.data.load(LONG), DataError, "the data cannot be read: .*too long"),
    "a pipe": (lambda m: (os.mkfifo("p"), ed.data.load("p")), DataError, "'p' is no regular file"),
    "images": (lambda m: ed.data.load_images(LONG), DataError, "the images cannot be .*too long"),
    "no name": (
        lambda m: ed.report(measured(m), ""),
        DataError,
        r"the page cannot be written: Is a directory \(.\); a folder is in the way",
    ),
    "no batch": (
        lambda m: ed.choose_blocks(m, torch.ones(4) > 0, keep=1, by="loss", **QUIET),
        BatchError,
        "cannot run on this batch",
    ),
    "page": (
        lambda m: ed.report(measured(m), "folder"),
        DataError,
        r"the page cannot be written: Is a directory \(folder\); a folder is in the way",
    ),
    "export": (lambda m: ed.export(m, LONG, depth=1), ExportError, "cannot be written: .*too lon"),
    "policy": (
        lambda m: ed.Confidence(threshold=0.5).save("nowhere/policy.json"),
        PolicyError,
        r"cannot be saved: No such file .*\(nowhere/policy.json\); it was moved, deleted or nev",
    ),
    "policy, in the place of a pipe": (
        lambda m: (os.mkfifo("p"), ed.Confidence(threshold=0.5).save("p")),
        PolicyError,
        r"cannot be saved: it is a device, a pipe or a socket, which a file would replace \(p\)",
    ),
    "a page in the place of a pipe": (
        lambda m: (os.mkfifo("p"), ed.report(measured(m), "p")),
        DataError,
        r"cannot be written: it is a device, a pipe or a socket, .* \(p\); check the path",
    ),
    # files
    "deep policy": (lambda m: ed.Policy.load("file"), PolicyError, "not a policy .*recursion"),
    "deep model": (lambda m: ed.load("folder"), DataError, "config.json is JSON nested too deep"),
    "deep results": (lambda m: ed.Results.load("folder"), DataError, "measured.json is JSON nest"),
    "deep run": (lambda m: ed.Run.open("folder"), RunError, "config.json is JSON nested too deep"),
    "config of wrong types": (lambda m: wrong_config(m), DataError, "saved cannot be.*num_ch"),
    "deep table": (lambda m: deep_table(), DataError, "table.json is JSON nested too deep"),
}


def pictures() -> None:
    for name in ("a", "b"):
        Path("pictures", name).mkdir(parents=True)
        Image.new("L", (8, 8)).save(f"pictures/{name}/0.png")


def wrong_config(model: Any) -> Any:
    model.save_pretrained("saved")
    file = Path("saved/config.json")
    file.write_text(file.read_text().replace('"num_channels": 1', '"num_channels": []'))
    return ed.load("saved")


def malformed(folder: Path) -> Any:
    (file,) = folder.glob("*.npz")
    with zipfile.ZipFile(file) as packed:
        members = {name: packed.read(name) for name in packed.namelist()}
    with zipfile.ZipFile(file, "w") as packed:
        for name, content in members.items():
            packed.writestr(name, content.replace(b"(", b"[", 1))
    return ed.Results.load(folder)


def damaged_cell(content: Any) -> Any:
    def sweep() -> Any:
        return ed.sweep({"a": [1]}, lambda a: {"b": a}, run="swept", **QUIET)

    sweep()
    (file,) = Path("swept/cells").glob("*.json")
    file.write_text(json.dumps(content))
    return sweep()


def deep_table() -> Any:
    Path("table.json").write_text(DEEP)
    return ed.data.load("table.json")


@pytest.mark.parametrize("name", CASES)
def test_what_cannot_work_is_refused_in_our_words(name: str, model: hf.PreTrainedModel) -> None:
    call, error, words = CASES[name]
    with pytest.raises(error, match=words):
        call(model)


def test_class_weights_may_leave_a_class_out(model: hf.PreTrainedModel) -> None:
    net = ed.EveryDepth(model, class_weights=[1.0, 0.0, 2.0])
    loss: Tensor = net(**rows()).loss
    assert loss.isfinite()


def test_only_what_the_system_refuses_is_explained() -> None:
    with pytest.raises(ValueError, match=r"^of another kind$"), explained("it failed"):
        raise ValueError("of another kind")
    with pytest.raises(DepthOnly, match=r"^as it is$"), explained("it failed"):
        raise DepthOnly("as it is")
    with (
        pytest.raises(RunError, match=r"it failed: Permission.*use a path"),
        explained("it failed"),
    ):
        raise PermissionError(13, "Permission denied")
    with pytest.raises(RunError, match="it failed: it does not fit into"), explained("it failed"):
        raise MemoryError


class DepthOnly(EveryDepthError):
    """An error of ours, which says all there is to say."""


def test_json_that_is_cut_short_is_named() -> None:
    with pytest.raises(DataError, match=r"notes is not JSON \(.*\); it may be cut short: restore"):
        parse_json('{"a": ', "notes", DataError)


def test_depths_and_layers_may_be_numbers_of_numpy(model: hf.PreTrainedModel) -> None:
    two: Any = np.int64(2)
    assert chosen_depths(ed.as_stream(model), two) == (2,)
    with ed.scaled_skip(model, layer=two, c=0.5) as skip:
        assert skip.layers == (2,)


def test_what_a_killed_process_left_of_a_file_goes_when_it_is_written_again() -> None:
    dead = 2**22 + 1  # no process has this number
    left = [Path(f".tmp-policy.json-{dead}"), Path(f".tmp-out-{dead}")]
    left[0].write_text("half")
    left[1].mkdir()
    other = Path(f".tmp-thesis-{dead}")
    other.write_text("of another program")
    ed.Confidence(threshold=0.5).save("policy.json")
    ed.export(writing().model, "out", depth=1)
    assert not any(entry.exists() for entry in left)
    assert other.exists()


def test_labels_are_checked_until_a_batch_was_right(model: hf.PreTrainedModel) -> None:
    net = ed.EveryDepth(model, ed.lpa())
    for _ in range(2):
        with pytest.raises(LabelError, match="no labels"):
            net(**rows(labels=IGNORED))
    assert net(**rows()).loss > 0
