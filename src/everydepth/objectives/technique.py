"""What an objective does to the network itself, beside weighing losses."""

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
    """Override what you need; as it stands, nothing is done."""

    order: ClassVar[int] = 200

    def heads(self, stream: ResidualStream) -> Mapping[int, nn.Module]:
        """New heads by depth, which are trained with the model and saved beside it."""
        return {}

    def observe(
        self, stream: ResidualStream, batch: Mapping[str, Any], moment: Moment
    ) -> States | None:
        """The states of a training pass; None leaves them to the stream. `batch` is checked."""
        return None

    def exits(self, states: States, weights: Sequence[float]) -> States:
        """The states as the readout of each depth gets them; `weights` of depths 0..L."""
        return states
