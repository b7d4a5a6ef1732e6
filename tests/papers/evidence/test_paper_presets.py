"""Paper presets execute: every cell trains at toy size, with its own objective and schedule."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.helpers.toy_hub import SIDE, toy_hub

from everydepth.training.schedules import SCHEDULES
from everydepth_papers.evidence.discover import load_recipe, recipe_files
from everydepth_papers.paper import PAPERS

FILES = {n: file for n, file in recipe_files().items() if n.startswith(tuple(PAPERS))}
# Of a cell: setting -> the most it may be. All others, such as objectives, optimizers, rates,
# schedules and names of data sets, stay as they are.
SIZES: Mapping[str, int] = {
    "epochs": 1, "steps": 1, "after_steps": 1, "batch": 8, "batch_size": 8, "rows": 16,
    "test_rows": 16, "look": 24, "size": SIDE, "patch": 16, "depth": 3, "width": 16, "heads": 2,
    "inner": 16, "length": 16, "tokens": 48, "points": 144, "top": 2, "rounds": 1, "at_least": 1,
    "prompts": 2, "new": 4, "bootstrap": 2, "characters": 2000, "encoder": 1, "queries": 4,
    "layers": 8, "watch": 1, "every": 1, "of_class": 1,
}  # fmt: skip
NEEDS_FILES = {"expansion_appendix_o"}  # a table that has no name on the hub


@pytest.mark.parametrize("name", FILES)
def test_what_a_paper_preset_names_exists(name: str) -> None:
    for cell in load_recipe(FILES[name]).preset("paper").cells:
        assert cell.get("schedule", "cosine") in SCHEDULES
        assert cell.get("optimizer", "adam") in {"adam", "adamw", "sgd", "momentum"}


def toy(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The same cell, smaller."""
    cut = {
        name: min(value, SIZES[name]) if name in SIZES and type(value) is int else value
        for name, value in settings.items()
    }
    if "max_samples" in cut:
        cut["max_samples"] = 16
    for name, least in (("precision", 0.4), ("noise", 0.5)):  # of a few rows, some are flipped
        if name in cut:
            cut[name] = max(cut[name], least)
    if "queries" in settings:  # a detector that is not wide is the small preset's
        cut["width"] = settings["width"]
    if "pretrained" in settings or "patch" not in settings:  # made for images of this size
        cut |= {name: settings[name] for name in ("size",) if name in settings}
    return cut


def toy_cells(name: str) -> list[dict[str, Any]]:
    """Each only once: sizes that are cut make many cells alike."""
    found = map(toy, load_recipe(FILES[name]).preset("paper").cells)
    return list({json.dumps(cell, sort_keys=True): cell for cell in found}.values())


def drawn_again(root: Path) -> Path:
    """CIFAR-10.2 as its authors store it, a few random images of it."""
    folder = root / "cifar-10.2"
    folder.mkdir(parents=True)
    draw = np.random.default_rng(0)
    images = draw.integers(0, 256, (24, 32, 32, 3), dtype=np.uint8)
    np.savez(folder / "cifar102_test.npz", images=images, labels=np.arange(24) % 10)
    return root


QUICK = {"progressive_table1", "progressive_table1_grid", "progressive_overhead", "one_layer"}
QUICK |= {"tracing_table1", "tracing_skips", "tracing_llama"}
MARKED = [
    pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow])
    for name in FILES
    if name not in NEEDS_FILES
]


@pytest.mark.parametrize("name", MARKED)
def test_every_cell_of_the_paper_preset_executes(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    toy_hub(monkeypatch)
    monkeypatch.setenv("EVERYDEPTH_DATA", str(drawn_again(tmp_path / "data")))
    recipe = load_recipe(FILES[name])
    for place, cell in enumerate(toy_cells(name)):
        folder = tmp_path / str(place)
        folder.mkdir()
        found = recipe.cell(cell, 0, folder)
        assert json.loads(json.dumps(dict(found))), cell
