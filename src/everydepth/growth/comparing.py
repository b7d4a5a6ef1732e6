"""Was it worth it? Growing against other ways to spend the same compute."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table
from torch import nn

from everydepth.config import parted
from everydepth.growth.arms import ARMS, Arm, Arms, CompareConfig, NotAllowedError
from everydepth.runs import Run
from everydepth.runs.sweep import sweep
from everydepth.runs.together import is_main
from everydepth.stream import Criterion, ResidualStream, as_stream


@dataclass(frozen=True)
class Comparison:
    """All arms and seeds. `target`: per seed the best held-out loss of the old model trained on.

    left_out: arms that this model does not allow, and why.
    """

    arms: tuple[Arm, ...]
    target: dict[int, float]
    left_out: dict[str, str] = field(default_factory=dict)

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

    def table(self) -> Table:
        table = Table(title="Held-out loss at equal compute", box=None)
        for column in (
            "way",
            "last loss",
            "95 % interval",
            "against longer",
            "FLOPs to equal loss",
        ):
            table.add_column(column, justify="left" if column == "way" else "right")
        for row in self.summary():
            ratios = ", ".join(
                "never" if math.isinf(r) else f"{r:.2f}x" for r in row["flops_to_equal_loss"]
            )
            interval = f"{row['low']:.4g} to {row['high']:.4g}"
            gap = (
                f"{row['difference']:+.3g} "
                f"({row['difference_low']:+.3g} to {row['difference_high']:+.3g})"
            )
            table.add_row(row["arm"], f"{row['loss']:.4g}", interval, gap, ratios)
        return table

    def plot(self) -> Any:
        """A figure: held-out loss against FLOPs, mean over seeds, the band from least to most."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=(6, 4), layout="constrained")
        axes = figure.subplots()
        for place, name in enumerate(dict.fromkeys(arm.name for arm in self.arms)):
            mine = [arm for arm in self.arms if arm.name == name]
            # Seeds may stop at different points: the common ones are drawn.
            count = min(len(arm.loss) for arm in mine)
            flops = np.mean([arm.flops[:count] for arm in mine], 0)
            loss = np.array([arm.loss[:count] for arm in mine])
            style = "--" if name == "longer" else "-"
            axes.plot(flops, loss.mean(0), style, marker="o", markersize=3, label=name)
            axes.fill_between(flops, loss.min(0), loss.max(0), alpha=0.15, color=f"C{place}")
        axes.set(xlabel="FLOPs spent, scoring included", ylabel="held-out loss")
        axes.legend()
        return figure

    def to_json(self) -> dict[str, Any]:
        summary = [
            {**row, "flops_to_equal_loss": [_finite(r) for r in row["flops_to_equal_loss"]]}
            for row in self.summary()
        ]
        arms = [asdict(arm) for arm in self.arms]
        return {"arms": arms, "summary": summary, "left_out": self.left_out}


def _finite(ratio: float) -> float | None:
    """JSON has no infinity: None is never."""
    return ratio if math.isfinite(ratio) else None


def _interval(values: Any) -> tuple[float, float]:
    drawn = np.random.default_rng(0).choice(values, size=(2000, len(values))).mean(1)
    low, high = np.quantile(drawn, [0.025, 0.975])
    return float(low), float(high)


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
    random: a new block that is not silent. stacked: a copy of a neighbour, as it is. scratch: the
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
    config, options = parted(settings, "compare", config or CompareConfig)
    arms = Arms(as_stream(model, **options), train, valid, config, criterion)
    names = ARMS if config.arms is None else config.arms
    cells = [{"arm": name, "seed": seed} for seed in config.seeds for name in names]

    def one(arm: str, seed: int) -> dict[str, Any]:
        try:
            return asdict(arms.arm(arm, seed))
        except NotAllowedError as error:
            if config.arms is not None:
                raise
            return {"why": str(error)}

    rows = sweep(cells, one, run=run, progress=progress).rows()
    found = tuple(
        Arm(row["name"], row["seed"], tuple(row["flops"]), tuple(row["loss"]))
        for row in rows
        if "why" not in row
    )
    target = {arm.seed: min(arm.loss) for arm in found if arm.name == "longer"}
    left_out = {row["arm"]: row["why"] for row in rows if "why" in row}
    compared = Comparison(found, target, left_out)
    if run is not None and is_main():
        Run.open(run).write_results({"growth_comparison": compared.to_json()})
    return compared
