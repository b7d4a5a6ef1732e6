"""Every Python block of the README and the documentation runs, in order, page by page."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
REAL = ROOT / "docs" / "tutorials" / "a-real-model.md"
PAGES = [
    page
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
    if "```python" in page.read_text() and page != REAL
]


@pytest.mark.timeout(600)  # every one of them
def test_the_blocks_of_pages_run() -> None:
    """In one process: importing everything takes as long as running a page."""
    names = [str(page.relative_to(ROOT)) for page in PAGES]
    assert len(names) >= 10
    assert run(names).count(" s\n") >= len(names)


def run(names: Sequence[str]) -> str:
    finished = subprocess.run(
        [sys.executable, "tests/docs/run_pages.py", *names],
        cwd=ROOT,
        env=os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr[-8000:]
    return finished.stdout


@pytest.mark.slow
def test_a_first_hour_with_a_real_model_takes_five_minutes() -> None:
    if "EVERYDEPTH_MODEL" not in os.environ:
        pytest.fail("set EVERYDEPTH_MODEL to the folder of a SmolLM2-135M-Instruct")
    took = run([str(REAL.relative_to(ROOT))]).rsplit(": ", 1)[1]
    assert float(took.removesuffix(" s\n")) < 300  # CPU seconds; about 20 where it was written
