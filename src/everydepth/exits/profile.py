"""Profile the quality and cost of every depth, and choose one for a budget."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch import nn

from everydepth.config import Count, checked
from everydepth.errors import BudgetError, SettingError
from everydepth.exits.driving import (
    BlockTimes,
    counted_by_depth,
    decoding_times,
    times_by_depth,
)
from everydepth.exits.generation.rerun import has_slots
from everydepth.exits.measure import checkpoint_bytes, parameter_count, seconds
from everydepth.exits.quality import Totals, affordable_share, quality_of, readout_cost, watch
from everydepth.progress import say, timed
from everydepth.results import Fact, Result, Results, curve, named, provenance
from everydepth.stream import (
    Depths,
    ResidualStream,
    States,
    as_stream,
    chosen_depths,
    evaluating,
    unwrapped,
)
from everydepth.stream.feed import Feed, first_rows, size_for
from everydepth.stream.tree import spans
from everydepth.stream.words import predicts_words

Number = float | int


@dataclass(frozen=True, kw_only=True)
class Latency:
    """Milliseconds of warm calls: the median, and the lower and upper quartile."""

    median: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class DepthProfile:
    """The quality of one depth's readout, and the cost of the model cut to that depth.

    checkpoint_bytes: of the tensors in its safetensors file. flops: for one row. latency,
    batch_latency: for one row, and for a batch. peak_bytes: weights and activations of a batch.
    quality_band: a standard error below and above, where inner depths were read at some tokens.
    """

    depth: int
    quality: float
    parameters: int
    checkpoint_bytes: int
    flops: int
    latency: Latency
    batch_latency: Latency
    peak_bytes: int
    quality_band: tuple[float, float] | None = None


class Profile(Results, kind="profile"):
    """Depths 1..L of one model on one machine.

    `profile["latency"]` is an array over depths; `profile.at(3)` has everything about one depth.

    >>> found = ed.profile(model, test, repeats=2, progress=False)
    >>> found.metric, found.at(1).parameters < found.at(3).parameters
    ('accuracy', True)
    >>> found.choose(bytes=found.at(2).checkpoint_bytes) <= 2  # the best within these bytes
    True
    """

    metric = Fact(str)
    """The measure of quality: "accuracy" or "agreement" (with the full model), where higher is
    better, or "perplexity", "mse" or "error", where lower is better."""
    batch_size = Fact(int)
    """The number of rows in the timed batch."""

    @classmethod
    def of(
        cls,
        depths: Sequence[DepthProfile],
        *,
        metric: str,
        batch_size: int,
        note: str | None = None,
        **facts: Any,
    ) -> Profile:
        """From measurements of some depths, including the last.

        note: on the quality. facts: for `provenance`.
        """
        last = depths[-1].depth
        about = provenance(depth=last, metric=metric, batch_size=batch_size, **facts)
        found = cls(results=_measurements(depths, metric, batch_size, note), about=about)
        return found.with_results(_tradeoff(found))

    @property
    def depths(self) -> tuple[DepthProfile, ...]:
        """All measured depths."""
        return tuple(self.at(depth) for depth in self._measured)

    @property
    def _measured(self) -> list[int]:
        return [int(depth) for depth in self.result("quality").arrays["depth"]]

    @checked
    def at(self, depth: int) -> DepthProfile:
        """All measurements of one depth."""
        if depth not in self._measured:
            raise SettingError(
                f"depth {depth}, but this profile has depths {spans(self._measured)}"
            )
        place = self._measured.index(depth)
        numbers: dict[str, Any] = {name: self[name][place].item() for name in ("quality", *_COUNTS)}
        for name in _LATENCIES:
            arrays = self.result(name).arrays
            parts = {part: float(arrays[key][place]) for part, key in _PARTS.items()}
            numbers[name] = Latency(**parts)
        known = self.result("quality").arrays
        if "value_low" in known:
            band = float(known["value_low"][place]), float(known["value_high"][place])
            numbers["quality_band"] = band
        return DepthProfile(depth=depth, **numbers)

    @property
    def more_is_better(self) -> bool:
        return self.metric in _MORE_IS_BETTER

    @checked
    def drop(self, depth: int) -> float:
        """How much worse a depth is than the full model, in units of the metric."""
        change = self.at(self.depth).quality - self.at(depth).quality
        return change if self.more_is_better else -change

    @checked
    def choose(
        self,
        *,
        latency_ms: Number | None = None,
        batch_latency_ms: Number | None = None,
        bytes: Number | None = None,  # noqa: A002 - what the user limits
        max_drop: Number | None = None,
        min_accuracy: Number | None = None,
    ) -> int:
        """Choose the depth for a budget.

        With a limit on quality (`max_drop`, `min_accuracy`), it is the shallowest depth within all
        limits; otherwise, it is the one with the best quality.

        latency_ms, batch_latency_ms: for one row, and for a batch.
        bytes: of the checkpoint.
        max_drop: largest loss of quality relative to the full model, in units of the metric (0.01
            is one percentage point of accuracy).
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
        every = set(self._measured)
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
                    f"{best.depth}; relax it to that"
                    f"{', or use a smaller batch or a faster machine' if unit == 'ms' else ''}"
                )
        each = "; ".join(
            f"{name} by depths {spans(sorted(depths))}" for name, depths in fits.items()
        )
        return f"no depth of {self.model} meets all limits: {each}; relax one of them"

    def _reached(
        self, name: str, best: DepthProfile, value: Callable[[DepthProfile], Number]
    ) -> str:
        if name.startswith("min_accuracy"):
            return f"{best.quality:.4g}"
        found = value(best)
        return f"{found:,.0f}" if name.startswith("bytes") else f"{found:.4g}"

    def pareto(self) -> list[int]:
        """Depths that no other depth beats in both quality and batch latency."""
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
    depths: Sequence[DepthProfile], metric: str, batch_size: int, note: str | None
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
            about=f"Time of {what} in the model cut to this depth: the sum over its blocks and its "
            "readout, as the median over passes; the band shows the quartiles.",
            unit="ms",
            better="lower",
            section="cost",
        )

    more = metric in _MORE_IS_BETTER
    bands = [d.quality_band for d in depths if d.quality_band is not None]
    quality = curve(
        "quality",
        axis,
        [d.quality for d in depths],
        low=[low for low, _ in bands] or None,
        high=[high for _, high in bands] or None,
        labels={"value": metric},
        title=metric.capitalize(),
        about=f"The {metric} of this depth's readout"
        + (", with the standard error of drawing tokens." if bands else "."),
        unit="share" if more else metric,
        better="higher" if more else "lower",
        section="prediction",
        note=note,
    )
    if bands:
        errors = np.array([(high - low) / 2 for low, high in bands])
        quality = replace(quality, arrays={**quality.arrays, "standard_error": errors})
    return named(
        quality,
        times("batch_latency", "Time of a batch", f"a batch of {batch_size}"),
        times("latency", "Time of one row", "one row"),
        cost("parameters", "Parameters", "Parameters of the cut model.", "count"),
        cost("checkpoint_bytes", "Size", "Bytes of the saved weights.", "bytes"),
        cost("flops", "Arithmetic", "Operations for one row.", "FLOP"),
        cost("peak_bytes", "Memory", "Weights and activations of a batch.", "bytes"),
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
            "text": np.array([str(d.depth) for d in found.depths]),
            "front": np.array([d.depth in front for d in found.depths]),
        },
        labels={
            "milliseconds": f"time of a batch of {found.batch_size} (ms)",
            "quality": found.metric,
        },
        title="Quality against time",
        about="Every depth; the line connects those that no other depth beats in both.",
        unit=quality.unit,
        section="cost",
        note=f"no other depth beats {spans(sorted(front))} in both quality and batch latency",
    )


