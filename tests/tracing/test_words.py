"""Statistics of a large vocabulary in parts, against all logits at once in float64."""

from __future__ import annotations

import gc
import os
import signal
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from tests.fuzz.values import reading, seeing, writing
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import everydepth as ed
from everydepth import tracing
from everydepth.errors import DepthError, SettingError
from everydepth.stream import ResidualStream, as_stream, observe_gradients, words
from everydepth.stream.words import row_blocks, word_statistics
from everydepth.tracing import observation, predictions, run
from everydepth.tracing.plan import Plan

VOCABULARY = 211
NAMES = ("loss", "error", "followed", "step", "top", "rank", "confidence", "margin")
FINITE = tuple(name for name in NAMES if name != "step")  # a step from -inf to -inf has no length


@pytest.fixture
def by_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small vocabulary is treated as a large one, in several blocks of rows and words."""
    monkeypatch.setattr(words, "WORDS", 50)
    monkeypatch.setattr(words, "ROWS", 24)
    for module in (observation, predictions):
        monkeypatch.setattr(module, "LOGIT_BYTES", 0)


def llama(dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        initializer_range=0.2,
    )
    return LlamaForCausalLM(config).to(dtype).eval()


def text(rows: int = 5, length: int = 9) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(1)
    ids = torch.randint(0, VOCABULARY, (rows, length), generator=random)
    mask = torch.ones_like(ids)
    mask[-1, -3:] = 0
    return {"input_ids": ids, "attention_mask": mask}


def plain(x: Tensor, weight: Tensor, bias: Tensor | None, follow: Tensor) -> dict[str, Tensor]:
    z = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    chance = z.softmax(-1)
    followed = z.gather(-1, follow.expand(z.shape[:-1])[..., None])[..., 0]
    high = z.sort(-1, descending=True).values
    truth = torch.nn.functional.one_hot(follow, z.shape[-1])
    return {
        "loss": -chance.gather(-1, follow.expand(z.shape[:-1])[..., None])[..., 0].log(),
        "error": (chance - truth).norm(dim=-1),
        "followed": followed,
        "step": z.diff(dim=0).norm(dim=-1),
        "top": z.argmax(-1).int(),
        "rank": (z > followed[..., None]).sum(-1).int(),
        "confidence": chance.amax(-1),
        "margin": high[..., 0] - high[..., 1],
    }


@pytest.mark.usefixtures("by_words")
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("names", [NAMES, ("loss",), ("top", "margin"), ("rank",)])
def test_a_sweep_by_words_gives_what_all_logits_give(biased: bool, names: tuple[str, ...]) -> None:
    random = torch.Generator().manual_seed(2)
    x = torch.randn(3, 21, 16, generator=random, dtype=torch.float64)
    weight = torch.randn(VOCABULARY, 16, generator=random, dtype=torch.float64)
    bias = torch.randn(VOCABULARY, generator=random, dtype=torch.float64) if biased else None
    follow = torch.randint(0, VOCABULARY, (21,), generator=random)
    blocks = [x[:, rows] for rows in row_blocks(21, 3)]
    assert len(blocks) > 1
    found = word_statistics(blocks, weight, bias, follow, names)
    assert set(found) == set(names)
    expected = plain(x, weight, bias, follow)
    for name in names:
        torch.testing.assert_close(found[name].double(), expected[name].double(), rtol=1e-9, atol=0)


@pytest.mark.usefixtures("by_words")
def test_words_that_can_never_be_said_do_no_harm() -> None:
    weight, bias = torch.randn(VOCABULARY, 8), torch.zeros(VOCABULARY)
    bias[:100] = -torch.inf  # two whole blocks
    found = word_statistics([torch.randn(2, 3, 8)], weight, bias, torch.full((3,), 150), FINITE)
    assert all(bool(torch.isfinite(value).all()) for value in found.values())


@pytest.mark.usefixtures("by_words")
@pytest.mark.parametrize("names", [("loss",), ("loss", "error")])
@pytest.mark.parametrize("above", [30.0, 60.0, 200.0])
def test_words_far_likelier_than_the_first_ones_are_counted(
    above: float, names: tuple[str, ...]
) -> None:
    torch.manual_seed(0)
    x, weight, bias = torch.randn(2, 3, 8), torch.randn(VOCABULARY, 8), torch.zeros(VOCABULARY)
    bias[100:] = above  # two blocks of words come before them
    follow = torch.tensor([3, 120, 210])
    found = word_statistics([x], weight, bias, follow, names)
    expected = plain(x, weight, bias, follow)
    for name in names:
        torch.testing.assert_close(
            found[name].double(), expected[name].double(), rtol=1e-5, atol=1e-5
        )


@pytest.mark.usefixtures("by_words")
@pytest.mark.parametrize("name", ["loss", "error", "confidence", "margin"])
@pytest.mark.parametrize("place", [0, 200])
def test_nan_in_any_block_of_words_shows(name: str, place: int) -> None:
    torch.manual_seed(0)
    weight = torch.randn(VOCABULARY, 8)
    weight[place] = torch.nan
    found = word_statistics([torch.randn(2, 3, 8)], weight, None, torch.full((3,), 7), [name])
    assert bool(found[name].isnan().all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_trace_by_words_is_the_plain_loop_over_depths(by_words: None, dtype: torch.dtype) -> None:
    model, batch = llama(dtype), text()
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    with torch.no_grad():
        states = as_stream(model).observe(batch)
    expected = [
        float(
            torch.nn.functional.cross_entropy(
                states.logits(depth).detach()[:, :-1].flatten(0, 1).float(),
                labels[:, 1:].flatten(),
                ignore_index=-100,
            )
        )
        for depth in range(5)
    ]
    found = ed.trace(model, batch, ["loss"], progress=False)
    np.testing.assert_allclose(found["loss"], expected, rtol=1e-5)


def test_all_default_metrics_are_the_same_by_words_and_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, batch = llama(), text()
    at_once = ed.trace(model, batch, progress=False)
    monkeypatch.setattr(words, "WORDS", 50)
    for module in (observation, predictions):
        monkeypatch.setattr(module, "LOGIT_BYTES", 0)
    by_parts = ed.trace(model, batch, progress=False)
    assert list(by_parts) == list(at_once)
    for name, result in at_once.results.items():
        for key, values in result.arrays.items():
            if values.dtype.kind in "fi":
                other = by_parts.results[name].arrays[key]
                np.testing.assert_allclose(other, values, rtol=1e-4, atol=1e-5, err_msg=name)


@pytest.mark.usefixtures("by_words")
def test_the_models_own_head_is_passed_over_and_only_what_is_read_is_computed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[set[str]] = []
    plainly = predictions.word_statistics

    def counted(*args: Any) -> dict[str, Tensor]:
        asked.append(set(args[4]))
        return plainly(*args)

    model = llama()
    stream = ed.as_stream(model)
    monkeypatch.setattr(model.lm_head, "forward", None)  # calling it would fail
    monkeypatch.setattr(predictions, "word_statistics", counted)
    ed.trace(stream, text(), ["loss"], progress=False)
    assert asked == [{"loss"}] * 2  # the first row, and the others
    ed.trace(stream, text(), ["loss", "top5"], progress=False)
    assert asked[2:] == [{"loss", "rank"}] * 2


@pytest.mark.usefixtures("by_words")
def test_states_of_one_part_are_gone_before_the_next_is_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(run, "PART_BYTES", 1)  # a row a part
    alive: list[weakref.ref[Tensor]] = []
    counts: list[int] = []

    class Counting(tracing.BatchMetric):
        name = "counting"

        def update(self, observation: tracing.Observation) -> None:
            alive.append(weakref.ref(observation.states.h[1]))
            counts.append(sum(h() is not None for h in alive))

        def compute(self) -> tracing.Result:
            return self.gap("it only counts")

    gc.disable()  # what waits for a collection is not gone
    try:
        ed.trace(llama(), [text(), text()], ["loss", Counting()], progress=False)
    finally:
        gc.enable()
    assert counts == [1] * 10


# -- some depths ---------------------------------------------------------------------------------


def test_some_depths_are_those_of_all() -> None:
    model, batch = llama(), text()
    whole = ed.trace(model, batch, progress=False)
    some = ed.trace(model, batch, depths="::2", progress=False)
    assert some.result("loss").arrays["depth"].tolist() == [0, 2, 4]
    np.testing.assert_allclose(some["loss"], whole["loss"][::2], rtol=1e-6)
    np.testing.assert_allclose(some["cos"], whole["cos"][::2, ::2], atol=1e-5)
    assert set(some.result("prediction_depth").arrays["final_from"].tolist()) <= {0, 2, 4}
    assert "needs every depth" in some.skipped["stream_std"]
    assert some.table().column("depth") == [0, 2, 4]


@pytest.mark.parametrize(
    ("depths", "found"),
    [
        (2, (2, 4)),
        ([3, 1], (1, 3, 4)),
        ("3:", (3, 4)),
        ("every 2nd", (0, 2, 4)),
        ("every 3rd", (0, 3, 4)),
        ("3,1", (1, 3, 4)),  # as on the command line
        ("1, 2", (1, 2, 4)),
        (None, tuple(range(5))),
    ],
)
def test_depths_are_numbers_or_a_slice_with_the_last_among_them(
    depths: Any, found: tuple[int, ...]
) -> None:
    from everydepth.stream import chosen_depths

    assert chosen_depths(as_stream(llama()), depths) == found


@pytest.mark.parametrize("wrong", ["2", "a:b", "1,7", "1,", [7], "9:", "every", "every 0th"])
def test_depths_that_are_not_there_are_refused(wrong: Any) -> None:
    with pytest.raises(DepthError, match=r"depths?[ =].*4"):
        ed.trace(llama(), text(), ["loss"], depths=wrong, progress=False)


def test_a_metric_of_single_blocks_refuses_some_depths() -> None:
    with pytest.raises(SettingError, match="stream_std: needs every depth; leave out depths="):
        ed.trace(llama(), text(), ["stream_std"], depths="::2", progress=False)


@pytest.mark.parametrize("world", [seeing, reading, writing])
def test_a_single_depth_leaves_gaps_and_no_metric_fails(world: Any) -> None:
    model, data = world().model, world().rows()
    found = ed.trace(model, data, "all", depths=[2], progress=False)
    assert found["loss"].shape == (1,)
    with pytest.raises(SettingError, match="single depth"):
        found["monotonicity"]


# -- some tokens ---------------------------------------------------------------------------------


def test_drawn_tokens_are_a_seeded_sample_whose_standard_error_is_right() -> None:
    model, batch = llama(), text(24, 9)
    whole = ed.trace(model, batch, ["loss"], progress=False)["loss"]
    found = [
        ed.trace(model, batch, ["loss"], tokens=40, seed=seed, progress=False) for seed in range(25)
    ]
    assert found[0].rows == 40
    assert found[0].table().headings == ("depth", "loss", "± loss")
    assert found[0].table("loss").rows == found[0].table().rows
    again = ed.trace(model, batch, ["loss"], tokens=40, seed=0, progress=False)
    np.testing.assert_array_equal(again["loss"], found[0]["loss"])
    # The distance from the whole, in standard errors, has mean square 1.
    away = [(t["loss"] - whole) / t.result("loss").arrays["standard_error"] for t in found]
    assert 0.5 < float(np.mean(np.square(away))) < 2


def test_all_tokens_drawn_leave_no_error() -> None:
    found = ed.trace(llama(), text(), ["loss", "perplexity"], tokens=10_000, progress=False)
    whole = ed.trace(llama(), text(), ["loss"], progress=False)
    np.testing.assert_allclose(found["loss"], whole["loss"], rtol=1e-6)
    assert not found.result("perplexity").arrays["standard_error"].any()


def test_drawing_needs_tokens_and_data_that_can_be_read_again() -> None:
    with pytest.raises(SettingError, match="iterated only once"):
        ed.trace(llama(), iter([text()]), ["loss"], tokens=3, progress=False)
    from tests.helpers import tracing as samples

    with pytest.raises(SettingError, match="use max_samples"):
        ed.trace(samples.vit(), samples.pictures(), ["loss"], tokens=3, progress=False)


# -- what it says, and how it ends ---------------------------------------------------------------


def test_the_plan_says_what_it_takes_and_what_to_drop() -> None:
    found = ed.trace(llama(), text(), ["loss"], progress=False)
    assert found.about["plan"].startswith("LlamaForCausalLM: 5 depths of up to 5 rows, 1 metric")
    assert "MiB in addition to the model. To halve the time: " in found.about["plan"]


@pytest.mark.parametrize(
    ("depths", "way"),
    [
        (tuple(range(31)), "31 depths takes 90%, and depths='every 2nd' or tokens=508 halves it"),
        ((0, 10, 20, 30), "4 depths takes 90%, and depths=[10, 30] or tokens=508 halves it"),
    ],
)
def test_what_a_plan_drops_is_half_of_what_was_asked(depths: tuple[int, ...], way: str) -> None:
    each: dict[str, Any] = {"forward": 0.1, "readout": 0.9, "rest": 0.0, "bytes": 2**20}
    plan = Plan(model="M", metrics=("loss",), depths=depths, rows=8, tokens=127, **each)
    assert plan.halving == f"the readout of {way}"


def test_a_plan_of_drawn_tokens_counts_these() -> None:
    each: dict[str, Any] = {"forward": 0.1, "readout": 0.9, "rest": 0.0, "bytes": 2**20}
    told: dict[str, Any] = {"model": "M", "metrics": ("loss",), "depths": (0, 1, 2), "rows": 100}
    # The measured row had 4 of the 200 tokens, twice as many as the average row.
    plan = Plan(**told, tokens=4, drawn=200, **each)
    assert plan.seconds == pytest.approx(100 * 0.1 + 50 * 0.9)
    assert plan.halving.endswith("82%, and depths='every 2nd' or tokens=100 halves it")
    found = ed.trace(llama(), text(), ["loss"], tokens=6, progress=False)
    shown = found.about["plan"]
    assert "tokens=" not in shown or "tokens=3 " in shown


def test_gradients_are_of_rows_whose_logits_are_small(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = llama(), text()
    seen: list[int] = []

    def observing(stream: ResidualStream, part: Any) -> Any:
        seen.append(stream.rows(part))
        return observe_gradients(stream, part)

    monkeypatch.setattr("everydepth.tracing.run.observe_gradients", observing)
    whole = ed.trace(model, batch, ["gradient_norm"], progress=False)
    assert seen == [1, 4]
    seen.clear()
    row = 4 * batch["input_ids"].shape[1] * ed.as_stream(model).classes
    monkeypatch.setattr("everydepth.tracing.run.PART_BYTES", 2 * row)
    parts = ed.trace(model, batch, ["gradient_norm"], progress=False)
    assert seen == [1, 2, 2]
    np.testing.assert_allclose(parts["gradient_norm"], whole["gradient_norm"], rtol=1e-6)


def test_ctrl_c_in_a_sweep_leaves_the_batches_before_it(
    by_words: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches = [text() for _ in range(4)]
    plainly, calls = predictions.word_statistics, list[int]()

    def interrupted(*args: Any) -> dict[str, Tensor]:
        calls.append(1)
        if len(calls) == 4:
            os.kill(os.getpid(), signal.SIGINT)
        return plainly(*args)

    monkeypatch.setattr(predictions, "word_statistics", interrupted)
    found = ed.trace(llama(), batches, ["loss"], progress=False)
    assert found.partial
    assert found.samples == 10  # the first row, the rest of its batch, and the second batch
    whole = ed.trace(llama(), batches[:2], ["loss"], progress=False)
    np.testing.assert_allclose(found["loss"], whole["loss"], rtol=1e-6)
