"""Scaling or removing skip connections: `after = post(c skip(x) + out)`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from everydepth.ablations.config import Which
from everydepth.config import checked
from everydepth.errors import DepthError, SettingError, UnsupportedModelError
from everydepth.stream import Block, ResidualStream, as_stream, first_tensor, with_first_tensor
from everydepth.stream.block import current
from everydepth.stream.taps import listening, state_in

# By block: the branches currently scaled, so that no connection is scaled twice by accident.
_scaled: WeakKeyDictionary[nn.Module, set[int]] = WeakKeyDictionary()


class ScaledSkip:
    """Skip connections of some layers, multiplied by `c`; created by `scaled_skip`.

    Use it as a context manager, or call `attach()` to keep it active until `remove()`, for example
    during training. It is implemented with hooks and does not change weights: a model that is saved
    and loaded again is the untouched one.
    """

    def __init__(
        self, stream: ResidualStream, layers: Sequence[int], c: float, which: Which
    ) -> None:
        self.stream, self.layers, self.c, self.which = stream, tuple(layers), c, which
        self._chosen = [(layer, _chosen(stream, layer, which)) for layer in self.layers]
        self._handles: list[RemovableHandle] = []
        self._held: list[tuple[nn.Module, set[int]]] = []

    def attach(self) -> ScaledSkip:
        """Activate it until `remove()`. With c = 1 nothing is registered."""
        if self.c == 1.0 or self._handles:
            return self
        blocks = [(layer, self.stream.blocks[layer - 1], chosen) for layer, chosen in self._chosen]
        for layer, block, chosen in blocks:
            if _scaled.get(block.module, set()) & set(chosen):
                raise SettingError(
                    f"layer {layer} of {self.stream.name} already has a scaled skip; "
                    "remove it first (exit its `with` block, or call remove())"
                )
        for layer, block, chosen in blocks:
            self._handles += _hooks(layer, block, chosen, self.c)
            _scaled.setdefault(block.module, set()).update(chosen)
            self._held.append((block.module, set(chosen)))
        return self

    def remove(self) -> None:
        """Restore the model's own skips."""
        for handle in self._handles:
            handle.remove()
        for module, chosen in self._held:
            _scaled[module] -= chosen
        self._handles, self._held = [], []

    def __enter__(self) -> ScaledSkip:
        return self.attach()

    def __exit__(self, *_: object) -> None:
        self.remove()


@checked
def scaled_skip(
    model: nn.Module | ResidualStream,
    *,
    layer: int | Sequence[int],
    c: float,
    which: Which = "both",
    **options: Any,
) -> ScaledSkip:
    """Scale the skip connections of one or more layers by `c`: 0 removes them, 1 changes nothing.

        with scaled_skip(model, layer=1, c=0.0): ...         # always restored
        skip = scaled_skip(model, layer=1, c=0.0).attach()   # until skip.remove(), for training

    layer: from 1 (the block that reads the embedding) to L.
    which: "both" for every connection of the block, or one kind. Branches that run in parallel
        share one skip, so only "both" applies to them.
    options: passed to `as_stream`.

    The connection becomes `post(c skip(x) + out)`: if a norm or ReLU follows the sum, the skip is
    scaled before it. If the skip is a projection that changes the shape, its output is scaled,
    including its batch norm. If the skip is the identity, the branch returns `out - (1-c) x` and
    the block adds `x`, so that rounding is that of the stream.

    >>> images = test.pixel_values[:4]
    >>> before = model(images).logits
    >>> with ed.scaled_skip(model, layer=1, c=0.0):
    ...     without = model(images).logits
    >>> torch.equal(without, before), torch.equal(model(images).logits, before)
    (False, True)
    """
    stream = as_stream(model, **options)
    if not math.isfinite(c):
        raise SettingError(f"c={c}; use a finite number, 0 to remove the skip and 1 to keep it")
    return ScaledSkip(stream, checked_layers(stream, layer), float(c), which)


def checked_layers(stream: ResidualStream, layer: int | Sequence[int]) -> list[int]:
    """The layers, each once, if they exist."""
    layers: list[Any] = list(layer) if isinstance(layer, Iterable) else [layer]
    if not layers:
        raise SettingError(f"no layer; give one or more of 1 to {stream.depth}")
    for one in layers:
        if (
            isinstance(one, bool)
            or not isinstance(one, int | np.integer)
            or not 1 <= one <= stream.depth
        ):
            raise DepthError(
                f"layer {one!r}, but the layers of {stream.name} are 1 to {stream.depth}: layer l "
                "is the block that produces the state at depth l, and depth 0 is the embedding, "
                f"which has no skip; the first layer is 1, the last {stream.depth}"
            )
    return list(dict.fromkeys(map(int, layers)))