@checked
@torch.no_grad()
def profile(
    model: nn.Module | ResidualStream,
    data: Any,
    *,
    batch_size: Count = 32,
    batch_sizes: Sequence[int] = (),
    depths: Depths = None,
    repeats: Count | None = None,
    tokens: Literal["some", "all"] = "some",
    progress: bool = True,
    **options: Any,
) -> Profile:
    """Measure every depth: its quality on the data, and the cost of the model cut to it.

    This takes only a few passes of the full model: one for the quality of all depths, one to count
    operations and memory, and `repeats` in which each block and the readout are timed and added up;
    for a slow model the counting pass is one of them. As a check, cut models are timed at two or
    three depths; `about["checked"]` has both times.

    For a language model, latencies are for processing a prompt, and "decode" has the tokens per
    second generated after it.

    batch_size: rows to time together (at most those of the first batch); also the batch size for
        data that has none.
    batch_sizes: more sizes to time, reported in "latency_by_batch".
    depths: depths to report: numbers, "every 2nd", or a slice such as "20:"; always includes the
        last.
    repeats: timed passes; by default 2 to 10, as many as fit in two seconds.
    tokens: with a large vocabulary, "some" reads the depths below the last at randomly drawn tokens
        (fixed seed, the same at all depths): as many as make all readouts cost no more than the
        blocks. A regression on the last depth's loss, known at every token, gives the quality; its
        band is the standard error. "all" reads every depth at every token.

    >>> found = ed.profile(model, test, repeats=2, progress=False)
    >>> depth = found.choose(max_drop=0.5)  # the shallowest that loses at most 50 points
    >>> ed.at_depth(model, depth).config.num_hidden_layers == depth
    True
    """
    stream, started = as_stream(model, **options), time.perf_counter()
    at = chosen_depths(stream, depths, lowest=1)
    share = None
    if tokens == "some" and predicts_words(stream):
        share = affordable_share(stream, len(at))
    first: Mapping[str, Any] | None = None
    took, largest = 0.0, 0
    with evaluating(stream):
        totals = None
        for batch in Feed(data, stream, batch_size=size_for(data, batch_size)).shown(
            "quality", progress
        ):
            first = batch if first is None else first
            if totals is None:
                totals = quality_of(stream, batch)
            passed, states = seconds(partial(observed, totals, stream, batch), stream)
            if states.output is None:  # timed passes read out at the end
                passed *= 1 + readout_cost(stream)
            if stream.rows(batch) >= largest:  # the last batch may have fewer
                took, largest = passed, stream.rows(batch)
            watch(totals, states, at, share)
        assert first is not None
        assert totals is not None
        rows = stream.rows(first)
        for size in batch_sizes:
            if not 1 <= size <= rows:
                raise SettingError(
                    f"batch size {size}, but the first batch has {rows} rows; use 1 to {rows}, or "
                    f"pass more data and batch_size={size}"
                )
        inputs = {k: v for k, v in first.items() if k != "labels"}
        size = min(batch_size, rows)
        many = first_rows(stream, inputs, size)
        one = first_rows(stream, inputs, 1)
        took *= size / largest
        turns = max(2, min(10, int(2 / max(took, 1e-9)))) if repeats is None else repeats
        slow = repeats is None and turns == 2
        shares = (0.2, 0.6) if slow else (0.25, 0.5, 0.75)
        tries = max(turns - 1, 1)  # a large model needs no warm-up; a small one gets several turns
        # One row and its decoding cost little next to a batch.
        passes = 1 + turns - slow + tries * sum(shares) + turns * sum(batch_sizes) / size
        _announce(stream, took, passes, progress)
        with timed("timing", passes, enabled=progress) as done:
            counted = counted_by_depth(stream, many)
            done(1)
            before = counted.seconds if slow else None
            batched = times_by_depth(stream, many, turns - slow, before, done=done)
            checked = _checked(stream, many, batched, tries, shares, done)
            batched = batched.corrected(checked)
            single = batched if size == 1 else times_by_depth(stream, one, turns).corrected(checked)
            sizes: dict[int, BlockTimes] = {}
            for n in batch_sizes:
                some = first_rows(stream, inputs, n)
                sizes[n] = times_by_depth(stream, some, turns).corrected(checked)
                done(turns * n / size)
        found = tuple(
            DepthProfile(
                depth=k,
                quality=totals.quality(k),
                quality_band=totals.band(k) if totals.drawn else None,
                parameters=parameter_count(small),
                checkpoint_bytes=checkpoint_bytes(small),
                flops=counted.flops(k) // size,
                latency=Latency(**single.quartiles(k)),
                batch_latency=Latency(**batched.quartiles(k)),
                peak_bytes=counted.bytes(k, small),
            )
            # Tensors are shared, so a cut model takes little memory.
            for k, small in ((k, unwrapped(stream.truncated(k, share=True))) for k in at)
        )
        more = [_by_batch(sizes, at)] if sizes else []
        # Without slots for its tokens, a block cannot be timed separately while decoding.
        writes = stream.task == "causal_lm" and "input_ids" in one
        if writes and has_slots(stream, one["input_ids"]):
            more.append(_decoding(decoding_times(stream, one, turns), at))
    return Profile.of(
        found,
        metric=totals.metric,
        batch_size=size,
        # The length of a prompt, for the latencies of a language model.
        row_tokens=int(one["input_ids"].shape[1]) if writes else None,
        model=stream.name,
        task=stream.task,
        samples=totals.samples,
        seconds=time.perf_counter() - started,
        checked=checked,
        note=_drawn(totals) if totals.drawn else None,
    ).with_results(*more)


