"""One pass, one immutable result: the frame around all metrics."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import FrozenInstanceError
from typing import Any

import numpy as np
import pytest
import torch
from tests.helpers import tracing as samples
from tests.zoo import ENTRIES, MODELS
from torch.utils.data import DataLoader, TensorDataset
from transformers import BertConfig, BertModel

import everydepth as ed
from everydepth.data import Images
from everydepth.errors import DataError, SettingError
from everydepth.tracing import (
    BatchMetric,
    BlockRecords,
    FeatureMetric,
    FeatureRows,
    Observation,
    Result,
    gap,
    groups,
    metric_names,
    run,
)
from everydepth.tracing import metric as registry


def traced(data: Any, **options: Any) -> ed.Trace:
    return ed.trace(samples.vit(), data, progress=False, **options)


def assert_same(a: ed.Trace, b: ed.Trace, tolerance: float = 1e-5, but: str = "") -> None:
    assert list(a) == list(b)
    for name, result in a.results.items():
        for key, array in result.arrays.items():
            if key == but:
                continue
            other = b.results[name].arrays[key]
            if array.dtype.kind in "US":
                assert (array == other).all()
                continue
            scale = max(1.0, float(np.abs(np.ma.filled(array, 0)).max(initial=0)))
            np.testing.assert_array_equal(np.ma.getmaskarray(array), np.ma.getmaskarray(other))
            assert (
                np.abs(np.ma.filled(array, 0) - np.ma.filled(other, 0)).max(initial=0)
                <= tolerance * scale
            ), f"{name}.{key}"


def test_every_default_metric_has_a_value_at_every_depth() -> None:
    t = traced(samples.pictures())
    assert t.depth == 3
    assert t.samples == t.rows == 60
    assert not t.partial
    assert t["loss"].shape == (4,)
    assert t["cos"].shape == t["cka"].shape == (4, 4)
    assert all(not r.is_gap for r in t.results.values())


@pytest.mark.parametrize("batch_size", [1, 7, 60])
def test_results_do_not_depend_on_the_batch_size(batch_size: int) -> None:
    data = samples.pictures()
    assert_same(traced(data, batch_size=batch_size), traced(data, batch_size=25))


@pytest.mark.parametrize("batch_size", [4, 60])
def test_gradient_metrics_do_not_depend_on_the_batch_size(batch_size: int) -> None:
    data = samples.pictures()
    a = traced(data, metrics="gradients", batch_size=batch_size)
    assert_same(a, traced(data, metrics="gradients", batch_size=25))


@pytest.mark.parametrize("metrics", [None, "gradients"])
@pytest.mark.parametrize("memory_budget", [2**30, 0])
def test_parts_of_a_batch_give_what_the_whole_batch_gives(
    monkeypatch: pytest.MonkeyPatch, metrics: str | None, memory_budget: int
) -> None:
    data, sizes = samples.pictures(), list[int]()

    class Sizes(BatchMetric):
        name = "sizes"

        def update(self, observation: Observation) -> None:
            sizes.append(observation.samples)

        def compute(self) -> Result:
            return gap("sizes", "curve", "counts only")

    names = list(traced(data, metrics=metrics))
    whole = traced(data, metrics=names, batch_size=25, memory_budget=memory_budget)
    monkeypatch.setattr(run, "PART_BYTES", 9 * 17 * 32 * 4)  # nine rows of 17 tokens, width 32
    traced(data, metrics=[Sizes()], batch_size=25)
    assert sizes == [1, 8, 8, 8, 9, 9, 7, 5, 5]  # the first row tells how large a state is
    assert_same(traced(data, metrics=names, batch_size=25, memory_budget=memory_budget), whole)


@pytest.mark.parametrize("extra", ["loss", "gradient_norm"])
def test_a_metric_sees_the_branches_of_every_block_before_its_update(extra: str) -> None:
    order: list[str] = []

    class Watching(BatchMetric):
        name = "watching"
        needs = frozenset({"branches"})

        def see_block(self, seen: BlockRecords) -> None:
            kinds = [branch.kind for branch in seen.block.branches]
            assert len(kinds) == len(seen.branches) == 2
            assert seen.batch["labels"].shape == seen.branches[0].x.shape[:1]
            order.append(f"block {seen.depth}")

        def update(self, observation: Observation) -> None:
            order.append("update")

        def compute(self) -> Result:
            return gap("watching", "curve", "looks only")

    traced(samples.pictures(40), metrics=[Watching(), extra], batch_size=20)
    # The first row, the rest of its batch, and the second batch.
    assert order == ["block 1", "block 2", "block 3", "update"] * 3


def test_results_do_not_depend_on_the_order_of_the_samples() -> None:
    data = samples.pictures()
    order = torch.randperm(60)
    shuffled = {key: value[order] for key, value in data.items()}
    everything = [n for n in traced(data) if n != "prediction_depth"] + ["gradients"]
    a, b = traced(data, metrics=everything), traced(shuffled, metrics=everything)
    assert_same(a, b, but="noise_10")  # compares every second sample with the others


def test_results_do_not_depend_on_padding() -> None:
    model, data = samples.gpt2(), samples.sentences()
    rows = []
    for i in range(len(data["input_ids"])):
        length = int(data["attention_mask"][i].sum())
        rows.append({key: value[i : i + 1, :length] for key, value in data.items()})
    alone = ed.trace(model, rows, progress=False)
    padded = ed.trace(model, data, progress=False)
    assert_same(padded, alone)
    assert padded.rows == int(data["attention_mask"].sum())
    wide = {k: torch.nn.functional.pad(v, (0, 3), value=5) for k, v in data.items()}
    wide["attention_mask"][:, -3:] = 0
    assert_same(padded, ed.trace(model, wide, progress=False))


def test_a_label_on_a_padding_token_is_no_target() -> None:
    model, data = samples.gpt2(), samples.sentences()
    careless = {**data, "labels": data["input_ids"]}
    np.testing.assert_allclose(
        ed.trace(model, careless, ["loss"])["loss"], ed.trace(model, data, ["loss"])["loss"]
    )


def test_features_that_do_not_fit_are_computed_twice_with_the_same_result() -> None:
    data = samples.pictures()
    names = ["cos", "adjacent_cos", "neural_collapse", "norm_ratio"]
    held, again = (traced(data, metrics=names, memory_budget=m) for m in (2**30, 0))
    assert (held.passes, again.passes) == (1, 2)
    assert held.about["features"] == "features held in memory"
    assert again.about["features"] == "data run twice"
    assert_same(held, again, 1e-9)


def test_a_generator_that_cannot_run_again_leaves_a_marked_gap() -> None:
    data = samples.pictures()
    one_pass = ({k: v[i : i + 20] for k, v in data.items()} for i in range(0, 60, 20))
    t = traced(one_pass, metrics=["cos", "loss"], memory_budget=0)
    assert "needs a second look" in str(t.result("cos").note)
    assert t["loss"].shape == (4,)
    with pytest.raises(SettingError, match="cos has no values: it needs a second look"):
        t["cos"]


def test_data_may_be_batches_a_loader_a_data_set_or_one_batch() -> None:
    data = samples.pictures(20)
    expected = traced(data, metrics=["loss"])["loss"]
    pairs = TensorDataset(data["pixel_values"], data["labels"])
    batches = [{k: v[i : i + 8] for k, v in data.items()} for i in range(0, 20, 8)]
    rows = Images(data["pixel_values"], data["labels"], tuple("abcdef"))
    for form in (batches, DataLoader(pairs, batch_size=6), rows):
        np.testing.assert_allclose(traced(form, metrics=["loss"])["loss"], expected, rtol=1e-6)


def test_max_samples_cuts_the_last_batch() -> None:
    data = samples.pictures()
    t = traced(data, metrics=["loss"], max_samples=23, batch_size=10)
    assert t.samples == 23
    first = {k: v[:23] for k, v in data.items()}
    np.testing.assert_allclose(t["loss"], traced(first, metrics=["loss"])["loss"], rtol=1e-6)


def test_a_group_leaves_out_what_does_not_fit_and_says_why() -> None:
    t = traced(samples.pictures(8), metrics=["similarity", "loss"])
    assert {"cos", "cka", "norm_ratio", "token_cka", "loss"} <= set(t)
    assert t.skipped["cos_between"] == "needs a second model; pass against="
    everything = traced(samples.pictures(8), metrics="all")
    assert {"gradient_norm", "branch_contributions", "token_cka"} <= set(everything)
    assert everything.skipped["mse"] == "for regression, not classification"


def test_the_model_is_left_as_it_was() -> None:
    model = samples.vit().train()
    model.vit.embeddings.cls_token.requires_grad_(False)
    before = {n: (p.requires_grad, p.clone()) for n, p in model.named_parameters()}
    ed.trace(model, samples.pictures(8), ["loss", "gradients", "branch_contributions"])
    assert model.training
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad == before[name][0]
        assert torch.equal(parameter, before[name][1])
        assert parameter.grad is None
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_a_trace_is_immutable() -> None:
    t = traced(samples.pictures(8), metrics=["loss"])
    with pytest.raises(AttributeError, match="no setter"):
        t.depth = 5  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(FrozenInstanceError):
        t.about = {}  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(TypeError):
        t.results["x"] = t.results["loss"]  # pyright: ignore[reportIndexIssue]
    with pytest.raises(ValueError, match="read-only"):
        t["loss"][0] = 0


def test_a_saved_trace_loads_with_every_array_mask_and_note(tmp_path: Any) -> None:
    t = traced(samples.pictures())
    assert np.ma.is_masked(t["cos"])  # the class token is the same for all images at depth 0
    grid = Result(
        name="words",
        kind="grid",
        series=("text",),
        arrays={
            "text": np.array([["<script>", "é"]]),
            "tokens": np.array(["a", "b"]),
            "probability": np.ones((1, 2)),
            "depth": np.arange(1),
        },
    )
    t = t.with_results(grid)
    loaded = ed.Trace.load(t.save(tmp_path / "run"))
    assert_same(t, loaded, 0)
    assert {n: r.note for n, r in t.results.items()} == {
        n: r.note for n, r in loaded.results.items()
    }
    assert loaded.about == t.about
    assert loaded.skipped == t.skipped
    names = sorted(p.name for p in (tmp_path / "run").iterdir())
    assert [name.partition("-")[0] for name in names] == ["measured", "measured.json"]


def test_a_trace_of_another_version_is_refused(tmp_path: Any) -> None:
    folder = traced(samples.pictures(8), metrics=["loss"]).save(tmp_path)
    text = json.loads((folder / "measured.json").read_text())
    (folder / "measured.json").write_text(json.dumps({**text, "format": 99}))
    with pytest.raises(DataError, match="results of format 99, but this everydepth reads"):
        ed.Trace.load(folder)
    with pytest.raises(DataError, match=r"no results in .*; give a folder written by"):
        ed.Trace.load(tmp_path / "nowhere")


def test_the_table_has_one_row_per_depth() -> None:
    t = traced(samples.pictures(8), metrics=["loss", "norm_ratio"])
    lines = str(t.table()).splitlines()
    assert lines[1].split() == ["depth", "loss", "(nat)", "norm_ratio"]
    assert [line.split()[0] for line in lines[2:6]] == ["0", "1", "2", "3"]
    assert lines[2].split()[2] == "-"  # no block before depth 0
    frame = t.table().to_pandas()
    assert list(frame["depth"]) == [0, 1, 2, 3]
    assert frame["loss"].to_numpy() == pytest.approx(t["loss"])


def test_html_escapes_what_comes_from_outside() -> None:
    t = traced(samples.pictures(8), metrics=["loss"])
    t = t.with_results(gap("x", "curve", "<script>alert(1)</script>"))
    assert "<script>" not in t._repr_html_()
    assert "&lt;script&gt;" in t._repr_html_()


def test_an_interrupted_trace_returns_what_it_has_marked_partial() -> None:
    data = samples.pictures()

    def interrupted() -> Any:
        for i in range(0, 40, 10):
            yield {k: v[i : i + 10] for k, v in data.items()}
        raise KeyboardInterrupt

    t = traced(interrupted())
    assert t.partial
    assert t.samples == 40
    assert "PARTIAL" in str(t)
    first = {k: v[:40] for k, v in data.items()}
    np.testing.assert_allclose(t["loss"], traced(first)["loss"], rtol=1e-6)
    for name in ("cka", "cos"):  # features were held, so the second look was still possible
        np.testing.assert_allclose(t[name], traced(first)[name], atol=1e-6)


def test_ctrl_c_in_the_middle_of_a_batch_leaves_all_metrics_with_the_same_samples() -> None:
    class Interrupts(BatchMetric):
        name = "interrupts"

        def __init__(self) -> None:
            self.batches = 0

        def update(self, observation: Observation) -> None:
            self.batches += 1
            if self.batches == 3:  # the first row, the rest of its batch, the second batch
                os.kill(os.getpid(), signal.SIGINT)

        def compute(self) -> Result:
            return gap(self.name, "scalar", str(self.batches))

    handler = signal.getsignal(signal.SIGINT)
    t = traced(samples.pictures(), metrics=["loss", Interrupts, "margin", "cka"], batch_size=10)
    assert t.partial
    assert t.samples == 20
    assert {t.result(name).meta["rows"] for name in ("loss", "margin", "cka")} == {20}
    assert signal.getsignal(signal.SIGINT) is handler


def test_an_interrupted_second_look_is_partial_too() -> None:
    data, calls = samples.pictures(), []

    class Twice:
        def __iter__(self) -> Any:
            calls.append(1)
            yield {k: v[:30] for k, v in data.items()}
            if len(calls) == 2:
                raise KeyboardInterrupt
            yield {k: v[30:] for k, v in data.items()}

    t = traced(Twice(), metrics=["cos", "loss"], memory_budget=0)
    assert t.partial
    assert t.samples == 60


def test_a_metric_of_ones_own_is_known_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_registry", dict(registry._registry))

    @ed.register_metric
    class Largest(BatchMetric):
        name = "largest"

        def __init__(self) -> None:
            self.value = 0.0

        def update(self, observation: Observation) -> None:
            self.value = max(self.value, float(observation.features.abs().max()))

        def compute(self) -> Result:
            return Result(
                name=self.name,
                kind="scalar",
                series=("value",),
                arrays={"value": np.asarray(self.value)},
            )

    class Rows(FeatureMetric):
        name = "rows"

        def __init__(self) -> None:
            self.sizes: list[int] = []

        def update(self, rows: FeatureRows) -> None:
            self.sizes.append(rows.features.shape[1])

        def compute(self) -> Result:
            return Result(
                name="rows", kind="scalar", series=("n",), arrays={"n": np.array(self.sizes)}
            )

    data = samples.pictures()
    t = traced(data, metrics=["largest", Rows])
    expected = np.abs(samples.features(samples.vit(), data)).max()
    assert t["largest"] == pytest.approx(expected, rel=1e-5)
    assert t["rows"].sum() == 60
    assert "largest" in metric_names()
    assert groups()["own"] == ["largest"]
    with pytest.raises(SettingError, match="there is already a metric 'largest'"):
        ed.register_metric(type("Other", (Largest,), {}))


@pytest.mark.parametrize("name", MODELS)
def test_every_family_can_be_traced_without_labels(name: str) -> None:
    model, batch = ENTRIES[name].make()
    stream = ed.as_stream(model, **ENTRIES[name].options)
    t = ed.trace(stream, batch, batch_size=2, progress=False)
    assert {"cos", "cka", "norm_ratio"} <= set(t)
    assert t.samples == 3
    for result in t.results.values():
        for array in result.arrays.values():
            assert np.isfinite(np.ma.filled(array, 0)).all() or array.dtype.kind != "f"
    measured = {"classification": "loss", "masked_lm": "loss", "regression": "mse"}
    if stream.task in measured:
        assert measured[stream.task] in t.skipped


def test_branches_are_recorded_once_of_inputs_that_were_not_seen_before() -> None:
    sizes = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2}
    torch.manual_seed(0)
    model = BertModel(BertConfig(vocab_size=20, intermediate_size=32, **sizes)).eval()
    ids = torch.randint(1, 20, (3, 6))
    batch = {"input_ids": ids, "token_type_ids": ids // 11, "attention_mask": ids * 0 + 1}
    t = ed.trace(ed.as_stream(model), [batch], ["branch_contributions"], progress=False)
    seen = ed.trace(
        ed.as_stream(model, example=batch), [batch], ["branch_contributions"], progress=False
    )
    np.testing.assert_array_equal(t["branch_contributions"], seen["branch_contributions"])


def test_the_announced_rows_of_batches_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(run, "ANNOUNCED", 0.0)
    monkeypatch.setattr(run, "say", said.append)
    data = samples.pictures()
    loader = DataLoader(TensorDataset(data["pixel_values"], data["labels"]), batch_size=25)
    ed.trace(samples.vit(), loader, ["accuracy"])
    assert len(said) == 1
    assert "of up to 75 rows" in said[0]
    assert "unknown" not in said[0]
