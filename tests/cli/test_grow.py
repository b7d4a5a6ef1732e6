"""`everydepth grow` and `plan`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

import everydepth as ed
from everydepth.architectures.cifar_resnet import CifarResNet, CifarResNetConfig
from everydepth.cli.main import build_app
from everydepth.errors import DataError, SettingError


def invoke(*words: object) -> Result:
    result = CliRunner().invoke(build_app(), [str(w) for w in words], env={"COLUMNS": "200"})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


@pytest.fixture
def small(tmp_path: Path) -> Path:
    config = CifarResNetConfig(
        blocks_per_stage=(1, 1), widths=(4, 8), num_channels=1, num_labels=10
    )
    CifarResNet(config).save_pretrained(tmp_path / "small")
    return tmp_path / "small"


def test_grow_writes_a_run_whose_model_loads(small: Path, tmp_path: Path) -> None:
    how = ("--data", "digits", "--steps", 20, "--rounds", 1, "--max-samples", 400, "--lr", 0.01)
    how = (*how, "--alpha", 0.99)
    output = invoke("grow", small, *how, "-o", tmp_path / "run").output
    assert "round 1: block after" in output
    assert "choice by training loss" in output
    grown = CifarResNet.from_pretrained(tmp_path / "run" / "model")
    assert sum(grown.config.blocks_per_stage) in (2, 3)
    assert ed.Results.load(tmp_path / "run" / "growth").about["rounds"]


def test_grow_can_only_score(small: Path, tmp_path: Path) -> None:
    words = ("grow", small, "--data", "digits", "--max-samples", 96, "--score")
    output = invoke(*words, "-o", tmp_path / "score").output
    assert ed.growth.Score.load(tmp_path / "score" / "growth_score").verdict in output
    assert "verdict" in output
    assert "|gbar|" in output
    with pytest.raises(SettingError, match="too few rows"):
        invoke("grow", small, "--data", "digits", "--max-samples", 20, "-o", tmp_path / "x")


def test_plan_says_depth_width_and_tokens(tmp_path: Path) -> None:
    words = ("plan", "--parameters", "6.7e9", "-o", tmp_path / "plan")
    assert "depth 54, width" in invoke(*words).output
    assert ed.Results.load(tmp_path / "plan" / "scaling").about["plan"]["depth"] == 54
    found = json.loads(invoke("plan", "--flops", "5.76e23", "--json").output)
    assert found["parameters"] == pytest.approx(70e9, rel=0.1)
    with pytest.raises(SettingError, match="give one of the two"):
        invoke("plan")
    law = ed.growth.scaling.EPOCH
    lines = [f"{n},{d},{law(n, d)}" for n in (1e7, 1e8, 1e9, 1e10) for d in (1e9, 1e10, 1e11)]
    file = tmp_path / "points.csv"
    file.write_text("\n".join(["parameters,tokens,loss", *lines]))
    output = invoke("plan", "--parameters", "7e9", "--points", file).output
    assert "chinchilla, 12 points" in output
    file.write_text("a,b\n1,2\n")
    with pytest.raises(DataError, match="column 'parameters', but this table has 'a', 'b'"):
        invoke("plan", "--parameters", "7e9", "--points", file)
