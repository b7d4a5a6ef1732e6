"""Was it worth it? Growing compared with other ways to spend the same compute."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from everydepth.config import checked, parted
from everydepth.errors import SettingError
from everydepth.growth.arms import ARMS, Arm, Arms, CompareConfig, NotAllowedError
from everydepth.results import Fact, Result, Results, Table, lines, provenance, rows
from everydepth.results.results import restored
from everydepth.runs.sweep import sweep
from everydepth.runs.together import is_main
from everydepth.stream import Criterion, ResidualStream, as_stream, unwrapped


class Comparison(Results, kind="growth_comparison"):
    """All arms and seeds: held-out loss as a function of FLOPs spent."""

    left_out = Fact[Mapping[str, str]]()
    """Arms that this model does not support, and why."""

    @classmethod
    def of(cls, arms: Sequence[Arm], left_out: Mapping[str, str], **facts: Any) -> Comparison:
        """left_out: arms that this model does not support, and why."""
        found = cls(results={}, about=provenance(arms=arms, left_out=left_out, **facts))
        return found.with_results(_losses(arms, left_out), _ways(found.summary()))

    @property
    def arms(self) -> tuple[Arm, ...]:
        """Every arm, once per seed."""
        return restored(tuple[Arm, ...], self.about["arms"])

    @property
    def target(self) -> dict[int, float]:
        """Per seed, the best held-out loss of training the old model longer."""
        return {arm.seed: min(arm.loss) for arm in self.arms if arm.name == "longer"}

    def table(self, name: str | None = None) -> Table:
        """Every arm, or the table of one measurement."""
        return super().table("ways" if name is None else name)

    @checked
    def ratios(self, name: str) -> list[float]:
        """Per seed, the FLOPs to reach the target, relative to training the old model longer.

        Infinite if the target was never reached, or if the old model met it from the start.
        """
        base = {a.seed: a.to_reach(self.target[a.seed]) for a in self.arms if a.name == "longer"}
        mine = [a for a in self.arms if a.name == name]
        return [
            a.to_reach(self.target[a.seed]) / base[a.seed] if base[a.seed] else math.inf
            for a in mine
        ]

    def summary(self) -> list[dict[str, Any]]:
        """Per arm: the mean final and best held-out loss and the difference from training longer,
        with 95 % bootstrap intervals over seeds, and the FLOPs to equal loss."""
        longer = {arm.seed: arm.loss[-1] for arm in self.arms if arm.name == "longer"}
        found: list[dict[str, Any]] = []
        for name in dict.fromkeys(arm.name for arm in self.arms):
            mine = [arm for arm in self.arms if arm.name == name]
            final = np.array([arm.loss[-1] for arm in mine])
            low, high = _interval(final)
            difference = np.array([arm.loss[-1] - longer[arm.seed] for arm in mine])
            difference_low, difference_high = _interval(difference)
            found.append(
                {
                    "arm": name,
                    "seeds": len(mine),
                    "loss": float(final.mean()),
                    "low": low,
                    "high": high,
                    "difference": float(difference.mean()),
                    "difference_low": difference_low,
                    "difference_high": difference_high,
                    "best": float(np.mean([min(arm.loss) for arm in mine])),
                    "flops": float(np.mean([arm.flops[-1] for arm in mine])),
                    "flops_to_equal_loss": self.ratios(name),
                }
            )
        return found


def _losses(arms: Sequence[Arm], left_out: Mapping[str, str]) -> Result:
    series: dict[str, dict[str, Any]] = {}
    for name in dict.fromkeys(arm.name for arm in arms):
        mine = [arm for arm in arms if arm.name == name]
        length = min(len(arm.loss) for arm in mine)
        loss = np.array([arm.loss[:length] for arm in mine], dtype=float)
        flops = np.array([arm.flops[:length] for arm in mine], dtype=float)
        band = {"low": loss.min(0), "high": loss.max(0)}
        series[name] = {"x": flops.mean(0), "y": loss.mean(0), **band}
    return lines(
        "held_out_loss",
        series,
        axis="flops",
        of="held-out loss",
        labels={"flops": "FLOP, scoring included"},
        title="Was it worth it?",
        about="One more block versus other uses of the same compute; bands span all seeds.",
        better="lower",
        note="; ".join(f"{arm}: {why}" for arm, why in left_out.items()) or None,
        section="growth",
    )


def _ways(summary: Sequence[Mapping[str, Any]]) -> Result:
    columns = {
        "way": "arm",
        "seeds": "seeds",
        "final loss": "loss",
        "low": "low",
        "high": "high",
        "difference from longer": "difference",
    }
    ratios = [
        ", ".join(f"{r:.2f}" if math.isfinite(r) else "never" for r in line["flops_to_equal_loss"])
        for line in summary
    ]
    return rows(
        "ways",
        {
            **{heading: [line[key] for line in summary] for heading, key in columns.items()},
            "FLOP to equal loss": ratios,
        },
        title="Ways to spend the same compute",
        about="Low and high are the 95 % interval. The last column is the FLOP needed to match the "
        "best loss of training longer, relative to training longer.",
        section="growth",
    )


def _interval(values: Any) -> tuple[float, float]:
    drawn = np.random.default_rng(0).choice(values, size=(2000, len(values))).mean(1)
    low, high = np.quantile(drawn, [0.025, 0.975])
    return float(low), float(high)


@checked
def compare(
    model: nn.Module | ResidualStream,
    train: Any,
    valid: Any,
    *,
    config: CompareConfig | None = None,
    criterion: Criterion | None = None,
    run: str | Path | None = None,
    progress: bool = True,
    **settings: Any,
) -> Comparison:
    """Grow by one block and compare with other uses of the same compute. The arms:

    - grown: score, jumpboard, then train everything; "new block only" freezes the rest.
    - longer: train the old model longer.
    - one old block: train the existing block at the site, with the rest frozen.
    - random: a new block with random weights instead of a silent one.
    - stacked: a copy of a neighboring block.
    - scratch: the deeper model, from a new initialization.

    Every arm gets the FLOPs of `steps` steps of the grown model and starts with a new AdamW. The
    controls get the site chosen by the growing arm for free.

    valid: rows used for nothing else.
    config, settings: a `CompareConfig`, or its fields by name (`steps=50`); other settings go to
        `as_stream`.
    run: a directory that keeps every finished arm: repeating the call finishes the rest, even
        after kill -9; `report` shows it.

    >>> few = train.subset(range(200))
    >>> short = {"steps": 4, "evaluations": 2, "seeds": (0,), "progress": False}
    >>> found = ed.growth.compare(model, few, valid, **short)
    >>> len({arm.name for arm in found.arms}) > 3  # each a way to spend the same FLOPs
    True
    """
    asked: CompareConfig
    (asked,), options = parted(settings, "compare", config or CompareConfig)
    stream = as_stream(model, **options)
    if not any(p.requires_grad for p in unwrapped(stream.model).parameters()):
        raise SettingError(
            f"all parameters of {stream.name} are frozen, so only the new block could be trained "
            "and nothing compared with it; set requires_grad on those to train"
        )
    arms = Arms(stream, train, valid, asked, criterion)
    names = ARMS if asked.arms is None else asked.arms
    cells = [{"arm": name, "seed": seed} for seed in asked.seeds for name in names]

    def one(arm: str, seed: int) -> dict[str, Any]:
        try:
            return asdict(arms.arm(arm, seed))
        except NotAllowedError as error:
            if asked.arms is not None:
                raise
            return {"why": str(error)}

    with torch.random.fork_rng(devices=[]):  # new blocks draw from torch's global generator
        done = sweep(cells, one, run=run, progress=progress).rows()
    found = [restored(Arm, row) for row in done if "why" not in row]
    left_out = {row["arm"]: row["why"] for row in done if "why" in row}
    compared = Comparison.of(found, left_out, model=arms.old.name, depth=arms.old.depth)
    if run is not None and is_main():
        compared.save(Path(run) / "growth_comparison")
    return compared
