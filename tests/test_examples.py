"""Every example runs, offline and in seconds."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
# The demo is a show of its own, with tests of its own.
FILES = sorted(file for file in EXAMPLES.glob("*.py") if file.name != "demo.py")


def test_there_are_examples_of_all_three_loops() -> None:
    assert {"plain_loop.py", "hf_trainer.py", "lightning_loop.py"} <= {f.name for f in FILES}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_the_example_runs(file: Path, tmp_path: Path) -> None:
    finished = subprocess.run(
        [sys.executable, str(file)],
        cwd=tmp_path,  # what it leaves behind is not left here
        env=os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr[-4000:]
    assert finished.stdout.strip()
