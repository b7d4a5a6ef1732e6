"""What a trace will cost, said once its first row has shown."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Expected from the first row: seconds of the forward pass, of the readouts, of the rest.

    rows: of data; None if unknown. tokens: that predict in a row. bytes: of what is held at once,
    beside the model.
    """

    model: str
    metrics: tuple[str, ...]
    depths: int
    rows: int | None
    tokens: int | None
    forward: float
    readout: float
    rest: float
    bytes: int

    @property
    def seconds(self) -> float | None:
        """In all; None if the data does not say how long it is."""
        if self.rows is None:
            return None
        return self.rows * (self.forward + self.readout + self.rest)

    @property
    def halving(self) -> str:
        """What to drop to halve the time."""
        parts = {"forward": self.forward, "readout": self.readout, "rest": self.rest}
        dearest = max(parts, key=lambda name: parts[name])
        share = parts[dearest] / max(sum(parts.values()), 1e-12)
        if dearest == "readout" and self.depths > 2:
            few = "" if self.tokens is None else f", or tokens={max(self.tokens // 2, 1):,}"
            return (
                f"the readout of {self.depths} depths is {share:.0%}: depths='::2'{few} halves it"
            )
        if dearest == "rest" and len(self.metrics) > 1:
            return f"metrics beside readouts are {share:.0%}: name those you need in metrics="
        half = "" if self.rows is None else f"={max(self.rows // 2, 1)}"
        return f"the forward pass is {share:.0%}: max_samples{half} halves it"

    def __str__(self) -> str:
        time = "unknown time" if self.seconds is None else f"about {self.seconds:,.0f} s"
        rows = "all rows" if self.rows is None else f"{self.rows:,} rows"
        shown = ", ".join(self.metrics[:4]) + (", ..." if len(self.metrics) > 4 else "")
        return (
            f"{self.model}: {self.depths} depths of {rows}, {len(self.metrics)} metrics ({shown}); "
            f"{time}, {self.bytes / 2**20:,.0f} MiB beside the model. To halve: {self.halving}"
        )
