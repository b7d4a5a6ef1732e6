"""The panels of what `trace` measures, of the training history, and of the parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from everydepth.report.panels import (
    Drawing,
    Panel,
    Texts,
    at_depth,
    by_kind,
    notes_of,
    number,
    panel,
    readable,
)
from everydepth.results.figures.chart import Axis, Bars, Chart, Line
from everydepth.results.figures.kinds import numbers
from everydepth.results.result import Result

Runs = Mapping[str, Result]
POINTS_KEPT = 400  # of a training curve; a screen shows no more

# name: section, title, how to read it; in the order of the page. What is not here is drawn by its
# kind, under "More".
PLAIN: Mapping[str, tuple[str, str, str]] = {
    "loss": (
        "prediction",
        "Loss",
        "Cross-entropy of the prediction read out at each depth; lower is better.",
    ),
    "mae": ("prediction", "Absolute error", "Mean absolute error of each depth."),
    "sup_error": ("prediction", "Worst error", "The largest error over all samples."),
    "ap50": ("prediction", "AP50", "Average precision of the boxes of each decoder layer."),
    "prediction_error": (
        "prediction",
        "Distance to the truth",
        "Length of the difference between predicted probabilities and the right answer.",
    ),
    "calibration": (
        "prediction",
        "Calibration error",
        "How far confidence is from accuracy on average; 0 means that confidence can be trusted.",
    ),
    "linear_probe": (
        "prediction",
        "Linear probe",
        "Accuracy of a new linear readout trained on the features of each depth.",
    ),
    "margin": (
        "decisions",
        "Margin",
        "How far the best answer is ahead of the second; boxes show the middle half of samples.",
    ),
    "prediction_depth": (
        "decisions",
        "Final and right",
        "From which depth each prediction is final, against from which depth it is right; "
        "one more than the last depth means never.",
    ),
    "effective_depth": (
        "decisions",
        "Depth needed",
        "The fewest blocks that give up no more than so much accuracy.",
    ),
    "contributions": (
        "blocks",
        "What each block adds",
        "How much a block moves the output, and how far towards the right answer.",
    ),
    "branch_contributions": (
        "blocks",
        "The same by branch",
        "What attention and feed-forward branches add to the output, each by itself.",
    ),
    "norm_ratio": (
        "blocks",
        "Stream against block",
        "Length of the stream over the length of what the block adds; high means a small step.",
    ),
    "cos": (
        "similarity",
        "Cosine similarity",
        "Mean cosine of the features of every two depths, and of each with the last.",
    ),
    "cka": ("similarity", "Linear CKA", "Similarity of the features that ignores rotation."),
    "token_cka": ("similarity", "Linear CKA of tokens", "The same over every token."),
    "cos_between": ("similarity", "Cosine with the other model", "Depths of one model by another."),
    "cka_between": ("similarity", "CKA with the other model", "Depths of one model by another."),
    "adjacent_cos": (
        "similarity",
        "Neighbours",
        "Cosine of the features of each depth with the one before.",
    ),
    "neural_collapse": (
        "structure",
        "Neural collapse",
        "How near the features are to one point a class, equally far apart; 0 is collapsed.",
    ),
    "distinguishability": (
        "structure",
        "Distinguishability",
        "Whether inputs with different labels stay apart.",
    ),
    "gradient_norm": (
        "gradients",
        "Gradient norm",
        "Length of the gradient of the loss of one sample at each depth; boxes show the samples.",
    ),
    "gradient_mean": (
        "gradients",
        "Mean gradient",
        "Length of the mean gradient: what all samples together would change.",
    ),
    "gradient_alignment": (
        "gradients",
        "Gradient alignment",
        "Whether the mean gradients of two data sets point the same way.",
    ),
    "gradient_covariance": (
        "gradients",
        "Gradient covariance",
        "How much of the covariance lies on its diagonal.",
    ),
    "stream_std": ("gradients", "Spread of the stream", "Standard deviation where branches read."),
    "weight_std": ("gradients", "Spread of the weights", "Standard deviation of each matrix."),
    "token_grid": (
        "tokens",
        "Tokens",
        "Best next token at each depth, above the token that was read; darker is surer.",
    ),
}


def _accuracy(title: str, what: str) -> Drawing:
    def drawing(runs: Runs) -> Panel:
        percent = {run: _percent(result) for run, result in runs.items()}
        about = f"{what}, if the network stopped at this depth and used the shared readout."
        found = by_kind(percent, title, about)
        texts = {run: _points(r, what.lower()) for run, r in percent.items() if not r.is_gap}
        return replace(found, readings=_percentages(percent), gives_up=texts)

    return drawing


def _percent(result: Result) -> Result:
    if result.is_gap:
        return result
    result = replace(result, unit="%")
    arrays = {k: v if k == "depth" else 100 * numbers(v) for k, v in result.arrays.items()}
    label = result.label(result.series[0])
    return replace(
        result, arrays=arrays, labels={**result.labels, result.series[0]: f"{label} (%)"}
    )


def _percentages(runs: Runs) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for run, result in runs.items():
        if not result.is_gap:
            values = at_depth(result, result.series[0])
            found[run] = [_or_dash(values.get(d), "{:.1f} %") for d in range(max(values) + 1)]
    return found


def _or_dash(value: float | None, form: str) -> str:
    return "not defined here" if value is None else form.format(value)


def _points(result: Result, what: str) -> list[str]:
    values = at_depth(result, result.series[0])
    last = max(values)
    return [_point(values.get(d), values[last], what, d == last) for d in range(last + 1)]


def _point(value: float | None, full: float, what: str, is_full: bool) -> str:
    if value is None:
        return f"{what} is not defined here"
    gap = full - value
    if is_full:
        return f"{value:.1f} % {what}, all there is"
    if abs(gap) < 0.05:
        return f"{value:.1f} % {what}, as good as full depth"
    side = "gives up {:.1f} points" if gap > 0 else "{:.1f} points better than full depth"
    return f"{value:.1f} % {what}, {side.format(abs(gap))}"


def _multiple(title: str, what: str, about: str) -> Drawing:
    """For errors, where less is better: how many times that of full depth."""

    def drawing(runs: Runs) -> Panel:
        texts = {run: _times(r, what) for run, r in runs.items() if not r.is_gap}
        return replace(by_kind(runs, title, about), gives_up=texts)

    return drawing


def _times(result: Result, what: str) -> list[str]:
    values = at_depth(result, result.series[0])
    last = max(values)
    full = values[last]
    found: list[str] = []
    for depth in range(last + 1):
        value = values.get(depth)
        if value is None:
            found.append(f"{what} is not defined here")
        elif depth == last or full <= 0:
            found.append(f"{what} {number(value, 3)}")
        else:
            times = number(value / full, 3)
            found.append(f"{what} {number(value, 3)}, {times} times that of full depth")
    return found


def _plain(title: str, about: str) -> Callable[[Runs], Panel]:
    return lambda runs: by_kind(runs, title, about)


# The order here is the order within a section: how good a depth is comes first.
panel("accuracy", section="prediction")(_accuracy("Accuracy", "Accuracy"))
panel("next_token_accuracy", section="prediction")(
    _accuracy("Next-token accuracy", "Next-token accuracy")
)
panel("perplexity", section="prediction")(
    _multiple(
        "Perplexity",
        "perplexity",
        "Among how many equally likely tokens the prediction of each depth hesitates.",
    )
)
panel("mse", section="prediction")(
    _multiple("Error", "mean squared error", "Mean squared error of each depth; lower is better.")
)
panel("top5", section="prediction")(
    lambda runs: replace(_accuracy("Top-5 accuracy", "Top-5 accuracy")(runs), gives_up={})
)


@panel("saturation", section="decisions")
def saturation(runs: Runs) -> Panel:
    """Counts as shares, at a depth and up to it."""
    found = by_kind(
        runs,
        "Where predictions become final",
        "Share of predictions that no later block changes, at each depth and up to it.",
    )
    words: dict[str, list[str]] = {}
    for run, result in runs.items():
        if not result.is_gap:
            counts = at_depth(result, result.series[0])
            total, so_far = max(sum(counts.values()), 1), 0.0
            words[run] = []
            for depth in range(max(counts) + 1):
                here = 100 * counts.get(depth, 0.0) / total
                so_far += here
                words[run].append(f"{here:.1f} % become final here, {so_far:.1f} % by now")
    return replace(found, readings=words)


for _name, (_section, _title, _about) in PLAIN.items():
    panel(_name, section=_section)(_plain(_title, _about))


@panel("monotonicity", section="prediction")
def monotonicity(runs: Runs) -> Panel:
    """Numbers without a common unit read best as a table."""
    return _numbers(runs, "Does more depth always help?", "Where the loss rises with depth.")


@panel("text_at_depth", section="tokens")
def text(runs: Runs) -> Panel:
    """The continuation itself follows the dial."""
    found = by_kind(runs, "Text", "The first prompt continued by the prediction of each depth.")
    written: dict[str, list[str]] = {}
    for run, result in runs.items():
        if "text" in result.arrays:
            depths = np.asarray(result.arrays["depth"]).tolist()
            first = np.asarray(result.arrays["text"]).reshape(len(depths), -1)[:, 0]
            by_depth = dict(zip(depths, map(str, first), strict=True))
            written[run] = [
                by_depth.get(d, "not written here") for d in range(int(max(depths)) + 1)
            ]
    return replace(found, readings=written)


def _numbers(runs: Runs, title: str, about: str) -> Panel:
    present = {run: result for run, result in runs.items() if not result.is_gap}
    first = next(iter(runs.values()))
    rows = [("", *present)]
    for name in first.series:
        values = (float(numbers(r.arrays[name]).flat[0]) for r in present.values())
        rows.append((first.label(name), *map(number, values)))
    return Panel(title=title, about=about, table=tuple(rows), notes=notes_of(runs))


@panel("parameters_by_depth", section="cost")
def parameters(runs: Mapping[str, Sequence[int]]) -> Panel:
    """Parameters of the model cut to each depth."""
    lines = tuple(
        Line(x=np.arange(len(n)), y=np.asarray(n, float) / 1e6, name=run, colour=place)
        for place, (run, n) in enumerate(runs.items())
    )
    chart = Chart(
        title="",
        x=Axis(label="depth", unit="blocks", whole=True),
        y=Axis(label="parameters", unit="millions"),
        marks=lines,
        dial="x",
    )
    share: Texts = {
        run: [f"keeps {100 * p / n[-1]:.0f} % of the parameters" for p in n]
        for run, n in runs.items()
    }
    return Panel(
        title="Parameters",
        about="What is left to store when the model is cut to this depth.",
        charts=(chart,),
        readings={run: [f"{p:,} parameters" for p in n] for run, n in runs.items()},
        gives_up=share,
    )


@panel("profile", section="cost")
def profile(runs: Mapping[str, Mapping[str, Any]]) -> Panel:
    """Time of the model cut to each depth, as `Profile.save` wrote it."""
    lines: list[Line] = []
    readings: dict[str, list[str]] = {}
    shares: dict[str, list[str]] = {}
    for place, (run, found) in enumerate(runs.items()):
        rows: Sequence[Mapping[str, Any]] = found["depths"]
        depth = np.array([row["depth"] for row in rows])
        time = {k: np.array([row["batch_latency"][k] for row in rows], float) for k in _LATENCY}
        middle, low, high = (time[key] for key in _LATENCY)
        lines.append(Line(x=depth, y=middle, low=low, high=high, name=run, colour=place))
        missing = [""] * int(depth[0])
        readings[run] = [*missing, *(f"{ms:.3g} ms" for ms in middle)]
        part = 100 * middle / middle[-1]
        shares[run] = [*missing, *(f"takes {share:.0f} % of the time" for share in part)]
    sizes = sorted({int(found["batch_size"]) for found in runs.values()})
    chart = Chart(
        title="",
        x=Axis(label="depth", unit="blocks", whole=True),
        y=Axis(label=f"time of a batch of {' or '.join(map(str, sizes))}", unit="ms"),
        marks=tuple(lines),
        dial="x",
    )
    return Panel(
        title="Time",
        about="Median time of a batch through the plain model cut to this depth, with quartiles.",
        charts=(chart,),
        readings=readings,
        gives_up=shares,
    )


_LATENCY = ("median", "low", "high")


@panel("exits", section="decisions")
def exits(runs: Mapping[str, Mapping[str, Any]]) -> Panel:
    """Who leaves where under a policy, as the evaluation of one wrote it."""
    marks: list[Bars | Line] = []
    readings: dict[str, list[str]] = {}
    for place, (run, found) in enumerate(runs.items()):
        count = np.asarray(found["exits"], float)
        share = 100 * count / max(float(count.sum()), 1.0)
        depth = np.arange(1, len(count) + 1)
        marks.append(Bars(x=depth, y=share, name=run, colour=place))
        so_far = np.cumsum(share)
        marks.append(Line(x=depth, y=so_far, name=f"{run} · up to here", colour=place, dash=1))
        both = zip(share, so_far, strict=True)
        readings[run] = ["", *(f"{a:.1f} % leave here, {b:.1f} % by now" for a, b in both)]
    chart = Chart(
        title="",
        x=Axis(label="depth", unit="blocks", whole=True),
        y=Axis(label="share", unit="%"),
        marks=tuple(marks),
        dial="x",
    )
    speed = tuple(
        f"{run}: {found['measured_speedup']:.2f} times as fast as the full model, "
        f"{found['layer_speedup']:.2f} times by counted layers"
        for run, found in runs.items()
        if "measured_speedup" in found and "layer_speedup" in found
    )
    return Panel(
        title="Where samples leave",
        about="Share of samples that the exit policy lets go at each depth, and up to it.",
        charts=(chart,),
        readings=readings,
        notes=speed,
    )


def training(histories: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[Panel]:
    """One panel for every number that the runs logged while they trained."""
    curves: dict[str, dict[tuple[str, str], tuple[list[float], list[float]]]] = {}
    for run, lines in histories.items():
        for place, line in enumerate(lines):
            step = line.get("step", place)
            for name, series, value in _numbers_in(line):
                steps, values = curves.setdefault(name, {}).setdefault((run, series), ([], []))
                steps.append(_float(step) if isinstance(step, int | float) else place)
                values.append(value)
    runs = list(histories)
    return [
        Panel(title=readable(name), charts=(_curve(name, found, runs),), section="training")
        for name, found in ((_LOGGED.get(name, name), found) for name, found in curves.items())
        if max(len(steps) for steps, _ in found.values()) > 1
    ]


def _numbers_in(line: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str, float]]:
    """The numbers of one line: a name, which depth it is for (if for one), the value."""
    for key, value in line.items():
        name = f"{prefix}{key}"
        if key in _NO_CURVE or isinstance(value, bool):
            continue
        if isinstance(value, int | float):
            yield name, "", _float(value)
        elif isinstance(value, list):
            yield from _a_few(name, dict(enumerate(value, start=1)))  # as `fit` validates: 1..L
        elif isinstance(value, Mapping) and value and all(str(k).isdecimal() for k in value):
            yield from _a_few(name, {int(k): v for k, v in value.items()})
        elif isinstance(value, Mapping):
            yield from _numbers_in(value, f"{name}.")


_NO_CURVE = ("step", "epoch", "time", "seconds")
_LOGGED = {"lr": "learning rate", "losses": "loss by depth"}


def _a_few(name: str, by_depth: Mapping[Any, Any]) -> Iterator[tuple[str, str, float]]:
    """The first, the middle and the last of values by depth: more lines could not be told apart."""
    depths = sorted(d for d, v in by_depth.items() if isinstance(d, int) and _is_number(v))
    for depth in sorted({depths[i] for i in (0, len(depths) // 2, -1)} if depths else ()):
        yield name, f"depth {depth}", _float(by_depth[depth])


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _float(value: int | float) -> float:
    """JSON allows whole numbers that no float can hold."""
    try:
        return float(value)
    except OverflowError:
        return float("nan")


def _curve(
    name: str,
    found: Mapping[tuple[str, str], tuple[list[float], list[float]]],
    runs: Sequence[str],
) -> Chart:
    series = list(dict.fromkeys(which for _, which in found))
    marks: list[Line] = []
    for (run, which), (steps, values) in found.items():
        every = -(-len(steps) // POINTS_KEPT)
        line = Line(
            x=np.asarray(steps)[::every],
            y=np.asarray(values)[::every],
            name=" · ".join(filter(None, (run, which))),
            colour=runs.index(run),
            dash=series.index(which),
            markers=len(steps) < 30,
        )
        marks.append(line)
    return Chart(title="", x=Axis(label="step"), y=Axis(label=name), marks=tuple(marks))
