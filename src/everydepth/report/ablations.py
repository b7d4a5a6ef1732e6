"""The panels of ablations, memorisation, gradient studies and audits, from their plain JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from everydepth.report.panels import Panel, number, panel, readable
from everydepth.results.figures.chart import Axis, Bars, Chart, Dots, Line

LAYER = Axis(label="layer whose skips are scaled", whole=True)
UNITS = {"loss": "nat", "margin": "logits"}
SHARES = ("accuracy", "agreement", "memorization", "train_accuracy", "sample_accuracy")

Runs = Mapping[str, Any]


def _floats(values: Any) -> np.ndarray:
    return np.array(values, dtype=float)


@panel("ablation", section="blocks")
def ablation(runs: Runs) -> Panel:
    """One chart a metric; a line for every factor on the skip, with the spread over seeds."""
    first = next(iter(runs.values()))
    charts = tuple(_metric(runs, name) for name in first["runs"] if name != "reached")
    trained = first["mode"] == "training"
    how = "One model was trained for each point." if trained else "A trained model was changed."
    return Panel(
        title="Without its skips",
        about=f"What is left when the skip connections of one layer are scaled by c. {how}",
        charts=charts,
        readings={run: _readings(found) for run, found in runs.items()},
        notes=tuple(_fitted(run, f) for run, f in runs.items() if "reached" in f["runs"]),
    )


def _fitted(run: str, found: Mapping[str, Any]) -> str:
    """In how many trainings all labels were fitted, without which memorisation says little."""
    removed = _floats(found["runs"]["reached"])[:, :, np.array(found["c"]) != 1.0]
    plain = _floats(found["untouched"]["reached"])
    return (
        f"{run}: all training labels were fitted in {plain.sum():.0f} of {plain.size} trainings "
        f"with all skips and {removed.sum():.0f} of {removed.size} without"
    )


def _readings(found: Mapping[str, Any]) -> list[str]:
    """For each depth: what is left at the smallest c of that layer."""
    name = next(m for m in ("accuracy", "perplexity", "loss", "margin") if m in found["runs"])
    smallest = int(np.argmin(found["c"]))
    values = _floats(found["runs"][name]).mean(0)[:, smallest]
    by_layer = dict(zip(found["layers"], values, strict=True))
    what = f"{readable(name).lower()} with c = {found['c'][smallest]:g}"
    return [
        f"{what}: {number(float(by_layer[d]))}" if d in by_layer else "not a layer that was scaled"
        for d in range(max(found["layers"]) + 1)
    ]


def _metric(runs: Runs, name: str) -> Chart:
    marks: list[Any] = []
    share = 100.0 if name in SHARES else 1.0
    for place, (run, found) in enumerate(runs.items()):
        if name not in found["runs"]:
            continue
        layers = np.array(found["layers"])
        values = share * _floats(found["runs"][name])
        for order, c in enumerate(found["c"]):
            each = values[:, :, order]
            several = len(each) > 1
            marks.append(
                Line(
                    x=layers,
                    y=each.mean(0),
                    low=each.min(0) if several else None,
                    high=each.max(0) if several else None,
                    name=" · ".join(filter(None, (run if len(runs) > 1 else "", f"c = {c:g}"))),
                    colour=place if len(runs) > 1 else order,
                    dash=order,
                )
            )
    unit = "%" if name in SHARES else UNITS.get(name, "")
    return Chart(
        title=readable(name),
        x=LAYER,
        y=Axis(label=readable(name), unit=unit),
        marks=tuple(marks),
        dial="x",
    )


@panel("memorization", section="prediction")
def memorization(runs: Runs) -> Panel:
    """Wrong labels that are predicted at each depth, and what is right on clean data."""
    marks: list[Any] = []
    for place, (run, found) in enumerate(runs.items()):
        for order, (key, what) in enumerate(
            (("by_depth", "memorised labels"), ("test_by_depth", "right on clean data"))
        ):
            if found.get(key) is not None:
                y = 100 * _floats(found[key])
                several = len(runs) > 1
                marks.append(
                    Line(
                        x=np.arange(len(y)),
                        y=y,
                        name=f"{run} · {what}" if several else what,
                        colour=place if several else order,
                        dash=order,
                    )
                )
    chart = Chart(
        title="",
        x=Axis(label="depth (block)", whole=True),
        y=Axis(label="share", unit="%"),
        marks=tuple(marks),
        dial="x",
    )
    notes = tuple(
        f"{run}: 100 % training accuracy was not reached ({100 * found['train_accuracy']:.1f} %)"
        for run, found in runs.items()
        if not found["reached"]
    )
    return Panel(
        title="Labels learnt by heart",
        about="Of the samples whose label was flipped: those predicted as their wrong label.",
        charts=(chart,),
        notes=notes,
    )


@panel("gradient_study", section="gradients")
def gradient_study(runs: Runs) -> Panel:
    """Learning against memorisation: norms, the bound against what was measured, and spreads."""
    charts: list[Chart] = []
    for run, found in runs.items():
        layers = np.array(found["layers"])
        title = run if len(runs) > 1 else ""
        layer = Axis(label="layer", whole=True)
        sides = ("learning", "memorization")
        norms = tuple(
            Line(x=layers, y=_floats(found[side]["norm"]), name=side, colour=i, dash=i)
            for i, side in enumerate(sides)
        )
        charts.append(_log(title, layer, "‖gradient of the loss‖", norms))
        bounds = found["learning"]["log10_bound"]
        for tap, values in found["learning"]["norms"].items() if bounds else ():
            marks = [Line(x=layers, y=_floats(values), name="measured")]
            for i, form in enumerate(bounds, start=1):
                y = 10 ** _floats(bounds[form][tap])
                marks.append(Line(x=layers, y=y, name=form.replace("_", " "), colour=i, dash=i))
            charts.append(_log(title, layer, f"‖gradient‖ at {tap} and its bound", tuple(marks)))
        spread = tuple(
            Line(x=layers, y=_floats(v), name=f"{side}, {tap}", colour=i, dash=j)
            for j, side in enumerate(sides)
            for i, (tap, v) in enumerate(found[side]["std"].items())
        )
        charts.append(Chart(title=title, x=layer, y=Axis(label="std of the stream"), marks=spread))
        weights = tuple(
            Line(x=layers, y=_floats(v), name=name, colour=i, dash=i)
            for i, (name, v) in enumerate(found["weights"].items())
        )
        charts.append(Chart(title=title, x=layer, y=Axis(label="std of weights"), marks=weights))
    return Panel(
        title="Learning against memorisation",
        about="Gradient norms at the skips: clean test samples against flipped training samples.",
        charts=tuple(charts),
        notes=tuple(f"{run}: {f['note']}" for run, f in runs.items() if f.get("note")),
    )


def _log(title: str, x: Axis, label: str, marks: tuple[Line, ...]) -> Chart:
    log = _spans_decades(*(mark.y for mark in marks))
    return Chart(title=title, x=x, y=Axis(label=label, log=log), marks=marks)


def _spans_decades(*values: Any) -> bool:
    """Whether a logarithmic axis reads better: all positive, and two decades or more."""
    found = np.concatenate([_floats(v) for v in values])
    found = found[np.isfinite(found)]
    return bool(len(found) and found.min() > 0 and found.max() >= 100 * found.min())


@panel("unified_view", section="blocks")
def unified_view(runs: Runs) -> Panel:
    """Each layer's gradient norm against what is left without its skips."""
    charts = tuple(
        Chart(
            title="",
            x=Axis(
                label="gradient norm of learning",
                log=_spans_decades(*(found["gradient_norm"] for found in runs.values())),
            ),
            y=Axis(label=f"{what} without the skips", unit="%" if what == "accuracy" else "logits"),
            marks=tuple(
                Dots(
                    x=_floats(found["gradient_norm"]),
                    y=_floats(found[what]) * (100 if what == "accuracy" else 1),
                    name=run,
                    text=tuple(f"layer {n}" for n in found["layers"]),
                    colour=place,
                )
                for place, (run, found) in enumerate(runs.items())
            ),
        )
        for what in ("margin", "accuracy")
    )
    notes = tuple(
        f"{run}: Spearman "
        + ", ".join(f"{k} {number(v, 2)}" for k, v in f["spearman"].items() if v)
        for run, f in runs.items()
    )
    return Panel(
        title="Gradient, margin and accuracy of each layer",
        about="The paper's unified view: layers with large gradients should be missed most.",
        charts=charts,
        notes=notes,
    )