def _chosen(stream: ResidualStream, layer: int, which: Which) -> list[int]:
    """The indices of the branches whose skip is scaled."""
    block = stream.blocks[layer - 1]
    if not block.branches:
        raise UnsupportedModelError(
            f"{stream.name} is known only block by block, without its branches, so its skips "
            "cannot be scaled; teach everydepth its branches (docs/add-an-architecture.md)"
        )
    kinds = [branch.kind for branch in block.branches]
    if which != "both" and which not in kinds:
        raise SettingError(
            f"which={which!r}, but layer {layer} of {stream.name} has {' and '.join(kinds)}; "
            "use one of these, or 'both'"
        )
    if block.parallel:
        if which != "both":
            raise SettingError(
                f"which={which!r}, but the branches of layer {layer} of {stream.name} run in "
                "parallel and share one skip; use which='both'"
            )
        return [0]
    if sum(other.module is block.module for other in stream.blocks) > 1:
        raise UnsupportedModelError(
            f"layer {layer} of {stream.name} is one module called at several depths, so its skip "
            "cannot be scaled at only one of them"
        )
    # A branch beside another is added to the same skip, which is scaled once.
    chosen = [i for i, kind in enumerate(kinds) if which in ("both", kind)]
    return [i for i in chosen if not block.branches[i].beside]


def _hooks(layer: int, block: Block, chosen: Sequence[int], c: float) -> list[RemovableHandle]:
    listens = listening()
    xs: dict[int, Tensor] = {}
    calls: dict[nn.Module, int] = {}
    inside: list[bool] = []  # blocks may share modules
    # A skip may be a module that the block calls, or known only by what it computes.
    own = set(block.module.modules())
    skips = {i: block.branches[i].skip for i in chosen}
    called = {i: skip for i, skip in skips.items() if skip is not None and skip in own}
    by_output = {
        (branch.out, branch.call): i
        for i, branch in enumerate(block.branches)
        if i in chosen and i not in called
    }
    for branch in (block.branches[i] for i in by_output.values()):
        if not bool(torch.as_tensor(current(branch.scale)).all()):
            raise UnsupportedModelError(
                f"layer {layer} multiplies its {branch.kind} branch by a number that is 0 now, so "
                "its skip cannot be scaled through what it adds; train the model first, or start "
                "from another number"
            )

    def begin(*_: Any) -> None:
        inside[:] = [True]
        xs.clear()
        calls.clear()

    def end(*_: Any) -> None:
        inside.clear()

    def see(i: int) -> Any:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if inside:
                xs.setdefault(i, state_in(args, kwargs))

        return hook

    def subtract(module: nn.Module, _: Any, output: Any) -> Any:
        if not inside or not listens():
            return None
        call = calls.get(module, 0)
        calls[module] = call + 1
        i = by_output.get((module, call))
        if i is None:
            return None
        branch = block.branches[i]
        if branch.dropout > 0 and block.module.training:
            raise UnsupportedModelError(
                f"layer {layer} applies dropout {branch.dropout} to its {branch.kind} output after "
                "the point where the skip is scaled, which would drop the skip as well; build the "
                "model with dropout=0, or call `model.eval()`"
            )
        out = first_tensor(output)
        x = xs.pop(i) if branch.skip is None else branch.skip(xs.pop(i))
        less = (1 - c) * branch.ahead(x)
        return with_first_tensor(output, out - branch.unturned(less, out))

    def multiply(_: nn.Module, __: Any, output: Tensor) -> Tensor:
        # Computing the skip again would update its batch norm twice.
        return c * output if inside else output

    handles = [block.module.register_forward_pre_hook(begin)]
    for i in by_output.values():
        entry = block.branches[i].entry
        handles.append(entry.register_forward_pre_hook(see(i), with_kwargs=True))
    for module in dict.fromkeys(out for out, _ in by_output):
        handles.append(module.register_forward_hook(subtract))
    handles += [skip.register_forward_hook(multiply) for skip in called.values()]
    handles.append(block.module.register_forward_hook(end, always_call=True))
    return handles
