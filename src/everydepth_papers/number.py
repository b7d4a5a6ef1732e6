"""A number as it is read."""

from __future__ import annotations

import math

NOTHING = 1e-7
"""Below this a figure is rounding error of float32: none of the papers prints one so small."""


def number(value: float | int | str | None, digits: int = 3) -> str:
    """Rounded to this many digits, without an exponent where one can be avoided.

    >>> from everydepth_papers.number import number
    >>> number(4.737e-15), number(0.123456), number(1234567), number(None)
    ('0', '0.123', '1,234,567', '-')
    """
    if value is None:
        return "-"
    if isinstance(value, str) or not math.isfinite(value):
        return str(value)
    if abs(value) < NOTHING:
        return "0"
    return f"{value:.{digits}g}" if abs(value) < 1e5 else f"{value:,.0f}"
