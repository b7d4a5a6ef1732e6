"""One head per depth: the baseline for the shared head."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from everydepth.objectives.technique import Technique
from everydepth.stream import ResidualStream


@dataclass(frozen=True, kw_only=True)
class OwnHeads(Technique, name="own_heads"):
    """Each depth below the last has its own head, initialized as a copy of the model's."""

    def heads(self, stream: ResidualStream) -> Mapping[int, nn.Module]:
        head = stream.linear_head("an objective with own heads")
        return {depth: copy.deepcopy(head) for depth in range(1, stream.depth)}
