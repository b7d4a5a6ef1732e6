"""The arms of a comparison: different ways to spend the same compute."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import AdamW
from torch.utils.flop_counter import FlopCounterMode

from everydepth.config import Config, setting
from everydepth.errors import SettingError
from everydepth.growth.jump import best_jumpboard
from everydepth.growth.losses import beside, mean_loss, row_losses
from everydepth.growth.optimizers import frozen_except
from everydepth.growth.scoring import score
from everydepth.growth.trainer import halves, repeatable, train_plainly
from everydepth.runs.callback import Callback
from everydepth.stream import Criterion, ResidualStream, as_stream, differentiating, unwrapped
from everydepth.stream.feed import Feed, size_for
from everydepth.stream.insert import initialize, inserted

ARMS = ("grown", "grown, new block only", "longer", "one old block", "random", "stacked", "scratch")
TRIES = 3
"""Sites whose jumpboards are compared, as in `grow`."""


class NotAllowedError(SettingError):
    """An arm that this model does not support."""


@dataclass(frozen=True, kw_only=True)
class CompareConfig(Config):
    """The settings of `compare`.

    >>> ed.growth.CompareConfig(steps=50).seeds
    (0, 1, 2)
    """

    title: ClassVar[str] = "Comparing"

    steps: int = setting(
        200, least=1, help="Steps of the grown model; every arm gets the same FLOPs."
    )
    evaluations: int = setting(10, least=1, help="Held-out evaluations per arm.")
    seeds: tuple[int, ...] = setting((0, 1, 2), help="Seeds, one comparison each.")
    arms: tuple[str, ...] | None = setting(
        None, help="Arms to compare; by default all that the model supports."
    )
    after: int | None = setting(None, least=0, help="Site of the block; chosen as in grow.")
    lr: float = setting(1e-3, above=0, most=1e30, help="Learning rate of AdamW.")
    batch_size: int = setting(32, least=1, help="Rows per step, for data that is not batched.")
    score_rows: int = setting(512, least=8, help="Training rows used to score sites.")

    def __post_init__(self) -> None:
        super().__post_init__()
        asked = ARMS if self.arms is None else self.arms
        if "longer" not in asked or any(name not in ARMS for name in asked):
            raise SettingError(f"arms={list(asked)}; use 'longer' and any of {list(ARMS)}")
        if self.steps < self.evaluations:
            raise SettingError(
                f"steps={self.steps}, evaluations={self.evaluations}; use at least one step per "
                "evaluation"
            )


@dataclass(frozen=True)
class Arm:
    """One arm and seed: FLOPs spent so far (including scoring) and held-out loss."""

    name: str
    seed: int
    flops: tuple[float, ...]
    loss: tuple[float, ...]

    def to_reach(self, target: float) -> float:
        """FLOPs until the held-out loss was at most `target`; infinite if it never was."""
        return next(
            (f for f, x in zip(self.flops, self.loss, strict=True) if x <= target), math.inf
        )


Start = tuple[ResidualStream, Iterable[Tensor] | None, float]
"""A model, the parameters to train (None: all), and the FLOPs already spent on it."""


@dataclass
class Arms:
    """What all arms share: the old model, the data and the budget."""

    old: ResidualStream
    train: Any
    valid: Any
    config: CompareConfig
    criterion: Criterion | None
    jumps: dict[int, tuple[ResidualStream, int, float]] = field(default_factory=dict)

    @cached_property
    def rows(self) -> Any:
        """The training data, re-iterable."""
        return repeatable(self.train, self.old, self.config.batch_size)

    def arm(self, name: str, seed: int) -> Arm:
        """One arm, trained."""
        builders: dict[str, Callable[[int], Start]] = {
            "grown": self._grown,
            "grown, new block only": self._grown_frozen,
            "longer": lambda _: (self._copy(self.old), None, 0.0),
            "one old block": self._one_block,
            "random": self._random,
            "stacked": self._stacked,
            "scratch": self._scratch,
        }
        config = self.config
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            stream, only, spent = builders[name](seed)
        model = unwrapped(stream.model)
        with frozen_except(model, only):
            cost = self._step_flops(stream)
            steps = max(int((self._budget() - spent) / cost), 0)
            watch = _HeldOut(self, stream, steps)
            train_plainly(
                stream,
                self.rows,
                AdamW([p for p in model.parameters() if p.requires_grad], lr=config.lr),
                steps,
                batch_size=config.batch_size,
                seed=seed,
                criterion=self.criterion,
                callbacks=[watch],
            )
        flops = tuple(spent + step * cost for step in watch.steps)
        return Arm(name, seed, flops, tuple(watch.losses))

    def held_out(self, stream: ResidualStream) -> float:
        """The loss on rows that no arm has seen."""
        return mean_loss(stream, self.valid, criterion=self.criterion)

    # -- compute ----------------------------------------------------------------------------------

    def _budget(self) -> float:
        site = self.old.depth if self.config.after is None else self.config.after
        return self.config.steps * self._step_flops(inserted(self.old, site, share=True))

    def _step_flops(self, stream: ResidualStream) -> float:
        """FLOPs of one forward and backward pass, counted by torch."""
        # On a copy: in training mode, a pass changes the statistics of batch norms.
        stream = self._copy(stream)
        batch = next(
            iter(Feed(self.rows, stream, batch_size=size_for(self.rows, self.config.batch_size)))
        )
        with differentiating(), FlopCounterMode(display=False) as counter:
            output = stream.called(batch)
            logits = stream.prediction(output)
            losses, counts = row_losses(stream, logits, batch, self.criterion, beside(output))
            (losses.sum() / counts.sum()).backward()
        return float(counter.get_total_flops())

    def _jump(self, seed: int) -> tuple[ResidualStream, int, float]:
        """The jumpboard, its site, and an upper bound on the FLOPs of scoring and line searches.

        A pass counts as a training step, each candidate block as a forward pass of one block and
        as much again for its gradient, each evaluation as the blocks after the site.
        """
        if seed not in self.jumps:
            self.jumps[seed] = self._jumped(seed)
        return self.jumps[seed]

    def _jumped(self, seed: int) -> tuple[ResidualStream, int, float]:
        config, old = self.config, self.old
        half, other = halves(
            old, self.rows, config.score_rows, batch_size=config.batch_size, seed=seed
        )
        at = None if config.after is None else [config.after]
        shared: dict[str, Any] = {"seed": seed, "criterion": self.criterion, "progress": False}
        scored = score(old, half, at=at, **shared)
        sites = [s.after for s in sorted(scored.sites, key=lambda site: -site.z)[:TRIES]]
        how = {"scored": scored, "precondition": True, **shared}
        jump, jumps = best_jumpboard(old, half, other, sites, **how)
        grown = jump.stream if jump.found else inserted(self.old, jump.after)
        passes = len(half) * (1 + 2 * len(scored.sites) / old.depth / 3)
        # For each jumpboard: the covariance of features, the steps (the blocks after the site),
        # batch norm statistics, and the margin on the other half.
        for j in jumps:
            rest = (old.depth - j.after + 1) / (old.depth + 1)
            passes += (len(half) * (2 + len(j.tried) * rest) + 2 * len(other)) / 3
        return grown, jump.after, passes * self._step_flops(old)

    # -- where each arm starts --------------------------------------------------------------------

    def _stream(self, model: nn.Module) -> ResidualStream:
        return as_stream(model, **self.old.options)

    def _copy(self, stream: ResidualStream) -> ResidualStream:
        return self._stream(copy.deepcopy(unwrapped(stream.model)))

    def _site(self, seed: int) -> int:
        return self._jump(seed)[1]

    def _grown(self, seed: int) -> Start:
        grown, _, spent = self._jump(seed)
        return self._copy(grown), None, spent

    def _grown_frozen(self, seed: int) -> Start:
        grown, after, spent = self._jump(seed)
        stream = self._copy(grown)
        return stream, stream.blocks[after].module.parameters(), spent

    def _one_block(self, seed: int) -> Start:
        stream = self._copy(self.old)
        block = stream.blocks[max(self._site(seed), 1) - 1]
        return stream, block.module.parameters(), 0.0

    def _random(self, seed: int) -> Start:
        stream = inserted(self.old, self._site(seed))
        initialize(unwrapped(self.old.model), stream.blocks[self._site(seed)].module)
        return stream, None, 0.0

    def _stacked(self, seed: int) -> Start:
        site = self._site(seed)
        stream = inserted(self.old, site)
        block = stream.blocks[site].module
        shapes = {k: v.shape for k, v in block.state_dict().items()}
        for depth in sorted(range(1, self.old.depth + 1), key=lambda d: abs(d - site - 0.4)):
            state = self.old.blocks[depth - 1].module.state_dict()
            if {k: v.shape for k, v in state.items()} == shapes:
                block.load_state_dict(state)
                return stream, None, 0.0
        raise NotAllowedError(
            f"no existing block has the shape of a new one after depth {site}; leave out 'stacked'"
        )

    def _scratch(self, seed: int) -> Start:
        grown: Any = inserted(self.old, self._site(seed), share=True).model
        if not hasattr(grown, "config"):
            raise NotAllowedError(
                f"{self.old.name} has no config to rebuild it from; leave out 'scratch'"
            )
        fresh: Any = type(grown)(copy.deepcopy(grown.config))
        return self._stream(fresh.train(grown.training)), None, 0.0


class _HeldOut(Callback):
    """Measures the held-out loss before, during and after training."""

    def __init__(self, arms: Arms, stream: ResidualStream, total: int) -> None:
        self.arms, self.stream, self.total = arms, stream, total
        self.every = max(-(-total // arms.config.evaluations), 1)
        self.steps, self.losses = [0], [arms.held_out(stream)]

    def on_step(self, training: Any) -> None:
        if training.step % self.every == 0 or training.step == self.total:
            self.steps.append(training.step)
            self.losses.append(self.arms.held_out(self.stream))
