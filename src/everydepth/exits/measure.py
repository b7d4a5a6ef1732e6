"""Measure a model's time, memory and size."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count
from torch.utils.module_tracker import ModuleTracker

from everydepth.stream import ResidualStream, stored

Result = TypeVar("Result")


def seconds(run: Callable[[], Result], stream: ResidualStream) -> tuple[float, Result]:
    """Wall-clock time of one call, including its work on the device, and its result."""
    _wait(stream)
    start = time.perf_counter()
    result = run()
    _wait(stream)
    return time.perf_counter() - start, result


def flop_counter() -> FlopCounterMode:
    """A context that counts the operations of matrix products, convolutions and attention."""
    counter = FlopCounterMode(display=False, custom_mapping=ATTENTION_ON_CPU)
    counter.mod_tracker = _Untracked()
    return counter


class _Untracked(ModuleTracker):
    """Reports all operations as one module's.

    To tell modules apart, torch hooks tensors. Without gradients, that fails for a parameter that a
    model expands, such as a class token.
    """

    def __enter__(self) -> _Untracked:
        return self

    def __exit__(self, *_: object) -> None:
        pass


def _attention_flops(q: Any, k: Any, v: Any, *_: Any, **__: Any) -> int:
    return sdpa_flop_count(q, k, v)


# For `FlopCounterMode`, which only knows the attention kernels of GPUs.
ATTENTION_ON_CPU = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops,
}


def parameter_count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def checkpoint_bytes(model: nn.Module) -> int:
    """The size of this model's tensors in a safetensors file; tied ones count once."""
    held = [part for tensor in model.state_dict().values() for part in stored(tensor)]
    tensors = {t.data_ptr() or id(t): t for t in held}
    return sum(t.numel() * t.element_size() for t in tensors.values())


def weight_bytes(model: nn.Module) -> int:
    """The size of parameters and buffers in memory; shared ones count once."""
    own = (*model.parameters(), *model.buffers())
    held = [part for tensor in own for part in stored(tensor)]
    weights = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in held}
    return sum(weights.values())


class LiveBytes(TorchDispatchMode):
    """Tracks the total size of the storages that operations create, until they are freed."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._seen: dict[int, Any] = {}

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        # An operation did not create its inputs.
        given = {
            leaf.untyped_storage().data_ptr()
            for leaf in tree_leaves((args, kwargs))
            if isinstance(leaf, Tensor)
        }
        result = func(*args, **kwargs)
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.device.type != "meta":
                storage = leaf.untyped_storage()
                key = storage.data_ptr()
                if key and key not in given and key not in self._seen:
                    self._made(key, storage)
        return result

    def restart(self) -> None:
        """Reset the peak."""
        self.peak = self.now

    def _made(self, key: int, storage: torch.UntypedStorage) -> None:
        size = storage.nbytes()
        self.now += size
        self.peak = max(self.peak, self.now)

        def freed() -> None:
            self.now -= size
            self._seen.pop(key, None)

        self._seen[key] = weakref.finalize(storage, freed)


def _wait(stream: ResidualStream) -> None:
    if stream.device.type == "cuda":
        torch.cuda.synchronize(stream.device)
