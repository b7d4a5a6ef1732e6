"""The model inside wrappers: compiled, adapted (PEFT), offloaded, quantized, sharded, parallel."""

from __future__ import annotations

import copy
import inspect
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from everydepth.errors import UnsupportedModelError


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside DDP, FSDP, `torch.compile` or PEFT."""
    return list(_layers(model))[-1]


class ModelAround(nn.Module, ABC):
    """A module around a model, whose `forward` shows the model's inputs, also in copies.

    Hugging Face's Trainer and our feeds drop the columns of a dataset that its signature lacks.
    """

    @abstractmethod
    def signature(self) -> inspect.Signature:
        """The signature that `forward` shows."""

    def name_inputs(self) -> None:
        """Show the signature; once the model is there."""
        shown = partial(type(self).forward, self)
        vars(shown)["__signature__"] = self.signature()
        self.forward = shown

    def __getstate__(self) -> dict[str, Any]:
        # A stream may hold functions bound to its model, so a copy builds its own.
        kept = {name: value for name, value in self.__dict__.items() if name != "forward"}
        return {**kept, "_stream": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.name_inputs()


def _layers(model: nn.Module) -> Iterator[nn.Module]:
    """A model and what it wraps, outermost first."""
    inner: Any = model
    while isinstance(inner, nn.Module):
        model = inner
        yield model
        inner = getattr(model, "_orig_mod", None)
        if inner is None and _adapts(model):
            inner = _adapted(model)
        if inner is None and isinstance(model, _wrappers()):
            inner = model.module


def _wrappers() -> tuple[type[nn.Module], ...]:
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.nn.parallel import DataParallel, DistributedDataParallel

    return (DistributedDataParallel, DataParallel, FullyShardedDataParallel)


def check_seen(model: nn.Module) -> None:
    """Raise if hooks added later would be ignored."""
    if any(getattr(module, "_compiled_call_impl", None) for module in model.modules()):
        raise UnsupportedModelError(
            f"{type(unwrapped(model)).__name__} was compiled in place by model.compile(), which "
            "hides its states; use torch.compile(model) or as_stream(model).compile_blocks() "
            "instead"
        )


def check_parts_seen(model: nn.Module, blocks: Iterable[nn.Module]) -> None:
    """Raise if a part that holds some of the blocks, but not the whole model, is compiled."""
    wanted = set(blocks)
    for path, part in unwrapped(model).named_modules():
        inside = getattr(part, "_orig_mod", None)
        if isinstance(inside, nn.Module) and not wanted.isdisjoint(
            {*part.modules()} - {part, inside}
        ):
            raise UnsupportedModelError(
                f"{path} of {type(unwrapped(model)).__name__} is compiled, which hides the states "
                f"between its blocks; put the original back (model.{path} = model.{path}._orig_mod)"
                ", then compile the whole model, or each block: as_stream(model).compile_blocks()"
            )


# -- adapters -------------------------------------------------------------------------------------


def adapter(model: nn.Module) -> Any:
    """The PEFT wrapper of a model, or None."""
    return next((layer for layer in _layers(model) if _adapts(layer)), None)


def _adapts(model: nn.Module) -> bool:
    return hasattr(model, "peft_config") and hasattr(model, "get_base_model")


def _adapted(model: Any) -> nn.Module:
    """The model whose layers a PEFT adapter changed in place."""
    if getattr(model.active_peft_config, "is_prompt_learning", False):
        raise UnsupportedModelError(
            f"{type(model).__name__} has an active prompt-tuning adapter, which adds tokens before "
            "the first block; pass the model without it (model.get_base_model()), or use an "
            "adapter that changes layers (LoRA)"
        )
    return model.get_base_model()


def rewrapped(model: nn.Module, inner: nn.Module) -> nn.Module:
    """`inner`, an edited copy of the model inside `model`, with the same PEFT wrapper."""
    around = adapter(model)
    return inner if around is None else copy.deepcopy(around, {id(unwrapped(model)): inner})


def merged(model: nn.Module) -> nn.Module:
    """The plain model with its adapters merged into its weights, in place."""
    around = adapter(model)
    if around is None:
        return model
    changed = untied_by_merging(model)
    if changed is not None:
        raise UnsupportedModelError(
            f"the adapter of {type(unwrapped(model)).__name__} changes its {changed}, but head and "
            "embedding are one tensor, so merging it would change both; export it with "
            "format='peft'"
        )
    try:
        return around.merge_and_unload()
    except (AttributeError, NotImplementedError, TypeError, ValueError) as error:
        kinds = sorted({str(config.peft_type) for config in around.peft_config.values()})
        raise UnsupportedModelError(
            f"the adapter of {type(unwrapped(model)).__name__} ({', '.join(kinds)}) cannot be "
            f"merged into its weights ({error}); export it with format='peft'"
        ) from error


def untied_by_merging(model: nn.Module) -> str | None:
    """Which of two tied ends, "head" or "embedding", has an adapter of its own; None if neither."""
    inner: Any = unwrapped(model)
    head = getattr(inner, "get_output_embeddings", lambda: None)()
    if head is None or not any(hasattr(module, "get_base_layer") for module in inner.modules()):
        return None
    pair = (head, inner.get_input_embeddings())
    plain = [end.get_base_layer() if hasattr(end, "get_base_layer") else end for end in pair]
    adapted = [one is not end for one, end in zip(plain, pair, strict=True)]
    weights = [getattr(end, "weight", None) for end in plain]
    if not any(adapted) or weights[0] is None or weights[0] is not weights[1]:
        return None
    return "head" if adapted[0] else "embedding"


def without_adapters(block: nn.Module) -> nn.Module:
    """A block with its adapters merged into its weights, which become trainable, in place."""
    for name, module in list(block.named_modules()):
        if hasattr(module, "get_base_layer") and hasattr(module, "merge"):
            changed: Any = module
            changed.merge()
            holder, _, last = name.rpartition(".")
            setattr(block.get_submodule(holder), last, changed.get_base_layer())
            block.requires_grad_(True)
    return block


# -- tensors that are offloaded, sharded or quantized ---------------------------------------------


def device_of(model: nn.Module) -> torch.device:
    """The device of the first parameter; for an offloaded model, where it computes."""
    for module in model.modules():
        parameter = next(module.parameters(recurse=False), None)
        if parameter is None:
            continue
        if parameter.device.type == "meta":
            for hook in _hooks(module):
                return torch.empty(0, device=hook.execution_device).device
        return parameter.device
    return torch.device("cpu")


def without_values(model: nn.Module) -> str | None:
    """The name of the first parameter that has a shape and no values; offloaded ones have them."""
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.device.type == "meta" and not _hooks(module):
                return f"{path}.{name}" if path else name
    return None


def plain_values(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The parameters as plain tensors, by name: fetched, gathered, dequantized."""
    for path, part in module.named_modules():
        for name, parameter in part.named_parameters(recurse=False):
            yield (f"{path}.{name}" if path else name), plain_value(part, name, parameter)


