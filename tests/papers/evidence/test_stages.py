"""Tuning in stages: what is done is not repeated, and the clock goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import everydepth as ed
from everydepth.runs import Run
from everydepth_papers.evidence import in_stages
from everydepth_papers.evidence.balconies import mixed, model_and_tokenizer, own_text, quality
from everydepth_papers.evidence.cifar_tuning import cell
from everydepth_papers.evidence.discover import find_recipe
from everydepth_papers.evidence.stages import Spent, tuned


def settings(*marks: int) -> dict[str, Any]:
    return {"marks": list(marks), "lr": 1e-2, "save_every": 1}


def data(begin: int, end: int) -> list[dict[str, torch.Tensor]]:
    rows = torch.arange(6 * 12).view(6, 12) % 97
    return [{"input_ids": row[None]} for row in rows[begin:end]]


def test_cells_of_stages_go_on_where_the_one_before_stopped() -> None:
    cells = in_stages((0, 5, 9), {"decode": True}, lr=0.1)
    assert [cell["marks"] for cell in cells] == [[0], [0, 5], [0, 5, 9]]
    assert [cell.get("decode", False) for cell in cells] == [False, False, True]


def test_a_later_mark_continues_the_earlier_stage_instead_of_repeating_it(tmp_path: Path) -> None:
    first = ed.balcony(model_and_tokenizer("tiny")[0], [2])
    spent = tuned(first, data, settings(0, 2), 0, tmp_path, shuffle=False)
    assert spent > 0
    after = [parameter.clone() for parameter in first.parameters()]
    tuned(first, data, settings(0, 2), 0, tmp_path, shuffle=False)
    assert all(map(torch.equal, first.parameters(), after))
    further = ed.balcony(model_and_tokenizer("tiny")[0], [2])
    tuned(further, data, settings(0, 2, 4), 0, tmp_path, shuffle=False)
    straight = ed.balcony(model_and_tokenizer("tiny")[0], [2])
    tuned(straight, data, settings(0, 2, 4), 0, tmp_path / "other", shuffle=False)
    for mine, other in zip(further.parameters(), straight.parameters(), strict=True):
        assert torch.equal(mine, other)


def test_cpu_seconds_of_a_resumed_run_are_added_up() -> None:
    clock = Spent()
    clock.load_state_dict({"cpu_seconds": 100.0})
    clock.on_start(None)
    assert 100 <= clock.state_dict()["cpu_seconds"] < 101
    assert clock.results()["cpu_seconds"] >= 100


def test_quality_is_that_of_the_plain_computation() -> None:
    model, _ = model_and_tokenizer("tiny")
    ids = torch.arange(24).view(2, 12)
    found = quality(model, ids, [3, 8])
    with torch.no_grad():
        expected = model(ids, labels=ids).loss.item()
        first = ed.at_depth(model, 3)(ids)
        agreed = (first.logits.argmax(-1) == model(ids).logits.argmax(-1))[:, :-1]
    assert found["nll"][1] == pytest.approx(expected, abs=1e-4)
    assert found["agreement"] == pytest.approx([agreed.double().mean().item(), 1.0], abs=1e-4)
    assert found["tokens"] == 22


def test_text_of_its_own_is_what_the_model_says_after_a_quarter_of_each_row(tmp_path: Path) -> None:
    model, _ = model_and_tokenizer("tiny")
    prompts = torch.arange(24).view(2, 12)
    rows, spent = own_text(model, prompts, tmp_path / "own.safetensors")
    assert rows.shape == prompts.shape
    assert torch.equal(rows[:, :3], prompts[:, :3])
    with torch.no_grad():
        said = model(rows).logits.argmax(-1)
    assert torch.equal(rows[:, 3:], said[:, 2:-1])
    again, before = own_text(model, prompts + 1, tmp_path / "own.safetensors")
    assert torch.equal(again, rows)  # it was not written anew
    assert before == spent > 0


def test_half_of_a_stages_rows_are_the_models_own() -> None:
    text, own = torch.zeros(6, 4).long(), torch.ones(2, 4).long()
    assert mixed(text, own, 0).tolist() == [[0] * 4] * 3 + [[1] * 4] * 3


@pytest.mark.parametrize("native", [False, True])
def test_stages_are_tuned_in_what_is_fast_here_and_the_result_says_which(
    native: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": native})
    smoke = find_recipe("resnet56")[0].presets["smoke"].cells[-1]
    found = cell({**smoke, "precision": "fast", "exits": False}, 0, tmp_path / "cell")
    assert found["precision"] == ("bf16" if native else "fp32")
    run = Run.open(tmp_path / "balcony" / "seed-0-until-2")
    assert run.config["precision"] == found["precision"]
