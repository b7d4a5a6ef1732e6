"""Growing compared with other ways to spend the same compute."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.helpers.growth import mlp, points, teacher_data

from everydepth.architectures.cifar_resnet import CifarResNet, CifarResNetConfig
from everydepth.errors import SettingError
from everydepth.growth import Comparison, compare
from everydepth.growth.comparing import ARMS
from everydepth.growth.losses import mean_loss


def test_every_arm_of_a_comparison_gets_the_same_compute(tmp_path: Path) -> None:
    model, train, valid = mlp(), teacher_data(128, 0), teacher_data(200, 1)
    how = {"steps": 40, "evaluations": 2, "seeds": (0,), "lr": 3e-3, "run": tmp_path / "run"}
    found = compare(model, train, valid, **how)
    assert {arm.name for arm in found.arms} == {row["arm"] for row in found.summary()}
    spent = [
        arm.flops[-1] for arm in found.arms if "only" not in arm.name and "one" not in arm.name
    ]
    assert max(spent) / min(spent) < 1.05
    grown = next(arm for arm in found.arms if arm.name == "grown")
    assert grown.flops[0] > 0
    assert found.ratios("longer") == [1.0]
    assert len(found.table().rows) == 7
    (axes,) = found.plot("held_out_loss").axes
    drawn = {line.get_label(): line.get_ydata()[-1] for line in axes.lines}
    assert drawn == pytest.approx({row["arm"]: row["loss"] for row in found.summary()})
    assert min(grown.loss) < mean_loss(model, valid)
    saved = Comparison.load(tmp_path / "run" / "growth_comparison")
    assert saved.arms == found.arms
    assert compare(model, [], [], **how).arms == found.arms  # nothing is done twice
    longer = next(row for row in found.summary() if row["arm"] == "longer")
    assert longer["difference"] == longer["difference_low"] == 0


def test_an_arm_that_a_model_does_not_support_is_left_out_with_a_reason() -> None:
    sizes = {"blocks_per_stage": (1, 1), "widths": (4, 8), "num_channels": 1, "num_labels": 3}
    model = CifarResNet(CifarResNetConfig(**sizes))
    data = {"pixel_values": torch.randn(16, 1, 8, 8), "labels": torch.randint(0, 3, (16,))}
    how = {"steps": 1, "evaluations": 1, "seeds": (0,), "after": 2, "progress": False}
    found = compare(model, data, data, **how)
    assert {arm.name for arm in found.arms} == set(ARMS) - {"stacked"}
    message = "no existing block has the shape of a new one after depth 2; leave out 'stacked'"
    assert found.left_out == {"stacked": message}
    with pytest.raises(SettingError, match=message):
        compare(model, data, data, **how, arms=["longer", "stacked"])


def test_comparing_leaves_the_model_as_it_was_and_starts_every_arm_from_it() -> None:
    sizes = {"blocks_per_stage": (1, 1), "widths": (4, 8), "num_channels": 1, "num_labels": 3}
    torch.manual_seed(0)
    model = CifarResNet(CifarResNetConfig(**sizes)).train()
    data = {"pixel_values": torch.randn(16, 1, 8, 8), "labels": torch.randint(0, 3, (16,))}
    before = {key: value.clone() for key, value in model.state_dict().items()}
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    how = {"steps": 1, "evaluations": 1, "after": 2, "progress": False}
    found = compare(model, data, data, **how, seeds=(0, 1), arms=["longer", "grown"])
    after = model.state_dict()
    assert all(torch.equal(after[key], value) for key, value in before.items())
    assert all(bool((parameter.grad == 1).all()) for parameter in model.parameters())
    start = mean_loss(model, data)
    assert [arm.loss[0] for arm in found.arms if arm.name == "longer"] == [start, start]


def test_a_comparison_needs_its_base_line() -> None:
    data = points(mlp(), 32)
    with pytest.raises(SettingError, match="use 'longer' and any of"):
        compare(mlp(), data, data, arms=["grown"])
    with pytest.raises(SettingError, match="steps=1, evaluations=10"):
        compare(mlp(), data, data, steps=1)


def test_a_frozen_model_cannot_be_compared() -> None:
    model = mlp().requires_grad_(False)
    with pytest.raises(SettingError, match=r"are frozen.*set requires_grad"):
        compare(
            model, teacher_data(64, 0), teacher_data(64, 1), steps=2, evaluations=1, progress=False
        )
