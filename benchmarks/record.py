"""Where a benchmark's figures go: benchmarks/results/<name>.json, with machine and versions.

Times that a second processor gives stand in a folder of its name: benchmarks/results/<processor>.

Every benchmark takes `--smoke`: the same code with tiny sizes, in seconds, to see that it runs. Its
figures mean nothing, so they go to a folder that is gone at the end.
"""

from __future__ import annotations

import argparse
import atexit
import json
import os
import re
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Generator, Iterable
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import patch

from everydepth import environment

T = TypeVar("T")

if "--smoke" in sys.argv[1:]:
    sys.argv.remove("--smoke")
    os.environ["EVERYDEPTH_SMOKE"] = "1"  # processes that a benchmark starts see it, too
SMOKE = "EVERYDEPTH_SMOKE" in os.environ
RESULTS = Path(tempfile.mkdtemp()) if SMOKE else Path(__file__).parent / "results"
if SMOKE:
    atexit.register(shutil.rmtree, RESULTS)


@contextmanager
def by_cpu_time() -> Generator[None]:
    """What measures itself reads CPU time: cores may be shared."""
    from everydepth.exits.generation import speculative

    with ExitStack() as stack:
        stack.enter_context(patch.object(time, "perf_counter", time.process_time))
        stack.enter_context(patch.object(speculative, "clock", time.process_time))
        yield


def typical(slow: Iterable[float], fast: Iterable[float]) -> float:
    """The median of the rounds' ratios: neighbors on the machine disturb both of a round."""
    return statistics.median(a / max(b, 1e-9) for a, b in zip(slow, fast, strict=True))


def no_options() -> None:
    """Explain the benchmark if asked with `--help`, and refuse options it does not have."""
    about = sys.modules["__main__"].__doc__
    parser = argparse.ArgumentParser(
        description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, no figures kept")
    parser.parse_args()


def sized(full: T, smoke: T) -> T:
    """The size that is measured, or with `--smoke` the one that only shows that it runs."""
    return smoke if SMOKE else full


def record(name: str, figures: dict[str, Any]) -> Path:
    """Write the figures of one benchmark, replacing its last ones."""
    return _write(RESULTS / f"{name}.json", figures)


def record_times(name: str, figures: dict[str, Any]) -> Path:
    """Write figures that depend on the processor, replacing only those of the same processor."""
    return _write(_of_this_processor(name), figures)


def recorded_times(name: str) -> dict[str, Any]:
    """The figures recorded on this processor, to add others to; empty without any."""
    path = _of_this_processor(name)
    return json.loads(path.read_text()) if path.is_file() else {}


def recorded_everywhere(name: str) -> list[dict[str, Any]]:
    """The figures of every processor; those of the first one come first."""
    files = (RESULTS / f"{name}.json", *sorted(RESULTS.glob(f"*/{name}.json")))
    return [json.loads(file.read_text()) for file in files if file.is_file()]


def _of_this_processor(name: str) -> Path:
    """results/<name>.json, or if that is of another processor, results/<processor>/<name>.json."""
    path = RESULTS / f"{name}.json"
    mine = _processor()["name"]
    if path.is_file():
        theirs = json.loads(path.read_text())["machine"].get("processor", {}).get("name")
        if theirs != mine:
            return RESULTS / re.sub(r"[^a-z0-9.]+", "-", mine.lower()).strip("-") / path.name
    return path


def _write(path: Path, figures: dict[str, Any]) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({"machine": machine(), **figures}, indent=2) + "\n")
    return path


def machine() -> dict[str, Any]:
    """What every figure depends on; for times that is the processor, its caches and its threads."""
    return {**environment.machine(), "processor": _processor(), "threads": _threads()}


def _processor() -> dict[str, Any]:
    import torch

    known = torch.cpu.get_capabilities()
    caches = {"L1d": known.get("l1d_cache_size"), "L2": known.get("l2_cache_size")}
    return {
        "name": known["cpu_name"],
        "architecture": known["architecture"],
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "physical_cores": known["num_physical_cores"],
        "cache_bytes": {**{k: v for k, v in caches.items() if v}, **_last_level_cache()},
    }


def _last_level_cache() -> dict[str, int]:
    """The shared cache, which torch does not tell; Linux only."""
    for index in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*"):
        if (index / "level").read_text().strip() == "3":
            return {"L3": 1024 * int((index / "size").read_text().strip().removesuffix("K"))}
    return {}


def _threads() -> dict[str, Any]:
    import torch

    set_by = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
    return {
        "torch": torch.get_num_threads(),
        "torch_interop": torch.get_num_interop_threads(),
        **{name: os.environ[name] for name in set_by if name in os.environ},
    }
