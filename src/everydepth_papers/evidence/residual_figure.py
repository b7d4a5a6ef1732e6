"""Figures of Residual Relay: a panel for each kind, of what the cells of `label_noise` measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from everydepth_papers.evidence.figures import band
from everydepth_papers.evidence.recipe import Finished
from everydepth_papers.evidence.residual_claims import (
    SIDES,
    early_over_late,
    layers_of,
    norms_of,
    removed,
    scaled,
    untouched,
)
from everydepth_papers.evidence.rows import where

ACROSS = 4
"""Panels in a row."""

Panel = tuple[str, Callable[[Any, Sequence[Finished]], None]]


def figure(results: Sequence[Finished]) -> Any:
    """Of the first network, and where there are several shares of wrong labels, of each of them.

    Bands are the smallest and the largest seed; dashed lines have all skips.
    """
    from matplotlib.figure import Figure

    results = where(results, name=results[0].cell["name"])
    panels: list[Panel] = [("memorization %", _memorization), ("test accuracy %", _accuracy)]
    if "study" in results[0].values:
        panels += [
            ("gradient norm", _gradients),
            ("margin without a layer's skips", _margins),
            ("std of the stream", _stream),
            ("std of weights", _weights),
            ("prediction error", _errors),
            ("margin and gradient norm", _view),
        ]
    if "scaled" in results[0].values:
        panels += [("skips of layer 1 scaled by c", _scales)]
    if "watched" in results[0].values:
        panels += [
            ("gradient norm in training", _norms_watched),
            ("margin in training", _margins_watched),
        ]
    rows = -(-len(panels) // ACROSS)
    page = Figure(figsize=(3.2 * min(len(panels), ACROSS), 2.9 * rows), layout="constrained")
    for place, (title, draw) in enumerate(panels, start=1):
        axis = page.add_subplot(rows, min(len(panels), ACROSS), place)
        draw(axis, results)
        axis.set_title(title, fontsize=9)
        if axis.get_legend_handles_labels()[0]:
            axis.legend(fontsize=7)
    return page


def _by_layer(axis: Any, results: Sequence[Finished], name: str) -> None:
    shares = sorted({r.cell["noise"] for r in results})
    for share in shares:
        own = where(results, noise=share)
        words = "without its skips" if len(shares) == 1 else f"{share:.0%} wrong labels"
        band(axis, layers_of(own), 100 * removed(own, name), words)
        color = axis.lines[-1].get_color()
        axis.axhline(100 * untouched(own, name).mean(), ls="--", color=color)
    axis.set(xlabel="layer", ylim=(0, 105), xticks=layers_of(results))


def _memorization(axis: Any, results: Sequence[Finished]) -> None:
    _by_layer(axis, results, "memorization")


def _accuracy(axis: Any, results: Sequence[Finished]) -> None:
    _by_layer(axis, results, "accuracy")


def _studied(results: Sequence[Finished]) -> list[int]:
    return list(results[0]["study"]["layers"])


def _gradients(axis: Any, results: Sequence[Finished]) -> None:
    for side in SIDES:
        band(axis, _studied(results), norms_of(results, side), side)
    bounds = [r["study"]["learning"]["log10_bound"].get("as_printed") for r in results]
    if all(bounds):
        top = 10 ** np.mean([one["attention"] for one in bounds], 0)
        axis.plot(_studied(results), top, "k:", label="bound, as printed")
    axis.set(xlabel="layer", yscale="log", xticks=_studied(results))


def _margins(axis: Any, results: Sequence[Finished]) -> None:
    band(axis, layers_of(results), removed(results, "margin"), "without its skips")
    axis.axhline(untouched(results, "margin").mean(), ls="--", color="C0")
    axis.set(xlabel="layer", xticks=layers_of(results))


def _stream(axis: Any, results: Sequence[Finished]) -> None:
    for side, style in zip(SIDES, ("-", "--"), strict=True):
        for color, tap in enumerate(results[0]["study"][side]["std"]):
            values = [r["study"][side]["std"][tap] for r in results]
            words = f"before {tap}, {side}"
            band(axis, _studied(results), values, words, linestyle=style, color=f"C{color}")
    axis.set(xlabel="layer", ylim=(0, None), xticks=_studied(results))


def _weights(axis: Any, results: Sequence[Finished]) -> None:
    for name, first in results[0]["study"]["weights"].items():
        if None not in first:
            band(axis, _studied(results), [r["study"]["weights"][name] for r in results], name)
    axis.set(xlabel="layer", ylim=(0, None), xticks=_studied(results))


def _errors(axis: Any, results: Sequence[Finished]) -> None:
    for place, side in enumerate(SIDES):
        values = [r["study"][side]["error"] for r in results]
        axis.bar(place, np.mean(values), color=f"C{place}", alpha=0.5)
        axis.plot([place] * len(values), values, "ko", markersize=3)
    axis.set(xticks=range(len(SIDES)), xticklabels=SIDES, ylim=(0, None))


def _view(axis: Any, results: Sequence[Finished]) -> None:
    norms = np.array([r["view"]["gradient_norm"] for r in results])
    for r in results:
        axis.plot(r["view"]["gradient_norm"], r["view"]["margin"], "o", label=f"seed {r.seed}")
    scale = "log" if norms.max() > 10 * norms.min() > 0 else "linear"
    axis.set(xlabel="gradient norm of learning", ylabel="margin without", xscale=scale)


def _scales(axis: Any, results: Sequence[Finished]) -> None:
    at = [0.0, *results[0]["scaled"]["c"], 1.0]
    for name, words in (("memorization", "memorization %"), ("accuracy", "test accuracy %")):
        band(axis, at, 100 * scaled(results, name), words)
    axis.set(xlabel="c", ylim=(0, 105))


def _watched(axis: Any, results: Sequence[Finished], read: Callable[[Any], float]) -> None:
    """Every arm, to the last epoch that all seeds reached."""
    for color, arm in enumerate(results[0]["watched"]):
        seen = [r["watched"][arm] for r in results]
        last = min(map(len, seen))
        values = [[read(look) for look in looks[:last]] for looks in seen]
        at = [look["epoch"] for look in seen[0][:last]]
        band(axis, at, values, arm, color=f"C{color}")
    axis.set(xlabel="epoch")


def _norms_watched(axis: Any, results: Sequence[Finished]) -> None:
    _watched(axis, results, lambda look: early_over_late(look["learning_norm"]))
    axis.axhline(1, ls=":", color="gray")
    axis.set_ylabel("first layer / last")


def _margins_watched(axis: Any, results: Sequence[Finished]) -> None:
    _watched(axis, results, lambda look: look["learning_margin"])
