"""Exits across stages: the readout follows the skips."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.zoo import ENTRIES
from torch import Tensor, nn

import everydepth as ed
from everydepth.architectures.cifar_resnet import CifarResNetConfig, PadShortcut
from everydepth.errors import SettingError, UnsupportedModelError
from everydepth.stream.discovery import DiscoveredStream

POST = [name for name in ENTRIES if "ResNet" in name and "-pre-" not in name]
ALL = [name for name in ENTRIES if "ResNet" in name]


def skip_at_every_pixel(skip: Any, h: Tensor) -> Tensor:
    """One skip, module by module, on the map: stride 1 and running statistics."""
    if isinstance(skip, PadShortcut):
        return nn.functional.pad(h, (0, 0, 0, 0, skip.before, skip.after))
    convolution, norm = list(skip.children())
    return norm.eval()(nn.functional.conv2d(h, convolution.weight))


def unfused(stream: Any, h: Tensor, depth: int) -> Tensor:
    for block in stream.blocks[depth:]:
        if block.branches[0].skip is not None:
            h = skip_at_every_pixel(block.branches[0].skip, h)
    return stream.head(h.mean((2, 3)))


@pytest.mark.parametrize("name", POST)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_the_fused_readout_is_the_path_taken_module_by_module(
    name: str, dtype: torch.dtype
) -> None:
    model, batch = ENTRIES[name].make(dtype)
    stream: Any = ed.as_stream(model)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-12
    with torch.no_grad():
        states = stream.observe(batch)
        for depth, h in enumerate(states):
            path = unfused(stream, h, depth)
            pooled = h.mean((2, 3))
            torch.testing.assert_close(states.logits(depth), path, rtol=0, atol=tolerance)
            torch.testing.assert_close(stream.fused(depth)(pooled), path, rtol=0, atol=tolerance)


@pytest.mark.parametrize("name", ALL)
def test_an_exit_neither_sees_nor_disturbs_batch_statistics(name: str) -> None:
    model, batch = ENTRIES[name].make()
    stream = ed.as_stream(model)
    model.train()
    with torch.no_grad():
        states = stream.observe(batch)
        before = {n: b.clone() for n, b in model.named_buffers()}
        alone = stream.readout(states[2][:1], 2, {"pixel_values": batch["pixel_values"][:1]})
        together = states.logits(2)[:1]
    torch.testing.assert_close(alone, together)
    for buffer_name, buffer in model.named_buffers():
        assert torch.equal(buffer, before[buffer_name])


@pytest.mark.parametrize("name", ["CifarResNet-post-projection", "CifarResNet-pre-projection"])
def test_an_early_exit_trains_the_skips_it_passes_through(name: str) -> None:
    model, batch = ENTRIES[name].make()
    states = ed.as_stream(model).observe(batch)
    states.logits(1).square().sum().backward()
    assert model.layer3[0].shortcut[0].weight.grad.abs().sum() > 0
    assert model.layer3[0].conv1.weight.grad is None


def test_a_pre_activation_readout_is_not_one_affine_map_and_says_so() -> None:
    model, _ = ENTRIES["CifarResNet-pre-pad"].make()
    stream: Any = ed.as_stream(model)
    with pytest.raises(UnsupportedModelError, match="reads out through a ReLU"):
        stream.fused(1)


@torch.no_grad()
@pytest.mark.parametrize("name", ALL)
def test_a_resnet_that_was_discovered_is_cut_and_followed_further(name: str) -> None:
    model, batch = ENTRIES[name].make()
    stream = DiscoveredStream(model)
    for depth in range(1, stream.depth + 1):
        cut = ed.as_stream(ed.at_depth(stream, depth))
        assert cut.depth == depth
        found = cut.prediction(cut.call(batch))
        torch.testing.assert_close(found, stream.observe(batch).logits(depth))
    report = ed.check_stream(stream, batch)
    assert report.ok, str(report)
    labels = torch.zeros(len(batch["pixel_values"]), dtype=torch.long)
    assert ed.profile(stream, [{**batch, "labels": labels}], progress=False).depths


def test_an_option_of_an_adapter_that_does_not_fit_is_named() -> None:
    model, _ = ENTRIES["CLIPModel-vision"].make()
    model.vision_model.encoder.layers[1] = nn.Identity()
    with pytest.raises(UnsupportedModelError, match="parts of this CLIPModel were replaced"):
        ed.as_stream(model, tower="vision")


def test_depth_six_n_plus_two_is_checked() -> None:
    config = CifarResNetConfig.of_depth(56, width=16)
    assert (config.blocks_per_stage, config.widths) == ([9, 9, 9], [16, 32, 64])
    with pytest.raises(SettingError, match=r"layers=22 is not 6n\+2; use 20 or 26"):
        CifarResNetConfig.of_depth(22)


def test_cutting_inside_a_stage_gives_a_stock_config() -> None:
    model, _ = ENTRIES["ResNetForImageClassification-basic"].make()
    small = ed.at_depth(model, 3)
    assert small.config.depths == [2, 1]
    assert small.config.hidden_sizes == [8, 16]
    assert small.classifier[1].in_features == 16
