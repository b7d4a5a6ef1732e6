"""From views of runs to one HTML page. All text from data goes through `text` or `script_json`."""

from __future__ import annotations

import base64
import hashlib
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import resources
from typing import Any

from everydepth.environment import installed_version
from everydepth.errors import DataError
from everydepth.reports.cards import Card, card, heading, in_order
from everydepth.reports.markup import script_json, table, text, token, token_cell, token_table
from everydepth.reports.provenance import made_by
from everydepth.reports.reading import RunView
from everydepth.reports.words import UNDEFINED, gives_up, headline, start_depth
from everydepth.results import Result
from everydepth.results.figures.chart import PALETTE, Chart, Heat
from everydepth.results.figures.web import description
from everydepth.results.layout import is_line, merged

LARGEST_PAGE = 6 * 10**6  # bytes; fits in mail and issue trackers
HEIGHT, LINE = 290, 18  # pixels of a chart, and of a line in its legend
LONGEST_LEGEND = 8  # names; a longer legend would leave no room, and hovering shows names anyway


def render(views: Sequence[RunView], title: str, command: str | None = None) -> str:
    """The page as one string, without references to anything outside of it."""
    cards = _cards(views)
    page = _Page(views=views, depth=_depth(views, cards), along=_along(views))
    version = installed_version("everydepth") or ""
    body = "".join(
        (
            page.header(title),
            page.dial(),
            "<main>",
            *(page.section(key, cards) for key in in_order(cards)),
            page.numbers(),
            page.provenance(command),
            "</main>",
            f"<footer>Made by everydepth {text(version)}. This page needs no network.</footer>",
        )
    )
    return _document(title, body, page.data())


