"""The progress bar of training."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from rich.console import Console, RenderableType
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text


class _Bar(Progress):
    """A bar with a line of figures below it."""

    figures = ""

    def get_renderables(self) -> Iterable[RenderableType]:
        yield from super().get_renderables()
        yield Text.from_markup(self.figures, overflow="ellipsis")


class Display:
    """A bar with the loss at a shallow, a middle and the last depth; hidden without a terminal."""

    def __init__(self, depth: int, total: int, *, enabled: bool, start: int = 0) -> None:
        self.shown = shown_depths(depth)
        self.depth = depth
        console = Console(stderr=True)
        self.enabled = enabled and console.is_terminal
        self.progress = _Bar(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
            disable=not self.enabled,
            expand=True,
        )
        self.task: TaskID = self.progress.add_task("training", total=total, completed=start)
        self.losses: dict[int, float] = {}
        self._valid = ""

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
        self.progress.update(self.task, completed=step, description=f"epoch {epoch + 1}")
        self._write()

    def validated(self, scores: Mapping[str, tuple[float, ...]]) -> None:
        name = next(n for n in ("accuracy", "perplexity", "loss") if n in scores)
        values = " ".join(f"{scores[name][depth - 1]:.3f}" for depth in self.shown)
        self._valid = f"  [green]{name} {values}[/]"
        self._write()

    def _write(self) -> None:
        losses = (f"{k} {self.losses[k]:.3f}" for k in self.shown if k in self.losses)
        self.progress.figures = f"[dim]loss at depth[/] {'  '.join(losses)}{self._valid}"


def shown_depths(depth: int) -> list[int]:
    """A shallow, a middle and the last depth."""
    return sorted({max(1, depth // 4), max(1, (depth + 1) // 2), depth})
