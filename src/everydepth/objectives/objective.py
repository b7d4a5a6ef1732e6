"""The one type of objective: how much the loss at each depth counts at each step."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal, get_args

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from everydepth.errors import SettingError

Shape = Literal["last", "lpa", "linear", "uniform", "layerskip", "given"]
Curriculum = Literal["rotational", "gradual"]


@dataclass(frozen=True, kw_only=True)
class Objective:
    """`sum_l w_l(step) loss(z_l, y)`, plus what is asked for below. Steps count from 0.

    The weights are made in this order: `shape` over the depths 1..L, `alternate`, `curriculum`,
    the ramps over training, `normalised`, `sample`. Everything random is a function of `seed` and
    the step alone, so that a resumed training draws the same.

    shape: how the weight depends on the depth: "last" (1 at L); "lpa" (`early` below L, `final` at
        L, of the `top` depths only, if given); "linear" `2l/(L(L+1))`; "uniform" `1/L`;
        "layerskip" (`early * l(l-1)/2` below L, `L-1 + early * (L-1)(L-2)/2` at L, the sums of
        the paper with its layers 0..L-1); "given" (`given`, one number a depth 0..L).
    alternate: odd steps use the last depth only (SPEC 2.7).
    curriculum: of the depths below L, "rotational" supervises at a step those with
        `(l - step) % every == 0`; "gradual" starts with none and adds one, the deepest first,
        every `total_steps / (2L)` steps.
    normalised: divide the weights of a step by their sum.
    warmup, warmup_from: over this share of training the weights below L rise linearly from
        `warmup_from` of their value to all of it.
    anneal_by, anneal_to: up to this share of training the weights below L fall linearly to
        `anneal_to` of their value, and stay there.
    equilibrium: the gradient that reaches block l is divided by the weight of all depths from l on,
        in units of the last depth's weight (IMTA: with equal weights, by their number).
    sample: supervise the last depth and this many of the others, drawn anew at every step; their
        weights grow by the inverse of the chance to be drawn, so the expected loss is unchanged.
    cosine, cosine_shape: add `cosine sum_l v_l (1 - cos(h_l, h_L))`, `v` of that shape (SPEC 2.8).
    heads, kl, temperature: each depth below L has its own head; `kl w_l T^2 KL(p_L || p_l)` is
        added, with `p = softmax(z / T)` and `p_L` taken as given (SPEC 2.9).
    layer_dropout, layer_dropout_rises: a sample skips block l with the chance
        `layer_dropout * (2^((l-1)/(L-1)) - 1)`, which may also rise like `2^progress - 1`.

    >>> objective = ed.lpa(early=0.2).annealed(by=0.8)
    >>> objective.weights(0, 100, 4).tolist()  # of depths 0..4, at the first of 100 steps
    [0.0, 0.2, 0.2, 0.2, 1.0]
    >>> objective.weights(90, 100, 4).tolist()  # when annealed, only the last depth is left
    [0.0, 0.0, 0.0, 0.0, 1.0]
    """

    name: str
    shape: str = "last"
    early: float = 0.0
    final: float = 1.0
    top: int | None = None
    given: tuple[float, ...] | None = None
    alternate: bool = False
    curriculum: str | None = None
    every: int = 1
    normalised: bool = False
    warmup: float = 0.0
    warmup_from: float = 0.0
    anneal_by: float | None = None
    anneal_to: float = 0.0
    equilibrium: bool = False
    sample: int | None = None
    cosine: float = 0.0
    cosine_shape: str = "linear"
    heads: bool = False
    kl: float = 0.0
    temperature: float = 1.0
    layer_dropout: float = 0.0
    layer_dropout_rises: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("shape", "cosine_shape"):
            if getattr(self, name) not in get_args(Shape):
                raise SettingError(f"{name} {getattr(self, name)!r}; use one of {get_args(Shape)}")
        if self.curriculum not in (None, *get_args(Curriculum)):
            raise SettingError(
                f"curriculum {self.curriculum!r}; use one of {get_args(Curriculum)} or None"
            )
        at_least = {"early": 0, "final": 0, "cosine": 0, "kl": 0, "anneal_to": 0, "warmup_from": 0}
        for name, least in at_least.items():
            value = getattr(self, name)
            if not (value >= least and math.isfinite(value)):
                raise SettingError(f"{name}={value}; use a number of {least} or more")
        for name in ("top", "every", "sample"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise SettingError(f"{name}={value}; use a whole number of 1 or more")
        for name in ("warmup", "layer_dropout"):
            value = getattr(self, name)
            if not 0 <= value < 1:
                raise SettingError(f"{name}={value}; use a share from 0 to below 1")
        if self.anneal_by is not None and not 0 < self.anneal_by <= 1:
            raise SettingError(f"anneal_by={self.anneal_by}; use a share of training, 0 to 1")
        if not self.temperature > 0:
            raise SettingError(f"temperature={self.temperature}; use a number above 0")
        if self.shape == "given":
            object.__setattr__(self, "given", _checked(self.given))

    # -- options that compose -----------------------------------------------------------------

    def annealed(self, *, to: float = 0.0, by: float = 0.8) -> Objective:
        """Let the weights below the last depth fall to `to` of their value by this share."""
        return replace(self, anneal_to=to, anneal_by=by)

    def warmed_up(self, *, over: float = 0.1, start: float = 0.0) -> Objective:
        """Let the weights below the last depth rise from `start` of their value over this share."""
        return replace(self, warmup=over, warmup_from=start)

    def sampled(self, k: int, *, seed: int | None = None) -> Objective:
        """Supervise the last depth and k others, drawn anew at every step; unbiased."""
        return replace(self, sample=k, seed=self.seed if seed is None else seed)

    def equilibrated(self) -> Objective:
        """Keep the gradient of each block as large as one depth would make it (IMTA)."""
        return replace(self, equilibrium=True)

    # -- what it says -------------------------------------------------------------------------

    @property
    def needs_total(self) -> bool:
        """Whether it has to know how long the training is."""
        ramps = self.warmup > 0 or self.anneal_by is not None
        return ramps or self.curriculum == "gradual" or self.layer_dropout_rises

    def cycle(self, depth: int) -> int:
        """After how many steps every depth it can supervise has had its turn.

        Where it draws, or follows the whole training, enough steps to see all (nearly surely).
        """
        steps = 2 if self.alternate else 1
        if self.curriculum == "rotational":
            steps = math.lcm(steps, self.every)
        if self.needs_total:
            steps *= max(2 * depth, 100)
        if self.sample is not None and self.sample < depth - 1:
            # The chance that one of n depths was never drawn is below n (1 - k/n)^steps.
            chance = 1 - self.sample / (depth - 1)
            steps *= math.ceil(math.log(1e-9 / depth) / math.log(chance))
        return steps

    def weights(self, step: int, total_steps: int | None, depth: int) -> Float[Tensor, " depths"]:
        """`w_0 .. w_L` at a step of a network of this depth, in float64."""
        w = self._before_sampling(step, total_steps, depth)
        if self.sample is not None:
            others = np.flatnonzero(w[:-1])
            if self.sample < len(others):
                drawn = self._random(step, 0).choice(others, self.sample, replace=False)
                kept = np.zeros_like(w)
                kept[drawn] = w[drawn] * (len(others) / self.sample)
                kept[-1] = w[-1]
                w = kept
        return torch.from_numpy(w)

    def expected_weights(
        self, step: int, total_steps: int | None, depth: int
    ) -> Float[Tensor, " depths"]:
        """The weights of a step before depths are drawn: their expectation."""
        return torch.from_numpy(self._before_sampling(step, total_steps, depth))

    def cosine_weights(self, depth: int) -> Float[Tensor, " depths"]:
        """`v_0 .. v_L` of the cosine regularizer."""
        return torch.from_numpy(self.cosine * self._shaped(self.cosine_shape, depth))

    def kept_rows(
        self, step: int, total_steps: int | None, depth: int, rows: int, *, stream: int = 0
    ) -> torch.Tensor | None:
        """`(L, rows)`, True where a sample runs a block; None where all do.

        stream: another number draws another pattern: one a process.
        """
        if self.layer_dropout == 0.0:
            return None
        # D(l) = exp(l ln2 / (L-1)) - 1 with the paper's layers 0..L-1 (LayerSkip, Eq. 3).
        chance = np.exp2(np.arange(depth) / max(depth - 1, 1)) - 1
        if self.layer_dropout_rises:
            chance = chance * (2 ** self._progress(step, total_steps) - 1)
        draws = self._random(step, 1, stream).random((depth, rows))
        return torch.from_numpy(draws >= (self.layer_dropout * chance)[:, None])

    def check(self, depth: int) -> Objective:
        """Self, if its weights fit a network of this depth; warns where the last gets none."""
        if self.top is not None and self.top > depth:
            raise SettingError(
                f"top={self.top}, but the network has {depth} blocks; use 1 to {depth}"
            )
        if self.sample is not None and self.sample > max(depth - 1, 1):
            raise SettingError(
                f"sample={self.sample}, but below the last depth there are only {depth - 1}; "
                f"use 1 to {max(depth - 1, 1)}"
            )
        base = self._shaped(self.shape, depth)
        if not base.any():
            raise SettingError(
                f"all weights of {self.name} are 0 for depth {depth}, so nothing would be trained; "
                "give at least one depth a weight above 0"
            )
        if base[-1] == 0:
            last = int(np.flatnonzero(base)[-1])
            warnings.warn(
                f"the last depth ({depth}) has weight 0 in {self.name}: blocks {last + 1} to "
                f"{depth} get no gradient and the model's own output is not trained; use it at "
                f"depth {last}, or give depth {depth} a weight above 0",
                UserWarning,
                stacklevel=3,
            )
        return self

    # -- as plain values ----------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        """Plain values, those that differ from the defaults only."""
        default = {f.name: f.default for f in fields(self)}
        values = {k: v for k, v in asdict(self).items() if v != default[k]}
        return {k: list(v) if isinstance(v, tuple) else v for k, v in values.items()}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Objective:
        known = [f.name for f in fields(cls)]
        for key in values:
            if key not in known:
                raise SettingError(f"an objective has no {key!r}; it has {', '.join(known)}")
        plain: dict[str, Any] = dict(values)
        if plain.get("given") is not None:
            plain["given"] = tuple(plain["given"])
        return cls(**plain)

    # -- how the weights are made -------------------------------------------------------------

    def _before_sampling(self, step: int, total_steps: int | None, depth: int) -> np.ndarray:
        w = self._shaped(self.shape, depth)
        if self.alternate and step % 2 == 1:
            return self._shaped("last", depth)
        if self.curriculum is not None:
            w[:-1] *= self._enabled(step, total_steps, depth)[:-1]
        if self.warmup > 0:
            share = min(self._progress(step, total_steps) / self.warmup, 1.0)
            w[:-1] *= self.warmup_from + (1 - self.warmup_from) * share
        if self.anneal_by is not None:
            share = min(self._progress(step, total_steps) / self.anneal_by, 1.0)
            w[:-1] *= 1 + (self.anneal_to - 1) * share
        return w / w.sum() if self.normalised else w

    def _shaped(self, shape: str, depth: int) -> np.ndarray:
        l = np.arange(depth + 1, dtype=np.float64)  # noqa: E741 (the paper's name of a depth)
        if shape == "given":
            assert self.given is not None
            if len(self.given) != depth + 1:
                raise SettingError(
                    f"{len(self.given)} weights, but the network has {depth} blocks; "
                    f"give {depth + 1}: one for each depth from 0 (the embedding) to {depth}"
                )
            return np.array(self.given, dtype=np.float64)
        if shape == "linear":
            return 2 * l / (depth * (depth + 1))
        if shape == "uniform":
            return np.where(l > 0, 1 / depth, 0.0)
        w = np.zeros(depth + 1)
        w[-1] = self.final
        if shape == "lpa":
            lowest = 1 if self.top is None else depth - self.top + 1
            w[lowest:-1] = self.early
        elif shape == "layerskip":
            w = self.early * l * (l - 1) / 2
            w[-1] = max(depth - 1, 1) + self.early * (depth - 1) * (depth - 2) / 2
        elif shape == "last":
            w[-1] = 1.0
        return w

    def _enabled(self, step: int, total_steps: int | None, depth: int) -> np.ndarray:
        l = np.arange(depth + 1)  # noqa: E741
        if self.curriculum == "rotational":
            return (l - step) % self.every == 0
        added = math.floor(self._progress(step, total_steps) * 2 * depth)
        return l >= depth - added

    def _progress(self, step: int, total_steps: int | None) -> float:
        """The share of training that is done, 0 to 1."""
        if total_steps is None or total_steps < 1:
            raise SettingError(
                f"{self.name} changes over training, but the number of steps is {total_steps}; "
                "call `net.set_progress(step, total_steps)` before each step"
            )
        return min(step / total_steps, 1.0)

    def _random(self, step: int, *purpose: int) -> np.random.Generator:
        return np.random.default_rng([self.seed, step, *purpose])


def _checked(given: Sequence[float] | None) -> tuple[float, ...]:
    if not given:
        raise SettingError(f"given={given}; give one weight for each depth from 0 to the last")
    for depth, value in enumerate(given):
        if not (value >= 0 and math.isfinite(value)):
            raise SettingError(f"the weight of depth {depth} is {value}; use a number of 0 or more")
    if not any(given):
        raise SettingError(
            f"all {len(given)} weights are 0, so nothing would be trained; "
            "give at least one depth a weight above 0"
        )
    return tuple(float(value) for value in given)
