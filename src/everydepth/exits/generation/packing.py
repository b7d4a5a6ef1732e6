"""Reorder the weights of linear maps for faster products with a few rows on a CPU."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from weakref import WeakKeyDictionary

import psutil
import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from everydepth.stream.ordered import can_order, ordered, product
from everydepth.stream.taps import replaced_forward

LARGE = 2**16  # weights; for smaller maps, their order does not matter
COLD = 2**24  # bytes; smaller models stay in the cache from token to token
SHARE = 0.25  # most of the free memory that copies may take
PACKED_FROM = 32  # tokens; for fewer, the copies cost more than they save
MANY = 64  # rows; for more, the plain product is as fast
BLOCK, UNCACHED = 2**22, 2**24  # weights in one map, and in all, by which both products are timed
CLEARLY = 0.95  # of the plain product's time: copies take memory, and the measurement is short
KEPT = 2**30  # bytes of copies, at most, that stay after a text


@contextmanager
def packed_maps(model: nn.Module, rows: int | None = None) -> Generator[int, None, None]:
    """Inside the context, large linear maps use copies of their weights in oneDNN's layout; yields
    their number.

    On some CPUs this makes even one row faster, on others only several (`fewest_rows`); the product
    is the same up to rounding. Copies take as much memory as the weights, so there are none if
    memory is short or the model fits in the cache. Only plain float32 linear maps on a CPU are
    copied. The weights must not change inside the context.

    rows: the most rows that a product will have; None if unknown.

    Up to a GiB of copies is kept for the next text, as long as the model is; a copy whose weights
    have changed in the meantime is made again.

    >>> from everydepth.exits.generation.packing import packed_maps
    >>> head, x = torch.nn.Linear(256, 20000), torch.randn(3, 256)
    >>> with packed_maps(head) as count, torch.no_grad():
    ...     count, torch.allclose(head(x), x @ head.weight.T + head.bias, atol=1e-5)
    (1, True)
    """
    found = {id(m): m for m in model.modules() if _is_packable(m)}
    large = [m for m in found.values() if isinstance(m, nn.Linear) and m.weight.numel() >= LARGE]
    if sum(m.weight.nbytes for m in large) < COLD:
        large = []
    most = MANY if rows is None else rows
    least = {m: fewest_rows(m.weight.shape, most) for m in large}
    large = [m for m in large if least[m] <= most]
    size = sum(m.weight.nbytes for m in large)
    new = sum(m.weight.nbytes for m in large if m not in _copies)
    with ExitStack() as stack:
        if new > SHARE * psutil.virtual_memory().available:
            large = []
        if new + sum(m.weight.nbytes for m in _copies) > KEPT:
            _copies.clear()
        for module in large:
            copied = _copied(module, keep=size <= KEPT)
            stack.enter_context(_packed(module, copied, least[module]))
        yield len(large)


def fewest_rows(shape: Sequence[int], most: int = MANY) -> int:
    """From how many rows on a product with reordered weights of this shape is faster on this
    machine; more than `most` if not up to that number.

    For 1,536 x 576 weights from 1 on an AMD EPYC, for 192 x 576 from 3. Measured once.
    """
    outputs, inputs = shape
    return _fewest(min(outputs, max(1, BLOCK // inputs)), inputs, most, torch.get_num_threads())


@cache
def _fewest(outputs: int, inputs: int, most: int, threads: int) -> int:
    del threads  # the products below use them
    # More than a cache holds, as from token to token.
    weights = [torch.ones(outputs, inputs) for _ in range(math.ceil(UNCACHED / outputs / inputs))]
    copies = [ordered(weight, MANY) for weight in weights]
    for rows in (n for n in (1, 2, 3, 4, 6, 8, 16, 32) if n <= most):
        x, plain, packed = torch.ones(rows, inputs), math.inf, math.inf
        for _ in range(3):  # in turn, so that both meet the same busy moments
            plain = min(plain, _seconds(x, weights, linear))
            packed = min(packed, _seconds(x, copies, product))
        if packed < CLEARLY * plain:
            return rows
    return most + 1


def _seconds(
    x: Tensor, weights: Sequence[Tensor], multiply: Callable[[Tensor, Tensor], Tensor]
) -> float:
    begun = time.process_time()  # other processes may use the same cores
    for weight in weights:
        multiply(x, weight)
    return time.process_time() - begun


_copies: WeakKeyDictionary[nn.Linear, tuple[Tensor, Tensor]] = WeakKeyDictionary()
"""The ordered weights of a map, with what tells whether its weights have changed."""


def _copied(module: nn.Linear, *, keep: bool) -> Tensor:
    """The weights in oneDNN's layout; a product, cheaper than that, tells if they have changed."""
    weight = module.weight.detach()
    with torch.no_grad():
        sums = weight @ torch.arange(weight.shape[1], dtype=weight.dtype).cos()
        known, copy = _copies.get(module, (None, None))
        if copy is None or known is None or not torch.equal(known, sums):
            copy = ordered(weight, MANY)
        if keep:
            _copies[module] = sums, copy
    return copy


@contextmanager
def _packed(module: nn.Linear, copy: Tensor, least: int) -> Generator[None, None, None]:
    bias = None if module.bias is None else module.bias.detach()  # pyright: ignore[reportUnnecessaryComparison]
    width = module.weight.shape[1]

    def forward(x: Tensor) -> Tensor:
        if x.requires_grad or not least * width <= x.numel() <= MANY * width:
            return linear(x, module.weight, module.bias)
        return product(x, copy, bias)

    with replaced_forward(module, forward):
        yield


def _is_packable(module: nn.Module) -> bool:
    # Exactly this class: adapters and quantized maps compute something else.
    if type(module) is not nn.Linear or "forward" in vars(module):
        return False
    return type(module.weight) is nn.Parameter and can_order(module.weight)
