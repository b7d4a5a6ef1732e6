"""Ablations, studies and audits as they were written before all results were saved alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from everydepth.results import Result, Results, curve, defined, gap, named, rows, scalars
from everydepth.results.result import readable
from everydepth.results.results import class_of

SHARES = ("accuracy", "agreement", "memorization", "train_accuracy", "sample_accuracy")
UNITS = {"loss": "nat", "margin": "logits"}
LOWER = ("loss", "perplexity", "memorization")
SIDES = ("learning", "memorization")
Content = Mapping[str, Any]


def convert(name: str, content: Content, folder: Path) -> Results:
    """What results.json held under a name."""
    found = _READERS[name](content)
    about = {
        key: content[key] for key in ("model", "task", "samples", "mode", "which") if key in content
    }
    return class_of(name)(results=named(*found), about=about, kind=name)


def _floats(values: Any) -> np.ndarray:
    return np.array(values, dtype=float)


def _ablation(content: Content) -> list[Result]:
    trained = content["mode"] == "training"
    how = "One model was trained for each point." if trained else "A trained model was changed."
    about = f"What is left when the skip connections of one layer are scaled by c. {how}"
    found: list[Result] = []
    for name, runs in content["runs"].items():
        if name == "reached":
            continue
        each = _floats(runs)  # (seed, layer, c)
        arrays = {
            "layer": np.array(content["layers"]),
            "columns": np.array(content["c"], dtype=float),
            "value": defined(each.mean(0)),
        }
        if len(each) > 1:
            arrays |= {"value_low": each.min(0), "value_high": each.max(0)}
        result = Result(
            name=name,
            kind="family",
            axis="layer",
            series=("value",),
            arrays=arrays,
            labels={
                "layer": "layer whose skips are scaled",
                "columns": "c =",
                "value": readable(name).lower(),
            },
            title=f"{readable(name)} without skips",
            about=about,
            unit="share" if name in SHARES else UNITS.get(name, ""),
            better="lower" if name in LOWER else "higher",
            section="blocks",
            note=_fitted(content),
        )
        found.append(result)
    untouched = {key: float(np.mean(v)) for key, v in content["untouched"].items()}
    found.append(scalars("untouched", untouched, title="With all its skips", section="blocks"))
    return found


def _fitted(content: Content) -> str | None:
    """In how many runs all labels were fitted, without which memorization says little."""
    if "reached" not in content["runs"]:
        return None
    removed = _floats(content["runs"]["reached"])[:, :, np.array(content["c"]) != 1.0]
    plain = _floats(content["untouched"]["reached"])
    return (
        f"all training labels were fitted in {plain.sum():.0f} of {plain.size} runs with all skips "
        f"and {removed.sum():.0f} of {removed.size} without"
    )


def _memorization(content: Content) -> list[Result]:
    series = {"memorized": content["by_depth"], "clean": content.get("test_by_depth")}
    reached = f"100 % training accuracy was not reached ({100 * content['train_accuracy']:.1f} %)"
    labels = {"memorized": "memorized labels", "clean": "right on clean data"}
    lines = curve(
        "memorization",
        np.arange(len(content["by_depth"])),
        {key: values for key, values in series.items() if values is not None},
        labels=labels,
        title="Labels learned by heart",
        about="Of the samples whose label was flipped: those predicted as their wrong label.",
        unit="share",
        section="prediction",
        note=None if content["reached"] else reached,
    )
    keys = ("memorization", "recovered", "train_accuracy", "test_accuracy", "flipped")
    return [lines, scalars("shares", {key: content.get(key) for key in keys}, section="prediction")]


def _gradient_study(content: Content) -> list[Result]:
    layers = content["layers"]
    words: dict[str, Any] = {"axis": "layer", "section": "gradients"}
    by_side = {side: content[side] for side in SIDES}
    found = [
        curve(
            "gradient_norms",
            layers,
            {side: _floats(found["norm"]) for side, found in by_side.items()},
            labels={side: f"{side}: ‖gradient of the loss‖" for side in SIDES},
            title="Learning against memorization",
            about="Gradient norms at the skips: clean test samples, flipped training samples.",
            note=content.get("note"),
            **words,
        )
    ]
    bounds = content["learning"]["log10_bound"]
    for tap, values in content["learning"]["norms"].items() if bounds else ():
        lines = {"measured": _floats(values)}
        lines |= {form: 10 ** _floats(bound[tap]) for form, bound in bounds.items()}
        labels = {key: f"{key.replace('_', ' ')}: ‖gradient‖ at {tap}" for key in lines}
        title = f"Gradient at {tap} and its bound"
        found.append(curve(f"bound_{tap}", layers, lines, labels=labels, title=title, **words))
    spread = {
        f"{side}, {tap}": _floats(v)
        for side, one in by_side.items()
        for tap, v in one["std"].items()
    }
    labels = {key: f"{key}: std of the stream" for key in spread}
    found.append(curve("stream_std", layers, spread, labels=labels, **words))
    weights = {name: _floats(values) for name, values in content["weights"].items()}
    labels = {key: f"{key}: std of weights" for key in weights}
    return [*found, curve("weight_std", layers, weights, labels=labels, **words)]


def _unified_view(content: Content) -> list[Result]:
    spearman = ", ".join(f"{k} {v:.2g}" for k, v in content["spearman"].items() if v is not None)
    text = np.array([f"layer {n}" for n in content["layers"]])
    found: list[Result] = []
    for what, unit in (("margin", "logits"), ("accuracy", "share")):
        result = Result(
            name=f"{what}_against_gradient",
            kind="scatter",
            axis="gradient_norm",
            series=(what,),
            arrays={
                "gradient_norm": _floats(content["gradient_norm"]),
                what: defined(_floats(content[what])),
                "text": text,
            },
            labels={
                "gradient_norm": "gradient norm of learning",
                what: f"{what} without the skips",
            },
            title=f"Gradient and {what} of each layer",
            about="Layers with large gradients should be missed most.",
            unit=unit,
            section="blocks",
            note=f"Spearman {spearman}" if spearman else None,
        )
        found.append(result)
    return found


def _gradient_watch(content: Content) -> list[Result]:
    looks = content["epochs"]
    if not looks:
        return [gap("gradient_norms", "curve", "no epoch was looked at")]
    epochs = [look["epoch"] for look in looks]
    words: dict[str, Any] = {"axis": "epoch", "section": "training"}
    norms = {
        f"{side}, layer {layer}": _floats([look[f"{side}_norm"][layer] for look in looks])
        for side in SIDES
        for layer in looks[0][f"{SIDES[0]}_norm"]
    }
    labels = {key: f"{key}: ‖gradient of the loss‖" for key in norms}
    title = "Learning and memorization over the epochs"
    found = [curve("gradient_norms", epochs, norms, labels=labels, title=title, **words)]
    for what, name, unit in (("margin", "margin", "logits"), ("error", "prediction error", "")):
        lines = {side: _floats([look[f"{side}_{what}"] for look in looks]) for side in SIDES}
        labels = {side: f"{side}: {name}" for side in SIDES}
        title = readable(name)
        found.append(curve(what, epochs, lines, labels=labels, title=title, unit=unit, **words))
    shares = {key: [look[key] for look in looks] for key in ("memorization", "train_accuracy")}
    labels = {
        "memorization": "memorized labels: share",
        "train_accuracy": "training accuracy: share",
    }
    return [*found, curve("shares", epochs, shares, labels=labels, unit="share", **words)]


def _audit(content: Content) -> list[Result]:
    edges = _floats(content["histogram"]["edges"])
    label = "probability that the label is wrong" if content["calibrated"] else "score (an order)"
    scores = curve(
        "score",
        (edges[1:] + edges[:-1]) / 2,
        {"samples": content["histogram"]["counts"]},
        axis="score",
        kind="bars",
        labels={"score": label},
        title="How suspicious the labels are",
        section="decisions",
        note=content["note"],
    )
    top = content["top"]
    first = rows(
        "suspects",
        {key: [line[key] for line in top] for key in top[0]},
        title="Labels to look at",
        about="Samples ranked by how likely their label is wrong, judged by every depth.",
        section="decisions",
    )
    counts = content["prediction_depth"][:-1]
    learned = curve(
        "prediction_depth",
        np.arange(len(counts)),
        {"count": counts},
        kind="histogram",
        title="Where labels are predicted",
        about="Share of labels that are predicted from each depth on.",
        section="decisions",
    )
    return [first, scores, learned]


_READERS: Mapping[str, Callable[[Content], list[Result]]] = {
    "ablation": _ablation,
    "memorization": _memorization,
    "gradient_study": _gradient_study,
    "unified_view": _unified_view,
    "GradientWatch": _gradient_watch,
    "audit": _audit,
}
