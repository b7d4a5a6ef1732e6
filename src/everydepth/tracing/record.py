"""A trace: what every metric found in one run over the data."""

from __future__ import annotations

from collections.abc import Mapping

from everydepth.results import Results
from everydepth.results.results import counted


class Trace(Results, kind="trace"):
    """Depths 0..L of one model on one data set; depth 0 is the embedding.

    `trace["cos"]` is a numpy array, `trace.result("cos")` the full `Result`. `about` also has the
    plan, how features were held in memory, and the name of a second model.

    >>> trace = ed.trace(model, test, ["accuracy", "cos"], progress=False)
    >>> trace["accuracy"].shape, trace["cos"].shape  # depths 0..3; pairs of depths
    ((4,), (4, 4))
    >>> ed.Trace.load(trace.save("trace")).depth
    3
    """

    counted = ("rows", "passes")

    @property
    def rows(self) -> int:
        """The number of predictions: `samples`, or the number of real tokens."""
        return int(self.about.get("rows") or self.samples)

    @property
    def passes(self) -> int:
        """How often the data ran through the model."""
        return int(self.about.get("passes") or 1)

    @property
    def partial(self) -> bool:
        """Whether it was interrupted, so that results cover only the first `samples` rows."""
        return bool(self.about.get("partial"))

    @property
    def skipped(self) -> Mapping[str, str]:
        """Metrics that were left out, and why."""
        return self.about.get("skipped") or {}

    def __str__(self) -> str:
        tokens = f", {self.rows:,} predictions" if self.rows != self.samples else ""
        state = ", PARTIAL (interrupted)" if self.partial else ""
        return (
            f"Trace of {self.model}: {self.depth} blocks, {self.samples:,} samples{tokens}, "
            f"{counted(len(self.results), 'metric')}{state}"
        )
