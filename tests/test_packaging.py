"""What is shipped: typed, whole, and at work in an environment that has nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import zipfile
from importlib.metadata import metadata
from pathlib import Path

import pytest

import everydepth

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "everydepth"


def test_the_package_says_that_it_is_typed() -> None:
    assert (Path(everydepth.__file__).parent / "py.typed").is_file()
    assert "Typing :: Typed" in metadata("everydepth").get_all("Classifier", [])


def run(*command: str | Path, cwd: Path) -> str:
    outside = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(
        [*map(str, command)], cwd=cwd, env=outside, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{command}: {done.stdout[-2000:]}{done.stderr[-4000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, cwd=ROOT)
    return folder


@pytest.mark.slow
def test_the_wheel_holds_every_file_of_the_package(dist: Path) -> None:
    (wheel,) = dist.glob("*.whl")
    inside = set(zipfile.ZipFile(wheel).namelist())
    files = {
        str(file.relative_to(SOURCE.parent))
        for file in SOURCE.rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    }
    assert files <= inside
    assert "everydepth/py.typed" in inside


@pytest.mark.slow
def test_the_sdist_holds_what_builds_and_tests_it(dist: Path) -> None:
    (sdist,) = dist.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    wanted = {"pyproject.toml", "constraints.txt", "Makefile", "README.md", "LICENSE", "mkdocs.yml"}
    assert wanted | {"tests/conftest.py", "docs/index.md", "examples/plain_loop.py"} <= inside
    assert not any(name.startswith((".venv", "runs/", "site/")) for name in inside)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", ["*.whl", "*.tar.gz"])
def test_it_installs_into_a_clean_environment_and_works(
    kind: str, dist: Path, tmp_path: Path
) -> None:
    (file,) = dist.glob(kind)
    run(sys.executable, "-m", "venv", tmp_path / "venv", cwd=tmp_path)
    python = tmp_path / "venv" / "bin" / "python"
    pip = (python, "-m", "pip", "install", "-q", "-c", ROOT / "constraints.txt")
    run(*pip, "torch==2.13.0", cwd=tmp_path)  # by itself first: nothing can pull another
    run(*pip, file, cwd=tmp_path)
    assert "everydepth" in run(python, "-m", "everydepth", "env", cwd=tmp_path)
    assert "accuracy" in run(python, ROOT / "examples" / "plain_loop.py", cwd=tmp_path)
    assert "train" in run(tmp_path / "venv" / "bin" / "everydepth", "--help", cwd=tmp_path)
