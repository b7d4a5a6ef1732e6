"""What a policy costs and saves on data: accuracy, exits per depth, counted and measured speed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.table import Table
from torch import Tensor, nn

from everydepth.data.feeding import Feed
from everydepth.errors import SettingError
from everydepth.exits.measure import seconds
from everydepth.exits.policies import Policy, layer_speedup
from everydepth.exits.predict import Prediction, predict
from everydepth.stream import ResidualStream, Targets, as_stream, evaluating, has_labels, unwrapped


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """A policy next to the full model, on the same batches.

    exits: samples that left at depths 1..L. agreement: share predicted as by the full model.
    layer_speedup: `sum_i L m_i / sum_i i m_i`; measured_speedup: wall-clock of the full model over
    that of the policy, batches interleaved. Accuracies are None where there are no labels.

    >>> found = ed.evaluate(model, test, ed.Confidence(threshold=0.9), progress=False)
    >>> sum(found.exits) == len(test), found.layer_speedup >= 1
    (True, True)
    """

    samples: int
    exits: tuple[int, ...]
    accuracy: float | None
    accuracy_full: float | None
    agreement: float
    mean_depth: float
    layer_speedup: float
    measured_speedup: float
    seconds: float
    seconds_full: float

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2)

    def table(self) -> Table:
        table = Table("depth", "samples", "share", title="samples leaving", title_justify="left")
        for depth, count in enumerate(self.exits, start=1):
            table.add_row(str(depth), f"{count:,}", f"{count / self.samples:.1%}")
        accuracy = "-" if self.accuracy is None else f"{self.accuracy:.2%}"
        full = "-" if self.accuracy_full is None else f"{self.accuracy_full:.2%}"
        table.caption = (
            f"accuracy {accuracy} (full model {full}), agreement {self.agreement:.2%}\n"
            f"speed-up {self.measured_speedup:.2f}x measured, {self.layer_speedup:.2f}x by layers"
        )
        return table


@torch.no_grad()
def evaluate(
    model: nn.Module | ResidualStream,
    data: Any,
    policy: Policy,
    *,
    batch_size: int | None = None,
    repeats: int = 1,
    progress: bool = True,
    **options: Any,
) -> Evaluation:
    """Run the full model and the policy over the data, batch by batch in turn.

    repeats: how often each batch is timed; the best counts.

    >>> policy = ed.calibrate(model, valid, risk=0.2, progress=False)
    >>> found = ed.evaluate(model, test, policy, progress=False)
    >>> found.agreement > 0.8, 1 <= found.mean_depth <= 3
    (True, True)
    """
    if repeats < 1:
        raise SettingError(f"repeats={repeats}; use 1 or more")
    stream = as_stream(model, **options)
    policy.for_stream(stream)
    depths: list[Tensor] = []
    labels = same = 0
    right = torch.zeros(2, dtype=torch.int64)  # by the policy, by the full model
    time = torch.zeros(2, dtype=torch.float64)
    with evaluating(unwrapped(stream.model)):
        for batch in Feed(data, stream, batch_size=batch_size).shown("evaluate", progress):
            if not depths:
                _both(stream, batch, policy)  # the first calls are slower than all others
            runs = [_both(stream, batch, policy) for _ in range(repeats)]
            time += torch.tensor([run[0] for run in runs], dtype=torch.float64).amin(0)
            _, full, left = runs[0]
            depths.append(left.depths.cpu())
            same += int((left.labels == full.argmax(-1)).sum())
            if has_labels(stream, batch):
                targets = Targets.of(stream, batch, weighted=False)
                labels += len(targets)
                both = [targets.hits(targets.pick(z)).sum() for z in (left.logits, full)]
                right += torch.stack(both).cpu()
    left = torch.cat(depths)
    accuracy = (right / labels).tolist() if labels else [None, None]
    return Evaluation(
        samples=len(left),
        exits=tuple(torch.bincount(left, minlength=stream.depth + 1)[1:].tolist()),
        accuracy=accuracy[0],
        accuracy_full=accuracy[1],
        agreement=same / len(left),
        mean_depth=float(left.double().mean()),
        layer_speedup=layer_speedup(left, stream.depth),
        measured_speedup=float(time[1] / time[0]),
        seconds=float(time[0]),
        seconds_full=float(time[1]),
    )


def _both(
    stream: ResidualStream, batch: Mapping[str, Any], policy: Policy
) -> tuple[tuple[float, float], Tensor, Prediction]:
    early, left = seconds(lambda: predict(stream, batch, policy=policy), stream)
    whole, output = seconds(lambda: stream.call(stream.arguments(batch, None)), stream)
    return (early, whole), stream.prediction(output), left
