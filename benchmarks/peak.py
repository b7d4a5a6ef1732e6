"""How much memory one call needs: the high-water mark of a fresh process above its level before."""

from __future__ import annotations

import gc
import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from record import SMOKE


def peak_mb(prepare: Callable[..., Callable[[], object]], *args: Any) -> float:
    """Peak memory in MB of `prepare(*args)()`, above what is resident once it is prepared.

    A process of its own, because a peak is never given back, and one measured before would hide the
    next. Linux only.
    """
    if SMOKE:
        prepare(*args)()
        return 1.0
    context = multiprocessing.get_context("spawn")
    receive, send = context.Pipe(duplex=False)
    process = context.Process(target=_measure, args=(send, prepare, args))
    process.start()
    send.close()
    found = receive.recv()
    process.join()
    return found


def _measure(
    send: Any, prepare: Callable[..., Callable[[], object]], args: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    run = prepare(*args)
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
    before = _status("VmRSS")
    run()
    send.send((_status("VmHWM") - before) / 1e6)


def _status(field: str) -> int:
    """Bytes, from the kernel's account of this process."""
    lines = Path(f"/proc/{os.getpid()}/status").read_text().splitlines()
    line = next(line for line in lines if line.startswith(f"{field}:"))
    return int(line.split()[1]) * 1024