def plain_value(module: nn.Module, name: str, value: Tensor | None = None) -> Tensor:
    """One parameter of a module as a plain tensor."""
    found: Any = getattr(module, name) if value is None else value
    if found.device.type == "meta":
        found = next((hook.weights_map[name] for hook in _hooks(module)), found)
    if _shard(found):
        found = found.full_tensor()
    return found.dequantize() if quantized(found) else found.detach()


def stored(tensor: Tensor) -> list[Tensor]:
    """The tensors that store a value: itself, or those inside a quantized one."""
    inside: Any = tensor.data
    if not hasattr(inside, "__tensor_flatten__"):
        return [tensor]
    return [
        part for name in inside.__tensor_flatten__()[0] for part in stored(getattr(inside, name))
    ]


def quantized(tensor: Tensor) -> bool:
    """Whether a tensor is stored in fewer bits than its dtype has."""
    own = type(tensor.data)
    return own is not Tensor and hasattr(own, "__tensor_flatten__") and not _shard(tensor)


def _shard(tensor: Tensor) -> bool:
    """Whether it is this process's part of a sharded tensor."""
    return hasattr(tensor, "full_tensor")


def check_resident(model: nn.Module, what: str) -> None:
    """Raise if weights are offloaded between calls, which would lose gradients."""
    if any(_hooks(module) for module in model.modules()):
        raise UnsupportedModelError(
            f"{what} needs weights that stay on their device, but those of "
            f"{type(unwrapped(model)).__name__} are offloaded; load it without device_map offload"
        )


def check_plain(model: nn.Module, what: str) -> None:
    """Raise if weights are quantized."""
    wrong = next((p for p in model.parameters() if quantized(p)), None)
    if wrong is not None:
        raise UnsupportedModelError(
            f"{what} needs plain weights, but {type(unwrapped(model)).__name__} has quantized ones "
            f"({type(wrong.data).__name__}); do it before quantizing"
        )


def check_copied(model: nn.Module) -> None:
    """Raise if the model cannot be copied with other blocks."""
    if sharded(model):
        raise UnsupportedModelError(
            f"{type(model).__name__} is sharded (fully_shard): each process holds a part of it, so "
            "it cannot be copied with other blocks; gather it first: "
            "torch.distributed.checkpoint.state_dict.get_model_state_dict with "
            "full_state_dict=True, loaded into a model that is not sharded"
        )


def without_gradients(model: nn.Module) -> torch.no_grad | torch.inference_mode:
    """The fastest gradient-free context that the model can run in."""
    return torch.no_grad() if sharded(model) else torch.inference_mode()


def shareable(model: nn.Module) -> bool:
    """Whether a copy made for saving can use the model's own tensors."""
    return adapter(model) is None and not any(_hooks(module) for module in model.modules())


def sharded(model: nn.Module) -> bool:
    """Whether FSDP shards the parameters across processes."""
    from torch.distributed.fsdp import FSDPModule

    return any(isinstance(module, FSDPModule) for module in model.modules())


def fetch(original: nn.Module, copied: nn.Module, left: Iterable[int]) -> None:
    """Give a copy of an offloaded model its own tensors, except in the modules `left` (ids)."""
    if not any(_hooks(module) for module in original.modules()):
        return
    from accelerate.hooks import remove_hook_from_module

    left = set(left)
    for old, new in zip(original.modules(), copied.modules(), strict=True):
        if id(old) in left or not _hooks(old):
            continue
        for name, parameter in old.named_parameters(recurse=False):
            if parameter.device.type == "meta":
                value = plain_value(old, name, parameter).clone()
                setattr(new, name, nn.Parameter(value, parameter.requires_grad))
        for name, buffer in old.named_buffers(recurse=False):
            if buffer.device.type == "meta":
                kept = name not in old._non_persistent_buffers_set  # pyright: ignore[reportPrivateUsage]
                value = plain_value(old, name, buffer).clone()
                new.register_buffer(name, value, persistent=kept)
    remove_hook_from_module(copied, recurse=True)
    vars(copied).pop("hf_device_map", None)
    tie: Any = getattr(copied, "tie_weights", None)
    if tie is not None:
        tie()


def _hooks(module: nn.Module) -> list[Any]:
    """The accelerate hooks that fetch a module's offloaded tensors when it is called."""
    hook: Any = getattr(module, "_hf_hook", None)
    return [each for each in getattr(hook, "hooks", [hook]) if getattr(each, "offload", False)]
