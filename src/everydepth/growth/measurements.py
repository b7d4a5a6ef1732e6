"""The measurements of growth, built from the plain values that a run stores."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from everydepth.results import Result, Results, curve, named, rows, scalars
from everydepth.results.results import class_of

SITE = "a new block after depth"
CHOICES = ("old", "jumpboard", "trained")
Content = Mapping[str, Any]


def convert(name: str, content: Content, folder: Path) -> Results:
    """Results from an entry of results.json."""
    about = {**content, "samples": content.get("rows")}
    return class_of(name)(results=measurements(name, content), about=about, kind=name)


def measurements(name: str, content: Content) -> dict[str, Result]:
    """The measurements of one kind of content ("growth", "growth_score", ...), by name."""
    return named(*(replace(found, section="growth") for found in _READERS[name](content)))


def _score(content: Content) -> list[Result]:
    sites: Sequence[Content] = content["sites"]
    after = [site["after"] for site in sites]

    def column(key: str) -> list[Any]:
        return [site[key] for site in sites]

    z = curve(
        "z",
        after,
        column("z"),
        kind="bars",
        labels={"depth": SITE, "value": "z of the gradient"},
        title="Would a block help here?",
        about="Gradient of a new block's last projection at every site, relative to its noise.",
        note=f"{content['verdict']} ({content['rows']:,} rows)",
        better="higher",
    )
    gain = curve(
        "gain",
        after,
        column("gain"),
        low=column("low"),
        high=column("high"),
        labels={"depth": SITE, "value": "gain per unit step"},
        title="First-order gain",
        about="Decrease in loss per unit step, with a 95 % interval.",
        better="higher",
    )
    table = rows(
        "sites",
        {
            "after": after,
            "|G|": column("norm"),
            "gain": column("gain"),
            "low": column("low"),
            "high": column("high"),
            "z": column("z"),
            "p": column("p"),
            "|gbar|": column("signal"),
            "train · test": [a and a["cosine"] for a in column("alignment")],
            "verdict": column("verdict"),
            "rows needed": column("needed"),
        },
        title="Sites",
        about="p accounts for all sites; low and high are the 95 % interval of the gain.",
    )
    best = max(sites, key=lambda site: site["z"])
    return [z, gain, table, *_covariance(best)]


def _covariance(site: Content) -> list[Result]:
    matrix = site["covariance"].get("matrix")
    if not matrix:
        return []
    place = np.arange(len(matrix))
    return [
        Result(
            name="covariance",
            kind="matrix",
            axis="coordinate",
            series=("value",),
            arrays={"coordinate": place, "value": np.array(matrix, dtype=float)},
            labels={"coordinate": "coordinate (random subset)", "value": "share of mean variance"},
            title=f"Covariance of the gradients after depth {site['after']}",
        )
    ]


def _growth(content: Content) -> list[Result]:
    scores = content.get("scores") or []
    by_site = [_scores(scores)] if scores else []
    rounds: Sequence[Content] = content["rounds"]
    note = f"stopped: {content['stopped']}"
    if not rounds:
        return by_site or [scalars("rounds", {"rounds": 0.0}, note=note)]
    number = [entry["number"] for entry in rounds]
    held = [entry["held_out"] for entry in rounds]
    table = rows(
        "rounds",
        {
            "round": number,
            "after": [f"{entry['after']} of {entry['depth']}" for entry in rounds],
            "z": [entry["z"] for entry in rounds],
            "choice by training loss": [entry["paper"] for entry in rounds],
            "choice by held-out loss": [entry["safe"] for entry in rounds],
            "kept": [entry.get("kept", entry["safe"]) for entry in rounds],
            "held-out gain": [one["gain"] for one in held],
            "low": [one["bootstrap"][0] for one in held],
            "high": [one["bootstrap"][1] for one in held],
            "D": [entry["margin"] for entry in rounds],
            "gamma": [entry["gamma"] for entry in rounds],
            "D_T": [entry["margin_valid"] for entry in rounds],
        },
        title="Growth by round",
        about="Every attempt to add a block. The held-out rows serve no other purpose; low and "
        "high are the interval of the gain, which widens with every round that uses them.",
        note=note,
    )
    losses: list[Result] = []
    for part, label in (("valid", "held-out loss"), ("train", "training loss")):
        lines = {choice: [entry[part][choice] for entry in rounds] for choice in CHOICES}
        labels = {choice: f"{choice}: {label}" for choice in CHOICES}
        title = f"{label.capitalize()} by round"
        losses.append(
            curve(f"{part}_loss", number, lines, axis="round", labels=labels, title=title)
        )
    return [table, *losses, _search(rounds), *by_site]


def _own_x(
    name: str, axis: str, lines: Mapping[str, tuple[Any, Any]], label: str, **words: Any
) -> Result:
    """Lines, each with x values of its own."""
    arrays: dict[str, np.ndarray] = {}
    for key, (x, y) in lines.items():
        arrays |= {f"{key}_{axis}": np.array(x), key: np.array(y, dtype=float)}
    labels = {key: f"{key}: {label}" for key in lines}
    return Result(
        name=name,
        kind="curve",
        axis=axis,
        series=tuple(lines),
        arrays=arrays,
        labels={**labels, **words.pop("labels", {})},
        **words,
    )


def _search(rounds: Sequence[Content]) -> Result:
    lines: dict[str, tuple[Any, Any]] = {}
    for entry in rounds:
        tried = np.array(sorted(entry["tried"]), dtype=float)
        tried = tried[np.isfinite(tried).all(1)]
        lines[f"round {entry['number']}"] = (tried[:, 0], tried[:, 1])
    title = "Line search of the jumpboard"
    return _own_x("search", "step", lines, "training loss", title=title)


def _scores(scores: Sequence[Content]) -> Result:
    lines = {
        f"round {i}": ([s["after"] for s in found["sites"]], [s["z"] for s in found["sites"]])
        for i, found in enumerate(scores, start=1)
    }
    title = "Where a block would help, by round"
    return _own_x(
        "scores", "depth", lines, "z of the gradient", title=title, labels={"depth": SITE}
    )


def _certificate(content: Content) -> list[Result]:
    held = content["held_out"]
    lines: list[tuple[str, str, str]] = []
    for name in ("bootstrap", "bernstein"):
        low, high = held[name]
        verdict = "better" if low > 0 else "worse" if high < 0 else "inconclusive"
        value = f"{held['gain']:+.4g} ({low:+.4g} to {high:+.4g})"
        lines.append((f"held-out gain ({name}, {held['confidence']:.0%})", value, verdict))
    for theorem in content["theorems"]:
        change = f"at most {theorem['change']:+.4g} (p {max(theorem['probability'], 0):.2g})"
        verdict = "vacuous" if theorem["vacuous"] else "better"
        lines.append((f"{theorem['name']}: change in risk", change, verdict))
    margins = {
        "D, training rows": "margin",
        "D, lower bound (held-out rows)": "margin_low",
        "gamma": "gamma_opt",
        "D_T": "margin_test",
        "Gamma_n of the new block alone": "gamma_block",
        "training rows needed by Theorem 1": "rows_needed",
    }
    # Older runs, and those without a jumpboard, have fewer.
    known = {name: content.get(key) for name, key in margins.items()}
    lines += [(name, f"{value:+.4g}", "") for name, value in known.items() if value is not None]
    note = (
        f"the theorems are vacuous because Gamma_n is {content['gamma_n']:.3g} against a loss of "
        f"at most {content['bound']:.3g}; act on the held-out gain"
    )
    what, value, verdict = zip(*lines, strict=True)
    return [
        rows(
            "guarantees",
            {"what": what, "value": value, "verdict": verdict},
            title="Guarantees",
            about="The grown model compared with the original, on rows used for nothing else.",
            note=note if content["vacuous"] else None,
        )
    ]


def _comparison(content: Content) -> list[Result]:
    arrays: dict[str, np.ndarray] = {}
    names = list(dict.fromkeys(arm["name"] for arm in content["arms"]))
    for name in names:
        arms = [arm for arm in content["arms"] if arm["name"] == name]
        length = min(len(arm["loss"]) for arm in arms)
        loss = np.array([arm["loss"][:length] for arm in arms], dtype=float)
        flops = np.array([arm["flops"][:length] for arm in arms], dtype=float)
        arrays |= {name: loss.mean(0), f"{name}_flops": flops.mean(0)}
        arrays |= {f"{name}_low": loss.min(0), f"{name}_high": loss.max(0)}
    left_out = "; ".join(f"{arm}: {why}" for arm, why in content.get("left_out", {}).items())
    loss = Result(
        name="held_out_loss",
        kind="curve",
        axis="flops",
        series=tuple(names),
        arrays=arrays,
        labels={"flops": "FLOP, scoring included", **{n: f"{n}: held-out loss" for n in names}},
        title="Was it worth it?",
        about="One more block versus other uses of the same compute; bands span all seeds.",
        better="lower",
        note=left_out or None,
    )
    lines = content["summary"]

    def column(key: str) -> list[Any]:
        return [line[key] for line in lines]

    ratios = [
        ", ".join("never" if r is None else f"{r:.2f}" for r in line["flops_to_equal_loss"])
        for line in lines
    ]
    table = rows(
        "ways",
        {
            "way": column("arm"),
            "seeds": column("seeds"),
            "final loss": column("loss"),
            "low": column("low"),
            "high": column("high"),
            "difference from longer": column("difference"),
            "FLOP to equal loss": ratios,
        },
        title="Ways to spend the same compute",
        about="Low and high are the 95 % interval. The last column is the FLOP needed to match the "
        "best loss of training longer, relative to training longer.",
    )
    return [loss, table]


def _scaling(content: Content) -> list[Result]:
    fit, plan = content["fit"], content["plan"]
    intervals = fit["intervals"] or {}
    lines = [
        (f"law: {name}", f"{value:.4g}", _spread(intervals.get(name)))
        for name, value in fit["values"].items()
    ]
    for name in ("parameters", "tokens", "flops", "depth", "width", "loss"):
        lines.append((f"plan: {name}", f"{float(plan[name]):.4g}", ""))
    who, _, depth, width, *projected = plan["levine"]
    trained = "not trained" if depth is None else f"trained {depth} x {width}"
    lines.append((f"nearest in Levine's table: {who}", trained, f"{projected[0]} x {projected[1]}"))
    who, size, tokens = plan["trained"]
    lines.append((f"nearest trained: {who}", f"{size:.3g} parameters", f"{tokens:.3g} tokens"))
    what, value, more = zip(*lines, strict=True)
    table = rows(
        "plan",
        {"what": what, "value": value, "95 % interval, or projected": more},
        title="Scaling law and plan",
        about="Depth, width and data for a budget, from a law fitted to measured points.",
        note=None
        if fit["converged"]
        else "the fit did not settle; give more points of other sizes",
    )
    points = content.get("points")
    return [table, _fitted(points, fit["values"])] if points else [table]


def _spread(interval: Any) -> str:
    return "" if interval is None else f"{interval[0]:.4g} to {interval[1]:.4g}"


def _fitted(points: Content, v: Mapping[str, float]) -> Result:
    n, d, loss = (np.array(points[k], dtype=float) for k in ("parameters", "tokens", "loss"))
    predicted = v["E"] + v["A"] * n ** -v["alpha"] + v["B"] * d ** -v["beta"]
    return curve(
        "fit",
        predicted,
        {"measured": loss},
        axis="predicted",
        kind="scatter",
        labels={"predicted": "predicted loss", "measured": "measured loss"},
        title="Predicted and measured loss",
    )


_READERS: Mapping[str, Callable[[Content], list[Result]]] = {
    "growth_score": _score,
    "growth": _growth,
    "growth_certificate": _certificate,
    "growth_comparison": _comparison,
    "scaling": _scaling,
}
