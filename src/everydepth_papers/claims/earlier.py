"""A ledger of claims from its plain JSON, as Results that a report can show."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from everydepth.results import Results, named, rows
from everydepth_papers.paper import paper

HEADS = ("claim", "paper", "on", "measured", "95 % interval", "wanted", "verdict")


def convert(name: str, ledger: Mapping[str, Any], folder: Path) -> Results:
    """One line a claim and kind of network; the claim itself stands in the first."""
    counts = ", ".join(f"{n} {verdict}" for verdict, n in ledger["counts"].items() if n)
    lines = [line for row in ledger["claims"] for line in _lines(row)]
    table = rows(
        name,
        {head: [line[place] for line in lines] for place, head in enumerate(HEADS)},
        title="Claims of the papers",
        about="A claim holds where the whole interval lies on the wanted side, on every kind of "
        f"network it is made of. {ledger['subject']}: {counts}.",
    )
    return Results(results=named(table), kind=name)


def _lines(row: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    name = str(paper(row["paper"]))
    wanted = f"{row['relation']} {row['threshold']:.4g}"
    if not row["measured"]:
        yield f"{row['statement']} {row['note']}", name, "", "", "", "", row["verdict"]
    for place, one in enumerate(row["measured"]):
        mean = "undefined" if one["mean"] is None else f"{one['mean']:.3g}"
        spread = "none" if one["low"] is None else f"{one['low']:.3g} to {one['high']:.3g}"
        first = f"{row['statement']} ({row['test']})" if place == 0 else ""
        yield first, name, one["on"], mean, spread, wanted, one["verdict"]
