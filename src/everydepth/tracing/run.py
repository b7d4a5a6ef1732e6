"""`trace`: run the data through the model once, and measure every depth."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, pairwise
from typing import Annotated, Any

import torch
from torch import Tensor, nn

from everydepth.config import Seed, Setting, checked
from everydepth.environment import usable_device
from everydepth.errors import LabelError, SettingError
from everydepth.progress import say
from everydepth.results import Result, named, provenance
from everydepth.signals import Signals
from everydepth.stream import (
    IGNORE_INDEX,
    BranchRecord,
    Depths,
    ResidualStream,
    Task,
    as_stream,
    chosen_depths,
    evaluating,
    has_labels,
    observe_gradients,
    record_branches,
    unwrapped,
)
from everydepth.stream.feed import Feed, pieces
from everydepth.stream.rows import pick_rows
from everydepth.stream.targets import is_multi_label
from everydepth.stream.words import predicts_words
from everydepth.tracing.drawing import DrawnRows, rows_in
from everydepth.tracing.metric import (
    BatchMetric,
    FeatureMetric,
    Level,
    Metric,
    Need,
    chosen,
    in_words,
)
from everydepth.tracing.observation import (
    BlockRecords,
    Observation,
    token_features,
)
from everydepth.tracing.plan import Plan
from everydepth.tracing.predictions import LOGIT_BYTES
from everydepth.tracing.record import Trace
from everydepth.tracing.store import FeatureStore

# On a CPU, batches run in parts whose states are about this large and stay in the cache: measured
# 5 to 18 % faster for encoders and small convolutional networks, within 5 % for larger blocks.
PART_BYTES = 2**21

ANNOUNCED = 10.0  # seconds; a shorter trace is not announced

Metrics = str | Metric | Iterable[str | Metric | type[Metric]]


@checked
def trace(
    model: nn.Module | ResidualStream,
    data: Any,
    metrics: Metrics | None = None,
    *,
    device: str | torch.device | None = None,
    max_samples: int | None = None,
    batch_size: int | None = None,
    depths: Depths = None,
    tokens: int | None = None,
    seed: Seed = 0,
    memory_budget: Annotated[int, Setting(least=0)] = 2**29,
    progress: bool = True,
    against: nn.Module | ResidualStream | None = None,
    **options: Any,
) -> Trace:
    """Measure every depth of a model on data, in one pass if memory allows.

    The model runs in eval mode; its mode and device are restored afterward.

    data: batches (an iterable of mappings, tensors or `(inputs, labels)` pairs), a data set whose
        items are mappings, or one batch. A second pass needs data that can be iterated again.
    metrics: names, groups ("similarity", "gradients", "all"), classes or instances. By default all
        cheap ones that fit the task and the data; `trace.skipped` says why others were left out.
    max_samples: stop after this many rows.
    batch_size: for a data set or one large batch; 32 by default. On a CPU, a batch may run in parts
        that fit the cache. Rows are independent, so results are the same.
    depths: the depths to read out: numbers, "every 2nd", or a slice such as "20:"; the last is
        always included. Metrics of single blocks need all depths.
    tokens: for a language model, measure a random sample of this many predictions, drawn with
        `seed`; means then come with a `standard_error`.
    memory_budget: bytes of features to hold. Exact centering needs the mean before a second look at
        the features: if they do not fit, the data runs through the model again. `trace.passes` and
        `trace.about["features"]` say which happened.
    against: a second model (or stream) that sees the same batches, for metrics between the two.
    options: passed to `as_stream` with `model`.

    After the first row, the expected time and memory are printed on a terminal, and stored in
    `trace.about["plan"]`. Ctrl-C returns what was measured so far, with `trace.partial` set.

    >>> trace = ed.trace(model, test, progress=False)  # all metrics that fit
    >>> bool(trace["accuracy"][3] > trace["accuracy"][0])
    True
    >>> int(trace["saturation"].sum()) == len(test)  # at which depth decisions settle
    True
    >>> print(trace)
    Trace of ViTForImageClassification: 3 blocks, 359 samples, ...
    """
    stream = as_stream(model, **options)
    other = None if against is None else as_stream(against)
    feed = Feed(data, stream, batch_size=batch_size, max_samples=max_samples)
    at = chosen_depths(stream, depths)
    drawn = None
    if tokens is not None:
        if not feed.again:
            raise SettingError(
                f"tokens={tokens}, but {type(data).__name__} can be iterated only once, and "
                "sampling needs to count first; pass a list, a DataLoader or a data set"
            )
        drawn = DrawnRows.of(stream, feed, tokens, seed)
    first = feed.peek()
    wanted, grouped = chosen("all" if metrics is None else metrics)
    wanted, skipped = _fitting(wanted, stream, first, other)
    wanted = _at_some(wanted, skipped, len(at) <= stream.depth, drawn is not None)
    for metric in wanted:
        metric.at, metric.drawn = at, drawn
    if metrics is None:
        for metric in [m for m in wanted if not _is_default(m, stream.task)]:
            wanted.remove(metric)
            skipped[metric.name] = "not in the default set; request it by name"
    _refuse({name: why for name, why in skipped.items() if name not in grouped}, wanted)
    with (
        _placed(stream, device),
        nullcontext() if other is None else _placed(other, device),
    ):
        most = _at_most(feed, stream.rows(first), max_samples)
        run = _Run(stream, other, wanted, memory_budget, at, drawn, most, progress)
        started = time.perf_counter()
        run.look(feed.shown("trace", progress))
        again = run.second_look(feed, progress)
    return Trace(
        results=named(*(in_words(run.result(metric), metric) for metric in wanted)),
        about=provenance(
            model=stream.name,
            task=stream.task,
            depth=stream.depth,
            samples=run.samples,
            seconds=time.perf_counter() - started,
            settings={
                "metrics": [metric.name for metric in wanted],
                "max_samples": max_samples,
                "batch_size": batch_size,
                "depths": None if depths is None else list(at),
                "tokens": tokens,
                "seed": seed,
                "memory_budget": memory_budget,
            },
            plan=None if run.plan is None else str(run.plan),
            rows=run.rows,
            passes=2 if again else 1,
            partial=run.interrupted,
            skipped=skipped,
            features=run.how,
            against=None if other is None else other.name,
        ),
    )


def _at_some(
    metrics: Sequence[Metric], skipped: dict[str, str], fewer: bool, drawn: bool
) -> list[Metric]:
    """The metrics that support a selection of depths or tokens; `skipped` gets the others."""
    for metric in metrics:
        if fewer and not metric.some_depths:
            skipped[metric.name] = "needs every depth; leave out depths="
        elif drawn and "gradients" in metric.needs:
            skipped[metric.name] = "needs every token; leave out tokens="
    return [metric for metric in metrics if metric.name not in skipped]


def _at_most(feed: Feed, first: int, most: int | None) -> int | None:
    """The rows to trace; their largest number if only batches can be counted; None if unknown.

    first: rows of the first batch. most: `max_samples`.
    """
    batches = feed.batches
    rows = feed.rows if feed.rows is not None or batches is None else batches * first
    return rows if rows is None or most is None else min(rows, most)


@dataclass(eq=False)
class _Run:
    """One trace in progress. most: the rows to trace, as far as known."""

    stream: ResidualStream
    other: ResidualStream | None
    metrics: Sequence[Metric]
    budget: int
    at: tuple[int, ...]
    drawn: DrawnRows | None
    most: int | None
    progress: bool
    samples: int = 0
    rows: int = 0
    interrupted: bool = False
    labeled: bool = False
    how: str = "no feature metrics"
    part: int | None = None
    plan: Plan | None = None
    stores: dict[str, FeatureStore] = field(default_factory=dict[str, FeatureStore])

    def __post_init__(self) -> None:
        self.batch_metrics = [m for m in self.metrics if isinstance(m, BatchMetric)]
        features = [m for m in self.metrics if isinstance(m, FeatureMetric)]
        levels = {m.level: [n for n in features if n.level == m.level] for m in features}
        for level, mine in levels.items():
            self.stores[level] = FeatureStore(mine, self.stream, self.budget // len(levels))
        for metric in features:
            metric.memory = self.budget
        needs = {need for m in self.metrics for need in m.needs}
        self.gradients = "gradients" in needs
        self.needs_labels = "labels" in needs
        self.branches = [m for m in self.batch_metrics if "branches" in m.needs]
        self.reads = frozenset(field for m in self.batch_metrics for field in m.reads)

    def result(self, metric: Metric) -> Result:
        """What a metric measured."""
        if not self.rows:
            return metric.gap("no data was seen")
        if "labels" in metric.needs and not self.labeled:
            return metric.gap("the data has no labels")
        return metric.compute()

    def look(self, batches: Iterator[Mapping[str, Any]]) -> None:
        """The first pass."""
        try:
            for batch in self._parts(batches):
                drawn = self._drawn(batch)
                if drawn is not None and not len(drawn):
                    self.samples += self.stream.rows(batch)
                    continue
                clock = [time.perf_counter()]
                with torch.no_grad():
                    observation = self._observed(batch, drawn)
                    clock.append(time.perf_counter())
                    # Most of the time goes here, where Ctrl-C still interrupts.
                    self._check(observation)
                    observation.predictions.find()
                    clock.append(time.perf_counter())
                    with Signals():  # Ctrl-C waits until all metrics have seen the batch
                        self._take(observation)
                clock.append(time.perf_counter())
                if self.plan is None:
                    self.plan = self._planned(observation, clock)
                    long = self.plan.seconds is None or self.plan.seconds >= ANNOUNCED
                    if self.progress and long:
                        say(str(self.plan))
        except KeyboardInterrupt:
            self.interrupted = True
        for store in self.stores.values():
            store.flush()

    def _planned(self, o: Observation, clock: Sequence[float]) -> Plan:
        forward, readout, rest = (b - a for a, b in pairwise(clock))
        state = o.states.h[-1].nbytes // o.samples
        held = 0 if not self.stores else self.budget
        return Plan(
            model=self.stream.name,
            metrics=tuple(m.name for m in self.metrics),
            depths=self.at,
            rows=self.most,
            tokens=len(o.rows) / o.samples if o.per_token else None,
            drawn=None if self.drawn is None else len(self.drawn.numbers),
            forward=forward / o.samples,
            readout=readout / o.samples,
            rest=rest / o.samples,
            bytes=2 * len(o.states) * state * (self.part or o.samples) + 3 * LOGIT_BYTES + held,
        )

    def _drawn(self, batch: Mapping[str, Any]) -> Tensor | None:
        return None if self.drawn is None else self.drawn.take(rows_in(self.stream, batch))

    def second_look(self, feed: Feed, progress: bool) -> bool:
        """Show features to metrics that need the mean first; whether the data ran again."""
        if not self.stores:
            return False
        self.how = "one pass, nothing held"
        again = any(store.must_run_again for store in self.stores.values())
        if again and (self.interrupted or not feed.again):
            self.how = "features did not fit in memory, and the data could not be run again"
            return False
        if any(store.twice for store in self.stores.values()):
            self.how = "data run twice" if again else "features held in memory"
        try:
            with torch.no_grad():
                for store in self.stores.values():
                    store.second_look()
                if again:
                    self._run_again(feed.shown("second pass", progress))
        except KeyboardInterrupt:
            self.interrupted = True
        return again

    def _run_again(self, batches: Iterator[Mapping[str, Any]]) -> None:
        wanted = [store for store in self.stores.values() if store.must_run_again]
        for store in wanted:
            store.start_second()
        if self.drawn is not None:
            self.drawn.restart()
        for batch in self._parts(batches):
            drawn = self._drawn(batch)
            if drawn is None or len(drawn):
                states = self.stream.observe(batch, logits=not predicts_words(self.stream))
                seen = Observation(self.stream, states, 0, depths=self.at, drawn=drawn)
                self._store(seen, wanted, batch)
        for store in wanted:
            store.flush()

    def _parts(self, batches: Iterator[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
        """The batches, in parts once the size of a state is known."""
        for whole in batches:
            batch, rows = whole, self.stream.rows(whole)
            if self.part is None and rows > 1 and self.stream.device.type == "cpu":
                # The first row shows the size of a state, and the time it takes.
                yield pick_rows(whole, torch.arange(1), rows)
                batch, rows = pick_rows(whole, torch.arange(1, rows), rows), rows - 1
            if self.part is None or rows <= self.part:
                yield batch
            else:
                count = -(-rows // self.part)
                yield from pieces(batch, self.stream, -(-rows // count))

    def _observed(self, batch: Mapping[str, Any], drawn: Tensor | None) -> Observation:
        stream, gradients = self.stream, None
        # What is discovered on a batch with new inputs takes passes that are not to be recorded.
        stream.confirm(batch)
        own = not predicts_words(stream)
        if self.gradients:
            states, records, gradients = observe_gradients(stream, batch)
            for index, seen in enumerate(records):
                self._see_block(batch, index, seen)
        elif self.branches:
            with record_branches(stream.blocks, to=partial(self._see_block, batch)):
                states = stream.observe(batch, logits=own)
        else:
            states = stream.observe(batch, logits=own)
        other = None if self.other is None else self.other.observe(batch)
        return Observation(
            stream, states, self.samples, other, gradients, self.at, drawn, self.reads
        )

    def _see_block(
        self, batch: Mapping[str, Any], index: int, seen: Sequence[BranchRecord]
    ) -> None:
        for metric in self.branches:
            metric.see_block(BlockRecords(self.stream, index + 1, seen, batch))

    def _check(self, o: Observation) -> None:
        # If every token predicts, features are the states: no need to copy them.
        parts = [o.states.h[i] for i in self.at] if o.by_words else [o.features]
        # A value that is not finite makes the sum so; a sum may also overflow, so look closer then.
        if not all(bool(part.sum().isfinite()) for part in parts):
            o.states.check_finite()

    def _take(self, observation: Observation) -> None:
        labeled = self.needs_labels and observation.is_labeled
        self.labeled |= labeled
        for metric in self.batch_metrics:
            if labeled or "labels" not in metric.needs:
                metric.update(observation)
        self._store(observation, list(self.stores.values()), observation.states.batch)
        if self.part is None and self.stream.device.type == "cpu":
            row = max(h[0].nbytes for h in observation.states.h)
            if observation.gradients is not None:
                # They need all logits at once, and nothing interrupts a backward pass.
                row = max(row, observation.gradients.logits[0].nbytes)
            self.part = max(1, PART_BYTES // row)
        self.samples += observation.samples
        self.rows += len(observation.rows)

    def _store(
        self, o: Observation, stores: Sequence[FeatureStore], batch: Mapping[str, Any]
    ) -> None:
        seen = o.other
        if seen is None and self.other is not None:
            seen = self.other.observe(batch)
        other = None if seen is None or self.other is None else Observation(self.other, seen, 0)
        for store in stores:
            mine = _level(o, store.level)
            theirs = None if other is None else _level(other, store.level)
            if theirs is not None and theirs.shape[1] != mine.shape[1]:
                raise SettingError(
                    f"the two models have {mine.shape[1]} and {theirs.shape[1]} predictions for "
                    "one batch; compare models of the same task on the same data"
                )
            targets = o.targets if store.needs_labels else None
            if store.needs_labels and targets is None:
                targets = torch.full(mine.shape[1:2], IGNORE_INDEX, device=mine.device)
            store.add(mine, targets, theirs)


def _level(o: Observation, level: Level) -> Tensor:
    if level == "token":
        return token_features(o.states)
    return o.features if level == "prediction" else o.readouts


def _fitting(
    metrics: Sequence[Metric],
    stream: ResidualStream,
    batch: Mapping[str, Any],
    other: ResidualStream | None,
) -> tuple[list[Metric], dict[str, str]]:
    """The metrics that can run, and why the others cannot."""
    missing: dict[Need, str] = {}
    if not has_labels(stream, batch):
        missing["labels"] = f"labels, but the batch has keys {sorted(batch)}"
    elif is_multi_label(stream):
        missing["labels"] = f"labels of one class each, but {stream.name} is multi-label"
    if other is None:
        missing["against"] = "a second model; pass against="
    kinds = {branch.kind for block in stream.blocks for branch in block.branches}
    if not kinds:
        missing["branches"] = f"branches, but those of {stream.name} are unknown"
    elif "attention" not in kinds:
        missing["tokens"] = f"tokens, but {stream.name} has no attention"
    kept: list[Metric] = []
    skipped: dict[str, str] = {}
    for metric in metrics:
        lacking = [missing[need] for need in metric.needs if need in missing]
        if metric.tasks is not None and stream.task not in metric.tasks:
            skipped[metric.name] = f"for {' or '.join(sorted(metric.tasks))}, not {stream.task}"
        elif lacking:
            skipped[metric.name] = f"needs {lacking[0]}"
        else:
            kept.append(metric)
    return kept, skipped


def _refuse(wrong: Mapping[str, str], kept: Sequence[Metric]) -> None:
    """Raise if a metric requested by name cannot run, or none can."""
    if wrong:
        unlabeled = all("needs labels" in why for why in wrong.values())
        raise (LabelError if unlabeled else SettingError)(
            "; ".join(f"{name}: {why}" for name, why in wrong.items())
            + (". Add 'labels' to the data, or drop them" if unlabeled else ". Drop them")
            + (f": metrics={[m.name for m in kept]}" if kept else " (none would be left)")
        )
    if not kept:
        raise SettingError(
            "none of these metrics fits the model and its data; omit metrics= to see which do"
        )


def _is_default(metric: Metric, task: Task) -> bool:
    return metric.default if isinstance(metric.default, bool) else task in metric.default


@contextmanager
def _placed(
    stream: ResidualStream, device: str | torch.device | None
) -> Generator[None, None, None]:
    """Put the model in eval mode on `device` inside the context."""
    inner = unwrapped(stream.model)
    tensors = chain(inner.parameters(), inner.buffers())
    before = next((t.device for t in tensors), torch.device("cpu"))
    with evaluating(inner):
        try:
            if device is not None:
                inner.to(usable_device(device))
            yield
        finally:
            if device is not None:
                inner.to(before)
