"""Pages of the documentation, from what is recorded beside the recipes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from everydepth.files import write_text
from everydepth.results import Table
from everydepth_papers.evidence.discover import load_recipe, recipe_files
from everydepth_papers.evidence.index import index_page
from everydepth_papers.evidence.recipe import PRESETS, Recipe, Row
from everydepth_papers.evidence.reproduction import Reproduction
from everydepth_papers.evidence.summaries import (
    claims_figure,
    claims_of,
    claims_picture,
    folded,
    summary_page,
)
from everydepth_papers.paper import PAPERS, papers_table
from everydepth_papers.verdict import VERDICTS

INTRODUCTION = """\
# Tables: published against measured

Written by `everydepth reproduce --docs docs/results.md` from the `results/*.json` beside each
recipe of `everydepth_papers`; do not edit. Each section is one recipe: the command, what the paper
states and whether it held, a figure, and, folded, every number. A *small* preset is a smaller
network, smaller data or a shorter run than the paper's, so it answers whether the effect is there,
not whether the digits agree.

A statement *holds* where it is true of every case (or the whole 95 % interval of its figure is on
the claimed side), *does not hold* where it is true of none, and is *inconclusive* in between.
Behind *given* stands its premise, with the mean and the range of its figure, and in how many cases
it was met: only those count, and where fewer than half of them or fewer than three do, the
statement is *inconclusive* or *not applicable*. A linear classifier is a logistic regression
fitted to every row that the network was trained on, clean and wrong labels alike, its pixels
averaged to 16 x 16 where there are more.

Among the numbers, *published* is what the paper prints and *measured* what the command gave on the
machine named below; the spread is the smallest and the largest value over the seeds unless the note
says otherwise. A dash means that the paper, or the preset, gives no such figure.

