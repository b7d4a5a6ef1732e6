"""A collection of measurements with their provenance: what every verb returns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from types import MappingProxyType, NoneType
from typing import Any, ClassVar, Generic, TypeVar, get_args, get_origin, get_type_hints

import numpy as np

from everydepth.config import alternatives, checked, plain
from everydepth.environment import REPORTED_PACKAGES, installed_version
from everydepth.errors import DataError, SettingError
from everydepth.results.layout import merged, table_of
from everydepth.results.result import Result
from everydepth.results.table import Table

FORMAT = 1
R = TypeVar("R", bound="Results")  # not Self, which beartype cannot check on methods
T = TypeVar("T")
_kinds: dict[str, type[Results]] = {}


@checked
@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Results:
    """`results["accuracy"]` is a numpy array, `results.result("accuracy")` the full `Result`.

    results: measurements by name, in display order.
    about: their provenance, as JSON values (see `provenance`).
    kind: the verb's name for them, kept when a file is loaded without the verb.

    >>> traced = ed.trace(model, test, ["accuracy", "cos"], progress=False)
    >>> traced["accuracy"].shape, "cos" in traced, len(traced)
    ((4,), True, 2)
    >>> again = ed.Results.load(traced.save("answers"))  # works for any verb
    >>> again.kind, again.model, again.table().headings
    ('trace', 'ViTForImageClassification', ('depth', 'accuracy'))
    """

    results: Mapping[str, Result]
    about: Mapping[str, Any] = field(default_factory=dict[str, Any])
    kind: str = ""

    own_kind: ClassVar[str] = "results"
    counted: ClassVar[tuple[str, ...]] = ()
    """Entries of `about` that must be counts when a file is read, besides depth and samples."""

    def __init_subclass__(cls, *, kind: str, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        cls.own_kind = kind
        _kinds[kind] = cls

    def __post_init__(self) -> None:
        object.__setattr__(self, "results", MappingProxyType(dict(self.results)))
        object.__setattr__(self, "about", MappingProxyType(plain(self.about)))
        object.__setattr__(self, "kind", self.kind or self.own_kind)
        wrong = [f"{name!r} holds {r.name!r}" for name, r in self.results.items() if name != r.name]
        if wrong:
            raise SettingError(f"{wrong[0]}; give each result under its own name (see `named`)")

    def __getstate__(self) -> dict[str, Any]:
        """Sweeps send results between processes, and a read-only view cannot be pickled."""
        return {**vars(self), "results": dict(self.results), "about": dict(self.about)}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        for name, value in state.items():
            object.__setattr__(self, name, value)
        self.__post_init__()

    # -- a mapping of names to arrays -------------------------------------------------------------

    def __getitem__(self, name: str) -> np.ndarray:
        return self.result(name).value

    def __contains__(self, name: object) -> bool:
        return name in self.results

    def __iter__(self) -> Iterator[str]:
        return iter(self.results)

    def __len__(self) -> int:
        return len(self.results)

    @checked
    def result(self, name: str) -> Result:
        """One measurement, with its labels, unit and notes."""
        if name not in self.results:
            close = get_close_matches(name, self.results, 1)
            hint = f"did you mean {close[0]!r}? " if close else ""
            raise SettingError(
                f"this {self.kind} has no {name!r}{self._why_not(name)}; {hint}it has "
                f"{', '.join(self.results) or 'none'}"
            )
        return self.results[name]

    def _why_not(self, name: str) -> str:
        """Why a measurement is missing, in parentheses, if known."""
        skipped = self.about.get("skipped")
        why = skipped.get(name) if isinstance(skipped, Mapping) else None
        return f" ({name} was left out: {why})" if why else ""

    @property
    def main(self) -> Result:
        """The one to look at first: the first with `better` set, otherwise the first."""
        present = [r for r in self.results.values() if not r.is_gap]
        if not present:
            raise SettingError(f"this {self.kind} has no measurement with values")
        return next((r for r in present if r.better), present[0])

    def with_results(self: R, *results: Result) -> R:
        """A copy with more measurements; existing names are replaced."""
        return replace(self, results={**self.results, **named(*results)})

    def with_about(self: R, **facts: Any) -> R:
        """A copy with more provenance."""
        return replace(self, about={**self.about, **facts})

    # -- provenance -------------------------------------------------------------------------------

    @property
    def model(self) -> str:
        """The model's class name; empty if unknown."""
        return str(self.about.get("model") or "")

    @property
    def task(self) -> str:
        """The model's task; empty if unknown."""
        return str(self.about.get("task") or "")

    @property
    def depth(self) -> int:
        """The number of blocks L; 0 if unknown."""
        return int(self.about.get("depth") or 0)

    @property
    def samples(self) -> int:
        """The number of rows of data used; 0 if unknown."""
        return int(self.about.get("samples") or 0)

    # -- display ----------------------------------------------------------------------------------

    @checked
    def table(self, name: str | None = None) -> Table:
        """One measurement, or without a name all those that share the main one's axis."""
        if name is not None:
            return table_of(self.result(name))
        every = list(self.results.values())
        if all(r.is_gap for r in every):
            notes = tuple(f"{r.name}: {r.note}" for r in every)
            return Table(headings=(), rows=(), title=str(self), notes=notes)
        return merged(every, self.main, str(self))

    @checked
    def plot(self, name: str | None = None, backend: str = "matplotlib") -> Any:
        """The figure of one measurement, by default the main one.

        backend: "matplotlib" (for print) or "plotly" (for the web).
        """
        from everydepth.results.figures import figure

        return figure(self.main if name is None else self.result(name), backend)

    @checked
    def figure(self, names: Sequence[str] | None = None, backend: str = "matplotlib") -> Any:
        """All drawable measurements, or the named ones, in one figure."""
        from everydepth.results.figures import sheet

        wanted = self.results.values() if names is None else map(self.result, names)
        return sheet(list(wanted), backend, strict=names is not None)

    def __str__(self) -> str:
        facts = [
            counted(self.depth, "block") if self.depth else "",
            counted(self.samples, "sample") if self.samples else "",
            counted(len(self), "measurement"),
        ]
        of = f" of {self.model}" if self.model else ""
        return f"{self.kind.capitalize()}{of}: {', '.join(filter(None, facts))}"

    def __repr__(self) -> str:
        return f"<{self}>"

    def __rich__(self) -> Table:
        return self.table()

    def _repr_html_(self) -> str:
        return self.table()._repr_html_()  # pyright: ignore[reportPrivateUsage]

    # -- saving -----------------------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        """Everything as plain JSON values; undefined values are null."""
        return {
            "format": FORMAT,
            "kind": self.kind,
            "about": dict(self.about),
            "results": [
                {**described(r), "arrays": {key: plain(a) for key, a in r.arrays.items()}}
                for r in self.results.values()
            ],
        }

    @staticmethod
    def from_json(content: Any) -> Results:
        """The inverse of `to_json`, as the class of their kind if its module was imported.

        >>> traced = ed.trace(model, test, ["accuracy"], progress=False)
        >>> ed.Results.from_json(traced.to_json())["accuracy"].shape
        (4,)
        """
        from everydepth.results.saving import from_json

        return from_json(content)

    @checked
    def save(self, path: str | Path) -> Path:
        """Write JSON and arrays to the folder `path`, atomically, and return the folder."""
        from everydepth.results.saving import save

        return save(self, Path(path))

    @classmethod
    @checked
    def load(cls: type[R], path: str | Path) -> R:
        """Read what `save` wrote; nothing in the files can run code.

        `Results.load` reads any kind, a subclass only its own.
        """
        from everydepth.results.saving import load

        found = load(Path(path))
        if not isinstance(found, cls):
            raise DataError(
                f"{path} holds a {found.kind}, not a {cls.own_kind}; load it with Results.load"
            )
        return found


