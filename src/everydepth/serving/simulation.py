"""Capacity without a cluster: the same scheduler and governor, on a clock that is only computed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from everydepth.errors import DataError, SettingError
from everydepth.exits.profile import Profile
from everydepth.results import Results, named, provenance, scalars
from everydepth.serving.costs import Price
from everydepth.serving.governor import Governor
from everydepth.serving.request import Request, Ticket
from everydepth.serving.scheduler import Scheduler
from everydepth.serving.shared import CHUNK, Row, Work
from everydepth.stream import ResidualStream


@dataclass(frozen=True, kw_only=True)
class Arrival:
    """A request of the load: when it comes (seconds), how long it is, and how deep if it says."""

    at: float | int
    prompt: int
    tokens: int
    depth: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.at < float("inf") or self.prompt < 1 or self.tokens < 1:
            raise SettingError(
                f"an arrival at {self.at} with {self.prompt} + {self.tokens} tokens; use a time of "
                "0 or later, and 1 token or more of each"
            )


def read_load(file: str | Path) -> list[Arrival]:
    """A JSON list of `{"at": 0.5, "prompt": 20, "tokens": 64, "depth": 12}`, depth optional."""
    try:
        found: Any = json.loads(Path(file).read_text(encoding="utf-8"))
        return sorted((Arrival(**one) for one in found), key=lambda arrival: arrival.at)
    except OSError as error:
        raise DataError(f"{file} cannot be read ({error.strerror})") from error
    except (ValueError, TypeError, RecursionError) as error:
        raise DataError(
            f"{file} is not a load ({error}); write a JSON list of objects with at (seconds), "
            "prompt and tokens (counts), and depth if a request says it"
        ) from error


class _Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class _Pretended:
    """A batch that says tokens without computing them, and moves the clock by their price."""

    def __init__(self, price: Price, clock: _Clock) -> None:
        self.rows: list[Row] = []
        self.work = Work()
        self._price, self._clock = price, clock

    def join(self, row: Row) -> None:
        self.rows.append(row)

    def leave(self, row: Row) -> None:
        self.rows.remove(row)

    def clear(self) -> None:
        self.rows.clear()

    def round(self) -> list[tuple[Row, list[int]]]:
        calls: dict[int, int] = {}
        passes = readouts = 0
        said: list[tuple[Row, list[int]]] = []
        for row in self.rows:
            count = min(row.unread, CHUNK)
            row.unread -= count
            top = row.course.top
            calls[count] = max(calls.get(count, 0), top)
            passes += top * count
            if row.unread == 0:
                readouts += 1
                row.unread = 1
                said.append((row, row.take([0])))
        self.work = Work(sum(calls.values()), passes, readouts)
        self._clock.now += self._price.of(self.work)
        for row, _ in said:
            if row.done:
                self.leave(row)
        return said


def price_of(profile: Profile) -> Price:
    """Prices from a profile: how latency grows with depth, for one row and for a batch."""
    depths = np.arange(1, profile.depth + 1)
    one = np.array([profile.at(int(d)).latency.median for d in depths]) / 1000
    many = np.array([profile.at(int(d)).batch_latency.median for d in depths]) / 1000
    if len(depths) < 2 or profile.batch_size < 2:
        return Price(call=float(one[-1] / len(depths)), token=0.0, readout=0.0)
    slope, base = np.polyfit(depths, one, 1)
    steep, _ = np.polyfit(depths, many, 1)
    token = max(0.0, float(steep - slope) / (profile.batch_size - 1))
    return Price(call=max(0.0, float(slope) - token), token=token, readout=max(0.0, float(base)))


def simulate(
    stream: ResidualStream,
    load: Sequence[Arrival],
    price: Price,
    *,
    governor: Governor | None = None,
    places: int = 16,
    quality: Sequence[float] | None = None,
) -> LoadResult:
    """What a load would see: latencies, depths, and quality if it is known for depths 1..L.

    >>> from everydepth.serving import Arrival, Price, simulate
    >>> load = [Arrival(at=i / 10, prompt=8, tokens=16) for i in range(20)]
    >>> price = Price(call=1e-3, token=1e-4, readout=1e-4)
    >>> found = simulate(ed.as_stream(llama), load, price).numbers
    >>> found["p50_seconds"] <= found["p95_seconds"], found["requests"]
    (True, 20.0)
    """
    if not load:
        raise SettingError("a load without a request; give at least one arrival")
    clock = _Clock()
    scheduler = Scheduler(
        stream,
        governor=governor,
        places=places,
        queue=len(load),
        batch=_Pretended(price, clock),
        clock=clock,
    )
    tickets: list[Ticket] = []
    coming = sorted(load, key=lambda arrival: arrival.at)
    while coming or scheduler.running or scheduler.queue:
        if coming and not scheduler.running and not scheduler.queue:
            clock.now = max(clock.now, coming[0].at)
        while coming and coming[0].at <= clock.now:
            one = coming.pop(0)
            request = Request(prompt=(0,) * one.prompt, max_tokens=one.tokens, depth=one.depth)
            ticket = scheduler.submit(request)
            ticket.arrived = one.at  # it came while the last round ran
            tickets.append(ticket)
        scheduler.step()
    return summary(tickets, clock.now, quality=quality)


def summary(
    tickets: Sequence[Ticket], seconds: float, *, quality: Sequence[float] | None = None
) -> LoadResult:
    """Latencies and depths of requests that have ended."""
    took = np.array([t.ended - t.arrived for t in tickets if t.ended is not None])
    first = np.array([t.first - t.arrived for t in tickets if t.first is not None])
    depths = np.array([t.depth for t in tickets if t.depth is not None])
    numbers = {
        "requests": len(tickets),
        "p50_seconds": np.quantile(took, 0.5),
        "p95_seconds": np.quantile(took, 0.95),
        "p95_first_token": np.quantile(first, 0.95),
        "tokens_per_second": sum(len(t.tokens) for t in tickets) / max(seconds, 1e-12),
        "mean_depth": depths.mean(),
        "least_depth": depths.min(),
        "mean_quality": None if quality is None else np.asarray(quality)[depths - 1].mean(),
    }
    about = "What the requests of a load saw; seconds count from their arrival."
    measured = scalars("load", numbers, title="load", about=about)
    return LoadResult(results=named(measured), about=provenance(samples=len(tickets)))


class LoadResult(Results, kind="load"):
    """Latencies, speed and depths under a load."""

    @property
    def numbers(self) -> dict[str, float]:
        """All of them, by name."""
        return {name: float(value) for name, value in self.result("load").arrays.items()}
