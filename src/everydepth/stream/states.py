"""The result of *observe*: every state of one forward pass."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from everydepth.config import checked
from everydepth.errors import NonFiniteError
from everydepth.stream.cursor import Call, Cursor

if TYPE_CHECKING:
    from everydepth.stream.contract import ResidualStream


@dataclass(frozen=True)
class States:
    """`h_0 .. h_L` of one batch, the model's own output, and the readout at any depth.

    output: None if the model's own head was skipped.
    calls: how the model called each block, if requested.

    >>> batch = test.batch(range(4))
    >>> states = ed.as_stream(model).observe(batch)
    >>> len(states), states[0].shape  # h_0 .. h_3; four patches and a class token, width 32
    (4, torch.Size([4, 5, 32]))
    >>> torch.equal(states.logits(3), model(**batch).logits)
    True
    """

    stream: ResidualStream
    h: tuple[Tensor, ...]
    batch: Mapping[str, Any]
    output: Any
    calls: tuple[Call, ...] = ()
    _exits: dict[int, Tensor] = field(default_factory=dict[int, Tensor], init=False, repr=False)

    def __len__(self) -> int:
        return len(self.h)

    def __getitem__(self, depth: int) -> Tensor:
        return self.h[self.stream.check_depth(depth)]

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.h)

    @property
    def depth(self) -> int:
        """The last depth, L."""
        return len(self.h) - 1

    def feature(self, depth: int) -> Tensor:
        """The part of the state that predicts, `(batch, [token,] dim)`; see the stream's."""
        return self.stream.feature(self.exit_state(depth), depth, self.batch)

    def exit_state(self, depth: int) -> Tensor:
        """The input of the readout: the state, after the stream's exit if it has one here."""
        h = self[depth]
        if depth not in self.stream.exits:
            return h
        if depth not in self._exits:
            cursor = Cursor(depth, h, self.batch, self.calls, None, self.stream.heads)
            self._exits[depth] = self.stream.exit_state(cursor)
        return self._exits[depth]

    def logits(self, depth: int) -> Tensor:
        """The prediction `z_l` through the shared readout; at depth L the model's own output."""
        if self.stream.check_depth(depth) == self.depth and self.output is not None:
            return self.stream.prediction(self.output)
        return self.stream.readout(self.exit_state(depth), depth, self.batch)

    def check_finite(self) -> States:
        """Self; raise with the first depth at which NaN or infinity appears."""
        for depth, h in enumerate(self.h):
            if not torch.isfinite(h).all():
                place = "the embedding" if depth == 0 else f"block {depth}"
                bad = int((~torch.isfinite(h)).flatten(1).any(1).sum())
                raise NonFiniteError(
                    f"NaN or infinity first appears after {place} (depth {depth} of {self.depth}), "
                    f"in {bad} of {h.shape[0]} rows; look at the inputs of that block, or train "
                    "with a lower learning rate or a wider dtype",
                    depth,
                )
        return self

    @checked
    def check_predictions(self, lowest: int = 1) -> States:
        """Self; raise with the first depth whose predictions are not finite.

        A logit of -infinity (a class ruled out) is allowed, unless all of a row's are. It reads out
        every depth, so use it when something is already known to be wrong.
        """
        self.check_finite()
        for depth in range(lowest, self.depth + 1):
            bad = ~are_finite(self.logits(depth))
            if bool(bad.any()):
                raise NonFiniteError(
                    f"all states are finite, but predictions at depth {depth} of {self.depth} are "
                    f"NaN or infinite, {int(bad.sum())} of {bad.numel()}; look at the final norm "
                    "and the head, or use a wider dtype",
                    depth,
                )
        return self


def holds_from(good: Tensor) -> Tensor:
    """The first depth from which on all are true, or L + 1: (depths 0..L, rows) -> (rows,).

    >>> from everydepth.stream.states import holds_from
    >>> predicted = torch.tensor([[3, 1], [5, 1], [5, 1]])
    >>> holds_from(predicted == predicted[-1]).tolist()
    [1, 0]
    """
    return (~good.flip(0).int().cumprod(0).bool()).sum(0)


def are_finite(z: Tensor) -> Tensor:
    """Which predictions have a finite largest logit: neither NaN nor infinity, nor all classes
    ruled out."""
    return torch.isfinite(z.amax(-1))
