"""Files as everydepth wrote them before all results were saved alike."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from everydepth.tracing import Trace

HEAD = ("model", "task", "depth", "samples", "rows", "passes", "partial")


def save_trace(trace: Trace, folder: Path) -> Path:
    """`trace.json` and `trace.npz`, version 1."""
    folder.mkdir(parents=True, exist_ok=True)
    arrays: dict[str, Any] = {}
    described: list[dict[str, Any]] = []
    for name, result in trace.results.items():
        for key, array in result.arrays.items():
            arrays[f"{name}/{key}"] = np.ma.getdata(array)
            if isinstance(array, np.ma.MaskedArray):
                arrays[f"{name}/{key}!mask"] = np.ma.getmaskarray(array)
        facts = {key: getattr(result, key) for key in ("kind", "series", "labels", "meta", "note")}
        described.append({"name": name, "arrays": list(result.arrays), **facts})
    head = {"version": 1, **{key: getattr(trace, key) for key in HEAD}}
    rest = {"skipped": dict(trace.skipped), "meta": {"seconds": 1.5}, "results": described}
    np.savez_compressed(folder / "trace.npz", **arrays)
    (folder / "trace.json").write_text(json.dumps({**head, **rest}))
    return folder
