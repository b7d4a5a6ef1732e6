"""Bounds are bounds: no pair of inputs is stretched more."""

from __future__ import annotations

import math

import pytest
import torch
from tests.zoo import ENTRIES
from torch import nn

import everydepth as ed
from everydepth.errors import SettingError
from everydepth_papers.guarantees.generalization import Complexity, log_covering, theorems
from everydepth_papers.guarantees.lipschitz import (
    BlockConstants,
    NetworkConstants,
    attention_constant,
    network_constants,
    norm_constant,
    spectral,
)


def test_a_convolution_stretches_no_more_than_its_bound() -> None:
    conv = nn.Conv2d(3, 5, 3, padding=1)
    columns = [conv(e) - conv(torch.zeros_like(e)) for e in torch.eye(3 * 64).view(-1, 1, 3, 8, 8)]
    matrix = torch.stack([c.flatten() for c in columns], 1)
    assert torch.linalg.matrix_norm(matrix, 2).item() <= spectral(conv)


def test_a_linear_map_is_its_largest_singular_value() -> None:
    linear = nn.Linear(4, 6)
    expected = torch.linalg.svdvals(linear.weight.detach())[0].item()
    assert spectral(linear) == pytest.approx(expected, rel=1e-5)


def test_norms_have_the_constants_of_the_appendix() -> None:
    layer = nn.LayerNorm(4, eps=1e-4)
    layer.weight.data[2] = -3.0
    assert norm_constant(layer) == pytest.approx(300.0)
    batch = nn.BatchNorm2d(2, eps=0.0)
    batch.running_var.copy_(torch.tensor([4.0, 0.25]))
    assert norm_constant(batch) == pytest.approx(2.0)


def test_attention_is_no_steeper_than_its_bound() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(4, 4, dtype=torch.float64) for _ in range(3))
    x = torch.randn(5, 4, dtype=torch.float64)

    def attend(x: torch.Tensor) -> torch.Tensor:
        return ((x @ q.T) @ (x @ k.T).T).softmax(-1) @ x @ v.T

    jacobian = torch.autograd.functional.jacobian(attend, x).reshape(20, 20)
    norms = [torch.linalg.matrix_norm(m, 2).item() for m in (q, k, v)]
    bound = attention_constant(norms, x.norm(dim=1).max().item(), 5)
    assert torch.linalg.matrix_norm(jacobian, 2).item() <= bound


NAMES = [
    "ResidualMLP-norm0-skips1-regression0",
    "CifarResNet-post-pad",
    "ViT",
    "Llama-tied-CausalLM-left",
]


@pytest.mark.parametrize("name", NAMES)
def test_a_block_moves_its_output_by_at_most_its_lipschitz_constant(name: str) -> None:
    model, batch = ENTRIES[name].make()
    stream = ed.as_stream(model)
    constants = network_constants(stream, batch)
    assert len(constants.blocks) == stream.depth
    assert sum(b.parameters for b in constants.blocks) == sum(
        p.numel() for b in stream.blocks for p in b.module.parameters()
    )
    with torch.no_grad():
        cursor = stream.start(batch)
        for block in constants.blocks:
            moved = cursor.h + 1e-2 * torch.randn_like(cursor.h)
            after = stream.step(cursor)
            call = cursor.calls[cursor.depth]
            other = call(stream.blocks[cursor.depth].module, moved)
            stretch = ((other - after.h).norm() / (moved - cursor.h).norm()).item()
            assert math.log(stretch) <= block.lip_x + block.kappa + 1e-6
            cursor = after


def test_the_covering_number_is_the_sum_of_the_lemma() -> None:
    blocks = tuple(
        BlockConstants(
            lip_x=math.log(1 + x), lip_theta=math.log(t), kappa=0.0, parameters=p, radius=r
        )
        for x, t, p, r in ((0.5, 2.0, 10, 3.0), (0.25, 1.5, 20, 4.0))
    )
    top, eps = 2.0, 0.01
    k = [top * 2.0 * 1.25, top * 1.5]
    expected = 10 * math.log(1 + 2 * 3 * 2 * k[0] / eps) + 20 * math.log(1 + 2 * 4 * 2 * k[1] / eps)
    constants = NetworkConstants(blocks, top)
    assert log_covering(constants, eps) == pytest.approx(expected)
    alone = 10 * math.log(1 + 2 * 3 * k[0] / eps)
    assert log_covering(constants, eps, only=0) == pytest.approx(alone)
    rad = 1.4 * 0.01 + 3 * math.sqrt(2 * expected / 100)
    whole = Complexity(constants=constants, bound=3.0, lipschitz=1.4)
    assert whole.gamma(100, 0.05) == pytest.approx(2 * rad + 9 * math.sqrt(math.log(40) / 200))


def test_the_rows_needed_bring_the_penalty_down_to_the_goal() -> None:
    block = BlockConstants(lip_x=0.1, lip_theta=0.2, kappa=0.0, parameters=50, radius=2.0)
    whole = Complexity(constants=NetworkConstants((block,), 1.0), bound=1.0, lipschitz=1.4)
    rows = whole.rows_needed(0.1, 0.05)
    assert whole.gamma(rows, 0.05) <= 0.1 < whole.gamma(rows * 99 // 100, 0.05)
    with pytest.raises(SettingError, match="above 0 for any number of rows"):
        whole.rows_needed(0.0, 0.05)


def test_theorems_say_something_only_where_the_margin_beats_the_penalty() -> None:
    settings = {"gamma_opt": 0.1, "delta": 0.05, "m": 10_000, "bound": 1.0, "margin_test": 0.5}
    small = {"gamma_n": 0.1, "gamma_m": 0.1}
    first, second, third = theorems(margin=0.5, **settings, **small)
    assert first.change == pytest.approx(-0.4)
    assert second.change == pytest.approx(-0.15)
    assert third.change == pytest.approx(-0.2)
    assert second.probability == pytest.approx(0.95 - 3 * math.exp(-10_000 * 0.25 / 8))
    assert not any(t.vacuous for t in (first, second, third))
    large = {"gamma_n": 9.0, "gamma_m": 9.0}
    assert all(t.vacuous for t in theorems(margin=0.5, **settings, **large))
