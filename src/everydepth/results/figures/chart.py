"""A chart: marks on two axes, said once and drawn by matplotlib or by Plotly."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

# Okabe and Ito's colors, told apart with any color vision; the pale yellow is left out because a
# thin line of it cannot be seen on white.
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")

# One name a pattern; a chart in black and white still tells its lines apart.
DASHES = ("solid", "dash", "dot", "dashdot")


@dataclass(frozen=True, kw_only=True, eq=False)
class Line:
    """A line through points; `low` and `high` are a band around it. A NaN leaves a gap."""

    x: Array
    y: Array
    name: str = ""
    low: Array | None = None
    high: Array | None = None
    color: int = 0
    dash: int = 0
    markers: bool = True


@dataclass(frozen=True, kw_only=True, eq=False)
class Bars:
    """Upright bars; several on one chart stand side by side. `values` writes each one's number."""

    x: Array
    y: Array
    name: str = ""
    color: int = 0
    values: bool = False


@dataclass(frozen=True, kw_only=True, eq=False)
class Boxes:
    """Box plots from quantiles: a column of `quantiles` is low, q1, median, q3, high at one x."""

    x: Array
    quantiles: Array
    name: str = ""
    color: int = 0


@dataclass(frozen=True, kw_only=True, eq=False)
class Dots:
    """Points; `text` names each."""

    x: Array
    y: Array
    name: str = ""
    text: tuple[str, ...] = ()
    color: int = 0


@dataclass(frozen=True, kw_only=True, eq=False)
class Heat:
    """A matrix as colors; rows run upwards. `text` is written into the cells where it fits."""

    z: Array
    x: Array
    y: Array
    low: float | None = None
    high: float | None = None
    unit: str = ""
    text: tuple[tuple[str, ...], ...] = ()

    @property
    def diverging(self) -> bool:
        """Whether zero is a middle: some values lie clearly below it."""
        finite = self.z[np.isfinite(self.z)]
        return bool(finite.size) and float(finite.min()) < -0.05 * float(np.abs(finite).max())


Mark = Line | Bars | Boxes | Dots | Heat


@dataclass(frozen=True, kw_only=True)
class Axis:
    """What an axis counts. `ticks` name the positions 0, 1, 2, ..., for example tokens."""

    label: str
    unit: str = ""
    log: bool = False
    whole: bool = False
    ticks: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        return f"{self.label} ({self.unit})" if self.unit else self.label


@dataclass(frozen=True, kw_only=True)
class Chart:
    """One drawing. `dial` says where depth lies, so that a depth can be pointed at."""

    title: str
    x: Axis
    y: Axis
    marks: tuple[Mark, ...]
    note: str = ""
    dial: Literal["x", "y", "both"] | None = None

    @property
    def is_heat(self) -> bool:
        return any(isinstance(mark, Heat) for mark in self.marks)

    @property
    def names(self) -> set[str]:
        """What tells the marks apart; a line through boxes stands for them."""
        return {mark.name for mark in self.marks if not isinstance(mark, Heat | Boxes)}

    @property
    def legend(self) -> bool:
        """Whether names are needed."""
        return len(self.names) > 1
