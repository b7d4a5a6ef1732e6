"""The claims of Residual Relay against what the cells of `label_noise` measured.

Intervals are Student's, 95 %, over seeds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from everydepth_papers.evidence.recipe import Finished, Row
from everydepth_papers.evidence.rows import holds_on_average, short
from everydepth_papers.premise import Checked, Premise
from everydepth_papers.statistics import interval, spearman
from everydepth_papers.verdict import of_cases, of_worst

Floats = NDArray[np.float64]

SAYS = {
    "memorization": "no impact on memorization, whichever layer",
    "learning": "removing skips impairs learning",
    "early": "early layers are critical for learning",
    "gradients": "smaller for memorized samples in all layers",
    "error": "smaller for memorized samples",
    "norms": "early layers have the largest gradient norms",
    "stream": "varies much over layers, weights hardly",
    "alike": "nearly identical for learned and memorized samples",
    "theorem": "by proof",
    "margin": "falls most without early skips",
    "view": "layers with larger gradients have lower margin and accuracy without their skips",
    "scale": "the smaller c, the lower the accuracy",
    "epochs": "over all epochs",
}
"""What the paper states."""

SAME = 0.05  # memorization and standard deviations count as unchanged within 5 %


def mean_row(
    quantity: str, published: float | str | None, values: Any, note: str = "", scale: float = 1.0
) -> Row:
    """The mean over seeds with its interval; without one for a single seed."""
    found = scale * np.asarray(values, dtype=float)
    low, high = interval(found)
    spread = (None, None) if np.isnan(low) else (short(low), short(high))
    kept = found[np.isfinite(found)]
    words = f"{len(found)} seed{'s' if len(found) > 1 else ''}"
    return Row(
        quantity,
        published,
        short(float(kept.mean())) if len(kept) else None,
        *spread,
        f"{words}; {note}" if note else words,
    )


FITTED = Premise(
    test="training accuracy, wrong labels included", value=lambda figure: figure, least=0.99
)
"""What was not memorized says nothing of memorization: in the last epoch of a run."""
LEARNED = {
    "linear": Premise(
        test="test accuracy above a linear classifier's on the same rows",
        value=lambda figure: figure,
        failing="inconclusive",
    ),
    "majority": Premise(
        test="test accuracy above the most frequent answer",
        value=lambda figure: figure,
        least=0.02,
        failing="inconclusive",
    ),
}
"""By the name of what a cell compares with: networks that know nothing have nothing to lose."""


def claim(
    statement: str,
    says: str,
    values: Any,
    given: Sequence[Checked],
    *,
    low: float = -np.inf,
    high: float = np.inf,
) -> Row:
    """`holds_on_average` of a statement; says: a key of `SAYS`."""
    return holds_on_average(statement, SAYS[says], values, given, low=low, high=high)


def rows(
    results: Sequence[Finished],
    query: Mapping[str, Mapping[str, float]] | None = None,
    by_noise: bool = False,
    removal: str = "Fig. 1, 2, 10",
) -> list[Row]:
    """Everything that the cells of each network measured.

    query: by network, what Table 2 prints (see `study_rows`). by_noise: a share of wrong labels is
    a setting that the rows name. removal: the figures on memorization and accuracy by layer.
    """
    found: list[Row] = []
    for name, noise in dict.fromkeys((r.cell["name"], r.cell["noise"]) for r in results):
        own = [r for r in results if (r.cell["name"], r.cell["noise"]) == (name, noise)]
        words = f", {noise:.0%} noise" if by_noise else ""
        mine = removal_rows(own, f"{removal}{words}")
        if "study" in own[0].values:
            mine += study_rows(own, (query or {}).get(name))
        if "scaled" in own[0].values:
            mine += scale_rows(own)
        if "watched" in own[0].values:
            mine += epoch_rows(own)
        found += mine
    return found


def removal_rows(results: Sequence[Finished], item: str) -> list[Row]:
    """Memorization and test accuracy for each layer without its skips.

    That the untouched network fitted its labels is a premise of all of it. That the other one did
    is a premise of a comparison of test accuracies alone: of memorization it is the question.
    """
    layers = layers_of(results)
    mem, acc = removed(results, "memorization"), removed(results, "accuracy")
    mem_all, acc_all = untouched(results, "memorization"), untouched(results, "accuracy")
    rows = [
        mean_row(
            f"{item}: memorization %, all skips", 100.0, mem_all, _reached(results, None), 100.0
        ),
        *(
            mean_row(
                f"{item}: memorization %, layer {layer} without",
                100.0,
                mem[:, i],
                _reached(results, i),
                100.0,
            )
            for i, layer in enumerate(layers)
        ),
        mean_row(f"{item}: epochs of training, all skips", None, _epochs(results, None)),
        *(
            mean_row(
                f"{item}: epochs of training, layer {layer} without",
                None,
                _epochs(results, layer),
            )
            for layer in layers
        ),
        mean_row(f"{item}: test accuracy %, all skips", None, acc_all, "", 100.0),
        *(
            mean_row(
                f"{item}: test accuracy %, layer {layer} without", "lower", acc[:, i], "", 100.0
            )
            for i, layer in enumerate(layers)
        ),
        *_first_fitted_rows(results, layers, item),
    ]
    lost, drop = mem_all[:, None] - mem, acc_all[:, None] - acc
    rows += [
        claim(
            f"{item}: removing the skips of layer {layer} leaves memorization as it is "
            "(within 5 points)",
            "memorization",
            lost[:, i],
            _fitted(results, None),
            low=-SAME,
            high=SAME,
        )
        for i, layer in enumerate(layers)
    ]
    rows += [
        claim(
            f"{item}: removing the skips of layer {layer} lowers test accuracy",
            "learning",
            drop[:, i],
            _learned(results, None, layer),
            low=0.0,
        )
        for i, layer in enumerate(layers)
    ]
    if len(layers) > 1:
        rows.append(
            claim(
                f"{item}: test accuracy falls more without layer {layers[0]} than without "
                f"{layers[-1]}",
                "early",
                drop[:, 0] - drop[:, -1],
                _learned(results, None, layers[0], layers[-1]),
                low=0.0,
            )
        )
    if len(layers) > 2:
        rank = [spearman(np.array(layers, float), row) for row in acc]
        every = _learned(results, *layers)
        words = f"{item}: test accuracy rises with the removed layer (Spearman)"
        rows.append(claim(words, "early", rank, every, low=0.0))
    return rows


def study_rows(results: Sequence[Finished], query: Mapping[str, float] | None = None) -> list[Row]:
    """Figures 5 to 9 and 14 to 24, Table 2: gradients, errors, spreads, bound, margins.

    query: mean and std of the standard deviation of W_Q, as Table 2 prints them for this network.
    """
    layers = results[0]["study"]["layers"]
    learn, mem = norms_of(results, "learning"), norms_of(results, "memorization")
    rows = [
        mean_row(f"Fig. 5, 15: learning gradient norm, layer {n}", "falls with depth", learn[:, i])
        for i, n in enumerate(layers)
    ]
    rows += [
        mean_row(
            f"Fig. 5, 15: memorization / learning gradient norm, layer {n}",
            "< 1",
            (mem / learn)[:, i],
        )
        for i, n in enumerate(layers)
    ]
    rows += [
        claim(
            f"Fig. 5, 15: the memorization gradient is smaller at layer {n} (ratio)",
            "gradients",
            (mem / learn)[:, i],
            _fitted(results, None),
            high=1.0,
        )
        for i, n in enumerate(layers)
    ]
    error = {side: _each(results, lambda s: s["error"], side) for side in SIDES}
    rows += [
        mean_row("Fig. 7, 14: prediction error, learning", None, error["learning"]),
        mean_row("Fig. 7, 14: prediction error, memorization", "smaller", error["memorization"]),
        claim(
            "Fig. 7, 14: the error of memorized samples is smaller (ratio)",
            "error",
            error["memorization"] / error["learning"],
            _fitted(results, None),
            high=1.0,
        ),
        claim(
            "Fig. 5, 15: gradient norms fall from the first to the last layer (ratio)",
            "norms",
            learn[:, 0] / learn[:, -1],
            _fitted(results, None),
            low=1.0,
        ),
    ]
    return [
        *rows,
        *_spread_rows(results),
        *_query_rows(results, query),
        *_bound_rows(results),
        *_margin_rows(results),
    ]


SIDES = ("learning", "memorization")
SPREAD = "Fig. 6, 16, 17, 18, 19, 20, 21, 22"


def _spread_rows(results: Sequence[Finished]) -> list[Row]:
    std = {
        side: np.array([np.mean(list(r["study"][side]["std"].values()), 0) for r in results])
        for side in SIDES
    }
    weights = [
        np.mean([_variation(v) for v in r["study"]["weights"].values() if None not in v])
        for r in results
    ]
    stream = [_variation(row) for row in std["learning"]]
    fitted = _fitted(results, None)
    grown = _last_first(std["learning"])
    return [
        mean_row(f"{SPREAD}: std of the stream, last / first layer", "> 1", grown),
        claim(
            f"{SPREAD}: the std of the stream grows with depth", "stream", grown, fitted, low=1.0
        ),
        claim(
            f"{SPREAD}: the std of the stream is the same for both (ratio, within 5 %)",
            "alike",
            (std["memorization"] / std["learning"]).mean(1),
            fitted,
            low=1 - SAME,
            high=1 + SAME,
        ),
        mean_row(
            f"{SPREAD}: std of weights, variation over layers", "small", weights, "std / mean"
        ),
        mean_row(
            f"{SPREAD}: std of the stream, variation over layers", "large", stream, "std / mean"
        ),
        claim(
            f"{SPREAD}: the stream varies more over layers than the weights (ratio)",
            "stream",
            np.array(stream) / np.array(weights),
            fitted,
            low=1.0,
        ),
    ]


def _query_rows(results: Sequence[Finished], printed: Mapping[str, float] | None) -> list[Row]:
    """Table 2; for a network that it lacks, the range over the paper's eight."""
    if any(r["query_std"] is None for r in results):
        return [Row("Table 2: std of W_Q", None, "none", note=str(results[0]["study"]["note"]))]
    found = np.array([r["query_std"] for r in results])
    mean, std = ("0.022 to 0.247", "0.004 to 0.033") if printed is None else printed.values()
    return [
        mean_row("Table 2: std of W_Q, mean over layers", mean, found.mean(1)),
        mean_row("Table 2: std of W_Q, std over layers", std, found.std(1)),
    ]


