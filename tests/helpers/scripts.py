"""Run scripts one after the other in one process, each in a folder of its own.

    python tests/helpers/scripts.py examples/plain_loop.py benchmarks/waist.py

Importing everything takes longer than most of them. Exits with the number of those that failed or
said nothing.
"""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

ROOT = Path(__file__).parents[2]


def check(files: Iterable[Path], **variables: str) -> None:
    """All of them run, in a process without what the tests change."""
    names = [str(file.relative_to(ROOT)) for file in files]
    assert names
    finished = subprocess.run(
        [sys.executable, __file__, *names],
        cwd=ROOT,
        env=os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr[-8000:]
    assert finished.stdout.count(" s of CPU\n") == len(names)


def run(file: Path) -> None:
    """As `python file` does; what it leaves behind is not left here."""
    path, arguments, here = list(sys.path), sys.argv, Path.cwd()
    sys.path.insert(0, str(file.parent))
    sys.argv = [str(file)]
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(StringIO()) as said:
        os.chdir(folder)
        try:
            runpy.run_path(str(file), run_name="__main__")
        finally:
            os.chdir(here)
            sys.path[:], sys.argv = path, arguments
    if not said.getvalue().strip():
        raise RuntimeError(f"{file.name} printed nothing")


def main(files: list[Path]) -> int:
    failed: list[str] = []
    for file in files:
        begin = time.process_time()
        try:
            run(file)
        except (Exception, SystemExit):  # noqa: BLE001 - the others are run as well
            traceback.print_exc()
            failed.append(file.name)
        print(f"{file.name}: {time.process_time() - begin:.1f} s of CPU", flush=True)
    if failed:
        print("failed:", *failed)
    return len(failed)


if __name__ == "__main__":
    sys.exit(main([Path(name).resolve() for name in sys.argv[1:]]))
