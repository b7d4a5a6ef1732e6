"""The panel of a ledger of claims, from its plain JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from everydepth.report.panels import Panel, number, panel
from everydepth_papers.paper import paper


@panel("claims", section="more")
def claims(runs: Mapping[str, Any]) -> Panel:
    """One line a claim and kind of network; the claim itself stands in the first."""
    several = len(runs) > 1
    head = ("claim", "paper", "on", "measured", "95 % interval", "wanted", "verdict")
    rows: list[tuple[str, ...]] = [(*head[:1], *(["run"] if several else []), *head[1:])]
    counts: list[str] = []
    for run, ledger in runs.items():
        found = ", ".join(f"{n} {verdict}" for verdict, n in ledger["counts"].items() if n)
        counts.append(f"{ledger['subject']}: {found}.")
        for row in ledger["claims"]:
            for claim, cells in _lines(row):
                rows.append((claim, *([run] if several else []), *cells))
    return Panel(
        title="Claims of the papers",
        about="A claim holds where the whole interval lies on the wanted side, on every kind of "
        "network it is made of. " + " ".join(counts),
        table=tuple(rows),
    )


def _lines(row: Mapping[str, Any]) -> list[tuple[str, tuple[str, ...]]]:
    name = str(paper(row["paper"]))
    wanted = f"{row['relation']} {number(row['threshold'])}"
    if not row["measured"]:
        return [(f"{row['statement']} {row['note']}", (name, "", "", "", "", row["verdict"]))]
    lines: list[tuple[str, tuple[str, ...]]] = []
    for place, one in enumerate(row["measured"]):
        mean = "undefined" if one["mean"] is None else number(one["mean"], 3)
        spread = "none"
        if one["low"] is not None:
            spread = f"{number(one['low'], 3)} to {number(one['high'], 3)}"
        first = f"{row['statement']} ({row['test']})" if place == 0 else ""
        lines.append((first, (name, one["on"], mean, spread, wanted, one["verdict"])))
    return lines
