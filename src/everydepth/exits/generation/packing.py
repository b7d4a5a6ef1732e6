"""Linear maps in the order in which a CPU multiplies by them fastest."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from everydepth.stream.taps import replaced_forward

WIDE = 4096  # outputs; a small head is done before the order of its weights matters
LARGE = 2**17  # weights; for the maps inside blocks
PACKED_FROM = 64  # tokens; for fewer the copy costs more than it saves
MANY = 64  # rows; of more than that the plain product is as fast


@contextmanager
def packed_head(head: nn.Module) -> Generator[bool, None, None]:
    """Inside the context the head multiplies by a copy of its weights that oneDNN has ordered.

    For a few rows and tens of thousands of words this halves the time of the product, up to
    rounding the same one; the copy takes as much memory as the weights. Gives whether it could be
    done: a plain linear map in float32 on a CPU. The weights must not change meanwhile.

    >>> from everydepth.exits.generation.packing import packed_head
    >>> head = torch.nn.Linear(8, 5000)
    >>> x = torch.randn(3, 8)
    >>> with packed_head(head) as done, torch.no_grad():
    ...     torch.allclose(head(x), x @ head.weight.T + head.bias, atol=1e-5)
    True
    """
    with ExitStack() as stack:
        found = _packable(head)
        if found is not None and found.out_features >= WIDE:
            stack.enter_context(_packed(found))
            yield True
        else:
            yield False


@contextmanager
def packed_maps(model: nn.Module) -> Generator[int, None, None]:
    """The same for every large linear map of a model; gives how many.

    For a batch of rows: with 4 to 16 of them a map of 576 x 1536 takes half to three quarters of
    the time. A single row gains nothing, and takes the plain product.

    >>> from everydepth.exits.generation.packing import packed_maps
    >>> parts = torch.nn.Linear(256, 512), torch.nn.Linear(512, 10)
    >>> with packed_maps(torch.nn.Sequential(*parts)) as count:
    ...     count
    1
    """
    found = [one for module in model.modules() if (one := _packable(module)) is not None]
    large = [one for one in found if one.weight.numel() >= LARGE]
    with ExitStack() as stack:
        for one in large:
            stack.enter_context(_packed(one, fewest=1 if one.out_features >= WIDE else 2))
        yield len(large)


@contextmanager
def _packed(module: nn.Linear, *, fewest: int = 1) -> Generator[None, None, None]:
    weight = module.weight.detach()
    bias = None if module.bias is None else module.bias.detach()  # pyright: ignore[reportUnnecessaryComparison]
    operations: Any = torch.ops.mkldnn
    with torch.no_grad():
        ordered = operations._reorder_linear_weight(weight.clone(), MANY)
    least, most = fewest * weight.shape[1], MANY * weight.shape[1]

    def forward(x: Tensor) -> Tensor:
        if x.requires_grad or not least <= x.numel() <= most:
            return linear(x, module.weight, module.bias)
        return operations._linear_pointwise(x, ordered, bias, "none", [], "")

    with replaced_forward(module, forward):
        yield


def _packable(module: nn.Module) -> nn.Linear | None:
    # Exactly this class: an adapter or a quantized map multiplies in a way of its own.
    if type(module) is not nn.Linear or "forward" in vars(module):
        return None
    weight = module.weight
    plain = type(weight) is nn.Parameter and weight.dtype == torch.float32
    known = torch.backends.mkldnn.is_available() and all(
        hasattr(torch.ops.mkldnn, name) for name in ("_reorder_linear_weight", "_linear_pointwise")
    )
    return module if plain and known and weight.device.type == "cpu" else None
