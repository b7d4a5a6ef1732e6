"""Types and shapes checked while tests run, at a price that a suite can pay.

jaxtyping's import hook wraps every function twice and binds its arguments by name, which doubled
the time of the suite. Only what has a shape to compare needs that; all other functions are checked
by beartype alone, dataclasses by the arguments of their `__init__`. Two kinds are not checked:
those made inside a function, anew at each of its calls, and the functions of `HOT`, of which four
of five calls were; `tests/test_typed.py` has these checked.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import is_dataclass
from functools import wraps
from typing import Any, get_type_hints

import jaxtyping

HOT = (
    "everydepth.stream.discovery.recording",
    "everydepth.stream.discovery.residual",
    "everydepth.exits.generation.pacing",
)
"""Modules whose functions run several times for every operation of a model or simulated token."""

# By torch, contextlib and functools: a test could not put the checked one in its place.
_WRAPPED = ("__torch_dispatch__", "recording", "_computed")

hot: dict[Callable[..., Any], Callable[..., Any]] = {}
"""Their functions, with what checks each."""

_whole = jaxtyping.jaxtyped


def sparing(*, typechecker: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """In the place of `jaxtyping.jaxtyped`, which the import hook puts on functions and classes."""

    def decorated(what: Any) -> Any:
        if is_dataclass(what) and inspect.isfunction(own := vars(what).get("__init__")):
            if not hasattr(own, "__wrapped__"):
                what.__init__ = decorated(own)
            return what
        if not inspect.isfunction(what) or _has_shapes(what):
            return _whole(what, typechecker=typechecker)
        if "<locals>" in what.__qualname__:
            return what
        names = what.__globals__
        what.__annotations__ = {k: _resolved(v, names) for k, v in what.__annotations__.items()}
        checked, config = typechecker(what), jaxtyping.config
        if checked is what:  # no annotation says anything
            return what
        if what.__module__ in HOT and what.__name__ not in _WRAPPED:
            hot[what] = checked
            return what

        @wraps(what)
        def called(*args: Any, **kwargs: Any) -> Any:
            __tracebackhide__ = True
            return (what if config.jaxtyping_disable else checked)(*args, **kwargs)

        return called

    return decorated


def _has_shapes(function: Any) -> bool:
    """Whether an annotation is made of jaxtyping's words, or of a name that stands for one."""
    words = {word for a in function.__annotations__.values() for word in re.findall(r"\w+", str(a))}
    found = (function.__globals__.get(word) for word in words)
    return any(str(getattr(kind, "__module__", "")).startswith("jaxtyping") for kind in found)


def _resolved(annotation: Any, names: dict[str, Any]) -> Any:
    """What a string means; anything, where a name is not known yet, as jaxtyping has it."""

    def named(value: Any) -> None: ...

    named.__annotations__ = {"value": annotation}
    try:
        return get_type_hints(named, names, include_extras=True)["value"]
    except Exception:  # noqa: BLE001 - whatever a half-known type raises
        return Any
