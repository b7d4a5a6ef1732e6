"""Where recipes are: in this package, or in a folder of your own."""

from __future__ import annotations

import difflib
import importlib.util
from collections.abc import Mapping
from pathlib import Path

from everydepth.errors import SettingError
from everydepth.results import Table
from everydepth_papers.evidence.recipe import PRESETS, Recipe

RECIPES = Path(__file__).parents[1] / "recipes"


def recipe_files(folder: str | Path | None = None) -> dict[str, Path]:
    """Name -> recipe.py, found at any depth under the folder."""
    root = RECIPES if folder is None else Path(folder)
    if not root.is_dir():
        raise SettingError(
            f"there is no folder of recipes at {root}; give one with --recipes, or leave it out to "
            "use the papers' own"
        )
    found: dict[str, Path] = {}
    for file in sorted(root.rglob("recipe.py")):
        name = file.parent.name
        if name in found:
            raise SettingError(f"two recipes are called {name}: {found[name]} and {file}")
        found[name] = file
    return found


def load_recipe(file: str | Path) -> Recipe:
    """The RECIPE of a recipe.py. It is Python: run only recipes you trust."""
    path = Path(file)
    # A name per folder, so that recipes do not replace one another among the loaded modules.
    spec = importlib.util.spec_from_file_location(f"everydepth_recipe_{path.parent.name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    recipe = getattr(module, "RECIPE", None)
    if not isinstance(recipe, Recipe):
        raise SettingError(f"{path} defines no RECIPE; write RECIPE = Recipe(name=...)")
    if recipe.name != path.parent.name:
        raise SettingError(
            f"the recipe in {path.parent.name}/ is called {recipe.name!r}; give both one name"
        )
    return recipe


def find_recipes(folder: str | Path | None = None) -> dict[str, Recipe]:
    """All recipes by name."""
    return {name: load_recipe(file) for name, file in recipe_files(folder).items()}


def listing(recipes: Mapping[str, Recipe]) -> Table:
    """Every recipe, what it covers and what each preset costs."""
    return Table(
        title=f"{len(recipes)} recipes",
        headings=("name", "covers", *PRESETS),
        rows=tuple(
            (
                name,
                f"{recipe.source}: {recipe.title}",
                *(recipe.presets[p].cost if p in recipe.presets else "-" for p in PRESETS),
            )
            for name, recipe in recipes.items()
        ),
    )


def find_recipe(name: str, folder: str | Path | None = None) -> tuple[Recipe, Path]:
    """One recipe and its folder; the error for an unknown name suggests the closest one."""
    files = recipe_files(folder)
    if name not in files:
        close = difflib.get_close_matches(name, files, n=1, cutoff=0.4)
        guess = f"did you mean {close[0]}?" if close else f"known are {', '.join(files)}."
        raise SettingError(
            f"no recipe {name!r}; {guess} `everydepth reproduce --list` shows them all"
        )
    return load_recipe(files[name]), files[name].parent
