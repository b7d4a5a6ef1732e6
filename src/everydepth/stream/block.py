"""The parts of a residual stream: blocks, and the residual connections inside them."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor, nn

from everydepth.errors import UnsupportedModelError


@dataclass(frozen=True, eq=False)
class Computed:
    """What a function computes of parameters alone, as they are when it is read.

    args: numbers, parameters, or what is computed of them.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @property
    def value(self) -> Any:
        return self.function(*map(current, self.args), **self.kwargs)


Scale = float | Tensor | Computed
"""What a block multiplies a branch or a skip by: a number, a parameter, or computed of some."""


def current(scale: Any) -> Any:
    """The value that a scale has now."""
    return scale.value if isinstance(scale, Computed) else scale


def times(a: Scale, b: Scale, *, divides: bool = False) -> Scale:
    """A product or quotient; of 1 and a parameter the parameter itself."""
    if isinstance(b, float) and b == 1.0:
        return a
    if isinstance(a, float) and a == 1.0 and not divides:
        return b
    made = Computed(operator.truediv if divides else operator.mul, (a, b))
    return made.value if isinstance(a, float) and isinstance(b, float) else made


BranchKind = Literal["attention", "cross_attention", "mlp", "conv", "mixer"]


@dataclass(frozen=True, kw_only=True)
class Branch:
    """One residual connection `after = post(weight * skip(x) + scale * out)`, as modules.

    A branch is *silent* if it adds zero.

    kind: what the branch computes; a "mixer" mixes tokens other than by attention.
    entry: the module whose first input is the stream `x` (the norm of a pre-norm branch).
    out: the module whose (first) output is added to the skip.
    proj: the last linear map; if it is zero, the branch is silent.
    mixing: if `proj` is a norm, which acts on single channels, the linear map before it.
    skip: the module on the skip path, or None for the identity.
    post: the module applied to the sum, or None for the identity.
    call: which of the calls of `out` within one pass of the block is this branch's; some blocks
        share one dropout or drop-path module between two branches.
    dropout: rate of a functional dropout that the block applies to `out` in training mode.
    others: further last maps, such as those of the other experts of a mixture.
    weights: if a last map holds several matrices (experts in one module), the parameters that are
        zero in a silent branch; empty if all are.
    scale, weight: what the block multiplies `out` and the skip by.
    beside: it reads the same `x` as the previous branch and is part of the same sum.
    turn: the permutation of axes that the block applies to `out` before the sum, if its modules
        use another layout (channels last).

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
    scale: Scale = 1.0
    weight: Scale = 1.0
    beside: bool = False
    turn: tuple[int, ...] | None = None

    @property
    def last(self) -> tuple[nn.Module, ...]:
        """All last maps: `proj` and `others`."""
        return (self.proj, *self.others)

    def zeroed(self) -> Iterator[nn.Parameter]:
        """The parameters to zero so that the branch is silent and can still learn."""
        chosen = {id(parameter) for parameter in self.weights}
        for module in self.last:
            own = list(module.parameters(recurse=False))
            yield from [p for p in own if id(p) in chosen] or own

    def turned(self, out: Tensor, x: Tensor) -> Tensor:
        """The output of `out`, with its axes in the order of the stream `x`."""
        # If `entry` already reads the stream in the layout of `out`, nothing is to be done.
        if self.turn is None or x.ndim != len(self.turn):
            return out
        sizes = dict(zip(self.turn, x.shape, strict=True))
        return out.reshape([sizes[axis] for axis in range(x.ndim)]).permute(self.turn)

    def unturned(self, value: Tensor, out: Tensor) -> Tensor:
        """The inverse of `turned`: a value in the stream's axes, in the shape of `out`'s output."""
        if self.turn is not None and value.ndim == len(self.turn):
            value = value.permute([self.turn.index(axis) for axis in range(value.ndim)])
        return value if value.shape == out.shape else value.reshape(out.shape)

    def added(self, x: Tensor, out: Tensor) -> Tensor:
        """The sum, before `post`; some blocks flatten tokens into rows for `out`."""
        out = out if out.ndim == x.ndim else out.reshape(x.shape)
        skipped = x if self.skip is None else self.skip(x)
        return _times(skipped, self.weight) + _times(out, self.scale)

    def ahead(self, skipped: Tensor) -> Tensor:
        """What to add to the output of `out` in order to add `skip(x)`, given here, to the sum."""
        return _times(skipped, times(self.weight, self.scale, divides=True))


def _times(value: Tensor, scale: Scale) -> Tensor:
    factor = current(scale)
    return value if isinstance(factor, float) and factor == 1.0 else value * factor


class Instead(Tensor):
    """The output of a branch that the model itself adds to a state: the sum is this tensor."""

    state: Tensor

    @classmethod
    def of(cls, h: Tensor) -> Tensor:
        made = h.as_subclass(cls)
        made.state = h
        return made

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = func.__name__.strip("_")
        if name in ("add", "radd"):
            return next(value for value in args if isinstance(value, cls)).state
        if name == "get":  # its shape, dtype and the like
            return super().__torch_function__(func, types, args, kwargs)
        raise UnsupportedModelError(
            "the model uses what a block returned otherwise than by adding it to the state, which "
            "it did on the batch it was discovered with: that depends on the data or the mode, so "
            "it is no stream; switch it off, or make each step a module that returns the sum"
        )


@dataclass(frozen=True, kw_only=True)
class Block:
    """One step `h_{l-1} -> h_l`: a module and its branches, in order.

    parallel: all branches read the same `x` and share one skip.
    plain: the module returns the state itself; False if it may return a tuple that starts with it.
    overwrites: the state, or one between its branches, is written over once it was read.
    outside: the model adds the module's output to the state, outside of it.

    >>> block = ed.as_stream(model).blocks[0]
    >>> type(block.module).__name__, [branch.kind for branch in block.branches]
    ('ViTLayer', ['attention', 'mlp'])
    """

    module: nn.Module
    branches: tuple[Branch, ...] = ()
    parallel: bool = False
    plain: bool = True
    overwrites: bool = False
    outside: bool = False

    def after(self, h: Tensor, out: Tensor) -> Tensor:
        """The state after it. h: the one before. out: the module's first output."""
        return h + out if self.outside else out

    @property
    def names(self) -> list[str]:
        """The kinds of its branches, numbered if a kind occurs more than once."""
        kinds = [branch.kind for branch in self.branches]
        return [
            kind if kinds.count(kind) == 1 else f"{kind}_{kinds[: i + 1].count(kind)}"
            for i, kind in enumerate(kinds)
        ]

    @property
    def heads(self) -> int | None:
        """The number of attention heads; None if it has none or the number is unknown."""
        for branch in self.branches:
            if branch.kind == "attention":
                return _heads(self.module, branch.proj)
        return None


# Names of the number of heads in modules and configs.
_HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head")


def _heads(block: nn.Module, proj: nn.Module) -> int | None:
    """The number of heads from the module nearest to the projection."""
    around = [module for module in block.modules() if proj in module.modules()]
    for holder in reversed(around):
        for module in holder.modules():
            for holds in (module, getattr(module, "config", None)):
                for name in _HEADS:
                    count = getattr(holds, name, None)
                    if type(count) is int:
                        return count
    return None
