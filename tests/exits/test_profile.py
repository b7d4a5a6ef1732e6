"""Profiles: each number against a plain reference, and the depth for a budget."""

from __future__ import annotations

import importlib
import math
import re
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.zoo import ENTRIES
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, T5Config, T5ForConditionalGeneration

from everydepth.errors import BatchError, BudgetError, SettingError
from everydepth.exits import DepthProfile, Latency, Profile, profile
from everydepth.exits import quality as qualities
from everydepth.exits.driving import BlockTimes, times_by_depth
from everydepth.exits.measure import LiveBytes
from everydepth.stream import ResidualStream, States, as_stream, at_depth, words

profiling = importlib.import_module("everydepth.exits.profile")  # a function has its name


def made_up(metric: str = "accuracy", quality: tuple[float, ...] = (0.5, 0.8, 0.7, 0.9)) -> Profile:
    depths = tuple(
        DepthProfile(
            depth=k,
            quality=q,
            parameters=100 * k,
            checkpoint_bytes=400 * k,
            flops=1000 * k,
            latency=Latency(median=1.0 * k, low=0.9 * k, high=1.2 * k),
            batch_latency=Latency(median=10.0 * k, low=9.0 * k, high=12.0 * k),
            peak_bytes=800 * k,
        )
        for k, q in enumerate(quality, start=1)
    )
    return Profile.of(depths, metric=metric, batch_size=8, model="Net", samples=50)


def test_accuracy_per_depth_is_that_of_the_cut_model() -> None:
    model, batch = ENTRIES["ViT"].make()
    labels = torch.tensor([1, 2, 3])
    found = profile(model, batch | {"labels": labels}, batch_size=2, repeats=1, progress=False)
    assert found.metric == "accuracy"
    for k in range(1, 5):
        with torch.no_grad():
            expected = (at_depth(model, k)(**batch).logits.argmax(-1) == labels).double().mean()
        assert found.at(k).quality == pytest.approx(float(expected))


def test_perplexity_per_depth_is_that_of_the_models_own_loss() -> None:
    model, batch = ENTRIES["Llama-tied-CausalLM-right"].make(torch.float64)
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    found = profile(model, batch | {"labels": labels}, repeats=1, progress=False)
    assert found.metric == "perplexity"
    for k in range(1, 5):
        with torch.no_grad():
            loss = float(at_depth(model, k)(**batch, labels=labels).loss)
        assert found.at(k).quality == pytest.approx(math.exp(loss), rel=1e-4)


def test_other_tasks_are_measured_by_their_own_error() -> None:
    model, batch = ENTRIES["ResidualMLP-norm1-skips1-regression1"].make()
    labels = torch.randn(3, 2)
    found = profile(model, batch | {"labels": labels}, repeats=1, progress=False)
    with torch.no_grad():
        expected = float((model(**batch).logits - labels).square().mean())
    assert (found.metric, found.at(6).quality) == ("mse", pytest.approx(expected))
    model, batch = ENTRIES["CLIPVision"].make()
    found = profile(model, batch, repeats=1, progress=False)
    assert (found.metric, found.at(4).quality) == ("error", 0)
    assert found.at(1).quality > 0


def test_sizes_are_those_of_the_saved_model(tmp_path: Path) -> None:
    for name in ("Llama-tied-CausalLM-left", "ResNetForImageClassification-basic"):
        model, batch = ENTRIES[name].make()
        found = profile(model, batch, repeats=1, progress=False)
        for k in (1, as_stream(model).depth):
            small = at_depth(model, k)
            small.save_pretrained(tmp_path / name / str(k))
            file = tmp_path / name / str(k) / "model.safetensors"
            header = 8 + int.from_bytes(file.read_bytes()[:8], "little")
            assert found.at(k).checkpoint_bytes == file.stat().st_size - header
            assert found.at(k).parameters == sum(p.numel() for p in small.parameters())


def test_flops_grow_by_one_block_a_depth() -> None:
    model, batch = ENTRIES["ViT"].make()
    counts = [d.flops for d in profile(model, batch, repeats=1, progress=False).depths]
    width, inner, tokens = 32, 48, 17
    products = 2 * tokens * (4 * width * width + 2 * width * inner)
    attention = 2 * 2 * tokens * tokens * width
    steps = {b - a for a, b in pairwise(counts)}
    assert steps == {products + attention}


def test_peak_memory_counts_what_is_alive_at_once() -> None:
    layers = [torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 8)]
    model = torch.nn.Sequential(torch.nn.Sequential(*layers), torch.nn.Linear(8, 2))
    x = torch.randn(100, 64)
    with torch.no_grad(), LiveBytes() as live:
        model(x)
    # While ReLU runs, its input and its output are alive: 2 x 100 x 256 numbers.
    assert live.peak == 4 * 2 * 100 * 256


