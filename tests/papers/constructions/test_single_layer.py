"""One transformer layer, constructed and trained."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from everydepth.errors import SettingError
from everydepth_papers.constructions import (
    MAPS,
    Domain,
    SequenceMap,
    construct,
    fit_single_layer,
    sup_error,
)
from everydepth_papers.constructions.construction import SIDES


def _fresh(domain: Domain, rows: int = 2000) -> Tensor:
    generator = torch.Generator().manual_seed(20)
    unit = torch.rand(rows, domain.tokens, domain.dim, dtype=torch.float64, generator=generator)
    return domain.low + (domain.high - domain.low) * unit


def _grid(domain: Domain, points: int = 20_000) -> Tensor:
    """A regular grid of the whole domain, its faces and corners included."""
    side = int(points ** (1 / domain.variables))
    assert side not in SIDES  # none that a construction samples
    line = torch.linspace(domain.low, domain.high, side, dtype=torch.float64)
    rows = torch.cartesian_prod(*[line] * domain.variables)
    return rows.reshape(-1, domain.tokens, domain.dim)


@pytest.mark.parametrize("name", MAPS)
def test_a_construction_keeps_its_precision_at_points_it_has_never_seen(name: str) -> None:
    map_ = MAPS[name]
    found = construct(map_, precision=0.1, points=2500)
    assert found.error <= 0.1
    for x in (_fresh(map_.domain), _grid(map_.domain)):
        assert sup_error(found.layer, x, map_(x)) <= 0.1
    # Real weights, the way a transformer holds them.
    assert isinstance(found.layer.attention, nn.MultiheadAttention)
    assert isinstance(found.layer.hidden, nn.Linear)
    assert found.parameters == sum(p.numel() for p in found.layer.parameters())


@pytest.mark.parametrize("name", ["turn", "neighbors", "places"])
def test_twice_the_precision_is_met_and_costs_more_units(name: str) -> None:
    coarse = construct(MAPS[name], precision=0.1, points=2500)
    fine = construct(MAPS[name], precision=0.05, points=2500)
    assert fine.error <= 0.05
    assert fine.hidden > coarse.hidden


@pytest.mark.parametrize("name", MAPS)
def test_a_coarse_precision_is_met_with_fewer_units(name: str) -> None:
    units = [construct(MAPS[name], precision=p, points=2500).hidden for p in (0.4, 0.2)]
    assert units == sorted(units)


@pytest.mark.slow
@pytest.mark.parametrize("precision", [0.1, 0.05])
@pytest.mark.parametrize("name", MAPS)
def test_every_map_meets_both_precisions_on_the_whole_lattice(name: str, precision: float) -> None:
    found = construct(MAPS[name], precision=precision)
    assert found.points > 15_000
    x = _fresh(MAPS[name].domain, 20_000)
    assert sup_error(found.layer, x, MAPS[name](x)) <= precision


def test_attention_alone_carries_the_other_tokens() -> None:
    """Without the attention's output, a mixing map is lost: it is not the FFN that looks around."""
    map_ = MAPS["neighbors"]
    found = construct(map_, precision=0.1, points=2500)
    x = _fresh(map_.domain, 200)
    with torch.no_grad():
        found.layer.attention.out_proj.weight.zero_()
    assert sup_error(found.layer, x, map_(x)) > 0.3


@pytest.mark.parametrize("name", ["wave", "turn", "contrast"])
def test_a_construction_of_a_permutation_equivariant_map_has_one_sum_for_all_positions(
    name: str,
) -> None:
    map_ = MAPS[name]
    tokens, dim = map_.domain.tokens, map_.domain.dim
    found = construct(map_, precision=0.1, points=2500)
    grid = _grid(map_.domain)
    assert sup_error(found.layer, grid, map_(grid)) <= 0.1
    # No unit reads a position, so the layer permutes exactly as the map does.
    assert not found.layer.hidden.weight[:, dim : dim + tokens].any()
    x = _fresh(map_.domain, 50)
    order = torch.arange(tokens).roll(1)
    assert torch.allclose(map_(x[:, order]), map_(x)[:, order])
    assert torch.allclose(found.layer(x[:, order]), found.layer(x)[:, order], atol=1e-9)
    # Where nothing is known of the map, every position needs a sum of its own.
    unknown = construct(replace(map_, shifts=False), precision=0.1, points=2500)
    assert unknown.layer.hidden.weight[:, dim : dim + tokens].any()
    assert unknown.hidden >= tokens * found.hidden


def test_a_plain_function_on_another_domain_is_approximated() -> None:
    def weigh(x: Tensor) -> Tensor:
        return x.flip(1) * x.sum(1, keepdim=True) / 2

    domain = Domain(tokens=2, low=-1, high=1)
    found = construct(weigh, domain, 0.1, points=2500, dtype=torch.float32)
    x = _fresh(domain)
    assert sup_error(found.layer, x, weigh(x)) <= 0.1
    assert found.layer.hidden.weight.dtype == torch.float32


def test_a_grid_that_does_not_fit_is_refused_before_the_function_is_sampled() -> None:
    calls: list[int] = []

    def wide(x: Tensor) -> Tensor:
        calls.append(len(x))
        return x

    with pytest.raises(SettingError, match=r"a grid of 9\^24 points needs .* TiB, but .* may be"):
        construct(wide, Domain(tokens=8, dim=3))
    assert sum(calls) <= 1  # one sequence, to see how many outputs there are


def test_a_finer_grid_that_does_not_fit_says_how_far_it_came() -> None:
    map_ = MAPS["soft_lookup"]
    with pytest.raises(SettingError, match="the finest grid before has error"):
        construct(map_, precision=0.01, points=500, memory=100_000)


def test_wrong_requests_are_refused_with_the_next_step() -> None:
    with pytest.raises(SettingError, match="precision 0; use a number above 0"):
        construct(MAPS["wave"], precision=0)
    with pytest.raises(SettingError, match="say where: domain=Domain"):
        construct(lambda x: x)
    with pytest.raises(SettingError, match="0 tokens of 1 numbers"):
        Domain(tokens=0)
    false = SequenceMap(
        name="places again",
        description="",
        domain=Domain(tokens=2),
        function=MAPS["places"].function,
        shifts=True,
    )
    with pytest.raises(SettingError, match="says shifts=True, but shifting its input changes"):
        construct(false)


def test_a_map_that_is_not_continuous_is_not_claimed_to_be_met() -> None:
    jump = SequenceMap(
        name="jump",
        description="",
        domain=Domain(tokens=1),
        function=lambda x: (x > 1 / math.pi).to(x),
        context="self",
        shifts=True,
    )
    with pytest.raises(SettingError, match=r"precision 0\.1 was not met.*is it continuous"):
        construct(jump, precision=0.1, points=500)


def test_a_trained_layer_improves_with_training_and_is_measured_at_the_same_points() -> None:
    short = fit_single_layer(MAPS["wave"], width=32, steps=2, points=1000, progress=False)
    long = fit_single_layer(MAPS["wave"], width=32, steps=200, points=1000, progress=False)
    assert long.error < 0.5 * short.error
    assert long.points == short.points == construct(MAPS["wave"], points=1000).points
    again = fit_single_layer(MAPS["wave"], width=32, steps=2, points=1000, progress=False)
    assert again.error == short.error
    with pytest.raises(SettingError, match="width=0; use 1 or more"):
        fit_single_layer(MAPS["wave"], width=0)
