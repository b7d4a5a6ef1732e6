"""Guarantees and comparisons."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.helpers.growth import labeled, mlp, points, teacher_data
from tests.zoo import ENTRIES

from everydepth.architectures.cifar_resnet import CifarResNet, CifarResNetConfig
from everydepth.errors import SettingError
from everydepth.growth import Comparison, compare, guarantee, jumpboard
from everydepth.growth.comparing import ARMS
from everydepth.growth.losses import mean_loss


@pytest.mark.parametrize("name", ["Llama-tied-CausalLM-left", "CifarResNet-post-projection", "ViT"])
def test_on_real_networks_the_theorems_are_vacuous_and_say_so(name: str) -> None:
    model, batch = labeled(ENTRIES[name], torch.float32)
    jump = jumpboard(model, batch, after=1)
    found = guarantee(model, jump.model, batch, batch)
    assert found.vacuous
    assert "all bounds are vacuous" in str(found)
    assert found.held_out.gain == pytest.approx(jump.margin, rel=1e-2)
    assert found.margin == pytest.approx(jump.margin, rel=1e-3)
    note = found.result.note
    assert note is not None
    assert note.startswith("the theorems are vacuous because Gamma_n is")


def test_a_jumpboard_separates_the_margins() -> None:
    model, data, test = mlp(), teacher_data(200, 0), teacher_data(100, 1)
    jump = jumpboard(model, data)
    found = guarantee(model, jump.model, data, test, jump=jump.model)
    assert found.gamma_opt == 0
    assert found.margin_low < found.margin_test  # a lower bound of what it estimates
    assert found.margin_test == pytest.approx(mean_loss(model, test) - mean_loss(jump.model, test))
    with pytest.raises(SettingError, match=r"delta=2\.0"):
        guarantee(model, jump.model, data, test, delta=2.0)


def test_one_block_alone_costs_less_than_the_network_and_rows_pay_for_it() -> None:
    model, data, test = mlp(), teacher_data(200, 0), teacher_data(2000, 1)
    jump = jumpboard(model, data, after=1)
    found = guarantee(model, jump.model, data, test, jump=jump.model, after=1)
    assert found.gamma_block is not None
    assert found.gamma_block < found.gamma_n
    assert found.theorems[3].change == pytest.approx(2 * found.gamma_block - found.margin)
    assert found.rows_needed is not None
    assert found.rows_needed > found.n
    assert f"would need {found.rows_needed:.2g} rows" in str(found)


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


def test_a_comparison_needs_its_base_line() -> None:
    data = points(mlp(), 32)
    with pytest.raises(SettingError, match="use 'longer' and any of"):
        compare(mlp(), data, data, arms=["grown"])
    with pytest.raises(SettingError, match="steps=1, evaluations=10"):
        compare(mlp(), data, data, steps=1)
