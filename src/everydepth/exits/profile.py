"""What each depth is worth and what it costs, and the depth for a budget."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from everydepth.errors import BudgetError, SettingError
from everydepth.exits.measure import (
    checkpoint_bytes,
    flops,
    parameter_count,
    peak_bytes,
    seconds,
)
from everydepth.exits.quality import quality_of, watch
from everydepth.progress import shown
from everydepth.results import Result, Results, curve, named, provenance
from everydepth.stream import ResidualStream, as_stream, evaluating, unwrapped
from everydepth.stream.feed import Feed, first_rows, size_for

Number = float | int


@dataclass(frozen=True, kw_only=True)
class Latency:
    """Milliseconds of warm calls: the median, and the quartiles as its spread."""

    median: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class DepthProfile:
    """One depth: quality of its readout, and cost of the plain model cut to it.

    checkpoint_bytes: tensors in its safetensors file. flops: of one row. latency: one row;
    batch_latency: a whole batch. peak_bytes: weights and intermediate results of a whole batch.
    """

    depth: int
    quality: float
    parameters: int
    checkpoint_bytes: int
    flops: int
    latency: Latency
    batch_latency: Latency
    peak_bytes: int


class Profile(Results, kind="profile"):
    """Depths 1..L of one model on one machine.

    `profile["latency"]` is an array over depths, `profile.at(3)` all that is known of one depth.

    >>> found = ed.profile(model, test, repeats=2, progress=False)
    >>> found.metric, found.at(1).parameters < found.at(3).parameters
    ('accuracy', True)
    >>> found.choose(bytes=found.at(2).checkpoint_bytes) <= 2  # the best depth within so many bytes
    True
    """

    @classmethod
    def of(
        cls, depths: Sequence[DepthProfile], *, metric: str, batch_size: int, **facts: Any
    ) -> Profile:
        """From what was measured at depths 1, 2, ..., L; facts are those of `provenance`."""
        about = provenance(depth=len(depths), metric=metric, batch_size=batch_size, **facts)
        found = cls(results=_measurements(depths, metric, batch_size), about=about)
        return found.with_results(_tradeoff(found))

    @property
    def metric(self) -> str:
        """What quality is: "accuracy" or "agreement" (with the full model), where more is better,
        or "perplexity", "mse" or "error", where less is."""
        return str(self.about["metric"])

    @property
    def batch_size(self) -> int:
        """Rows of the batch that was timed."""
        return int(self.about["batch_size"])

    @property
    def depths(self) -> tuple[DepthProfile, ...]:
        """Every depth from 1 on."""
        return tuple(self.at(depth) for depth in range(1, self.depth + 1))

    def at(self, depth: int) -> DepthProfile:
        """All that is known of one depth."""
        if not 1 <= depth <= self.depth:
            raise SettingError(f"depth {depth}, but this profile has depths 1 to {self.depth}")
        numbers: dict[str, Any] = {
            name: self[name][depth - 1].item() for name in ("quality", *_COUNTS)
        }
        for name in _LATENCIES:
            arrays = self.result(name).arrays
            parts = {part: float(arrays[key][depth - 1]) for part, key in _PARTS.items()}
            numbers[name] = Latency(**parts)
        return DepthProfile(depth=depth, **numbers)

    @property
    def more_is_better(self) -> bool:
        return self.metric in _MORE_IS_BETTER

    def drop(self, depth: int) -> float:
        """How much worse than the full model: points of accuracy lost, or error gained."""
        change = self.at(self.depth).quality - self.at(depth).quality
        return change if self.more_is_better else -change

    def choose(
        self,
        *,
        latency_ms: Number | None = None,
        batch_latency_ms: Number | None = None,
        bytes: Number | None = None,  # noqa: A002 - what the user limits
        max_drop: Number | None = None,
        min_accuracy: Number | None = None,
    ) -> int:
        """The depth for a budget.

        latency_ms: of one row; batch_latency_ms: of a batch; bytes: of the checkpoint; max_drop:
        quality lost against the full model, in units of the metric (.01 is one point of accuracy).

        With a demand on quality, the shallowest depth that meets everything; with limits on cost
        alone, the one of best quality among those within them.
        """
        if min_accuracy is not None and self.metric != "accuracy":
            raise SettingError(
                f"min_accuracy={min_accuracy}, but this profile measured {self.metric}; use "
                "max_drop, or profile a classifier on data with labels"
            )
        limits: dict[str, tuple[Number, Callable[[DepthProfile], Number], str]] = {}

        def limit(
            name: str, most: Number | None, value: Callable[[DepthProfile], Number], unit: str
        ) -> None:
            if most is not None:
                limits[f"{name}={most:g}"] = (most, value, unit)

        limit("latency_ms", latency_ms, lambda d: d.latency.median, "ms")
        limit("batch_latency_ms", batch_latency_ms, lambda d: d.batch_latency.median, "ms")
        limit("bytes", bytes, lambda d: d.checkpoint_bytes, "bytes")
        limit("max_drop", max_drop, lambda d: self.drop(d.depth), f"of {self.metric}")
        if min_accuracy is not None:
            limits[f"min_accuracy={min_accuracy:g}"] = (
                1 - min_accuracy,
                lambda d: 1 - d.quality,
                "of error",
            )
        fits = {
            name: {d.depth for d in self.depths if value(d) <= most}
            for name, (most, value, _) in limits.items()
        }
        every = set(range(1, len(self.depths) + 1))
        common = sorted(every.intersection(*fits.values()))
        if not common:
            raise BudgetError(self._why_none(limits, fits))
        if max_drop is not None or min_accuracy is not None:
            return common[0]
        sign = 1 if self.more_is_better else -1
        return max(common, key=lambda k: (sign * self.at(k).quality, -k))

    def _why_none(
        self,
        limits: Mapping[str, tuple[Number, Callable[[DepthProfile], Number], str]],
        fits: Mapping[str, set[int]],
    ) -> str:
        for name, depths in fits.items():
            if not depths:
                _, value, unit = limits[name]
                best = min(self.depths, key=value)
                reached = self._reached(name, best, value)
                return (
                    f"no depth of {self.model} meets {name}: the best is {reached} at depth "
                    f"{best.depth}; loosen it to that{'' if unit != 'ms' else ', use a smaller '}"
                    f"{'' if unit != 'ms' else 'batch or a faster machine'}"
                )
        each = "; ".join(f"{name} by depths {_ranges(depths)}" for name, depths in fits.items())
        return f"no depth of {self.model} meets everything at once: {each}; loosen one of them"

    def _reached(
        self, name: str, best: DepthProfile, value: Callable[[DepthProfile], Number]
    ) -> str:
        if name.startswith("min_accuracy"):
            return f"{best.quality:.4g}"
        found = value(best)
        return f"{found:,.0f}" if name.startswith("bytes") else f"{found:.4g}"

    def pareto(self) -> list[int]:
        """Depths no other depth beats in both quality and latency of a batch."""
        sign = 1 if self.more_is_better else -1

        def beaten(d: DepthProfile) -> bool:
            return any(
                sign * o.quality >= sign * d.quality
                and o.batch_latency.median <= d.batch_latency.median
                and (sign * o.quality > sign * d.quality or o.depth < d.depth)
                for o in self.depths
                if o.depth != d.depth
            )

        return [d.depth for d in self.depths if not beaten(d)]


_COUNTS = ("parameters", "checkpoint_bytes", "flops", "peak_bytes")
_LATENCIES = ("latency", "batch_latency")
_PARTS = {"median": "value", "low": "value_low", "high": "value_high"}
_MORE_IS_BETTER = ("accuracy", "agreement")


def _measurements(
    depths: Sequence[DepthProfile], metric: str, batch_size: int
) -> dict[str, Result]:
    axis = [d.depth for d in depths]

    def cost(name: str, title: str, about: str, unit: str) -> Result:
        values = [getattr(d, name) for d in depths]
        words: dict[str, Any] = {"title": title, "about": about, "unit": unit}
        return curve(name, axis, values, better="lower", section="cost", **words)

    def times(name: str, title: str, what: str) -> Result:
        found = [getattr(d, name) for d in depths]
        return curve(
            name,
            axis,
            [latency.median for latency in found],
            low=[latency.low for latency in found],
            high=[latency.high for latency in found],
            title=title,
            about=f"Median time of {what} through the plain model cut to this depth; the band is "
            "the middle half of the calls.",
            unit="ms",
            better="lower",
            section="cost",
        )

    more = metric in _MORE_IS_BETTER
    quality = curve(
        "quality",
        axis,
        [d.quality for d in depths],
        labels={"value": metric},
        title=metric.capitalize(),
        about=f"The {metric} of the readout of this depth.",
        unit="share" if more else "",
        better="higher" if more else "lower",
        section="prediction",
    )
    return named(
        quality,
        times("batch_latency", "Time of a batch", f"a batch of {batch_size}"),
        times("latency", "Time of one row", "one row"),
        cost("parameters", "Parameters", "What is left of them in the cut model.", "count"),
        cost("checkpoint_bytes", "Size", "Bytes of the saved weights.", "bytes"),
        cost("flops", "Arithmetic", "Operations for one row.", "FLOP"),
        cost("peak_bytes", "Memory", "Weights and intermediate results of a batch.", "bytes"),
    )


def _tradeoff(found: Profile) -> Result:
    front = set(found.pareto())
    quality = found.result("quality")
    return Result(
        name="tradeoff",
        kind="scatter",
        axis="milliseconds",
        series=("quality",),
        arrays={
            "milliseconds": found["batch_latency"],
            "quality": found["quality"],
            "text": np.array([str(d) for d in range(1, found.depth + 1)]),
            "front": np.array([d in front for d in range(1, found.depth + 1)]),
        },
        labels={
            "milliseconds": f"time of a batch of {found.batch_size} (ms)",
            "quality": found.metric,
        },
        title="Quality against time",
        about="Every depth by its number; the line joins those that no other beats in both.",
        unit=quality.unit,
        section="cost",
        note=f"no other depth beats {_ranges(front)} in both quality and time of a batch",
    )


@torch.no_grad()
def profile(
    model: nn.Module | ResidualStream,
    data: Any,
    *,
    batch_size: int = 32,
    repeats: int = 10,
    progress: bool = True,
    **options: Any,
) -> Profile:
    """Measure every depth: quality on the data, and the cost of the plain model cut to it.

    batch_size: of the timed batches, and of data that does not come in batches.
    repeats: timed calls a depth, after a warm one; depths take turns, so that a busy moment of the
    machine does not fall on one of them.

    >>> found = ed.profile(model, test, repeats=2, progress=False)
    >>> depth = found.choose(max_drop=0.5)  # the shallowest that loses at most half
    >>> ed.at_depth(model, depth).config.num_hidden_layers == depth
    True
    """
    if batch_size < 1 or repeats < 1:
        raise SettingError(f"batch_size={batch_size}, repeats={repeats}; use 1 or more for both")
    stream, started = as_stream(model, **options), time.perf_counter()
    first: Mapping[str, Any] | None = None
    with evaluating(unwrapped(stream.model)):
        totals = None
        size = size_for(data, batch_size)
        for batch in Feed(data, stream, batch_size=size).shown("quality", progress):
            first = batch if first is None else first
            if totals is None:
                totals = quality_of(stream, batch)
            watch(totals, stream.observe(batch))
        assert first is not None
        assert totals is not None
        inputs = {k: v for k, v in first.items() if k != "labels"}
        one, many = first_rows(stream, inputs, 1), first_rows(stream, inputs, batch_size)
        # Tensors are shared, so all depths together need little more memory than the model.
        cut = [
            as_stream(unwrapped(stream.truncated(k, share=True)).eval(), **stream.options)
            for k in range(1, stream.depth + 1)
        ]
        single = _latencies(cut, one, repeats, progress)
        batched = _latencies(cut, many, repeats, progress)
        depths = tuple(
            DepthProfile(
                depth=k,
                quality=totals.quality(k),
                parameters=parameter_count(small.model),
                checkpoint_bytes=checkpoint_bytes(small.model),
                flops=flops(_run(small, one)),
                latency=single[k - 1],
                batch_latency=batched[k - 1],
                peak_bytes=peak_bytes(_run(small, many), small),
            )
            for k, small in enumerate(cut, start=1)
        )
    return Profile.of(
        depths,
        metric=totals.metric,
        batch_size=batch_size,
        model=stream.name,
        task=stream.task,
        samples=totals.samples,
        seconds=time.perf_counter() - started,
    )


def _run(stream: ResidualStream, batch: Mapping[str, Any]) -> Callable[[], Any]:
    arguments = stream.arguments(batch, None)
    return lambda: stream.call(arguments)


def _latencies(
    cut: list[ResidualStream], batch: Mapping[str, Any], repeats: int, progress: bool
) -> list[Latency]:
    runs = [_run(small, batch) for small in cut]
    for run in runs:
        run()
    times = torch.zeros(len(cut), repeats, dtype=torch.float64)
    for turn in shown(range(repeats), "latency", total=repeats, enabled=progress):
        for k, (small, run) in enumerate(zip(cut, runs, strict=True)):
            times[k, turn] = 1000 * seconds(run, small)[0]
    quartiles = torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64)
    low, median, high = times.quantile(quartiles, dim=1).tolist()
    return [Latency(median=m, low=a, high=b) for a, m, b in zip(low, median, high, strict=True)]


def _ranges(depths: set[int]) -> str:
    low, high = min(depths), max(depths)
    whole = len(depths) == high - low + 1
    return f"{low}-{high}" if whole and low < high else ", ".join(map(str, sorted(depths)))