FORMS = {
    "as_printed": "Eq. 17 as printed",
    "corrected": "its factors in the order of the paper's definitions",
    "repaired": "repaired",
}
"""Of the bound. The last is ours: what the text proves, with the constants that it drops."""


def _bound_rows(results: Sequence[Finished]) -> list[Row]:
    rows: list[Row] = []
    for form, name in FORMS.items():
        shares = [r["study"]["learning"]["violations"].get(form) for r in results]
        if not all(shares):
            return [Row("Theorem 1", None, "none", note=str(results[0]["study"]["note"]))]
        for tap, place in (("attention", "x"), ("mlp", "x~")):
            worst = [max(share[tap]) for share in shares]
            words = f"Theorem 1: samples beyond the bound at {place}, %, {name}"
            rows.append(mean_row(words, 0.0, worst, "the worst layer", 100.0))
        if form != "repaired":
            beyond = [max(max(share[tap]) for tap in ("attention", "mlp")) for share in shares]
            rows.append(
                Row(
                    f"Theorem 1: no sample exceeds the bound at any layer, {name}",
                    SAYS["theorem"],
                    of_worst(beyond, most=0.0),
                    note=f"{sum(one == 0 for one in beyond)} of {len(beyond)} seeds",
                )
            )
    gap = [
        np.array(r["study"]["learning"]["log10_bound"]["repaired"]["attention"])
        - np.log10(np.array(r["study"]["learning"]["norms"]["attention"]))
        for r in results
    ]
    first, last = np.array(gap)[:, 0], np.array(gap)[:, -1]
    ordered = [bool(r["study"]["bound_is_ordered"]) for r in results]
    return [
        *rows,
        mean_row("Theorem 1: log10 of bound / norm at x_1", None, first, "repaired form"),
        mean_row("Theorem 1: log10 of bound / norm at x_L", None, last, "repaired form"),
        Row(
            "Theorem 2: the bound never rises with depth",
            SAYS["theorem"],
            of_cases(ordered),
            note=f"{sum(ordered)} of {len(ordered)} seeds",
        ),
    ]


