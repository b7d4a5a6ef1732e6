"""Configs: dataclasses whose fields state type, limits and help once, for all uses."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from functools import cache, wraps
from inspect import Parameter, Signature, signature, unwrap
from numbers import Integral, Number, Real
from pathlib import Path
from types import NoneType, SimpleNamespace, UnionType
from typing import Annotated, Any, ClassVar, Literal, TypeVar, Union, cast, get_args, get_origin
from typing import get_type_hints as type_hints_of

from everydepth.errors import EveryDepthError, OptionError, SettingError

T = TypeVar("T", bound="Config")
F = TypeVar("F", bound=Callable[..., Any])
_HUGE = 2**63  # beyond the range of a tensor's integers


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The limits, help and command-line form of a config field; see `setting`.

    help: one line for the command line and the documentation.
    least, most, above, below: limits of a number; `above` and `below` are exclusive.
    finite: False accepts NaN and infinity in an argument of a function.
    choices: the strings that are allowed; other types are not checked.
    also: what else is accepted, for the error message: "an optimizer object".
    instead_of: the field it replaces; a command drops the default of one if the other is given.
    option: the type on the command line, if it accepts less than in Python.
    hidden: whether commands leave it out.
    flags: its names on the command line, if not the field's own.
    """

    help: str = ""
    least: int | float | None = None
    most: int | float | None = None
    above: int | float | None = None
    below: int | float | None = None
    finite: bool = True
    choices: tuple[str, ...] = ()
    also: str = ""
    instead_of: str | None = None
    option: Any = None
    hidden: bool = False
    flags: tuple[str, ...] = ()


Seed = Annotated[int, Setting(least=0)]
"""A random seed; NumPy does not accept negative ones."""
Whole = Annotated[int, Setting(least=0)]
Count = Annotated[int, Setting(least=1)]
Share = Annotated[float, Setting(above=0, below=1)]
Positive = Annotated[float, Setting(above=0)]


def setting(default: Any = MISSING, **about: Any) -> Any:
    """A config field; `about` are fields of `Setting`. Without a default it is required.

    >>> from dataclasses import dataclass
    >>> from everydepth.config import Config, setting
    >>> @dataclass(frozen=True, kw_only=True)
    ... class Oven(Config):
    ...     minutes: int = setting(20, least=1, help="How long to bake.")
    >>> Oven(minutes=0)
    Traceback (most recent call last):
    everydepth.errors.SettingError: minutes=0; use a whole number of 1 or more
    """
    return field(default=default, metadata={"setting": Setting(**about)})


@dataclass(frozen=True, kw_only=True)
class Config:
    """Base of all configs; types, limits and finiteness are checked on construction."""

    title: ClassVar[str] = "Options"
    """The heading of its options in a command's help."""

    def __post_init__(self) -> None:
        for name in hints_of(type(self)):
            object.__setattr__(self, name, self._checked(name, getattr(self, name)))

    @classmethod
    def _checked(cls, name: str, value: Any) -> Any:
        hint, about = hints_of(cls)[name], settings_of(cls)[name]
        tidied = _tidied(value, hint)
        if _suits(tidied, hint, about):
            return tidied
        raise SettingError(f"{cls._label()}{name}={brief(tidied)}; use {_wanted(hint, about)}")

    @classmethod
    def _label(cls) -> str:
        """A prefix for field names in errors."""
        return ""

    @classmethod
    def of(cls: type[T], values: Mapping[str, Any], what: str) -> T:
        """A config from settings by name. what: who was given them, for errors."""
        check_names(values, hints_of(cls), what)
        missing = [f.name for f in fields(cls) if f.default is MISSING and f.name not in values]
        if missing:
            raise SettingError(f"{what} needs {missing[0]}=; it takes {', '.join(hints_of(cls))}")
        return cls(**{name: cls._checked(name, value) for name, value in values.items()})


@cache
def hints_of(config: type[Config]) -> dict[str, Any]:
    """The type of each field, by name."""
    hints = type_hints_of(config)
    return {f.name: hints[f.name] for f in fields(config)}


@cache
def settings_of(config: type[Config]) -> dict[str, Setting]:
    """The `Setting` of each field, by name."""
    return {f.name: f.metadata.get("setting", Setting()) for f in fields(config)}


