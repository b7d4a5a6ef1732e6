"""`everydepth sweep`."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer
from click.testing import Result
from typer.testing import CliRunner

import everydepth as ed
from everydepth.cli.configs import with_options
from everydepth.errors import SettingError
from everydepth_papers.commands.sweep import sweep


def invoke(*words: object) -> Result:
    app = typer.Typer()
    app.command()(with_options(sweep))
    result = CliRunner().invoke(app, [str(word) for word in words])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def test_sweep_lists_runs_and_draws(tmp_path: Path) -> None:
    how = ("--data", "digits", "--depths", "8,14", "--widths", "4", "--seeds", "0", "--epochs", 1)
    words = (*how, "--max-samples", 64, "--run", tmp_path / "s")
    assert "2 cells, 0 done" in invoke(*words, "--dry-run").output
    assert not (tmp_path / "s").exists()
    output = invoke(*words).output
    assert "2 cells, 2 done\n  done   layers=8\n  done   layers=14\n" in output  # what differs
    assert (tmp_path / "s" / "test_loss_by_layers.png").stat().st_size > 1000
    rows = ed.Run.open(tmp_path / "s").results()["sweep"]
    assert [row["layers"] for row in rows] == [8, 14]
    with pytest.raises(SettingError, match="--depths 'deep'; give whole numbers"):
        invoke("--data", "digits", "--depths", "deep", "--run", tmp_path / "t")
    with pytest.raises(SettingError, match="depths=8,15: 15 is not 6n\\+2; use 14 or 20"):
        invoke("--data", "digits", "--depths", "8,15", "--run", tmp_path / "t")
    assert not (tmp_path / "t").exists()
