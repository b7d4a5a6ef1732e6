"""The objectives by name; each is an `Objective` with some of its fields set."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from everydepth.objectives.objective import Curriculum, Objective

Weights = Literal["linear", "uniform"]


def end_to_end() -> Objective:
    """The last depth only: ordinary training."""
    return Objective(name="end_to_end")


def lpa(early: float = 0.1, final: float = 1.0, top: int | None = None) -> Objective:
    """Layer-wise progressive approximation (SPEC 1.3): `early` below the last depth, `final` there.

    top: supervise only this many depths, counted from the last (the paper: 5 of 24 to generate).
    """
    return Objective(name="lpa", shape="lpa", early=early, final=final, top=top)


def aligned(weights: Weights = "linear", alternate: bool = True) -> Objective:
    """Aligned training (SPEC 2.7): `2l/(L(L+1))` or `1/L`; odd steps only the last depth."""
    return Objective(name="aligned", shape=weights, alternate=alternate)


def cosine_regularised(beta: float, weights: Weights = "linear") -> Objective:
    """The last depth's loss and `beta * sum_l w_l (1 - cos(h_l, h_L))` (SPEC 2.8)."""
    return Objective(name="cosine_regularised", cosine=beta, cosine_shape=weights)


def multi_classifier(
    kl: float = 0.0, *, temperature: float = 1.0, weights: Weights = "linear"
) -> Objective:
    """One head a depth (SPEC 2.9), the baseline that the shared head is measured against.

    kl: the weight of the divergence to the last depth's prediction, softened by `temperature`.
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
    """Weights of your own, one for each depth 0..L; depth 0 is the embedding."""
    return Objective(name="weighted", shape="given", given=tuple(weights))
