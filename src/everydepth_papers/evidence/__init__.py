"""Evidence: every published result as a recipe that runs, printed figures beside measured ones."""

from everydepth_papers.evidence.discover import find_recipe, find_recipes
from everydepth_papers.evidence.recipe import (
    Cell,
    Finished,
    Preset,
    Recipe,
    Row,
    both,
    in_stages,
    later,
    over_seeds,
    published,
)
from everydepth_papers.evidence.reproduction import Reproduction
from everydepth_papers.evidence.running import data_folder, dry_run, reproduce

__all__ = [
    "Cell",
    "Finished",
    "Preset",
    "Recipe",
    "Reproduction",
    "Row",
    "both",
    "data_folder",
    "dry_run",
    "find_recipe",
    "find_recipes",
    "in_stages",
    "later",
    "over_seeds",
    "published",
    "reproduce",
]
