"""Several processes on this machine."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def launch(*words: str, timeout: int = 240) -> subprocess.CompletedProcess[str]:
    """`accelerate launch` with two processes on the CPU, which `--cpu` alone leaves to MPI."""
    launcher = [
        sys.executable,
        "-m",
        "accelerate.commands.launch",
        "--multi_gpu",  # one process a device; the variable below makes the devices CPUs
        "--num_processes=2",
        "--num_machines=1",
        "--mixed_precision=no",
        "--dynamo_backend=no",
        f"--main_process_port={free_port()}",
    ]
    source = os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    finished = subprocess.run(
        [*launcher, *words],
        cwd=ROOT,
        env=os.environ
        | {"PYTHONPATH": source, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr[-4000:]
    return finished
