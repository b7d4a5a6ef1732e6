"""How long to look: a few seeded examples by default, minutes of new ones with `make fuzz`."""

from __future__ import annotations

import os
import random
import resource
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.strategies import SearchStrategy

MINUTES = float(os.environ.get("EVERYDEPTH_FUZZ", "0"))
"""Of all tests together, on two processes."""

_TESTS = 230  # about as many share the minutes
_LONGEST = 300  # seconds of this process, which a busy machine does not lengthen
_QUIET: dict[str, Any] = {
    "deadline": None,
    "suppress_health_check": list(HealthCheck),
    "database": None,
}
_LARGEST = 6 * 2**30  # bytes; more is a `MemoryError`


class _Endless(BaseException):
    """Nothing in the library catches it."""


def fuzzed(what: SearchStrategy[Any], check: Callable[[Any], None], *, examples: int) -> None:
    """Check examples of a strategy: some that are the same every time, or new ones for a while."""
    if not MINUTES:
        quick = settings(max_examples=examples, derandomize=True, phases=[Phase.generate], **_QUIET)
        quick(given(what)(check))()
        return
    end, failed = time.monotonic() + 2 * 60 * MINUTES / _TESTS, False

    def until_then(example: Any) -> None:
        """Examples of a slow command end in time; those that shrink a failure do not."""
        nonlocal failed
        if not failed and time.monotonic() > end:
            return
        try:
            with _ending():
                check(example)
        except _Endless:
            failed = True
            raise AssertionError(f"no end after {_LONGEST} s of computing") from None
        except BaseException:
            failed = True
            raise

    longer = settings(max_examples=20, phases=[Phase.generate, Phase.shrink], **_QUIET)
    while time.monotonic() < end:
        # A seed of its own each time; the failing example is printed as a call.
        seed(random.SystemRandom().getrandbits(64))(longer(given(what)(until_then)))()


@contextmanager
def _ending() -> Iterator[None]:
    """Stops what computes too long or fills the memory; `--timeout` stops what only waits."""

    def stop(*_: Any) -> None:
        raise _Endless

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, _LONGEST)
    limits = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (_LARGEST, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, limits)
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
