"""Figures 1-7, 10, 11 and 14-17 of Tracing Representations, published beside measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from everydepth.tracing import effective_depth
from everydepth_papers.evidence.aligned_vision import TAU
from everydepth_papers.evidence.figures import band
from everydepth_papers.evidence.recipe import Finished, Row, over_seeds
from everydepth_papers.evidence.rows import holds_in, paired, where
from everydepth_papers.premise import Premise

FIVE = ("standard", "aligned", "multi", "cosine", "uniform")
LEARNED = Premise(
    test="accuracy of the last layer above a linear classifier's",
    value=lambda *case: min(best_read(r)[-1] - r["linear"] for r in case),
    failing="inconclusive",
)
COLLAPSED = Premise(
    test="training accuracy of the last layer, without which features do not collapse",
    value=lambda r: r["train_accuracy"][-1],
    least=0.99,
)
LEAVES = Premise(
    test="share that leaves before the last layer",
    value=lambda *case: min(1 - r["exit"]["leaving"][-1] / sum(r["exit"]["leaving"]) for r in case),
    least=0.05,
)


def shallow(values: Sequence[Any]) -> float:
    """The mean over depths 1 to L-1."""
    return float(np.mean(values[1:-1]))


def to_last(result: Finished) -> np.ndarray:
    """COS of depths 1..L with the last; the class token at depth 0 is the same for all samples."""
    return np.array(result["cos"], dtype=object)[1:, -1].astype(float)


def correlation(a: Any, b: Any) -> float:
    return float(np.corrcoef(np.array(a, float), np.array(b, float))[0, 1])


def rises(values: Any, slack: float) -> bool:
    """No value is lower than the one before by more than `slack`."""
    return bool((np.diff(np.array(values, float)) >= -slack).all())


def closer(result: Finished) -> bool:
    """Along each row of the COS matrix the values fall away from the diagonal, up to 0.02."""
    cos = np.array(result["cos"], dtype=object)[1:, 1:].astype(float)
    return all(
        rises(row[: i + 1], 0.02) and rises(row[i:][::-1], 0.02) for i, row in enumerate(cos)
    )


def best_read(result: Finished) -> list[Any]:
    """Accuracy by depth, through own classifiers where there are several: None at depth 0."""
    several = result.cell["objective"].startswith("multi")
    return result["own_accuracy" if several else "accuracy"]


def effective(result: Finished) -> float:
    """Smallest depth within two points of the network's own training accuracy."""
    return float(effective_depth(np.array(result["train_accuracy"]), 0.02)[1])


EPSILON = 0.05  # of Definition 1, which needs a training accuracy of 1 - EPSILON


def best_fit(result: Finished) -> float:
    return max(result["train_accuracy"])


def absolute(result: Finished) -> float:
    """Definition 1: the smallest depth whose training accuracy is at least 1 - EPSILON."""
    return float(effective_depth(np.array(result["train_accuracy"]), EPSILON)[0])


def rows(results: Sequence[Finished], *, printed: Mapping[str, Any]) -> list[Row]:
    """printed: the paper's figures and statements by name."""
    deepest = max(r.cell["depth"] for r in results)
    of = {
        name: where(results, objective=name, depth=deepest)
        for name in (*FIVE, "multi_kl")
        if name in FIVE or where(results, objective=name)
    }
    shorter = {
        depth: where(results, objective="standard", depth=depth)
        for depth in sorted({r.cell["depth"] for r in results} - {deepest})
    }
    return [
        *_similarity(of, printed),
        *_accuracy(of, printed),
        *_saturation(of, printed, deepest),
        *_effective_depth(of, shorter, printed, deepest),
        *_exits(of, printed),
        *_skips(of["standard"], printed),
        *_variants(of, printed),
        *_elsewhere(of, printed),
    ]


Groups = Mapping[str, Sequence[Finished]]
"""The results of each objective at full depth."""


def _say(quantity: str, printed: str, cases: Sequence[Any], test: Any, note: str = "") -> Row:
    return holds_in(quantity, printed, cases, test, note, premises=[LEARNED])


