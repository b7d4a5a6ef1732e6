"""What a growth finds: its rounds and the outcome."""

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
    paper: what the training loss alone keeps, Depth Expansion's rule. safe: what the held-out rows
        keep. kept: what was kept, by the rule that was asked for.
    held_out: the paired comparison of the old model with the better of the two on `valid`, at a
        confidence that grows from round to round, as every round uses these rows.
    tried: the steps of the line search and the training loss of each, on the rows scored.
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
            f"round {self.number}: block after {self.after} of {self.depth} (z {self.z:.1f}); by "
            f"training loss keep {self.paper}, by held-out loss keep {self.safe}; kept "
            f"{self.kept}; {self.held_out}"
        )

    def to_json(self) -> dict[str, Any]:
        held = {"held_out": self.held_out.to_json()}
        return {**asdict(self), **held, "accepted": self.accepted}


@dataclass(frozen=True)
class Grown:
    """The outcome. `model` is a plain model; `stopped` says why growing ended; `score` is the last.

    guarantee: of the grown model against the first one, on `test`; None without it.
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
    held = {**entry["held_out"]}
    held.pop("better")
    for name in ("bootstrap", "bernstein"):
        held[name] = tuple(held[name])
    plain = {k: v for k, v in entry.items() if k not in ("held_out", "accepted", "tried")}
    plain.setdefault("kept", plain["safe"])  # written before there was a choice
    tried = tuple((float(eta), float(loss)) for eta, loss in entry["tried"])
    return Round(**plain, tried=tried, held_out=Paired(**held))
