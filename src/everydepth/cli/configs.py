"""Command options derived from the fields of a config: their types, defaults and help.

A command with a parameter annotated with a `Config` gets an option for each of its fields, and
`--config`. We derive typer options instead of using tyro or jsonargparse because it takes one page,
gives all commands the same look, and adds no import to `--help`.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import MISSING, dataclass, fields
from functools import wraps
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, cast, get_args, get_origin, get_type_hints

import typer
from typer.models import OptionInfo

from everydepth.config import Config, alternatives, check_names, hints_of, settings_of
from everydepth.errors import SettingError


@dataclass(frozen=True)
class Defaults:
    """Other defaults on the command line: `fitting: Annotated[FitConfig, Defaults({...})]`."""

    values: Mapping[str, Any]


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """The command with each config parameter expanded into options, for typer."""
    hints = get_type_hints(command, include_extras=True)
    parameters: list[inspect.Parameter] = []
    configs: dict[str, type[Config]] = {}
    for parameter in inspect.signature(command).parameters.values():
        hint = hints[parameter.name]
        kind, extras = (get_args(hint)[0], get_args(hint)[1:]) if _annotated(hint) else (hint, ())
        if not (isinstance(kind, type) and issubclass(kind, Config)):
            parameters.append(parameter.replace(annotation=hint))
            continue
        configs[parameter.name] = kind
        own = next((extra.values for extra in extras if isinstance(extra, Defaults)), {})
        parameters += _options(kind, own)
    if configs:
        file = Annotated[
            Path | None,
            typer.Option(
                "--config",
                callback=_read_into,
                is_eager=True,
                help="A YAML or JSON file with these options; flags override it.",
            ),
        ]
        parameters.append(_parameter("config", file, None))
        parameters.append(_parameter("context", typer.Context, inspect.Parameter.empty))
    parameters = [p.replace(annotation=_compact(p)) for p in parameters]

    @wraps(command)
    def called(**given: Any) -> None:
        context = given.pop("context", None)
        given.pop("config", None)
        for name, kind in configs.items():
            values = {key: _split(kind, key, given.pop(key)) for key in _shown(kind)}
            _drop_replaced(kind, values, context)
            given[name] = kind.of(values, command.__name__)
        command(**given)

    # Keyword-only, so that options with a default may precede arguments without one.
    parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in parameters]
    cast(Any, called).__signature__ = inspect.Signature(parameters)
    called.__annotations__ = {p.name: p.annotation for p in parameters}
    del cast(Any, called).__wrapped__
    return called


def _options(kind: type[Config], defaults: Mapping[str, Any]) -> list[inspect.Parameter]:
    found: list[inspect.Parameter] = []
    by_name = {f.name: f.default for f in fields(kind)}
    for name in _shown(kind):
        about, default = settings_of(kind)[name], defaults.get(name, by_name[name])
        of = [about.option] if about.option else alternatives(hints_of(kind)[name])
        (shown,) = [part for part in of if part is not NoneType]
        word = None
        if get_origin(shown) is tuple:
            word = f"{_WORDS[get_args(shown)[0]]},..."
            shown, default = str, None if default is None else ",".join(map(_short, default))
        # The config checks limits itself; showing them would crowd the help.
        option = typer.Option(
            *about.flags,
            metavar=word,
            help=" ".join(filter(None, (about.help, _listed(about.choices)))),
            rich_help_panel=kind.title,
        )
        if default is MISSING:
            default = inspect.Parameter.empty
        elif default == ():
            default = []
        elif shown in (int, float) and default is not None:
            default = shown(default)
        hint: Any = shown | None if default is None else shown
        found.append(_parameter(name, Annotated[hint, option], default))
    return found


# Metavars; typer's own (`<int range> [x>=1]`) leave no room for the help.
_WORDS = {bool: "", int: "INT", float: "FLOAT", str: "TEXT", Path: "PATH"}


def _compact(parameter: inspect.Parameter) -> Any:
    """The annotation of a parameter with a short metavar.

    A flag that is off by default gets no `--no-` counterpart.
    """
    hint = parameter.annotation
    place = next((i for i, e in enumerate(get_args(hint)) if isinstance(e, OptionInfo)), None)
    if not _annotated(hint) or place is None:
        return hint
    kind, *extras = get_args(hint)
    option = extras[place - 1] = copy(extras[place - 1])
    of = [part for part in alternatives(kind) if part is not NoneType]
    one = get_args(of[0])[0] if get_origin(of[0]) is list else of[0]
    if option.metavar is None:
        option.metavar = _WORDS.get(one)
    # typer keeps the first name of an annotated option in `default`.
    if one is bool and parameter.default is False and option.default is ...:
        option.param_decls = (f"--{parameter.name.replace('_', '-')}",)
    return Annotated[(kind, *extras)]


def _short(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _split(kind: type[Config], name: str, value: Any) -> Any:
    """A value from the command line; if the field is a tuple, split at commas."""
    option = settings_of(kind)[name].option
    found = [option] if option else alternatives(hints_of(kind)[name])
    several = next((part for part in found if get_origin(part) is tuple), None)
    if several is None or not isinstance(value, str):
        return value
    item = get_args(several)[0]
    try:
        return tuple(item(part) for part in value.split(","))
    except ValueError as error:
        word = "whole numbers" if item is int else "numbers"
        raise SettingError(
            f"--{name.replace('_', '-')} {value!r}; give {word}, separated by commas"
        ) from error


def _shown(kind: type[Config]) -> list[str]:
    return [name for name, about in settings_of(kind).items() if not about.hidden]


def _listed(choices: tuple[str, ...]) -> str:
    return f"One of {', '.join(choices)}." if choices else ""


def _parameter(name: str, hint: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hint)


def _annotated(hint: Any) -> bool:
    return get_origin(hint) is Annotated


# Where a value came from, in order of increasing precedence.
_SOURCES = ("DEFAULT", "DEFAULT_MAP", "COMMANDLINE")


def _drop_replaced(kind: type[Config], values: dict[str, Any], context: Any) -> None:
    """Of two mutually exclusive settings, drop the one with lower precedence: the command line
    overrides the file, and both override defaults."""

    def rank(name: str) -> int:
        source = getattr(context.get_parameter_source(name), "name", "DEFAULT")
        return _SOURCES.index(source) if source in _SOURCES else 0

    for name, about in settings_of(kind).items():
        other = about.instead_of
        if other is not None and rank(name) != rank(other):
            values[other if rank(name) > rank(other) else name] = None


def _read_into(context: Any, value: Any) -> Any:
    """A typer callback: use the options in a file as defaults."""
    if value is None:
        return None
    content = {key.replace("-", "_"): given for key, given in _read(value).items()}
    known = sorted(p.name for p in context.command.params if p.name not in ("config", "help"))
    check_names(content, known, f"{value}: {context.command.name}", "option")
    given = {key: item for key, item in content.items() if item is not None}
    for option in context.command.params:
        item = given.get(option.name)
        if isinstance(item, bool) and not getattr(option, "is_flag", False):
            raise SettingError(
                f"{value}: {option.name} is {item}, but it is not a flag; give a value"
            )
        if isinstance(item, dict):
            given[option.name] = json.dumps(item)
        elif isinstance(item, list) and not option.multiple:
            given[option.name] = ",".join(map(str, cast(list[Any], item)))
    context.default_map = {**(context.default_map or {}), **given}
    return value


def _read(file: Path) -> dict[str, Any]:
    import yaml

    try:
        # Every JSON file is a YAML file.
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, RecursionError, UnicodeError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise SettingError(
            f"{file} cannot be read as YAML or JSON ({reason}); write one line `option: value` "
            "for each option"
        ) from error
    if not isinstance(content, dict):
        raise SettingError(f"{file} holds a {type(content).__name__}; write `option: value` lines")
    return {str(key): value for key, value in cast(dict[Any, Any], content).items()}
