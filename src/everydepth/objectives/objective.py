"""An objective: how much the loss at each depth counts at each step, and additional terms."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from everydepth.config import Count, Whole, brief, check_names, checked
from everydepth.errors import SettingError
from everydepth.objectives.distilled import Distilled
from everydepth.objectives.equilibrium import Equilibrium
from everydepth.objectives.layer_dropout import LayerDropout
from everydepth.objectives.moment import Moment
from everydepth.objectives.part import Part, part_of
from everydepth.objectives.schedules import Annealed, Sampled, Stage, WarmedUp, WeightSchedule
from everydepth.objectives.shapes import Last, Shape
from everydepth.objectives.technique import Technique
from everydepth.objectives.term import Term

P = TypeVar("P", bound=Part)


@checked
@dataclass(frozen=True, kw_only=True)
class Objective:
    """`sum_l w_l(step) loss(z_l, y)` plus additional terms. Steps count from 0.

    parts: one `Shape` over depths (by default `Last`), which defines the weights; any number of
        `WeightSchedule`s, which change them over training; `Term`s added to the loss; and
        `Technique`s that act on the network. `objective + part` adds a part, or replaces the one of
        the same class.
    seed: random choices depend only on the seed and the step, so a resumed run repeats them.

    >>> objective = ed.lpa(early=0.2).annealed(by=0.8)
    >>> objective.weights(0, 100, 4).tolist()  # of depths 0..4, at the first of 100 steps
    [0.0, 0.2, 0.2, 0.2, 1.0]
    >>> objective.weights(90, 100, 4).tolist()  # after annealing, only the last depth remains
    [0.0, 0.0, 0.0, 0.0, 1.0]
    >>> from everydepth.objectives import Normalized
    >>> (ed.lpa(early=1.0) + Normalized()).weights(0, None, 4).tolist()
    [0.0, 0.25, 0.25, 0.25, 0.25]
    """

    name: str
    parts: tuple[Part, ...] = ()
    seed: int = 0

    def __post_init__(self) -> None:
        given = [part.part for part in self.parts]
        twice = next((name for name in given if given.count(name) > 1), None)
        shapes = [part.part for part in self.parts if isinstance(part, Shape)]
        if twice is not None or len(shapes) > 1:
            raise SettingError(
                f"{self.name} has the parts {', '.join(given)}; give each once, and one shape"
            )
        if self.seed < 0:
            raise SettingError(f"seed={self.seed}; use a whole number of 0 or more")
        parts = self.parts if shapes else (Last(), *self.parts)
        ordered = sorted(parts, key=lambda part: (part.order, part.part))
        object.__setattr__(self, "parts", tuple(ordered))

    # -- composing --------------------------------------------------------------------------------

    def __add__(self, part: Part) -> Objective:
        kind = Shape if isinstance(part, Shape) else type(part)
        others = (other for other in self.parts if not isinstance(other, kind))
        return replace(self, parts=(*others, part))

    @checked
    def annealed(self, *, to: float = 0.0, by: float = 0.8) -> Objective:
        """Reduce the weights below the last depth to `to` of their value by this share of steps."""
        return self + Annealed(to=to, by=by)

    @checked
    def warmed_up(self, *, over: float = 0.1, start: float = 0.0) -> Objective:
        """Raise the weights below the last depth from `start` of their value over this share."""
        return self + WarmedUp(over=over, start=start)

    @checked
    def sampled(self, k: int, *, seed: int | None = None) -> Objective:
        """Supervise the last depth and k others, sampled again at every step; unbiased."""
        return replace(self, seed=self.seed if seed is None else seed) + Sampled(k=k)

    def equilibrated(self) -> Objective:
        """Scale each block's gradient to the size that a single depth would cause (IMTA)."""
        return self + Equilibrium()

    @checked
    def distilled(
        self,
        weight: float = 1.0,
        temperature: float = 1.0,
        *,
        labels: bool = True,
        words: int | None = None,
    ) -> Objective:
        """Pull the predictions of all supervised depths toward the last one's, which is fixed.

        labels: if False, depths below the last learn from this alone. Batches without labels are
            used either way.
        words: compare only this many words per step in batches without labels: those the last
            depth finds likely and a sample of the rest. None: all.
        """
        settings: dict[str, Any] = {"weight": weight, "temperature": temperature, "labels": labels}
        return self + Distilled(words=words, **settings)

    @checked
    def layer_dropout(self, most: float = 0.1, *, decays: bool = True) -> Objective:
        """Let samples skip blocks in training, the last one with probability `most`.

        decays: reduce the probability to 0 over training.
        """
        return self + LayerDropout(most=most, decays=decays)

    # -- parts ------------------------------------------------------------------------------------

    @checked
    def get(self, kind: type[P]) -> P | None:
        """The part of this class, or None."""
        return next((part for part in self.parts if isinstance(part, kind)), None)

    @property
    def shape(self) -> Shape:
        found = self.get(Shape)
        assert found is not None
        return found

    @property
    def schedules(self) -> tuple[WeightSchedule, ...]:
        return tuple(part for part in self.parts if isinstance(part, WeightSchedule))

    @property
    def terms(self) -> tuple[Term, ...]:
        return tuple(part for part in self.parts if isinstance(part, Term))

    @property
    def techniques(self) -> tuple[Technique, ...]:
        return tuple(part for part in self.parts if isinstance(part, Technique))

    # -- weights ----------------------------------------------------------------------------------

    @property
    def needs_total(self) -> bool:
        """Whether it needs the total number of training steps."""
        return any(part.needs_total for part in self.parts)

    @checked
    def cycle(self, depth: Whole) -> int:
        """The number of steps after which every depth it can supervise has had its turn.

        For one that samples depths or depends on the total, enough steps to see all almost surely.
        """
        steps = math.lcm(*(schedule.period(depth) for schedule in self.schedules))
        if self.needs_total:
            steps *= max(2 * depth, 100)
        return steps * math.prod(schedule.repeats(depth) for schedule in self.schedules)

    @checked
    def moment(self, step: Whole, total_steps: Count | None, depth: Whole) -> Moment:
        """A step, as passed to the parts."""
        return Moment(step=step, total_steps=total_steps, depth=depth, seed=self.seed)

    def weights(self, step: int, total_steps: int | None, depth: int) -> Float[Tensor, " depths"]:
        """`w_0 .. w_L` at a step of a network of this depth, in float64."""
        return self._weights(self.moment(step, total_steps, depth), self.schedules)

    def expected_weights(
        self, step: int, total_steps: int | None, depth: int
    ) -> Float[Tensor, " depths"]:
        """The expectation of the weights over sampled depths."""
        fixed = (schedule for schedule in self.schedules if schedule.order < Stage.DRAW)
        return self._weights(self.moment(step, total_steps, depth), tuple(fixed))

    @checked
    def label_weights(self, weights: Sequence[float]) -> list[float]:
        """The weights of the label losses, given the weights of the depths."""
        if not any(term.replaces_labels for term in self.terms):
            return list(weights)
        return [*(0.0 for _ in weights[:-1]), weights[-1]]

    @property
    def needs_labels(self) -> bool:
        """Whether a batch without labels is useless to it."""
        return all(term.needs_labels for term in self.terms)

    def _weights(self, moment: Moment, schedules: tuple[WeightSchedule, ...]) -> Tensor:
        weights = self.shape.weights(moment.depth)
        for schedule in schedules:
            weights = schedule(weights, moment)
        return torch.from_numpy(weights)

    @checked
    def check(self, depth: Whole) -> Objective:
        """Self, if it fits a network of this depth; warns if the last depth gets no weight."""
        for part in self.parts:
            part.check_depth(depth)
        base = self.shape.weights(depth)
        if not base.any():
            raise SettingError(
                f"all weights of {self.name} are 0 for depth {depth}, so nothing would be trained; "
                "give at least one depth a weight above 0"
            )
        if not base[:-1].any() and self.get(Distilled) is not None:
            raise SettingError(
                f"{self.name} is distilled, but no depth below the last has a weight, so none "
                "would learn from it; use lpa or ladder with such a depth"
            )
        if base[-1] == 0:
            last = int(np.flatnonzero(base)[-1])
            warnings.warn(
                f"the last depth ({depth}) has weight 0 in {self.name}: no block above depth "
                f"{last} gets a gradient, and the model's own output is not trained; use it at "
                f"depth {last}, or give depth {depth} a weight above 0",
                UserWarning,
                stacklevel=4,
            )
        return self

    # -- JSON -------------------------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        """Plain values, without those that equal the defaults."""
        parts = [part.to_json() for part in self.parts]
        return {"name": self.name, "parts": parts, **({"seed": self.seed} if self.seed else {})}

    @classmethod
    @checked
    def from_json(cls, values: Mapping[str, Any]) -> Objective:
        """The inverse of `to_json`."""
        plain = dict(values)
        check_names(plain, ("name", "parts", "seed"), "an objective")
        given = plain.pop("parts", None)
        if not isinstance(given, list | tuple) or "name" not in plain:
            raise SettingError(
                f"{brief(dict(values))} is no objective; it has a name, and a list as parts"
            )
        parts = tuple(part_of(part, Part) for part in cast(list[Any], given))
        return cls(parts=parts, **plain)
