"""What each depth is worth and what it costs, and the depth for a budget."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import nn

from everydepth.data.feeding import Feed, first_rows
from everydepth.errors import BudgetError, DataError, SettingError
from everydepth.exits.measure import (
    checkpoint_bytes,
    flops,
    parameter_count,
    peak_bytes,
    seconds,
)
from everydepth.exits.quality import quality_of, watch
from everydepth.stream import ResidualStream, as_stream, evaluating, unwrapped

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMAT = 1

Number = float | int


@dataclass(frozen=True, kw_only=True)
class Latency:
    """Milliseconds of warm calls: the median, and the quartiles as its spread."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.3g} ({self.low:.2g}-{self.high:.2g})"


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


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Depths 1..L of one model on one machine.

    metric: what `quality` is: "accuracy" or "agreement" (with the full model), where more is
    better, or "perplexity", "mse" or "error", where less is.

    >>> found = ed.profile(model, test, repeats=2, progress=False)
    >>> found.metric, found[1].parameters < found[3].parameters
    ('accuracy', True)
    >>> found.choose(bytes=found[2].checkpoint_bytes) <= 2  # the best depth within so many bytes
    True
    """

    model: str
    metric: str
    batch_size: int
    samples: int
    depths: tuple[DepthProfile, ...]

    @property
    def more_is_better(self) -> bool:
        return self.metric in ("accuracy", "agreement")

    def __getitem__(self, depth: int) -> DepthProfile:
        if not 1 <= depth <= len(self.depths):
            raise SettingError(
                f"depth {depth}, but this profile has depths 1 to {len(self.depths)}"
            )
        return self.depths[depth - 1]

    def drop(self, depth: int) -> float:
        """How much worse than the full model: points of accuracy lost, or error gained."""
        change = self[len(self.depths)].quality - self[depth].quality
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
        return max(common, key=lambda k: (sign * self[k].quality, -k))

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

    def table(self) -> Table:
        table = Table(box=None, pad_edge=False, title_justify="left")
        table.title = f"{self.model}, {self.samples:,} samples; bold: unbeaten"
        for head in self._heads():
            table.add_column(head, justify="right", no_wrap=True)
        front = set(self.pareto())
        for d in self.depths:
            table.add_row(*self._cells(d), style="bold" if d.depth in front else "")
        return table

    def markdown(self) -> str:
        """The table for a model card."""
        heads = self._heads()
        rows = [heads, ["---:"] * len(heads), *(self._cells(d) for d in self.depths)]
        return "\n".join(f"| {' | '.join(row)} |" for row in rows)

    def _heads(self) -> list[str]:
        many = f"ms ({self.batch_size} rows)"
        return ["depth", self.metric, "weights", "size", "FLOPs", "ms (1 row)", many, "memory"]

    def _cells(self, d: DepthProfile) -> list[str]:
        return [
            str(d.depth),
            f"{d.quality:.4f}" if self.more_is_better else f"{d.quality:.4g}",
            _short(d.parameters),
            f"{_short(d.checkpoint_bytes)}B",
            _short(d.flops),
            str(d.latency),
            str(d.batch_latency),
            f"{_short(d.peak_bytes)}B",
        ]

    def figure(self) -> Figure:
        """Quality against latency and against checkpoint size; the line joins what is unbeaten."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=(10, 4.2), layout="constrained")
        quality = [d.quality for d in self.depths]
        front = self.pareto()
        latency, size = figure.subplots(1, 2, sharey=True)
        times = [d.batch_latency.median for d in self.depths]
        spread = [
            [d.batch_latency.median - d.batch_latency.low for d in self.depths],
            [d.batch_latency.high - d.batch_latency.median for d in self.depths],
        ]
        latency.errorbar(times, quality, xerr=spread, fmt="none", ecolor="0.8", zorder=1)
        sizes = [d.checkpoint_bytes / 1e6 for d in self.depths]
        for axes, x in ((latency, times), (size, sizes)):
            axes.plot(
                [x[k - 1] for k in front], [quality[k - 1] for k in front], color="tab:blue", lw=1
            )
            beaten = [k for k in range(1, len(x) + 1) if k not in front]
            for depths, colour in ((front, "tab:blue"), (beaten, "0.6")):
                axes.scatter(
                    [x[k - 1] for k in depths], [quality[k - 1] for k in depths], color=colour
                )
            for d, value in zip(self.depths, x, strict=True):
                axes.annotate(
                    str(d.depth),
                    (value, d.quality),
                    textcoords="offset points",
                    xytext=(4, -11),
                    fontsize=8,
                )
            axes.grid(alpha=0.3)
        if self.metric == "perplexity":
            latency.set_yscale("log")
        latency.set_xlabel(f"milliseconds for a batch of {self.batch_size}")
        latency.set_ylabel(self.metric)
        size.set_xlabel("checkpoint, MB")
        figure.suptitle(f"{self.model}: every depth (blue: unbeaten in quality and latency)")
        return figure

    def to_json(self) -> str:
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=2)

    def save(self, path: str | Path) -> None:
        Path(path).write_text(self.to_json() + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Profile:
        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
            if content.pop("format") != FORMAT:
                raise DataError(f"{path} has another format than {FORMAT}; profile the model again")
            depths = tuple(
                DepthProfile(
                    **d
                    | {"latency": Latency(**d["latency"])}
                    | {"batch_latency": Latency(**d["batch_latency"])}
                )
                for d in content.pop("depths")
            )
            return cls(depths=depths, **content)
        except (OSError, KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
            raise DataError(
                f"{path} is not a profile written by Profile.save ({error}); profile again"
            ) from error


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

    repeats: timed calls a depth, after a warm one; depths take turns, so that a busy moment of the
    machine does not fall on one of them.

    >>> found = ed.profile(model, test, repeats=2, progress=False)
    >>> depth = found.choose(max_drop=0.5)  # the shallowest that loses at most half
    >>> ed.at_depth(model, depth).config.num_hidden_layers == depth
    True
    """
    if batch_size < 1 or repeats < 1:
        raise SettingError(f"batch_size={batch_size}, repeats={repeats}; use 1 or more for both")
    stream = as_stream(model, **options)
    first: Mapping[str, Any] | None = None
    with evaluating(unwrapped(stream.model)):
        totals = None
        for batch in Feed(data, stream, batch_size=batch_size).shown("quality", progress):
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
    return Profile(
        model=stream.name,
        metric=totals.metric,
        batch_size=batch_size,
        samples=totals.samples,
        depths=depths,
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
    console = Console(stderr=True)
    hidden = not (progress and console.is_terminal)
    rounds = track(range(repeats), "latency", console=console, disable=hidden, transient=True)
    for turn in rounds:
        for k, (small, run) in enumerate(zip(cut, runs, strict=True)):
            times[k, turn] = 1000 * seconds(run, small)[0]
    quartiles = torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64)
    low, median, high = times.quantile(quartiles, dim=1).tolist()
    return [Latency(median=m, low=a, high=b) for a, m, b in zip(low, median, high, strict=True)]


def _ranges(depths: set[int]) -> str:
    low, high = min(depths), max(depths)
    whole = len(depths) == high - low + 1
    return f"{low}-{high}" if whole and low < high else ", ".join(map(str, sorted(depths)))


def _short(count: Number) -> str:
    """Three digits and a prefix: 1,234,567 is 1.23 M."""
    for prefix in ("", "k", "M", "G"):
        if count < 999.5:
            return f"{count:.3g} {prefix}"
        count /= 1000
    return f"{count:.3g} T"
