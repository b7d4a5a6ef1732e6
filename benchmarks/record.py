"""Where a benchmark's figures go: benchmarks/results/<name>.json, with machine and versions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from everydepth.environment import machine as machine

RESULTS = Path(__file__).parent / "results"


def record(name: str, figures: dict[str, Any]) -> Path:
    """Write the figures of one benchmark, replacing its last ones."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps({"machine": machine(), **figures}, indent=2) + "\n")
    return path
