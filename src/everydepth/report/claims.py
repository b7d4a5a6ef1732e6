"""The panel of a ledger of claims, from its plain JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from everydepth.report.panels import Panel, number, panel


@panel("claims", section="more")
def claims(runs: Mapping[str, Any]) -> Panel:
    """One line a claim and kind of network."""
    several = len(runs) > 1
    head = (*(["run"] if several else []), "paper", "claim", "verdict", "measured", "test")
    rows: list[tuple[str, ...]] = [head]
    counts: list[str] = []
    for run, ledger in runs.items():
        found = ", ".join(f"{n} {verdict}" for verdict, n in ledger["counts"].items() if n)
        counts.append(f"{ledger['subject']}: {found}.")
        for row in ledger["claims"]:
            values = "; ".join(_value(one) for one in row["measured"]) or row["note"]
            test = f"{row['test']} {row['relation']} {number(row['threshold'])}"
            cells = (row["paper"], row["statement"], row["verdict"], values, test)
            rows.append((*([run] if several else []), *cells))
    return Panel(
        title="Claims of the papers",
        about="A claim holds where the whole 95 % interval lies on the claimed side. "
        + " ".join(counts),
        table=tuple(rows),
    )


def _value(one: Mapping[str, Any]) -> str:
    if one["mean"] is None:
        return f"{one['on']}: undefined"
    if one["low"] is None:
        return f"{one['on']} {number(one['mean'], 3)} (no interval)"
    spread = f"{number(one['low'], 3)} to {number(one['high'], 3)}"
    return f"{one['on']} {number(one['mean'], 3)} ({spread})"
