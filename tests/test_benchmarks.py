"""Every benchmark runs, with tiny sizes and offline."""

from __future__ import annotations

import importlib.util
import json
import sys
from argparse import Namespace
from pathlib import Path
from types import ModuleType

import pytest
import torch
from tests.helpers.scripts import check

import everydepth as ed

FOLDER = Path(__file__).parents[1] / "benchmarks"
HELPERS = ("peak", "record")
FILES = sorted(file for file in FOLDER.glob("*.py") if file.stem not in HELPERS)


# They start servers, each of which imports everything.
SERVERS = [file for file in FILES if file.stem in ("replicas", "serving")]
ALONE = [file for file in FILES if file not in SERVERS]


@pytest.mark.timeout(600)  # every one of them
def test_benchmarks_run() -> None:
    check(ALONE, EVERYDEPTH_SMOKE="1")


@pytest.mark.slow
def test_the_benchmark_of_servers_runs() -> None:
    check(SERVERS, EVERYDEPTH_SMOKE="1")


def test_the_readme_names_every_benchmark() -> None:
    text = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert [file.name for file in FILES if f"`{file.name}`" not in text] == []


def test_a_draft_is_tuned_for_its_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    spec = importlib.util.spec_from_file_location("pair", FOLDER / "engines" / "pair.py")
    assert spec is not None
    assert spec.loader is not None
    pair = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(pair)
    monkeypatch.setattr(pair, "NAME", "tiny")
    net, about = pair.tuned_stories(Namespace(arm="balcony", seconds=0.0, folder=tmp_path))
    assert about["steps"] == 2
    assert 2 in ed.as_stream(net).exits


@pytest.fixture
def smoking(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """benchmarks/record.py as `--smoke` makes it."""
    monkeypatch.setenv("EVERYDEPTH_SMOKE", "")
    monkeypatch.setattr(sys, "argv", ["waist.py", "--smoke", "--rounds", "2"])
    spec = importlib.util.spec_from_file_location("record", FOLDER / "record.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_smoke_run_leaves_the_figures_alone(smoking: ModuleType) -> None:
    assert sys.argv == ["waist.py", "--rounds", "2"]
    assert smoking.sized(40, 1) == 1
    path = smoking.record("waist", {"rounds": 1})
    assert path.is_file()
    assert FOLDER not in path.parents


def test_figures_come_with_processor_caches_and_threads(smoking: ModuleType) -> None:
    found = json.loads(smoking.record("waist", {"rounds": 1}).read_text())["machine"]
    assert found["processor"]["name"]
    assert found["processor"]["cache_bytes"]["L2"] > 0
    assert found["threads"]["torch"] == torch.get_num_threads()
    assert found["versions"]["torch"] == torch.__version__


def test_times_of_another_processor_are_kept(
    smoking: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = smoking.record_times("any", {"a": 1})
    assert smoking.recorded_times("any")["a"] == 1
    here = smoking._processor()
    monkeypatch.setattr(smoking, "_processor", lambda: {**here, "name": "Other CPU @ 2.50GHz"})
    assert smoking.recorded_times("any") == {}  # nothing is added to figures of the first
    second = smoking.record_times("any", {"b": 2})
    assert second == first.parent / "other-cpu-2.50ghz" / "any.json"
    assert json.loads(first.read_text())["a"] == 1
    assert smoking.recorded_times("any")["b"] == 2
    found = smoking.recorded_everywhere("any")
    assert [one["machine"]["processor"]["name"] for one in found] == [
        here["name"],
        "Other CPU @ 2.50GHz",
    ]
