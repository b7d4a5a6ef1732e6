"""Every example runs, offline and in seconds."""

from __future__ import annotations

import runpy
from functools import partial
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from tests.helpers.scripts import check

from everydepth.app.content import Effort, prepare

EXAMPLES = Path(__file__).parents[1] / "examples"
# The demo takes minutes: a shorter one is below.
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


@pytest.mark.timeout(600)  # every one of them
def test_examples_run() -> None:
    check(FILES)


def test_the_demo_runs_from_its_first_line_to_its_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    demo = runpy.run_path(str(EXAMPLES / "demo.py"), run_name="demo")
    names = demo["main"].__globals__
    tiny = Effort(tales=40, tales_steps=1, surface_points=100, surface_epochs=1, progress=False)
    monkeypatch.setitem(names, "EPOCHS", 1)
    monkeypatch.setattr(names["CONFIG"], "num_hidden_layers", 2)
    monkeypatch.setitem(names, "prepare", partial(prepare, effort=tiny))
    monkeypatch.chdir(tmp_path)
    demo["main"]()
    assert "5. It took" in capsys.readouterr().out
    assert (tmp_path / "runs" / "demo" / "report.html").is_file()
    assert (tmp_path / "runs" / "demo" / "small" / "config.json").is_file()


@pytest.mark.parametrize("name", ["tutorial", "pretrained"])
def test_a_notebook_runs_from_top_to_bottom(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    for place in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR"):
        monkeypatch.setenv(place, str(tmp_path / place))
    notebook = nbformat.read(EXAMPLES / f"{name}.ipynb", as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells), "keep outputs out of the file"
    settings = {"metadata": {"path": str(tmp_path)}}  # what it leaves behind is not left here
    ran = NotebookClient(notebook, timeout=240, resources=settings).execute()
    shown = [
        kind for c in ran.cells for out in c.get("outputs", ()) for kind in out.get("data", {})
    ]
    assert "image/png" in shown
