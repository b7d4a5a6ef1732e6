"""The table of supported model classes. One line adds a family; nothing is imported before use."""

from __future__ import annotations

from everydepth.stream import register_family

_HERE = "everydepth.architectures"


def register_all() -> None:
    """Tell the waist every family. Called once, when `everydepth` is imported."""
    register_family(
        "residual_mlp", f"{_HERE}.residual_mlp:ResidualMLPStream", ["everydepth.ResidualMLP"]
    )
    register_family(
        "resnet",
        f"{_HERE}.resnet:ResNetStream",
        ["everydepth.CifarResNet", "transformers.ResNetForImageClassification"],
    )
    register_family(
        "vit",
        f"{_HERE}.vit:VisionTransformerStream",
        [f"transformers.{name}ForImageClassification" for name in ("ViT", "DeiT", "Beit")],
    )
    register_family(
        "encoder",
        f"{_HERE}.encoder:EncoderStream",
        [
            f"transformers.{name}For{task}"
            for name in ("Bert", "Roberta", "DistilBert")
            for task in ("SequenceClassification", "MaskedLM")
        ],
    )
    register_family(
        "decoder",
        f"{_HERE}.decoder:DecoderStream",
        [
            f"transformers.{name}For{task}"
            for name in ("GPT2", "GPTNeoX", "OPT", "Llama", "Mistral", "Qwen2", "Qwen3")
            for task in ("SequenceClassification", "CausalLM")
        ]
        + ["transformers.GPT2LMHeadModel"],
    )
    register_family("detr", f"{_HERE}.detr:DetrStream", ["transformers.DetrForObjectDetection"])
    register_family(
        "clip",
        f"{_HERE}.clip:ClipStream",
        [
            "transformers.CLIPModel",
            "transformers.CLIPVisionModelWithProjection",
            "transformers.CLIPTextModelWithProjection",
            "transformers.CLIPForImageClassification",
        ],
    )
