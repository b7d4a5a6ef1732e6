"""SIGINT and SIGTERM, held back until a step is whole."""

from __future__ import annotations

import signal
import threading
from typing import Any


class Signals:
    """Notes SIGINT and SIGTERM, so that the step in progress can end; a second one is at once."""

    def __init__(self) -> None:
        self.received: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Signals:
        # Only the main thread may set handlers; elsewhere signals are not ours to handle.
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def _note(self, number: int, frame: Any) -> None:
        if self.received is not None:
            self.__exit__()
            raise KeyboardInterrupt
        self.received = number