def _margin_rows(results: Sequence[Finished]) -> list[Row]:
    rows = [mean_row("Fig. 8, 23: margin (logits), all skips", None, untouched(results, "margin"))]
    margin = removed(results, "margin")
    layers = layers_of(results)
    rows += [
        mean_row(f"Fig. 8, 23: margin (logits), layer {n} without", None, margin[:, i])
        for i, n in enumerate(layers)
    ]
    if len(layers) > 1:
        rows.append(
            claim(
                f"Fig. 8, 23: the margin is smaller without layer {layers[0]} than without "
                f"{layers[-1]}",
                "margin",
                margin[:, -1] - margin[:, 0],
                _fitted(results, layers[0], layers[-1]),
                low=0.0,
            )
        )
    for pair in ("gradient_norm/margin", "gradient_norm/accuracy", "margin/accuracy"):
        found = [_float(r["view"]["spearman"][pair]) for r in results]
        words = pair.replace("_", " ").replace("/", " and ")
        side: dict[str, Any] = {"low": 0.0} if pair.startswith("margin") else {"high": 0.0}
        sign = "rise together" if pair.startswith("margin") else "go against each other"
        every = _learned(results, None, *layers)
        words = f"Fig. 9, 24: {words} {sign} over layers (Spearman)"
        rows.append(claim(words, "view", found, every, **side))
    return rows