Data sets of the *small* presets are folders under `EVERYDEPTH_DATA`, named as the recipe says
(`everydepth reproduce NAME --preset small --dry-run`): `fashion-mnist` holds the four official IDX
files, `cifar10` the official images, text sets their official files; `*.gz` and `*.xz` are read as
they are. `minilm` (all-MiniLM-L6-v2) and `stories15M` are folders that transformers opens;
`cifar-10.2` has the npz files of its authors. A *full* preset is for a night on one machine. Data
sets of the *paper* presets come from the Hugging Face hub by name.
"""


def recorded(folder: Path) -> list[Reproduction]:
    """The results beside a recipe, smallest preset first."""
    files = [folder / "results" / f"{preset}.json" for preset in PRESETS]
    return [
        Reproduction.of_json(json.loads(file.read_text(encoding="utf-8")))
        for file in files
        if file.is_file()
    ]


def judge_again(recipes: Path | None = None) -> None:
    """Recompute the recorded rows with the current recipes; recorded cells do not change."""
    for file in recipe_files(recipes).values():
        recipe = load_recipe(file)
        for found in recorded(file.parent):
            rows = [row.to_json() for row in recipe.rows(found.finished)]
            if json.loads(json.dumps(rows)) != found.about["rows"]:
                text = json.dumps({**found.about, "rows": rows}, indent=1)
                write_text(file.parent / "results" / f"{found.about['preset']}.json", text + "\n")


def tables_page(recipes: Path | None = None) -> str:
    """Every recorded result of every recipe, published against measured."""
    found = [(load_recipe(file), file.parent) for file in recipe_files(recipes).values()]
    found.sort(key=lambda pair: [*PAPERS, ""].index(pair[0].paper))
    sections = (_section(recipe, folder) for recipe, folder in found)
    return "\n".join([INTRODUCTION, *papers_table(), "", *sections])


def figure_files(recipes: Path | None = None) -> dict[str, Reproduction]:
    """Name of the picture -> what it shows."""
    found: dict[str, Reproduction] = {}
    for file in recipe_files(recipes).values():
        if load_recipe(file).figure is None:
            continue
        found |= {_picture(r): r for r in recorded(file.parent)}
    return found


def pages(root: Path) -> dict[str, str]:
    """Name -> text of the pages on the five papers: the summary, all tables, and the index.

    root: of a checkout, whose `benchmarks/results` holds the ledger of claims.
    """
    ledger = _ledger(root)
    results = {name: recorded(file.parent) for name, file in recipe_files().items()}
    pictures = {found.about["recipe"]: name for name, found in figure_files().items()}
    return {
        "results.md": summary_page(ledger, pictures),
        "tables.md": tables_page(),
        "paper-index.md": index_page(results),
    }


def _ledger(root: Path) -> dict[str, Any] | None:
    file = root / "benchmarks" / "results" / "claims.json"
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None


def write_docs(page: Path, recipes: Path | None = None) -> Path:
    """Judge the recorded cells again, draw their figures, and write the page.

    Of the papers' own recipes: a summary, with all tables and an index beside it. Of other ones:
    their tables.
    """
    judge_again(recipes)
    folder = page.parent / "assets" / "results"
    folder.mkdir(parents=True, exist_ok=True)
    files = recipe_files(recipes)
    for name, found in figure_files(recipes).items():
        draw = load_recipe(files[found.about["recipe"]]).figure
        figure = None if draw is None else draw(found.finished)
        if figure is not None:
            figure.savefig(folder / name, dpi=100)
    if recipes is not None:
        write_text(page, tables_page(recipes))
        return page
    for key in PAPERS:
        if claims := claims_of(_ledger(page.parent.parent), key):
            claims_figure(claims).savefig(folder / claims_picture(key), dpi=100)
    for name, text in pages(page.parent.parent).items():
        write_text(page if name == "results.md" else page.with_name(name), text)
    return page


def _section(recipe: Recipe, folder: Path) -> str:
    lines = [f"## {recipe.title}", "", f"`{recipe.name}`: {recipe.source}. {recipe.about}".strip()]
    results = recorded(folder)
    if not results:
        costs = ", ".join(f"{name} {preset.cost}" for name, preset in recipe.presets.items())
        lines += ["", f"No results recorded. Cost: {costs}."]
    for found in results:
        lines += ["", "```", found.about["command"], "```", ""]
        today = [dict(cell) for cell in recipe.preset(found.about["preset"]).cells]
        if any(one.cell not in today for one in found.finished):
            then = found.about["about"]
            lines += [f"*Measured with other settings than the preset has today. Then: {then}*", ""]
        lines += _statements(found.rows)
        if recipe.figure is not None:
            lines += [f"![{recipe.title}](assets/results/{_picture(found)})", ""]
        lines += [*_figures(found.rows), _machine(found)]
    return "\n".join([*lines, ""])


def _statements(rows: Sequence[Row]) -> list[str]:
    """What was judged, with the words of the paper; statements with one outcome share a line."""
    lines: dict[tuple[str, str], dict[str, str]] = {}
    for row in rows:
        if row.measured in VERDICTS:
            what, said, verdict, spread, note = row.cells
            cases = f"{note}; 95 % interval {spread}" if spread else note
            shared = lines.setdefault((f"**{verdict}**", cases), {})
            shared[what] = "" if row.published is None else f"*paper: {said}*"
    return _table(
        ("statement", "here", "cases and premises"),
        [
            ("<br>".join([*shared, *dict.fromkeys(filter(None, shared.values()))]), *outcome)
            for outcome, shared in lines.items()
        ],
    )


def _figures(rows: Sequence[Row]) -> list[str]:
    """All other rows, in a collapsed section."""
    lines = [row.cells for row in rows if row.measured not in VERDICTS]
    table = _table(("quantity", "published", "measured", "spread", "note"), lines)
    return folded(f"{len(lines)} numbers", table) if lines else []


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    if not rows:
        return []
    return [
        *Table(headings=tuple(headings), rows=tuple(map(tuple, rows))).markdown().split("\n"),
        "",
    ]


def _picture(found: Reproduction) -> str:
    return f"{found.about['recipe']}-{found.about['preset']}.png"


def _machine(found: Reproduction) -> str:
    """How many cells took how long, on which machines: those of earlier runs on their own."""
    about = found.about
    cells = f"{len(about['cells'])}{' of ' + str(about['planned']) if 'planned' in about else ''}"
    places: dict[str, int] = {}
    for one in found.finished:
        place = _place(one.machine or about["machine"])
        places[place] = places.get(place, 0) + 1
    several = [f"{count} cells: {place}" for place, count in places.items()]
    where = "; ".join(places if len(places) == 1 else several)
    return f"{about['seeds']} seed(s), {cells} cells, {about['seconds']:.0f} s; {where}."


def _place(machine: Mapping[str, Any]) -> str:
    versions = machine["versions"].items()
    packages = ", ".join(f"{name} {version}" for name, version in versions if version)
    return (
        f"{machine['date']}, {machine['platform']}, {machine['cpus']} CPUs, "
        f"{machine['memory_gib']} GiB, {', '.join(machine['devices'])}; "
        f"Python {machine['python']}, {packages}"
    )
