"""Where a benchmark's figures go: benchmarks/results/<name>.json, with machine and versions."""

from __future__ import annotations

import datetime as dt
import json
from pathlib import Path
from typing import Any

from everydepth.environment import Environment

RESULTS = Path(__file__).parent / "results"


def machine() -> dict[str, Any]:
    """What a figure depends on, without anything private to this machine."""
    now = Environment.current()
    return {
        "date": dt.date.today().isoformat(),
        "platform": now.platform,
        "cpus": now.cpus_usable,
        "memory_gib": round(now.memory_total_bytes / 2**30, 1),
        "devices": [device.description for device in now.devices],
        "python": now.python,
        "versions": now.versions,
    }


def record(name: str, figures: dict[str, Any]) -> Path:
    """Write the figures of one benchmark, replacing its last ones."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps({"machine": machine(), **figures}, indent=2) + "\n")
    return path
