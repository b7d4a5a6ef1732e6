"""Shared by all tests: one compute thread per process, the same random numbers every time."""

from __future__ import annotations

import gc
import os
import random
import signal
from collections.abc import Generator, Iterator
from pathlib import Path

import jaxtyping
import numpy as np
import pytest
import torch
from hypothesis import settings
from tests.helpers.typed import sparing

SEED = 0
# Files with a test, or a fixture, that takes ten seconds or more.
LONGEST = ("test_benchmarks.py", "test_examples.py", "test_blocks.py", "test_distributed.py")

# Before the package is imported: the hook that `--jaxtyping-packages` installs looks it up there.
jaxtyping.jaxtyped = sparing

# The same examples every time, however long one takes on a busy machine.
# `--hypothesis-profile=default` looks for new ones.
settings.register_profile("everydepth", derandomize=True, deadline=None)
settings.load_profile("everydepth")

# Some virtual machines announce AMX and then refuse its instructions; bfloat16 needs none of them.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")


@pytest.fixture(scope="session", autouse=True)
def one_thread_a_process() -> Iterator[None]:
    # xdist already uses the cores: two threads on small tensors were measured 20 times slower.
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session", autouse=True)
def hears_ctrl_c() -> Iterator[None]:
    # A shell that starts the tests in the background has them ignore it.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(autouse=True)
def seed() -> int:
    _seed()
    return SEED


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is imported for the tests stays, so the garbage collector need not look through it."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest tests first: one that starts last keeps a process busy while the other waits."""
    items.sort(key=lambda item: item.path.name not in LONGEST)


@pytest.hookimpl(tryfirst=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[object]) -> None:
    """What several tests share must not depend on the test that asks for it first."""
    if fixturedef.scope != "function":
        _seed()


def _seed() -> None:
    random.seed(SEED)
    np.random.seed(SEED)  # noqa: NPY002 - libraries under test may draw from the legacy state
    torch.manual_seed(SEED)


@pytest.fixture(scope="session")
def data_folder() -> Path:
    """Where real data sets and weights are, for slow tests; a folder beside the clone if unset."""
    beside = Path(__file__).parents[2] / "shared" / "data"
    folder = Path(os.environ.get("EVERYDEPTH_DATA", beside))
    if not folder.is_dir():
        pytest.fail("no real data sets found; set EVERYDEPTH_DATA to the folder that holds them")
    return folder
