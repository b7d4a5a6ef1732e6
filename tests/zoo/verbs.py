"""Every verb once on one stream and batch: what each is asked, and where it does not apply."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import everydepth as ed
from everydepth.errors import EveryDepthError
from everydepth.exits.generation.rerun import has_slots
from everydepth.growth import score
from everydepth.stream import ResidualStream, sites

Batch = Mapping[str, Tensor]

CLASSES = "early exit needs a model that predicts a class per sample"
LABELS = "an audit (is of|needs) class labels"
NEXT = "not the next token"
START = "has no start token"
SHARED = "one module (that is called |called )?at several depths"
EXPERTS = "only a single linear layer or convolution can be scored"
GROUPED = "only one with groups=1 and numeric padding can be scored"
NO_BRANCHES = "branches are unknown|declares no branches|without its branches"
NOT_STOCK = "is not a Hugging Face model"
NO_SILENCE = "no block can be inserted|a silent block after depth .* changes what"
NO_WORDS = "cannot describe|from the position or number of|from the place or the number of"

# Verb -> properties of a network without which it cannot act, in the words of its error.
MISSING: Mapping[str, tuple[str, ...]] = {
    "at_depth": (NO_WORDS,),
    "predict": (CLASSES,),
    "audit": (LABELS,),
    "generate": (NEXT, START),
    "export": (NOT_STOCK, NO_WORDS),
    "scaled_skip": (SHARED, NO_BRANCHES),
    "ablate": (SHARED, NO_BRANCHES),
    "insert": (SHARED, NO_BRANCHES, NO_SILENCE, NO_WORDS),
    "growth": (SHARED, NO_BRANCHES, NO_SILENCE, NO_WORDS, EXPERTS, GROUPED),
}


def applies(verb: str, error: Exception) -> bool:
    """Whether a verb should have acted: its error names no property that the network lacks."""
    known = MISSING.get(verb, ())
    named = any(re.search(reason, str(error)) for reason in known)
    return not (isinstance(error, EveryDepthError) and named)


@torch.no_grad()
def labeled(stream: ResidualStream, batch: Batch) -> dict[str, Tensor]:
    """The batch with labels drawn by a seed, of the shape that the prediction asks for."""
    z = stream.observe(batch).logits(stream.depth)
    generator = torch.Generator().manual_seed(0)
    if stream.task == "regression":
        return {**batch, "labels": torch.randn(z.shape, generator=generator)}
    labels = torch.randint(0, z.shape[-1], z.shape[:-1], generator=generator)
    return {**batch, "labels": labels}


def train(stream: ResidualStream, batch: Batch, _: Path) -> None:
    ed.EveryDepth(stream, objective=ed.lpa())(**batch).loss.backward()
    assert all(
        any(p.grad is not None and bool(p.grad.any()) for p in block.module.parameters())
        for block in stream.blocks
    )
    stream.model.zero_grad()


def trace(stream: ResidualStream, batch: Batch, _: Path) -> None:
    found = ed.trace(stream, [batch], metrics=["loss", "cos", "cka"], progress=False)
    assert found["loss"].shape == (stream.depth + 1,)


def profile(stream: ResidualStream, batch: Batch, _: Path) -> None:
    found = ed.profile(stream, [batch], repeats=1, progress=False)
    assert len(found.depths) == stream.depth


def at_depth(stream: ResidualStream, batch: Batch, _: Path) -> None:
    cut = ed.as_stream(ed.at_depth(stream, 1), **stream.options)
    with torch.no_grad():
        z = cut.prediction(cut.call(cut.arguments(batch, None)))
        torch.testing.assert_close(z, stream.observe(batch).logits(1), rtol=1e-4, atol=1e-5)


def export(stream: ResidualStream, batch: Batch, folder: Path) -> None:
    example = {key: value for key, value in batch.items() if key != "labels"}
    written = ed.export(stream, folder / "cut", depth=1, example=example, overwrite=True)
    model: Any = type(stream.model)
    assert ed.as_stream(model.from_pretrained(written), **stream.options).depth == 1


def predict(stream: ResidualStream, batch: Batch, _: Path) -> None:
    found = ed.predict(stream, batch, policy=ed.exits.Confidence(threshold=0.4))
    assert len(found.depths) == stream.rows(batch)


def generate(stream: ResidualStream, batch: Batch, _: Path) -> None:
    ids = batch["input_ids"] if "input_ids" in batch else next(iter(batch.values()))
    whole = ed.generate(stream, ids, max_new_tokens=3)
    if has_slots(stream, ids):  # no drafts without keys and values by token
        drafted = ed.generate(stream, ids, max_new_tokens=3, draft_depth=1)
        assert str(whole.tokens) == str(drafted.tokens)


@torch.no_grad()
def scaled_skip(stream: ResidualStream, batch: Batch, _: Path) -> None:
    states = stream.observe(batch)
    before = states.logits(stream.depth)
    with ed.scaled_skip(stream, layer=1, c=1.0):
        torch.testing.assert_close(stream.observe(batch).logits(stream.depth), before)
    with ed.scaled_skip(stream, layer=1, c=0.0):
        # In logits of random weights a change may be lost to rounding (MobileNetV2).
        assert not torch.equal(stream.observe(batch)[1], states[1])
    assert torch.equal(stream.observe(batch).logits(stream.depth), before)


def ablate(stream: ResidualStream, batch: Batch, _: Path) -> None:
    ed.ablate(stream, [batch], progress=False)


def audit(stream: ResidualStream, batch: Batch, _: Path) -> None:
    ed.audit(stream, [batch], progress=False)


def insert(stream: ResidualStream, batch: Batch, _: Path) -> None:
    where = sites(stream)
    big = ed.insert(stream, after=where[-1] if where else stream.depth).eval()
    grown = ed.as_stream(big, **stream.options)
    assert grown.depth == stream.depth + 1
    with torch.no_grad():
        z = grown.prediction(grown.call(grown.arguments(batch, None)))
        assert torch.equal(z, stream.prediction(stream.call(stream.arguments(batch, None))))


def growth(stream: ResidualStream, batch: Batch, _: Path) -> None:
    rows = {key: torch.cat([value] * 4) for key, value in batch.items()}
    where = sites(stream)
    assert score(stream, rows, at=[where[-1] if where else stream.depth], progress=False).sites


VERBS: Mapping[str, Callable[[ResidualStream, Batch, Path], Any]] = {
    verb.__name__: verb
    for verb in (
        *(train, trace, profile, at_depth, export, predict, generate),
        *(scaled_skip, ablate, audit, insert, growth),
    )
}
