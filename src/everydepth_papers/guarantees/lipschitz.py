"""Upper bounds, in closed form, on the Lipschitz constants of a network's parts.

| part | constant |
|---|---|
| linear map | largest singular value |
| convolution | largest singular value of its (out, in * kernel) matrix, times sqrt(kernel area) |
| layer norm, RMS norm | max abs(weight) / sqrt(eps) |
| batch norm in eval mode | max_i abs(weight_i) / sqrt(var_i + eps) |
| attention | Castin, Ablin and Peyre (2024), Theorem 3.3, for tokens of norm at most R |
| gated MLP | product rule, for tokens of norm at most R |
| activation | 1.13, the steepest of GELU and SiLU |
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from everydepth.stream import Batch, Block, ResidualStream, evaluating, unwrapped
from everydepth.stream.taps import hooked, state_in

ACTIVATION = 1.13


@torch.no_grad()
def spectral(module: nn.Module) -> float:
    """An upper bound on how much a linear map or convolution can stretch."""
    weight: Any = module.weight
    matrix = weight.detach().double().flatten(1)
    largest = float(torch.linalg.matrix_norm(matrix, 2))
    if isinstance(module, nn.Conv2d):
        # Each input entry is read once per kernel position at most.
        largest *= math.sqrt(math.prod(module.kernel_size))
    return largest


@torch.no_grad()
def norm_constant(module: nn.Module) -> float:
    """The Lipschitz constant of a norm (App. L)."""
    norm: Any = module
    weight = torch.ones(1) if getattr(norm, "weight", None) is None else norm.weight.double().abs()
    eps = next((getattr(norm, n) for n in ("eps", "variance_epsilon") if hasattr(norm, n)), 1e-5)
    if isinstance(getattr(norm, "running_var", None), Tensor):
        return float((weight / (norm.running_var.double() + eps).sqrt()).max())
    return float(weight.max()) / math.sqrt(eps)


@torch.no_grad()
def norm_radius(module: nn.Module) -> float:
    """The largest norm of a normalized token: `max|weight| sqrt(d) + |bias|`."""
    norm: Any = module
    weight = norm.weight.double()
    bias = getattr(norm, "bias", None)
    shift = 0.0 if bias is None else float(bias.double().norm())
    return float(weight.abs().max()) * math.sqrt(weight.numel()) + shift


def attention_constant(inner: Sequence[float], radius: float, tokens: int) -> float:
    """Softmax attention without its output projection, on tokens of norm at most `radius`.

    inner: the spectral norms of the query, key and value maps, or of one fused map. The largest
    stands in for each, and scores are not divided by sqrt(d_head): both only raise the bound.
    """
    largest = max(inner, default=1.0)
    scores = largest**2
    inside = scores**2 * radius**4 * (4 * tokens + 1) + tokens
    return math.sqrt(3) * largest * math.sqrt(inside)


@dataclass(frozen=True)
class BlockConstants:
    """One block: logarithms of `Lip_x`, `Lip_theta` and `kappa` (the norm after the sum).

    Logarithms because products over a network would overflow. parameters: their number.
    radius: their norm.
    """

    lip_x: float
    lip_theta: float
    kappa: float
    parameters: int
    radius: float


@dataclass(frozen=True)
class NetworkConstants:
    blocks: tuple[BlockConstants, ...]
    top: float
    """The Lipschitz constant of everything after the last block."""


def network_constants(stream: ResidualStream, batch: Batch) -> NetworkConstants:
    """The constants of every block and of the readout, for inputs shaped like `batch`."""
    order, tokens = _leaves_in_order(stream, batch)
    blocks = tuple(
        _block(block, leaves, tokens)
        for block, leaves in zip(stream.blocks, order[:-1], strict=True)
    )
    top = 1.0
    for module in order[-1]:
        top *= norm_constant(module) if _is_norm(module) else spectral(module)
    return NetworkConstants(blocks, top)


def _leaves_in_order(stream: ResidualStream, batch: Batch) -> tuple[list[list[nn.Module]], int]:
    """Modules with weights in the order they run, for each block and for what follows the last.

    Also the number of tokens.
    """
    inner = unwrapped(stream.model)
    order: list[list[nn.Module]] = [[] for _ in range(stream.depth + 1)]
    current, tokens = -1, 1

    def enter(index: int) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            nonlocal current, tokens
            h = state_in(args, kwargs)
            current, tokens = index, h.shape[1] if h.ndim == 3 else 1

        return hook

    def leave(index: int) -> Any:
        def hook(*_: Any) -> None:
            nonlocal current
            current = stream.depth if index == stream.depth - 1 else -1

        return hook

    def see(module: nn.Module, *_: Any) -> None:
        if current >= 0 and module not in order[current]:
            order[current].append(module)

    handles: list[Any] = []
    for index, block in enumerate(stream.blocks):
        handles.append(block.module.register_forward_pre_hook(enter(index), with_kwargs=True))
        handles.append(block.module.register_forward_hook(leave(index)))
    for module in inner.modules():
        weight = getattr(module, "weight", None)
        if isinstance(weight, Tensor) and not isinstance(module, nn.Embedding):
            handles.append(module.register_forward_pre_hook(see))
    with torch.no_grad(), evaluating(inner), hooked(*handles):
        stream.called(stream.check_batch(batch))
    return order, tokens


def _is_norm(module: nn.Module) -> bool:
    weight: Any = module.weight
    return weight.ndim == 1


def _block(block: Block, leaves: list[nn.Module], tokens: int) -> BlockConstants:
    posts = [branch.post for branch in block.branches if branch.post is not None]
    kappa = math.prod(norm_constant(p) for p in posts if hasattr(p, "weight"))
    total, theta = 1.0, 0.0
    for branch, own in zip(block.branches, _by_branch(block, leaves, posts), strict=True):
        lip, sensitivity = _branch(branch.kind, own, tokens)
        # Branches are composed, so their factors 1 + Lip multiply.
        total *= 1 + lip
        theta += sensitivity
    parameters = list(block.module.parameters())
    radius = math.sqrt(sum(float(p.detach().double().square().sum()) for p in parameters))
    return BlockConstants(
        lip_x=math.log(total),
        lip_theta=math.log(max(theta, 1e-300)),
        kappa=math.log(max(kappa, 1e-300)),
        parameters=sum(p.numel() for p in parameters),
        radius=radius,
    )


def _by_branch(
    block: Block, leaves: list[nn.Module], posts: list[nn.Module]
) -> list[list[nn.Module]]:
    """The block's modules, cut after the last projection of each branch."""
    skips = [branch.skip for branch in block.branches if branch.skip is not None]
    outside = {module for part in (*posts, *skips) for module in part.modules()}
    parts: list[list[nn.Module]] = [[] for _ in block.branches]
    index = 0
    for module in leaves:
        if module in outside:
            continue
        parts[index].append(module)
        if module is block.branches[index].proj and index < len(parts) - 1:
            index += 1
    return parts


def _branch(kind: str, modules: list[nn.Module], tokens: int) -> tuple[float, float]:
    """`Lip_x` and `Lip_theta` of one branch."""
    norms = [m for m in modules if _is_norm(m)]
    maps = [m for m in modules if not _is_norm(m)]
    last = spectral(maps[-1]) if maps else 1.0
    inner = [spectral(m) for m in maps[:-1]]
    radius = norm_radius(norms[0]) if norms else 1.0
    if kind in ("attention", "cross_attention"):
        middle = attention_constant(inner, radius, tokens)
    elif kind == "mlp" and len(inner) == 2:
        middle = (1 + ACTIVATION) * radius * inner[0] * inner[1]
    else:
        middle = math.prod(inner) * ACTIVATION ** max(len(inner), 1)
    scale = math.prod(norm_constant(n) for n in norms)
    lip = scale * middle * last
    # One matrix varies, and the product of the others is at most that of max(1, norm) over all.
    whole = math.prod(max(1.0, s) for s in [*inner, last]) * max(1.0, radius) * math.sqrt(tokens)
    return lip, whole * max(len(maps), 1) * max(1.0, scale)