@panel("GradientWatch", section="training")
def gradient_watch(runs: Runs) -> Panel:
    """What a callback of a training saw: gradient norms, margin and memorisation by epoch."""
    charts: list[Chart] = []
    epoch = Axis(label="epoch", whole=True)
    blind = tuple(f"{run}: no epoch was looked at" for run, f in runs.items() if not f["epochs"])
    for run, found in runs.items():
        looks = found["epochs"]
        if not looks:
            continue
        x = np.array([look["epoch"] for look in looks])
        title = run if len(runs) > 1 else ""
        sides = ("learning", "memorization")
        norms = tuple(
            Line(
                x=x,
                y=_floats([look[f"{side}_norm"][layer] for look in looks]),
                name=f"{side}, layer {layer}",
                colour=i,
                dash=j,
            )
            for j, side in enumerate(sides)
            for i, layer in enumerate(looks[0][f"{sides[0]}_norm"])
        )
        charts.append(_log(title, epoch, "‖gradient of the loss‖", norms))
        for what, unit in (("margin", "logits"), ("error", "")):
            marks = tuple(
                Line(
                    x=x,
                    y=_floats([look[f"{side}_{what}"] for look in looks]),
                    name=side,
                    colour=j,
                    dash=j,
                )
                for j, side in enumerate(sides)
            )
            label = "margin" if what == "margin" else "prediction error"
            charts.append(Chart(title=title, x=epoch, y=Axis(label=label, unit=unit), marks=marks))
        shares = tuple(
            Line(x=x, y=100 * _floats([look[name] for look in looks]), name=words, colour=i, dash=i)
            for i, (name, words) in enumerate(
                (("memorization", "memorised labels"), ("train_accuracy", "training accuracy"))
            )
        )
        charts.append(Chart(title=title, x=epoch, y=Axis(label="share", unit="%"), marks=shares))
    return Panel(
        title="Learning and memorisation over the epochs",
        about="Clean test samples against flipped training samples, while the network was trained.",
        charts=tuple(charts),
        notes=blind,
    )


