"""What a recipe is: cells of work, the printed figures, and rows that set them side by side.

A recipe is a folder `recipes/<paper>_<what>/` with

    recipe.py           RECIPE = Recipe(name="<paper>_<what>", ...)
    published.json      the printed figures by name, with their "source"
    results/small.json  what was measured; written by `everydepth reproduce NAME --record`

Import torch and the rest of the package inside the functions, or name them with `later`:
`reproduce --list` then answers at once.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from everydepth.errors import SettingError
from everydepth_papers.number import number
from everydepth_papers.paper import paper

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from torch import nn

Cell = dict[str, Any]
"""The settings of one unit of work, as JSON values."""

PRESETS = ("smoke", "small", "full", "paper")


@dataclass(frozen=True, kw_only=True)
class Preset:
    """One size of a recipe.

    cells: each is done once per seed (0, 1, ...). cost: what to expect, in words ("3 min, 1 core").
    needs: data sets and weights. A plain name is a folder under EVERYDEPTH_DATA, `owner/name` or
        `hf:name` a data set of the Hugging Face hub, `package:name` a Python package; what ships
        with everydepth (digits, surfaces) need not be named.
    models: name -> a function that builds it; a dry run counts the parameters without memory.
    memory_gib: what the largest cell takes. launch: what starts it on several devices, such as
        "accelerate launch --multi_gpu".

    >>> from everydepth_papers.evidence import Preset
    >>> Preset(cells=[{"depth": 2}, {"depth": 4}], seeds=3, cost="3 min, 1 core").seeds
    3
    """

    cells: Sequence[Cell]
    seeds: int = 1
    cost: str
    needs: Sequence[str] = ()
    models: Mapping[str, Callable[[], nn.Module]] = field(
        default_factory=dict[str, "Callable[[], nn.Module]"]
    )
    memory_gib: float = 0.0
    launch: str = ""


@dataclass(frozen=True, kw_only=True)
class Finished:
    """One finished cell: `result["accuracy"]` is what the cell function returned by that name.

    machine: where it was measured, if not where the reproduction says.
    """

    cell: Cell
    seed: int
    values: Mapping[str, Any]
    seconds: float
    machine: Mapping[str, Any] | None = None

    def __getitem__(self, name: str) -> Any:
        return self.values[name]

    def to_json(self) -> dict[str, Any]:
        found = {**asdict(self), "seconds": round(self.seconds, 2)}
        return {name: value for name, value in found.items() if value is not None}


@dataclass(frozen=True)
class Row:
    """A quantity as printed and as measured; low and high are the spread over seeds, or an
    interval, as `note` says. Of a statement in words, `measured` is a `Verdict`."""

    quantity: str
    published: float | int | str | None = None
    measured: float | int | str | None = None
    low: float | int | None = None
    high: float | int | None = None
    note: str = ""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def cells(self) -> tuple[str, str, str, str, str]:
        """Formatted for display: quantity, published, measured, spread, note."""
        spread = ""
        if self.low is not None and self.high is not None:
            spread = f"{number(self.low, 4)} … {number(self.high, 4)}"
        shown = number(self.published, 4), number(self.measured, 4)
        return self.quantity, *shown, spread, self.note


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One or several published tables and figures that come from the same computation.

    paper: its key in `PAPERS`; empty if it is another one, which `item` then names. item: what of
    it ("Table 1"). cell: `cell(settings, seed, folder)` does one unit of work and returns JSON
    values; `folder` is its own, for checkpoints. rows: the comparison. about: what was chosen by
    us, and whatever else a reader must know.

    >>> from everydepth_papers.evidence import Preset, Recipe, Row
    >>> recipe = Recipe(
    ...     name="progressive_sum", title="A sum", paper="progressive", item="Table 9",
    ...     presets={"smoke": Preset(cells=[{"a": 1}, {"a": 2}], cost="nothing")},
    ...     cell=lambda settings, seed, folder: {"sum": settings["a"] + seed},
    ...     rows=lambda results: [Row("sum", published=3, measured=sum(r["sum"] for r in results))],
    ... )
    >>> recipe.source
    'Progressive Approximation, Table 9'
    """

    name: str
    title: str
    paper: str = ""
    item: str
    presets: Mapping[str, Preset]
    cell: Callable[[Cell, int, Path], Mapping[str, Any]]
    rows: Callable[[Sequence[Finished]], Sequence[Row]]
    figure: Callable[[Sequence[Finished]], Figure | None] | None = None
    about: str = ""

    def __post_init__(self) -> None:
        unknown = [name for name in self.presets if name not in PRESETS]
        if unknown or "smoke" not in self.presets:
            raise SettingError(
                f"the recipe {self.name} has the presets {', '.join(self.presets)}; give smoke, "
                "and small, full and paper where they make sense"
            )
        if self.paper:
            paper(self.paper)  # an unknown one is refused here

    @property
    def source(self) -> str:
        """What it covers, in words: "Progressive Approximation, Table 1"."""
        return f"{paper(self.paper)}, {self.item}" if self.paper else self.item

    def preset(self, name: str) -> Preset:
        if name not in self.presets:
            raise SettingError(
                f"the recipe {self.name} has no preset {name!r}; use {', '.join(self.presets)}"
            )
        return self.presets[name]


def later(function: str, **settings: Any) -> Callable[..., Any]:
    """A function of this package that is imported when called: `later("surfaces:cell")`.

    settings: its keyword arguments.
    """
    module, _, name = function.partition(":")

    def call(*args: Any) -> Any:
        return getattr(import_module(f"everydepth_papers.evidence.{module}"), name)(
            *args, **settings
        )

    return call


def both(settings: Cell) -> list[Cell]:
    """The same cell trained end-to-end and with LPA."""
    return [{**settings, "objective": name} for name in ("end_to_end", "lpa")]


def in_stages(marks: Sequence[int], last: Cell, **settings: Any) -> list[Cell]:
    """A cell for each mark, which goes on where the one before stopped.

    last: settings of the last one alone.
    """
    return [
        {**settings, "marks": list(marks[:count]), **(last if count == len(marks) else {})}
        for count in range(1, len(marks) + 1)
    ]


def published(recipe_file: str | Path) -> dict[str, Any]:
    """The printed figures beside a recipe: `PUBLISHED = published(__file__)`."""
    return json.loads((Path(recipe_file).parent / "published.json").read_text(encoding="utf-8"))


def over_seeds(
    quantity: str,
    published: float | int | str | None,
    values: Sequence[float | int] | np.ndarray,
    note: str = "",
    *,
    digits: int = 4,
) -> Row:
    """A row of the mean over seeds, with the smallest and the largest value."""
    if not len(values):
        return Row(quantity, published, None, note=note or "no such cell in this preset")
    low, mean, high = (
        float(f"{v:.{digits}g}") for v in (np.min(values), np.mean(values), np.max(values))
    )
    several = len(values) > 1
    words = f"{len(values)} seeds" if several else "1 seed"
    return Row(
        quantity,
        published,
        mean,
        low if several else None,
        high if several else None,
        f"{words}; {note}" if note else words,
    )
