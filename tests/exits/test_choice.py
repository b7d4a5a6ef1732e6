"""Which blocks to keep: those that do nothing go first."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from tests.helpers.training import digits, vit
from tests.zoo import ENTRIES

import everydepth as ed
from everydepth.errors import DepthError, SettingError


def with_idle_blocks() -> Any:
    """Five blocks, of which 2 and 4 pass the state through."""
    model = ed.insert(vit(dropout=0.0).eval(), after=1)
    return ed.insert(model, after=3).eval()


def test_blocks_that_do_nothing_are_dropped_first() -> None:
    model, data = with_idle_blocks(), digits(40)
    found = ed.choose_blocks(model, data, keep=3, progress=False)
    assert found.keep == (1, 3, 5)
    small = ed.at_depth(model, keep=found.keep)
    images = data.batch(range(4))["pixel_values"]
    assert small.config.num_hidden_layers == 3
    assert torch.allclose(small(images).logits, model(images).logits, atol=1e-6)


@torch.no_grad()
def loss_with(model: Any, keep: list[int], batch: Any) -> float:
    logits = ed.at_depth(model, keep=keep).eval()(batch["pixel_values"]).logits
    return float(torch.nn.functional.cross_entropy(logits, batch["labels"]))


def test_by_loss_each_block_dropped_is_the_one_whose_absence_costs_least() -> None:
    model, data = vit(dropout=0.0).eval(), digits(40)
    batch = data.batch(range(40))
    found = ed.choose_blocks(model, data, keep=1, by="loss", progress=False)
    left = [1, 2, 3]
    for number, block in enumerate(found.dropped, start=1):
        losses = {b: loss_with(model, [k for k in left if k != b], batch) for b in left}
        assert block == min(losses, key=lambda b: losses[b])
        assert found["loss"][number] == pytest.approx(losses[block], rel=1e-5)
        left.remove(block)
    assert found.keep == tuple(left)


def test_a_span_is_dropped_where_the_state_turns_least_together() -> None:
    model = ed.insert(ed.insert(vit(dropout=0.0).eval(), after=1), after=2).eval()
    found = ed.choose_blocks(model, digits(40), keep=3, by="span", progress=False)
    assert found.dropped == (2, 3)
    assert found["span"][1] == pytest.approx(0, abs=1e-3)


def test_influence_is_one_minus_the_cosine_over_real_tokens() -> None:
    model, batch = ENTRIES["Llama-tied-CausalLM-left"].make()
    found = ed.choose_blocks(model.eval(), [batch], keep=2, progress=False)
    h, real = ed.as_stream(model).observe(batch).h, batch["attention_mask"] != 0
    expected = [
        1 - torch.cosine_similarity(a[real], b[real], dim=-1).mean().item() for a, b in pairwise(h)
    ]
    assert found["influence"].tolist() == pytest.approx(expected, abs=1e-6)
    order = sorted(range(4), key=lambda block: expected[block])
    assert found.dropped == tuple(block + 1 for block in order[:2])


def test_a_short_fit_repairs_what_is_left() -> None:
    model, data = vit(dropout=0.0).eval(), digits(64)
    small = ed.at_depth(model, keep=[1, 3])
    done = ed.fit(
        ed.EveryDepth(small, ed.end_to_end()), data, data, steps=20, lr=1e-2, progress=False
    )
    before = ed.fit(
        ed.EveryDepth(ed.at_depth(model, keep=[1, 3]), ed.end_to_end()),
        data,
        data,
        steps=1,
        lr=1e-9,
        progress=False,
    )
    assert done.valid["loss"][-1] < before.valid["loss"][-1]


@pytest.mark.parametrize("kind", ["Llama-tied-CausalLM-left", "GPT2-CausalLM-right"])
def test_kept_blocks_of_a_language_model_write_with_their_cache(kind: str) -> None:
    model, batch = ENTRIES[kind].make()
    small = ed.at_depth(model.eval(), keep=[2, 4])
    found = ed.generate(small, batch["input_ids"][:1, -3:], max_new_tokens=4, eos_token_id=())
    whole = small(input_ids=found.sequences[:, :-1]).logits[0, -1].argmax()
    assert int(whole) == found.tokens[0][-1]


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda m: ed.at_depth(m, keep=[2, 1]), DepthError, "each once and in ascending order"),
        (lambda m: ed.at_depth(m, keep=[]), DepthError, "name blocks of .* from 1 to 3"),
        (lambda m: ed.at_depth(m, keep=[4]), DepthError, "depth 4, but .* has 3 blocks"),
        (lambda m: ed.at_depth(m, 2, keep=[1]), DepthError, "give one of them"),
        (lambda m: ed.at_depth(m), DepthError, "give one of them"),
        (
            lambda m: ed.choose_blocks(m, digits(8), keep=3, progress=False),
            DepthError,
            "keep=3, but .* has 3 blocks; use 1 to 2",
        ),
    ],
)
def test_a_choice_that_cannot_be_made_is_refused(call: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        call(vit())


def test_a_block_that_changes_the_shape_is_not_dropped() -> None:
    model, batch = ENTRIES["CifarResNet-post-projection"].make()
    with pytest.raises(DepthError, match="changes the shape of the state; keep it"):
        ed.at_depth(model, keep=[1])
    with pytest.raises(SettingError, match="no angle; use by='loss'"):
        ed.choose_blocks(model, [batch], keep=2, progress=False)
