"""An environment of its own for an engine whose packages do not fit beside ours."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def interpreter(folder: Path, packages: Sequence[str], without: Sequence[str] = ()) -> str:
    """The Python of an environment with these packages; made if the folder does not exist.

    without: packages to take out again, which others require and nothing here needs.
    """
    python = str(folder / "bin" / "python")
    if not folder.exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        subprocess.run([python, "-m", "pip", "install", "-q", *packages], check=True)
        if without:
            subprocess.run([python, "-m", "pip", "uninstall", "-q", "-y", *without], check=True)
    return python


def asked(python: str, worker: str, question: dict[str, Any], **variables: str) -> Any:
    """What a script beside this one answers: JSON in on its input, JSON out on its last line."""
    hidden = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    kept = {name: value for name, value in os.environ.items() if name not in hidden}
    done = subprocess.run(
        # -P: scripts here have the names of the packages that workers import.
        [python, "-P", str(Path(__file__).parent / worker)],
        input=json.dumps(question),
        capture_output=True,
        text=True,
        env=kept | {"OMP_NUM_THREADS": "1"} | variables,
    )
    if done.returncode != 0:
        raise RuntimeError(f"{worker} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])