def test_latencies_are_ordered_and_a_profile_survives_its_folder(tmp_path: Path) -> None:
    model, batch = ENTRIES["ViT"].make()
    found = profile(model, batch, batch_size=4, repeats=3, progress=False)
    for depth in found.depths:
        assert 0 < depth.latency.low <= depth.latency.median <= depth.latency.high
    again = Profile.load(found.save(tmp_path / "profile"))
    assert (again.depths, again.metric, again.pareto()) == (
        found.depths,
        found.metric,
        found.pareto(),
    )
    assert found.table().column("depth") == [1, 2, 3, 4]
    assert found.table().markdown().count("\n") == 5


def test_the_profiled_model_is_left_as_it_was() -> None:
    model, batch = ENTRIES["CifarResNet-post-projection"].make()
    model.train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    profile(model, batch, repeats=1, progress=False)
    assert model.training
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_a_limit_on_cost_gives_the_best_depth_within_it() -> None:
    assert made_up().choose(latency_ms=3.5) == 2
    assert made_up().choose(bytes=1600) == 4
    assert made_up().choose(batch_latency_ms=10) == 1
    assert made_up("perplexity", (9.0, 5.0, 6.0, 4.0)).choose(latency_ms=3.5) == 2


def test_a_demand_on_quality_gives_the_shallowest_depth_that_meets_it() -> None:
    assert made_up().choose(max_drop=0.1) == 2
    assert made_up().choose(min_accuracy=0.85) == 4
    assert made_up().choose(max_drop=0.25, latency_ms=3) == 2
    assert made_up("perplexity", (9.0, 5.0, 6.0, 4.0)).choose(max_drop=1.5) == 2
    assert made_up().choose() == 4


def test_an_impossible_budget_says_which_limit_and_what_is_possible() -> None:
    with pytest.raises(BudgetError, match=r"meets latency_ms=0.5: the best is 1 at depth 1"):
        made_up().choose(latency_ms=0.5, max_drop=0.5)
    with pytest.raises(BudgetError, match=r"meets bytes=10: the best is 400 at depth 1"):
        made_up().choose(bytes=10)
    with pytest.raises(BudgetError, match=r"meets min_accuracy=0.95: the best is 0.9 at depth 4"):
        made_up().choose(min_accuracy=0.95)
    message = r"all limits: latency_ms=1.5 by depths 1; min_accuracy=0.75 by depths 2, 4; relax one"
    with pytest.raises(BudgetError, match=message):
        made_up().choose(latency_ms=1.5, min_accuracy=0.75)


def test_accuracy_cannot_be_demanded_of_a_language_model() -> None:
    with pytest.raises(
        SettingError, match=r"min_accuracy=0.5, but this profile measured perplexity"
    ):
        made_up("perplexity").choose(min_accuracy=0.5)


def test_the_pareto_front_leaves_out_depths_that_are_beaten() -> None:
    assert made_up().pareto() == [1, 2, 4]
    assert made_up("mse", (1.0, 2.0, 1.0, 0.5)).pareto() == [1, 4]


def test_the_figure_of_quality_against_time_shows_every_depth_once() -> None:
    (axes,) = made_up().plot("tradeoff").axes
    assert [text.get_text() for text in axes.texts] == ["1", "2", "3", "4"]
    assert axes.get_ylabel().startswith("accuracy")
    assert "time of a batch of 8" in axes.get_xlabel()
    (line,) = (line for line in axes.lines if len(line.get_xdata()) == 3)  # the unbeaten
    assert list(line.get_xdata()) == [10, 20, 40]


def test_bad_input_is_refused() -> None:
    model, batch = ENTRIES["ViT"].make()
    with pytest.raises(SettingError, match=r"repeats=0\); use a whole number of 1 or more"):
        profile(model, batch, repeats=0)
    with pytest.raises(BatchError, match="the data has no batches"):
        profile(model, [])
    with pytest.raises(SettingError, match="depth 5, but this profile has depths 1-4"):
        made_up().at(5)
    assert made_up("mse").drop(1) == pytest.approx(-0.4)


# -- how it is measured --------------------------------------------------------------------------


