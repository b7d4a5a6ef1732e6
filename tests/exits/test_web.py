"""The page that answers while it downloads."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from tests.helpers.browser import Line, empty_runtime, launched, served
from tests.zoo import ENTRIES

import everydepth as ed
from everydepth.data import load_digits
from everydepth.errors import SettingError, UnsupportedModelError
from everydepth.exits import Confidence, Entropy

BLOCKS = 4


@pytest.fixture
def runtime(tmp_path: Path) -> Path:
    return empty_runtime(tmp_path / "dist")


def vit() -> Any:
    torch.manual_seed(0)
    config = hf.ViTConfig(
        hidden_size=32,
        num_hidden_layers=BLOCKS,
        num_attention_heads=2,
        intermediate_size=64,
        image_size=8,
        patch_size=4,
        num_channels=1,
        num_labels=10,
        initializer_range=0.3,
    )
    return hf.ViTForImageClassification(config).eval()


def test_graphs_page_and_description_are_written(runtime: Path, tmp_path: Path) -> None:
    model, batch = vit(), load_digits("test").batch(range(3))
    policy = Confidence(threshold=(0.9, 0.8, float("inf")))
    out = ed.export(
        model, tmp_path / "out", format="web", example=batch, exits=policy, runtime=runtime
    )
    described = json.loads((out / "model.json").read_text())
    files = [entry["file"] for entry in described["files"]]
    assert files == ["ends.onnx", *(f"block-0{depth}.onnx" for depth in range(1, 5))]
    for entry in described["files"]:
        assert (out / entry["file"]).stat().st_size == entry["bytes"]
    assert described["thresholds"] == [0.9, 0.8, None]
    assert [entry["part"] for entry in described["files"]] == ["ends", *["block"] * 4]
    assert described["labels"] == list("0123456789")
    assert described["state"] == [1, 5, 32]
    assert {"index.html", "page.js", "pictures.js", "page.css", "runtime"} <= {
        f.name for f in out.iterdir()
    }
    assert len(list((out / "runtime").iterdir())) == 2
    # The logits shown beside the examples are the model's, but for the rounding of its weights.
    states = ed.as_stream(model).observe(batch)
    for row, example in enumerate(described["examples"]):
        for depth, logits in enumerate(example["logits"], start=1):
            expected = states.logits(depth)[row].detach()
            torch.testing.assert_close(torch.tensor(logits), expected, rtol=0.02, atol=0.02)
    # Half precision, and what each block needs but once.
    weights = sum(parameter.numel() for parameter in model.parameters())
    graphs = sum((out / name).stat().st_size for name in files)
    assert graphs < 2 * weights + 20_000 * len(files)


def test_what_a_page_cannot_show_is_refused(runtime: Path, tmp_path: Path) -> None:
    model, batch = vit(), load_digits("test").batch(range(2))

    def export(model: Any, **options: Any) -> None:
        ed.export(model, tmp_path / "out", format="web", **({"runtime": runtime} | options))

    with pytest.raises(SettingError, match="format='web' needs example="):
        export(model)
    with pytest.raises(UnsupportedModelError, match="can only exit by confidence, but this policy"):
        export(model, example=batch, exits=Entropy(threshold=0.5))
    with pytest.raises(SettingError, match=r"runtime=.* lacks ort.wasm.bundle.min.mjs"):
        export(model, example=batch, runtime=tmp_path / "nowhere")
    text, tokens = ENTRIES["Bert-SequenceClassification"].make()
    with pytest.raises(UnsupportedModelError, match="a web page needs images alone, or the text"):
        export(text, example=tokens)
    resnet, pictures = ENTRIES["ResNetForImageClassification-basic"].make()
    with pytest.raises(UnsupportedModelError, match="have several shapes"):
        export(resnet, example=pictures)
    with pytest.raises(
        SettingError, match="leave out runtime, which does not apply to format='hf'"
    ):
        ed.export(model, tmp_path / "out", runtime=runtime)
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_the_page_answers_after_the_first_block_and_ends_as_the_model(tmp_path: Path) -> None:
    """Fetches onnxruntime-web (33 MB) with npm, unless it is in the cache."""
    train, test = load_digits("train"), load_digits("test")
    model = vit()
    ed.fit(ed.EveryDepth(model, ed.lpa()), train, epochs=4, batch_size=64, lr=3e-3, progress=False)
    model.eval()
    profile = ed.profile(model, test, repeats=1, progress=False)
    policy = Confidence(threshold=0.05)  # the most probable of ten classes always has more
    out = ed.export(
        model,
        tmp_path / "out",
        format="web",
        example=test.batch(range(4)),
        exits=policy,
        profile=profile,
    )
    described = json.loads((out / "model.json").read_text())
    first = sum(entry["bytes"] for entry in described["files"][:2])
    total = sum(entry["bytes"] for entry in described["files"])
    errors: list[str] = []
    Line.passing = {entry["file"]: threading.Event() for entry in described["files"]}
    with served(out) as address, launched() as browser:
        page = browser.new_page(viewport={"width": 1280, "height": 800})
        page.on("console", lambda m: errors.append(m.text) if m.type == "error" else None)
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(address)
        page.wait_for_function("document.querySelectorAll('#depths tr').length == 4")
        page.click("#example")
        for depth, name in enumerate(list(Line.passing)[1:], start=1):
            assert page.evaluate("window.everydepth.log.length") == depth - 1
            Line.passing["ends.onnx"].set()
            Line.passing[name].set()
            page.wait_for_function(f"window.everydepth.log.length == {depth}", timeout=100_000)
        answers = page.evaluate("window.everydepth.log")
        assert [answer["depth"] for answer in answers] == [1, 2, 3, 4]
        assert answers[0]["loaded"] == first < total == answers[-1]["loaded"]
        for depth, answer in enumerate(answers):
            found = torch.tensor(answer["logits"])
            expected = torch.tensor(described["examples"][0]["logits"][depth])
            torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
        page.screenshot(path=str(tmp_path / "page-1280.png"))
        page.set_viewport_size({"width": 390, "height": 844})
        width = page.evaluate("document.documentElement.scrollWidth")
        assert width <= 390
        page.screenshot(path=str(tmp_path / "page-390.png"), full_page=True)

        # Sure at the first depth: the rest is not asked for before another picture needs it.
        for event in Line.passing.values():
            event.clear()
        page = browser.new_page()  # with an empty cache
        page.goto(address)
        page.wait_for_function("document.querySelectorAll('#depths tr').length == 4")
        page.check("#stop")
        page.click("#example")
        for name in ("ends.onnx", "block-01.onnx"):
            Line.passing[name].set()
        page.wait_for_function("document.querySelector('#status').textContent.includes('Sure')")
        assert "Sure at depth 1: stopped after" in page.inner_text("#status")
    assert errors == []