def check_names(
    names: Iterable[str], known: Iterable[str], what: str, noun: str = "setting"
) -> None:
    """Raise if a name is unknown, with the closest known one."""
    known = list(known)
    for name in names:
        if name not in known:
            close = difflib.get_close_matches(name, known, 1)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            raise SettingError(f"{what} has no {noun} {name!r}.{hint} It has {', '.join(known)}")


def filled(values: Mapping[str, Any], what: str, *into: Config | type[Config]) -> list[Any]:
    """Distribute settings by name over several configs; raise if none has a name.

    into: config classes, which are constructed, or objects, of which a changed copy is returned.
    what: who was given the settings, for errors.
    """
    kinds = [config if isinstance(config, type) else type(config) for config in into]
    check_names(values, [name for kind in kinds for name in hints_of(kind)], what)
    found: list[Any] = []
    for config, kind in zip(into, kinds, strict=True):
        before = (
            {}
            if isinstance(config, type)
            else {f.name: getattr(config, f.name) for f in fields(config)}
        )
        given = {name: value for name, value in values.items() if name in hints_of(kind)}
        found.append(kind.of({**before, **given}, what))
    return found


def parted(
    values: Mapping[str, Any], what: str, *into: Config | type[Config]
) -> tuple[list[Any], dict[str, Any]]:
    """`filled` with the settings that the configs have, and the remaining settings."""
    kinds = [config if isinstance(config, type) else type(config) for config in into]
    known = {name for kind in kinds for name in hints_of(kind)}
    own = {name: value for name, value in values.items() if name in known}
    rest = {name: value for name, value in values.items() if name not in known}
    return filled(own, what, *into), rest


def plain(value: Any) -> Any:
    """As JSON values: lists, dictionaries with string keys, and null for non-finite numbers."""
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, Real) and not isinstance(value, Integral):
        return float(value) if math.isfinite(value) else None
    if hasattr(value, "tolist"):
        return plain(cast(Any, value).tolist())  # an array, whose masked values become None
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in cast(Mapping[Any, Any], value).items()}
    if isinstance(value, Sequence | Set):
        return [plain(item) for item in cast(Iterable[Any], value)]
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in fields(value)}
    return str(value)  # paths, devices, classes


def brief(value: Any) -> str:
    """A value in an error message: cut short, and in words if Python cannot print it."""
    try:
        text = repr(value)
    except Exception:  # noqa: BLE001 - of any class; also integers of thousands of digits
        return f"<{type(value).__name__} that cannot be printed>"
    return text if len(text) <= 80 else f"{text[:77]}..."


def checked(function: F) -> F:
    """Turn failures due to arguments of the wrong type into a `SettingError` that names them.

    For public functions and classes. Numbers, text, flags, functions and objects of ours are
    compared with their annotations and limits (`Annotated[int, Setting(least=0)]`) before the call;
    other arguments only after a failure.

    >>> from everydepth.config import checked
    >>> @checked
    ... def halved(number: float) -> float:
    ...     return number / 2
    >>> halved("much")
    Traceback (most recent call last):
    everydepth.errors.SettingError: halved(number='much'); use a number
    """
    if isinstance(function, type):
        function.__init__ = _checked(function.__init__, stores=is_dataclass(function))
        return cast(F, function)
    return _checked(function)


def _checked(function: F, *, stores: bool = False) -> F:
    """stores: it only stores its arguments, so that wrong ones would fail much later."""

    @wraps(function)
    def called(*args: Any, **named: Any) -> Any:
        args = tuple(map(_as_python, args))
        named = {name: _as_python(value) for name, value in named.items()}
        _check_arguments(function, args, named)
        told = _told_at_once(function, stores)
        if wrong := _misfit(function, args, named, told, at_once=True):
            raise SettingError(wrong)
        try:
            return function(*args, **named)
        except OptionError as error:
            raise _by_caller(error, function) from error.__cause__
        except EveryDepthError:
            raise
        except Exception as error:
            wrong = _misfit(function, args, named, _hints_with_limits(function))
            wrong = wrong or _too_much(function, args, named, error)
            if wrong is None:
                raise
            raise SettingError(wrong) from error

    return cast(F, called)


