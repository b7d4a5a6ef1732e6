"""Linear probes: the accuracy of a new linear classifier at every depth."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
from torch import Tensor, nn

from everydepth.config import Positive, checked
from everydepth.errors import LabelError
from everydepth.results.build import curve
from everydepth.results.result import Result, gap
from everydepth.stream import IGNORE_INDEX, ResidualStream, as_stream
from everydepth.stream.feed import Feed
from everydepth.tracing.metric import FeatureMetric
from everydepth.tracing.observation import FeatureRows
from everydepth.tracing.run import trace
from everydepth.tracing.sums import DEPTH, array


class _Collect(FeatureMetric):
    """Collects features; labels are left out, since they may be of another task."""

    name = "_features"

    def __init__(self) -> None:
        self.features: list[np.ndarray] = []

    def update(self, rows: FeatureRows) -> None:
        self.features.append(array(rows.features))

    def compute(self) -> Result:
        return gap(self.name, "table", "kept for a probe")


@checked
def linear_probe(
    model: nn.Module | ResidualStream,
    train: Any,
    test: Any,
    *,
    strength: Positive = 1.0,
    max_samples: int | None = None,
    batch_size: int | None = None,
    progress: bool = True,
    **options: Any,
) -> Result:
    """Accuracy on `test` of a logistic regression fitted to `train`, at every depth.

    train, test: data as in `trace`, with one class per sample under "labels". The classes need not
        be the model's: use another task to measure transfer, or a shifted test set for robustness.
    strength: scikit-learn's `C`, the inverse of the L2 penalty.

    >>> small = train.subset(range(200))
    >>> ed.linear_probe(model, small, test, progress=False).value.shape  # accuracy at depths 0..3
    (4,)
    """
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression
    from sklearn.preprocessing import StandardScaler

    stream = as_stream(model, **options)
    how = {"max_samples": max_samples, "batch_size": batch_size, "progress": progress}
    (x, y), (x_test, y_test) = (_features(stream, data, how) for data in (train, test))
    if len(np.unique(y)) < 2:
        raise LabelError(
            f"all {len(y)} training samples have label {y[0]}; a probe needs two classes"
        )
    scores: list[tuple[float, float]] = []
    unfinished: list[int] = []
    for depth in range(len(x)):
        scaler = StandardScaler().fit(x[depth])
        probe = LogisticRegression(C=strength, max_iter=500)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", ConvergenceWarning)
            probe.fit(scaler.transform(x[depth]), y)
        if any(issubclass(w.category, ConvergenceWarning) for w in caught):
            unfinished.append(depth)
        scores.append(
            (
                float(probe.score(scaler.transform(x_test[depth]), y_test)),
                float(probe.score(scaler.transform(x[depth]), y)),
            )
        )
    found = np.array(scores)
    where = ", ".join(map(str, unfinished))
    return curve(
        "linear_probe",
        range(len(x)),
        {"value": found[:, 0], "train": found[:, 1]},
        title="Linear probe",
        about="Accuracy of a new linear classifier trained on the features of each depth.",
        unit="share",
        better="higher",
        section="prediction",
        labels={
            "depth": DEPTH,
            "value": "test: accuracy of a linear probe",
            "train": "train: accuracy of a linear probe",
        },
        meta={
            "train_samples": len(y),
            "test_samples": len(y_test),
            "strength": strength,
            "chance": float(np.unique(y_test, return_counts=True)[1].max() / len(y_test)),
        },
        note=f"the fit did not converge at depth {where}" if where else None,
    )


def _features(
    stream: ResidualStream, data: Any, how: dict[str, Any]
) -> tuple[np.ndarray, np.ndarray]:
    feed = Feed(data, stream, batch_size=how["batch_size"], max_samples=how["max_samples"])
    labels: list[np.ndarray] = []

    def without_labels() -> Any:
        for batch in feed:
            given = batch.get("labels")
            if given is None:
                raise LabelError(
                    f"a linear probe needs labels, but the batch has keys {sorted(batch)}; add "
                    "'labels', one class per sample"
                )
            labels.append(array(given) if isinstance(given, Tensor) else np.atleast_1d(given))
            yield {key: value for key, value in batch.items() if key != "labels"}

    kept = _Collect()
    trace(stream, without_labels(), kept, progress=how["progress"])
    x, y = np.concatenate(kept.features, 1), np.concatenate(labels)
    if y.shape != (x.shape[1],) or not np.issubdtype(y.dtype, np.integer):
        raise LabelError(
            f"labels have shape {y.shape} and type {y.dtype} for {x.shape[1]} features; a linear "
            "probe needs one class (an integer) per feature"
        )
    real = y != IGNORE_INDEX
    if not real.any():
        raise LabelError(f"all {len(y)} labels are {IGNORE_INDEX} (ignored); pass classes")
    return x[:, real], y[real]
