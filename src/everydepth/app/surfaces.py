"""The Surfaces tab: a function of two numbers, and what each depth has learned of it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float

from everydepth.app.content import WAYS, surface_folder
from everydepth.app.shelf import Item
from everydepth.data import SURFACES
from everydepth.data.surfaces import Surface
from everydepth.exits import load
from everydepth.results.figures.chart import Axis, Chart, Line
from everydepth.results.figures.web import draw
from everydepth.stream import ResidualStream, as_stream, evaluating

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

GRID = 48  # points per side
INK = "#80868f"  # visible on white and on black
TITLES = {"end-to-end": "End-to-end", "lpa": "LPA"}


@dataclass(frozen=True, eq=False)
class Study:
    """A surface (None if unknown), and the models that learned it, by title."""

    surface: Surface | None
    streams: dict[str, ResidualStream]

    @property
    def depth(self) -> int:
        return max(stream.depth for stream in self.streams.values())

    @property
    def domain(self) -> tuple[float, float]:
        return (-1.0, 1.0) if self.surface is None else self.surface.domain

    @cached_property
    def target(self) -> Float[np.ndarray, "y x"] | None:
        return None if self.surface is None else self.surface(_points(self.domain)).numpy()

    @cached_property
    def learned(self) -> dict[str, Float[np.ndarray, "depth y x"]]:
        """The readout of every depth 0..L on the grid, by title."""
        return {title: self._readouts(stream) for title, stream in self.streams.items()}

    def errors(self) -> dict[str, Float[np.ndarray, " depth"]]:
        """The mean squared error of each depth on the grid, by title."""
        if self.target is None:
            return {}
        return {t: ((z - self.target) ** 2).mean((1, 2)) for t, z in self.learned.items()}

    def height(self) -> tuple[float, float]:
        """The z-range of all figures: that of the target, or else of the last depth."""
        shown = [z[-1] for z in self.learned.values()] if self.target is None else [self.target]
        low, high = min(z.min() for z in shown), max(z.max() for z in shown)
        spare = 0.15 * max(high - low, 1e-6)
        return float(low - spare), float(high + spare)

    def _readouts(self, stream: ResidualStream) -> Float[np.ndarray, "depth y x"]:
        points = _points(self.domain).reshape(-1, 2)
        with torch.no_grad(), evaluating(stream.model):
            states = stream.observe({"inputs": points})
            found = [states.logits(depth)[:, 0] for depth in range(stream.depth + 1)]
        return torch.stack(found).reshape(-1, GRID, GRID).numpy()


def study_of(folder: Path, name: str) -> Study:
    """A surface with the models that `content.learn_surface` trained."""
    streams = {
        TITLES[way]: as_stream(load(surface_folder(folder, name, way), trusted=False))
        for way in WAYS
    }
    return Study(SURFACES[name], streams)


def study_of_item(item: Item) -> Study:
    """A user's model; its surface is known if its run names one."""
    name = (item.data or "").removeprefix("surface:")
    return Study(SURFACES.get(name), {item.name: item.stream})


def figure(z: Float[np.ndarray, "y x"], study: Study, title: str) -> Figure:
    """One surface in 3D; all figures of a study share their scale."""
    from plotly.graph_objects import Figure

    low, high = study.height()
    axis = np.linspace(*study.domain, GRID).round(4).tolist()
    hidden = {"title": "", "showticklabels": False, "showbackground": False, "gridcolor": INK}
    surface = {
        "type": "surface",
        "x": axis,
        "y": axis,
        "z": np.clip(z, low, high).round(4).tolist(),
        "cmin": low,
        "cmax": high,
        "colorscale": "Viridis",
        "showscale": False,
        "hovertemplate": "x %{x:.2f}, y %{y:.2f}: %{z:.3f}<extra></extra>",
    }
    layout: dict[str, Any] = {
        "title": {"text": escape(title), "font": {"size": 14, "color": INK}, "x": 0.5},
        "margin": {"l": 0, "r": 0, "t": 36, "b": 0},
        "height": 340,
        "paper_bgcolor": "rgba(0,0,0,0)",
        "uirevision": "same",  # keeps the view when the depth changes
        "scene": {
            "xaxis": hidden,
            "yaxis": hidden,
            "zaxis": {**hidden, "range": [low, high]},
            "aspectratio": {"x": 1, "y": 1, "z": 0.6},
            "camera": {
                "eye": {"x": 1.1, "y": 1.1, "z": 0.8},
                "center": {"x": 0, "y": 0, "z": -0.12},
            },
        },
    }
    return Figure({"data": [surface], "layout": layout})


def figures(study: Study, depth: int) -> list[Figure]:
    """The target, then what each model has learned at a depth."""
    found = [] if study.target is None else [figure(study.target, study, "Target")]
    errors = study.errors()
    for title, z in study.learned.items():
        level = min(depth, len(z) - 1)
        error = f", MSE {errors[title][level]:.2g}" if title in errors else ""
        found.append(figure(z[level], study, f"{title}, depth {level}{error}"))
    return found


def error_figure(study: Study, depth: int) -> Figure | None:
    """The error of every depth, one line per model, and a mark at the chosen depth."""
    errors = study.errors()
    if not errors:
        return None
    lines = [
        Line(
            x=np.arange(len(error)), y=error, name=title, color=1 - place if len(errors) > 1 else 0
        )
        for place, (title, error) in enumerate(errors.items())
    ]
    chart = Chart(
        title="",
        x=Axis(label="depth", unit="blocks", whole=True),
        y=Axis(label="mean squared error", log=True),
        marks=tuple(lines),
    )
    drawn = draw([chart])
    drawn.update_layout(height=260, font_color=INK)
    for axes in (drawn.update_xaxes, drawn.update_yaxes):
        axes(gridcolor="rgba(128,134,143,.25)")
    drawn.add_vline(depth, line={"color": INK, "dash": "dot"})
    return drawn


def words(study: Study, depth: int) -> str:
    """A summary of the figures."""
    errors = study.errors()
    if study.surface is None:
        return '<p class="ed-words">The run does not say which surface it learned.</p>'
    told = "; ".join(
        f"<b>{escape(title)}</b> {error[min(depth, len(error) - 1)]:.2g} at depth {depth}, "
        f"{error[-1]:.2g} at the last"
        for title, error in errors.items()
    )
    about = f"{escape(study.surface.description)}: <code>{escape(study.surface.formula)}</code>"
    return f'<p class="ed-words">{about[0].upper()}{about[1:]}<br>Mean squared error: {told}.</p>'


def _points(domain: tuple[float, float]) -> torch.Tensor:
    line = torch.linspace(*domain, GRID)
    y, x = torch.meshgrid(line, line, indexing="ij")
    return torch.stack([x, y], -1)