def _as_python(value: Any) -> Any:
    """A number of NumPy as one of Python, which torch insists on here and there."""
    item = getattr(value, "item", None) if isinstance(value, Number) else None
    return value if item is None else item()


def _check_arguments(
    function: Callable[..., Any], args: tuple[Any, ...], named: Mapping[str, Any]
) -> None:
    parameters = _signature(function).parameters
    twice = next((name for name, _ in zip(parameters, args, strict=False) if name in named), None)
    if twice is not None and parameters[twice].kind is Parameter.POSITIONAL_OR_KEYWORD:
        raise SettingError(
            f"{_name_of(function)} got {twice!r} twice, also as {brief(named[twice])}; leave it out"
        )
    if all(parameter.kind is not parameter.VAR_KEYWORD for parameter in parameters.values()):
        known = [name for name in parameters if name != "self"]
        check_names(named, known, _name_of(function), "argument")


def _by_caller(error: OptionError, function: Callable[..., Any]) -> OptionError:
    """The error with the arguments of the function that passed the option on."""
    if _name_of(function) == error.owner:
        return error
    parameters = _signature(function).parameters.values()
    known = [p.name for p in parameters if p.name != "self" and p.kind is not p.VAR_KEYWORD]
    close = difflib.get_close_matches(error.option, known, 1)
    hint = f"did you mean {close[0]!r}?" if close else f"it has {', '.join(known)}"
    caller = f". {_name_of(function)} has no argument {error.option!r} either: {hint}"
    return OptionError(error.message, error.option, error.owner, caller)


@cache
def _signature(function: Callable[..., Any]) -> Signature:
    return signature(function)


def _name_of(function: Callable[..., Any]) -> str:
    return function.__qualname__.removesuffix(".__init__")


def _misfit(
    function: Callable[..., Any],
    given: Any,
    named: Mapping[str, Any],
    hints: Mapping[str, tuple[Any, Setting]],
    *,
    at_once: bool = False,
) -> str | None:
    """An error message for the first argument that does not fit its annotation; None if all fit.

    at_once: accept infinity as a number where nothing limits it, as some functions do, and do not
        look into collections, which may be large.
    """
    try:
        values = _signature(function).bind(*given, **named).arguments
    except TypeError:  # too few or too many, which Python reports itself
        return None
    for name, (hint, about) in hints.items():
        if name not in values:
            continue
        given_as, value = values[name], _tidied(values[name], hint)
        if value is not given_as and getattr(given_as, "shape", None) == ():
            # An array without axes is not a number; the function gets it unchanged.
            value = value if isinstance(given_as, Number) else given_as
        if at_once and about is _NO_LIMITS and _is_infinite(value, hint):
            continue
        if not about.finite and isinstance(value, float):
            continue
        fits = _is_outside if at_once and about is _NO_LIMITS else _is
        if not _suits(value, hint, about, fits):
            wanted = _wanted(hint, about) if _readable(value) else "numbers, in memory"
            return f"{_name_of(function)}({name}={brief(value)}); use {wanted}"
    return None


def _too_much(
    function: Callable[..., Any], args: Any, named: Mapping[str, Any], error: Exception
) -> str | None:
    """An error message if something given may have been too large or too deep; None otherwise."""
    name = _name_of(function)
    if isinstance(error, RecursionError):
        return f"{name} got something that holds itself, or is nested too deeply; make it flatter"
    if isinstance(error, MemoryError):
        return f"{name} needs more memory than there is ({error}); give it less at a time"
    given = zip(_signature(function).parameters, args, strict=False)
    large = (f"{key}={brief(x)}" for key, x in (*given, *named.items()) if _is_large(x))
    return next((f"{name}({one}): {error}; use a smaller number" for one in large), None)


def _is_large(value: Any) -> bool:
    return isinstance(value, int) and abs(value) >= 2**31


def _is_infinite(value: Any, hint: Any) -> bool:
    return isinstance(value, float) and math.isinf(value) and float in alternatives(hint)


@cache
def _hints_with_limits(function: Callable[..., Any]) -> dict[str, tuple[Any, Setting]]:
    return {name: _with_limits(hint) for name, hint in parameter_hints(function).items()}


