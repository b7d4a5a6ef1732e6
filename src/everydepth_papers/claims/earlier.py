"""Ledgers as they were written before all results were saved alike."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from everydepth_papers.claims.ledger import Ledger
from everydepth_papers.paper import PAPERS

SPELLED = {
    "memorisation": "memorization",
    "generalises": "generalizes",
    "regulariser": "regularizer",
}


def convert(name: str, content: Mapping[str, Any], folder: Path) -> Ledger:
    """Papers were numbered, in the order that `PAPERS` has."""
    return Ledger.of_json({**content, "claims": [_claim(row) for row in content["claims"]]})


def _claim(row: Mapping[str, Any]) -> dict[str, Any]:
    name, key = row["name"], row["paper"]
    for british, american in SPELLED.items():
        name = name.replace(british, american)
    return {**row, "name": name, "paper": list(PAPERS)[int(key)] if key.isdigit() else key}
