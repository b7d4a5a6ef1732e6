"""Simulate a load: the real scheduler and governor, with a simulated clock and batch."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from everydepth.config import checked
from everydepth.errors import DataError, SettingError
from everydepth.exits.profile import Profile
from everydepth.serving.costs import Price
from everydepth.serving.governor import Governor
from everydepth.serving.request import Request, Ticket
from everydepth.serving.scheduler import Scheduler
from everydepth.serving.seen import Answered, LoadResult, answered
from everydepth.serving.shared import CHUNK, Row, Work, climb, extra_blocks, fed, joined
from everydepth.stream import ResidualStream


@checked
@dataclass(frozen=True, kw_only=True)
class Arrival:
    """A request of a load: its arrival (seconds), its prompt and new tokens, and its depth."""

    at: float | int
    prompt: int
    tokens: int
    depth: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.at < float("inf") or self.prompt < 1 or self.tokens < 1:
            raise SettingError(
                f"an arrival at {self.at} with {self.prompt} + {self.tokens} tokens; use a time "
                "from 0 on, and at least 1 token of each"
            )


@checked
def read_load(file: str | Path) -> list[Arrival]:
    """A JSON list of `{"at": 0.5, "prompt": 20, "tokens": 64, "depth": 12}`, depth optional."""
    try:
        found: Any = json.loads(Path(file).read_text(encoding="utf-8"))
        if not isinstance(found, list) or not all(isinstance(one, dict) for one in found):
            raise ValueError("something else than a list of objects")
        return sorted((Arrival(**one) for one in found), key=lambda arrival: arrival.at)
    except OSError as error:
        raise DataError(f"{file} cannot be read ({error.strerror})") from error
    except (ValueError, TypeError, RecursionError) as error:
        raise DataError(
            f"{file} is not a load ({error}); write a JSON list of objects with at (seconds), "
            "prompt and tokens (counts), and optionally depth"
        ) from error


class _Clock:
    """A simulated clock."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class _SimulatedBatch:
    """A batch that computes no tokens, but advances the clock by their price."""

    def __init__(self, price: Price, clock: _Clock, stream: ResidualStream) -> None:
        self.rows: list[Row] = []
        self.work = Work()
        self._price, self._clock = price, clock
        self._extra, self._joins = extra_blocks(stream), joined(stream)

    def join(self, row: Row) -> None:
        self.rows.append(row)

    def leave(self, row: Row) -> None:
        self.rows.remove(row)

    def clear(self) -> None:
        self.rows.clear()

    def round(self) -> list[tuple[Row, list[int]]]:
        said: list[tuple[Row, list[int]]] = []
        depths, counts = list[int](), list[int]()
        for row, count in fed(self.rows, CHUNK):
            row.unread -= count
            depths.append(row.course.top)
            counts.append(count)
            if row.unread == 0:
                row.unread = 1
                said.append((row, row.take([0])))
        reads = len({row.course.top for row, _ in said})
        self.work = climb(depths, counts, self._extra, joins=self._joins)
        self.work += Work(readouts=len(said), reads=reads)
        self._clock.now += self._price.of(self.work)
        for row, _ in said:
            if row.done:
                self.leave(row)
        return said


def price_of(profile: Profile | None, extra: Mapping[int, int] | None = None) -> Price | None:
    """Prices from the profile of a language model; None if it lacks the measurements.

    Its "decode" gives the time of a token at depth k, `k (call + token) + read + readout`; its
    batch latencies give the cost of each further token. extra: see `climb`.
    """
    if profile is None or "decode" not in profile:
        return None
    length = profile.about.get("row_tokens")
    if not length or len(profile.depths) < 2 or profile.batch_size < 2:
        return None
    blocks = [climb([found.depth], [1], extra or {}).calls for found in profile.depths]
    writing = 1 / np.asarray(profile["decode"])
    one = np.array([found.latency.median for found in profile.depths]) / 1000
    many = np.array([found.batch_latency.median for found in profile.depths]) / 1000
    alone, further = np.polyfit(blocks, writing, 1), (profile.batch_size - 1) * length
    more = (np.polyfit(blocks, many, 1) - np.polyfit(blocks, one, 1)) / further
    token, readout = np.clip(more, 0, np.maximum(alone, 0)).tolist()
    call, read = (np.maximum(alone, 0) - [token, readout]).tolist()
    return Price(call=call, token=token, readout=readout, read=read)


@checked
def simulate(
    stream: ResidualStream,
    load: Sequence[Arrival],
    price: Price,
    *,
    governor: Governor | None = None,
    places: int = 16,
    quality: Mapping[int, float] | None = None,
) -> LoadResult:
    """Simulate a load; returns latencies, depths, and the mean quality if known for all depths.

    >>> from everydepth.serving import Arrival, Price, simulate
    >>> load = [Arrival(at=i / 10, prompt=8, tokens=16) for i in range(20)]
    >>> price = Price(call=1e-3, token=1e-4, readout=1e-4)
    >>> found = simulate(ed.as_stream(llama), load, price).numbers
    >>> found["p50_seconds"] <= found["p95_seconds"], found["requests"]
    (True, 20.0)
    """
    if not load:
        raise SettingError("the load is empty; give at least one arrival")
    clock = _Clock()
    batch = _SimulatedBatch(price, clock, stream)
    scheduler = Scheduler(
        stream, governor=governor, places=places, queue=len(load), batch=batch, clock=clock
    )
    tickets: list[Ticket] = []
    coming = deque(sorted(load, key=lambda arrival: arrival.at))
    while coming or scheduler.running or scheduler.queue:
        if coming and not scheduler.running and not scheduler.queue:
            clock.now = max(clock.now, float(coming[0].at))
        while coming and coming[0].at <= clock.now:
            one = coming.popleft()
            request = Request(prompt=(0,) * one.prompt, max_tokens=one.tokens, depth=one.depth)
            ticket = scheduler.submit(request)
            ticket.arrived = one.at  # it arrived during the last round
            tickets.append(ticket)
        scheduler.step()
    seen = [
        Answered(
            at=ticket.ended,
            seconds=ticket.ended - ticket.arrived,
            first=ticket.first - ticket.arrived,
            depth=ticket.depth,
            tokens=len(ticket.tokens),
        )
        for ticket in tickets
        if ticket.ended is not None and ticket.first is not None and ticket.depth is not None
    ]
    return answered(seen, clock.now, quality=quality)
