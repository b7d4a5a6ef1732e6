"""A candidate block for insertion: its features, and the gradient of its zero projections."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from everydepth.errors import UnsupportedModelError
from everydepth.stream import Block, Call, ResidualStream, differentiating, first_tensor
from everydepth.stream.insert import inserted
from everydepth.stream.maps import LinearMap
from everydepth.stream.modes import requiring
from everydepth.stream.taps import hooked, state_in, with_state


@dataclass(frozen=True)
class Candidate:
    """A deeper model that shares all tensors with the old one, except those of the new block.

    The new block's last *linear* maps are zero and the norms after them are neutral, so that the
    gradient of these maps is not zero.
    """

    after: int
    stream: ResidualStream

    @property
    def model(self) -> nn.Module:
        return self.stream.model

    @property
    def block(self) -> Block:
        return self.stream.blocks[self.after]

    @property
    def maps(self) -> tuple[nn.Module, ...]:
        """`A`, the last linear map of each branch."""
        return tuple(branch.mixing or branch.proj for branch in self.block.branches)


def candidate(stream: ResidualStream, after: int, *, seed: int, init: str = "fresh") -> Candidate:
    """A block for one site, drawn with its own seed; the global random state is unchanged."""
    if stream.overwrites:
        raise UnsupportedModelError(
            f"blocks of {stream.name} write over the state they are given, and a new block is "
            "scored by that state; use operations that do not: x = x + ..., inplace=False"
        )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1_000_003 * seed + after)
        deeper = inserted(stream, after, init=init, share=True, trainable=True)
    deeper.model.eval()
    found = Candidate(after, deeper)
    for branch, module in zip(found.block.branches, found.maps, strict=True):
        weight = getattr(module, "weight", None)
        matrix = isinstance(weight, Tensor) and weight.ndim == 2
        if branch.others or not (matrix or isinstance(module, nn.Conv2d)):
            raise UnsupportedModelError(
                f"a branch of {stream.name} ends in {'one of several' if branch.others else 'a'} "
                f"{type(module).__name__}, and only a single linear layer or convolution can be "
                "scored; insert blocks yourself (everydepth.insert) and train them"
            )
    return found


@torch.no_grad()
def settle(candidate: Candidate, call: Call, h: Tensor) -> None:
    """Initialize the inner batch norms of a fresh block with the statistics of one batch."""
    last = [branch.proj for branch in candidate.block.branches]
    norms = [
        module
        for module in candidate.block.module.modules()
        if isinstance(module, nn.BatchNorm2d) and module not in last
    ]
    if not norms:
        return
    before = [norm.momentum for norm in norms]
    for norm in norms:
        norm.train().momentum = 1.0
    call(candidate.block.module, h)
    for norm, momentum in zip(norms, before, strict=True):
        norm.eval().momentum = momentum


@dataclass(frozen=True)
class Pairs:
    """For one map `A` and one batch: the feature `phi` and the gradient `g` at the map's output,
    per row and position. Row i's gradient of `A` is `sum_p g[i, p] phi[i, p]^T`."""

    phi: Tensor
    g: Tensor


def pairs(candidate: Candidate, call: Call, h: Tensor, g: Tensor) -> list[Pairs]:
    """One `Pairs` per branch, from the candidate's own forward.

    With zero maps, the input of every branch is `h` and the gradient at its output is the one at
    the block's output, so only the last scale (layer scale, batch norm) is differentiated. The
    maps themselves need not run: they would return zero.
    """
    found: dict[nn.Module, tuple[Tensor, Tensor]] = {}

    def cut(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return with_state(args, kwargs, state_in(args, kwargs).detach())

    def silent(module: nn.Module) -> Callable[[Tensor], Tensor]:
        def forward(x: Tensor) -> Tensor:
            leaf = x.new_zeros(LinearMap(module).output_shape(x)).requires_grad_()
            found[module] = (x.detach(), leaf)
            return leaf.clone()  # some blocks add to it in place

        return forward

    block = candidate.block
    with ExitStack() as stack, differentiating():
        entries = {id(b.entry): b.entry for b in block.branches}.values()
        handles = [m.register_forward_pre_hook(cut, with_kwargs=True) for m in entries]
        stack.enter_context(hooked(*handles))
        for module in candidate.maps:
            module.forward = silent(module)
            stack.callback(module.__dict__.pop, "forward")
        stack.enter_context(requiring(list(block.module.parameters()), False))
        output = first_tensor(call(block.module, h.detach()))
        leaves = [found[module][1] for module in candidate.maps]
        grads = torch.autograd.grad(output, leaves, g.to(output.dtype))
    rows = h.shape[0]
    return [
        Pairs(each.inputs(found[each.module][0], rows), each.outputs(grad, rows))
        for each, grad in zip(map(LinearMap, candidate.maps), grads, strict=True)
    ]


@dataclass(frozen=True)
class Direction:
    """The gradient of the mean loss with respect to one map: weight `(out, in)` and bias."""

    weight: Tensor
    bias: Tensor


def product(candidate: Candidate, left: Sequence[Direction], right: Sequence[Direction]) -> float:
    """The inner product of two directions, over all maps."""
    total = 0.0
    for module, a, b in zip(candidate.maps, left, right, strict=True):
        total += (a.weight.double() * b.weight.double()).sum().item()
        if LinearMap(module).has_bias:
            total += (a.bias.double() * b.bias.double()).sum().item()
    return total


@torch.no_grad()
def set_maps(candidate: Candidate, directions: Sequence[Direction], eta: float) -> None:
    """`A = -eta G` in every branch."""
    for module, direction in zip(candidate.maps, directions, strict=True):
        LinearMap(module).set(-eta * direction.weight, -eta * direction.bias)
