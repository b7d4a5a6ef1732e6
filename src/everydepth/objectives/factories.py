"""Named objectives, each composed from parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, TypeVar

from everydepth.config import Seed, checked
from everydepth.errors import SettingError
from everydepth.objectives.cosine import CosineDistance
from everydepth.objectives.distilled import Distilled
from everydepth.objectives.layer_dropout import LayerDropout
from everydepth.objectives.objective import Objective
from everydepth.objectives.own_heads import OwnHeads
from everydepth.objectives.part import Part, part_of
from everydepth.objectives.schedules import Alternating, Gradual, Normalized, Rotational
from everydepth.objectives.shapes import LPA, Given, Ladder, Last, LayerSkip, Shape

F = TypeVar("F", bound=Callable[..., Objective])
Weights = Literal["linear", "uniform"]
Curriculum = Literal["rotational", "gradual"]

FACTORIES: dict[str, Callable[..., Objective]] = {}
"""Names that `--objective` may start with."""


def factory(function: F) -> F:
    """Register a function that returns an objective, also for the command line."""
    FACTORIES[function.__name__] = function
    return function


@checked
@factory
def end_to_end() -> Objective:
    """The last depth only: ordinary training.

    >>> ed.end_to_end().weights(0, None, 4).tolist()
    [0.0, 0.0, 0.0, 0.0, 1.0]
    """
    return Objective(name="end_to_end", parts=(Last(),))


@checked
@factory
def lpa(early: float = 0.1, final: float = 1.0, top: int | None = None) -> Objective:
    """Layer-wise progressive approximation: `early` below the last depth, `final` there.

    top: supervise only this many depths, counted from the last (the paper: 5 of 24 to generate).

    >>> ed.lpa().weights(0, None, 4).tolist()
    [0.0, 0.1, 0.1, 0.1, 1.0]
    >>> ed.lpa(top=2).weights(0, None, 4).tolist()
    [0.0, 0.0, 0.0, 0.1, 1.0]
    """
    return Objective(name="lpa", parts=(LPA(early=early, final=final, top=top),))


@checked
@factory
def ladder(
    depths: Sequence[int] | None = None, early: float = 0.2, final: float = 1.0
) -> Objective:
    """A few depths, the same at every step: `early` at each rung, `final` at the last depth.

    depths: the rungs; by default L/4, L/2, 3L/4 and L. This is cheaper than training all depths if
        you only use a few.

    >>> ed.ladder().weights(0, None, 8).tolist()
    [0.0, 0.0, 0.2, 0.0, 0.2, 0.0, 0.2, 0.0, 1.0]
    >>> ed.ladder([2], early=0.5).distilled().weights(0, None, 4).tolist()
    [0.0, 0.0, 0.5, 0.0, 1.0]
    """
    rungs = None if depths is None else tuple(depths)
    return Objective(name="ladder", parts=(Ladder(depths=rungs, early=early, final=final),))


@checked
@factory
def aligned(weights: Weights = "linear", alternate: bool = True) -> Objective:
    """Aligned training: weights `2l/(L(L+1))` or `1/L`; odd steps train the last depth only.

    >>> ed.aligned().weights(0, None, 4).tolist()  # even steps
    [0.0, 0.1, 0.2, 0.3, 0.4]
    >>> ed.aligned().weights(1, None, 4).tolist()  # odd steps
    [0.0, 0.0, 0.0, 0.0, 1.0]
    """
    turns = (Alternating(),) if alternate else ()
    return Objective(name="aligned", parts=(part_of(weights, Shape), *turns))


@checked
@factory
def cosine_regularized(beta: float, weights: Weights = "linear") -> Objective:
    """The last depth's loss plus `beta * sum_l w_l (1 - cos(h_l, h_L))`.

    >>> net = ed.EveryDepth(model, ed.cosine_regularized(beta=0.5))
    >>> net(**train.batch(range(8))).regularizer > 0
    tensor(True)
    """
    pull = CosineDistance(beta=beta, shape=part_of(weights, Shape))
    return Objective(name="cosine_regularized", parts=(Last(), pull))


@checked
@factory
def multi_classifier(
    kl: float = 0.0,
    *,
    temperature: float = 1.0,
    weights: Weights = "linear",
    alternate: bool = False,
) -> Objective:
    """One head per depth, the baseline for the shared head.

    kl: the weight of the divergence to the last depth's prediction, softened by `temperature`.
    alternate: odd steps train the last depth only, as in `aligned`.

    >>> net = ed.EveryDepth(model, ed.multi_classifier())
    >>> sum(p.numel() for p in net.parameters()) - model.num_parameters()  # two more heads
    660
    """
    parts: list[Part] = [part_of(weights, Shape), OwnHeads()]
    if alternate:
        parts.append(Alternating())
    if kl:
        parts.append(Distilled(weight=kl, temperature=temperature))
    elif temperature != 1.0:
        raise SettingError(f"temperature={temperature} without kl; give kl a weight above 0")
    return Objective(name="multi_classifier", parts=tuple(parts))


@checked
@factory
def layerskip(
    scale: float = 0.2,
    *,
    dropout: float = 0.1,
    dropout_rises: bool = False,
    curriculum: Curriculum | None = "rotational",
    every: int | None = None,
    seed: Seed = 0,
) -> Objective:
    """LayerSkip: an early-exit loss at every depth, and samples that skip blocks.

    scale: how much depths below the last count.
    dropout: the probability of skipping the last block; lower for earlier blocks.
    dropout_rises: increase this probability over training (for training from scratch).
    curriculum: which depths are trained at a step: "rotational", every `every`-th (by default 4);
        "gradual", more and more; None, all.

    >>> net = ed.EveryDepth(model, ed.layerskip(scale=0.2, dropout=0.1))
    >>> net(**train.batch(range(8))).loss.isfinite()
    tensor(True)
    """
    parts: list[Part] = [LayerSkip(scale=scale), Normalized()]
    if curriculum == "rotational":
        parts.append(Rotational(every=4 if every is None else every))
    elif every is not None:
        raise SettingError(f"every={every} is for curriculum='rotational', not {curriculum!r}")
    elif curriculum == "gradual":
        parts.append(Gradual())
    elif curriculum is not None:
        raise SettingError(f"curriculum={curriculum!r}; use rotational, gradual or None")
    if dropout:
        parts.append(LayerDropout(most=dropout, rises=dropout_rises))
    elif dropout_rises:
        raise SettingError("dropout_rises=True, but dropout=0; give dropout a value above 0")
    return Objective(name="layerskip", parts=tuple(parts), seed=seed)


@checked
@factory
def weighted(weights: Sequence[float]) -> Objective:
    """Your own weights, one for each depth 0..L; depth 0 is the embedding.

    >>> ed.weighted([0.0, 1.0, 0.0, 1.0]).weights(0, None, 3).tolist()
    [0.0, 1.0, 0.0, 1.0]
    """
    return Objective(name="weighted", parts=(Given(values=tuple(weights)),))
