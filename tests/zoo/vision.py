"""One small model of every timm module, and torchvision's classifiers, without their weights."""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

ROWS = 2
# `make slow` puts both here: beside torch for CPUs torchvision lacks its compiled operators, and
# libraries that find it among the installed packages would try to use them.
BESIDE = Path(sys.prefix) / "zoo"
_OPERATORS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "roi_align(Tensor input, Tensor rois, float spatial_scale, SymInt pooled_height, "
    "SymInt pooled_width, int sampling_ratio, bool aligned) -> Tensor",
    "_roi_align_backward(Tensor grad, Tensor rois, float spatial_scale, SymInt pooled_height, "
    "SymInt pooled_width, SymInt batch_size, SymInt channels, SymInt height, SymInt width, "
    "int sampling_ratio, bool aligned) -> Tensor",
    "ps_roi_align(Tensor input, Tensor rois, float spatial_scale, SymInt pooled_height, "
    "SymInt pooled_width, int sampling_ratio) -> (Tensor, Tensor)",
    "_ps_roi_align_backward(Tensor grad, Tensor rois, Tensor channel_mapping, "
    "float spatial_scale, SymInt pooled_height, SymInt pooled_width, int sampling_ratio, "
    "SymInt batch_size, SymInt channels, SymInt height, SymInt width) -> Tensor",
    "roi_pool(Tensor input, Tensor rois, float spatial_scale, SymInt pooled_height, "
    "SymInt pooled_width) -> (Tensor, Tensor)",
    "_roi_pool_backward(Tensor grad, Tensor rois, Tensor argmax, float spatial_scale, "
    "SymInt pooled_height, SymInt pooled_width, SymInt batch_size, SymInt channels, "
    "SymInt height, SymInt width) -> Tensor",
    "ps_roi_pool(Tensor input, Tensor rois, float spatial_scale, SymInt pooled_height, "
    "SymInt pooled_width) -> (Tensor, Tensor)",
    "_ps_roi_pool_backward(Tensor grad, Tensor rois, Tensor channel_mapping, "
    "float spatial_scale, SymInt pooled_height, SymInt pooled_width, SymInt batch_size, "
    "SymInt channels, SymInt height, SymInt width) -> Tensor",
    "deform_conv2d(Tensor input, Tensor weight, Tensor offset, Tensor mask, Tensor bias, "
    "SymInt stride_h, SymInt stride_w, SymInt pad_h, SymInt pad_w, SymInt dilation_h, "
    "SymInt dilation_w, SymInt groups, SymInt offset_groups, bool use_mask) -> Tensor",
    "_deform_conv2d_backward(Tensor grad, Tensor input, Tensor weight, Tensor offset, "
    "Tensor mask, Tensor bias, SymInt stride_h, SymInt stride_w, SymInt pad_h, SymInt pad_w, "
    "SymInt dilation_h, SymInt dilation_w, SymInt groups, SymInt offset_groups, bool use_mask) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
_library: list[Any] = []


def libraries() -> None:
    """Make timm and torchvision importable, with operators that are known but cannot run."""
    if _library:
        return
    if BESIDE.is_dir():
        sys.path.append(str(BESIDE))
    library = torch.library.Library("torchvision", "DEF")
    for schema in _OPERATORS:
        if not hasattr(torch.ops.torchvision, schema.partition("(")[0]):
            library.define(schema)
    _library.append(library)


@dataclass(frozen=True)
class Vision:
    """One model of a library, by the name under which it is made."""

    library: str
    model: str
    size: int

    @property
    def name(self) -> str:
        return f"{self.library}:{self.model}"

    def make(self) -> tuple[nn.Module, dict[str, Tensor]]:
        """The model with random weights in eval mode, and two images."""
        torch.manual_seed(0)
        if self.library == "timm":
            model, size = _small_timm(self.model, self.size)
        else:
            models = importlib.import_module("torchvision.models")
            model, size = models.get_model(self.model, weights=None, num_classes=5), self.size
        model.eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if not bool(parameter.any()):
                    parameter.normal_(std=0.02)
        return model, {"x": torch.randn(ROWS, _channels(model), size, size)}


