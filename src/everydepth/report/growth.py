"""The panels of growing: scores, history, certificate, comparison with other uses of compute."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from everydepth.report.panels import Panel, number, panel
from everydepth.results.figures.chart import Axis, Bars, Chart, Heat, Line

SITE = Axis(label="a new block after depth", whole=True)
CHOICES = ("old", "jumpboard", "trained")

Runs = Mapping[str, Any]
Rows = tuple[tuple[str, ...], ...]


def _floats(values: Any) -> np.ndarray:
    return np.array(values, dtype=float)


def table_of(head: Sequence[str], rows: Mapping[str, Sequence[Sequence[str]]]) -> Rows:
    """Rows by run; the run stands in front where there are several."""
    several = len(rows) > 1
    found = [(*(["run"] if several else []), *head)]
    found += [(*([run] if several else []), *row) for run, mine in rows.items() for row in mine]
    return tuple(found)


@panel("growth_score", section="growth")
def growth_score(runs: Runs) -> Panel:
    """For every site: z, the first-order gain with its interval, and the verdict."""
    z: list[Any] = []
    gains: list[Any] = []
    rows: dict[str, list[tuple[str, ...]]] = {}
    for place, (run, found) in enumerate(runs.items()):
        sites = found["sites"]
        after = np.array([site["after"] for site in sites])
        z.append(Bars(x=after, y=_floats([s["z"] for s in sites]), name=run, colour=place))
        gains.append(
            Line(
                x=after,
                y=_floats([s["gain"] for s in sites]),
                low=_floats([s["low"] for s in sites]),
                high=_floats([s["high"] for s in sites]),
                name=run,
                colour=place,
            )
        )
        rows[run] = [_site(site) for site in sites]
    first = next(iter(runs.values()))
    best = max(first["sites"], key=lambda site: site["z"])
    charts = [
        Chart(title="", x=SITE, y=Axis(label="z of the gradient"), marks=tuple(z), dial="x"),
        Chart(
            title="",
            x=SITE,
            y=Axis(label="gain per unit step, 95 % interval"),
            marks=tuple(gains),
            dial="x",
        ),
    ]
    matrix = best["covariance"].get("matrix")
    if matrix:
        charts.append(_heat(matrix, best["after"]))
    head = ("after", "|G|", "gain", "95 % interval", "z", "p", "|gbar|", "train · test", "verdict")
    return Panel(
        title="Would a block help here?",
        about=(
            "The gradient of a new block's last projection at every site, against its noise; "
            "p counts all sites together."
        ),
        charts=tuple(charts),
        table=table_of(head, rows),
        readings={
            run: _by_depth(found["sites"], lambda s: f"a block here: {s['verdict']}")
            for run, found in runs.items()
        },
        notes=tuple(
            f"{run}: {found['verdict']} ({found['rows']:,} rows)" for run, found in runs.items()
        ),
    )


def _heat(matrix: Any, after: int) -> Chart:
    z = _floats(matrix)
    places = np.arange(len(z))
    return Chart(
        title=f"Covariance of the gradients after depth {after}",
        x=Axis(label="coordinate (a random choice)", whole=True),
        y=Axis(label="coordinate", whole=True),
        marks=(Heat(z=z, x=places, y=places, low=-1.0, high=1.0, unit="of the mean variance"),),
    )


def _site(site: Mapping[str, Any]) -> tuple[str, ...]:
    needed = f" (about {site['needed']:,} rows)" if site["verdict"] == "not enough data" else ""
    match = site["alignment"]
    aligned = "-" if match is None else f"{match['cosine']:.2f} (bound {match['bound']:.2g})"
    return (
        str(site["after"]),
        number(site["norm"], 3),
        number(site["gain"], 3),
        f"{number(site['low'], 2)} to {number(site['high'], 2)}",
        f"{site['z']:.1f}",
        f"{site['p']:.3f}",
        number(site["signal"], 2),
        aligned,
        site["verdict"] + needed,
    )


def _by_depth(sites: Sequence[Mapping[str, Any]], say: Any) -> list[str]:
    texts = {site["after"]: say(site) for site in sites}
    return [texts.get(depth, "no block can go here") for depth in range(max(texts) + 1)]


@panel("growth", section="growth")
def growth(runs: Runs) -> Panel:
    """Round by round: losses, what each rule keeps, z of every site and the line searches."""
    charts: list[Chart] = []
    rows: dict[str, list[tuple[str, ...]]] = {}
    for run, found in runs.items():
        title = run if len(runs) > 1 else ""
        rounds = found["rounds"]
        rows[run] = [_round(entry) for entry in rounds]
        if rounds:
            charts += [_losses(rounds, part, title) for part in ("valid", "train")]
            charts.append(_search(rounds, title))
        if found.get("scores"):
            charts.append(_scores(found["scores"], title))
    head = (
        "round", "after", "z", "by training loss keep", "by held-out loss keep", "held-out gain",
        "95 % interval", "D", "gamma", "D_T",
    )  # fmt: skip
    return Panel(
        title="How it grew",
        about=(
            "Every attempt to add a block. The paper's rule keeps the lower training loss; what "
            "was kept is decided by rows used for nothing else."
        ),
        charts=tuple(charts),
        table=table_of(head, rows),
        notes=tuple(f"{run}: stopped, as {found['stopped']}" for run, found in runs.items()),
    )


def _round(entry: Mapping[str, Any]) -> tuple[str, ...]:
    held = entry["held_out"]
    low, high = held["bootstrap"]
    return (
        str(entry["number"]),
        f"{entry['after']} of {entry['depth']}",
        f"{entry['z']:.1f}",
        entry["paper"],
        entry["safe"],
        f"{held['gain']:+.3g}",
        f"{low:+.3g} to {high:+.3g}",
        *(f"{entry[name]:+.3g}" for name in ("margin", "gamma", "margin_valid")),
    )


def _losses(rounds: Sequence[Mapping[str, Any]], part: str, title: str) -> Chart:
    x = np.array([entry["number"] for entry in rounds])
    marks = tuple(
        Line(x=x, y=_floats([e[part][choice] for e in rounds]), name=choice, colour=i, dash=i)
        for i, choice in enumerate(CHOICES)
    )
    label = "held-out loss" if part == "valid" else "training loss"
    return Chart(title=title, x=Axis(label="round", whole=True), y=Axis(label=label), marks=marks)


def _search(rounds: Sequence[Mapping[str, Any]], title: str) -> Chart:
    marks: list[Line] = []
    for i, entry in enumerate(rounds):
        tried = _floats(sorted(entry["tried"]))
        tried = tried[np.isfinite(tried).all(1)]
        marks.append(
            Line(
                x=tried[:, 0],
                y=tried[:, 1],
                name=f"round {entry['number']}",
                colour=i,
                dash=i % 4,
            )
        )
    return Chart(
        title=title,
        x=Axis(label="step of the jumpboard", log=True),
        y=Axis(label="training loss"),
        marks=tuple(marks),
    )


def _scores(scores: Sequence[Mapping[str, Any]], title: str) -> Chart:
    marks = tuple(
        Line(
            x=np.array([site["after"] for site in found["sites"]]),
            y=_floats([site["z"] for site in found["sites"]]),
            name=f"round {i + 1}",
            colour=i,
            dash=i % 4,
        )
        for i, found in enumerate(scores)
    )
    return Chart(title=title, x=SITE, y=Axis(label="z of the gradient"), marks=marks, dial="x")


@panel("growth_certificate", section="growth")
def growth_certificate(runs: Runs) -> Panel:
    """The theorems, most often vacuous, and the interval to act on."""
    rows: dict[str, list[tuple[str, ...]]] = {}
    notes: list[str] = []
    for run, found in runs.items():
        held = found["held_out"]
        mine = [
            (
                f"held-out gain ({name}, {held['confidence']:.0%})",
                f"{held['gain']:+.4g} ({held[name][0]:+.4g} to {held[name][1]:+.4g})",
                "better" if held[name][0] > 0 else "worse" if held[name][1] < 0 else "not told",
            )
            for name in ("bootstrap", "bernstein")
        ]
        for theorem in found["theorems"]:
            change = f"at most {theorem['change']:+.4g} (p {max(theorem['probability'], 0):.2g})"
            word = "vacuous" if theorem["vacuous"] else "better"
            mine.append((f"{theorem['name']}: change of the risk", change, word))
        margins = {"D": "margin", "gamma": "gamma_opt", "D_T": "margin_test"}
        mine += [(name, f"{found[key]:+.4g}", "") for name, key in margins.items()]
        rows[run] = mine
        if found["vacuous"]:
            notes.append(
                f"{run}: the three theorems are vacuous, as Gamma_n is "
                f"{number(found['gamma_n'], 3)} against a loss of at most "
                f"{number(found['bound'], 3)}; act on the held-out gain"
            )
    return Panel(
        title="What is certain",
        about="The grown model against the first one, on rows used for nothing else.",
        table=table_of(("what", "value", "says"), rows),
        notes=tuple(notes),
    )


@panel("growth_comparison", section="growth")
def growth_comparison(runs: Runs) -> Panel:
    """Held-out loss against FLOPs for every use of the same compute."""
    charts: list[Chart] = []
    rows: dict[str, list[tuple[str, ...]]] = {}
    for run, found in runs.items():
        names = list(dict.fromkeys(arm["name"] for arm in found["arms"]))
        marks = tuple(
            _arm([a for a in found["arms"] if a["name"] == name], name, i)
            for i, name in enumerate(names)
        )
        charts.append(
            Chart(
                title=run if len(runs) > 1 else "",
                x=Axis(label="FLOPs, scoring included"),
                y=Axis(label="held-out loss", log=True),
                marks=marks,
            )
        )
        rows[run] = [_summary(row) for row in found["summary"]]
    head = ("way", "seeds", "last loss", "95 % interval", "against longer", "FLOPs to equal loss")
    return Panel(
        title="Was it worth it?",
        about=(
            "One block more against other uses of the same compute; bands are all seeds. The last "
            "column counts FLOPs until the best loss of training longer, 1 is as many."
        ),
        charts=tuple(charts),
        table=table_of(head, rows),
        notes=tuple(
            f"{run}, {arm}: {why}"
            for run, found in runs.items()
            for arm, why in found.get("left_out", {}).items()
        ),
    )


def _arm(arms: Sequence[Mapping[str, Any]], name: str, order: int) -> Line:
    length = min(len(arm["loss"]) for arm in arms)
    losses = _floats([arm["loss"][:length] for arm in arms])
    return Line(
        x=_floats([arm["flops"][:length] for arm in arms]).mean(0),
        y=losses.mean(0),
        low=losses.min(0),
        high=losses.max(0),
        name=name,
        colour=order % 7,
        dash=order % 4,
    )


def _summary(row: Mapping[str, Any]) -> tuple[str, ...]:
    ratios = ["never" if r is None else f"{r:.2f}" for r in row["flops_to_equal_loss"]]
    gap = f"{row['difference']:+.3g}"
    interval = f"{row['difference_low']:+.2g} to {row['difference_high']:+.2g}"
    return (
        row["arm"],
        str(row["seeds"]),
        number(row["loss"]),
        f"{number(row['low'])} to {number(row['high'])}",
        "-" if row["arm"] == "longer" else f"{gap} ({interval})",
        ", ".join(ratios),
    )