@cache
def _told_at_once(function: Callable[..., Any], stores: bool) -> dict[str, tuple[Any, Setting]]:
    """The parameters whose arguments a look at their class can judge.

    stores: also mappings, tuples and objects of others, which a function may take in more forms
        than it says.
    """

    def told(kind: Any) -> bool:
        known = get_origin(kind) in _COLLECTIONS or (isinstance(kind, type) and kind is not Any)
        return _is_plain(kind) or (stores and known)

    return {
        name: (hint, about)
        for name, (hint, about) in _hints_with_limits(function).items()
        if about is not _NO_LIMITS or all(map(told, alternatives(hint)))
    }


_COLLECTIONS: Mapping[Any, Any] = {tuple: (tuple, list, range), Mapping: Mapping}


def _is_outside(value: Any, kind: Any) -> bool:
    """Like `_is`, whatever a tuple or mapping holds."""
    held = _COLLECTIONS.get(get_origin(kind))
    return _is(value, kind) if held is None else isinstance(value, held)


_NO_LIMITS = Setting()
_PLAIN = (bool, int, float, str, Path, NoneType)


def _is_plain(kind: Any) -> bool:
    own = isinstance(kind, type) and kind.__module__.startswith("everydepth")
    return own or kind in _PLAIN or get_origin(kind) in (Literal, Callable, type)


def _with_limits(hint: Any) -> tuple[Any, Setting]:
    """A type and its limits, from an annotation such as `Annotated[int, Setting(least=0)]`."""
    parts = alternatives(hint)
    limited = next((part for part in parts if get_origin(part) is Annotated), None)
    if limited is None:
        return hint, _NO_LIMITS
    plain_type, about = get_args(limited)[:2]
    whole = tuple(plain_type if part is limited else part for part in parts)
    return Union[whole], about  # noqa: UP007 - its parts are only known at run time


def parameter_hints(function: Callable[..., Any]) -> dict[str, Any]:
    """The types of a function's parameters; its return type may exist for type checkers only."""
    inner = unwrap(function)
    written = {name: hint for name, hint in inner.__annotations__.items() if name != "return"}
    named = SimpleNamespace(__annotations__=written)
    return type_hints_of(named, globalns=inner.__globals__, include_extras=True)


def alternatives(hint: Any) -> tuple[Any, ...]:
    """The types of a union, or the one type."""
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def _tidied(value: Any, hint: Any) -> Any:
    """The value in its type's form: lists as tuples, 1 as 1.0, NumPy scalars as Python numbers."""
    kinds = alternatives(hint)
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
        value = value.item()
    if isinstance(value, int) and not isinstance(value, bool) and int not in kinds:
        return float(value) if float in kinds and _finite(value) else value
    inner = next((get_args(kind)[0] for kind in kinds if get_origin(kind) is tuple), None)
    if inner is not None and isinstance(value, list | tuple | range):
        return tuple(_tidied(item, inner) for item in cast(list[Any], value))
    return value


def _suits(
    value: Any, hint: Any, about: Setting, fits: Callable[[Any, Any], bool] | None = None
) -> bool:
    try:
        found = any((fits or _is)(value, kind) for kind in alternatives(hint))
    except RuntimeError:  # a collection that holds itself, or a tensor that has no sizes
        return False
    return found and _within(value, about)


def _fits(value: Any, hint: Any) -> bool:
    kinds = alternatives(hint)
    return any(_is(value, kind) for kind in kinds)


def _is(value: Any, kind: Any) -> bool:
    origin = get_origin(kind)
    if kind is Any:
        return _readable(value)
    if origin is Literal:
        return isinstance(value, str | int | None) and value in get_args(kind)
    if origin is type:
        base = get_args(kind)[0]
        known = isinstance(base, type) and base.__name__ != "Any"  # Any is a class, too
        return isinstance(value, type) and (not known or issubclass(value, base))
    if origin is tuple:
        return isinstance(value, tuple) and all(
            _fits(item, get_args(kind)[0]) for item in cast(tuple[Any, ...], value)
        )
    if kind in (int, float):
        if isinstance(value, bool) or not isinstance(value, int | float):
            return False
        return _finite(value) if kind is float else isinstance(value, int) and abs(value) < _HUGE
    if origin in (Sequence, Iterable) and hasattr(value, "shape"):  # an array
        several = len(value.shape) == 1 and issubclass(type(value), origin) and _readable(value)
        return several and all(_fits(v, get_args(kind)[0]) for v in value.tolist())
    if origin is Sequence and isinstance(value, Mapping | Set):  # it has no order, or only keys
        return False
    if origin in (Sequence, Iterable) and isinstance(value, Sequence | Mapping | Set):
        item = get_args(kind)[0]
        if isinstance(value, str | bytes):
            return item is Any or (isinstance(value, str) and item is str)
        return all(_fits(v, item) for v in value)
    if origin is Mapping and isinstance(value, Mapping):
        key, item = get_args(kind)
        held = cast(Mapping[Any, Any], value)
        return all(_fits(k, key) and _fits(v, item) for k, v in held.items())
    # For jaxtyping annotations, check that it is a tensor, not its shape.
    of = getattr(kind, "array_type", origin or kind)
    checkable = isinstance(of, type) and not _loose(of)
    return isinstance(value, of) and _readable(value) if checkable else True


