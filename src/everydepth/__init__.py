"""everydepth: a residual network you can use, understand, shrink and grow at every depth."""

from everydepth.architectures.registry import register_all as _register_all
from everydepth.stream import (
    Block,
    Branch,
    Cursor,
    ResidualStream,
    States,
    as_stream,
    at_depth,
    check_stream,
    families,
    register,
)

_register_all()

__version__ = "0.1.0"

__all__ = [
    "Block",
    "Branch",
    "Cursor",
    "ResidualStream",
    "States",
    "__version__",
    "as_stream",
    "at_depth",
    "check_stream",
    "families",
    "register",
]
