"""What growing found, as results: from the plain values that a run keeps of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from everydepth.results import Result, Results, curve, named, rows, scalars
from everydepth.results.results import class_of

SITE = "a new block after depth"
CHOICES = ("old", "jumpboard", "trained")
Content = Mapping[str, Any]
WORDS: dict[str, Any] = {"section": "growth"}


def convert(name: str, content: Content, folder: Path) -> Results:
    """What results.json holds under a name."""
    about = {**content, "samples": content.get("rows")}
    return class_of(name)(results=measurements(name, content), about=about, kind=name)


def measurements(name: str, content: Content) -> dict[str, Result]:
    """What is shown of a "growth", a "growth_score", ... by name."""
    return named(*_READERS[name](content))


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
        about="The gradient of a new block's last projection at every site, against its noise.",
        note=f"{content['verdict']} ({content['rows']:,} rows)",
        better="higher",
        **WORDS,
    )
    gain = curve(
        "gain",
        after,
        column("gain"),
        low=column("low"),
        high=column("high"),
        labels={"depth": SITE, "value": "gain per unit step"},
        title="First-order gain",
        about="Decrease of the loss per unit step, with its 95 % interval.",
        better="higher",
        **WORDS,
    )
    told = [site["alignment"] for site in sites]
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
            "train · test": [None if one is None else one["cosine"] for one in told],
            "verdict": column("verdict"),
            "rows needed": column("needed"),
        },
        title="Sites",
        about="p counts all sites together; low and high are the 95 % interval of the gain.",
        **WORDS,
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
            labels={"coordinate": "coordinate (a random choice)", "value": "of the mean variance"},
            title=f"Covariance of the gradients after depth {site['after']}",
            **WORDS,
        )
    ]


def _growth(content: Content) -> list[Result]:
    rounds: Sequence[Content] = content["rounds"]
    number = [entry["number"] for entry in rounds]
    found: list[Result] = []
    if rounds:
        held = [entry["held_out"] for entry in rounds]
        table = rows(
            "rounds",
            {
                "round": number,
                "after": [f"{entry['after']} of {entry['depth']}" for entry in rounds],
                "z": [entry["z"] for entry in rounds],
                "by training loss keep": [entry["paper"] for entry in rounds],
                "by held-out loss keep": [entry["safe"] for entry in rounds],
                "kept": [entry.get("kept", entry["safe"]) for entry in rounds],
                "held-out gain": [one["gain"] for one in held],
                "low": [one["bootstrap"][0] for one in held],
                "high": [one["bootstrap"][1] for one in held],
                "D": [entry["margin"] for entry in rounds],
                "gamma": [entry["gamma"] for entry in rounds],
                "D_T": [entry["margin_valid"] for entry in rounds],
            },
            title="How it grew",
            about="Every attempt to add a block. The held-out rows are used for nothing else; low "
            "and high are the interval of the gain, wider with every round that used them.",
            note=f"stopped, as {content['stopped']}",
            **WORDS,
        )
        found.append(table)
        for part, label in (("valid", "held-out loss"), ("train", "training loss")):
            lines = {choice: [entry[part][choice] for entry in rounds] for choice in CHOICES}
            labels = {choice: f"{choice}: {label}" for choice in CHOICES}
            title = f"{label.capitalize()} of each round"
            found.append(
                curve(
                    f"{part}_loss", number, lines, axis="round", labels=labels, title=title, **WORDS
                )
            )
        found.append(_search(rounds))
    scores = content.get("scores") or []
    if scores:
        found.append(_scores(scores))
    if not found:
        found.append(scalars("rounds", {"rounds": 0.0}, note=f"stopped, as {content['stopped']}"))
    return found


def _own_x(
    name: str, axis: str, lines: Mapping[str, tuple[Any, Any]], label: str, **words: Any
) -> Result:
    """Lines each of which has its own positions."""
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
        **WORDS,
        **words,
    )


def _search(rounds: Sequence[Content]) -> Result:
    lines: dict[str, tuple[Any, Any]] = {}
    for entry in rounds:
        tried = np.array(sorted(entry["tried"]), dtype=float)
        tried = tried[np.isfinite(tried).all(1)]
        lines[f"round {entry['number']}"] = (tried[:, 0], tried[:, 1])
    title = "Search for the step of the jumpboard"
    return _own_x("search", "step", lines, "training loss", title=title)


def _scores(scores: Sequence[Content]) -> Result:
    lines = {
        f"round {i}": ([s["after"] for s in found["sites"]], [s["z"] for s in found["sites"]])
        for i, found in enumerate(scores, start=1)
    }
    title = "Where a block would help, round by round"
    return _own_x(
        "scores", "depth", lines, "z of the gradient", title=title, labels={"depth": SITE}
    )


def _certificate(content: Content) -> list[Result]:
    held = content["held_out"]
    lines: list[tuple[str, str, str]] = []
    for name in ("bootstrap", "bernstein"):
        low, high = held[name]
        says = "better" if low > 0 else "worse" if high < 0 else "not told"
        value = f"{held['gain']:+.4g} ({low:+.4g} to {high:+.4g})"
        lines.append((f"held-out gain ({name}, {held['confidence']:.0%})", value, says))
    for theorem in content["theorems"]:
        change = f"at most {theorem['change']:+.4g} (p {max(theorem['probability'], 0):.2g})"
        says = "vacuous" if theorem["vacuous"] else "better"
        lines.append((f"{theorem['name']}: change of the risk", change, says))
    margins = {
        "D, training rows": "margin",
        "D, at least (held-out rows)": "margin_low",
        "gamma": "gamma_opt",
        "D_T": "margin_test",
        "Gamma_n of the new block alone": "gamma_block",
        "training rows that Theorem 1 would need": "rows_needed",
    }
    # Of a run from before some of them were kept, or without a jumpboard, there are fewer.
    known = {name: content.get(key) for name, key in margins.items()}
    lines += [(name, f"{value:+.4g}", "") for name, value in known.items() if value is not None]
    note = (
        f"the theorems are vacuous, as Gamma_n is {content['gamma_n']:.3g} against a loss of "
        f"at most {content['bound']:.3g}; act on the held-out gain"
    )
    what, value, says = zip(*lines, strict=True)
    return [
        rows(
            "guarantees",
            {"what": what, "value": value, "says": says},
            title="What is certain",
            about="The grown model against the first one, on rows used for nothing else.",
            note=note if content["vacuous"] else None,
            **WORDS,
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
        about="One block more against other uses of the same compute; bands are all seeds.",
        better="lower",
        note=left_out or None,
        **WORDS,
    )
    lines = content["summary"]

    def column(key: str) -> list[Any]:
        return [line[key] for line in lines]

    never = [
        ["never" if r is None else f"{r:.2f}" for r in line["flops_to_equal_loss"]]
        for line in lines
    ]
    table = rows(
        "ways",
        {
            "way": column("arm"),
            "seeds": column("seeds"),
            "last loss": column("loss"),
            "low": column("low"),
            "high": column("high"),
            "against longer": column("difference"),
            "FLOP to equal loss": [", ".join(one) for one in never],
        },
        title="Ways to spend the same compute",
        about="Low and high are the 95 % interval. The last column counts FLOP until the best loss "
        "of training longer; 1 is as many.",
        **WORDS,
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
        about="Depth, width and data for a budget, by a law fitted to points.",
        note=None
        if fit["converged"]
        else "the fit did not settle; give more points that differ in size",
        **WORDS,
    )
    return [table, *([_fitted(content["points"], fit["values"])] if content.get("points") else [])]


def _spread(interval: Any) -> str:
    return "" if interval is None else f"{interval[0]:.4g} to {interval[1]:.4g}"


def _fitted(points: Content, v: Mapping[str, float]) -> Result:
    n, d, loss = (np.array(points[k], dtype=float) for k in ("parameters", "tokens", "loss"))
    said = v["E"] + v["A"] * n ** -v["alpha"] + v["B"] * d ** -v["beta"]
    return curve(
        "fit",
        said,
        {"measured": loss},
        axis="said",
        kind="scatter",
        labels={"said": "loss that the law says", "measured": "loss measured"},
        title="What the law says, and what was measured",
        **WORDS,
    )


_READERS: Mapping[str, Callable[[Content], list[Result]]] = {
    "growth_score": _score,
    "growth": _growth,
    "growth_certificate": _certificate,
    "growth_comparison": _comparison,
    "scaling": _scaling,
}
