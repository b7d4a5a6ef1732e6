"""Theorems 1 to 3 of Depth Expansion, for real networks."""

from __future__ import annotations

import pytest
import torch
from tests.helpers.growth import labeled, mlp, teacher_data
from tests.zoo import ENTRIES

from everydepth.errors import SettingError
from everydepth.growth import jumpboard
from everydepth.growth.losses import mean_loss
from everydepth_papers.guarantees import guarantee


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
