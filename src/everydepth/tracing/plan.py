"""The expected time and memory of a trace, from its first row."""

from __future__ import annotations

from dataclasses import dataclass

from everydepth.results.results import counted


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The expected cost.

    depths: those read out. rows: the most that the data has; None if unknown. tokens: predictions
    in a row as measured; None if each row is one. drawn: predictions drawn from all rows; None if
    every one is measured. forward, readout, rest: seconds per row as measured. bytes: memory in
    addition to the model.
    """

    model: str
    metrics: tuple[str, ...]
    depths: tuple[int, ...]
    rows: int | None
    tokens: float | int | None
    forward: float
    readout: float
    rest: float
    bytes: int
    drawn: int | None = None

    @property
    def seconds(self) -> float | None:
        """The total; None if the number of rows is unknown."""
        return None if self.rows is None else sum(self._parts.values())

    @property
    def _parts(self) -> dict[str, float]:
        """Seconds of each part; of one row if the number of rows is unknown."""
        rows = 1 if self.rows is None else self.rows
        # The row that was measured may have had more of the drawn tokens than others, or fewer.
        like = self.drawn / self.tokens if self.drawn and self.tokens and self.rows else rows
        return {
            "forward": rows * self.forward,
            "readout": like * self.readout,
            "rest": like * self.rest,
        }

    @property
    def halving(self) -> str:
        """What to drop to halve the time."""
        parts = self._parts
        dearest = max(parts, key=lambda name: parts[name])
        share = parts[dearest] / max(sum(parts.values()), 1e-12)
        if dearest == "readout" and len(self.depths) > 2:
            every = self.depths == tuple(range(len(self.depths)))
            ways = ["depths='every 2nd'" if every else f"depths={list(self.depths[::-2])[::-1]}"]
            if self.tokens is not None and self.rows is not None:
                measured = self.rows * self.tokens if self.drawn is None else self.drawn
                ways.append(f"tokens={max(int(measured) // 2, 1)}")
            return (
                f"the readout of {len(self.depths)} depths takes {share:.0%}, and "
                f"{' or '.join(ways)} halves it"
            )
        if dearest == "rest" and len(self.metrics) > 1:
            return f"other metrics take {share:.0%}: name those you need in metrics="
        half = "" if self.rows is None else f"={max(self.rows // 2, 1)}"
        return f"the forward pass takes {share:.0%}: max_samples{half} halves it"

    def __str__(self) -> str:
        time = "unknown time" if self.seconds is None else f"about {self.seconds:,.0f} s"
        rows = "all rows" if self.rows is None else f"up to {self.rows:,} rows"
        metrics = counted(len(self.metrics), "metric")
        shown = ", ".join(self.metrics[:4]) + (", ..." if len(self.metrics) > 4 else "")
        return (
            f"{self.model}: {len(self.depths)} depths of {rows}, {metrics} ({shown}); "
            f"{time}, {self.bytes / 2**20:,.0f} MiB in addition to the model. To halve the time: "
            f"{self.halving}"
        )
