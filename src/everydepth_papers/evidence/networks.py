"""Published networks without their weights, built from the sizes that are known here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from torch import nn

Task = Literal["CausalLM", "ImageClassification", "SequenceClassification"]

# name on the hub -> (type of the config, what differs from its defaults)
SIZES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "google/vit-base-patch16-224": ("vit", {}),
    "facebook/deit-base-patch16-224": ("vit", {}),
    "facebook/deit-small-patch16-224": (
        "vit",
        {"hidden_size": 384, "num_attention_heads": 6, "intermediate_size": 1536},
    ),
    "WinKawaks/vit-tiny-patch16-224": (
        "vit",
        {"hidden_size": 192, "num_attention_heads": 3, "intermediate_size": 768},
    ),
    "microsoft/beit-base-patch16-224": ("beit", {}),
    "openai-community/gpt2": ("gpt2", {}),
    "openai-community/gpt2-medium": ("gpt2", {"n_embd": 1024, "n_layer": 24, "n_head": 16}),
    "HuggingFaceTB/SmolLM2-135M": (
        "llama",
        {
            "vocab_size": 49_152,
            "hidden_size": 576,
            "intermediate_size": 1536,
            "num_hidden_layers": 30,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "tie_word_embeddings": True,
        },
    ),
    "Qwen/Qwen2-0.5B": (
        "qwen2",
        {
            "vocab_size": 151_936,
            "hidden_size": 896,
            "intermediate_size": 4864,
            "num_hidden_layers": 24,
            "num_attention_heads": 14,
            "num_key_value_heads": 2,
            "tie_word_embeddings": True,
        },
    ),
}


def unloaded(name: str, task: Task, **settings: Any) -> nn.Module:
    """A network of the hub with random weights; nothing is downloaded.

    >>> sum(p.numel() for p in unloaded("openai-community/gpt2", "CausalLM").parameters())
    124439808
    """
    import transformers

    kind, sizes = SIZES[name]
    config = transformers.AutoConfig.for_model(kind, **sizes, **settings)
    return getattr(transformers, f"AutoModelFor{task}").from_config(config)


def hub_models(
    cells: Iterable[Mapping[str, Any]], task: Task, **settings: Any
) -> dict[str, Callable[[], nn.Module]]:
    """`Preset.models` of cells whose `model` is a name on the hub."""
    return {str(c["name"]): partial(unloaded, str(c["model"]), task, **settings) for c in cells}
