"""Base classes of metrics, and their registry."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar

import numpy as np

from everydepth.config import brief, checked
from everydepth.errors import SettingError
from everydepth.results.result import Better, Kind, Result, defined, gap, readable
from everydepth.stream import Task
from everydepth.tracing.sums import DEPTH, Kept, Sums

if TYPE_CHECKING:
    from everydepth.tracing.drawing import DrawnRows
    from everydepth.tracing.observation import BlockRecords, FeatureRows, Observation

Need = Literal["labels", "gradients", "branches", "against", "tokens"]
"""What a metric needs besides the states: labels in the batches, gradients of the loss at every
state, records of every residual connection, a second model, states that consist of tokens."""


Level = Literal["prediction", "token", "readout"]


class Metric(ABC):
    """`update` is called for all of the data, then `compute`. Each trace uses a new instance.

    name, kind: of its result. needs: see `Need`. tasks: that it applies to; None for all.
    default: whether `trace(model, data)` includes it, needs and task permitting; or the tasks for
        which it does.
    some_depths: whether it works if only some depths are read out.
    at, drawn: set by `trace`: these depths, and the sample of predictions if not all are used.
    sums, rows, kept: for `update`, empty at first: sums by name, a count, and values of the first
        rows, up to `keep` bytes.
    group: a name for requesting related metrics together.
    title, about, unit, better, section: of the result, unless `compute` sets them; see
        `everydepth.results.Result`.
    """

    name: ClassVar[str]
    kind: ClassVar[Kind] = "curve"
    group: ClassVar[str] = "own"
    title: ClassVar[str] = ""
    about: ClassVar[str] = ""
    unit: ClassVar[str] = ""
    better: ClassVar[Better | None] = None
    section: ClassVar[str] = ""
    needs: ClassVar[frozenset[Need]] = frozenset()
    tasks: ClassVar[frozenset[Task] | None] = None
    default: ClassVar[bool | frozenset[Task]] = True
    some_depths: ClassVar[bool] = False
    keep: ClassVar[int] = 2**26
    at: Sequence[int] = ()
    drawn: DrawnRows | None = None

    def __init__(self) -> None:
        self.sums = Sums()
        self.rows = 0
        self.kept = Kept(self.keep)

    def depth_of(self, index: Any) -> np.ndarray:
        """Depths from indices into `at`; the index after the last is the depth after the last."""
        at = np.asarray(self.at)
        places = np.asarray(index)
        return places if not len(at) else np.asarray(np.append(at, at[-1] + 1)[places])

    def depths(self, last: int, first: int = 0) -> np.ndarray:
        """The depths with indices `first` to `last` in `at`."""
        return self.depth_of(np.arange(first, last + 1))

    def where(self, mask: np.ndarray, first: int = 0) -> str:
        """For a note: the depths at which a mask is true that begins at index `first`."""
        return ", ".join(map(str, self.depth_of(np.flatnonzero(mask) + first)))

    @abstractmethod
    def compute(self) -> Result:
        """The result for all data seen; a `gap` if the data does not allow one."""

    def over_depths(
        self,
        series: Mapping[str, np.ndarray],
        *,
        labels: Mapping[str, str] | None = None,
        first: int = 0,
        beside: Mapping[str, np.ndarray] | None = None,
        **more: Any,
    ) -> Result:
        """A result with one value (or row of values) per depth from index `first` on.

        NaN is masked. beside: further arrays. more: other fields of `Result`.
        """
        last = first + len(next(iter(series.values()))) - 1
        values = {name: defined(value) for name, value in series.items()}
        return Result(
            name=self.name,
            kind=self.kind,
            series=tuple(series),
            arrays={"depth": self.depths(last, first), **values, **(beside or {})},
            labels={"depth": DEPTH, **(labels or {})},
            **more,
        )

    def gap(self, reason: str) -> Result:
        """A result without values, and the reason."""
        return gap(self.name, self.kind, reason)


class BatchMetric(Metric):
    """A metric that sees every batch; one that needs labels, every batch with labels.

    reads: the fields of `Observation.predictions` it uses, so that they are computed together;
        others are computed when they are first read.
    """

    reads: ClassVar[frozenset[str]] = frozenset()

    def see_block(self, seen: BlockRecords) -> None:
        """For metrics that need "branches": called with the records of each block in turn.

        The records are not kept: store whatever `update`, which follows, needs.
        """

    @abstractmethod
    def update(self, observation: Observation) -> None:
        """Add a batch, or part of one. Metrics share its features, predictions and gradients."""


class FeatureMetric(Metric):
    """A metric that sees the features of all depths in chunks whose size is always the same.

    passes: 2 if it needs a second look, for example to subtract the mean. Features are held in
        memory for it if the budget allows; otherwise the data runs again.
    level: "prediction" for the features that predict, "token" for every real token of the stream,
        "readout" for the outputs `z_l` (embeddings).
    memory: bytes it may use for sums that grow with the width; set by `trace`.
    """

    passes: ClassVar[Literal[1, 2]] = 1
    level: ClassVar[Level] = "prediction"
    memory: int = 2**29

    @abstractmethod
    def update(self, rows: FeatureRows) -> None:
        """Add a chunk; in the second pass, `rows.second` is true."""


M = TypeVar("M", bound=type[Metric])

_registry: dict[str, type[Metric]] = {}
# The order in which groups are computed and shown; users' own metrics come last.
_GROUPS = (
    "prediction",
    "detection",
    "decisions",
    "contributions",
    "similarity",
    "structure",
    "statistics",
    "gradients",
)


@checked
def register_metric(metric: M) -> M:
    """Register a metric under its `name`; a decorator.

    >>> from everydepth.tracing import BatchMetric
    >>> @ed.register_metric
    ... class Largest(BatchMetric):
    ...     name = "largest"
    ...
    ...     def __init__(self):
    ...         self.seen = []
    ...
    ...     def update(self, observation):
    ...         self.seen.append(torch.stack([h.abs().max() for h in observation.states.h]))
    ...
    ...     def compute(self):
    ...         return self.over_depths({"value": torch.stack(self.seen).amax(0).numpy()})
    >>> ed.trace(model, test, ["largest"], progress=False)["largest"].shape
    (4,)
    """
    if not (isinstance(metric, type) and issubclass(metric, (BatchMetric, FeatureMetric))):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise SettingError(
            f"{getattr(metric, '__name__', brief(metric))} is neither a BatchMetric nor a "
            "FeatureMetric; subclass one of them"
        )
    if not isinstance(getattr(metric, "name", None), str):
        raise SettingError(f'{metric.__name__} has no name; add name = "..." to the class')
    if missing := sorted(getattr(metric, "__abstractmethods__", ())):
        raise SettingError(f"{metric.__name__} has no {missing[0]}(); define it")
    taken = _registry.get(metric.name)
    if taken is not None and taken is not metric:
        raise SettingError(
            f"there is already a metric {metric.name!r} ({taken.__module__}.{taken.__name__}); "
            "give yours another `name`"
        )
    _registry[metric.name] = metric
    return metric


def in_words(result: Result, metric: Metric | type[Metric] | None = None) -> Result:
    """A result with missing words (title, unit, ...) taken from the metric of its name."""
    metric = _registry.get(result.name) if metric is None else metric
    if metric is None:
        return result
    words = {key: getattr(metric, key) for key in ("about", "unit", "better", "section")}
    missing = {key: word for key, word in words.items() if word and not getattr(result, key)}
    if metric.title and result.title == readable(result.name):
        missing["title"] = metric.title
    return replace(result, **missing)


def metric_names() -> list[str]:
    """The names of all registered metrics."""
    return sorted(_registry)


def groups() -> dict[str, list[str]]:
    """The metrics of each group; `trace(metrics=...)` also accepts group names."""
    found: dict[str, list[str]] = {group: [] for group in _GROUPS}
    for name, metric in _registry.items():
        found.setdefault(metric.group, []).append(name)
    return {group: names for group, names in found.items() if names}


def chosen(
    metrics: str | Metric | Iterable[str | Metric | type[Metric]],
) -> tuple[list[Metric], set[str]]:
    """Instances of the requested metrics, and the names that were requested only as a group.

    The latter are left out without an error if they do not fit.
    """
    wanted: Sequence[str | Metric | type[Metric]] = (
        [metrics] if isinstance(metrics, (str, Metric)) else list(metrics)
    )
    found: dict[str, Metric] = {}
    grouped, named = set[str](), set[str]()
    for item in wanted:
        of_group = isinstance(item, str) and item not in _registry
        for metric in _instances(item):
            found.setdefault(metric.name, metric)
            (grouped if of_group else named).add(metric.name)
    if not found:
        raise SettingError("metrics is empty; name at least one, or omit it for the default")
    return list(found.values()), grouped - named


def _instances(item: str | Metric | type[Metric]) -> list[Metric]:
    if isinstance(item, Metric):
        return [item]
    if isinstance(item, type):
        return [item()]
    if item == "all":
        return [_registry[name]() for names in groups().values() for name in names]
    if item in _registry:
        return [_registry[item]()]
    if item in groups():
        return [_registry[name]() for name in groups()[item]]
    known = [*_registry, *groups(), "all"]
    close = get_close_matches(str(item), known, 1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    raise SettingError(
        f"there is no metric {item!r}; {hint}metrics: {', '.join(metric_names())}; "
        f"groups: {', '.join(groups())}, all"
    )