def _similarity(of: Groups, p: Mapping[str, Any]) -> list[Row]:
    standard = of["standard"]
    correlated = "correlation over depths above 0.9"
    agree = [correlation(to_last(r), r["cka"][1:]) for r in standard]
    return [
        _say(
            "Fig. 2: COS and CKA with the last layer agree",
            p["cos_and_cka"],
            standard,
            lambda r: correlation(to_last(r), r["cka"][1:]) > 0.9,
            correlated,
        ),
        over_seeds("Fig. 2: correlation of COS and CKA over depths", None, agree),
        _say(
            "Fig. 2: COS with the last layer rises",
            p["rises"],
            standard,
            lambda r: rises(to_last(r), 0.0),
        ),
        _say("Fig. 2c: closer layers, higher COS", p["diagonal"], standard, closer, "up to 0.02"),
        _say(
            "Fig. 2c: mean COS of all pairs of layers is nonnegative",
            p["nonnegative"],
            standard,
            lambda r: min(v for row in r["cos"][1:] for v in row[1:]) >= 0,
        ),
        _say(
            "Fig. 2: accuracy per layer follows COS",
            p["follows"],
            standard,
            lambda r: correlation(to_last(r), r["accuracy"][1:]) > 0.9,
            correlated,
        ),
        *(
            over_seeds(
                f"Fig. 1a/4a: mean COS below the last layer, {name}",
                None,
                [float(to_last(r)[:-1].mean()) for r in of[name]],
            )
            for name in ("standard", "aligned", "cosine")
        ),
        _say(
            "Fig. 1a, 4a: aligned training raises COS",
            p["aligned_cos"],
            paired(of["aligned"], standard),
            lambda a, s: to_last(a)[:-1].mean() > to_last(s)[:-1].mean(),
        ),
    ]


def _accuracy(of: Groups, p: Mapping[str, Any]) -> list[Row]:
    linear = [r["linear"] for r in of["standard"]]
    found = [over_seeds("accuracy of a linear classifier on the same rows", None, linear)]
    for name, group in of.items():
        plain = name == "standard"
        found += [
            over_seeds(
                f"Fig. 1b/4b/6/14/15: accuracy below the last layer, {name}",
                None,
                [shallow(best_read(r)) for r in group],
                "mean over layers 1 to L-1",
            ),
            over_seeds(
                f"Fig. 1b/4b/6/14/15: accuracy of the last layer, {name}",
                p["accuracy_standard"] if plain else None,
                [best_read(r)[-1] for r in group],
                "published: DeiT-S on ImageNet" if plain else "",
            ),
        ]
    return [
        *found,
        _say(
            "Fig. 1b, 4b: aligned training raises accuracy at every layer below the last",
            p["aligned_accuracy"],
            paired(of["aligned"], of["standard"]),
            lambda a, s: all(np.greater(a["accuracy"][1:-1], s["accuracy"][1:-1])),
        ),
        _say(
            "Fig. 4b: accuracy rises with depth, aligned",
            p["monotone"],
            of["aligned"],
            lambda r: rises(r["accuracy"][1:], 0.01),
            "falls of up to one point allowed",
        ),
    ]


def _saturation(of: Groups, p: Mapping[str, Any], deepest: int) -> list[Row]:
    half = deepest // 2
    return [
        *(
            over_seeds(
                f"Fig. 1c, 3: share of samples saturated by half depth, {name}",
                None,
                [r["saturated"][half] for r in of[name]],
            )
            for name in ("standard", "aligned")
        ),
        _say(
            "Fig. 1c, 3: aligned training saturates earlier",
            p["saturation"],
            paired(of["aligned"], of["standard"]),
            lambda a, s: a["saturated"][half] > s["saturated"][half],
        ),
    ]


def _effective_depth(
    of: Groups, shorter: Mapping[int, Sequence[Finished]], p: Mapping[str, Any], deepest: int
) -> list[Row]:
    """Figure 5. shorter: standard networks of fewer layers, by their depth."""
    found: list[Row] = []
    for name in ("standard", "aligned"):
        group = of[name]
        reached = [r for r in group if best_fit(r) >= 1 - EPSILON]
        found += [
            over_seeds(
                f"Fig. 5a: effective depth on training data, {name}, of {deepest}",
                p[f"effective_depth_{name}"],
                [effective(r) for r in group],
                "within 2 points of the network's own accuracy",
            ),
            over_seeds(
                f"Fig. 5a: depth at which training accuracy reaches {1 - EPSILON:.0%}, {name}",
                None,
                [absolute(r) for r in reached],
                f"Definition 1 as printed; reached by {len(reached)} of {len(group)}",
            ),
        ]
    found += [
        _say(
            f"Fig. 5a: cut at {depth}, aligned beats a standard network of {depth} layers",
            p["truncated"],
            paired(of["aligned"], group),
            lambda a, s, depth=depth: a["train_accuracy"][depth] > s["train_accuracy"][depth],
            "training accuracy",
        )
        for depth, group in shorter.items()
    ]
    return [
        *found,
        _say(
            "Fig. 5b: aligned training converges faster",
            p["converges"],
            paired(of["aligned"], of["standard"]),
            lambda a, s: np.mean(a["by_epoch"]) > np.mean(s["by_epoch"]),
            "test accuracy, mean over epochs",
        ),
    ]


def _late(result: Finished) -> bool:
    """Most samples leave at the last layer."""
    leaving = result["exit"]["leaving"]
    return leaving[-1] > sum(leaving) / 2


