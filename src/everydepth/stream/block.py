"""The parts of a residual stream: blocks, and the residual connections inside them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn

BranchKind = Literal["attention", "cross_attention", "mlp", "conv", "mixer"]


@dataclass(frozen=True, kw_only=True)
class Branch:
    """One residual connection `after = post(weight * skip(x) + scale * out)`, by its modules.

    kind: what the branch computes; a "mixer" mixes tokens other than by attention.
    entry: the module whose first input is the stream `x` (the norm of a pre-norm branch).
    out: the module whose (first) output is added to the skip.
    proj: the last linear map of the branch; a zero `proj` makes the branch output zero.
    mixing: where `proj` is a norm that acts on single channels, the linear map before it.
    skip: the module on the skip path, or None for the identity.
    post: the module applied to the sum, or None for the identity.
    call: which call of `out` within one pass of the block belongs to this branch; some blocks
        use one dropout or drop-path module for two branches.
    dropout: rate at which the block itself, by a function and not a module, drops entries of `out`
        before the sum in training mode.
    others: further last maps where one `proj` is not all: the other experts of a mixture.
    weights: of last maps that hold several matrices each (experts in one module), the parameters
        that are zero in a silent branch; empty where all of a map are.
    scale, weight: constants by which the block itself multiplies `out` and the skip.
    beside: it reads the same `x` as the branch before it, and is added in the same sum.
    turn: the order in which the block itself puts the axes of `out` before the sum, where modules
        work on another one (channels last).

    >>> attention, mlp = ed.as_stream(model).blocks[0].branches
    >>> type(mlp.entry).__name__, mlp.skip  # a norm reads the stream; the skip is the identity
    ('LayerNorm', None)
    """

    kind: BranchKind
    entry: nn.Module
    out: nn.Module
    proj: nn.Module
    skip: nn.Module | None = None
    post: nn.Module | None = None
    call: int = 0
    mixing: nn.Module | None = None
    dropout: float = 0.0
    others: tuple[nn.Module, ...] = ()
    weights: tuple[nn.Parameter, ...] = ()
    scale: float | Tensor = 1.0
    weight: float | Tensor = 1.0
    beside: bool = False
    turn: tuple[int, ...] | None = None

    @property
    def last(self) -> tuple[nn.Module, ...]:
        """All maps that are zero in a silent branch: `proj` and its kin."""
        return (self.proj, *self.others)

    def zeroed(self) -> Iterator[nn.Parameter]:
        """The parameters that are zero in a silent branch; what is before them can learn."""
        chosen = {id(parameter) for parameter in self.weights}
        for module in self.last:
            own = list(module.parameters(recurse=False))
            yield from [p for p in own if id(p) in chosen] or own

    def turned(self, out: Tensor, x: Tensor) -> Tensor:
        """What `out` gave, in the axes of the stream `x`."""
        # Where `entry` is given the stream in the axes of `out`, there is nothing to turn.
        if self.turn is None or x.ndim != len(self.turn):
            return out
        sizes = dict(zip(self.turn, x.shape, strict=True))
        return out.reshape([sizes[axis] for axis in range(x.ndim)]).permute(self.turn)

    def unturned(self, value: Tensor, out: Tensor) -> Tensor:
        """A value in the axes of the stream, in the shape of what `out` gave."""
        if self.turn is not None and value.ndim == len(self.turn):
            value = value.permute([self.turn.index(axis) for axis in range(value.ndim)])
        return value if value.shape == out.shape else value.reshape(out.shape)

    def added(self, x: Tensor, out: Tensor) -> Tensor:
        """The sum, before `post`."""
        skipped = x if self.skip is None else self.skip(x)
        return _times(skipped, self.weight) + _times(out, self.scale)


def _times(value: Tensor, factor: float | Tensor) -> Tensor:
    return value if isinstance(factor, float) and factor == 1.0 else value * factor


@dataclass(frozen=True, kw_only=True)
class Block:
    """One step `h_{l-1} -> h_l`: a module and its branches, in the order in which they act.

    parallel: all branches read the same `x` and are added to one skip.
    plain: a call gives the state itself; False: it may give a tuple that begins with it.

    >>> block = ed.as_stream(model).blocks[0]
    >>> type(block.module).__name__, [branch.kind for branch in block.branches]
    ('ViTLayer', ['attention', 'mlp'])
    """

    module: nn.Module
    branches: tuple[Branch, ...] = ()
    parallel: bool = False
    plain: bool = True

    @property
    def heads(self) -> int | None:
        """How many heads its attention has; None where it has none, or no module says it."""
        for branch in self.branches:
            if branch.kind == "attention":
                return _heads(self.module, branch.proj)
        return None


# How modules and their configs call the number of heads.
_HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head")


def _heads(block: nn.Module, proj: nn.Module) -> int | None:
    """What is said nearest to the projection: beside it, or beside what holds it."""
    around = [module for module in block.modules() if proj in module.modules()]
    for holder in reversed(around):
        for module in holder.modules():
            for said in (module, getattr(module, "config", None)):
                for name in _HEADS:
                    count = getattr(said, name, None)
                    if type(count) is int:
                        return count
    return None
