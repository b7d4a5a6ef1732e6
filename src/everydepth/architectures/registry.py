"""The table of supported model classes. One entry adds a family; nothing is imported before use."""

from __future__ import annotations

from everydepth.stream.registry import Family

_HERE = "everydepth.architectures"


def _transformers(names: tuple[str, ...], tasks: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(f"transformers.{name}For{task}" for name in names for task in tasks)


FAMILIES = (
    Family("residual_mlp", f"{_HERE}.residual_mlp:ResidualMLPStream", ("everydepth.ResidualMLP",)),
    Family(
        "resnet",
        f"{_HERE}.resnet:ResNetStream",
        ("everydepth.CifarResNet", "transformers.ResNetForImageClassification"),
    ),
    Family(
        "vit",
        f"{_HERE}.vit:VisionTransformerStream",
        _transformers(("ViT", "DeiT", "Beit"), ("ImageClassification",)),
    ),
    Family(
        "encoder",
        f"{_HERE}.encoder:EncoderStream",
        _transformers(("Bert", "Roberta", "DistilBert"), ("SequenceClassification", "MaskedLM")),
    ),
    Family(
        "decoder",
        f"{_HERE}.decoder:DecoderStream",
        (
            "transformers.GPT2LMHeadModel",
            "transformers.GPT2ForSequenceClassification",
            *_transformers(
                ("GPTNeoX", "OPT", "Llama", "Mistral", "Qwen2", "Qwen3"),
                ("CausalLM", "SequenceClassification"),
            ),
        ),
    ),
    Family("detr", f"{_HERE}.detr:DetrStream", ("transformers.DetrForObjectDetection",)),
    Family(
        "clip",
        f"{_HERE}.clip:ClipStream",
        (
            "transformers.CLIPModel",
            "transformers.CLIPVisionModelWithProjection",
            "transformers.CLIPTextModelWithProjection",
            "transformers.CLIPForImageClassification",
        ),
    ),
)
