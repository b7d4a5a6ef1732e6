"""Views of runs in, one HTML page out. Every text from data passes `text` or `script_json`."""

from __future__ import annotations

import base64
import hashlib
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import resources
from importlib.metadata import entry_points
from typing import Any

import numpy as np

from everydepth.environment import installed_version
from everydepth.errors import DataError
from everydepth.report import ablations as _ablations
from everydepth.report import builtin as _builtin
from everydepth.report import growth as _growth
from everydepth.report import sweeps as _sweeps
from everydepth.report.markup import script_json, table, text
from everydepth.report.panels import SECTIONS, Panel, Texts, draw, registered
from everydepth.report.provenance import made_by
from everydepth.report.reading import RunView
from everydepth.report.words import headline, start_depth
from everydepth.results.figures.chart import PALETTE, Chart, Heat
from everydepth.results.figures.web import description

# Importing them registers their panels.
_REGISTERED = (_builtin, _ablations, _growth, _sweeps)
LARGEST_PAGE = 6 * 10**6  # bytes; what mail and issue trackers still take
HEIGHT, LINE = 290, 18  # pixels of a chart, and of a line in its legend
LONGEST_LEGEND = 8  # names; more leave no room for the chart, and pointing at a line names it


def render(views: Sequence[RunView], title: str, command: str | None = None) -> str:
    """The page as one string, without a link to anything outside itself."""
    panels = _panels(views)
    page = _Page(views=views, depth=_depth(views, panels))
    version = installed_version("everydepth") or ""
    body = "".join(
        (
            page.header(title),
            page.dial(panels),
            "<main>",
            *(page.section(key, panels) for key in SECTIONS),
            page.numbers(),
            page.provenance(command),
            "</main>",
            f"<footer>Made by everydepth {text(version)}. This page needs no network.</footer>",
        )
    )
    return _document(title, body, page.data())


def _document(title: str, body: str, data: Mapping[str, Any]) -> str:
    script, plotly = _asset("page.js"), _plotly()
    # Nothing but these two scripts can run, and nothing can be fetched from anywhere.
    policy = (
        "default-src 'none'; base-uri 'none'; form-action 'none'; img-src data: blob:; "
        f"style-src 'unsafe-inline'; script-src '{_digest(script)}' '{_digest(plotly)}'"
    )
    packed = base64.b64encode(zlib.compress(plotly.encode(), 9)).decode()
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{text(title)}</title>
<link rel="icon" href="data:,">
<style>{_asset("page.css")}</style>
</head>
<body>
{body}
<script type="application/json" id="page-data">{script_json(data)}</script>
<script type="application/octet-stream" id="plotly">{packed}</script>
<script>{script}</script>
</body>
</html>
"""


@dataclass
class _Page:
    """Gathers what the script needs (charts, texts that follow the dial) while HTML is written."""

    views: Sequence[RunView]
    depth: int
    charts: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    texts: list[list[str]] = field(default_factory=list[list[str]])

    def data(self) -> dict[str, Any]:
        titles = [f"Depth {k} of {self.depth}" for k in range(self.depth + 1)]
        titles[0] += " · the embedding alone"
        titles[-1] += " · the whole network"
        return {
            "depth": self.depth,
            "start": start_depth(self.views, self.depth),
            "titles": titles,
            "charts": self.charts,
            "texts": self.texts,
        }

    # -- parts of the page ------------------------------------------------------------------------

    def header(self, title: str) -> str:
        lines = [f"<li>{self._run(v.name)} {text(headline(v))}</li>" for v in self.views]
        return f'<header><h1>{text(title)}</h1><ul class="headline">{"".join(lines)}</ul></header>'

    def dial(self, panels: Sequence[Panel]) -> str:
        if self.depth == 0:
            return ""  # a comparison or a ledger: nothing follows a depth
        words = "".join(
            f"<li>{self._run(view.name)} {self._following(self._sentences(view.name, panels))}</li>"
            for view in self.views
        )
        return f"""<section class="dial" aria-label="depth dial"><div><div>
