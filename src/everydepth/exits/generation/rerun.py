"""Decode without a slotted cache: with the model's own cache, or with none."""

from __future__ import annotations

from collections.abc import Callable, Collection
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from everydepth.errors import EveryDepthError
from everydepth.exits.generation.tape import Tape
from everydepth.stream import Cursor, ResidualStream, evaluating, unwrapped

_TRIED = 4
FAILURES = (
    *(RuntimeError, TypeError, ValueError, IndexError, KeyError, AttributeError, AssertionError),
    EveryDepthError,
)


class Rerun(Tape):
    """A tape without slots: uses the model's own cache, or runs all tokens again each time.

    A recurrent state cannot undo a token, and a block cannot catch up with the one before it, so
    there are no drafts. With exits at several depths, earlier tokens are run again each time.

    cached: use the model's own cache; every token then goes to the top.
    """

    def __init__(
        self,
        stream: ResidualStream,
        ids: Tensor,
        real: Tensor,
        *,
        top: int,
        room: int,
        cached: bool = False,
    ) -> None:
        super().__init__(stream, ids, real, top=top, room=room)
        self._cached = cached
        self._begin()

    def _begin(self) -> None:
        self._own = self.stream.new_cache() if self._cached else None
        self._run: Cursor | None = None
        self._span = (0, 0)

    def advance(self, to: int) -> Tensor:
        end = self.length
        if self._run is None or self._span[1] < end:
            self._span = (self._span[1] if self._cached else 0, end)
            self._run = self._start(*self._span)
        before, first = self._run.depth, self._seen[to]
        self._run = self.stream.advance(self._run, to)
        for depth in range(before, to):
            self.passes[depth] += self._run.h.shape[0] * self._run.h.shape[1]
        self._seen[1 : to + 1] = [end] * to
        return self._run.h[:, first - self._span[0] :]

    def _start(self, at: int, end: int) -> Cursor:
        batch = {"input_ids": self._tokens[:, at:end]}
        if self._ragged:
            batch["position_ids"] = self._positions[:, at:end]
        batch["attention_mask"] = self._real[:, :end].long()
        return self.stream.start(batch, cache=self._own, to=self.top)

    def logits(self, to: int) -> Tensor:
        new = self.advance(to).shape[1]
        assert self._run is not None
        h = self.stream.exit_state(self._run)
        if self._cached:
            return self.stream.readout(h, to, {})
        return self.stream.readout(h, to, self._run.batch)[:, -new:]

    def last_logits(self, to: int) -> Tensor:
        return self.logits(to)[:, -1]

    def best(self, to: int, first: int) -> Tensor:
        return self.logits(to)[:, first:].argmax(-1)

    def select(self, rows: Tensor) -> None:
        super().select(rows)
        # The model's own cache may not support selecting rows, so it is filled again.
        self._begin()
        self._seen[1:] = [0] * self.top


def tape_for(
    stream: ResidualStream,
    ids: Tensor,
    real: Tensor,
    *,
    top: int,
    room: int,
    read: Collection[int] = (),
) -> Tape:
    """The fastest tape that reproduces the model's predictions.

    read: the depths below the top at which tokens are read out.
    """
    how = _how(stream, ids)
    if how == "slots":
        return Tape(stream, ids, real, top=top, room=room, read=read)
    return Rerun(stream, ids, real, top=top, room=room, cached=how == "own" and not read)


def has_slots(stream: ResidualStream, ids: Tensor) -> bool:
    """Whether blocks can undo tokens and catch up, as drafting requires."""
    return _how(stream, ids) == "slots"


_known: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()


def _how(stream: ResidualStream, ids: Tensor) -> str:
    """`slots`, `own` or `none`: tried once per model, on a few tokens, against a plain pass."""
    if stream.slotted is not None:
        return "slots" if stream.slotted else "none"
    model = unwrapped(stream.model)
    if model not in _known:
        text = ids[:1, :_TRIED].repeat(1, _TRIED)[:, :_TRIED]
        ways = {"slots": _by_slots, "own": _by_own_cache}
        with evaluating(model), torch.no_grad():
            wanted = stream.prediction(stream.call(stream.arguments({"input_ids": text}, None)))
            if not wanted.isfinite().all():
                return "slots"  # nothing to compare with; choosing a token raises an error later
            working = (how for how, way in ways.items() if _works(way, stream, text, wanted))
            _known[model] = next(working, "none")
    return _known[model]


def _works(
    tried: Callable[[ResidualStream, Tensor], Tensor],
    stream: ResidualStream,
    text: Tensor,
    wanted: Tensor,
) -> bool:
    try:
        found = tried(stream, text)
    except FAILURES:
        return False
    return found.shape == wanted[:, -1].shape and alike(found, wanted[:, -1])


def alike(found: Tensor, wanted: Tensor) -> bool:
    """Whether these are the same up to rounding: a wrong state differs far more."""
    scale = float(wanted.abs().max())
    return torch.allclose(found, wanted, rtol=0, atol=1e-3 * max(scale, 1e-6))


def _by_slots(stream: ResidualStream, text: Tensor) -> Tensor:
    """As in drafting: the first block goes ahead, and the others catch up with two tokens."""
    ahead, real = text[:, :-2], torch.ones_like(text[:, :-2], dtype=torch.bool)
    tape = Tape(stream, ahead, real, top=stream.depth, room=_TRIED)
    tape.last_logits(stream.depth)
    for place in (-2, -1):
        tape.feed(text[:, place])
        if stream.depth > 1:
            tape.advance(1)
    return tape.last_logits(stream.depth)


def _by_own_cache(stream: ResidualStream, text: Tensor) -> Tensor:
    ahead, real = text[:, :-2], torch.ones_like(text[:, :-2], dtype=torch.bool)
    tape = Rerun(stream, ahead, real, top=stream.depth, room=_TRIED, cached=True)
    tape.last_logits(stream.depth)
    for place in (-2, -1):
        tape.feed(text[:, place])
        found = tape.last_logits(stream.depth)
    return found
