"""The `everydepth` command.

To add a command, write `cli/<name>.py` with a function of that name and add it to `COMMANDS`. Its
docstring is its help: paragraphs are wrapped, except those that begin with `$`. A parameter
annotated with a config becomes an option for each of its fields (`cli/configs.py`). Import torch
and the rest of the package inside the function, so that `--help` is fast. Other packages add
commands as entry points in the group `everydepth.commands`.
"""

from __future__ import annotations

import inspect
import signal
import sys
from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Annotated, Any, cast

import typer
import typer.core

from everydepth.cli.ablate import ablate
from everydepth.cli.app import app
from everydepth.cli.audit import audit
from everydepth.cli.configs import with_options
from everydepth.cli.env import env
from everydepth.cli.export import export
from everydepth.cli.generate import generate
from everydepth.cli.grow import grow
from everydepth.cli.plan import plan
from everydepth.cli.profile import profile
from everydepth.cli.report import report
from everydepth.cli.serve import serve
from everydepth.cli.trace import trace
from everydepth.cli.train import train
from everydepth.errors import EveryDepthError
from everydepth.files import explained
from everydepth.progress import put_away

COMMANDS: tuple[Callable[..., None], ...] = (
    train,
    trace,
    profile,
    export,
    generate,
    serve,
    ablate,
    audit,
    grow,
    plan,
    report,
    app,
    env,
)


def _print_version(wanted: bool) -> bool:
    if wanted:
        from everydepth import __version__

        typer.echo(f"everydepth {__version__}")
        raise typer.Exit
    return wanted  # typer passes the callback's value to `_root`


def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show the traceback of an error, not just one line.")
    ] = False,
) -> None:
    """Use, understand, shrink and grow a residual network at every depth: train once, use N models.

    To get started, on data that comes with everydepth:

    $ everydepth train -m vit-tiny -d digits --epochs 10 -o runs/lpa
    $ everydepth trace runs/lpa -d digits                    # measure every depth
    $ everydepth profile runs/lpa -d digits --max-drop 0.01  # choose a depth
    $ everydepth export runs/lpa small --depth 2             # keep two blocks
    $ everydepth report runs/lpa -o page.html                # see it on one page

    With your own model, start with trace. Every command has its own --help.
    """


def build_app() -> typer.Typer:
    app = typer.Typer(
        name="everydepth",
        cls=_Group,
        no_args_is_help=True,
        add_completion=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback(help=_filled(_root))(with_options(_root))
    for command in (*COMMANDS, *_plugins()):
        app.command(help=_filled(command), cls=_Command)(with_options(command))
    return app


class _ShortHelp:
    """`--help` is shown as the flag it is; typer would add `<bool>`."""

    def get_help_option(self, ctx: Any) -> Any:
        option = cast(Any, super()).get_help_option(ctx)
        option.metavar = ""
        return option


class _Command(_ShortHelp, typer.core.TyperCommand):
    pass


class _Group(_ShortHelp, typer.core.TyperGroup):
    pass


def _filled(command: Callable[..., None]) -> str:
    """The docstring without line breaks inside paragraphs, which typer would keep."""
    paragraphs = (inspect.getdoc(command) or "").split("\n\n")
    return "\n\n".join(p if p.startswith("$") else p.replace("\n", " ") for p in paragraphs)


def _plugins() -> list[Callable[..., None]]:
    """Commands of other installed packages; they cannot replace ours."""
    ours = {command.__name__ for command in COMMANDS}
    found: dict[str, Callable[..., None]] = {}
    for point in sorted(entry_points(group="everydepth.commands"), key=lambda point: point.name):
        if point.name in ours:
            continue
        try:
            found[point.name] = point.load()
        except (ImportError, AttributeError) as error:
            # The other commands still work.
            typer.echo(f"warning: no command {point.name} from {point.value}: {error}", err=True)
    return list(found.values())


def main() -> None:
    # Exit through cleanup handlers, as after Ctrl-C, so that no partial files remain.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    # Allowed anywhere: people append it when they repeat a command.
    debug = "--debug" in sys.argv
    words = [word for word in sys.argv[1:] if word != "--debug"] or ["--help"]
    try:
        sys.exit(build_app()(words, prog_name="everydepth", standalone_mode=False))
    except _UsageError as error:
        typer.echo(_usage(error), err=True)
        sys.exit(2)
    except Exception as error:
        put_away()
        if debug:
            raise
        typer.echo(_message(error), err=True)
        sys.exit(1)


# click's UsageError, which typer does not export.
_UsageError = cast(type[Exception], typer.BadParameter.__mro__[1])


def _usage(error: Any) -> str:
    """One line about a command line that cannot be parsed."""
    said = error.format_message().rstrip(".")
    asked = error.ctx.command_path if error.ctx else "everydepth"
    end = " See" if said.endswith("?") else "; see"
    return f"error: {said[:1].lower()}{said[1:]}{end} {asked} --help"


def _message(error: Exception) -> str:
    """One line; our own errors say what was wrong and what to do next."""
    if isinstance(error, OSError | MemoryError):
        try:
            with explained("the command stopped"):
                raise error
        except EveryDepthError as ours:
            error = ours
    if isinstance(error, EveryDepthError):
        notes: list[str] = getattr(error, "__notes__", [])
        return "\n".join([f"error: {error}", *notes])
    first = (str(error).splitlines() or ["no message"])[0]
    return (
        f"error: {type(error).__name__}: {first}; add --debug for the traceback, and report it if "
        "you think it is a bug"
    )
