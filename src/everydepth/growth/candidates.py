"""A block that might be inserted: its features, and the gradient of its zero projections."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 (its usual name)

from everydepth.errors import UnsupportedModelError
from everydepth.stream import Block, Call, ResidualStream, as_stream, first_tensor, insert
from everydepth.stream.taps import hooked, state_key


@dataclass(frozen=True)
class Candidate:
    """A grown model that shares every tensor but those of the new block with the old one.

    The new block's last *linear* maps are zero (SPEC 4.1). Where a batch norm follows such a map
    it is neutral rather than zero, so that the gradient of the map is not.
    """

    after: int
    model: nn.Module
    block: Block
    options: dict[str, Any]

    @property
    def maps(self) -> tuple[nn.Module, ...]:
        """`A`, the last linear map of each branch."""
        return tuple(branch.mixing or branch.proj for branch in self.block.branches)

    @property
    def stream(self) -> ResidualStream:
        return as_stream(self.model, **self.options)


def candidate(stream: ResidualStream, after: int, *, seed: int, init: str = "fresh") -> Candidate:
    """A block for one site, drawn from its own random stream; the caller's is not moved."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1_000_003 * seed + after)
        model = insert(stream.model, after, init=init, share=True, **stream.options).eval()
    block = as_stream(model, **stream.options).blocks[after]
    with torch.no_grad():
        for branch in block.branches:
            if branch.mixing is not None:
                neutral: Any = branch.proj
                neutral.reset_parameters()  # weight 1, bias 0, and running statistics 0 and 1
                for parameter in branch.mixing.parameters(recurse=False):
                    parameter.zero_()
    return Candidate(after, model, block, dict(stream.options))


@torch.no_grad()
def settle(candidate: Candidate, call: Call, h: Tensor) -> None:
    """Let the inner batch norms of a fresh block take the statistics of one batch."""
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


