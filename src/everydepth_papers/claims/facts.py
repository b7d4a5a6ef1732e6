"""Facts: plain numbers about one trained network, measured once with the verbs, cached as JSON.

Every claim is a function of facts. What could not be measured is kept with its reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from everydepth.ablations import ablate
from everydepth.config import plain
from everydepth.errors import EveryDepthError
from everydepth.exits import Confidence, evaluate
from everydepth.growth import jumpboard, score
from everydepth.stream import Targets, as_stream, evaluating, insert
from everydepth.tracing import trace
from everydepth_papers.bound import Form, bounded, is_ordered
from everydepth_papers.evidence.gradients import raw_gradients

TAU = 0.9
"""Confidence above which a sample leaves."""

Batches = Sequence[Mapping[str, Any]]


class Missing(Exception):
    """A claim needs a fact that was not measured; the message says why it was not."""


class Facts:
    """`facts["accuracy"]` is a number or a numpy array, or raises `Missing` with the reason."""

    def __init__(self, content: Mapping[str, Any]) -> None:
        self.content = content

    def __getitem__(self, name: str) -> Any:
        values = self.content["values"]
        if name not in values:
            missing = self.content.get("missing", {})
            raise Missing(missing.get(name) or missing.get("*") or f"{name} was not measured")
        value = values[name]
        return np.array(value, dtype=float) if isinstance(value, list) else value

    def __contains__(self, name: str) -> bool:
        return name in self.content["values"]


def gather(
    model: nn.Module, data: Batches, groups: Iterable[str], *, train: Any = None
) -> dict[str, Any]:
    """The facts of these groups, of one model on labeled (or unlabeled) batches.

    train: other rows, for directions that are then judged on `data`; half of `data`, if not given.
    """
    values: dict[str, Any] = {}
    missing: dict[str, str] = {}
    for group in groups:
        try:
            values |= GROUPS[group](model, data, train)
        except EveryDepthError as reason:
            for name in PROVIDES[group]:
                missing[name] = str(reason)
    if "trace" in groups:
        reasons = values.pop("skipped", {})
        for name, fact in _TRACED.items():
            # Of two metrics for one fact, the one that fits the task says what is really missing.
            if name in reasons and (fact not in missing or missing[fact].startswith("for ")):
                missing[fact] = reasons[name]
    return {
        "values": {k: plain(v) for k, v in values.items()},
        "missing": {k: why for k, why in missing.items() if k not in values},
    }


# metric of a trace -> name of the fact
_TRACED = {
    "loss": "loss",
    "mse": "loss",
    "accuracy": "accuracy",
    "next_token_accuracy": "accuracy",
    "sup_error": "sup_error",
    "cos": "cos",
    "cka": "cka",
    "saturation": "saturation",
    "norm_ratio": "norm_ratio",
    "neural_collapse": "separation",
    "distinguishability": "different",
    "gradient_norm": "gradient_norm",
    "gradient_mean": "signal",
}
_SERIES = {"neural_collapse": "separation", "distinguishability": "different_5"}
_GROUPS = ("prediction", "decisions", "similarity", "structure", "gradients")


def _trace(model: nn.Module, data: Batches, train: Any) -> dict[str, Any]:
    # Groups, so that what does not fit the task is skipped with a reason instead of refused.
    found = trace(model, data, metrics=_GROUPS, progress=False)
    values: dict[str, Any] = {"depth": found.depth, "skipped": dict(found.skipped)}
    for metric, fact in _TRACED.items():
        if metric not in found.results:
            continue
        result = found.results[metric]
        if result.is_gap:
            values["skipped"][metric] = result.note or "not defined here"
            continue
        name = _SERIES.get(metric)
        if name is not None and name not in result.arrays:
            values["skipped"][metric] = f"too few samples for {name}"
            continue
        if metric == "saturation":
            values[fact] = result.arrays["cumulative"]
            values["saturation_depth"] = result.meta["mean_depth"]
        elif fact not in values:
            values[fact] = result.arrays[name] if name else result.value
    if "monotonicity" in found.results and not found.results["monotonicity"].is_gap:
        arrays = found.results["monotonicity"].arrays
        values["monotone_share"] = float(arrays["monotone_share"])
    return values | _skill(model, data, values)


def _skill(model: nn.Module, data: Batches, values: Mapping[str, Any]) -> dict[str, float]:
    """What a network has over the most frequent label, or over the mean: the least to be beaten."""
    if "accuracy" not in values and "sup_error" not in values:
        return {}
    stream = as_stream(model)
    asked = [Targets.of(stream, batch, weighted=False) for batch in data]
    if "accuracy" in values:
        counts = torch.cat([c for one in asked if (c := one.classes) is not None]).bincount()
        return {"skill": float(values["accuracy"][-1]) - float(counts.max() / counts.sum())}
    spread = torch.cat([one.labels for one in asked]).double().var(0, correction=0).mean()
    return {"skill": 1 - float(values["loss"][-1]) / max(float(spread), 1e-300)}


def _path(model: nn.Module, data: Batches, train: Any) -> dict[str, Any]:
    """How straight features travel (Assumption 1), and if coming closer means surer (Theorem 2)."""
    found = trace(model, data, ["straightness", "probability_rises"], progress=False).results
    values: dict[str, Any] = {}
    if not (straight := found["straightness"]).is_gap:
        values["straight"] = float(straight.value)
    if not (rises := found["probability_rises"]).is_gap:
        values["probability_rises"] = rises.meta["share"]
    return values


def _ablate(model: nn.Module, data: Batches, train: Any) -> dict[str, Any]:
    found = ablate(model, data, c=0.0, progress=False)
    untouched = {k: float(v.mean()) for k, v in found.untouched.items()}
    values = {f"removed_{name}": found.at(name, 0.0) for name in found.metrics}
    return values | {f"whole_{name}": value for name, value in untouched.items()}


def _exit(model: nn.Module, data: Batches, train: Any) -> dict[str, Any]:
    found = evaluate(model, data, Confidence(threshold=TAU), progress=False)
    left = np.asarray(found.exits, dtype=float)
    values: dict[str, Any] = {
        "exit_speedup": found.layer_speedup,
        "exit_early": float(left[:-1].sum() / left.sum()),
    }
    if found.accuracy is not None:
        values["exit_gain"] = found.accuracy - (found.accuracy_full or 0.0)
    return values


def _bound(model: nn.Module, data: Batches, train: Any) -> dict[str, Any]:
    """Share of samples and layers beyond Theorem 1's bound, at what attention and the MLP read."""
    found = bounded(model, data)
    forms: tuple[Form, ...] = ("as_printed", "corrected")
    ordered = [is_ordered(found.bounds[form]["attention"]) for form in forms]
    broken = {f: np.mean(list(found.violations(f).values())) for f in forms}
    return {
        "bound_ordered": float(np.mean(ordered)),
        **{f"bound_broken_{form}": float(share) for form, share in broken.items()},
    }