def _document(title: str, body: str, data: Mapping[str, Any]) -> str:
    script, plotly = _asset("page.js"), _plotly()
    # Only these two scripts can run, and nothing can be fetched.
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
    """Builds the HTML, and collects the charts and texts that the script updates."""

    views: Sequence[RunView]
    depth: int
    along: str
    charts: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    texts: list[list[str]] = field(default_factory=list[list[str]])

    @property
    def first(self) -> int:
        """The lowest value of the dial: layers are counted from 1."""
        return 1 if self.along == "layer" else 0

    def data(self) -> dict[str, Any]:
        titles = [f"{self.along.capitalize()} {k} of {self.depth}" for k in range(self.depth + 1)]
        if self.along == "depth":
            titles[0] += " · the embedding alone"
            titles[-1] += " · the whole network"
        return {
            "first": self.first,
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

    def dial(self) -> str:
        if self.depth == 0:
            return ""  # nothing depends on depth
        words = "".join(
            f"<li>{self._run(view.name)} {self._following(lines)}</li>"
            for view in self.views
            if (lines := self._sentences(view))
        )
        limits = f'min="{self.first}" max="{self.depth}" step="1"'
        return f"""<section class="dial" aria-label="{self.along} dial"><div><div>
<h2 id="depth-now"></h2>
<div class="turn"><button id="depth-less" aria-label="one less">&minus;</button>
<input id="depth" type="range" {limits} aria-label="{self.along}">
<button id="depth-more" aria-label="one more">+</button></div></div>
<ul class="words" aria-live="polite">{words}</ul></div></section>"""

    def section(self, key: str, cards: Sequence[Card]) -> str:
        inner = "".join(self._card(card) for card in cards if card.section == key)
        name = text(key.replace(" ", "-"))
        return f'<h2 id="section-{name}">{text(heading(key))}</h2><div class="cards">{inner}</div>'

    def numbers(self) -> str:
        """Tables of all values at every depth, for reading without charts and for copying."""
        tables = "".join(map(self._numbers_of, self.views))
        return f'<h2>Numbers at every depth</h2><div class="cards">{tables}</div>' if tables else ""

    def provenance(self, command: str | None) -> str:
        cards = [made_by(view, self._run(view.name)) for view in self.views]
        if command:
            made = f"<h3>This page</h3><pre>{text(command)}</pre>"
            cards.append(f'<div class="card wide">{made}</div>')
        return f'<h2>How it was made</h2><div class="cards">{"".join(cards)}</div>'

    # -- small parts ------------------------------------------------------------------------------

    def _run(self, name: str) -> str:
        place = [view.name for view in self.views].index(name)
        color = PALETTE[place % len(PALETTE)]
        return f'<bdi class="run" style="--run:{color}">{text(name)}</bdi>'

    def _following(self, texts: Sequence[str]) -> str:
        """A text that follows the dial; beyond a network's last depth it stays the same."""
        padded = list(texts) + [texts[-1]] * (self.depth + 1 - len(texts))
        self.texts.append(padded)
        return f'<span data-text="{len(self.texts) - 1}"></span>'

    def _sentences(self, view: RunView) -> list[str]:
        lines = gives_up(view)
        if lines and len(lines) <= self.depth:
            lines.append(f"ends at depth {len(lines) - 1}: {lines[-1]}")
        return lines

    def _card(self, card: Card) -> str:
        broad = card.table is not None and len(card.table.headings) > 4
        wide = " wide" if broad or len(card.charts) > 1 or any(map(_is_grid, card.charts)) else ""
        notes = "".join(f'<p class="note">{text(note)}</p>' for note in card.notes)
        about = f'<p class="soft">{text(card.about)}</p>' if card.about else ""
        rows = "" if card.table is None else table(card.table.heads, card.table.cells)
        return (
            f'<div class="card{wide}"><h3>{text(card.title)}</h3>{about}{self._charts(card)}'
            f"{rows}{self._readings(card.readings)}{notes}</div>"
        )

    def _charts(self, card: Card) -> str:
        grids = "".join(_token_grid(chart) for chart in card.charts if _is_grid(chart))
        drawn = "".join(self._chart(chart, card) for chart in card.charts if not _is_grid(chart))
        return f'{grids}<div class="charts">{drawn}</div>' if drawn else grids

    def _chart(self, chart: Chart, card: Card) -> str:
        last = [mark.y[-1] for mark in chart.marks if isinstance(mark, Heat)] or [self.depth]
        figure = description([replace(chart, title="", marks=self._colored(chart, card))])
        layout = figure["layout"]
        # The readings below a chart already show the runs' colors.
        known = card.readings and chart.names <= {view.name for view in self.views}
        if known or len(chart.names) > LONGEST_LEGEND:
            layout["showlegend"] = False
        if not layout["showlegend"]:
            layout["margin"] |= {"t": 8}
        self.charts.append({"figure": figure, "dial": chart.dial, "last": int(max(last))})
        alone = card.runs[0] if len(card.runs) == 1 < len(self.views) else ""
        caption = " · ".join(filter(None, (alone, chart.title)))
        title = f"<figcaption>{text(caption)}</figcaption>" if caption else ""
        extra = LINE * max(0, len(chart.names) - 4) if layout["showlegend"] else 0
        height = f' style="height:{HEIGHT + extra}px"'
        place = f'<div class="chart" data-chart="{len(self.charts) - 1}"{height}></div>'
        return f"<figure>{title}{place}</figure>"

    def _colored(self, chart: Chart, card: Card) -> tuple[Any, ...]:
        """The marks in their runs' colors, which are the same on every card."""
        place = {view.name: i for i, view in enumerate(self.views)}
        if len(card.runs) == 1:
            own = place[card.runs[0]]
            swapped = {0: own, own: 0}
            return tuple(
                mark
                if isinstance(mark, Heat)
                else replace(mark, color=swapped.get(mark.color, mark.color))
                for mark in chart.marks
            )

        def of_run(mark: Any) -> Any:
            run = "" if isinstance(mark, Heat) else mark.name.partition(" · ")[0]
            return replace(mark, color=place[run]) if run in place else mark

        return tuple(map(of_run, chart.marks))

    def _readings(self, readings: Mapping[str, Sequence[str]]) -> str:
        lines = [
            f"<li>{self._run(run)} {self._following(texts)}</li>"
            for run, texts in readings.items()
            if texts
        ]
        return f'<ul class="readings">{"".join(lines)}</ul>' if lines else ""

    def _numbers_of(self, view: RunView) -> str:
        found: list[str] = []
        for results in view.answers.values():
            lines = [r for r in results.results.values() if r.axis == "depth" and is_line(r)]
            if not lines:
                continue
            every = merged(lines, lines[0], "", every=True)
            last = max(int(row[0] or 0) for row in every.rows)
            rows = table(
                every.headings,
                every.cells,
                [f'data-depth="{int(row[0] or 0)}" data-last="{last}"' for row in every.rows],
            )
            count = f"{len(every.headings) - 1} curves of the {text(_spoken(results.kind))}"
            summary = f"<summary>{self._run(view.name)} {count}</summary>"
            found.append(f'<details class="card wide">{summary}{rows}</details>')
        return "".join(found)


def _spoken(kind: str) -> str:
    return kind.replace("_", " ")


def _is_grid(chart: Chart) -> bool:
    return any(isinstance(mark, Heat) and mark.text for mark in chart.marks)


def _token_grid(chart: Chart) -> str:
    heat = next(mark for mark in chart.marks if isinstance(mark, Heat))
    rows = {
        int(depth): [
            token_cell(word, float(value), f' title="probability {value:.3f}"')
            for word, value in zip(words, values, strict=True)
        ]
        for depth, words, values in zip(heat.y, heat.text, heat.z, strict=True)
    }
    head = [f"<th>{token(word)}</th>" for word in chart.x.ticks]
    title = f"<h3>{text(chart.title)}</h3>" if chart.title else ""
    return title + token_table(head, rows, lambda _: f' data-last="{int(heat.y[-1])}"')


def _cards(views: Sequence[RunView]) -> list[Card]:
    """A card for every measurement, without repetitions.

    If two in a section have the same title, the second names its source; if it also has the same
    values, as accuracy in a profile and a trace, it is left out.
    """
    keys = dict.fromkeys((of, name) for v in views for of, a in v.answers.items() for name in a)
    found: list[Card] = []
    for of, name in keys:
        runs: dict[str, Result] = {}
        for view in views:
            answer = view.answers.get(of)
            if answer is not None and name in answer:
                runs[view.name] = answer.result(name)
        new = card(runs)
        twins = [old for old in found if (new.section, new.title) == (old.section, old.title)]
        if any(_includes(old, new) for old in twins):
            continue
        if twins:
            new = replace(new, title=f"{new.title} · {_spoken(of)}")
        found.append(new)
    return found


def _includes(old: Card, new: Card) -> bool:
    """Whether the old card has all values of the new one."""
    return bool(new.readings) and all(
        set(enumerate(texts)) - {(depth, UNDEFINED) for depth in range(len(texts))}
        <= set(enumerate(old.readings.get(run, ())))
        for run, texts in new.readings.items()
    )


def _depth(views: Sequence[RunView], cards: Sequence[Card]) -> int:
    """The last depth of the deepest network; 0 if nothing depends on depth."""
    if not cards:
        names = ", ".join(view.name for view in views)
        raise DataError(
            f"no results in {names}, so there is nothing to show; "
            "run `everydepth trace MODEL` first"
        )
    depths = [len(texts) - 1 for found in cards for texts in found.readings.values()]
    return max([0, *depths, *(a.depth for view in views for a in view.answers.values())])


def _along(views: Sequence[RunView]) -> str:
    """What the dial controls: "depth", or "layer" if only layers were measured."""
    axes = {r.axis for view in views for a in view.answers.values() for r in a.results.values()}
    return "layer" if "layer" in axes and "depth" not in axes else "depth"


def _digest(script: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}"


def _asset(name: str) -> str:
    return resources.files("everydepth.reports").joinpath(name).read_text(encoding="utf-8")


def _plotly() -> str:
    return resources.files("plotly").joinpath("package_data", "plotly.min.js").read_text("utf-8")
