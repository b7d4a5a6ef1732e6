"""Layers as matrices, against the modules in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from everydepth.errors import SettingError, UnsupportedModelError
from everydepth_papers.constructions import (
    attention_matrix,
    convolution_matrix,
    linear_matrix,
    two_sided_matrix,
    unvec,
    vec,
)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def test_vec_stacks_columns_and_unvec_undoes_it() -> None:
    x = torch.tensor([[1.0, 3.0], [2.0, 4.0]])
    assert vec(x).tolist() == [1, 2, 3, 4]
    assert torch.equal(unvec(vec(x), 2), x)
    with pytest.raises(SettingError, match="4 entries do not make 3 rows; use a divisor"):
        unvec(vec(x), 3)


def test_a_product_from_both_sides_is_a_kronecker_product() -> None:
    a, x, b = _random(3, 4), _random(4, 5), _random(5, 2)
    assert torch.allclose(two_sided_matrix(a, b) @ vec(x), vec(a @ x @ b), atol=1e-12)
    left = two_sided_matrix(a, torch.eye(5, dtype=torch.float64))
    assert torch.allclose(left @ vec(x), vec(a @ x), atol=1e-12)


@pytest.mark.parametrize("bias", [True, False])
def test_the_matrix_of_a_linear_layer_is_the_layer(bias: bool) -> None:
    module, x = nn.Linear(4, 3, bias=bias, dtype=torch.float64), _random(5, 4)
    assert torch.allclose(linear_matrix(module, 5)(vec(x)), vec(module(x)), atol=1e-12)
    with pytest.raises(SettingError, match="tokens=0; use 1 or more"):
        linear_matrix(module, 0)


@pytest.mark.parametrize(
    "settings",
    [
        {"kernel_size": 3, "padding": 1},
        {"kernel_size": (3, 2), "stride": (2, 1), "padding": (0, 1), "bias": False},
        {"kernel_size": 2, "dilation": 2, "groups": 2},
    ],
)
def test_the_matrix_of_a_convolution_is_the_convolution(settings: dict[str, Any]) -> None:
    module = nn.Conv2d(4, 6, dtype=torch.float64, **settings)
    x = _random(1, 4, 6, 5)
    found = convolution_matrix(module, (6, 5))
    assert torch.allclose(found(x.flatten()), module(x).flatten(), atol=1e-12)


def test_a_convolution_that_pads_otherwise_is_refused() -> None:
    module = nn.Conv2d(1, 1, 3, padding=1, padding_mode="reflect")
    with pytest.raises(UnsupportedModelError, match="use zero padding given by numbers"):
        convolution_matrix(module, (4, 4))


@pytest.mark.parametrize("bias", [True, False])
def test_the_matrix_of_attention_with_its_own_weights_is_the_attention(bias: bool) -> None:
    module = nn.MultiheadAttention(8, 2, bias=bias, batch_first=True, dtype=torch.float64)
    if bias:
        nn.init.normal_(module.in_proj_bias)
        nn.init.normal_(module.out_proj.bias)
    x = _random(1, 5, 8)
    out, weights = module(x, x, x, average_attn_weights=False)
    found = attention_matrix(module, weights[0])
    assert torch.allclose(found(vec(x[0])), vec(out[0]), atol=1e-12)
    assert found.matrix.shape == (40, 40)


def test_attention_weights_of_too_few_heads_are_refused() -> None:
    module = nn.MultiheadAttention(8, 2, dtype=torch.float64)
    with pytest.raises(SettingError, match="weights of 1 heads, but the module has 2"):
        attention_matrix(module, _random(1, 5, 5))
