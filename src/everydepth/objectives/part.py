"""A part of an objective: a frozen dataclass with a name for JSON and the command line."""

from __future__ import annotations

from abc import ABC
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from importlib import import_module
from pkgutil import iter_modules
from typing import Any, ClassVar, TypeVar, cast

from everydepth.config import Config, brief, check_names, hints_of
from everydepth.errors import SettingError

P = TypeVar("P", bound="Part")
_PARTS: dict[str, type[Part]] = {}


@dataclass(frozen=True, kw_only=True)
class Part(Config, ABC):
    """The base of shapes, schedules, terms and techniques.

    A subclass with a name is registered under it, including your own: `class Mine(Term,
    name="mine")`.
    """

    part: ClassVar[str] = ""
    order: ClassVar[int]
    """Its position in an objective: parts are applied, compared and saved in this order."""

    def __init_subclass__(cls, name: str = "", **rest: Any) -> None:
        super().__init_subclass__(**rest)
        if not name:
            return
        other = _PARTS.get(name)
        if other is not None and other.__qualname__ != cls.__qualname__:
            raise SettingError(
                f"the part {name!r} already exists ({other.__qualname__}); use another name"
            )
        cls.part = name
        _PARTS[name] = cls

    @classmethod
    def _label(cls) -> str:
        return f"{cls.part}: "

    @property
    def needs_total(self) -> bool:
        """Whether it needs the total number of training steps."""
        return False

    def check_depth(self, depth: int) -> None:
        """Raise an error if it does not fit a network of this depth."""

    def to_json(self) -> dict[str, Any]:
        """Its name, and the values that differ from the defaults."""
        found: dict[str, Any] = {"part": self.part}
        for f in fields(self):
            value = getattr(self, f.name)
            if value != f.default:
                found[f.name] = _plain(value)
        return found


def part_of(given: str | Mapping[str, Any], kind: type[P]) -> P:
    """A part from its name or from its JSON; an error if it is not of this kind."""
    if not isinstance(given, str | Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise SettingError(f"{brief(given)} is no part of an objective; use a name, or its JSON")
    values: dict[str, Any] = {"part": given} if isinstance(given, str) else dict(given)
    known = {name: part for name, part in parts().items() if issubclass(part, kind)}
    name = values.pop("part", None)
    check_names([str(name)], known, "everydepth", kind.__name__.lower())
    part = known[name]
    for key, hint in hints_of(part).items():
        nested = isinstance(hint, type) and issubclass(hint, Part)
        if nested and isinstance(values.get(key), str | Mapping):
            values[key] = part_of(values[key], hint)
    return part.of(values, f"the part {name}")


def parts() -> Mapping[str, type[Part]]:
    """Every part by name, of this package and of others."""
    _import_all()
    return _PARTS


@cache
def _import_all() -> None:
    """Import every module of this package, so that a new file need not be listed anywhere."""
    package = import_module(__package__ or "")
    for module in iter_modules(package.__path__):
        import_module(f"{package.__name__}.{module.name}")


def _plain(value: Any) -> Any:
    if isinstance(value, Part):
        return value.to_json()
    return list(cast(tuple[Any, ...], value)) if isinstance(value, tuple) else value