def scale_rows(results: Sequence[Finished]) -> list[Row]:
    """Figure 13: the skips of layer 1 scaled by c; 0 and 1 are those of the removal."""
    rows: list[Row] = []
    between = results[0]["scaled"]["c"]
    scales = [0.0, *between, 1.0]
    accuracy = scaled(results, "accuracy")
    for values, published, words in (
        (scaled(results, "memorization"), 100.0, "memorization %"),
        (accuracy, None, "test accuracy %"),
    ):
        rows += [
            mean_row(
                f"Fig. 13: {words}, layer 1 scaled by {c:g}", published, values[:, i], "", 100.0
            )
            for i, c in enumerate(scales)
            if c in between
        ]
    rank = [spearman(np.array(scales), row) for row in accuracy]
    ends = _learned(results, None, 1)
    words = "Fig. 13: test accuracy rises with c (Spearman, 0 to 1)"
    return [*rows, claim(words, "scale", rank, ends, low=0.0)]


def scaled(results: Sequence[Finished], name: str) -> Floats:
    """(seed, c) at layer 1, from c = 0 to c = 1."""
    own = _metric(results[0], name)
    between = np.array([r["scaled"]["runs"][own][0][0] for r in results])
    first = removed(results, name)[:, [layers_of(results).index(1)]]
    return np.concatenate([first, between, untouched(results, name)[:, None]], 1)


def epoch_rows(results: Sequence[Finished]) -> list[Row]:
    """Figures 25 and 26: gradient norms and margins over epochs."""
    rows: list[Row] = []
    for name, layer in zip(results[0]["watched"], (None, 1), strict=False):
        looks = [r["watched"][name] for r in results]
        first = [
            float(np.mean([early_over_late(look["learning_norm"]) for look in seen]))
            for seen in looks
        ]
        rows.append(
            mean_row(
                f"Fig. 25: {name}, gradient norm, first / last layer, mean over epochs",
                "> 1",
                first,
            )
        )
        words = f"Fig. 25: {name}, the first layer's norm is larger over epochs"
        rows.append(claim(words, "epochs", first, _fitted(results, layer), low=1.0))
        for what, place in (("first", 0), ("last", -1)):
            margins = [seen[place]["learning_margin"] for seen in looks]
            rows.append(mean_row(f"Fig. 26: {name}, margin at the {what} look", None, margins))
    if len(results[0]["watched"]) == 2:
        lost = [_margin_lost(*r["watched"].values()) for r in results]
        words = "Fig. 26: the margin is smaller without layer 1 at the same epochs"
        rows.append(claim(words, "epochs", lost, _fitted(results, None, 1), low=0.0))
    return rows


