"""The `everydepth` command.

To add a command: write `cli/<name>.py` with one function of that name and put it into `COMMANDS`.
A parameter annotated with a config becomes an option for each of its fields (`cli/configs.py`).
Import torch and the rest of the package inside the function, so that `--help` answers at once.
Another package adds one as an entry point of the group `everydepth.commands`: the name of the
command, and the function.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Annotated

import typer

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
from everydepth.cli.sweep import sweep
from everydepth.cli.trace import trace
from everydepth.cli.train import train
from everydepth.errors import EveryDepthError
from everydepth.files import explained

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
    sweep,
    plan,
    report,
    app,
    env,
)

# A blank line between paragraphs: rich joins the lines of one paragraph.
EPILOG = """\
A first hour, on data that is there:

  everydepth train -m vit-tiny -d digits --epochs 10 -o runs/lpa

  everydepth trace runs/lpa --data digits          what each depth gives

  everydepth profile runs/lpa --data digits --max-drop 0.01     which depth is enough

  everydepth export runs/lpa small --depth 2       a plain model of two blocks

  everydepth report runs/lpa -o page.html          one page to look at

With a model of your own, begin with trace; everydepth env says what this machine offers.
"""


def _print_version(wanted: bool) -> bool:
    if wanted:
        from everydepth import __version__

        typer.echo(f"everydepth {__version__}")
        raise typer.Exit
    return wanted  # typer hands what the callback returns to `_root`


def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and stop."
        ),
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show where an error came from, instead of one line.")
    ] = False,
) -> None:
    """Use, understand, shrink and grow a residual network at every depth: train once, use N models.

    Every command explains itself: everydepth COMMAND --help.
    """


def build_app() -> typer.Typer:
    app = typer.Typer(
        name="everydepth",
        no_args_is_help=True,
        add_completion=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback(epilog=EPILOG)(_root)
    for command in (*COMMANDS, *_brought()):
        app.command()(with_options(command))
    return app


def _brought() -> list[Callable[..., None]]:
    """Commands of other installed packages, by name; one of ours is not replaced."""
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
    # What is half written is removed on the way out, as after Ctrl-C.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    # Wherever it stands: whoever repeats a command appends it.
    debug = "--debug" in sys.argv
    try:
        build_app()([word for word in sys.argv[1:] if word != "--debug"], prog_name="everydepth")
    except Exception as error:
        if debug:
            raise
        typer.echo(_in_words(error), err=True)
        sys.exit(1)


def _in_words(error: Exception) -> str:
    """One line: the message of an error of ours says what was wrong and what to do next."""
    if isinstance(error, OSError):
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
        "the command was right"
    )
