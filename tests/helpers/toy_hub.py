"""The Hugging Face hub at toy size: random rows and random weights under the published names.

Whatever a paper preset asks the hub for, `toy_hub` answers with a few random rows that have the
columns of the real set, and with a network of the real family whose sizes are cut.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from transformers import PreTrainedModel
from transformers.models.auto import modeling_auto

from everydepth.data.byte_tokens import byte_tokenizer

ROWS, SIDE = 24, 32
CLASSES = {"cifar10": 10, "cifar100": 100, "fashion": 10, "imagenet": 1000, "places365": 365}
CLASSES |= {"utk": 5, "emotion": 6, "newsgroups": 20, "tweet_topic": 6, "glue": 2}
GLUE = {
    "mnli": ("premise", "hypothesis"),
    "qnli": ("question", "sentence"),
    "qqp": ("question1", "question2"),
    "mrpc": ("sentence1", "sentence2"),
    "rte": ("sentence1", "sentence2"),
}
COLUMNS = {
    "wikitext": ("text",),
    "alpaca": ("instruction", "input", "output", "text"),
    "dolly": ("instruction", "context", "response", "category"),
    "gsm8k": ("question", "answer"),
}
FAMILIES = {"qwen2": "qwen2", "smollm": "llama", "llama": "llama", "gpt2": "gpt2", "bert": "bert"}
FAMILIES |= {"simcse": "bert", "vit": "vit", "deit": "vit", "beit": "beit", "clip": "clip"}
FAMILIES |= {"resnet": "resnet"}
IMAGENET = 1000  # classes of a pretrained image model
# Of a config: name -> the most it may be.
SIZES = {"hidden_size": 24, "intermediate_size": 24, "num_hidden_layers": 3, "n_layer": 3}
SIZES |= {"num_attention_heads": 2, "num_key_value_heads": 2, "n_embd": 24, "n_head": 2}
SIZES |= {"head_dim": 12, "projection_dim": 24, "embedding_size": 8, "vocab_size": 512}
SIZES |= {"d_model": 24, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "num_queries": 4}
SIZES |= {"encoder_layers": 1, "decoder_layers": 2, "encoder_attention_heads": 2}
SIZES |= {"decoder_attention_heads": 2}


def toy_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the test ends."""
    import datasets

    monkeypatch.setattr(datasets, "load_dataset", _rows)
    init = PreTrainedModel.__init__

    def cut(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        _shrink(config)
        init(self, config, *args, **kwargs)

    monkeypatch.setattr(PreTrainedModel, "__init__", cut)
    autos = [kind for name, kind in vars(modeling_auto).items() if name.startswith("AutoModel")]
    for kind in (PreTrainedModel, *autos):  # each has a copy of its own
        monkeypatch.setattr(kind, "from_pretrained", classmethod(_loader(kind.from_pretrained)))
    real = transformers.AutoTokenizer.from_pretrained

    def tokenizer(name: Any, *args: Any, **kwargs: Any) -> Any:
        return real(name, *args, **kwargs) if Path(name).exists() else byte_tokenizer()

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", tokenizer)


def _of(known: dict[str, Any], name: str) -> Any:
    found = [value for part, value in known.items() if part in name.lower()]
    assert found, f"the toy hub knows nothing like {name}"
    return found[-1]


def _loader(real: Any) -> Any:
    def load(cls: type, name: Any, *args: Any, **kwargs: Any) -> Any:
        if Path(name).exists():
            return real.__func__(cls, name, *args, **kwargs)
        kept = {k: v for k, v in kwargs.items() if k in ("num_labels", "pad_token_id")}
        family = _of(FAMILIES, str(name))
        if family in ("vit", "beit"):
            kept.setdefault("num_labels", IMAGENET)
        usual = transformers.AutoConfig.for_model(family)
        sizes = {name: most for name, most in SIZES.items() if _larger(usual, name, most)}
        config = transformers.AutoConfig.for_model(family, **sizes, **kept)
        build = getattr(cls, "from_config", None)
        return cls(config) if build is None else build(config)

    return load


def _larger(config: Any, name: str, most: int) -> bool:
    value = getattr(config, name, None)
    return isinstance(value, int) and value > most


def _shrink(config: Any) -> None:
    for name, most in SIZES.items():
        if _larger(config, name, most):
            setattr(config, name, most)
    if isinstance(getattr(config, "hidden_sizes", None), list):
        config.hidden_sizes, config.depths = [8] * len(config.depths), [1] * len(config.depths)
    for inner in ("text_config", "vision_config", "backbone_config"):
        if getattr(config, inner, None) is not None:
            _shrink(getattr(config, inner))
    if isinstance(getattr(config, "layer_types", None), list) and hasattr(
        config, "num_hidden_layers"
    ):
        config.layer_types = config.layer_types[: config.num_hidden_layers]
    for end in ("bos_token_id", "eos_token_id", "pad_token_id"):
        if isinstance(getattr(config, end, None), int):
            setattr(config, end, min(getattr(config, end), 256))


def _rows(name: str, task: str | None = None, *, split: str = "train", **_: Any) -> Any:
    """Random rows with the columns of the set."""
    import datasets

    parts = re.findall(r"(?:^|\+)([a-z_0-9]+)", split)
    assert parts, split
    random = np.random.default_rng(len(split))
    text = [f"{word} is good or bad, who knows" for word in random.integers(0, 999, ROWS)]
    for known, columns in COLUMNS.items():
        if known in name:
            return datasets.Dataset.from_dict({c: [t * 8 for t in text] for c in columns})
    if "coco" in name:
        picture = [_picture(random) for _ in range(ROWS)]
        boxes = [{"bbox": [[2.0, 2.0, 20.0, 24.0]], "category": [3]} for _ in range(ROWS)]
        found = datasets.Dataset.from_dict({"image": picture, "objects": boxes})
        return found.cast_column("image", datasets.Image())
    count = 3 if task == "mnli" else _of(CLASSES, name)
    labels = [int(i) for i in np.arange(ROWS) % min(count, 4)]  # several rows of each
    kind = datasets.ClassLabel(names=[f"class {i}" for i in range(count)])
    if any(word in name for word in ("cifar", "fashion", "imagenet", "places", "utk")):
        column = "fine_label" if "cifar100" in name else "label"
        rows = {"image": [_picture(random) for _ in range(ROWS)], column: labels}
        found = datasets.Dataset.from_dict(rows).cast_column("image", datasets.Image())
        return found.cast_column(column, kind)
    columns = GLUE.get(task or "", ("sentence",)) if "glue" in name else ("text",)
    rows = {**dict.fromkeys(columns, text), "label": labels}
    return datasets.Dataset.from_dict(rows).cast_column("label", kind)


def _picture(random: np.random.Generator) -> Any:
    from PIL import Image

    return Image.fromarray(random.integers(0, 255, (SIDE, SIDE, 3), dtype=np.uint8))
