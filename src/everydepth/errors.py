"""Errors of our own. Each message gives the value received, what is allowed, and the next step."""

from __future__ import annotations

FOREIGN = (
    *(ArithmeticError, AssertionError, AttributeError, LookupError),
    *(OSError, RuntimeError, TypeError, ValueError),
)
"""What other people's code may raise if it is given what it does not accept."""


class EveryDepthError(Exception):
    """Base of every error this package raises on purpose."""


class UnsupportedModelError(EveryDepthError, TypeError):
    """The model is not a residual stream we know, or does not support what was requested."""


class DepthError(EveryDepthError, ValueError):
    """A depth outside the range that makes sense for this call."""


class BatchError(EveryDepthError, ValueError):
    """A batch that lacks what the model needs, or is empty."""


class LabelError(BatchError):
    """Labels that do not fit the readout."""


class NonFiniteError(EveryDepthError, ArithmeticError):
    """NaN or infinity in the states; `.depth` is the first depth where it appears."""

    def __init__(self, message: str, depth: int) -> None:
        super().__init__(message)
        self.depth = depth

    def __reduce__(self) -> tuple[type[NonFiniteError], tuple[str, int]]:
        # Errors travel between processes, and a plain exception would forget the depth.
        return type(self), (str(self), self.depth)


class SettingError(EveryDepthError, ValueError):
    """An argument with a value that is not allowed."""


class OptionError(SettingError):
    """An option that a function passed on, but that does not apply there.

    option: its name. owner: the function it was passed on to. caller: the arguments of the function
    that passed it on, as a sentence.
    """

    def __init__(self, message: str, option: str = "", owner: str = "", caller: str = "") -> None:
        super().__init__(f"{message}{caller}")
        self.message, self.option, self.owner = message, option, owner


class DataError(EveryDepthError, ValueError):
    """Data that cannot be read, or does not look as it should."""


class RunError(EveryDepthError, RuntimeError):
    """A run directory or checkpoint that cannot be written, read, or continued."""


class PolicyError(EveryDepthError, ValueError):
    """An exit policy that does not belong to this model, or cannot be read."""


class BudgetError(EveryDepthError, ValueError):
    """A budget that no depth of the model can meet."""


class ExportError(EveryDepthError, RuntimeError):
    """An export that failed; nothing of it is left on disk."""
