"""The runs and models that the playground can show, by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from everydepth.data import data_names
from everydepth.errors import DataError, EveryDepthError
from everydepth.exits.load import load, load_tokenizer, model_folder
from everydepth.exits.untrusted import check_inside, read_json
from everydepth.files import untaken
from everydepth.runs import Run
from everydepth.stream import ResidualStream, as_stream

Tab = Literal["vision", "language", "surface", "other"]
DEEPEST_FOLDER = 3  # levels of folders to search


@dataclass(frozen=True, eq=False)
class Item:
    """One run or model; its model is loaded on first use.

    given, given_tokenizer, preprocessing: used instead of those in the folder.
    """

    name: str
    path: Path
    given: Any = None
    given_tokenizer: Any = None
    preprocessing: Mapping[str, Any] | None = None

    @cached_property
    def stream(self) -> ResidualStream:
        return as_stream(load(self.path, trusted=False) if self.given is None else self.given)

    @cached_property
    def tokenizer(self) -> Any:
        if self.given_tokenizer is not None:
            return self.given_tokenizer
        return load_tokenizer(self.path, trusted=False)

    @cached_property
    def tab(self) -> Tab:
        """The tab that shows its model."""
        task, takes = self.stream.task, self.stream.inputs[0]
        if task == "classification":
            return "vision" if takes == "pixel_values" else "other"
        if task == "causal_lm":
            return "language"
        two_numbers = getattr(self.stream.model, "config", None)
        if task == "regression" and getattr(two_numbers, "num_inputs", None) == 2:
            return "surface"
        return "other"

    @property
    def has_model(self) -> bool:
        return self.given is not None or any(Path(model_folder(self.path)).glob("*.safetensors"))

    @property
    def is_run(self) -> bool:
        return self.given is None and Run.exists(self.path) and _is_run(self.path)

    @cached_property
    def data(self) -> str | None:
        """The dataset it was trained on, if its run has a name we know.

        Never a path: an untrusted config must not choose which files are read.
        """
        if not self.is_run:
            return None
        found = read_json(self.path / "config.json")
        for key in ("config", "about", "data"):
            found = found.get(key) if isinstance(found, dict) else None
        return found if isinstance(found, str) and found in data_names() else None


@dataclass(frozen=True)
class Shelf:
    """Items by name, in the order they were found. problems: why some were left out."""

    items: dict[str, Item] = field(default_factory=dict[str, Item])
    problems: dict[str, str] = field(default_factory=dict[str, str])

    def put(self, item: Item) -> Item:
        """Add an item; if its name is taken, it gets a number."""
        name = untaken(item.name, self.items)
        self.items[name] = replace(item, name=name)
        return self.items[name]

    def of(self, tab: Tab) -> list[str]:
        """The names of the items that a tab shows."""
        return [name for name, item in self.items.items() if self._tab(name, item) == tab]

    def runs(self) -> list[str]:
        """The names of the items that are runs."""
        return [name for name, item in self.items.items() if item.is_run]

    def run(self, name: str) -> Item:
        """A run by name; an error if there is none."""
        if name not in (known := self.runs()):
            raise DataError(f"{name[:80]!r} is not a run here; choose from {', '.join(known)}")
        return self.items[name]

    def _tab(self, name: str, item: Item) -> Tab | None:
        try:
            return item.tab if item.has_model else None
        except EveryDepthError as error:
            self.problems[name] = str(error)
            return None

    def __getitem__(self, name: str) -> Item:
        if name not in self.items:
            known = ", ".join(self.items) or "nothing"
            raise DataError(f"{name!r} is not on the shelf; it holds {known}")
        return self.items[name]


def shelf_of(folder: Path | None, *more: Item) -> Shelf:
    """A shelf with the given items, and all runs in a folder."""
    shelf = Shelf()
    for item in more:
        shelf.put(item)
    if folder is not None and folder.is_dir():
        for path in _runs_below(folder, DEEPEST_FOLDER):
            shelf.put(Item(str(path.relative_to(folder)), path))
    return shelf


def item_at(path: Path) -> Item:
    """The run or model in a folder, checked."""
    if not path.is_dir():
        raise DataError(
            f"{str(path)!r} is not a folder; give a run directory or a folder written by "
            "save_pretrained, or nothing to see the demo"
        )
    item = Item(path.resolve().name, path)
    check_inside(path, path)
    if not item.is_run and not item.has_model:
        inside = ", ".join(sorted(entry.name for entry in path.iterdir())[:8]) or "nothing"
        raise DataError(
            f"the folder {str(path)!r} holds {inside}, which is neither a run of everydepth nor a "
            "model (config.json and model.safetensors); give a folder that `everydepth train` or "
            "save_pretrained wrote"
        )
    return item


def _is_run(path: Path) -> bool:
    """Whether config.json is a run's, which has a format, and not a model's."""
    found = read_json(path / "config.json")
    return isinstance(found, dict) and "format" in found and "config" in found


def _runs_below(folder: Path, levels: int) -> Iterator[Path]:
    for entry in sorted(folder.iterdir()):
        # Links may lead out of the folder.
        if entry.is_symlink() or not entry.is_dir() or entry.name.startswith("."):
            continue
        if Run.exists(entry):
            if Item(entry.name, entry).is_run:
                yield entry
        elif levels > 1:
            yield from _runs_below(entry, levels - 1)