class Number:
    """An attribute of `Results` that reads a number from one of its "scalar" results."""

    def __init__(self, result: str) -> None:
        self._result = result

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, found: Results, owner: type) -> float:
        return float(found.result(self._result).arrays[self._name])


class OptionalNumber(Number):
    """The same, or None if it was not measured."""

    def __get__(self, found: Results, owner: type) -> float | None:  # pyright: ignore[reportIncompatibleMethodOverride]
        known = self._name in found.result(self._result).arrays
        return super().__get__(found, owner) if known else None


class Fact(Generic[T]):
    """An attribute of `Results` that reads the provenance of its name: `steps = Fact(int)`.

    read: makes the value from JSON.
    """

    def __init__(self, read: Callable[[Any], T] = lambda value: value) -> None:
        self._read = read

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, found: Results, owner: type) -> T:
        return self._read(found.about[self._name])


def named(*results: Result) -> dict[str, Result]:
    """Results by their names."""
    return {result.name: result for result in results}


@checked
def counted(number: int, noun: str) -> str:
    """A number with its noun, in the plural if needed."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


@checked
def provenance(
    *,
    model: str = "",
    task: str = "",
    depth: int | None = None,
    samples: int | None = None,
    seconds: float | int | None = None,
    settings: Any = None,
    **facts: Any,
) -> dict[str, Any]:
    """The provenance that every verb records, with package versions added.

    settings: the config used, a dataclass or a mapping.

    >>> from everydepth.results import provenance
    >>> provenance(model="ViT", samples=100, seconds=1.23456, policy="margin")["seconds"]
    1.235
    """
    given = {
        "model": model,
        "task": task,
        "depth": depth,
        "samples": samples,
        "seconds": None if seconds is None else round(seconds, 3),
        "settings": settings,
    }
    versions = {name: installed_version(name) for name in REPORTED_PACKAGES}
    said = {k: v for k, v in given.items() if v is not None and not (isinstance(v, str) and not v)}
    return plain({**said, **facts}) | {
        "versions": {name: found for name, found in versions.items() if found}
    }


def described(result: Result) -> dict[str, Any]:
    """All of a result except its arrays, as JSON values."""
    return plain({f.name: getattr(result, f.name) for f in fields(result) if f.name != "arrays"})


def restored(kind: Any, value: Any) -> Any:
    """The inverse of `plain`: a dataclass, or a tuple or union of some, from its JSON values."""
    kinds = [one for one in alternatives(kind) if one is not NoneType]
    own: Any = next((one for one in kinds if is_dataclass(one)), None)
    if own is not None and isinstance(value, Mapping):
        hints = get_type_hints(own)
        return own(**{f.name: restored(hints[f.name], value[f.name]) for f in fields(own)})
    inner = next((get_args(one)[0] for one in kinds if get_origin(one) is tuple), None)
    if inner is not None and isinstance(value, Sequence):
        return tuple(value if inner in _NUMBERS else (restored(inner, item) for item in value))
    return value


_NUMBERS = (bool, int, float)


def class_of(kind: str) -> type[Results]:
    """The class of a kind, or `Results` if its module was not imported."""
    return _kinds.get(kind, Results)