def _exits(of: Groups, p: Mapping[str, Any]) -> list[Row]:
    above = f"leaving above a confidence of {TAU:g}"
    found = [
        _say(
            "Fig. 7: standard, most leave at the last layer",
            p["exits_standard"],
            of["standard"],
            _late,
            above,
        ),
        _say(
            "Fig. 7: aligned, most leave early",
            p["exits_aligned"],
            of["aligned"],
            lambda r: not _late(r),
            above,
        ),
    ]
    published = {
        "standard": (None, None),
        "aligned": (p["accuracy_aligned_exit"], p["speedup_aligned"]),
        "multi": (p["accuracy_multi_exit"], p["speedup_multi"]),
    }
    for name, (accuracy, speed) in published.items():
        left = [r["exit"] for r in of[name]]
        right, layers = ([one[key] for one in left] for key in ("accuracy", "layers"))
        found += [
            over_seeds(f"Fig. 7: accuracy with exits, {name}", accuracy, right, above),
            over_seeds(f"Fig. 7: speed-up by layers, {name}", speed, layers, above),
        ]
        timed = [one["measured"] for one in left if one["measured"] is not None]
        if timed:
            words = "wall clock, batches of 250, one thread, interleaved with the full model"
            found.append(over_seeds(f"Fig. 7: speed-up measured, {name}", None, timed, words))
    return [
        *found,
        holds_in(
            "Fig. 6, 7: with exits, one head is within 2 points of one head per layer",
            p["on_par"],
            paired(of["aligned"], of["multi"]),
            lambda a, m: a["exit"]["accuracy"] > m["exit"]["accuracy"] - 0.02,
            premises=[LEARNED, LEAVES],
        ),
    ]


def _skips(standard: Sequence[Finished], p: Mapping[str, Any]) -> list[Row]:
    found = [
        _say(
            "Fig. 11: COS of adjacent layers is above 0.8, from layer 2 on",
            p["adjacent"],
            standard,
            lambda r: min(r["adjacent"][1:]) > 0.8,
        ),
        _say(
            "Fig. 11: the skip carries more than the block adds",
            p["norm_ratio"],
            standard,
            lambda r: np.mean(r["norm_ratio"]) > 1,
            "median of samples, mean over layers",
        ),
        _say(
            "Fig. 10: 5 % quantile of COS with the last layer is negative at layer 1 only",
            p["negative"],
            standard,
            lambda r: all(v >= 0 for v in r["cos_q05"][2:]),
        ),
        over_seeds(
            "Fig. 11: COS of adjacent layers, smallest over depths",
            p["adjacent"],
            [min(r["adjacent"][1:]) for r in standard],
            "from layer 2 on",
        ),
        over_seeds(
            "Fig. 11: norm ratio of skip and branch, median, mean over layers",
            p["norm_ratio"],
            [float(np.mean(r["norm_ratio"])) for r in standard],
            "standard training",
        ),
    ]
    surer = "the label gains probability where COS rises"
    for item, words, key, said, premise in (
        ("Assumption 1", "features travel straight", "straight", "1 (a geodesic)", LEARNED),
        # Its proof takes neural collapse for granted (NC1 and NC3 of the last layer).
        ("Theorem 2", surer, "closer_is_surer", "always", COLLAPSED),
    ):
        known = [r for r in standard if r.values.get(key) is not None]
        if known:  # results from before it was measured have none
            note = "mean of samples"
            found += [
                over_seeds(f"{item}: {words}, share", said, [r[key] for r in known], note),
                holds_in(
                    f"{item}: {words}",
                    said,
                    known,
                    lambda r, key=key: r[key] >= 0.9,
                    "at least 0.9, as in the ledger of claims",
                    premises=[premise],
                ),
            ]
    return found


def _variants(of: Groups, p: Mapping[str, Any]) -> list[Row]:
    """Figures 14 to 16: another regularizer, other weights, the structure of classes."""
    ours = "beta = 1, the paper gives none"
    regularized = paired(of["aligned"], of["cosine"])
    return [
        _say(
            "Fig. 14: the regularizer gains less accuracy below the last layer than aligned "
            "training",
            p["regularizer"],
            regularized,
            lambda a, c: shallow(a["accuracy"]) > shallow(c["accuracy"]),
            ours,
        ),
        _say(
            "Fig. 14: the regularizer gains less COS than aligned training",
            p["regularizer"],
            regularized,
            lambda a, c: to_last(a)[:-1].mean() > to_last(c)[:-1].mean(),
            ours,
        ),
        _say(
            "Fig. 15: uniform weights, better first layer and worse last layer than linear",
            p["uniform"],
            paired(of["uniform"], of["aligned"]),
            lambda u, a: (
                u["accuracy"][1] > a["accuracy"][1] and u["accuracy"][-1] < a["accuracy"][-1]
            ),
        ),
        _say(
            "Fig. 16: aligned training separates classes earlier",
            p["collapse"],
            paired(of["aligned"], of["standard"]),
            lambda a, s: shallow(a["separation"]) < shallow(s["separation"]),
            "log tr(Sigma_W Sigma_B^+), mean over layers 1 to L-1",
        ),
    ]