def test_answers_alone_are_enough_for_an_encoder_decoder() -> None:
    config = T5Config(
        vocab_size=40, d_model=16, d_kv=8, d_ff=16, num_layers=2, num_heads=2,
        decoder_start_token_id=0,
    )  # fmt: skip
    model, ids = T5ForConditionalGeneration(config).eval(), torch.randint(2, 40, (6, 5))
    found = profile(model, {"input_ids": ids, "labels": ids.flip(1)}, repeats=1, progress=False)
    with torch.no_grad():
        own = float(model(input_ids=ids, labels=ids.flip(1)).loss)
    assert found.metric == "perplexity"
    assert found.at(2).quality == pytest.approx(math.exp(own), rel=1e-4)


def test_a_few_passes_do_and_none_has_more_rows_than_the_data() -> None:
    model, batch = ENTRIES["Llama-tied-CausalLM-right"].make()
    stream = as_stream(model)
    seen: list[int] = []
    # Block 1 is in every cut model, too; block 4 in those that are whole.
    for block in (stream.blocks[0], stream.blocks[-1]):
        # Inside of the block: embedding a batch calls blocks that pass it through.
        block.branches[-1].entry.register_forward_pre_hook(
            lambda _, args: seen.append(len(args[0]))
        )
    profile(model, batch, repeats=1, progress=False)
    rows = len(batch["input_ids"])
    assert max(seen) == rows
    # Observed, counted and timed once by all blocks; three cut models run the first.
    assert seen.count(rows) <= 2 * 3 + 3


def test_a_batch_of_eight_texts_takes_six_passes_of_the_full_model_at_most() -> None:
    model, batch = ENTRIES["Llama-tied-CausalLM-right"].make()
    batch = {key: value[:1].repeat(8, 8) for key, value in batch.items()}
    stream, seen = as_stream(model), [0]

    def count(_: Any, args: tuple[Tensor, ...]) -> None:
        seen[0] += args[0][..., 0].numel()  # tokens, of prompts and of what is written

    for block in stream.blocks:
        block.branches[-1].entry.register_forward_pre_hook(count)
    profile(model, batch, repeats=2, progress=False)  # as many as a slow model gets
    assert seen[0] <= 6 * stream.depth * batch["input_ids"].numel()


