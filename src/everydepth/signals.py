"""SIGINT and SIGTERM: finish what must not be cut short, then act on the signal."""

from __future__ import annotations

import signal
import threading
from typing import Any, NoReturn


class Signals:
    """Records SIGINT and SIGTERM inside the context, and calls the previous handler on exit.

    at_once: raise as soon as a signal arrives instead of at the end of the context. A second signal
        always raises at once. Either way it stays in `received`, even if the exception is caught.

    A signal that was ignored stays ignored.
    """

    def __init__(self, *, at_once: bool = False) -> None:
        self.received: int | None = None
        self._at_once = at_once
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Signals:
        # Only the main thread may set handlers.
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}
        leaving = kind is not None and not issubclass(kind, Exception)
        if self.received is not None and not leaving:
            _deliver(self.received)

    def _note(self, number: int, frame: Any) -> None:
        first, self.received = self.received is None, number
        if self._at_once or not first:
            leave(number)


def leave(number: int) -> NoReturn:
    """Raise the exception that corresponds to a signal."""
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    raise SystemExit(128 + number)


def _deliver(number: int) -> None:
    if signal.getsignal(number) is signal.SIG_DFL:
        leave(number)  # the process ends as it would, but locks and temporaries are cleaned up
    signal.raise_signal(number)
