"""Train low-rank adapters (PEFT) instead of the whole model."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Annotated, Any

from torch import nn

from everydepth.config import Setting, brief, checked
from everydepth.errors import FOREIGN, SettingError
from everydepth.stream import ResidualStream, as_stream, unwrapped
from everydepth.stream.wrapping import untied_by_merging


@checked
def with_lora(model: nn.Module, rank: Annotated[int, Setting(least=1)], **settings: Any) -> Any:
    """The model with a trainable adapter of this rank at every linear map of its blocks.

    The model's own weights are frozen; `model.disable_adapter()` gives the original model. Needs
    peft. settings: fields of PEFT's `LoraConfig`; by default `lora_alpha` is twice the rank.

    >>> from everydepth.training.lora import with_lora
    >>> adapted = with_lora(llama, rank=4)
    >>> {name.split(".")[-2] for name, p in adapted.named_parameters() if p.requires_grad}
    {'default'}
    """
    if find_spec("peft") is None:
        raise SettingError("adapters need peft, which is not installed; pip install peft")
    from peft import LoraConfig, get_peft_model
    from transformers.pytorch_utils import Conv1D

    stream = as_stream(model)
    inside = {id(part) for block in stream.blocks for part in block.module.modules()}
    wanted = {
        name: part
        for name, part in unwrapped(model).named_modules()
        if id(part) in inside and isinstance(part, nn.Linear | Conv1D)
    }
    given: dict[str, Any] = {
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": list(wanted),
        "fan_in_fan_out": any(isinstance(part, Conv1D) for part in wanted.values()),
        **settings,
    }
    try:
        return get_peft_model(unwrapped(model), LoraConfig(**given))
    except FOREIGN as error:
        asked = brief(settings) if settings else f"rank={rank}"
        raise SettingError(f"PEFT cannot use {asked} here ({error}); see LoraConfig") from error


def check_adapters(stream: ResidualStream) -> None:
    """An error if an adapter would untie a head from its embedding."""
    changed = untied_by_merging(stream.model)
    if changed is not None:
        other = "embedding" if changed == "head" else "head"
        raise SettingError(
            f"the adapter changes the {changed} of {stream.name}, which is tied to its {other}; "
            f"merging it would untie them, so leave the {changed} out of target_modules"
        )
