"""The same layer trained: the error that training reaches with given heads and units."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch.nn.functional import mse_loss

from everydepth.config import checked
from everydepth.errors import SettingError
from everydepth.progress import shown
from everydepth_papers.constructions.construction import (
    Function,
    as_map,
    sup_error,
    verification_points,
)
from everydepth_papers.constructions.maps import Domain
from everydepth_papers.constructions.single_layer import SingleLayer


@dataclass(frozen=True, kw_only=True, eq=False)
class Fitted:
    """A trained layer. error: sup norm over the points that also verify a construction."""

    layer: SingleLayer = field(repr=False)
    error: float
    mse: float
    points: int
    hidden: int
    heads: int
    parameters: int
    steps: int


@checked
def fit_single_layer(
    f: Function,
    domain: Domain | None = None,
    *,
    width: int = 64,
    heads: int = 2,
    head_width: int = 8,
    steps: int = 1000,
    batch_size: int = 256,
    lr: float = 1e-2,
    points: int = 20_000,
    seed: int = 0,
    progress: bool = True,
) -> Fitted:
    """Train one attention + ReLU layer on random sequences, by Adam on the squared error.

    width: units of the ReLU layer; heads of `head_width` numbers each. Fresh random sequences every
    step, so there is nothing to overfit; the rate falls to zero along a cosine.

    >>> from everydepth_papers.constructions import MAPS, fit_single_layer
    >>> found = fit_single_layer(MAPS["wave"], width=16, steps=50, points=1000, progress=False)
    >>> found.hidden, found.error < 2
    (16, True)
    """
    map_ = as_map(f, domain)
    for name, value in (("width", width), ("heads", heads), ("steps", steps)):
        if value < 1:
            raise SettingError(f"{name}={value}; use 1 or more")
    d = map_.domain
    generator = torch.Generator().manual_seed(seed)
    where = verification_points(d, points)
    truth = map_(where)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layer = SingleLayer(
            d, outputs=truth.shape[-1], width=heads * head_width, heads=heads, hidden=width
        )
    optimizer = torch.optim.Adam(layer.parameters(), lr=lr)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    loss = torch.zeros(())
    for _ in shown(range(steps), "fit one layer", total=steps, enabled=progress):
        unit = torch.rand(batch_size, d.tokens, d.dim, generator=generator)
        x = d.low + (d.high - d.low) * unit
        loss = mse_loss(layer(x), map_(x))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return Fitted(
        layer=layer,
        error=sup_error(layer, where, truth),
        mse=float(loss.detach()),
        points=len(where),
        hidden=width,
        heads=heads,
        parameters=layer.parameter_count,
        steps=steps,
    )
