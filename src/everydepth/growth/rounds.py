"""The rounds of a growth run and its outcome."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from torch import nn
from torch.optim import Optimizer

from everydepth.growth.held_out import Paired
from everydepth.growth.sites import SITE, Score, SiteScore
from everydepth.results import Result, Results, curve, lines, named, provenance, rows

Choice = Literal["old", "jumpboard", "trained"]
CHOICES: tuple[Choice, ...] = get_args(Choice)


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
    sites: the scores of all sites, without covariance matrices.
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
    sites: tuple[SiteScore, ...] = field(repr=False)

    @property
    def accepted(self) -> bool:
        return self.kept != "old"

    def __str__(self) -> str:
        return (
            f"round {self.number}: block after {self.after} of {self.depth} (z {self.z:.1f}); "
            f"choice by training loss: {self.paper}, by held-out loss: {self.safe}; kept: "
            f"{self.kept}; {self.held_out}"
        )


@dataclass(frozen=True)
class Grown:
    """The outcome of `grow`.

    model: a plain model. stopped: why growing ended. score: the last one computed.
    held_out: the grown model compared with the original on `test`; None without test rows.
    """

    model: nn.Module = field(repr=False)
    optimizer: Optimizer = field(repr=False)
    depth: int
    rounds: tuple[Round, ...]
    stopped: str
    score: Score | None = field(repr=False)
    held_out: Paired | None
    path: Path | None

    def __str__(self) -> str:
        said = [*map(str, self.rounds), f"stopped: {self.stopped}"]
        return "\n".join(said + ([] if self.held_out is None else [f"test rows: {self.held_out}"]))

    @property
    def results(self) -> Results:
        """Every attempt and the outcome as Results, for tables, figures and reports."""
        found = _measurements(self.rounds, f"stopped: {self.stopped}")
        about = provenance(
            model=type(self.model).__name__,
            depth=self.depth,
            rounds=self.rounds,
            stopped=self.stopped,
            held_out=self.held_out,
        )
        if self.held_out is not None:
            found.append(_outcome(self.held_out))
        return Results(results=named(*found), about=about, kind="growth")


def _outcome(held_out: Paired) -> Result:
    what, value, verdict = zip(*held_out.lines, strict=True)
    return rows(
        "held_out",
        {"what": what, "value": value, "verdict": verdict},
        title="Outcome on test rows",
        about="The grown model compared with the original, on rows used for nothing else.",
        section="growth",
    )


def _measurements(rounds: Sequence[Round], note: str) -> list[Result]:
    words: dict[str, Any] = {"section": "growth"}
    number = [entry.number for entry in rounds]
    held = [entry.held_out for entry in rounds]
    table = rows(
        "rounds",
        {
            "round": number,
            "after": [f"{entry.after} of {entry.depth}" for entry in rounds],
            "z": [entry.z for entry in rounds],
            "choice by training loss": [entry.paper for entry in rounds],
            "choice by held-out loss": [entry.safe for entry in rounds],
            "kept": [entry.kept for entry in rounds],
            "held-out gain": [one.gain for one in held],
            "low": [one.bootstrap[0] for one in held],
            "high": [one.bootstrap[1] for one in held],
            "D": [entry.margin for entry in rounds],
            "gamma": [entry.gamma for entry in rounds],
            "D_T": [entry.margin_valid for entry in rounds],
        },
        title="Growth by round",
        about="Every attempt to add a block. The held-out rows serve no other purpose; low and "
        "high are the interval of the gain, which widens with every round that uses them.",
        note=note,
        **words,
    )
    if not rounds:
        return [table]
    losses = [
        curve(
            f"{part}_loss",
            number,
            {choice: [getattr(entry, part)[choice] for entry in rounds] for choice in CHOICES},
            axis="round",
            labels={choice: f"{choice}: {label}" for choice in CHOICES},
            title=f"{label.capitalize()} by round",
            **words,
        )
        for part, label in (("valid", "held-out loss"), ("train", "training loss"))
    ]
    search: dict[str, dict[str, Any]] = {}
    scores: dict[str, dict[str, Any]] = {}
    for entry in rounds:
        tried = np.array(sorted(entry.tried), dtype=float)
        tried = tried[np.isfinite(tried).all(1)]
        search[f"round {entry.number}"] = {"x": tried[:, 0], "y": tried[:, 1]}
        z = {"x": [site.after for site in entry.sites], "y": [site.z for site in entry.sites]}
        scores[f"round {entry.number}"] = z
    title = "Line search of the jumpboard"
    where = "Where a block would help, by round"
    return [
        table,
        *losses,
        lines("search", search, axis="step", of="training loss", title=title, **words),
        lines(
            "scores",
            scores,
            axis="depth",
            of="z of the gradient",
            labels={"depth": SITE},
            title=where,
            **words,
        ),
    ]