def observed(totals: Totals, stream: ResidualStream, batch: Mapping[str, Any]) -> States:
    """The states of a batch; without logits if the quality is computed in chunks of words."""
    own = not (totals.metric == "perplexity" and predicts_words(stream))
    return stream.observe(batch, logits=own)


def _drawn(totals: Totals) -> str:
    return (
        f"depths below the last were read at {totals.drawn:,} of {totals.count:,} tokens, drawn at "
        "random; ± is the standard error; tokens='all' reads every token"
    )


def _announce(stream: ResidualStream, took: float, passes: float, progress: bool) -> None:
    if progress and took * passes > 5:
        say(
            f"profile of {stream.name}: about {passes:.1f} more passes of {took:.1f} s each, "
            f"{took * passes:,.0f} s in total; a smaller batch_size= or repeats=1 is faster"
        )


def _checked(
    stream: ResidualStream,
    batch: Mapping[str, Any],
    times: BlockTimes,
    tries: int,
    shares: Sequence[float],
    done: Callable[[float], None],
) -> dict[str, dict[str, float]]:
    """Milliseconds of cut models at some depths, and the sums of blocks for comparison."""
    depths = sorted({max(1, round(share * stream.depth)) for share in shares})
    found: dict[str, dict[str, float]] = {}
    for k in depths:
        small = as_stream(unwrapped(stream.truncated(k, share=True)).eval(), **stream.options)
        arguments = small.arguments(batch, None)
        taken = [seconds(partial(small.call, arguments), small)[0] for _ in range(tries)]
        done(tries * k / stream.depth)
        found[str(k)] = {
            "timed_ms": 1000 * min(taken),
            "added_ms": 1000 * times.fastest(k),
        }
    return found


def _by_batch(sizes: Mapping[int, BlockTimes], at: Sequence[int]) -> Result:
    return Result(
        name="latency_by_batch",
        kind="matrix",
        series=("value",),
        arrays={
            "depth": np.array(at),
            "columns": np.array(list(sizes)),
            "value": np.array([[t.quartiles(k)["median"] for t in sizes.values()] for k in at]),
        },
        labels={"depth": "depth (blocks)", "columns": "batch size", "value": "time (ms)"},
        title="Time by batch size",
        about="Median time of a batch of this size.",
        note="table('latency_by_batch') has the times",
        unit="ms",
        better="lower",
        section="cost",
    )


def _decoding(times: BlockTimes, at: Sequence[int]) -> Result:
    return curve(
        "decode",
        list(at),
        [1000 / times.quartiles(k)["median"] for k in at],
        title="Decoding",
        about="Tokens per second, for one row, after a prompt as long as the data's rows.",
        unit="tokens/s",
        better="higher",
        section="cost",
    )
