"""Engines: their interface, and the built-in one."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from everydepth.errors import EveryDepthError, NonFiniteError
from everydepth.exits.generation.packing import packed_maps
from everydepth.serving.request import Finish, Request, Ticket
from everydepth.serving.scheduler import Scheduler
from everydepth.stream import unwrapped

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Piece:
    """New tokens of a request; `finish` is set with the last ones.

    exits: the depth of each token, if a policy chose it.
    """

    tokens: tuple[int, ...]
    depth: int
    finish: Finish | None = None
    exits: tuple[int, ...] = ()


class Stopped(EveryDepthError, RuntimeError):
    """The engine, or the server behind it, does not run."""


class Failed(EveryDepthError, RuntimeError):
    """A round of this request failed, and with it all others in the batch."""


@runtime_checkable
class Backend(Protocol):
    """What the server starts, stops and monitors."""

    def start(self) -> None:
        """Start; returns when it accepts requests."""

    def stop(self) -> None:
        """Stop everything and free all resources."""

    @property
    def ready(self) -> bool:
        """Whether it accepts requests."""
        ...

    @property
    def facts(self) -> Mapping[str, float]:
        """Numbers for /metrics, by name; those that only grow end in _total."""
        ...


@runtime_checkable
class Engine(Backend, Protocol):
    """Who continues texts; the names of depths, the meter and the routes are the same for all."""

    def run(self, request: Request) -> AsyncGenerator[Piece, None]:
        """The tokens of a request as they come; closing the generator cancels it."""
        ...


class Embedded:
    """The built-in engine: all depths share one set of weights and one batch.

    The scheduler has its own thread. Requests and cancellations are passed to it between rounds, so
    that the event loop never waits for a round.
    """

    def __init__(self, scheduler: Scheduler, *, packed: bool = True) -> None:
        self.scheduler = scheduler
        self._packed, self._held = packed, ExitStack()
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._open: set[_Call] = set()
        self._given: list[tuple[_Call, Piece | EveryDepthError]] = []
        self._thread: threading.Thread | None = None
        self._stopping = False

    def start(self) -> None:
        model = unwrapped(self.scheduler.stream.model).eval()
        if self._packed:
            self._held.enter_context(packed_maps(model))
        self._stopping = False
        self._thread = threading.Thread(target=self._work, name="everydepth-engine", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopping = True
        self._inbox.put(None)
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self._held.close()

    @property
    def ready(self) -> bool:
        return self._thread is not None and self._thread.is_alive() and not self._stopping

    @property
    def facts(self) -> Mapping[str, float]:
        scheduler = self.scheduler
        cache = getattr(scheduler.batch, "cache", None)
        return {
            **{f"{name}_total": float(n) for name, n in vars(scheduler.counts).items()},
            "running": float(len(scheduler.running)),
            "waiting": float(len(scheduler.queue)),
            "cache_bytes": float(0 if cache is None else cache.bytes),
        }

    async def run(self, request: Request) -> AsyncGenerator[Piece, None]:
        request.check(self.scheduler.stream)
        call = _Call(asyncio.get_running_loop(), self._given, whole=request.whole)
        self._inbox.put(lambda: self._submit(request, call))
        try:
            # Only now: what is in the inbox before the engine begins to stop is answered.
            if not self.ready:
                raise Stopped("the engine does not run; start the server again")
            while True:
                piece = await call.pieces.get()
                if isinstance(piece, EveryDepthError):
                    raise piece
                yield piece
                if piece.finish is not None:
                    return
        finally:
            self._inbox.put(lambda: self._forget(call))

    # -- on the engine's thread -------------------------------------------------------------------

    def _work(self) -> None:
        try:
            while self._read_inbox():
                try:
                    self.scheduler.step()
                except Exception as error:  # noqa: BLE001 - those at work hear of it, others go on
                    _log.exception("a round has failed; its requests get an error")
                    self._failed(self.scheduler.give_up(), error)
                self._hand_over()
        finally:
            with suppress(queue.Empty):
                while True:
                    change = self._inbox.get_nowait()
                    if change is not None:
                        change()
            for call in self._open:
                call.give(Stopped("the server is shutting down; send it again"))
            self._hand_over()

    def _hand_over(self) -> None:
        """Pass on the round's output, waking each event loop only once, since that is costly."""
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[_Call, Piece | EveryDepthError]]] = {}
        for call, piece in self._given:
            by_loop.setdefault(call.loop, []).append((call, piece))
        self._given.clear()
        for loop, given in by_loop.items():
            with suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(_put, given)

    def _failed(self, tickets: Sequence[Ticket], error: Exception) -> None:
        lost = {id(ticket) for ticket in tickets}
        why = "the engine failed on a round of this request; send it again"
        if isinstance(error, NonFiniteError):
            why = f"{error}: the model is broken, or needs a wider number format"
        for call in self._open:
            if id(call.ticket) in lost:
                call.give(Failed(why))

    def _read_inbox(self) -> bool:
        """Process the inbox, waiting if there is nothing else to do; False to stop."""
        idle = not self.scheduler.running and not self.scheduler.queue
        while True:
            try:
                change = self._inbox.get(block=idle)
            except queue.Empty:
                return True
            if change is None:
                return False
            change()
            idle = False

    def _submit(self, request: Request, call: _Call) -> None:
        try:
            call.ticket = self.scheduler.submit(request, call.hand)
        except EveryDepthError as error:
            call.give(error)
        else:
            self._open.add(call)

    def _forget(self, call: _Call) -> None:
        self._open.discard(call)
        if call.ticket is not None:
            self.scheduler.cancel(call.ticket)


class _Call:
    """One request between the engine's thread and the event loop.

    whole: all tokens after the first are passed on together, at the end.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        given: list[tuple[_Call, Piece | EveryDepthError]],
        *,
        whole: bool,
    ) -> None:
        self.loop, self._given, self._whole = loop, given, whole
        self.pieces: asyncio.Queue[Piece | EveryDepthError] = asyncio.Queue()
        self.ticket: Ticket | None = None
        self._kept: list[int] | None = None

    def hand(self, ticket: Ticket, tokens: list[int]) -> None:
        if ticket.error is not None:
            self.give(ticket.error)
            return
        assert ticket.depth is not None
        if self._whole and self._kept is not None:
            self._kept.extend(tokens)
            if ticket.finish is None:
                return
            tokens = self._kept
        self._kept = []
        exits = ticket.exits[len(ticket.tokens) - len(tokens) :]
        self.give(Piece(tuple(tokens), ticket.depth, ticket.finish, tuple(exits)))

    def give(self, piece: Piece | EveryDepthError) -> None:
        self._given.append((self, piece))


def _put(given: Sequence[tuple[_Call, Piece | EveryDepthError]]) -> None:
    for call, piece in given:
        call.pieces.put_nowait(piece)
