"""The progress bar of training."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)


class Display:
    """A bar with the loss at a shallow, a middle and the last depth; hidden without a terminal."""

    def __init__(self, depth: int, total: int, *, enabled: bool, start: int = 0) -> None:
        self.shown = shown_depths(depth)
        self.depth = depth
        console = Console(stderr=True)
        self.enabled = enabled and console.is_terminal
        self.progress = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("{task.fields[losses]}"),
            TextColumn("[green]{task.fields[valid]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
            disable=not self.enabled,
            expand=True,
        )
        self.task: TaskID = self.progress.add_task(
            "training", total=total, completed=start, losses="", valid=""
        )
        self.losses: dict[int, float] = {}

    def __enter__(self) -> Display:
        self.progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.progress.stop()

    def step(self, step: int, epoch: int, losses: Mapping[int, float]) -> None:
        if not self.enabled:
            return
        # A curriculum does not supervise all depths at every step: keep each one's last loss.
        self.losses |= losses
        text = "  ".join(
            f"[dim]depth {depth}[/] {self.losses[depth]:.3f}"
            for depth in self.shown
            if depth in self.losses
        )
        self.progress.update(
            self.task, completed=step, description=f"epoch {epoch + 1}", losses=text
        )

    def validated(self, scores: Mapping[str, tuple[float, ...]]) -> None:
        name = next(n for n in ("accuracy", "perplexity", "loss") if n in scores)
        values = " ".join(f"{scores[name][depth - 1]:.3f}" for depth in self.shown)
        self.progress.update(self.task, valid=f"{name} {values}")


def shown_depths(depth: int) -> list[int]:
    """A shallow, a middle and the last depth."""
    return sorted({max(1, depth // 4), max(1, (depth + 1) // 2), depth})
