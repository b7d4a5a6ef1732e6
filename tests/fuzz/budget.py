"""How long to look: a few seeded examples by default, minutes of new ones with `make fuzz`."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.strategies import SearchStrategy

MINUTES = float(os.environ.get("EVERYDEPTH_FUZZ", "0"))
"""Of all tests together, on two processes."""

_TESTS = 210  # about as many share the minutes
_CHECKS = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture]


def fuzzed(what: SearchStrategy[Any], check: Callable[[Any], None], *, examples: int) -> None:
    """Check examples of a strategy: some that are the same every time, or new ones for a while."""
    common: dict[str, Any] = {"deadline": None, "suppress_health_check": _CHECKS, "database": None}
    if not MINUTES:
        quick = settings(max_examples=examples, derandomize=True, phases=[Phase.generate], **common)
        quick(given(what)(check))()
        return
    end, failed = time.monotonic() + 2 * 60 * MINUTES / _TESTS, False

    def until_then(example: Any) -> None:
        """Examples of a slow command end in time; those that shrink a failure do not."""
        nonlocal failed
        if not failed and time.monotonic() > end:
            return
        try:
            check(example)
        except BaseException:
            failed = True
            raise

    longer = settings(max_examples=20, phases=[Phase.generate, Phase.shrink], **common)
    while time.monotonic() < end:
        # A seed of its own each time; the failing example is printed as a call.
        seed(random.SystemRandom().getrandbits(64))(longer(given(what)(until_then)))()
