"""A comparison as a terminal table, an HTML page, and a page of the documentation."""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from everydepth_papers.evidence.recipe import PRESETS, Recipe, Row
from everydepth_papers.evidence.running import Reproduction

HEAD = ("quantity", "published", "measured", "spread", "note")


def number(value: float | int | str | None) -> str:
    if value is None:
        return "-"
    if isinstance(value, str) or not math.isfinite(value):
        return str(value)
    return f"{value:.4g}" if abs(value) < 1e5 else f"{value:,.0f}"


def cells_of(row: Row) -> tuple[str, ...]:
    spread = (
        "" if row.low is None or row.high is None else f"{number(row.low)} … {number(row.high)}"
    )
    return row.quantity, number(row.published), number(row.measured), spread, row.note


def terminal_table(found: Reproduction) -> Table:
    table = Table(title=f"{found.title} ({found.source}), preset {found.preset}")
    for name in HEAD:
        table.add_column(name, justify="right" if name in HEAD[1:4] else "left", overflow="fold")
    for row in found.rows:
        table.add_row(*map(_plain, cells_of(row)))
    return table


def listing(recipes: Mapping[str, Recipe]) -> Table:
    """Every recipe, what it covers and what each preset costs."""
    table = Table(title=f"{len(recipes)} recipes")
    for name in ("name", "covers", *PRESETS):
        table.add_column(name, overflow="fold")
    for name, recipe in recipes.items():
        costs = (recipe.presets[p].cost if p in recipe.presets else "-" for p in PRESETS)
        table.add_row(*map(_plain, (name, f"{recipe.source}: {recipe.title}", *costs)))
    return table


def html_page(found: Reproduction, figure: Any = None) -> str:
    """One page that needs no network and runs no script."""
    from everydepth.reports.markup import folded, text
    from everydepth.reports.markup import table as html_table

    picture = ""
    if figure is not None:
        file = io.BytesIO()
        figure.savefig(file, format="png", dpi=120)
        data = base64.b64encode(file.getvalue()).decode()
        picture = f'<img alt="{text(found.title)}" src="data:image/png;base64,{data}">'
    rows = html_table(HEAD, [*map(cells_of, found.rows)])
    facts = [(str(k), str(v)) for k, v in found.machine.items()]
    cells = [
        (str(r.cell), str(r.seed), f"{r.seconds:.1f}", str(dict(r.values))[:400])
        for r in found.results
    ]
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{text(found.title)}</title>
<style>
body{{font:16px/1.5 system-ui,sans-serif;max-width:64rem;margin:2rem auto;padding:0 1rem;
color:#222;background:#fff}}
table{{border-collapse:collapse;margin:1rem 0}}th,td{{padding:.3rem .8rem;text-align:left;
border-bottom:1px solid #ddd;vertical-align:top}}.scroll{{overflow-x:auto}}
img{{max-width:100%}}code{{background:#f3f3f3;padding:.1rem .3rem}}
</style></head><body>
<h1>{text(found.title)}</h1>
<p>{text(found.source)}. Preset <b>{text(found.preset)}</b>, {found.seeds} seed(s),
{found.seconds:.0f} s of work. <code>{text(found.command)}</code></p>
<p>{text(found.about)}</p>
{rows}{picture}
{folded("Machine and versions", html_table(("what", "value"), facts))}
{folded(f"{len(cells)} cells", html_table(("cell", "seed", "seconds", "values"), cells))}
</body></html>
"""


def markdown_table(rows: Sequence[Row]) -> list[str]:
    lines = [f"| {' | '.join(HEAD)} |", "|---|---:|---:|---:|---|"]
    for row in rows:
        lines.append(
            f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells_of(row))} |"
        )
    return lines


def _plain(words: str) -> Any:
    from rich.text import Text

    # Text, not markup: brackets in a quantity are not styles.
    return Text(words)
