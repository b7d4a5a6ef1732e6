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


def in_two(*words: str, timeout: int = 240) -> None:
    """`python words...` as two processes that know of each other, as torchrun would start them.

    Without torchrun itself, which imports everything once more.
    """
    source = os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    shared = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    shared["SPARE_PORTS"] = " ".join(str(free_port()) for _ in range(8))
    shared |= {"MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1", "PYTHONPATH": source}
    both = [
        subprocess.Popen(
            [sys.executable, *words],
            cwd=ROOT,
            env=os.environ | shared | {"RANK": rank, "LOCAL_RANK": rank},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in ("0", "1")
    ]
    try:
        said = [process.communicate(timeout=timeout)[0] for process in both]
    finally:
        for process in both:
            process.kill()
    assert [process.returncode for process in both] == [0, 0], "\n".join(said)[-4000:]


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
