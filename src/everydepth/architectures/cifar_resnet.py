"""The 6n+2 ResNet for small images (Depth Expansion, App. N.1), post- or pre-activation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 (its usual name)
from transformers import PreTrainedConfig, PreTrainedModel
from transformers import initialization as init
from transformers.modeling_outputs import ImageClassifierOutputWithNoAttention

from everydepth.errors import SettingError


class CifarResNetConfig(PreTrainedConfig):
    """Sizes of a `CifarResNet`.

    blocks_per_stage, widths: one number per stage; the first block of each later stage halves the
        image.
    preactivation: norm and ReLU before each convolution, and before the readout.
    shortcut: between stages, "projection" (1x1 convolution and batch norm) or "pad" (every other
        pixel, new channels zero, no parameters).
    transition: a 1x1 convolution to readout_width before the last norm, in a cut pre-activation
        network.
    """

    model_type = "everydepth_cifar_resnet"

    def __init__(
        self,
        *,
        blocks_per_stage: Sequence[int] = (3, 3, 3),
        widths: Sequence[int] = (16, 32, 64),
        preactivation: bool = False,
        shortcut: Literal["projection", "pad"] = "projection",
        num_channels: int = 3,
        transition: bool = False,
        readout_width: int | None = None,
        **kwargs: Any,
    ) -> None:
        if len(blocks_per_stage) != len(widths):
            raise SettingError(
                f"{len(blocks_per_stage)} stages in blocks_per_stage, {len(widths)} in widths; "
                "give one number per stage in both"
            )
        if shortcut not in ("projection", "pad"):
            raise SettingError(f"shortcut {shortcut!r}; use 'projection' or 'pad'")
        self.blocks_per_stage = list(blocks_per_stage)
        self.widths = list(widths)
        self.preactivation = preactivation
        self.shortcut = shortcut
        self.num_channels = num_channels
        self.transition = transition
        self.readout_width = self.widths[-1] if readout_width is None else readout_width
        super().__init__(**kwargs)

    @classmethod
    def of_depth(cls, layers: int, *, width: int = 16, **kwargs: Any) -> CifarResNetConfig:
        """The 6n+2 network: `layers` = 20, 32, 44, 56, ... and stages of width c, 2c, 4c."""
        n, rest = divmod(layers - 2, 6)
        if rest or n < 1:
            near = 6 * max(n, 1) + 2
            raise SettingError(
                f"layers={layers} is not 6n+2; use {near} or {near + 6}, or set blocks_per_stage"
            )
        return cls(blocks_per_stage=(n, n, n), widths=(width, 2 * width, 4 * width), **kwargs)


class PadShortcut(nn.Module):
    """Every other pixel; new channels are zero, half of them before and half after the old ones."""

    def __init__(self, channels_in: int, channels_out: int, stride: int) -> None:
        super().__init__()
        self.stride = stride
        self.channels_in = channels_in
        self.before = (channels_out - channels_in) // 2
        self.after = channels_out - channels_in - self.before

    def forward(self, x: Tensor) -> Tensor:
        x = x[:, :, :: self.stride, :: self.stride]
        return F.pad(x, (0, 0, 0, 0, self.before, self.after))

    def matrix(self) -> Tensor:
        """Its effect on the channels of one pixel."""
        return F.pad(torch.eye(self.channels_in), (0, 0, self.before, self.after))


class CifarResNetBlock(nn.Module):
    """Two 3x3 convolutions. Post-activation: `relu(skip(x) + f(x))`; pre-: `skip(x) + f(x)`."""

    def __init__(
        self, channels_in: int, channels_out: int, stride: int, config: CifarResNetConfig
    ) -> None:
        super().__init__()
        self.preactivation = config.preactivation
        self.conv1 = nn.Conv2d(channels_in, channels_out, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels_in if self.preactivation else channels_out)
        self.conv2 = nn.Conv2d(channels_out, channels_out, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels_out)
        self.relu = nn.ReLU()
        if stride == 1 and channels_in == channels_out:
            self.shortcut = nn.Identity()
        elif config.shortcut == "pad":
            self.shortcut = PadShortcut(channels_in, channels_out, stride)
        else:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels_in, channels_out, 1, stride, bias=False),
                nn.BatchNorm2d(channels_out),
            )

    def forward(self, x: Tensor) -> Tensor:
        if self.preactivation:
            inner = self.conv1(self.relu(self.bn1(x)))
            return self.shortcut(x) + self.conv2(self.relu(self.bn2(inner)))
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        return self.relu(self.shortcut(x) + out)


class CifarResNet(PreTrainedModel):
    """Stem, stages `layer1`, `layer2`, ..., average pooling and a linear readout."""

    config_class = CifarResNetConfig
    main_input_name = "pixel_values"

    def __init__(self, config: CifarResNetConfig) -> None:
        super().__init__(config)
        first, pre = config.widths[0], config.preactivation
        self.conv1 = nn.Conv2d(config.num_channels, first, 3, padding=1, bias=False)
        self.bn1 = nn.Identity() if pre else nn.BatchNorm2d(first)
        channels = first
        for number, (blocks, width) in enumerate(
            zip(config.blocks_per_stage, config.widths, strict=True)
        ):
            stage: list[nn.Module] = []
            for i in range(blocks):
                stride = 2 if number > 0 and i == 0 else 1
                stage.append(CifarResNetBlock(channels, width, stride, config))
                channels = width
            setattr(self, f"layer{number + 1}", nn.Sequential(*stage))
        readout = config.readout_width
        self.transition = nn.Conv2d(channels, readout, 1) if config.transition else nn.Identity()
        self.norm = nn.BatchNorm2d(readout) if pre else nn.Identity()
        self.linear = nn.Linear(readout if pre else channels, cast(int, config.num_labels))
        self.post_init()

    def _init_weights(self, module: Any) -> None:
        if isinstance(module, nn.Conv2d):
            init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            if module.bias is not None:
                init.zeros_(module.bias)
        elif isinstance(module, nn.Linear):
            bound = module.in_features**-0.5
            init.uniform_(module.weight, -bound, bound)
            init.uniform_(module.bias, -bound, bound)
        elif isinstance(module, nn.BatchNorm2d):
            init.ones_(module.weight)
            init.zeros_(module.bias)
            for buffer in (module.running_mean, module.num_batches_tracked):
                init.zeros_(cast(Tensor, buffer))
            init.ones_(cast(Tensor, module.running_var))

    def stages(self) -> list[nn.Sequential]:
        """The stages, in order."""
        count = len(self.config.blocks_per_stage)
        return [getattr(self, f"layer{number + 1}") for number in range(count)]

    def forward(
        self, pixel_values: Tensor, labels: Tensor | None = None
    ) -> ImageClassifierOutputWithNoAttention:
        h = self.conv1(pixel_values)
        if not self.config.preactivation:
            h = F.relu(self.bn1(h))
        for stage in self.stages():
            h = stage(h)
        if self.config.preactivation:
            h = F.relu(self.norm(self.transition(h)))
        logits = self.linear(F.adaptive_avg_pool2d(h, 1).flatten(1))
        loss: Any = None if labels is None else F.cross_entropy(logits, labels)
        return ImageClassifierOutputWithNoAttention(loss=loss, logits=logits)
