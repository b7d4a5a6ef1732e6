"""Linear maps in the order in which a CPU multiplies a few rows by them fastest."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from typing import Any

import psutil
import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from everydepth.stream.taps import replaced_forward

LARGE = 2**16  # weights; a smaller map is done before the order of its weights matters
COLD = 2**24  # bytes; maps that stay in the cache from token to token are fast as they are
SHARE = 0.25  # of the memory that is free, what the copies may take
PACKED_FROM = 32  # tokens; for fewer the copies cost more than they save
MANY = 64  # rows; of more than that the plain product is as fast


@contextmanager
def packed_maps(model: nn.Module) -> Generator[int, None, None]:
    """Inside the context large linear maps multiply by copies of their weights that oneDNN has
    ordered; gives how many.

    Weights that come from memory arrive half again as fast for one row, and several rows cost
    little more than one: up to rounding it is the same product. Copies take as much memory as the
    weights, so there are none where memory is short, nor of a model that fits the cache. Only plain
    linear maps in float32 on a CPU have them. The weights must not change meanwhile.

    >>> from everydepth.exits.generation.packing import packed_maps
    >>> head, x = torch.nn.Linear(256, 20000), torch.randn(3, 256)
    >>> with packed_maps(head) as count, torch.no_grad():
    ...     count, torch.allclose(head(x), x @ head.weight.T + head.bias, atol=1e-5)
    (1, True)
    """
    found = {id(m): m for m in model.modules() if _is_packable(m)}
    large = [m for m in found.values() if isinstance(m, nn.Linear) and m.weight.numel() >= LARGE]
    size = sum(m.weight.nbytes for m in large)
    with ExitStack() as stack:
        if not COLD <= size <= SHARE * psutil.virtual_memory().available:
            large = []
        for module in large:
            stack.enter_context(_packed(module))
        yield len(large)


@contextmanager
def _packed(module: nn.Linear) -> Generator[None, None, None]:
    weight = module.weight.detach()
    bias = None if module.bias is None else module.bias.detach()  # pyright: ignore[reportUnnecessaryComparison]
    operations: Any = torch.ops.mkldnn
    with torch.no_grad():
        ordered = operations._reorder_linear_weight(weight, MANY)
    multiply, most = operations._linear_pointwise, MANY * weight.shape[1]

    def forward(x: Tensor) -> Tensor:
        if x.requires_grad or x.numel() > most:
            return linear(x, module.weight, module.bias)
        return multiply(x, ordered, bias, "none", [], "")

    with replaced_forward(module, forward):
        yield


def _is_packable(module: nn.Module) -> bool:
    # Exactly this class: an adapter or a quantized map multiplies in a way of its own.
    if type(module) is not nn.Linear or "forward" in vars(module):
        return False
    weight = module.weight
    plain = type(weight) is nn.Parameter and weight.dtype == torch.float32
    known = torch.backends.mkldnn.is_available() and all(
        hasattr(torch.ops.mkldnn, name) for name in ("_reorder_linear_weight", "_linear_pointwise")
    )
    return plain and known and weight.device.type == "cpu"
