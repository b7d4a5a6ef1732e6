"""A chart: marks on two axes, to be drawn by matplotlib or Plotly."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

# Okabe and Ito's colors, which are distinguishable with any color vision; without the pale yellow,
# which is invisible as a thin line on white.
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")

# Lines stay distinguishable in black and white.
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
    """Vertical bars; several on one chart stand side by side. `values` prints each one's number."""

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
    """A matrix as colors; rows run upward. `text` is printed into the cells."""

    z: Array
    x: Array
    y: Array
    low: float | None = None
    high: float | None = None
    unit: str = ""
    text: tuple[tuple[str, ...], ...] = ()

    @property
    def diverging(self) -> bool:
        """Whether zero is the midpoint: some values are clearly below it."""
        finite = self.z[np.isfinite(self.z)]
        return bool(finite.size) and float(finite.min()) < -0.05 * float(np.abs(finite).max())

    @property
    def color_range(self) -> tuple[float, float]:
        """The values of the first and last color; symmetric if zero is the midpoint."""
        finite = self.z[np.isfinite(self.z)]
        if finite.size == 0:
            return 0.0, 1.0
        low = float(finite.min()) if self.low is None else self.low
        high = float(finite.max()) if self.high is None else self.high
        if self.diverging:
            high = max(abs(low), abs(high))
            low = -high
        return low, high


Mark = Line | Bars | Boxes | Dots | Heat


@dataclass(frozen=True, kw_only=True)
class Axis:
    """An axis. `ticks` are labels for the positions 0, 1, 2, ..., for example tokens."""

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
    """One drawing. `dial` is the axis of depth, so that a page can highlight a depth."""

    title: str
    x: Axis
    y: Axis
    marks: tuple[Mark, ...]
    dial: Literal["x", "y", "both"] | None = None

    @property
    def is_heat(self) -> bool:
        return any(isinstance(mark, Heat) for mark in self.marks)

    @property
    def names(self) -> set[str]:
        """The names in the legend; a line through boxes stands for them."""
        return {mark.name for mark in self.marks if not isinstance(mark, Heat | Boxes)}

    @property
    def legend(self) -> bool:
        """Whether it needs a legend."""
        return len(self.names) > 1
