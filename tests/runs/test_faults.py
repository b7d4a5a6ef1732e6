"""A run that is killed, or whose disk fails, at any operation is resumed to the same bytes."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
JOBS = ("train", "grow", "sweep", "reproduce")
HOW = ("killed", "full", "read_only", "vanished")


def found(job: str, how: str, folder: Path, *points: int) -> dict[str, Any]:
    """What `tests/helpers/faults.py` says of a job, at these points or at all."""
    command = [sys.executable, "-m", "tests.helpers.faults", job, how, str(folder)]
    done = subprocess.run(
        [*command, *map(str, points)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def test_at_some_operations_a_fault_leaves_a_run_that_is_resumed_to_the_same_bytes(
    tmp_path: Path,
) -> None:
    """What is no kill ends with an error of ours, of one line."""
    points = random.Random(0).sample(range(10**6), 2)
    assert found("train", ",".join(HOW), tmp_path, *points)["failures"] == {}


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("job", JOBS)
@pytest.mark.parametrize("how", HOW)
def test_no_operation_is_a_bad_moment(tmp_path: Path, job: str, how: str) -> None:
    outcome = found(job, how, tmp_path)
    assert outcome["failures"] == {}
    assert outcome["tried"] == outcome["operations"] > 50
