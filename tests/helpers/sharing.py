"""What is dear to make is made once, whichever test process asks for it first."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from filelock import FileLock


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """A folder of this test run that `make` has filled; the other processes wait for it."""
    # Each of pytest-xdist's processes has a folder of its own inside the one of the run.
    base = factory.getbasetemp()
    place = (base.parent if base.name.startswith("popen-") else base) / name
    done = place.with_suffix(".done")
    with FileLock(place.with_suffix(".lock")):
        if not done.exists():
            place.mkdir()
            make(place)
            done.touch()
    return place
