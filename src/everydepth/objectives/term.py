"""Terms: what an objective adds to the weighted losses."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from everydepth.objectives.moment import Moment
from everydepth.objectives.part import Part
from everydepth.stream import States, Targets


@dataclass(frozen=True, kw_only=True)
class Pass:
    """One pass through the network, as passed to a term.

    states: of every depth, as the exits read them.
    targets: what to predict; `targets.pick` selects the rows of a feature or a prediction.
    weights: of the supervised depths at this step.
    logits: the prediction at a depth, through its own head if it has one.
    """

    states: States
    targets: Targets
    weights: Mapping[int, float]
    logits: Callable[[int], Tensor]
    moment: Moment


@dataclass(frozen=True, kw_only=True)
class Term(Part):
    """Something added to the loss."""

    order: ClassVar[int] = 100
    whole_logits: ClassVar[bool] = True
    """False if it never calls `logits`: the loss can then be computed in chunks."""

    @property
    def replaces_labels(self) -> bool:
        """Whether depths below the last learn from it alone."""
        return False

    @property
    def needs_labels(self) -> bool:
        """False if it can learn from a batch without labels."""
        return True

    @abstractmethod
    def __call__(self, seen: Pass) -> Tensor:
        """One number, already weighted."""
