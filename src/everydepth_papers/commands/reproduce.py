"""`everydepth reproduce`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from everydepth.errors import SettingError


def reproduce(
    name: Annotated[str | None, typer.Argument(help="A recipe; --list shows them.")] = None,
    preset: Annotated[
        str,
        typer.Option(
            help="smoke (seconds), small (minutes), full (hours) or paper (as published)."
        ),
    ] = "smoke",
    seeds: Annotated[
        int | None, typer.Option(help="How many, instead of the preset's own.")
    ] = None,
    run: Annotated[
        Path | None,
        typer.Option("--run", "-o", help="The run directory; runs/reproduce/NAME-PRESET if unset."),
    ] = None,
    finished: Annotated[
        bool,
        typer.Option("--finished", help="Train nothing: compare with the cells that --run has."),
    ] = False,
    recorded: Annotated[
        bool,
        typer.Option(
            "--recorded", help="Take the cells that are recorded beside the recipe as done."
        ),
    ] = False,
    dry: Annotated[
        bool, typer.Option("--dry-run", help="Show what would be done, and do nothing.")
    ] = False,
    show: Annotated[bool, typer.Option("--list", help="Show all recipes with their cost.")] = False,
    recipes: Annotated[Path | None, typer.Option(help="A folder of recipes of your own.")] = None,
    record: Annotated[
        bool, typer.Option("--record", help="Also write results/PRESET.json beside the recipe.")
    ] = False,
    docs: Annotated[
        Path | None, typer.Option(help="Write all recorded results to this Markdown page.")
    ] = None,
) -> None:
    """Reproduce a published result and compare it with the printed figures.

    $ everydepth reproduce progressive_table1 --preset small

    Stop it at any time, even with kill -9; the same command then does what is missing. The run
    directory holds the comparison and figure.png, and everydepth report shows it.
    """
    from rich.console import Console

    from everydepth.cli.showing import show_table
    from everydepth_papers.evidence import dry_run, find_recipe, find_recipes
    from everydepth_papers.evidence import reproduce as reproduced
    from everydepth_papers.evidence.discover import listing

    console = Console()
    if show:
        show_table(listing(find_recipes(recipes)), console)
        return
    if docs is not None:
        from everydepth_papers.evidence.docs import write_docs

        typer.echo(f"wrote {write_docs(docs, recipes)}")
        return
    if name is None:
        raise SettingError("which recipe? `everydepth reproduce --list` shows them all")
    recipe, home = find_recipe(name, recipes)
    recipe.preset(preset)
    folder = Path("runs") / "reproduce" / f"{name}-{preset}" if run is None else run
    earlier = _recorded(home, preset) if recorded else None
    if dry:
        _say(console, dry_run(recipe, preset, seeds=seeds, run=folder, earlier=earlier))
        return
    from everydepth.runs.together import is_main

    found = reproduced(recipe, preset, seeds=seeds, run=folder, finished=finished, earlier=earlier)
    if not is_main():
        return
    figure = None if recipe.figure is None else recipe.figure(found.finished)
    if figure is not None:
        figure.savefig(folder / "figure.png", dpi=150)
    show_table(found.table("comparison"), console)
    typer.echo(f"wrote {folder}; see it with: everydepth report {folder}")
    if record:
        from everydepth.files import write_text

        (home / "results").mkdir(exist_ok=True)
        file = home / "results" / f"{preset}.json"
        write_text(file, json.dumps(dict(found.about), indent=1) + "\n")
        typer.echo(f"wrote {file}")


def _recorded(home: Path, preset: str) -> Any:
    from everydepth_papers.evidence.docs import recorded

    for found in recorded(home):
        if found.about["preset"] == preset:
            return found
    raise SettingError(
        f"--recorded, but {home.name} has no results/{preset}.json; leave it out to do every cell"
    )


def _say(console: Any, plan: dict[str, Any]) -> None:
    from rich.text import Text

    lines = [
        f"{plan['recipe']}, preset {plan['preset']}: {plan['cost']}",
        f"{len(plan['cells'])} cells, {plan['done']} done",
        *(f"  {cell}" for cell in plan["cells"]),
        *(f"model {name}: {size:,} parameters" for name, size in plan["models"].items()),
        f"data: {', '.join(plan['needs']) or 'bundled'}",
    ]
    if plan["missing"]:
        lines.append(f"not here yet: {', '.join(plan['missing'])}")
    if plan["memory_gib"]:
        lines.append(f"memory of a cell: about {plan['memory_gib']:g} GiB")
    lines.append(f"launch: {plan['launch']}")
    for line in lines:
        console.print(Text(line))