def _readable(value: Any) -> bool:
    """False for arrays and tensors, also inside a mapping, whose numbers torch cannot use."""
    if isinstance(value, Mapping):
        try:
            return all(map(_readable, cast(Mapping[Any, Any], value).values()))
        except RecursionError:  # it holds itself
            return False
    dtype = getattr(value, "dtype", None)  # only NumPy's have a kind and a byte order
    if getattr(dtype, "kind", "f") not in "biufc" or not getattr(dtype, "isnative", True):
        return False
    if str(dtype).startswith(("torch.float4", "torch.float8")):  # nothing computes with them
        return False
    return not any(getattr(value, name, False) for name in ("is_meta", "is_nested", "is_sparse"))


def _loose(kind: type) -> bool:
    """Whether `isinstance` does not work with a type, as for most protocols."""
    return getattr(kind, "_is_protocol", False) and not getattr(
        kind, "_is_runtime_protocol", kind.__module__ == "collections.abc"
    )


def _finite(value: int | float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer too large for a float
        return False


def _within(value: Any, about: Setting) -> bool:
    if isinstance(value, tuple):
        return all(_within(item, about) for item in cast(tuple[Any, ...], value))
    if isinstance(value, str) and about.choices:
        return value in about.choices
    if isinstance(value, bool) or not isinstance(value, int | float):
        return True
    return (
        (about.least is None or value >= about.least)
        and (about.most is None or value <= about.most)
        and (about.above is None or value > about.above)
        and (about.below is None or value < about.below)
    )


_WORDS: Mapping[Any, str] = {
    int: "a whole number",
    float: "a number",
    bool: "True or False",
    str: "a string",
    Path: "a path",
}


def _wanted(hint: Any, about: Setting) -> str:
    if about.choices:
        found = f"one of {', '.join(about.choices)}"
        return f"{found}, or {about.also}" if about.also else found
    kinds = [kind for kind in alternatives(hint) if kind is not NoneType]
    words: list[str] = []
    for kind in kinds:
        if get_origin(kind) is Literal:
            words.append(f"one of {', '.join(map(str, get_args(kind)))}")
        elif kind is float or (kind is int and float not in kinds):
            words.append(f"{_WORDS[kind]}{_range(about)}")
        elif get_origin(kind) in (tuple, Sequence, Iterable) and get_args(kind)[0] in _WORDS:
            words.append(f"several, each {_WORDS[get_args(kind)[0]]}{_range(about)}")
        elif get_origin(kind) is Callable:
            words.append("a function")
        elif get_origin(kind) is type:
            words.append(f"a class of {getattr(get_args(kind)[0], '__name__', 'Any')}")
        elif kind is not int:
            words.append(_WORDS.get(kind) or getattr(kind, "__name__", str(kind)))
    return " or ".join(words)


def _range(about: Setting) -> str:
    if about.above is not None and about.below is not None:
        return f" above {about.above} and below {about.below}"
    if about.least is not None and about.most is None and about.below is None:
        return f" of {about.least} or more"
    low = "" if about.least is None else f" from {about.least}"
    low = low if about.above is None else f" above {about.above}"
    high = "" if about.most is None else f" up to {about.most}"
    high = high if about.below is None else f" to below {about.below}"
    return f"{low},{high}" if about.above is not None and high else f"{low}{high}"
