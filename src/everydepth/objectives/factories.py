"""The objectives by name; each is an `Objective` with some of its fields set."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from everydepth.objectives.objective import Curriculum, Objective

Weights = Literal["linear", "uniform"]


def end_to_end() -> Objective:
    """The last depth only: ordinary training.

    >>> ed.end_to_end().weights(0, None, 4).tolist()
    [0.0, 0.0, 0.0, 0.0, 1.0]
    """
    return Objective(name="end_to_end")


def lpa(early: float = 0.1, final: float = 1.0, top: int | None = None) -> Objective:
    """Layer-wise progressive approximation (SPEC 1.3): `early` below the last depth, `final` there.

    top: supervise only this many depths, counted from the last (the paper: 5 of 24 to generate).

    >>> ed.lpa().weights(0, None, 4).tolist()
    [0.0, 0.1, 0.1, 0.1, 1.0]
    >>> ed.lpa(top=2).weights(0, None, 4).tolist()
    [0.0, 0.0, 0.0, 0.1, 1.0]
    """
    return Objective(name="lpa", shape="lpa", early=early, final=final, top=top)


def aligned(weights: Weights = "linear", alternate: bool = True) -> Objective:
    """Aligned training (SPEC 2.7): `2l/(L(L+1))` or `1/L`; odd steps only the last depth.

    >>> ed.aligned().weights(0, None, 4).tolist()  # even steps
    [0.0, 0.1, 0.2, 0.3, 0.4]
    >>> ed.aligned().weights(1, None, 4).tolist()  # odd steps
    [0.0, 0.0, 0.0, 0.0, 1.0]
    """
    return Objective(name="aligned", shape=weights, alternate=alternate)


def cosine_regularized(beta: float, weights: Weights = "linear") -> Objective:
    """The last depth's loss and `beta * sum_l w_l (1 - cos(h_l, h_L))` (SPEC 2.8).

    >>> net = ed.EveryDepth(model, ed.cosine_regularized(beta=0.5))
    >>> net(**train.batch(range(8))).regularizer > 0
    tensor(True)
    """
    return Objective(name="cosine_regularized", cosine=beta, cosine_shape=weights)


def multi_classifier(
    kl: float = 0.0, *, temperature: float = 1.0, weights: Weights = "linear"
) -> Objective:
    """One head a depth (SPEC 2.9), the baseline that the shared head is measured against.

    kl: the weight of the divergence to the last depth's prediction, softened by `temperature`.

    >>> net = ed.EveryDepth(model, ed.multi_classifier())
    >>> sum(p.numel() for p in net.parameters()) - model.num_parameters()  # two heads more
    660
    """
    return Objective(
        name="multi_classifier", shape=weights, heads=True, kl=kl, temperature=temperature
    )


def layerskip(
    scale: float = 0.2,
    *,
    dropout: float = 0.1,
    dropout_rises: bool = False,
    curriculum: Curriculum | None = "rotational",
    every: int = 4,
    seed: int = 0,
) -> Objective:
    """LayerSkip: an early-exit loss at every depth, and samples that skip blocks.

    scale: how much the depths below the last count.
    dropout: the chance to skip the last block; smaller for those before.
    dropout_rises: let that chance grow over training (from scratch; not to fine-tune).
    curriculum: which depths have their turn: every `every`-th, rotating, or more and more.

    >>> net = ed.EveryDepth(model, ed.layerskip(scale=0.2, dropout=0.1))
    >>> net(**train.batch(range(8))).loss.isfinite()
    tensor(True)
    """
    return Objective(
        name="layerskip",
        shape="layerskip",
        early=scale,
        curriculum=curriculum,
        every=every,
        normalised=True,
        layer_dropout=dropout,
        layer_dropout_rises=dropout_rises,
        seed=seed,
    )


def weighted(weights: Sequence[float]) -> Objective:
    """Weights of your own, one for each depth 0..L; depth 0 is the embedding.

    >>> ed.weighted([0.0, 1.0, 0.0, 1.0]).weights(0, None, 3).tolist()
    [0.0, 1.0, 0.0, 1.0]
    """
    return Objective(name="weighted", shape="given", given=tuple(weights))
