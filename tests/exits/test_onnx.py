"""ONNX: one graph for every batch size and length, compared with the model before it counts."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
import transformers as hf
from tests.helpers.rows import more_rows
from tests.zoo import CLASSIFIERS, ENTRIES
from torch import Tensor

from everydepth.data import load_digits
from everydepth.errors import BatchError, ExportError, SettingError
from everydepth.exits import Confidence, Policy, export, predict
from everydepth.exits import onnx as onnx_of
from everydepth.exits.narrow import narrow
from everydepth.exits.policies import POLICIES
from everydepth.stream import as_stream, at_depth


def made(name: str) -> tuple[Any, dict[str, Tensor]]:
    """Of two blocks: each costs a second of tracing."""
    model, batch = ENTRIES[name].make()
    return at_depth(model, 2), batch


def run(folder: Path, batch: dict[str, Tensor]) -> list[Any]:
    session = onnxruntime.InferenceSession(str(folder / "model.onnx"))
    return session.run(None, {key: value.numpy() for key, value in batch.items()})


def test_a_text_model_at_half_depth_takes_any_batch_size_and_length(tmp_path: Path) -> None:
    model, batch = made("Bert-SequenceClassification")
    out = export(model, tmp_path / "out", depth=1, format="onnx", example=batch)
    for rows, tokens in ((1, 7), (5, 7), (4, 3), (2, 12)):
        ids = torch.randint(3, 60, (rows, tokens))
        feeds = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        with torch.no_grad():
            expected = as_stream(model).observe(feeds).logits(1)
        (found,) = run(out, feeds)
        torch.testing.assert_close(torch.tensor(found), expected, rtol=1e-5, atol=1e-5)
    card = (out / "README.md").read_text()
    assert 'session.run(None, {"input_ids": input_ids, "attention_mask": attention_mask})' in card


@pytest.mark.parametrize("every", [False, True])
def test_padding_on_the_left_changes_no_logits_of_a_causal_model(
    every: bool, tmp_path: Path
) -> None:
    model, batch = made("Llama-untied-CausalLM-left")
    ids = batch["input_ids"]
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    feeds = {"input_ids": ids, "attention_mask": mask}
    stream = as_stream(model)
    onnx_of.write(stream, feeds, tmp_path / "model.onnx", None, every=every)
    states = stream.observe(feeds)
    found = run(tmp_path, feeds)
    assert len(found) == (stream.depth if every else 1)
    for depth, logits in enumerate(reversed(found)):
        expected = states.logits(stream.depth - depth)[mask.bool()]
        torch.testing.assert_close(torch.tensor(logits)[mask.bool()], expected)


# The run-time check of shapes, which the tests switch on, keeps a stack of its own that an exporter
# cannot trace: graphs with exits are made by a process without it, as users make them.
EXPORT = """
import sys, torch
from everydepth.exits import export
from everydepth.exits.calibrate import observe
from everydepth.exits.policies import NEVER, POLICIES
from everydepth.stream import as_stream
from tests.helpers.rows import more_rows
from tests.zoo import CLASSIFIERS
name, kind, folder = sys.argv[1:]
model, batch = CLASSIFIERS[name].make()
batch = more_rows(batch, 6)
certainty = observe(as_stream(model), batch, POLICIES[kind]).certainty
ordered = certainty.sort(0).values
cut = ((ordered[2] + ordered[3]) / 2 + 1e-6).tolist()
# Rows leave at two depths only: each exit costs seconds of tracing.
allowed = {len(cut) // 2, len(cut) - 1}
policy = POLICIES[kind](threshold=tuple(t if i in allowed else NEVER for i, t in enumerate(cut)))
export(model, folder, format="onnx", exits=policy, example=batch)
"""


def check_exits(name: str, kind: str, folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", EXPORT, name, kind, str(folder)],
        capture_output=True,
        text=True,
        timeout=1100,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    model, batch = CLASSIFIERS[name].make()
    batch = more_rows(batch, 6)
    policy = Policy.load(folder / "exit_policy.json")
    graph = onnx.load(folder / "model.onnx").graph
    assert sum(node.op_type == "If" for node in graph.node) >= 1
    for rows in (6, 2, 1):
        feeds = {key: value[:rows] for key, value in batch.items()}
        expected = predict(model, feeds, policy=policy)
        logits, depth = run(folder, feeds)
        assert depth.tolist() == expected.depths.tolist()
        torch.testing.assert_close(torch.tensor(logits), expected.logits, rtol=1e-4, atol=1e-5)
    assert len(set(predict(model, batch, policy=policy).depths.tolist())) > 1


def test_one_graph_leaves_early_and_gives_what_prediction_gives(tmp_path: Path) -> None:
    check_exits("ResidualMLP-norm1-skips1-regression0", "confidence", tmp_path / "out")


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", sorted(CLASSIFIERS))
def test_every_classifier_gives_a_graph_that_leaves_early(name: str, tmp_path: Path) -> None:
    check_exits(name, "confidence", tmp_path / "out")


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("kind", sorted(POLICIES))
def test_every_policy_gives_a_graph_that_leaves_early(kind: str, tmp_path: Path) -> None:
    check_exits("ViT", kind, tmp_path / "out")


def test_a_graph_that_differs_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, batch = ENTRIES["ResidualMLP-norm1-skips1-regression0"].make()
    # No two float32 programs agree to the last bit of nothing: every graph fails this comparison.
    monkeypatch.setattr("everydepth.exits.onnx._TOLERANCE", -1.0)
    with pytest.raises(ExportError, match=r"in ONNX Runtime 'logits' has shape .* differs"):
        export(model, tmp_path / "out", format="onnx", example=batch)
    assert list(tmp_path.iterdir()) == []


def test_an_example_too_short_to_tell_length_from_a_constant_is_refused(tmp_path: Path) -> None:
    model, batch = ENTRIES["Bert-SequenceClassification"].make()
    short = {key: value[:, :2] for key, value in batch.items()}
    with pytest.raises(BatchError, match="has 2 tokens; use 3 or more"):
        export(model, tmp_path / "out", format="onnx", example=short)


def test_fewer_bits_are_smaller_and_say_what_they_cost(tmp_path: Path) -> None:
    torch.manual_seed(0)
    shape = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    more = {"intermediate_size": 128, "image_size": 8, "patch_size": 4, "num_channels": 1}
    config = hf.ViTConfig(num_labels=10, **(shape | more))
    model = hf.ViTForImageClassification(config).eval()
    batch = load_digits("test").batch(range(16))
    valid = load_digits("valid").batch(range(20))
    out = export(model, tmp_path / "out", format="onnx", example=batch, weights="int8", data=valid)
    card = (out / "README.md").read_text()
    said = re.search(r"Weights in int8: ([\d,]+) bytes instead of ([\d,]+)", card)
    assert said is not None
    now, before = (int(number.replace(",", "")) for number in said.groups())
    assert now == (out / "model.onnx").stat().st_size < 0.6 * before
    assert "The accuracy at every depth, on 20 samples:" in card
    # By the labels of the data, counted here once more, a picture at a time as they were there.
    rows = re.findall(r"^\| (\d) \| ([\d.]+) \| ([\d.]+) \|$", card, re.MULTILINE)
    pictures, labels = valid["pixel_values"], valid["labels"].numpy()
    found = [run(out, {"pixel_values": one})[0].argmax(-1)[0] for one in pictures.split(1)]
    assert rows[-1][2] == f"{(np.array(found) == labels).mean():.4g}"
    states = as_stream(model).observe(valid)
    for depth, before, _ in rows:
        hits = states.logits(int(depth)).argmax(-1).numpy() == labels
        assert before == f"{hits.mean():.4g}"
    assert [depth for depth, *_ in rows] == ["1", "2"]
    assert not (out / "every.onnx").exists()


def test_four_bits_follow_the_model(tmp_path: Path) -> None:
    model, batch = made("Bert-SequenceClassification")
    stream = as_stream(model)
    names = onnx_of.write(stream, batch, tmp_path / "model.onnx", None)
    example = {name: batch[name] for name in names}
    found = narrow(stream, tmp_path / "model.onnx", example, [batch], "int4")
    assert found.bytes < found.bytes_before
    assert (found.metric, found.quality_before[-1]) == ("agreement", 1.0)
    assert found.samples == stream.rows(batch)
    assert len(found.quality) == stream.depth
    assert all(0 <= quality <= 1 for quality in found.quality)
    kinds = {node.op_type for node in onnx.load(tmp_path / "model.onnx").graph.node}
    assert "MatMulNBits" in kinds


def test_fewer_bits_of_what_has_none_are_refused(tmp_path: Path) -> None:
    model, batch = ENTRIES["Bert-SequenceClassification"].make()
    words: dict[str, Any] = {"example": batch, "weights": "int8"}
    with pytest.raises(SettingError, match=r"weights='int8' with format='hf'; only ONNX"):
        export(model, tmp_path / "out", **words)
    with pytest.raises(
        SettingError, match="leave out data, which does not apply to weights='float32'"
    ):
        export(model, tmp_path / "out", format="onnx", example=batch, data=batch)
    with pytest.raises(SettingError, match="weights='int8' with exits="):
        export(model, tmp_path / "out", format="onnx", exits=Confidence(threshold=0.5), **words)
    assert list(tmp_path.iterdir()) == []