def _margin_lost(plain: Sequence[Any], without: Sequence[Any]) -> float:
    """The mean decrease of the margin over the epochs that both runs reached."""
    pairs = zip(plain, without, strict=False)
    return float(np.mean([a["learning_margin"] - b["learning_margin"] for a, b in pairs]))


def layers_of(results: Sequence[Finished]) -> list[int]:
    return list(results[0]["removed"]["layers"])


def _metric(result: Finished, name: str) -> str:
    """A language model is right about a sample if it writes all of its label."""
    whole = name == "accuracy" and "sample_accuracy" in result["removed"]["runs"]
    return "sample_accuracy" if whole else name


def removed(results: Sequence[Finished], name: str) -> Floats:
    """(seed, layer), without the skips."""
    name = _metric(results[0], name)
    return np.array([np.array(r["removed"]["runs"][name])[0, :, 0] for r in results])


def untouched(results: Sequence[Finished], name: str) -> Floats:
    name = _metric(results[0], name)
    return np.array([r["removed"]["untouched"][name][0] for r in results])


def _reached(results: Sequence[Finished], index: int | None) -> str:
    flags = (
        untouched(results, "reached") if index is None else removed(results, "reached")[:, index]
    )
    return f"all training labels fitted in {int(flags.sum())} of {len(flags)} runs"


def _arms(results: Sequence[Finished], layer: int | None) -> list[dict[str, Any]]:
    """The runs without the skips of a layer (None: with all skips), one per seed."""
    name = "untouched" if layer is None else f"layer-{layer:02d}-c-0"
    return [r["epochs"][f"{name}-seed-{r.seed}"] for r in results]


def _epochs(results: Sequence[Finished], layer: int | None) -> list[int]:
    return [arm["epochs"] for arm in _arms(results, layer)]


def _fitted(results: Sequence[Finished], *layers: int | None) -> list[Checked]:
    """Training accuracy in the last epoch, of the arm that fits worst; unknown where one is.

    Of results from before it was kept, 1 where all labels were fitted.
    """
    by_arm = [
        [
            arm.get("train_accuracy", 1.0 if arm["reached"] else None)
            for arm in _arms(results, layer)
        ]
        for layer in layers
    ]
    return [FITTED.of([None if None in arms else min(arms) for arms in zip(*by_arm, strict=True)])]


def _learned(results: Sequence[Finished], *layers: int | None) -> list[Checked]:
    """The same, and what the untouched network knows beyond the simplest classifier."""
    name = "linear" if all("linear" in r.values for r in results) else "majority"
    accuracy = untouched(results, "accuracy")
    figures = [
        own - r[name] if name in r.values else None
        for own, r in zip(accuracy, results, strict=True)
    ]
    return [LEARNED[name].of(figures), *_fitted(results, *layers)]


def _first_fitted_rows(results: Sequence[Finished], layers: Sequence[int], item: str) -> list[Row]:
    """When all labels were first fitted, and the test accuracy there."""
    rows: list[Row] = []
    for layer in (None, *layers):
        first = [arm["first"] for arm in _arms(results, layer) if arm.get("first")]
        words = "all skips" if layer is None else f"layer {layer} without"
        if first:
            epochs, accuracy = ([one[key] for one in first] for key in ("epoch", "also"))
            rows.append(mean_row(f"{item}: first epoch at 100 %, {words}", None, epochs))
            words = f"{item}: test accuracy % at the first 100 %, {words}"
            rows.append(mean_row(words, None, accuracy, "", 100.0))
    return rows


def norms_of(results: Sequence[Finished], side: str) -> Floats:
    return np.array([r["study"][side]["norm"] for r in results], dtype=float)


def _each(results: Sequence[Finished], read: Callable[[Any], float], side: str) -> Floats:
    return np.array([read(r["study"][side]) for r in results])


def _variation(values: Any) -> float:
    found = np.asarray(values, dtype=float)
    return float(found.std() / found.mean())


def _last_first(values: Floats) -> Floats:
    return values[:, -1] / values[:, 0]


def early_over_late(norms: dict[str, float]) -> float:
    layers = sorted(norms, key=int)
    return norms[layers[0]] / norms[layers[-1]]


def _float(value: float | None) -> float:
    return float("nan") if value is None else value
