"""Does an objective train every block? One curriculum cycle tells."""

from __future__ import annotations

from typing import Any

from everydepth.training.module import EveryDepth


class ObjectiveReport:
    """What `check_objective` found."""


def check_objective(net: EveryDepth, batch: Any) -> ObjectiveReport:
    raise NotImplementedError