<h2 id="depth-now"></h2>
<div class="turn"><button id="depth-less" aria-label="one block less">&minus;</button>
<input id="depth" type="range" min="0" max="{self.depth}" step="1" aria-label="depth">
<button id="depth-more" aria-label="one block more">+</button></div></div>
<ul class="words" aria-live="polite">{words}</ul></div></section>"""

    def section(self, key: str, panels: Sequence[Panel]) -> str:
        cards = [self._card(panel) for panel in panels if panel.section == key]
        if not cards:
            return ""
        return (
            f'<h2 id="section-{key}">{SECTIONS[key]}</h2><div class="cards">{"".join(cards)}</div>'
        )

    def numbers(self) -> str:
        """Every curve at every depth, for reading without charts and for copying."""
        tables = [self._numbers_of(view) for view in self.views if view.trace is not None]
        if not tables:
            return ""
        return f'<h2>Numbers at every depth</h2><div class="cards">{"".join(tables)}</div>'

    def provenance(self, command: str | None) -> str:
        cards = [made_by(view, self._run(view.name)) for view in self.views]
        if command:
            made = f"<h3>This page</h3><pre>{text(command)}</pre>"
            cards.append(f'<div class="card wide">{made}</div>')
        return f'<h2>How it was made</h2><div class="cards">{"".join(cards)}</div>'

    # -- small parts ------------------------------------------------------------------------------

    def _run(self, name: str) -> str:
        place = [view.name for view in self.views].index(name)
        colour = PALETTE[place % len(PALETTE)]
        return f'<bdi class="run" style="--run:{colour}">{text(name)}</bdi>'

    def _following(self, texts: Sequence[str]) -> str:
        """A text that the dial changes; shorter networks stay at their last depth."""
        padded = list(texts) + [texts[-1]] * (self.depth + 1 - len(texts))
        self.texts.append(padded)
        return f'<span data-text="{len(self.texts) - 1}"></span>'

    def _sentences(self, run: str, panels: Sequence[Panel]) -> list[str]:
        found = [panel.gives_up[run] for panel in panels if panel.gives_up.get(run)]
        if not found:
            return ["has no accuracy, error or cost to compare."]
        deep = max(map(len, found))
        lines = [
            "; ".join(texts[k] for texts in found if k < len(texts) and texts[k]) + "."
            for k in range(deep)
        ]
        if deep <= self.depth:
            lines.append(f"ends at depth {deep - 1}: {lines[-1]}")
        return lines

    def _card(self, panel: Panel) -> str:
        broad = panel.table and len(panel.table[0]) > 4
        wide = " wide" if broad or len(panel.charts) > 1 or any(map(_is_grid, panel.charts)) else ""
        notes = "".join(f'<p class="note">{text(note)}</p>' for note in panel.notes)
        about = f'<p class="soft">{text(panel.about)}</p>' if panel.about else ""
        rows = table(panel.table) if panel.table else ""
        return (
            f'<div class="card{wide}"><h3>{text(panel.title)}</h3>{about}{self._charts(panel)}'
            f"{rows}{self._readings(panel.readings)}{notes}</div>"
        )

    def _charts(self, panel: Panel) -> str:
        grids = "".join(_token_grid(chart) for chart in panel.charts if _is_grid(chart))
        named = bool(panel.readings)
        drawn = "".join(self._chart(chart, named) for chart in panel.charts if not _is_grid(chart))
        return f'{grids}<div class="charts">{drawn}</div>' if drawn else grids

    def _chart(self, chart: Chart, named: bool) -> str:
        """`named`: the readings below the chart already say which colour is which run."""
        last = [mark.y[-1] for mark in chart.marks if isinstance(mark, Heat)] or [self.depth]
        figure = description([replace(chart, title="", marks=self._coloured(chart))])
        layout = figure["layout"]
        known = named and chart.names <= {view.name for view in self.views}
        if known or len(chart.names) > LONGEST_LEGEND:
            layout["showlegend"] = False
        if not layout["showlegend"]:
            layout["margin"] |= {"t": 8}
        self.charts.append({"figure": figure, "dial": chart.dial, "last": int(max(last))})
        title = f"<figcaption>{text(chart.title)}</figcaption>" if chart.title else ""
        extra = LINE * max(0, len(chart.names) - 4) if layout["showlegend"] else 0
        height = f' style="height:{HEIGHT + extra}px"'
        place = f'<div class="chart" data-chart="{len(self.charts) - 1}"{height}></div>'
        return f"<figure>{title}{place}</figure>"

    def _coloured(self, chart: Chart) -> tuple[Any, ...]:
        """A panel may show some of the runs only: each keeps its colour from panel to panel."""
        place = {view.name: i for i, view in enumerate(self.views)}

        def own(mark: Any) -> Any:
            run = "" if isinstance(mark, Heat) else mark.name.partition(" · ")[0]
            return replace(mark, colour=place[run]) if run in place else mark

        return chart.marks if len(place) == 1 else tuple(map(own, chart.marks))

    def _readings(self, readings: Texts) -> str:
        lines = [
            f"<li>{self._run(run)} {self._following(texts)}</li>"
            for run, texts in readings.items()
            if texts
        ]
        return f'<ul class="readings">{"".join(lines)}</ul>' if lines else ""

    def _numbers_of(self, view: RunView) -> str:
        assert view.trace is not None
        columns = view.trace.columns()
        head = "".join(f"<th>{text(name)}</th>" for name in ("depth", *columns))
        rows: list[str] = []
        for depth in range(view.trace.depth + 1):
            cells = ["" if c[depth] is None else f"{c[depth]:.4g}" for c in columns.values()]
            line = "".join(f"<td>{cell}</td>" for cell in (str(depth), *cells))
            rows.append(f'<tr data-depth="{depth}" data-last="{view.trace.depth}">{line}</tr>')
        return (
            f'<details class="card wide"><summary>{self._run(view.name)} '
            f"{len(columns)} curves</summary>"
            f'<div class="scroll"><table><thead><tr>{head}</tr></thead>'
            f"<tbody>{''.join(rows)}</tbody></table></div></details>"
        )


def _is_grid(chart: Chart) -> bool:
    return any(isinstance(mark, Heat) and mark.text for mark in chart.marks)


def _token_grid(chart: Chart) -> str:
    """Tokens as a table: text that can be selected, the last depth on top, scrolled sideways."""
    heat = next(mark for mark in chart.marks if isinstance(mark, Heat))
    last = int(heat.y[-1])
    head = "".join(f"<th>{_token(token)}</th>" for token in ("depth", *chart.x.ticks))
    rows: list[str] = []
    for depth, tokens, values in reversed(list(zip(heat.y, heat.text, heat.z, strict=True))):
        cells = "".join(_cell(token, float(v)) for token, v in zip(tokens, values, strict=True))
        where = f'data-depth="{int(depth)}" data-last="{last}"'
        rows.append(f"<tr {where}><th>{int(depth)}</th>{cells}</tr>")
    title = f"<h3>{text(chart.title)}</h3>" if chart.title else ""
    return (
        f'{title}<div class="scroll"><table class="tokens"><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


def _cell(token: str, chance: float) -> str:
    if not np.isfinite(chance):
        return f"<td>{_token(token)}</td>"
    strength = min(max(chance, 0.0), 1.0)
    ink = "#fff" if strength > 0.6 else "inherit"
    style = f"background:rgba(0,114,178,{strength:.2f});color:{ink}"
    return f'<td style="{style}" title="probability {chance:.3f}">{_token(token)}</td>'


def _token(token: str) -> str:
    """A token as text; blanks and line ends, which cannot be seen, as signs."""
    shown = token.replace("\n", "⏎").replace("\t", "⇥")
    return text(shown if shown.strip() else "␣" * len(shown) or "∅")


def _panels(views: Sequence[RunView]) -> list[Panel]:
    """Registered panels first, in their order, then what else the runs have."""
    for point in entry_points(group="everydepth.panels"):
        point.load()  # registers them
    present = dict.fromkeys(name for view in views for name in view.results)
    order = [*(name for name in registered() if name in present)]
    order += [name for name in present if name not in order]
    found: list[Panel] = []
    for name in order:
        drawn = draw(name, {v.name: v.results[name] for v in views if name in v.results})
        if drawn is not None:
            found.append(drawn)
    return found + _builtin.training({view.name: view.history for view in views})


def _depth(views: Sequence[RunView], panels: Sequence[Panel]) -> int:
    """The last depth of the deepest network."""
    depths = [view.trace.depth for view in views if view.trace is not None]
    for panel in panels:
        for texts in (*panel.readings.values(), *panel.gives_up.values()):
            depths.append(len(texts) - 1)
    if not depths and any(panel.table for panel in panels):
        return 0
    if not depths:
        names = ", ".join(view.name for view in views)
        raise DataError(
            f"no trace in {names}, so there is no depth to show; run `everydepth trace MODEL` first"
        )
    return max(depths)


def _digest(script: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}"


def _asset(name: str) -> str:
    return resources.files("everydepth.report").joinpath(name).read_text(encoding="utf-8")


def _plotly() -> str:
    return resources.files("plotly").joinpath("package_data", "plotly.min.js").read_text("utf-8")
