"""Techniques: how an objective acts on the network itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn

from everydepth.objectives.moment import Moment
from everydepth.objectives.part import Part
from everydepth.stream import ResidualStream, States


@dataclass(frozen=True, kw_only=True)
class Technique(Part):
    """Override what you need; the base class does nothing."""

    order: ClassVar[int] = 200

    def heads(self, stream: ResidualStream) -> Mapping[int, nn.Module]:
        """New heads by depth, trained with the model and saved next to it."""
        return {}

    def observe(
        self, stream: ResidualStream, batch: Mapping[str, Any], moment: Moment
    ) -> States | None:
        """The states of a training pass; None for the stream's own. `batch` is checked."""
        return None

    def exits(self, states: States, weights: Sequence[float]) -> States:
        """The states as passed to the readout of each depth; `weights` are of depths 0..L."""
        return states
