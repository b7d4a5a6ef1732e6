"""Reproductions as they were written before all results were saved alike."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from everydepth_papers.evidence.reproduction import Reproduction
from everydepth_papers.verdict import Verdict

WORDS: Mapping[str, Verdict] = {
    "held": "holds",
    "did not hold": "does not hold",
    "held in part": "inconclusive",
    "undecided": "inconclusive",
    "one seed": "inconclusive",
}


def convert(name: str, content: Mapping[str, Any], folder: Path) -> Reproduction:
    """Verdicts had other words, with the count of cases behind a colon."""
    return Reproduction.of_json({**content, "rows": [_row(row) for row in content["rows"]]})


def _row(row: Mapping[str, Any]) -> dict[str, Any]:
    word, _, count = str(row["measured"]).partition(": ")
    if word not in WORDS:
        return dict(row)
    note = "; ".join(filter(None, (count, row["note"])))
    return {**row, "measured": WORDS[word], "note": note}