@contextmanager
def noted_calls(stream: ResidualStream) -> Generator[list[Call], None, None]:
    """How the model calls each of its blocks, learnt while it runs."""
    calls: list[Call] = []

    def note(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        key = state_key(args, kwargs)
        rest = {k: v for k, v in kwargs.items() if k != key}
        calls.append(Call(args[1:] if key is None else args, rest, key))

    handles = [b.module.register_forward_pre_hook(note, with_kwargs=True) for b in stream.blocks]
    with hooked(*handles):
        yield calls


@dataclass(frozen=True)
class Pairs:
    """Of one map `A` and one batch: per row and position the feature `phi` and the gradient `g`
    at the map's output, so that row i's gradient of `A` is `sum_p g[i, p] phi[i, p]^T`."""

    phi: Tensor
    g: Tensor


def pairs(candidate: Candidate, call: Call, h: Tensor, g: Tensor) -> list[Pairs]:
    """What the candidate's own forward gives, one `Pairs` a branch.

    With zero maps the input of every branch is `h`, and the gradient at its output is that at the
    block's output: nothing but the last scale (layer scale, batch norm) is differentiated. The maps
    themselves need not run to give zero.
    """
    found: dict[nn.Module, tuple[Tensor, Tensor]] = {}

    def cut(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        key = state_key(args, kwargs)
        if key is None:
            return (args[0].detach(), *args[1:]), kwargs
        return args, {**kwargs, key: kwargs[key].detach()}

    def silent(module: nn.Module) -> Callable[[Tensor], Tensor]:
        def forward(x: Tensor) -> Tensor:
            leaf = x.new_zeros(_output_shape(module, x)).requires_grad_()
            found[module] = (x.detach(), leaf)
            return leaf

        return forward

    block = candidate.block
    with ExitStack() as stack, torch.enable_grad():
        entries = {id(b.entry): b.entry for b in block.branches}.values()
        handles = [m.register_forward_pre_hook(cut, with_kwargs=True) for m in entries]
        stack.enter_context(hooked(*handles))
        for module in candidate.maps:
            module.forward = silent(module)
            stack.callback(module.__dict__.pop, "forward")
        for parameter in block.module.parameters():
            parameter.requires_grad_(False)
        stack.callback(lambda: [p.requires_grad_() for p in block.module.parameters()])
        output = first_tensor(call(block.module, h.detach()))
        leaves = [found[module][1] for module in candidate.maps]
        grads = torch.autograd.grad(output, leaves, g.to(output.dtype))
    rows = h.shape[0]
    return [
        Pairs(_inputs(module, found[module][0], rows), _outputs(module, grad, rows))
        for module, grad in zip(candidate.maps, grads, strict=True)
    ]


def _output_shape(module: nn.Module, x: Tensor) -> tuple[int, ...]:
    if isinstance(module, nn.Conv2d):
        return (len(x), module.out_channels, *_places(_checked(module), *x.shape[2:]))
    weight: Any = module.weight
    return (*x.shape[:-1], weight.shape[0 if isinstance(module, nn.Linear) else 1])


def _inputs(module: nn.Module, x: Tensor, rows: int) -> Tensor:
    """`(row, position, input of the map)`."""
    return (
        _patches(module, x) if isinstance(module, nn.Conv2d) else x.reshape(rows, -1, x.shape[-1])
    )


def _checked(module: nn.Conv2d) -> nn.Conv2d:
    if module.groups != 1 or isinstance(module.padding, str):
        raise UnsupportedModelError(
            f"the last convolution of a branch has groups={module.groups} and padding="
            f"{module.padding!r}; growth needs groups=1 and padding in numbers"
        )
    return module


def _places(conv: nn.Conv2d, *size: int) -> tuple[int, ...]:
    """Height and width of the output."""
    facts = (conv.padding, conv.dilation, conv.kernel_size, conv.stride)
    return tuple(
        (n + 2 * int(p) - d * (k - 1) - 1) // s + 1
        for n, p, d, k, s in zip(size, *facts, strict=True)
    )


def _patches(conv: nn.Conv2d, x: Tensor) -> Tensor:
    """`(row, position, patch)`, a patch in the order (y, x, channel).

    With channels last, a row of a patch is one run of memory: copied several times faster than
    `unfold` does, whose patches have the order of the weight.
    """
    (kh, kw), (dh, dw), (sh, sw) = conv.kernel_size, conv.dilation, conv.stride
    ph, pw = (int(p) for p in conv.padding)
    sizes = _places(conv, *x.shape[2:])
    last = F.pad(x.permute(0, 2, 3, 1), (0, 0, pw, pw, ph, ph)).contiguous()
    rows, _, _, channels = last.shape
    a, b, c, d = last.stride()
    views = last.as_strided(
        (rows, *sizes, kh, kw, channels), (a, b * sh, c * sw, b * dh, c * dw, d)
    )
    return views.reshape(rows, sizes[0] * sizes[1], kh * kw * channels)


def _outputs(module: nn.Module, g: Tensor, rows: int) -> Tensor:
    """`(row, position, output of the map)`."""
    if isinstance(module, nn.Conv2d):
        return g.flatten(2).transpose(1, 2)
    return g.reshape(rows, -1, g.shape[-1])


def as_weight(module: nn.Module, matrix: Tensor) -> Tensor:
    """A matrix `(out, in)` in the layout of the map's own weight."""
    weight: Any = module.weight
    if isinstance(module, nn.Conv2d):
        channels, height, width = weight.shape[1:]
        return matrix.reshape(-1, height, width, channels).permute(0, 3, 1, 2)
    # GPT-2 keeps its linear maps transposed.
    return matrix if isinstance(module, nn.Linear) else matrix.T


@dataclass(frozen=True)
class Direction:
    """The gradient of the mean loss with respect to one map: weight `(out, in)` and bias."""

    weight: Tensor
    bias: Tensor

    def squared(self, has_bias: bool) -> float:
        total = self.weight.double().square().sum()
        return float(total + self.bias.double().square().sum() if has_bias else total)


def has_bias(module: nn.Module) -> bool:
    return isinstance(getattr(module, "bias", None), Tensor)


@torch.no_grad()
def set_maps(candidate: Candidate, directions: Sequence[Direction], eta: float) -> None:
    """`A = -eta G` in every branch."""
    for module, direction in zip(candidate.maps, directions, strict=True):
        weight: Any = module.weight
        weight.copy_(as_weight(module, -eta * direction.weight))
        bias: Any = getattr(module, "bias", None)
        if bias is not None:
            bias.copy_(-eta * direction.bias)