@pytest.fixture
def wordy() -> tuple[nn.Module, list[dict[str, Tensor]]]:
    """A model whose readout costs more than its blocks, and 12 rows of text in two batches."""
    config = LlamaConfig(
        vocab_size=4096, hidden_size=16, intermediate_size=16, num_hidden_layers=3,
        num_attention_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        model.lm_head.weight *= 40  # so that tokens differ
    ids = torch.randint(4096, (12, 48))
    return model, [{"input_ids": rows, "labels": rows} for rows in ids.split(8)]


def test_depths_of_a_large_vocabulary_are_read_at_some_tokens(
    wordy: tuple[nn.Module, list[dict[str, Tensor]]],
) -> None:
    model, data = wordy
    every = profile(model, data, repeats=1, tokens="all", progress=False)
    some = profile(model, data, repeats=1, progress=False)
    assert every.at(1).quality_band is None
    assert some.at(3).quality == every.at(3).quality  # the last depth is read at every token
    assert some.at(3).quality_band == (some.at(3).quality,) * 2
    assert some.table().column("± quality")[-1] == 0
    read = r"quality: depths below the last were read at \d+ of 564 tokens, drawn at random; ± is"
    assert re.match(read, some.table().notes[0])
    assert "± quality" not in every.table().headings
    for depth in (1, 2):
        low, high = some.at(depth).quality_band or (0, 0)
        error = math.log(high / low) / 2
        assert 0 < error < 1
        assert abs(math.log(some.at(depth).quality / every.at(depth).quality)) < 4 * error
    again = profile(model, data, repeats=1, progress=False)
    assert again.at(1).quality == some.at(1).quality


def test_readouts_of_a_large_vocabulary_cost_no_more_than_the_blocks(
    wordy: tuple[nn.Module, list[dict[str, Tensor]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, data = wordy
    seen, plainly = [0], qualities.word_statistics

    def counting(blocks: Any, *rest: Any) -> Any:
        seen[0] += sum(block.shape[0] * block.shape[1] for block in blocks)
        return plainly(blocks, *rest)

    monkeypatch.setattr(qualities, "word_statistics", counting)
    profile(model, data, repeats=1, progress=False)
    asked = 12 * 47
    fewest = 2 * 2 * qualities.FEWEST  # of two depths in two batches
    share = qualities.affordable_share(as_stream(model), 3)
    assert asked < seen[0] <= asked * (1 + 3 * share) + fewest


def test_as_many_passes_are_timed_as_fit_in_two_seconds_with_their_readouts(
    wordy: tuple[nn.Module, list[dict[str, Tensor]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, data = wordy
    turns: list[int] = []

    def recorded(stream: ResidualStream, batch: Any, repeats: int, *rest: Any, **more: Any) -> Any:
        turns.append(repeats)
        return times_by_depth(stream, batch, repeats, *rest, **more)

    # With the readout, a pass takes 0.45 seconds.
    cost = qualities.readout_cost(as_stream(model))
    assert cost > 0.3
    monkeypatch.setattr(profiling, "seconds", lambda run, _: (0.45 / (1 + cost), run()))
    monkeypatch.setattr(profiling, "times_by_depth", recorded)
    profile(model, data, progress=False)
    assert set(turns) == {4}


def test_sums_of_blocks_stand_beside_timed_cut_models() -> None:
    model, batch = ENTRIES["ViT"].make()
    checked = profile(model, batch, repeats=2, progress=False).about["checked"]
    assert set(checked) == {"1", "2", "3"}
    assert all(found["timed_ms"] > 0 < found["added_ms"] for found in checked.values())


def test_sums_far_from_cut_models_are_scaled_to_them() -> None:
    times = BlockTimes.of(np.array([1.0]), np.array([[2.0, 2.0, 2.0]]), np.array([1.0]))
    assert times.total.tolist() == [[4.0, 6.0, 8.0]]
    near = {"1": {"timed_ms": 105.0, "added_ms": 100.0}}
    assert times.corrected(near) is times
    far = {"1": {"timed_ms": 50.0, "added_ms": 100.0}, "3": {"timed_ms": 70.0, "added_ms": 100.0}}
    np.testing.assert_allclose(times.corrected(far).total, [[2.0, 3.6, 5.6]])
    assert times.quartiles(2)["median"] == 6000


def test_some_depths_are_profiled_alone() -> None:
    model, batch = ENTRIES["ViT"].make()
    labeled = batch | {"labels": torch.tensor([1, 2, 3])}
    whole = profile(model, labeled, repeats=1, progress=False)
    some = profile(model, labeled, depths="1::2", repeats=1, progress=False)
    assert [d.depth for d in some.depths] == [1, 3, 4]
    assert some.depth == 4
    for depth in (1, 3, 4):
        for name in ("quality", "parameters", "flops", "checkpoint_bytes"):
            assert getattr(some.at(depth), name) == getattr(whole.at(depth), name)
    with pytest.raises(SettingError, match="depth 2, but this profile has depths 1, 3-4"):
        some.at(2)


def test_more_batch_sizes_and_the_writing_of_tokens_are_timed_apart() -> None:
    model, batch = ENTRIES["Llama-tied-CausalLM-right"].make()
    found = profile(model, batch, batch_sizes=(1, 2), repeats=1, progress=False)
    assert found["latency_by_batch"].shape == (4, 2)
    assert "latency_by_batch: table('latency_by_batch') has the times" in found.table().notes
    assert found.table("latency_by_batch").headings == ("depth", "batch size 1", "batch size 2")
    assert found.result("decode").unit == "tokens/s"
    assert (np.diff(found["decode"]) < 0).all()  # every block takes time
    with pytest.raises(SettingError, match="batch size 9, but the first batch has 3 rows"):
        profile(model, batch, batch_sizes=(9,), repeats=1, progress=False)


def test_a_large_vocabulary_is_read_by_words(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = ENTRIES["Llama-tied-CausalLM-right"].make(torch.float64)
    plain = profile(model, batch, repeats=1, progress=False)
    monkeypatch.setattr(words, "WORDS", 20)
    assert words.predicts_words(as_stream(model))
    by_words = profile(model, batch, repeats=1, progress=False)
    np.testing.assert_allclose(by_words["quality"], plain["quality"], rtol=1e-9)


def test_a_small_last_batch_does_not_decide_how_often_a_large_one_is_timed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, batch = ENTRIES["ViT"].make()
    profiles = sys.modules[profile.__module__]
    turns: list[int] = []

    def by_rows(run: Callable[[], Any], stream: ResidualStream) -> tuple[float, Any]:
        found = run()
        return (len(found.h[0]) / 3 if isinstance(found, States) else 0.001), found

    def times(stream: ResidualStream, given: Any, repeats: int, *more: Any, **kwargs: Any) -> Any:
        turns.append(repeats)
        return times_by_depth(stream, given, repeats, *more, **kwargs)

    monkeypatch.setattr(profiles, "seconds", by_rows)
    monkeypatch.setattr(profiles, "times_by_depth", times)
    last = {name: value[:1] for name, value in batch.items()}
    profile(model, [batch, batch, last], batch_size=3, progress=False)
    # Of the two passes of a slow model, the one that counts operations is the first.
    assert turns == [1, 2]
