"""What the recipes of Residual Relay share: the paper's fine-tuning, and the functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from everydepth_papers.evidence.recipe import Cell, Preset, Recipe, later

FINE: Cell = {"task": "hub", "noise": 0.01, "epochs": 70, "batch": 16, "lr": 2e-5}
"""App. D.3; every cell adds its data, network and share of wrong labels."""


def relay(
    *,
    smoke: Sequence[Cell],
    small: Preset,
    paper: Sequence[Cell],
    models: Mapping[str, Any],
    cost: str,
    memory_gib: float,
    smoke_cost: str = "5 s",
    full: Preset | None = None,
    query: Mapping[str, Any] | None = None,
    by_noise: bool = False,
    removal: str = "Fig. 1, 2, 10",
    **recipe: Any,
) -> Recipe:
    """A recipe whose cells are those of `label_noise`, judged by `residual_claims`.

    cost, memory_gib: of the paper preset. query, by_noise, removal: see `residual_claims.rows`.
    recipe: the other fields of a `Recipe`.
    """
    cells = [{**FINE, **one} for one in paper]
    return Recipe(
        paper="residual",
        presets={
            "smoke": Preset(cells=smoke, cost=smoke_cost),
            "small": small,
            **({} if full is None else {"full": full}),
            "paper": Preset(
                cells=cells,
                cost=cost,
                needs=tuple(dict.fromkeys(str(one["data"]) for one in cells)),
                models=models,
                memory_gib=memory_gib,
                launch="accelerate launch",
            ),
        },
        cell=later("label_noise:cell"),
        rows=later("residual_claims:rows", query=query, by_noise=by_noise, removal=removal),
        figure=later("residual_figure:figure"),
        **recipe,
    )
