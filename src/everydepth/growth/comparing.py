"""Was it worth it? Growing against other ways to spend the same compute."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.table import Table
from torch import nn
from torch.optim import AdamW
from torch.utils.flop_counter import FlopCounterMode

from everydepth.data.feeding import Feed
from everydepth.errors import SettingError
from everydepth.growth.fitting import fit_plainly
from everydepth.growth.jump import jumpboard
from everydepth.growth.loop import halves
from everydepth.growth.losses import beside, mean_loss, row_losses
from everydepth.growth.optimizers import frozen_but
from everydepth.growth.scoring import score
from everydepth.runs import Run
from everydepth.runs.sweep import sweep
from everydepth.stream import Criterion, ResidualStream, as_stream, insert, unwrapped
from everydepth.stream.insert import initialise

ARMS = ("grown", "grown, new block only", "longer", "one old block", "random", "stacked", "scratch")
TRIES = 3
"""Sites whose jumpboards are compared, as `grow` does."""


class _NotAllowedError(SettingError):
    """An arm that cannot be made of this model."""


@dataclass(frozen=True)
class Arm:
    """One way to spend compute, one seed: FLOPs spent (scoring included) and held-out loss."""

    name: str
    seed: int
    flops: tuple[float, ...]
    loss: tuple[float, ...]

    def to_reach(self, target: float) -> float:
        """FLOPs until the held-out loss was at most `target`; infinite if it never was."""
        return next(
            (f for f, x in zip(self.flops, self.loss, strict=True) if x <= target), math.inf
        )


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
    steps: int = 200,
    evaluations: int = 10,
    seeds: Sequence[int] = (0, 1, 2),
    arms: Sequence[str] | None = None,
    after: int | None = None,
    lr: float = 1e-3,
    batch_size: int = 32,
    score_rows: int = 512,
    criterion: Criterion | None = None,
    run: str | Path | None = None,
    progress: bool = True,
    **options: Any,
) -> Comparison:
    """Grow by one block and compare with the other uses of the same compute.

    grown: score, jumpboard, then train all; "new block only": the rest frozen. longer: the old
    model trained on. one old block: the existing block at the site trained, the rest frozen.
    random: a new block that is not silent. stacked: a copy of a neighbour, as it is. scratch: the
    deeper model from a new start. Every arm gets the FLOPs that `steps` steps of the grown model
    cost, and training starts with a new AdamW in each, so that none has an advantage. Controls get
    the chosen site for nothing.

    valid: rows that were used for nothing else; the held-out loss is read `evaluations` times.
    arms: by default all that the model allows. score_rows: as in `grow`.
    run: a directory in which every finished arm is kept, so that the same call again, also after
        kill -9, does the rest; `report` shows it.

    >>> few = train.subset(range(200))
    >>> short = {"steps": 4, "evaluations": 2, "seeds": (0,), "progress": False}
    >>> found = ed.growth.compare(model, few, valid, **short)
    >>> len({arm.name for arm in found.arms}) > 3  # each way to spend the same FLOPs
    True
    """
    asked = ARMS if arms is None else tuple(arms)
    if "longer" not in asked or any(name not in ARMS for name in asked):
        raise SettingError(f"arms={list(asked)}; use 'longer' and any of {list(ARMS)}")
    if evaluations < 1 or steps < evaluations:
        raise SettingError(f"steps={steps}, evaluations={evaluations}; use at least one step each")
    old = as_stream(model, **options)
    plan = _Plan(
        old, train, valid, steps, evaluations, after, lr, batch_size, score_rows, criterion
    )
    cells = [{"arm": name, "seed": seed} for seed in seeds for name in asked]

    def one(arm: str, seed: int) -> dict[str, Any]:
        try:
            return asdict(plan.arm(arm, seed))
        except _NotAllowedError as error:
            if arms is not None:
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
    if run is not None:
        Run.open(run).write_results({"growth_comparison": compared.to_json()})
    return compared


@dataclass
class _Plan:
    old: ResidualStream
    train: Any
    valid: Any
    steps: int
    evaluations: int
    after: int | None
    lr: float
    batch_size: int
    score_rows: int
    criterion: Criterion | None
    jumps: dict[int, tuple[nn.Module, int, float]] = field(default_factory=dict)

    def arm(self, name: str, seed: int) -> Arm:
        builders: dict[str, Callable[[int], tuple[nn.Module, list[Any] | None, float]]] = {
            "grown": self._grown,
            "grown, new block only": self._grown_frozen,
            "longer": lambda _: (copy.deepcopy(unwrapped(self.old.model)), None, 0.0),
            "one old block": self._one_block,
            "random": self._random,
            "stacked": self._stacked,
            "scratch": self._scratch,
        }
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model, only, spent = builders[name](seed)
        stream = as_stream(model, **self.old.options)
        frozen = frozen_but(model, only)
        optimizer = AdamW([p for p in model.parameters() if p.requires_grad], lr=self.lr)
        cost = self._step_flops(stream)
        budget = self._budget()
        flops, losses = [spent], [self._held(model)]
        steps = max(int((budget - spent) / cost), 0)
        every = max(-(-steps // self.evaluations), 1)
        done = 0
        while done < steps:
            now = min(every, steps - done)
            fit_plainly(
                stream,
                self.train,
                optimizer,
                now,
                batch_size=self.batch_size,
                seed=seed * 1009 + done,
                criterion=self.criterion,
            )
            done += now
            flops.append(spent + done * cost)
            losses.append(self._held(model))
        for parameter in frozen:
            parameter.requires_grad_()
        return Arm(name, seed, tuple(flops), tuple(losses))

    def _budget(self) -> float:
        site = self.old.depth if self.after is None else self.after
        grown = insert(self.old.model, site, share=True, **self.old.options)
        return self.steps * self._step_flops(as_stream(grown, **self.old.options))

    def _site(self, seed: int) -> int:
        return self._jump(seed)[1]

    def _held(self, model: nn.Module) -> float:
        return mean_loss(model, self.valid, criterion=self.criterion, **self.old.options)

    def _first_batch(self, stream: ResidualStream) -> Any:
        return next(iter(Feed(self.train, stream, batch_size=self.batch_size)))

    def _step_flops(self, stream: ResidualStream) -> float:
        """FLOPs of one forward and backward pass, counted by torch."""
        model = unwrapped(stream.model)
        batch = self._first_batch(stream)
        with FlopCounterMode(display=False) as counter:
            output = stream.call(stream.arguments(batch, None))
            logits = stream.prediction(output)
            losses, counts = row_losses(stream, logits, batch, self.criterion, beside(output))
            (losses.sum() / counts.sum()).backward()
        model.zero_grad(set_to_none=True)
        return float(counter.get_total_flops())

    def _jump(self, seed: int) -> tuple[nn.Module, int, float]:
        """The jumpboard, its site, and the FLOPs of scoring and of the line searches.

        Counted from above: a pass costs a training step; each candidate block a forward pass of
        one block and as much again for its gradient; each evaluation the blocks behind the site.
        """
        if seed not in self.jumps:
            self.jumps[seed] = self._jumped(seed)
        return self.jumps[seed]

    def _jumped(self, seed: int) -> tuple[nn.Module, int, float]:
        half, other = halves(
            self.old, self.train, self.score_rows, batch_size=self.batch_size, seed=seed
        )
        sites = None if self.after is None else [self.after]
        shared: dict[str, Any] = {"seed": seed, "criterion": self.criterion, "progress": False}
        scored = score(self.old, half, at=sites, **shared)
        tried = sorted(scored.sites, key=lambda site: -site.z)[:TRIES]
        how: dict[str, Any] = {"scored": scored, "precondition": True, **shared}
        jumps = [
            jumpboard(self.old.model, half, other, after=site.after, **how, **self.old.options)
            for site in tried
        ]
        jump = max(jumps, key=lambda j: j.margin_valid or 0.0)
        grown = jump.model if jump.found else insert(self.old.model, jump.after, **self.old.options)
        passes = len(half) * (1 + 2 * len(scored.sites) / self.old.depth / 3)
        # Of each jumpboard: the features' covariance, the steps (of what lies behind the site), a
        # batch norm's statistics, and the margin on the other half.
        for j in jumps:
            behind = (self.old.depth - j.after + 1) / (self.old.depth + 1)
            passes += (len(half) * (2 + len(j.tried) * behind) + 2 * len(other)) / 3
        return grown, jump.after, passes * self._step_flops(self.old)

    def _grown(self, seed: int) -> tuple[nn.Module, list[Any] | None, float]:
        model, _, spent = self._jump(seed)
        return copy.deepcopy(model), None, spent

    def _grown_frozen(self, seed: int) -> tuple[nn.Module, list[Any] | None, float]:
        jumped, after, spent = self._jump(seed)
        model = copy.deepcopy(jumped)
        block = as_stream(model, **self.old.options).blocks[after]
        return model, list(block.module.parameters()), spent

    def _one_block(self, seed: int) -> tuple[nn.Module, list[Any] | None, float]:
        model = copy.deepcopy(unwrapped(self.old.model))
        block = as_stream(model, **self.old.options).blocks[max(self._site(seed), 1) - 1]
        return model, list(block.module.parameters()), 0.0

    def _random(self, seed: int) -> tuple[nn.Module, list[Any] | None, float]:
        model = insert(self.old.model, self._site(seed), **self.old.options)
        block = as_stream(model, **self.old.options).blocks[self._site(seed)]
        initialise(unwrapped(self.old.model), block.module)
        return model, None, 0.0

    def _stacked(self, seed: int) -> tuple[nn.Module, list[Any] | None, float]:
        model = insert(self.old.model, self._site(seed), **self.old.options)
        block = as_stream(model, **self.old.options).blocks[self._site(seed)]
        shapes = {k: v.shape for k, v in block.module.state_dict().items()}
        near = sorted(range(1, self.old.depth + 1), key=lambda d: abs(d - self._site(seed) - 0.4))
        for depth in near:
            state = self.old.blocks[depth - 1].module.state_dict()
            if {k: v.shape for k, v in state.items()} == shapes:
                block.module.load_state_dict(state)
                return model, None, 0.0
        raise _NotAllowedError(
            f"no block has the shape of a new one after depth {self._site(seed)}; leave out "
            "'stacked'"
        )

    def _scratch(self, seed: int) -> tuple[nn.Module, list[Any] | None, float]:
        grown: Any = insert(self.old.model, self._site(seed), share=True, **self.old.options)
        if not hasattr(grown, "config"):
            raise _NotAllowedError(
                f"{self.old.name} has no config to be built from; leave out 'scratch'"
            )
        fresh: Any = type(grown)(copy.deepcopy(grown.config))
        return fresh.train(grown.training), None, 0.0
