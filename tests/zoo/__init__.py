"""One tiny random model and batch for every supported class and variant. Nothing is downloaded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers as hf
from torch import Tensor, nn

from everydepth.architectures.cifar_resnet import CifarResNet, CifarResNetConfig
from everydepth.architectures.residual_mlp import ResidualMLP, ResidualMLPConfig

ROWS, TOKENS, VOCABULARY, PAD = 3, 7, 60, 1
SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 48,
}
TEXT = {
    **SIZES,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 32,
    "num_labels": 3,
    "pad_token_id": PAD,
    "bos_token_id": 0,
    "eos_token_id": 2,
}


@dataclass(frozen=True)
class Entry:
    """How to build one model, what it is fed, and what `as_stream` must be told."""

    name: str
    build: Callable[[], nn.Module]
    feed: Callable[[], dict[str, Tensor]]
    options: dict[str, Any] = field(default_factory=dict)

    def make(self, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, dict[str, Tensor]]:
        """A fresh model in eval mode and its batch; batch norms have seen some data."""
        torch.manual_seed(0)
        model, batch = self.build(), self.feed()
        model.train()
        with torch.no_grad():
            model(**batch)
        batch = {k: v.to(dtype) if v.is_floating_point() else v for k, v in batch.items()}
        return model.to(dtype).eval(), batch


def images(size: int = 32) -> Callable[[], dict[str, Tensor]]:
    return lambda: {"pixel_values": torch.randn(ROWS, 3, size, size)}


def text(side: str = "left") -> dict[str, Tensor]:
    """Rows of different lengths, padded on one side."""
    ids = torch.randint(3, VOCABULARY, (ROWS, TOKENS))
    mask = torch.ones_like(ids)
    for row, missing in enumerate((0, 2, 3)):
        where = slice(0, missing) if side == "left" else slice(TOKENS - missing, TOKENS)
        mask[row, where] = 0
    return {"input_ids": ids.masked_fill(mask == 0, PAD), "attention_mask": mask}


def right_padded() -> dict[str, Tensor]:
    return text("right")


def captions() -> dict[str, Tensor]:
    ids = torch.randint(3, VOCABULARY - 1, (ROWS, TOKENS))
    for row, end in enumerate((3, 5, 6)):
        ids[row, end] = VOCABULARY - 1
        ids[row, end + 1 :] = PAD
    return {"input_ids": ids, "attention_mask": (ids != PAD).long()}


def _mlp() -> list[Entry]:
    def entry(norm: bool, skips: bool, regression: bool) -> Entry:
        config = {"norm": norm, "skips": skips, "regression": regression}
        outputs = 2 if regression else 5
        return Entry(
            f"ResidualMLP-norm{norm:d}-skips{skips:d}-regression{regression:d}",
            lambda: ResidualMLP(ResidualMLPConfig(num_outputs=outputs, **config)),
            lambda: {"inputs": torch.randn(ROWS, 2)},
        )

    both = (False, True)
    return [entry(n, s, r) for n in both for s in both for r in both]


def _resnets() -> list[Entry]:
    def own(pre: bool, shortcut: str) -> Entry:
        return Entry(
            f"CifarResNet-{'pre' if pre else 'post'}-{shortcut}",
            lambda: CifarResNet(
                CifarResNetConfig.of_depth(
                    14, width=4, preactivation=pre, shortcut=shortcut, num_labels=7
                )
            ),
            images(),
        )

    def stock(kind: str) -> Entry:
        config = {"embedding_size": 8, "hidden_sizes": [8, 16, 32], "depths": [2, 2, 1]}
        return Entry(
            f"ResNetForImageClassification-{kind}",
            lambda: hf.ResNetForImageClassification(
                hf.ResNetConfig(layer_type=kind, num_labels=5, **config)
            ),
            images(),
        )

    own_variants = [
        own(pre, shortcut) for pre in (False, True) for shortcut in ("projection", "pad")
    ]
    return [*own_variants, stock("basic"), stock("bottleneck")]


def _vision() -> list[Entry]:
    def entry(name: str, label: str = "", **extra: Any) -> Entry:
        model = getattr(hf, f"{name}ForImageClassification")
        config = getattr(hf, f"{name}Config")
        sizes = {**SIZES, "image_size": 32, "patch_size": 8, "num_labels": 10, **extra}
        return Entry(f"{name}{label}", lambda: model(config(**sizes)), images())

    bias = {"use_relative_position_bias": True, "drop_path_rate": 0.1}
    shared = {"use_mean_pooling": False, "use_shared_relative_position_bias": True}
    return [
        entry("ViT"),
        entry("DeiT"),
        entry("Beit", "-mean-pooling", **bias),
        entry("Beit", "-class-token", **shared),
    ]


def _encoders() -> list[Entry]:
    distil = {
        "vocab_size": VOCABULARY,
        "dim": 32,
        "hidden_dim": 48,
        "n_layers": 4,
        "n_heads": 4,
        "pad_token_id": PAD,
        "num_labels": 3,
    }

    def entry(name: str, task: str) -> Entry:
        model, config = getattr(hf, f"{name}For{task}"), getattr(hf, f"{name}Config")
        sizes = distil if name == "DistilBert" else TEXT
        return Entry(f"{name}-{task}", lambda: model(config(**sizes)), right_padded)

    tasks = ("SequenceClassification", "MaskedLM")
    return [entry(name, task) for name in ("Bert", "Roberta", "DistilBert") for task in tasks]


def _decoders() -> list[Entry]:
    llama = {**TEXT, "num_key_value_heads": 2}
    opt = {key: value for key, value in TEXT.items() if key != "intermediate_size"}
    # A window of four tokens is shorter than the batch: blocks get different masks.
    window = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 2}
    variants: list[tuple[str, str, dict[str, Any]]] = [
        ("GPT2", "", TEXT),
        ("GPTNeoX", "-parallel", {**TEXT, "use_parallel_residual": True}),
        ("GPTNeoX", "-serial", {**TEXT, "use_parallel_residual": False}),
        ("OPT", "-prenorm", {**opt, "ffn_dim": 48, "word_embed_proj_dim": 32}),
        (
            "OPT",
            "-postnorm",
            {**opt, "ffn_dim": 48, "word_embed_proj_dim": 16, "do_layer_norm_before": False},
        ),
        ("Llama", "-tied", {**llama, "tie_word_embeddings": True}),
        ("Llama", "-untied", {**llama, "tie_word_embeddings": False}),
        ("Mistral", "-window", {**llama, "sliding_window": 4}),
        ("Qwen2", "-window", {**llama, **window}),
        ("Qwen3", "-window", {**llama, **window, "head_dim": 16}),
    ]

    def entry(name: str, label: str, sizes: dict[str, Any], task: str, side: str) -> Entry:
        lm = "GPT2LMHeadModel" if name == "GPT2" else f"{name}ForCausalLM"
        model = getattr(hf, lm if task == "CausalLM" else f"{name}For{task}")
        config = getattr(hf, f"{name}Config")
        return Entry(
            f"{name}{label}-{task}-{side}", lambda: model(config(**sizes)), lambda: text(side)
        )

    return [
        entry(name, label, sizes, task, side)
        for name, label, sizes in variants
        for task, side in (
            ("CausalLM", "left"),
            ("CausalLM", "right"),
            ("SequenceClassification", "left"),
        )
    ]


def _detr() -> list[Entry]:
    def entry(auxiliary: bool) -> Entry:
        def build() -> nn.Module:
            backbone = hf.ResNetConfig(
                embedding_size=8,
                hidden_sizes=[8, 16],
                depths=[1, 1],
                layer_type="basic",
                out_features=["stage2"],
            )
            config = hf.DetrConfig(
                use_timm_backbone=False,
                use_pretrained_backbone=False,
                backbone=None,
                backbone_config=backbone,
                num_queries=6,
                d_model=32,
                encoder_layers=2,
                decoder_layers=4,
                encoder_attention_heads=4,
                decoder_attention_heads=4,
                encoder_ffn_dim=32,
                decoder_ffn_dim=32,
                auxiliary_loss=auxiliary,
                num_labels=5,
            )
            return hf.DetrForObjectDetection(config)

        return Entry(f"Detr-{'auxiliary' if auxiliary else 'plain'}", build, images(64))

    return [entry(False), entry(True)]


def _clip() -> list[Entry]:
    vision = {**SIZES, "image_size": 32, "patch_size": 8, "projection_dim": 16}
    words = {**TEXT, "num_hidden_layers": 3, "projection_dim": 16, "eos_token_id": VOCABULARY - 1}
    words.pop("num_labels")
    both = {"vision_config": vision, "text_config": words, "projection_dim": 16}

    def pair() -> dict[str, Tensor]:
        return {**images()(), **captions()}

    def model() -> nn.Module:
        return hf.CLIPModel(hf.CLIPConfig(**both))

    return [
        Entry("CLIPModel-vision", model, pair, {"tower": "vision"}),
        Entry("CLIPModel-text", model, pair, {"tower": "text"}),
        Entry(
            "CLIPVision",
            lambda: hf.CLIPVisionModelWithProjection(hf.CLIPVisionConfig(**vision)),
            images(),
        ),
        Entry(
            "CLIPText",
            lambda: hf.CLIPTextModelWithProjection(hf.CLIPTextConfig(**words)),
            captions,
        ),
        Entry(
            "CLIPForImageClassification",
            lambda: hf.CLIPForImageClassification(hf.CLIPConfig(num_labels=4, **both)),
            images(),
        ),
    ]


ENTRIES: dict[str, Entry] = {
    entry.name: entry
    for family in (_mlp, _resnets, _vision, _encoders, _decoders, _detr, _clip)
    for entry in family()
}
# Padding on the other side is another batch for the same class.
MODELS = {name: entry for name, entry in ENTRIES.items() if not name.endswith("-right")}
CAUSAL = {name: entry for name, entry in ENTRIES.items() if "CausalLM" in name}
CLASSIFIERS = {
    name: entry
    for name, entry in ENTRIES.items()
    if not any(
        other in name for other in ("CausalLM", "MaskedLM", "regression1", "Detr", "CLIPModel")
    )
    and name not in ("CLIPVision", "CLIPText")
}