def _elsewhere(of: Groups, p: Mapping[str, Any]) -> list[Row]:
    """Figure 17: other data."""
    moved = [
        (a, s)
        for a, s in paired(of["aligned"], of["standard"])
        if "probe" in a.values and "probe" in s.values
    ]
    found = [
        over_seeds(
            f"Fig. 17: {name}, accuracy, {kind}",
            None,
            [shallow(pair[index][key]) for pair in moved],
            "mean over layers 1 to L-1",
        )
        for name, key in (
            ("linear probe on another data set", "probe"),
            ("shifted test", "shifted"),
        )
        for index, kind in enumerate(("aligned", "standard"))
    ]
    return [
        *found,
        _say(
            "Fig. 17: probes lose at most 2 points by aligned training",
            p["transfer"],
            moved,
            lambda a, s: shallow(a["probe"]) > shallow(s["probe"]) - 0.02,
        ),
        _say(
            "Fig. 17: aligned training is better on shifted data",
            p["shift"],
            moved,
            lambda a, s: shallow(a["shifted"]) > shallow(s["shifted"]),
        ),
    ]


def figure(results: Sequence[Finished]) -> Figure:
    """COS, accuracy, saturation, CKA by depth (Figures 1, 4, 14, 15), exits, and heat maps."""
    deepest = max(r.cell["depth"] for r in results)
    names = dict.fromkeys(r.cell["objective"] for r in results)
    depths = range(1, deepest + 1)
    page = Figure(figsize=(15, 6.5), layout="constrained")
    top = page.subplots(2, 4)
    panels: dict[str, Any] = {
        "COS with the last layer": to_last,
        "accuracy": lambda r: best_read(r)[1:],
        "share saturated": lambda r: r["saturated"][1:],
        "CKA with the last layer": lambda r: r["cka"][1:],
    }
    for axis, (title, curve) in zip(top[0], panels.items(), strict=True):
        for name in names:
            mine = where(results, objective=name, depth=deepest)
            band(axis, depths, [np.array(curve(r), float) for r in mine], name)
        axis.set(title=title, xlabel="depth (blocks)")
    linear = np.mean([r["linear"] for r in results if "linear" in r.values] or [np.nan])
    top[0, 1].axhline(linear, color="gray", linestyle=":", label="linear classifier")
    for axis in top[0, :2]:
        axis.legend(fontsize=8)
    for axis, name in zip(top[1, :2], ("standard", "aligned"), strict=True):
        mine = where(results, objective=name, depth=deepest)
        cos = np.mean([np.array(r["cos"], object)[1:, 1:].astype(float) for r in mine], 0)
        edge = (0.5, deepest + 0.5)
        drawn = axis.imshow(cos, vmin=0, vmax=1, origin="lower", extent=(*edge, *edge))
        axis.set(title=f"COS of all pairs, {name}", xlabel="depth", ylabel="depth")
        page.colorbar(drawn, ax=axis)
    for name in ("standard", "aligned", "multi"):
        mine = where(results, objective=name, depth=deepest)
        left = np.array([np.divide(r["exit"]["leaving"], sum(r["exit"]["leaving"])) for r in mine])
        band(top[1, 2], depths, left, name)
    top[1, 2].set(title=f"share leaving, confidence {TAU:g}", xlabel="depth (blocks)")
    _draw_sweep(top[1, 3], where(results, depth=deepest))
    return page


def _draw_sweep(axis: Any, results: Sequence[Finished]) -> None:
    """Accuracy against speed-up for all thresholds, counted in layers and (dashed) by the clock."""
    for color, name in zip(("C0", "C1"), ("standard", "aligned"), strict=True):
        swept = [r["exit"]["swept"] for r in where(results, objective=name) if "swept" in r["exit"]]
        if not swept:
            continue
        layers, measured, accuracy = (
            np.mean([[one[key] for one in seed] for seed in swept], 0)
            for key in ("layers", "measured", "accuracy")
        )
        axis.plot(layers, accuracy, color=color, marker="o", markersize=3, label=name)
        axis.plot(measured, accuracy, color=color, linestyle="--", marker="x", markersize=3)
    if not axis.lines:  # results from before thresholds were swept
        axis.remove()
        return
    axis.set(
        title="exits, thresholds swept",
        xlabel="speed-up by layers (dashed: by the clock)",
        ylabel="accuracy",
    )
    axis.legend(fontsize=8)
