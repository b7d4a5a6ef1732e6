"""The model classes with an architecture file, imported on first use; all others are discovered."""

from __future__ import annotations

from everydepth.stream.registry import Family

_HERE = "everydepth.architectures"


FAMILIES = (
    Family("residual_mlp", f"{_HERE}.residual_mlp:ResidualMLPStream", ("everydepth.ResidualMLP",)),
    Family(
        "resnet",
        f"{_HERE}.resnet:ResNetStream",
        ("everydepth.CifarResNet", "transformers.ResNetForImageClassification"),
    ),
    Family("detr", f"{_HERE}.detr:DetrStream", ("transformers.DetrForObjectDetection",)),
    Family(
        "clip",
        f"{_HERE}.clip:ClipStream",
        (
            "transformers.CLIPModel",
            "transformers.CLIPVisionModelWithProjection",
            "transformers.CLIPTextModelWithProjection",
        ),
    ),
)
