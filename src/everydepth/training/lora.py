"""Low-rank adapters of PEFT around a model, for training; what is kept of them."""

from __future__ import annotations

import copy
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from torch import nn

from everydepth.errors import SettingError
from everydepth.stream import ResidualStream, as_stream, unwrapped


def with_lora(model: nn.Module, rank: int, **settings: Any) -> Any:
    """The model with an adapter of this rank at every linear map of its blocks, trained alone.

    The model's own weights are frozen; `model.disable_adapter()` is the model as it was. Needs
    peft. settings: of PEFT's `LoraConfig`; by default `lora_alpha` is twice the rank.

    >>> from everydepth.training.lora import with_lora
    >>> adapted = with_lora(llama, rank=4)
    >>> {name.split(".")[-2] for name, p in adapted.named_parameters() if p.requires_grad}
    {'default'}
    """
    if find_spec("peft") is None:
        raise SettingError("adapters need peft, which is not installed; pip install peft")
    if isinstance(rank, bool) or rank < 1:
        raise SettingError(f"rank={rank!r}; use a whole number of 1 or more")
    from peft import LoraConfig, get_peft_model
    from transformers.pytorch_utils import Conv1D

    stream = as_stream(model)
    held = {id(part) for block in stream.blocks for part in block.module.modules()}
    wanted = {
        name: part
        for name, part in unwrapped(model).named_modules()
        if id(part) in held and isinstance(part, nn.Linear | Conv1D)
    }
    given: dict[str, Any] = {
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": list(wanted),
        "fan_in_fan_out": any(isinstance(part, Conv1D) for part in wanted.values()),
        **settings,
    }
    return get_peft_model(unwrapped(model), LoraConfig(**given))


def adapters_of(model: nn.Module) -> Any:
    """The PEFT model, if that is what is trained; else None."""
    inner: Any = model
    while isinstance(inner, nn.Module):
        if type(inner).__module__.partition(".")[0] == "peft":
            return inner
        inner = getattr(inner, "_orig_mod", getattr(inner, "module", None))
    return None


def check_adapters(stream: ResidualStream) -> None:
    """An error if an adapter would untie a head from its embedding."""
    head: Any = stream.head
    if not hasattr(head, "get_base_layer"):
        return
    weight = head.get_base_layer().weight
    embedding: Any = getattr(unwrapped(stream.model), "get_input_embeddings", lambda: None)()
    if embedding is not None and getattr(embedding, "weight", None) is weight:
        raise SettingError(
            f"the adapter changes the head of {stream.name}, which is tied to its embedding: "
            "merged, the two would differ; leave the head out of target_modules"
        )


def save_adapters(model: Any, folder: Path) -> None:
    """In PEFT's own format."""
    model.save_pretrained(str(folder))


def save_merged(model: Any, folder: Path) -> None:
    """A plain model, the adapters added to its weights."""
    copy.deepcopy(model).merge_and_unload().save_pretrained(folder)
