"""Measuring a model: time, floating-point operations, memory, size."""

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

from everydepth.stream import ResidualStream, stored

Result = TypeVar("Result")


def seconds(run: Callable[[], Result], stream: ResidualStream) -> tuple[float, Result]:
    """Wall-clock time of one call, with all work on the device finished."""
    _wait(stream)
    start = time.perf_counter()
    result = run()
    _wait(stream)
    return time.perf_counter() - start, result


def flops(run: Callable[[], Any]) -> int:
    """Floating-point operations of matrix products, convolutions and attention."""
    with FlopCounterMode(display=False, custom_mapping=ATTENTION_ON_CPU) as counter:
        run()
    return counter.get_total_flops()


def _attention_flops(q: Any, k: Any, v: Any, *_: Any, **__: Any) -> int:
    return sdpa_flop_count(q, k, v)


# The counter knows the attention kernels of GPUs only.
ATTENTION_ON_CPU = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops,
}


def parameter_count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def checkpoint_bytes(model: nn.Module) -> int:
    """What a safetensors file holds of this model: tied tensors once, no header."""
    held = [part for tensor in model.state_dict().values() for part in stored(tensor)]
    tensors = {t.data_ptr() or id(t): t for t in held}
    return sum(t.numel() * t.element_size() for t in tensors.values())


def peak_bytes(run: Callable[[], Any], stream: ResidualStream) -> int:
    """The most memory tensors took at once: weights, inputs and intermediate results.

    On a GPU, what its allocator counted; elsewhere, the tensors torch made and had not freed.
    """
    device = stream.device
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        run()
        return torch.cuda.max_memory_allocated(device)
    with LiveBytes() as live:
        run()
    return live.peak + weight_bytes(stream.model)


def weight_bytes(model: nn.Module) -> int:
    """What parameters and buffers take, shared ones once."""
    own = (*model.parameters(), *model.buffers())
    held = [part for tensor in own for part in stored(tensor)]
    weights = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in held}
    return sum(weights.values())


class LiveBytes(TorchDispatchMode):
    """Follows the storages that operations make, until they are freed."""

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
        # What an operation is given it did not make.
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
        """Forget the peak so far."""
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
