"""everydepth: a residual network you can use, understand, shrink and grow at every depth."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from everydepth.stream import Block as Block
    from everydepth.stream import Branch as Branch
    from everydepth.stream import Cursor as Cursor
    from everydepth.stream import ResidualStream as ResidualStream
    from everydepth.stream import States as States
    from everydepth.stream import as_stream as as_stream
    from everydepth.stream import at_depth as at_depth
    from everydepth.stream import check_stream as check_stream
    from everydepth.stream import families as families
    from everydepth.stream import register as register

__version__ = "0.1.0"

# Where each public name lives. Nothing is imported before it is used: `everydepth --help` and
# `import everydepth` need neither torch nor transformers.
_HOMES = {
    "Block": "everydepth.stream",
    "Branch": "everydepth.stream",
    "Cursor": "everydepth.stream",
    "ResidualStream": "everydepth.stream",
    "States": "everydepth.stream",
    "as_stream": "everydepth.stream",
    "at_depth": "everydepth.stream",
    "check_stream": "everydepth.stream",
    "families": "everydepth.stream",
    "register": "everydepth.stream",
}

__all__ = ["__version__", *_HOMES]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'everydepth' has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