def _covariance(model: nn.Module, data: Batches, train: Any) -> dict[str, Any]:
    found = raw_gradients(model, data)
    return {name: [one[name] for one in found] for name in PROVIDES["covariance"]}


def _jump(model: nn.Module, data: Batches, train: Any) -> dict[str, Any]:
    if train is None:
        half = max(1, len(data) // 2)
        train, data = data[:half], data[half:] or data
    found = score(model, train, test=data, progress=False)
    jump = jumpboard(model, train, data, scored=found, batch_size=None)
    best = found.at(jump.after)
    return {
        "jump_found": float(jump.found),
        "jump_gain": jump.margin / max(found.loss, 1e-12),
        "jump_gain_held_out": jump.margin_valid or 0.0,
        "alignment": None if best.alignment is None else best.alignment.cosine,
    }


def _insertion(model: nn.Module, data: Batches, train: Any) -> dict[str, Any]:
    """How far the output moves when a block is inserted, at the first, middle and last site."""
    stream = as_stream(model)
    apart = 0.0
    with torch.no_grad(), evaluating(stream):
        before = stream.prediction(stream.call(stream.arguments(data[0], None)))
        for after in sorted({0, stream.depth // 2, stream.depth}):
            grown = as_stream(insert(model, after=after))
            with evaluating(grown):
                now = grown.prediction(grown.call(grown.arguments(data[0], None)))
            apart = max(apart, float((now - before).abs().max()))
    return {"insertion_change": apart}


Group = Callable[[nn.Module, Batches, Any], dict[str, Any]]
GROUPS: Mapping[str, Group] = {
    "trace": _trace,
    "ablate": _ablate,
    "exit": _exit,
    "bound": _bound,
    "covariance": _covariance,
    "path": _path,
    "jump": _jump,
    "insertion": _insertion,
}
PROVIDES: Mapping[str, tuple[str, ...]] = {
    "trace": (*dict.fromkeys(_TRACED.values()), "saturation_depth", "monotone_share", "skill"),
    "ablate": ("removed_accuracy", "removed_margin", "whole_accuracy", "whole_margin"),
    "exit": ("exit_speedup", "exit_early", "exit_gain"),
    "bound": ("bound_ordered", "bound_broken_as_printed", "bound_broken_corrected"),
    "covariance": (
        "within_10",
        "within_10_noise",
        "norm_over_variance",
        "disagree",
        "disagree_bound",
    ),
    "path": ("straight", "probability_rises"),
    "jump": ("jump_found", "jump_gain", "jump_gain_held_out", "alignment"),
    "insertion": ("insertion_change",),
}
