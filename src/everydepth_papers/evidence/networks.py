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


# name on the hub -> what a cell says of it: columns, splits, the class with wrong labels. `parts`:
# shares of the rows for training, validation and test (two, where there is a test split).
NOISY_SETS: Mapping[str, Mapping[str, Any]] = {
    "dair-ai/emotion": {"text": "text", "label": "label", "of_class": 5},
    "SetFit/20_newsgroups": {
        "text": "text",
        "label": "label",
        "train_split": "train+test",
        "parts": [0.7, 0.2, 0.1],
        "of_class": 1,
    },
    "cardiffnlp/tweet_topic_single": {
        "text": "text",
        "label": "label",
        "train_split": "train_2020",
        "test_split": "test_2020",
        "of_class": 3,
    },
    "uoft-cs/cifar10": {"parts": [0.8, 0.2], "of_class": 9},
    "uoft-cs/cifar100": {"label": "fine_label", "parts": [0.8, 0.2], "of_class": 16},
    "dpdl-benchmark/places365-mini-sample-hard": {"of_class": 9},
    "nlphuji/utk_faces": {"parts": [0.65, 0.15, 0.2], "of_class": 2},
}


def noisy_set(name: str) -> dict[str, Any]:
    """A data set of Residual Relay as a cell names it, split as App. D.1 says.

    >>> noisy_set("cardiffnlp/tweet_topic_single")["train_split"]  # 2,858 rows
    'train_2020'
    """
    return {"data": name, **NOISY_SETS[name]}


def unloaded(name: str, task: Task, **settings: Any) -> nn.Module:
    """A network of the hub with random weights; nothing is downloaded.

    >>> sum(p.numel() for p in unloaded("openai-community/gpt2", "CausalLM").parameters())
    124439808
    """
    import transformers

    kind, sizes = SIZES[name]
    config = transformers.AutoConfig.for_model(kind, **sizes, **settings)
    return getattr(transformers, f"AutoModelFor{task}").from_config(config)


def vit(
    *,
    depth: int,
    width: int,
    heads: int,
    size: int,
    patch: int,
    channels: int = 3,
    classes: int = 10,
    inner: int | None = None,
) -> nn.Module:
    """A vision transformer of these sizes. inner: width of its MLPs; four times `width` if None.

    >>> sum(p.numel() for p in vit(depth=12, width=192, heads=3, size=32, patch=4).parameters())
    5362378
    """
    from transformers import ViTConfig, ViTForImageClassification

    labels: dict[str, Any] = {"num_labels": classes}  # of every config, and declared by none
    return ViTForImageClassification(
        ViTConfig(
            image_size=size,
            patch_size=patch,
            num_channels=channels,
            hidden_size=width,
            num_hidden_layers=depth,
            num_attention_heads=heads,
            intermediate_size=4 * width if inner is None else inner,
            **labels,
        )
    )


def hub_models(
    cells: Iterable[Mapping[str, Any]], task: Task, **settings: Any
) -> dict[str, Callable[[], nn.Module]]:
    """`Preset.models` of cells whose `model` is a name on the hub."""
    return {str(c["name"]): partial(unloaded, str(c["model"]), task, **settings) for c in cells}
