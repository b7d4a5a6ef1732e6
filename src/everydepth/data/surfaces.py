"""Eight surfaces on a square, to watch an approximation progress block by block.

The paper's formulas are not available. These are ours, chosen to match its descriptions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import pi
from types import MappingProxyType

import torch
from jaxtyping import Float
from torch import Tensor, cos, exp, log, sin, sqrt

from everydepth.config import Seed, checked
from everydepth.data.sets import Points, random_stream
from everydepth.errors import DataError


@checked
@dataclass(frozen=True, kw_only=True)
class Surface:
    """A function of `(x, y)` on the square `domain x domain`, of order 1."""

    name: str
    description: str
    formula: str
    domain: tuple[float, float] = (-1.0, 1.0)
    function: Callable[[Tensor, Tensor], Tensor]

    def __call__(self, points: Float[Tensor, "*rows 2"]) -> Float[Tensor, "*rows"]:
        return self.function(points[..., 0], points[..., 1])


_ALL = (
    Surface(
        name="anisotropic_radial_oscillations",
        description="ripples that tighten quadratically and twice as fast along y, under an "
        "amplitude that is nearly singular at the origin",
        formula="cos(2*pi*(x**2 + 2*y**2)) * sqrt(0.1 / (x**2 + y**2 + 0.1))",
        function=lambda x, y: cos(2 * pi * (x**2 + 2 * y**2)) * sqrt(0.1 / (x**2 + y**2 + 0.1)),
    ),
    Surface(
        name="damped_concentric_ripples",
        description="circular waves of high frequency whose amplitude decays with the radius",
        # 1e-6 keeps the gradient of the root finite at the origin.
        formula="cos(8*pi*sqrt(x**2 + y**2 + 1e-6)) * exp(-1.5*(x**2 + y**2))",
        function=lambda x, y: cos(8 * pi * sqrt(x**2 + y**2 + 1e-6)) * exp(-1.5 * (x**2 + y**2)),
    ),
    Surface(
        name="exponential_saddle",
        description="a gentle saddle with exponential contrast between the axes",
        formula="(exp(x**2) - exp(y**2)) / 1.7",
        function=lambda x, y: (exp(x**2) - exp(y**2)) / 1.7,
    ),
    Surface(
        name="quadratically_warped_oscillations",
        description="a product of waves whose frequencies grow along each axis",
        formula="sin(3*pi*x**2) * cos(3*pi*y**2)",
        function=lambda x, y: sin(3 * pi * x**2) * cos(3 * pi * y**2),
    ),
    Surface(
        name="standing_wave_grid",
        description="a checkerboard of standing waves with one frequency",
        formula="sin(3*pi*x) * sin(3*pi*y)",
        function=lambda x, y: sin(3 * pi * x) * sin(3 * pi * y),
    ),
    Surface(
        name="asymmetric_power_modulated_wave",
        description="a slanted sine under envelopes |x|^1.5 and |y|^0.7, rounded at the axes",
        formula="(x**2 + 0.01)**0.75 * (y**2 + 0.01)**0.35 * sin(3*pi*x + 2*pi*y)",
        function=lambda x, y: (
            (x**2 + 0.01) ** 0.75 * (y**2 + 0.01) ** 0.35 * sin(3 * pi * x + 2 * pi * y)
        ),
    ),
    Surface(
        name="localized_high_frequency_stripes",
        description="rapid stripes along x inside a narrow Gaussian window",
        formula="exp(-8*(x**2 + y**2)) * cos(10*pi*x)",
        function=lambda x, y: exp(-8 * (x**2 + y**2)) * cos(10 * pi * x),
    ),
    Surface(
        name="logarithmic_central_well",
        description="a deep narrow well, a regularized logarithm, coupled with cosine waves",
        formula="0.25*log(x**2 + y**2 + 0.01) * (1 + 0.5*cos(3*pi*x))",
        function=lambda x, y: 0.25 * log(x**2 + y**2 + 0.01) * (1 + 0.5 * cos(3 * pi * x)),
    ),
)

SURFACES: Mapping[str, Surface] = MappingProxyType({surface.name: surface for surface in _ALL})
"""The surfaces by name, in the order of the paper's Table 1."""


@checked
def surface_data(
    name: str,
    *,
    n_train: int = 10_000,
    n_test: int = 10_000,
    seed: Seed = 0,
    dtype: torch.dtype = torch.float32,
) -> tuple[Points, Points]:
    """Training and test points of a surface, uniform on its square.

    The points of a seed are the same in every precision, for every surface, and the training
    points do not depend on `n_test`.

    >>> from everydepth.data import surface_data
    >>> points, held_out = surface_data("standing_wave_grid", n_train=100, n_test=50)
    >>> points.inputs.shape, points.labels.shape
    (torch.Size([100, 2]), torch.Size([100, 1]))
    """
    if name not in SURFACES:
        raise DataError(f"surface {name!r}, but the surfaces are {', '.join(SURFACES)}; use one")
    if n_train < 1 or n_test < 1:
        raise DataError(f"{n_train} training and {n_test} test points; use at least 1 of each")
    surface = SURFACES[name]

    def sample(part: int, size: int) -> Points:
        drawn = torch.from_numpy(random_stream(seed, part).uniform(*surface.domain, (size, 2)))
        return Points(drawn.to(dtype), surface(drawn).unsqueeze(-1).to(dtype))

    return sample(0, n_train), sample(1, n_test)
