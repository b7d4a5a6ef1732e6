"""The rounds of a growth run and its outcome."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from torch import nn
from torch.optim import Optimizer

from everydepth.growth.guarantees import Guarantee
from everydepth.growth.held_out import Paired
from everydepth.growth.scoring import Score

Choice = Literal["old", "jumpboard", "trained"]


@dataclass(frozen=True)
class Round:
    """One attempt at growing by one block.

    train, valid: mean losses of the old model, the jumpboard and the trained model.
    paper: the choice by training loss alone, Depth Expansion's rule. safe: the choice by held-out
        rows. kept: the choice made, by the rule in `select`.
    held_out: the paired comparison of the old model with the better of the two on `valid`. Its
        confidence rises from round to round because every round uses the same rows.
    tried: the steps of the line search, each with its training loss on the scored rows.
    margin, gamma, margin_valid: `D`, `gamma_opt` and `D_T` of Depth Expansion.
    """

    number: int
    depth: int
    after: int
    z: float
    p: float
    eta: float
    tried: tuple[tuple[float, float], ...]
    train: dict[str, float]
    valid: dict[str, float]
    paper: Choice
    safe: Choice
    held_out: Paired
    margin: float
    gamma: float
    margin_valid: float
    seconds: float
    kept: Choice

    @property
    def accepted(self) -> bool:
        return self.kept != "old"

    def __str__(self) -> str:
        return (
            f"round {self.number}: block after {self.after} of {self.depth} (z {self.z:.1f}); "
            f"choice by training loss: {self.paper}, by held-out loss: {self.safe}; kept: "
            f"{self.kept}; {self.held_out}"
        )

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "held_out": self.held_out.to_json(), "accepted": self.accepted}


@dataclass(frozen=True)
class Grown:
    """The outcome of `grow`.

    model: a plain model. stopped: why growing ended. score: the last one computed.
    guarantee: the grown model compared with the original on `test`; None without test rows.
    """

    model: nn.Module = field(repr=False)
    optimizer: Optimizer = field(repr=False)
    depth: int
    rounds: tuple[Round, ...]
    stopped: str
    score: Score | None = field(repr=False)
    guarantee: Guarantee | None = field(repr=False)
    path: Path | None

    def __str__(self) -> str:
        lines = [*map(str, self.rounds), f"stopped: {self.stopped}"]
        return "\n".join(lines + ([] if self.guarantee is None else [str(self.guarantee)]))


def round_of(entry: Mapping[str, Any]) -> Round:
    """A round from its JSON."""
    held: dict[str, Any] = dict(entry["held_out"])
    del held["better"]
    held |= {name: tuple(held[name]) for name in ("bootstrap", "bernstein")}
    plain: dict[str, Any] = {"kept": entry["safe"], **entry}  # older runs had no choice of rule
    del plain["accepted"]
    plain["tried"] = tuple((float(eta), float(loss)) for eta, loss in entry["tried"])
    plain["held_out"] = Paired(**held)
    return Round(**plain)
