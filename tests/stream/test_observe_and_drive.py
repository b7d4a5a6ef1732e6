"""The two ways to run a stream, and that neither leaves anything behind."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from tests.zoo import ENTRIES
from torch import Tensor, nn

import everydepth as ed
from everydepth.stream import BranchRecord, record_branches

LLAMA, VIT, QWEN = "Llama-tied-CausalLM-left", "ViT", "Qwen2-window-CausalLM-left"


def traces(model: nn.Module) -> list[Any]:
    """All that a forgotten hook or patched forward would change."""
    names = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks")
    return [
        (len(getattr(m, n)), "forward" in vars(m), m.training)
        for m in model.modules()
        for n in names
    ]


class Broken(Exception):
    pass


def breaking(block: nn.Module) -> None:
    def fail(*_: Any) -> None:
        raise Broken

    block.register_forward_hook(fail)


@pytest.mark.parametrize("verb", ["observe", "start", "advance", "record", "check"])
def test_an_exception_inside_the_model_leaves_nothing_behind(verb: str) -> None:
    model, batch = ENTRIES[VIT].make()
    stream = ed.as_stream(model)
    breaking(model.vit.layers[2] if verb != "start" else model.vit.embeddings)
    before = traces(model)

    def record() -> None:
        with record_branches(stream.blocks):
            model(**batch)

    calls: dict[str, Callable[[], Any]] = {
        "observe": lambda: stream.observe(batch),
        "start": lambda: stream.start(batch),
        "advance": lambda: stream.advance(stream.start(batch)),
        "record": record,
        "check": lambda: ed.check_stream(model, batch),
    }
    with pytest.raises(Broken):
        calls[verb]()
    assert traces(model) == before


def test_a_forward_that_was_replaced_by_others_is_given_back() -> None:
    """accelerate and others exchange `forward` on the instance; ours must not undo theirs."""
    model, batch = ENTRIES[VIT].make()
    block = model.vit.layers[0]
    original = block.forward
    block.forward = lambda *args, **kwargs: original(*args, **kwargs)
    mine = block.forward
    ed.as_stream(model).start(batch)
    assert block.forward is mine


def test_a_cursor_can_be_stepped_again_from_any_depth() -> None:
    model, batch = ENTRIES[LLAMA].make()
    stream = ed.as_stream(model)
    with torch.no_grad():
        middle = stream.advance(stream.start(batch), to=2)
        once, again = stream.advance(middle), stream.advance(middle)
        states = stream.observe(batch)
    assert middle.depth == 2
    assert torch.equal(once.h, again.h)
    assert torch.equal(once.h, states[4])


def test_each_block_gets_its_own_mask_in_drive() -> None:
    model, batch = ENTRIES[QWEN].make()
    cursor = ed.as_stream(model).start(batch)
    masks = [call.kwargs["attention_mask"] for call in cursor.calls]
    assert not torch.equal(masks[0], masks[-1])


def test_rows_picked_by_mask_or_index_are_the_same_rows() -> None:
    model, batch = ENTRIES[LLAMA].make()
    stream = ed.as_stream(model)
    with torch.no_grad():
        cursor = stream.step(stream.start({**batch, "labels": torch.arange(3)}))
        by_index = stream.advance(cursor.select(torch.tensor([0, 2])))
        by_mask = stream.advance(cursor.select(torch.tensor([True, False, True])))
    assert torch.equal(by_index.h, by_mask.h)
    assert by_index.batch["labels"].tolist() == [0, 2]
    assert by_index.batch["input_ids"].shape == (2, 7)


def test_selecting_rows_cuts_the_cache_to_the_same_rows() -> None:
    model, batch = ENTRIES[LLAMA].make(torch.float64)
    stream = ed.as_stream(model)
    ids, mask = batch["input_ids"], batch["attention_mask"]
    rows = torch.tensor([2, 0])
    with torch.no_grad():
        expected = model(**batch).logits[rows, -1]
        cache = stream.new_cache()
        head = {"input_ids": ids[:, :-1], "attention_mask": mask[:, :-1]}
        stream.advance(stream.start(head, cache=cache)).select(rows)
        tail = {"input_ids": ids[rows, -1:], "attention_mask": mask[rows]}
        found = stream.logits(stream.advance(stream.start(tail, cache=cache)))
    torch.testing.assert_close(found[:, -1], expected, rtol=0, atol=1e-12)


def test_labels_never_reach_the_model() -> None:
    """The model's own loss would be computed for nothing."""
    model, batch = ENTRIES[LLAMA].make()
    states = ed.as_stream(model).observe({**batch, "labels": batch["input_ids"]})
    assert states.output.loss is None
    assert "labels" in states.batch


def test_observing_builds_no_cache() -> None:
    model, batch = ENTRIES[LLAMA].make()
    assert ed.as_stream(model).observe(batch).output.past_key_values is None


def test_gradients_through_observe_are_those_of_the_plain_model() -> None:
    model, batch = ENTRIES[VIT].make(torch.float64)
    parameters = list(model.parameters())
    plain = torch.autograd.grad(model(**batch).logits.square().sum(), parameters)
    observed = ed.as_stream(model).observe(batch).logits(4)
    for a, b in zip(plain, torch.autograd.grad(observed.square().sum(), parameters), strict=True):
        assert torch.equal(a, b)


def test_records_that_are_handed_on_are_the_same_and_are_not_kept() -> None:
    model, batch = ENTRIES[VIT].make()
    stream = ed.as_stream(model)
    sums: dict[int, list[Tensor]] = {}
    alive: list[int] = []
    outs: list[weakref.ref[Tensor]] = []

    def see(index: int, seen: Sequence[BranchRecord]) -> None:
        sums[index] = [(r.x.sum() + r.out.sum()) for r in seen]
        alive.append(sum(ref() is not None for ref in outs))
        outs.extend(weakref.ref(r.out) for r in seen)

    with torch.no_grad(), record_branches(stream.blocks, to=see) as kept:
        model(**batch)
    with torch.no_grad(), record_branches(stream.blocks) as records:
        model(**batch)
    assert not any(kept)
    assert set(alive) == {0}
    for index, block in enumerate(records):
        assert sums[index] == [r.x.sum() + r.out.sum() for r in block]


def test_the_gradient_at_a_tap_includes_the_skip() -> None:
    """Finite differences on the stream between the two branches of a block."""
    model, batch = ENTRIES[VIT].make(torch.float64)
    stream = ed.as_stream(model)
    with record_branches(stream.blocks) as records:
        loss = model(**batch).logits.sin().sum()
    x = records[1][1].x
    (gradient,) = torch.autograd.grad(loss, x)
    direction = torch.randn_like(x)
    step = 1e-6

    def moved(by: float) -> Tensor:
        def shift(_: nn.Module, args: tuple[Tensor], output: tuple[Tensor, Any]) -> Any:
            return (output[0] + by * direction, *output[1:])

        # What attention adds reaches both the MLP branch and its skip.
        handle = model.vit.layers[1].attention.register_forward_hook(shift)
        try:
            return model(**batch).logits.sin().sum()
        finally:
            handle.remove()

    with torch.no_grad():
        slope = (moved(step) - moved(-step)) / (2 * step)
    torch.testing.assert_close((gradient * direction).sum(), slope, rtol=1e-6, atol=1e-9)
