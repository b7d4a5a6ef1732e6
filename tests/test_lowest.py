"""The lowest versions that pyproject.toml allows are versions that were tried.

`make lowest` tries them: a clean environment with exactly these, then a smoke suite. When it
passes, constraints-lowest.txt says what was tried; a bound that moves fails here until then.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]
TOOLS = ("dev", "docs")
RECORD = ROOT / "constraints-lowest.txt"
# What the tests themselves import, at the versions of constraints.txt.
TESTED_WITH = ("beartype", "hypothesis", "pytest", "pytest-timeout", "pytest-xdist", "tensorboard")
SMOKE = (
    "tests/stream/test_at_depth.py",
    "tests/tracing/test_trace.py",
    "tests/training/test_fit.py",
    "tests/exits/test_export.py",
    "tests/exits/test_onnx.py",
    "tests/exits/generation/test_generate.py",
    "tests/results/test_figures.py",
    "tests/data/test_hub.py",
    "tests/engines",
    "tests/serving/test_http.py",
    "tests/app/test_tabs.py",
    "tests/app/test_server.py",
)


def requirements() -> list[Requirement]:
    lines = [*PROJECT["dependencies"]]
    lines += [line for extra in EXTRAS if extra not in TOOLS for line in EXTRAS[extra]]
    return [Requirement(line) for line in lines]


def pinned(requirement: Requirement) -> str:
    """`numpy>=2.0` as `numpy==2.0`."""
    (bound,) = requirement.specifier
    assert bound.operator == ">=", f"{requirement}: give one lower bound, >="
    return f"{requirement.name}=={bound.version}"


def listed(file: Path) -> list[str]:
    lines = file.read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def test_every_lower_bound_is_one_that_was_tried() -> None:
    assert listed(RECORD) == sorted(map(pinned, requirements()), key=str.lower)


@pytest.mark.parametrize("extra", TOOLS)
def test_tools_have_no_bounds_as_only_the_pinned_versions_are_tried(extra: str) -> None:
    own = [Requirement(line) for line in EXTRAS[extra]]
    assert [str(r) for r in own if r.specifier] == []
    pins = {canonicalize_name(line.split("==")[0]) for line in listed(ROOT / "constraints.txt")}
    assert {r.name for r in own if r.name != PROJECT["name"]} <= pins


def run(*command: str | Path, **variables: str) -> None:
    outside = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    subprocess.run([*map(str, command)], cwd=ROOT, env=outside | variables, check=True)


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_the_lowest_versions_pass_a_smoke_suite(tmp_path: Path) -> None:
    run(sys.executable, "-m", "venv", tmp_path / "venv")
    python = tmp_path / "venv" / "bin" / "python"
    tools = [
        line for line in listed(ROOT / "constraints.txt") if line.split("==")[0] in TESTED_WITH
    ]
    assert len(tools) == len(TESTED_WITH)
    lowest = [
        f"{r.name}[{','.join(r.extras)}]=={pinned(r).split('==')[1]}" if r.extras else pinned(r)
        for r in requirements()
    ]
    pip = (python, "-m", "pip", "install", "-q", "--disable-pip-version-check")
    run(*pip, *(line for line in lowest if line.startswith("torch==")))  # nothing pulls another
    run(*pip, "hatchling", *lowest, *tools)
    run(*pip, "--no-build-isolation", "--no-deps", "-e", ROOT)
    # Old versions warn of what newer ones changed: here warnings are none of our errors.
    run(
        *(python, "-m", "pytest", "-q", "-n", "2", "-o", "filterwarnings=default", *SMOKE),
        PYTHONPATH=str(ROOT / "src"),
    )
    run(python, "-m", "everydepth", "env")
