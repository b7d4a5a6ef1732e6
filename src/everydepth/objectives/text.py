"""An objective in one line, as the command line takes it: `lpa:early=0.2+annealed:by=0.8`."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from inspect import signature
from typing import Any

from everydepth.config import check_names
from everydepth.errors import SettingError
from everydepth.objectives.factories import FACTORIES
from everydepth.objectives.objective import Objective
from everydepth.objectives.part import Part, part_of, parts

# A word begins with a letter, so that the sign of 1e+3 separates nothing.
_PLUS = re.compile(r"\+(?=\s*[a-z])")
# Commas inside [...] belong to the value.
_PAIR = re.compile(r"\s*(\w+)\s*=\s*(\[[^\]]*\]|[^,]*?)\s*(?:,|$)")


def objective_of(given: str | Mapping[str, Any]) -> Objective:
    """A factory's name and settings, then parts: each added by `+`, with settings after `:`.

    A mapping holds `name` and the factory's settings, or is what `Objective.to_json` gave; text
    may be one, as JSON. `seed=` may stand with any part: the objective has one.

    >>> from everydepth.objectives.text import objective_of
    >>> objective_of("lpa:early=0.2+annealed:by=0.8") == ed.lpa(early=0.2).annealed(by=0.8)
    True
    """
    if isinstance(given, str) and given.lstrip().startswith("{"):
        given = _json(given)
    if not isinstance(given, str):
        values = dict(given)
        return Objective.from_json(given) if "parts" in given else _made(values)
    first, *rest = _PLUS.split(given)
    made = _made(_settings(first, "name"))
    for word in rest:
        settings = _settings(word, "part")
        check_names([settings["part"]], parts(), "everydepth", "part of objectives")
        own = "seed" in signature(parts()[settings["part"]]).parameters
        if "seed" in settings and not own:
            made = replace(made, seed=settings.pop("seed"))
        made = made + part_of(settings, Part)
    return made


def _made(settings: dict[str, Any]) -> Objective:
    parts()  # which also makes the factories of every file known
    name = settings.pop("name", "lpa")
    check_names([name], FACTORIES, "everydepth", "objective")
    factory = FACTORIES[name]
    check_names(settings, signature(factory).parameters, f"the objective {name}")
    try:
        return factory(**settings)
    except TypeError as error:
        raise SettingError(f"objective {name}: {error}; write {name}:name=value") from error


def _settings(text: str, key: str) -> dict[str, Any]:
    name, _, rest = text.partition(":")
    found: dict[str, Any] = {key: name.strip()}
    while rest.strip():
        pair = _PAIR.match(rest)
        if pair is None:
            raise SettingError(
                f"{rest!r} in the objective {text!r}; write name:key=value,key=value"
            )
        found[pair[1]], rest = _value(pair[2]), rest[pair.end() :]
    return found


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _json(text: str) -> dict[str, Any]:
    try:
        return json.loads(text)
    except ValueError as error:
        raise SettingError(f"the objective {text!r} is not JSON: {error}") from error