@panel("audit", section="decisions")
def audit(runs: Runs) -> Panel:
    """How suspicious the labels are, and the rows to look at first."""
    bars = tuple(
        Bars(
            x=(_floats(f["histogram"]["edges"])[1:] + _floats(f["histogram"]["edges"])[:-1]) / 2,
            y=_floats(f["histogram"]["counts"]),
            name=run,
            colour=place,
        )
        for place, (run, f) in enumerate(runs.items())
    )
    first = next(iter(runs.values()))
    label = "probability that the label is wrong" if first["calibrated"] else "score (an order)"
    rows: list[tuple[str, ...]] = []
    for run, found in runs.items():
        for line in found["top"][:15]:
            cells = [number(v) if isinstance(v, float) else str(v) for v in line.values()]
            rows.append((*([run] if len(runs) > 1 else []), *cells))
    head = (*(["run"] if len(runs) > 1 else []), *(readable(k) for k in first["top"][0]))
    return Panel(
        title="Labels to look at",
        about="Samples ranked by how likely their label is wrong, judged by every depth.",
        charts=(Chart(title="", x=Axis(label=label), y=Axis(label="samples"), marks=bars),),
        table=(head, *rows),
        readings={
            run: [f"{n} labels are predicted from here on" for n in found["prediction_depth"][:-1]]
            for run, found in runs.items()
        },
        notes=tuple(f"{run}: {found['note']}" for run, found in runs.items()),
    )
