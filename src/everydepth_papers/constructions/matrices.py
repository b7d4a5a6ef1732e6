"""Layers as matrices: `vec(AXB) = (B^T (x) A) vec X`, with vec stacking columns."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from everydepth.errors import SettingError, UnsupportedModelError


@dataclass(frozen=True, eq=False)
class Affine:
    """`x -> matrix x + offset` on vectors."""

    matrix: Float[Tensor, "out in"]
    offset: Float[Tensor, " out"]

    def __call__(self, x: Float[Tensor, " in"]) -> Float[Tensor, " out"]:
        return self.matrix @ x + self.offset


def vec(x: Float[Tensor, "rows columns"]) -> Float[Tensor, " entries"]:
    """The columns of a matrix, one below the other."""
    return x.T.reshape(-1)


def unvec(x: Float[Tensor, " entries"], rows: int) -> Float[Tensor, "rows columns"]:
    """The matrix with `rows` rows whose `vec` this is."""
    if rows < 1 or x.numel() % rows:
        raise SettingError(f"{x.numel()} entries do not make {rows} rows; use a divisor")
    return x.reshape(-1, rows).T


def two_sided_matrix(
    a: Float[Tensor, "m rows"], b: Float[Tensor, "columns n"]
) -> Float[Tensor, "out in"]:
    """The matrix of `X -> A X B`: `B^T (x) A`. With A or B the identity, of one side alone."""
    return torch.kron(b.T.contiguous(), a.contiguous())


@torch.no_grad()
def linear_matrix(module: nn.Linear, tokens: int) -> Affine:
    """Of `vec X -> vec(X W^T + 1 b^T)`, for X of shape (tokens, in)."""
    if tokens < 1:
        raise SettingError(f"tokens={tokens}; use 1 or more")
    weight = module.weight
    eye = torch.eye(tokens, dtype=weight.dtype, device=weight.device)
    offset = weight.new_zeros(tokens, module.out_features)
    if module.bias is not None:  # pyright: ignore[reportUnnecessaryComparison] - None without bias
        offset = offset + module.bias
    return Affine(two_sided_matrix(eye, weight.T), vec(offset))


@torch.no_grad()
def convolution_matrix(module: nn.Conv2d, size: tuple[int, int]) -> Affine:
    """Of a convolution on images of one size, flattened as `torch.flatten` does: (channel, y, x).

    Zero padding only; stride, dilation and groups are as in the module.
    """
    if module.padding_mode != "zeros" or isinstance(module.padding, str):
        raise UnsupportedModelError(
            f"a convolution with padding {module.padding!r} ({module.padding_mode}); "
            "use zero padding given by numbers"
        )
    weight = module.weight
    sides = [
        (n + 2 * p - d * (k - 1) - 1) // s + 1
        for n, p, d, k, s in zip(
            size,
            module.padding,
            module.dilation,
            module.kernel_size,
            module.stride,
            strict=True,
        )
    ]
    height, width = size
    out_y, out_x = torch.meshgrid(torch.arange(sides[0]), torch.arange(sides[1]), indexing="ij")
    pixels = sides[0] * sides[1]
    matrix = weight.new_zeros(module.out_channels, pixels, module.in_channels, height * width)
    inputs, outputs = weight.shape[1], module.out_channels // module.groups
    for ky in range(module.kernel_size[0]):
        for kx in range(module.kernel_size[1]):
            y = (out_y * module.stride[0] - module.padding[0] + ky * module.dilation[0]).flatten()
            x = (out_x * module.stride[1] - module.padding[1] + kx * module.dilation[1]).flatten()
            inside = ((y >= 0) & (y < height) & (x >= 0) & (x < width)).nonzero().flatten()
            read = (y * width + x)[inside]
            for o in range(module.out_channels):
                first = o // outputs * inputs
                for i in range(inputs):
                    matrix[o, inside, first + i, read] += weight[o, i, ky, kx]
    offset = weight.new_zeros(module.out_channels, pixels)
    if module.bias is not None:
        offset = offset + module.bias[:, None]
    return Affine(matrix.flatten(0, 1).flatten(1), offset.flatten())


@torch.no_grad()
def attention_matrix(
    module: nn.MultiheadAttention, weights: Float[Tensor, "head query key"]
) -> Affine:
    """Of attention with given weights: `vec X -> vec(sum_h A_h X V_h^T O_h^T)` and its biases.

    With its weights held fixed attention is linear in X: one Kronecker product a head.
    """
    dim, heads = module.embed_dim, module.num_heads
    if module.in_proj_weight is None:  # pyright: ignore[reportUnnecessaryComparison]
        raise UnsupportedModelError(
            "attention whose keys or values have another width than its queries; use one width"
        )
    if weights.shape[0] != heads:
        raise SettingError(
            f"weights of {weights.shape[0]} heads, but the module has {heads}; give one matrix a "
            "head (need_weights=True, average_attn_weights=False)"
        )
    values = module.in_proj_weight[2 * dim :].reshape(heads, dim // heads, dim)
    out = module.out_proj.weight.reshape(dim, heads, dim // heads)
    matrix = sum(two_sided_matrix(weights[h], (out[:, h] @ values[h]).T) for h in range(heads))
    assert isinstance(matrix, Tensor)
    offset = module.out_proj.weight.new_zeros(weights.shape[1], dim)
    if module.in_proj_bias is not None:  # pyright: ignore[reportUnnecessaryComparison]
        bias = module.in_proj_bias[2 * dim :].reshape(heads, dim // heads)
        # Every row of A_h may be scaled (dropout); a softmax's rows add up to one.
        sums = weights.sum(-1)
        offset = offset + torch.einsum("hq,hv,ohv->qo", sums, bias, out) + module.out_proj.bias
    return Affine(matrix, vec(offset))
