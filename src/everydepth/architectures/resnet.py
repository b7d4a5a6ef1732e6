"""ResNets: a forward pass does not show that their readout at any depth is one affine map.

Stages change the shape, so the readout follows the skips to the last stage.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 (its usual name)

from everydepth.architectures.cifar_resnet import CifarResNet, CifarResNetBlock, PadShortcut
from everydepth.errors import UnsupportedModelError
from everydepth.stream import (
    Block,
    Branch,
    ResidualStream,
    block_copy,
    copy_without,
    lengthened,
    name_stages,
    sample_task,
    unwrapped,
)


@dataclass(frozen=True)
class Affine:
    """A map `x -> x weight^T + bias` on channels."""

    weight: Tensor
    bias: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)

    def after(self, first: Affine) -> Affine:
        """The map that applies `first`, then this one."""
        return Affine(self.weight @ first.weight, self(first.bias))


@final
class ResNetStream(ResidualStream):
    """`z_l = W S_L ... S_{l+1} h_l`: the rest of the network with its branches silent.

    A skip between stages is a strided 1x1 convolution and a batch norm. In the readout, it acts on
    the average over all positions instead of every other one, and its batch norm uses running
    statistics. The readout is then one affine map on pooled channels, which folds into the head of
    a stock model, and does not affect the batch statistics of the main path.
    """

    inputs = ("pixel_values",)

    def __init__(self, model: nn.Module) -> None:
        self.model, self.task = model, sample_task(model)
        self._inner: Any = unwrapped(model)
        self._own = isinstance(self._inner, CifarResNet)
        stages = _own_stages(self._inner) if self._own else _stages(self._inner)
        describe = _own_block if self._own else _block
        self._layers = [(s, layer) for s, stage in enumerate(stages) for layer in stage]
        self._blocks = tuple(describe(layer) for _, layer in self._layers)
        self._final_norm: nn.BatchNorm2d | None = (
            self._inner.norm if self._own and self._inner.config.preactivation else None
        )

    @property
    def blocks(self) -> Sequence[Block]:
        return self._blocks

    @property
    def head(self) -> nn.Module:
        return self._inner.linear if self._own else self._inner.classifier[1]

    def feature(self, h: Tensor, depth: int, batch: Mapping[str, Any]) -> Tensor:
        """The pooled state, mapped to the channels of the last stage."""
        if self._final_norm is not None:
            return self._preactivation_feature(h, depth)
        x = F.adaptive_avg_pool2d(h, 1).flatten(1)
        for affine in self._remaining(depth):
            x = affine(x)
        return x

    def normed(self, feature: Tensor, depth: int) -> Tensor:
        return feature

    def fused(self, depth: int) -> Affine:
        """`Phi_l`: the affine map from the pooled state to the logits."""
        if self._final_norm is not None:
            raise UnsupportedModelError(
                "a pre-activation ResNet reads out through a ReLU, so its readout is not one "
                "affine map; `at_depth` keeps the ReLU and fuses what comes before it"
            )
        head: Any = self.head
        total = Affine(head.weight, head.bias)
        for affine in reversed(self._remaining(self.check_depth(depth))):
            total = total.after(affine)
        return total

    def truncated(self, depth: int, *, share: bool) -> nn.Module:
        return self.ended(self.check_depth(depth, lowest=1), (), (), share=share)

    def leads(self, depth: int) -> Sequence[int]:
        later = enumerate(self._blocks[depth:], depth + 1)
        return [number for number, block in later if block.branches[0].skip is not None]

    def ended(
        self, depth: int, blocks: Sequence[nn.Module], likes: Sequence[int], *, share: bool
    ) -> nn.Module:
        dropped = [layer for _, layer in self._layers[depth:]]
        small: Any = copy_without(self._inner, dropped, share=share)
        new = blocks if share else [block_copy(block) for block in blocks]
        stages = (_own_stages if self._own else _stages)(small)
        kept: list[list[nn.Module]] = []
        for number, stage in enumerate(stages):
            inside = sum(s == number for s, _ in self._layers[:depth])
            homes = [self._layers[like - 1][0] for like in likes]
            more = [block for block, home in zip(new, homes, strict=True) if home == number]
            kept += [[*stage[:inside], *more]] if inside or more else []
        (_set_own_stages if self._own else _set_stages)(small, kept)
        remaining = self._remaining(likes[-1] if likes else depth)
        if remaining and self._final_norm is None:
            _set_head(small.linear if self._own else small.classifier[1], self.fused(depth))
        elif remaining:
            total = remaining[0]
            for affine in remaining[1:]:
                total = affine.after(total)
            small.transition = _convolution(total)
            small.config.transition = True
        return small

    def inserted(self, after: int, block: nn.Module, like: int, *, share: bool) -> nn.Module:
        stage = self._layers[like - 1][0]
        before = sum(s < stage for s, _ in self._layers)
        holder: Any = self._inner if self._own else self._inner.resnet.encoder.stages[stage]
        layers = getattr(holder, f"layer{stage + 1}" if self._own else "layers")
        inside = after - before
        return lengthened(self._inner, layers, inside, block, like - before, share=share)

    def block_like(self, number: int) -> nn.Module | None:
        layer: Any = self._layers[number - 1][1]
        config = self._inner.config
        head = next(layer.parameters())
        if self._own:
            width = layer.conv2.out_channels
            return CifarResNetBlock(width, width, 1, config).to(head.device, head.dtype)
        width = layer.layer[-1].convolution.out_channels
        built = type(layer)(width, width, activation=config.hidden_act)
        return built.to(head.device, head.dtype)

    def _remaining(self, depth: int) -> list[Affine]:
        """The skips after this depth that are not identities."""
        skips = [block.branches[0].skip for block in self._blocks[depth:]]
        head: Any = self.head
        return [_affine(skip, head.weight) for skip in skips if skip is not None]

    def _preactivation_feature(self, h: Tensor, depth: int) -> Tensor:
        remaining = self._remaining(depth)
        if remaining:
            x = h.movedim(1, -1)
            for affine in remaining:
                x = affine(x)
            h = x.movedim(-1, 1)
        h = self._inner.transition(h)
        norm: Any = self._final_norm
        # Only the model's own pass updates running statistics.
        normed = F.batch_norm(
            h, norm.running_mean, norm.running_var, norm.weight, norm.bias, eps=norm.eps
        )
        return F.adaptive_avg_pool2d(F.relu(normed), 1).flatten(1)


def _own_stages(model: Any) -> list[list[nn.Module]]:
    return [list(stage) for stage in model.stages()]


def _stages(model: Any) -> list[list[nn.Module]]:
    return [list(stage.layers) for stage in model.resnet.encoder.stages]


def _own_block(layer: Any) -> Block:
    skip = None if isinstance(layer.shortcut, nn.Identity) else layer.shortcut
    if layer.preactivation:
        branch = Branch(kind="conv", entry=layer.bn1, out=layer.conv2, proj=layer.conv2, skip=skip)
    else:
        branch = Branch(
            kind="conv",
            entry=layer.conv1,
            out=layer.bn2,
            proj=layer.bn2,
            mixing=layer.conv2,
            skip=skip,
            post=layer.relu,
        )
    return Block(module=layer, branches=(branch,))


def _block(layer: Any) -> Block:
    branch = Branch(
        kind="conv",
        entry=layer.layer[0],
        out=layer.layer,
        # Zeroing the norm after the convolution silences the branch in either mode.
        proj=layer.layer[-1].normalization,
        mixing=layer.layer[-1].convolution,
        skip=None if isinstance(layer.shortcut, nn.Identity) else layer.shortcut,
        post=layer.activation,
    )
    return Block(module=layer, branches=(branch,))


def _affine(skip: Any, like: Tensor) -> Affine:
    """A skip as an affine map on channels, with the running statistics of its batch norm."""
    if isinstance(skip, PadShortcut):
        matrix = skip.matrix().to(like)
        return Affine(matrix, torch.zeros_like(matrix[:, 0]))
    convolution, norm = (
        (skip.convolution, skip.normalization) if hasattr(skip, "convolution") else skip
    )
    scale = norm.weight * torch.rsqrt(norm.running_var + norm.eps)
    weight = convolution.weight.flatten(1) * scale[:, None]
    return Affine(weight, norm.bias - norm.running_mean * scale)


def _convolution(affine: Affine) -> nn.Conv2d:
    out, inside = affine.weight.shape
    convolution = nn.Conv2d(inside, out, 1, device=affine.weight.device, dtype=affine.weight.dtype)
    with torch.no_grad():
        convolution.weight.copy_(affine.weight[:, :, None, None])
        assert convolution.bias is not None
        convolution.bias.copy_(affine.bias)
    return convolution


def _set_head(head: nn.Linear, affine: Affine) -> None:
    out, inside = affine.weight.shape
    head.in_features, head.out_features = inside, out
    head.weight = nn.Parameter(affine.weight.detach().clone())
    head.bias = nn.Parameter(affine.bias.detach().clone())


def _set_own_stages(model: Any, stages: list[list[nn.Module]]) -> None:
    config = model.config
    for number in range(len(config.blocks_per_stage)):
        delattr(model, f"layer{number + 1}")
    for number, layers in enumerate(stages):
        setattr(model, f"layer{number + 1}", nn.Sequential(*layers))
    config.widths = list(config.widths[: len(stages)])
    config.blocks_per_stage = [len(layers) for layers in stages]


def _set_stages(model: Any, stages: list[list[nn.Module]]) -> None:
    encoder, config = model.resnet.encoder, model.config
    encoder.stages = encoder.stages[: len(stages)]
    for stage, layers in zip(encoder.stages, stages, strict=True):
        stage.layers = nn.Sequential(*layers)
    config.depths = [len(layers) for layers in stages]
    config.hidden_sizes = list(config.hidden_sizes[: len(stages)])
    name_stages(config, len(stages))
