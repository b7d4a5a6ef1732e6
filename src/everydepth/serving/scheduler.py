"""The scheduler decides when and how deep each request runs; it uses no threads or sockets."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from everydepth.errors import EveryDepthError, SettingError
from everydepth.serving.costs import Costs, Price
from everydepth.serving.drafts import DraftTeams
from everydepth.serving.governor import Fixed, Governor, Load
from everydepth.serving.request import Request, Ticket
from everydepth.serving.shared import Row, SharedBatch, Work, check_length, extra_blocks
from everydepth.stream import ResidualStream


class Busy(EveryDepthError, RuntimeError):
    """The queue is full."""


@runtime_checkable
class Batch(Protocol):
    """The interface of `SharedBatch`, which a simulation also implements."""

    rows: list[Row]
    work: Work

    def join(self, row: Row) -> None: ...
    def leave(self, row: Row) -> None: ...
    def clear(self) -> None: ...
    def round(self) -> list[tuple[Row, list[int]]]: ...


@dataclass
class Counts:
    """Totals since the start."""

    requests: int = 0
    finished: int = 0
    cancelled: int = 0
    refused: int = 0
    prompt_tokens: int = 0
    tokens: int = 0
    rounds: int = 0


class Scheduler:
    """Runs requests in the order of their arrival, up to `places` at once.

    A request joins the batch between two rounds, at the depth it asked for or the one the governor
    chooses at that time. `step` runs one round, on the thread of the caller.

    queue: the most requests that may wait.
    price: the assumed cost of rounds until some have been measured.

    >>> from everydepth.serving import Request, Scheduler
    >>> scheduler = Scheduler(ed.as_stream(llama))
    >>> ticket = scheduler.submit(Request(prompt=(1, 2, 3), max_tokens=4, depth=2))
    >>> while scheduler.step():
    ...     pass
    >>> ticket.finish, ticket.depth, len(ticket.tokens)
    ('length', 2, 4)
    """

    def __init__(
        self,
        stream: ResidualStream,
        *,
        governor: Governor | None = None,
        places: int = 16,
        queue: int = 4096,
        batch: Batch | None = None,
        price: Price | None = None,
        clock: Callable[[], float] | None = None,
    ) -> None:
        if places < 1 or queue < 1:
            raise SettingError(f"places={places}, queue={queue}; use 1 or more of each")
        self.stream = stream
        self.governor = governor or Fixed(stream.depth)
        self.places, self._most = places, queue
        self.batch: Batch = SharedBatch(stream) if batch is None else batch
        self.costs, self.counts, self.teams = Costs(price), Counts(), DraftTeams(stream, clock)
        self._clock, self._extra = clock or time.monotonic, extra_blocks(stream)
        self.queue: deque[Ticket] = deque()
        self.running: dict[Row, Ticket] = {}

    def submit(
        self, request: Request, on_tokens: Callable[[Ticket, list[int]], None] | None = None
    ) -> Ticket:
        """Add a request to the queue; `on_tokens` is called with its new tokens.

        It is called once, without tokens, if the request cannot begin.
        """
        request.check(self.stream)
        check_length(self.stream, len(request.prompt), request.max_tokens)
        if len(self.queue) >= self._most:
            self.counts.refused += 1
            raise Busy(f"{len(self.queue)} requests are already waiting; try again later")
        ticket = Ticket(request, self._clock(), on_tokens)
        self.counts.requests += 1
        self.counts.prompt_tokens += len(request.prompt)
        self.queue.append(ticket)
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """Cancel a request; does nothing if it has ended."""
        if ticket.finish is not None:
            return
        if ticket.row is None:
            self.queue.remove(ticket)
        else:
            self.batch.leave(ticket.row)
            del self.running[ticket.row]
        ticket.finish, ticket.ended = "cancelled", self._clock()
        self.counts.cancelled += 1

    def give_up(self) -> list[Ticket]:
        """Cancel all running requests after a failed round, and return them; the queue stays."""
        lost = list(self.running.values())
        if not lost and self.queue:
            lost = [self.queue.popleft()]  # it could not join the batch
        self.running.clear()
        self.batch.clear()
        for ticket in lost:
            ticket.finish, ticket.ended = "cancelled", self._clock()
        self.counts.cancelled += len(lost)
        return lost

    def step(self) -> bool:
        """Run one round; False if there is nothing to do."""
        self._admit()
        if not self.running:
            return False
        begin = self._clock()
        said = self.batch.round()
        now = self._clock()
        self.costs.learn(self.batch.work, now - begin)
        self.counts.rounds += 1
        for row, tokens in said:
            if tokens:
                self._deliver(self.running[row], tokens, now)
        return True

    @property
    def load(self) -> Load:
        """The load that the first request in the queue finds."""
        return Load(
            depths=tuple(row.course.top for row in self.running),
            waiting=max(0, len(self.queue) - 1),
            places=self.places,
            price=self.costs.price,
            extra=self._extra,
        )

    def _admit(self) -> None:
        while self.queue and len(self.running) < self.places:
            ticket = self.queue[0]
            request, now = ticket.request, self._clock()
            depth = request.depth
            if depth is None:
                size = len(request.prompt), request.max_tokens
                depth = self.governor.choose(self.load, *size, now - ticket.arrived)
                # Drafts and exit policies need depths above their own.
                if request.policy is not None or depth <= (request.draft_depth or 0):
                    depth = self.stream.depth
            ticket.depth, ticket.begun = depth, now
            self.queue.popleft()
            try:
                course = request.course(self.stream, depth, self.teams)
            except EveryDepthError as error:
                self._turn_away(ticket, error)
                continue
            row = Row(course, request.prompt, request.max_tokens, request.ends)
            ticket.row = row
            self.running[row] = ticket
            self.batch.join(row)

    def _turn_away(self, ticket: Ticket, error: EveryDepthError) -> None:
        ticket.error, ticket.finish, ticket.ended = error, "cancelled", self._clock()
        self.counts.cancelled += 1
        if ticket.on_tokens is not None:
            ticket.on_tokens(ticket, [])

    def _deliver(self, ticket: Ticket, tokens: list[int], now: float) -> None:
        assert ticket.row is not None
        ticket.first = now if ticket.first is None else ticket.first
        ticket.tokens.extend(tokens)
        self.counts.tokens += len(tokens)
        if ticket.row.done:
            del self.running[ticket.row]
            ticket.finish = "stop" if tokens[-1] in ticket.row.ends else "length"
            ticket.ended = now
            self.counts.finished += 1
            if ticket.begun is not None and ticket.request.depth is None:
                waited = ticket.begun - ticket.arrived
                self.governor.learn(len(ticket.tokens), waited, now - ticket.begun)
        if ticket.on_tokens is not None:
            ticket.on_tokens(ticket, tokens)
