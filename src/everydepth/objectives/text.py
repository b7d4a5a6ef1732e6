"""An objective as one line of text, for the command line: `lpa:early=0.2+annealed:by=0.8`."""

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

# A part begins with a letter, so that the sign in 1e+3 is not a separator.
_PLUS = re.compile(r"\+(?=\s*[a-z])")
# Commas inside [...] belong to the value.
_PAIR = re.compile(r"\s*(\w+)\s*=\s*(\[[^\]]*\]|[^,]*?)\s*(?:,|$)")


def objective_of(given: str | Mapping[str, Any]) -> Objective:
    """The name of a factory, then parts joined by `+`, each with settings after `:`.

    A mapping holds `name` and the factory's settings, or is the outcome of `Objective.to_json`; the
    text may also be such a mapping as JSON. `seed=` of any part is that of the objective.

    >>> from everydepth.objectives.text import objective_of
    >>> objective_of("lpa:early=0.2+annealed:by=0.8") == ed.lpa(early=0.2).annealed(by=0.8)
    True
    """
    if isinstance(given, str) and given.lstrip().startswith("{"):
        given = _json(given)
    if not isinstance(given, str):
        return Objective.from_json(given) if "parts" in given else _from_factory(dict(given))
    first, *rest = _PLUS.split(given)
    objective = _from_factory(_settings(first, "name"))
    for text in rest:
        settings = _settings(text, "part")
        check_names([settings["part"]], parts(), "everydepth", "part of objectives")
        own = "seed" in signature(parts()[settings["part"]]).parameters
        if "seed" in settings and not own:
            objective = replace(objective, seed=settings.pop("seed"))
        objective = objective + part_of(settings, Part)
    return objective


def _from_factory(settings: dict[str, Any]) -> Objective:
    parts()  # which also registers the factories of every module
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
