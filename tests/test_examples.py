"""Every example runs, offline and in seconds."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

EXAMPLES = Path(__file__).parents[1] / "examples"
# The demo is a show of its own, with tests of its own.
FILES = sorted(file for file in EXAMPLES.glob("*.py") if file.name != "demo.py")


def test_there_is_an_example_of_every_feature() -> None:
    assert {file.stem for file in FILES} >= {
        "plain_loop",
        "hf_trainer",
        "lightning_loop",
        "finetune_bert",
        "finetune_causal_lm",
        "early_exit",
        "export_onnx",
        "speculative_decoding",
        "ablate_vision",
        "audit_labels",
        "grow_resnet",
        "grow_language_model",
    }


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_an_example_is_read_at_one_sitting(file: Path) -> None:
    assert len(file.read_text().splitlines()) < 60
    assert file.read_text().startswith('"""'), "say first what it shows"


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_the_example_runs(file: Path, tmp_path: Path) -> None:
    finished = subprocess.run(
        [sys.executable, str(file)],
        cwd=tmp_path,  # what it leaves behind is not left here
        env=os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr[-4000:]
    assert finished.stdout.strip()


def test_the_notebook_runs_from_top_to_bottom(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name))
    notebook = nbformat.read(EXAMPLES / "tutorial.ipynb", as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells), "keep outputs out of the file"
    settings = {"metadata": {"path": str(tmp_path)}}  # what it leaves behind is not left here
    ran = NotebookClient(notebook, timeout=240, resources=settings).execute()
    shown = [
        kind for c in ran.cells for out in c.get("outputs", ()) for kind in out.get("data", {})
    ]
    assert "image/png" in shown
