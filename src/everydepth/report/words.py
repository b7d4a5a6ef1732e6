"""What a run comes to, in a sentence."""

from __future__ import annotations

from collections.abc import Sequence

from everydepth.report.panels import at_depth, number
from everydepth.report.reading import RunView
from everydepth.results.result import Result

CLOSE = 0.01  # accuracy: one point
NEAR = 1.1  # errors: ten percent

# What says best how good a prediction is, the first that is there: the name, what to call it, and
# whether less is better.
_MEASURES = (
    ("accuracy", "accuracy", False),
    ("next_token_accuracy", "next-token accuracy", False),
    ("perplexity", "perplexity", True),
    ("mse", "mean squared error", True),
    ("loss", "loss", True),
)


def enough(view: RunView) -> int | None:
    """The smallest depth that is as good as the last: within a point, or ten percent of error."""
    found = _measured(view)
    if found is None:
        return None
    _, less_is_better, values = found
    full = values[max(values)]
    for depth, value in sorted(values.items()):
        if value <= full * NEAR if less_is_better else value >= full - CLOSE:
            return depth
    return max(values)


def headline(view: RunView) -> str:
    """The run in one sentence: how good, and from which depth on."""
    if view.trace is None:
        return "has not been traced."
    found, depth = _measured(view), enough(view)
    if found is None or depth is None:
        return f"{view.trace.model}, {view.trace.depth} blocks."
    what, less_is_better, values = found
    last = max(values)
    level = number(values[last], 3) if less_is_better else f"{100 * values[last]:.1f} %"
    if depth == last:
        return f"needs all of its {last} blocks for {what} {level}."
    near = "10 %" if less_is_better else "1 point"
    return f"is within {near} of its full {what} ({level}) at depth {depth} of {last}."


def start_depth(views: Sequence[RunView], last: int) -> int:
    """Where the dial starts: the smallest depth that suffices for one of the runs."""
    depths = [depth for view in views if (depth := enough(view)) is not None]
    return min([last, *depths])


def _measured(view: RunView) -> tuple[str, bool, dict[int, float]] | None:
    for name, what, less_is_better in _MEASURES:
        result = view.results.get(name)
        if isinstance(result, Result) and not result.is_gap and result.kind == "curve":
            values = at_depth(result, result.series[0])
            if values:
                return what, less_is_better, values
    return None
