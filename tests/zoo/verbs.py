"""Every verb once on one model and batch: what each is asked, and where it does not apply."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

import everydepth as ed
from everydepth.errors import UnsupportedModelError
from everydepth.exits.generation.rerun import has_slots
from everydepth.stream import ResidualStream, sites

Batch = Mapping[str, Tensor]


class NotApplicable(Exception):
    """A verb that says nothing about this kind of model."""


def _labelled(stream: ResidualStream, batch: Batch) -> dict[str, Tensor]:
    z = stream.observe(batch).logits(stream.depth)
    generator = torch.Generator().manual_seed(0)
    if stream.task == "regression":
        return {**batch, "labels": torch.randn(z.shape, generator=generator)}
    shape = z.shape[:-1] if z.ndim > 1 else z.shape
    return {**batch, "labels": torch.randint(0, z.shape[-1], shape, generator=generator)}


def train(model: nn.Module, batch: Batch) -> None:
    stream = ed.as_stream(model)
    loss = ed.EveryDepth(stream, objective=ed.lpa())(**_labelled(stream, batch)).loss
    loss.backward()
    assert all(
        any(p.grad is not None and bool(p.grad.any()) for p in block.module.parameters())
        for block in stream.blocks
    )
    model.zero_grad()


def trace(model: nn.Module, batch: Batch) -> None:
    stream = ed.as_stream(model)
    found = ed.trace(stream, [_labelled(stream, batch)], progress=False)
    assert len(list(found)) > 0


def at_depth(model: nn.Module, batch: Batch) -> None:
    stream = ed.as_stream(model)
    small = ed.at_depth(stream, 1)
    cut = ed.as_stream(small, **stream.options)
    with torch.no_grad():
        z = cut.prediction(cut.call(cut.arguments(batch, None)))
        torch.testing.assert_close(z, stream.observe(batch).logits(1), rtol=1e-4, atol=1e-5)


def predict(model: nn.Module, batch: Batch) -> None:
    stream = ed.as_stream(model)
    if stream.task != "classification" or stream.classes < 2:
        raise NotApplicable("a class a sample")
    ed.predict(stream, batch, policy=ed.exits.Confidence(threshold=0.4))


def generate(model: nn.Module, batch: Batch) -> None:
    stream = ed.as_stream(model)
    if stream.task != "causal_lm":
        raise NotApplicable("a causal language model")
    ids = batch["input_ids"]
    whole = ed.generate(stream, ids, max_new_tokens=3)
    if not has_slots(stream, ids):
        return  # no drafts without keys and values by token
    drafted = ed.generate(stream, ids, max_new_tokens=3, draft_depth=1)
    assert str(whole.tokens) == str(drafted.tokens)


def ablate(model: nn.Module, batch: Batch) -> None:
    stream = ed.as_stream(model)
    if not stream.blocks[0].branches:
        raise NotApplicable("known branches")
    with torch.no_grad():
        before = stream.observe(batch).logits(stream.depth)
        with ed.scaled_skip(stream, layer=1, c=1.0):
            same = stream.observe(batch).logits(stream.depth)
        with ed.scaled_skip(stream, layer=1, c=0.0):
            other = stream.observe(batch).logits(stream.depth)
    torch.testing.assert_close(same, before)
    assert not torch.equal(other, before)


def insert(model: nn.Module, batch: Batch) -> None:
    stream = ed.as_stream(model)
    where = sites(stream)
    if not where:
        raise NotApplicable("a block whose silent branches pass the state on")
    try:
        big = ed.insert(stream, after=where[-1]).eval()
    except UnsupportedModelError as refusal:
        if "cannot describe" not in str(refusal):
            raise
        raise NotApplicable("a config that can describe one more block") from refusal
    grown = ed.as_stream(big, **stream.options)
    with torch.no_grad():
        z = grown.prediction(grown.call(grown.arguments(batch, None)))
        wanted = stream.prediction(stream.call(stream.arguments(batch, None)))
    assert torch.equal(z, wanted)


VERBS: Mapping[str, Callable[[nn.Module, Batch], Any]] = {
    "train": train,
    "trace": trace,
    "at_depth": at_depth,
    "predict": predict,
    "generate": generate,
    "ablate": ablate,
    "insert": insert,
}
