"""Evaluate an exit policy on data: accuracy, exits per depth, counted and measured speedup."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from everydepth.config import Count, checked
from everydepth.exits.clock import block_seconds, block_speedup
from everydepth.exits.measure import seconds
from everydepth.exits.policies import Policy, layer_speedup
from everydepth.exits.predict import Prediction, predict
from everydepth.results import (
    Number,
    OptionalNumber,
    Results,
    curve,
    named,
    provenance,
    scalars,
)
from everydepth.stream import ResidualStream, Targets, as_stream, evaluating, has_labels
from everydepth.stream.feed import Feed
from everydepth.stream.states import are_finite


class Evaluation(Results, kind="evaluation"):
    """A policy compared with the full model on the same batches.

    `evaluation["exits"]` counts the samples that exited at depths 1..L. Accuracies are None without
    labels; agreement is the share of predictions equal to the full model's. There are three
    speedups: layer_speedup counts blocks, `sum_i L m_i / sum_i i m_i`; block_speedup weights each
    block by its time on the first batch; measured_speedup is wall-clock time, measured on
    interleaved batches.

    >>> found = ed.evaluate(model, test, ed.Confidence(threshold=0.9), progress=False)
    >>> sum(found.exits) == len(test), found.layer_speedup >= 1
    (True, True)
    """

    accuracy = OptionalNumber("policy")
    accuracy_full = OptionalNumber("policy")
    agreement = Number("policy")
    mean_depth = Number("policy")
    layer_speedup = Number("policy")
    block_speedup = OptionalNumber("policy")
    measured_speedup = Number("policy")
    seconds = Number("policy")
    seconds_full = Number("policy")

    @classmethod
    def of(
        cls, exits: Sequence[int], compared: Mapping[str, float | None], **facts: Any
    ) -> Evaluation:
        """From the number of samples that exited at depths 1..L, and the numbers above by name."""
        numbers = scalars(
            "policy",
            compared,
            labels=_LABELS,
            title="Costs and savings of early exit",
            about="The policy and the full model, alternating on the same batches.",
            section="decisions",
        )
        left = curve(
            "exits",
            range(1, len(exits) + 1),
            {"count": exits},
            kind="histogram",
            title="Where samples exit",
            about="Share of samples that exit at each depth, and up to it.",
            section="decisions",
        )
        about = provenance(depth=len(exits), samples=sum(exits), **facts)
        return cls(results=named(left, numbers), about=about)

    @property
    def exits(self) -> tuple[int, ...]:
        """The number of samples that exited at depths 1..L."""
        return tuple(self["exits"].tolist())


@checked
@torch.no_grad()
def evaluate(
    model: nn.Module | ResidualStream,
    data: Any,
    policy: Policy,
    *,
    batch_size: int | None = None,
    repeats: Count = 1,
    progress: bool = True,
    **options: Any,
) -> Evaluation:
    """Compare a policy with the full model on data, alternating between them batch by batch.

    repeats: how often to time each batch; the fastest counts.

    >>> policy = ed.calibrate(model, valid, risk=0.2, progress=False)
    >>> found = ed.evaluate(model, test, policy, progress=False)
    >>> found.agreement > 0.8, 1 <= found.mean_depth <= 3
    (True, True)
    """
    stream = as_stream(model, **options)
    policy.for_stream(stream)
    depths: list[Tensor] = []
    labels = same = 0
    right = torch.zeros(2, dtype=torch.int64)  # by the policy, by the full model
    time = torch.zeros(2, dtype=torch.float64)
    with evaluating(stream):
        blocks = np.empty(0)
        for batch in Feed(data, stream, batch_size=batch_size).shown("evaluate", progress):
            if not depths:
                _both(stream, batch, policy)  # warm up: the first calls are slower
                blocks = block_seconds(stream, batch, max(repeats, 2))
            runs = [_both(stream, batch, policy) for _ in range(repeats)]
            time += torch.tensor([run[0] for run in runs], dtype=torch.float64).amin(0)
            _, full, left = runs[0]
            if not bool(are_finite(full).all()):
                stream.observe(batch).check_predictions()
            depths.append(left.depths.cpu())
            same += int((left.labels == full.argmax(-1)).sum())
            if has_labels(stream, batch):
                targets = Targets.of(stream, batch, weighted=False)
                labels += len(targets)
                both = [targets.hits(targets.pick(z)).sum() for z in (left.logits, full)]
                right += torch.stack(both).cpu()
    left = torch.cat(depths)
    accuracy = (right / labels).tolist() if labels else [None, None]
    compared = {
        "accuracy": accuracy[0],
        "accuracy_full": accuracy[1],
        "agreement": same / len(left),
        "mean_depth": float(left.double().mean()),
        "layer_speedup": layer_speedup(left, stream.depth),
        "block_speedup": block_speedup(left, blocks),
        "measured_speedup": float(time[1] / time[0]),
        "seconds": float(time[0]),
        "seconds_full": float(time[1]),
    }
    exits = torch.bincount(left, minlength=stream.depth + 1)[1:].tolist()
    about = {"model": stream.name, "task": stream.task, "policy": policy.to_json()}
    return Evaluation.of(exits, compared, **about)


_LABELS = {
    "accuracy": "accuracy of the policy",
    "accuracy_full": "accuracy of the full model",
    "agreement": "agreement with the full model",
    "mean_depth": "blocks per sample",
    "layer_speedup": "speedup, counted in blocks",
    "block_speedup": "speedup, blocks weighted by time",
    "measured_speedup": "speedup, wall-clock",
    "seconds": "seconds of the policy",
    "seconds_full": "seconds of the full model",
}


def _both(
    stream: ResidualStream, batch: Mapping[str, Any], policy: Policy
) -> tuple[tuple[float, float], Tensor, Prediction]:
    early, left = seconds(lambda: predict(stream, batch, policy=policy), stream)
    whole, output = seconds(lambda: stream.called(batch), stream)
    return (early, whole), stream.prediction(output), left