def _channels(model: nn.Module) -> int:
    known = getattr(model, "default_cfg", None) or {}
    return known["input_size"][0] if known.get("input_size") else 3


def _small_timm(name: str, own: int) -> tuple[nn.Module, int]:
    """The model for the smallest images that it takes, of many equal blocks the first."""
    create = importlib.import_module("timm").create_model
    sizes = sorted({64, 96, 128, own})
    for shrink in (_thinned, _whole):
        try:
            model = shrink(create(name, num_classes=5, img_size=sizes[0]))
            made = ((size, _sized(create, name, size, shrink)) for size in sizes[1:])
            candidates = chain([(sizes[0], model)], made)
        except TypeError:  # it is not made for one size, so one model serves all
            model = shrink(create(name, num_classes=5))
            candidates = ((size, model) for size in sizes)
        except _REFUSED:
            candidates = ((size, _sized(create, name, size, shrink)) for size in sizes[1:])
        for size, made in candidates:
            if made is not None and _runs(made, size):
                return made, size
    raise ValueError(f"{name} takes images of none of these sizes: {sizes}")


_REFUSED = (RuntimeError, AssertionError, ValueError, IndexError)


def _sized(create: Any, name: str, size: int, shrink: Any) -> nn.Module | None:
    try:
        return shrink(create(name, num_classes=5, img_size=size))
    except _REFUSED:
        return None


def _whole(model: nn.Module) -> nn.Module:
    return model


def _runs(model: nn.Module, size: int) -> bool:
    try:
        with torch.no_grad():
            model.eval()(torch.randn(1, _channels(model), size, size))
    except _REFUSED:
        return False
    return True


def _thinned(model: nn.Module) -> nn.Module:
    """The same with at most two of the equal modules that follow one another in a list."""
    for held in list(model.modules()):
        if isinstance(held, nn.ModuleList | nn.Sequential):
            kinds = [(type(m), [p.shape for p in m.parameters()]) for m in held]
            for place in range(len(held) - 1, 1, -1):
                if kinds[place][1] and kinds[place] == kinds[place - 1] == kinds[place - 2]:
                    del held[place]
    return model


def torchvision_classifiers() -> list[Vision]:
    """The classifiers with residual connections, the smallest of each kind."""
    names = (
        "resnet18", "resnet50", "resnext50_32x4d", "wide_resnet50_2", "regnet_y_400mf",
        "regnet_x_400mf", "efficientnet_b0", "efficientnet_v2_s", "convnext_tiny", "swin_t",
        "swin_v2_t", "vit_b_16", "maxvit_t", "mobilenet_v2", "mobilenet_v3_small",
        "mobilenet_v3_large", "mnasnet0_5",
    )  # fmt: skip
    return [
        Vision("torchvision", name, 224 if name in ("vit_b_16", "maxvit_t") else 96)
        for name in names
    ]


# How timm calls its small models, the smallest first.
_SMALL = (
    "test_", "atto", "femto", "pico", "zepto", "nano", "xxt", "xxs", "_xs", "micro", "mini", "t0",
    "s0", "b0", "_050", "tiny", "18", "_s", "small",
)  # fmt: skip


_BARE = "test_efficientnet"  # thumbnails of one block a stage, none of which has a skip


def timm_models() -> list[Vision]:
    """One small model of every timm module, chosen by name; nothing is built for the choice."""
    libraries()
    timm = importlib.import_module("timm")
    found: list[Vision] = []
    for module in timm.list_modules():
        names = [name for name in timm.list_models(module=module) if not name.startswith(_BARE)]
        ranked = sorted(
            names, key=lambda n: (next((i for i, s in enumerate(_SMALL) if s in n), 99), len(n), n)
        )
        cfg = timm.get_pretrained_cfg(ranked[0]) if ranked else None
        size = max(cfg.input_size[-2:]) if cfg is not None and cfg.input_size else 224
        found += [Vision("timm", ranked[0], size)] if ranked else []
    return found
