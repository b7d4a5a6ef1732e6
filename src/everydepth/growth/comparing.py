"""Was it worth it? Growing against other ways to spend the same compute."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from everydepth.config import checked, parted
from everydepth.growth.arms import ARMS, Arm, Arms, CompareConfig, NotAllowedError
from everydepth.growth.shown import measurements
from everydepth.results import Results, Table, provenance
from everydepth.results.results import plain
from everydepth.runs.sweep import sweep
from everydepth.runs.together import is_main
from everydepth.stream import Criterion, ResidualStream, as_stream


class Comparison(Results, kind="growth_comparison"):
    """All arms and seeds: held-out loss against FLOPs spent."""

    @classmethod
    def of(cls, arms: Sequence[Arm], left_out: Mapping[str, str], **facts: Any) -> Comparison:
        """left_out: arms that this model does not allow, and why."""
        told = [asdict(arm) for arm in arms]
        found = cls(results={}, about=provenance(arms=told, left_out=left_out, **facts))
        content = {"arms": told, "summary": found.summary(), "left_out": left_out}
        return replace(found, results=measurements("growth_comparison", plain(content)))

    @property
    def arms(self) -> tuple[Arm, ...]:
        """Every way to spend the compute, once a seed."""
        told = self.about["arms"]
        return tuple(
            Arm(arm["name"], arm["seed"], tuple(arm["flops"]), tuple(arm["loss"])) for arm in told
        )

    @property
    def target(self) -> dict[int, float]:
        """Per seed, the best held-out loss of the old model trained on."""
        return {arm.seed: min(arm.loss) for arm in self.arms if arm.name == "longer"}

    @property
    def left_out(self) -> Mapping[str, str]:
        """Arms that this model does not allow, and why."""
        return self.about["left_out"]

    def table(self, name: str | None = None) -> Table:
        """Every arm, or the table of one measurement."""
        return super().table("ways" if name is None else name)

    def ratios(self, name: str) -> list[float]:
        """Per seed, FLOPs to equal held-out loss over those of training the old model longer.

        Infinite where the target was never reached, and where the old model had it to begin with.
        """
        base = {a.seed: a.to_reach(self.target[a.seed]) for a in self.arms if a.name == "longer"}
        mine = [a for a in self.arms if a.name == name]
        return [
            a.to_reach(self.target[a.seed]) / base[a.seed] if base[a.seed] else math.inf
            for a in mine
        ]

    def summary(self) -> list[dict[str, Any]]:
        """Per arm: mean of the last and best held-out loss with a 95 % bootstrap interval of the
        mean over seeds; the same of the difference to training longer, seed by seed; and the
        ratios of FLOPs to equal loss."""
        longer = {arm.seed: arm.loss[-1] for arm in self.arms if arm.name == "longer"}
        found: list[dict[str, Any]] = []
        for name in dict.fromkeys(arm.name for arm in self.arms):
            mine = [arm for arm in self.arms if arm.name == name]
            last = np.array([arm.loss[-1] for arm in mine])
            low, high = _interval(last)
            gaps = np.array([arm.loss[-1] - longer[arm.seed] for arm in mine])
            below, above = _interval(gaps)
            found.append(
                {
                    "arm": name,
                    "seeds": len(mine),
                    "loss": float(last.mean()),
                    "low": low,
                    "high": high,
                    "difference": float(gaps.mean()),
                    "difference_low": below,
                    "difference_high": above,
                    "best": float(np.mean([min(arm.loss) for arm in mine])),
                    "flops": float(np.mean([arm.flops[-1] for arm in mine])),
                    "flops_to_equal_loss": self.ratios(name),
                }
            )
        return found


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
    """Grow by one block and compare with the other uses of the same compute.

    grown: score, jumpboard, then train all; "new block only": the rest frozen. longer: the old
    model trained on. one old block: the existing block at the site trained, the rest frozen.
    random: a new block that is not silent. stacked: a copy of a neighbor, as it is. scratch: the
    deeper model from a new start. Every arm gets the FLOPs that `steps` steps of the grown model
    cost, and training starts with a new AdamW in each, so that none has an advantage. Controls get
    the chosen site for nothing.

    valid: rows that were used for nothing else.
    config, settings: a `CompareConfig`, and fields of it by name (`steps=50`); what else there is
        goes to `as_stream`.
    run: a directory in which every finished arm is kept, so that the same call again, also after
        kill -9, does the rest; `report` shows it.

    >>> few = train.subset(range(200))
    >>> short = {"steps": 4, "evaluations": 2, "seeds": (0,), "progress": False}
    >>> found = ed.growth.compare(model, few, valid, **short)
    >>> len({arm.name for arm in found.arms}) > 3  # each way to spend the same FLOPs
    True
    """
    asked: CompareConfig
    (asked,), options = parted(settings, "compare", config or CompareConfig)
    arms = Arms(as_stream(model, **options), train, valid, asked, criterion)
    names = ARMS if asked.arms is None else asked.arms
    cells = [{"arm": name, "seed": seed} for seed in asked.seeds for name in names]

    def one(arm: str, seed: int) -> dict[str, Any]:
        try:
            return asdict(arms.arm(arm, seed))
        except NotAllowedError as error:
            if asked.arms is not None:
                raise
            return {"why": str(error)}

    with torch.random.fork_rng(devices=[]):  # new blocks are drawn as torch draws
        rows = sweep(cells, one, run=run, progress=progress).rows()
    found = tuple(
        Arm(row["name"], row["seed"], tuple(row["flops"]), tuple(row["loss"]))
        for row in rows
        if "why" not in row
    )
    left_out = {row["arm"]: row["why"] for row in rows if "why" in row}
    stream = as_stream(model, **options)
    compared = Comparison.of(found, left_out, model=stream.name, depth=stream.depth)
    if run is not None and is_main():
        compared.save(Path(run) / "growth_comparison")
    return compared
