"""The page that writes while it downloads."""

from __future__ import annotations

import gzip
import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from tests.helpers.browser import Line, empty_runtime, launched, served
from tests.helpers.tokenizing import byte_level, sentencepiece

import everydepth as ed
from everydepth.errors import BatchError, ExportError, SettingError, UnsupportedModelError
from everydepth.exits import Confidence
from everydepth.exits.web import graphs, text

TEXTS = ["the cat in a hat, on a", "a thin tin, then the end"]
BLOCKS = 2


def llama(words: int, **settings: Any) -> Any:
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": BLOCKS}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.4}
    sizes = {"vocab_size": words, "max_position_embeddings": 64}
    config = hf.LlamaConfig(**(shape | heads | sizes | settings))
    return hf.LlamaForCausalLM(config).eval()


def example(tokenizer: Any) -> dict[str, torch.Tensor]:
    rows = [tokenizer.encode(line) for line in TEXTS]
    longest = max(map(len, rows))
    mask = [[1] * len(row) + [0] * (longest - len(row)) for row in rows]
    ids = [row + [0] * (longest - len(row)) for row in rows]
    return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}


def test_words_blocks_tokenizer_and_description_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = sentencepiece()
    model = llama(300, tie_word_embeddings=True)
    monkeypatch.setattr(text, "_FEW", 100)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    out = ed.export(
        model,
        tmp_path / "out",
        format="web",
        example=example(tokenizer),
        tokenizer=tokenizer,
        exits=Confidence(threshold=0.9),
        runtime=empty_runtime(tmp_path / "dist"),
    )
    described = json.loads((out / "model.json").read_text())
    # The words of the example, the first block, all others, and then the other words.
    assert [entry["file"] for entry in described["files"]] == [
        "tokenizer.json.gz",
        "words-1.onnx",
        *(f"block-0{number}.onnx" for number in range(1, BLOCKS + 1)),
        *(f"words-{number}.onnx" for number in (2, 3, 4)),
    ]
    for entry in described["files"]:
        assert (out / entry["file"]).stat().st_size == entry["bytes"]
    pieces = [
        [number for first, count in ranges for number in range(first, first + count)]
        for ranges in described["words"]
    ]
    assert sorted(number for piece in pieces for number in piece) == list(range(300))
    assert {token for line in TEXTS for token in tokenizer.encode(line)} <= set(pieces[0])
    assert described["thresholds"] == [0.9]
    assert described["caches"] == [[2, 8, 8]] * BLOCKS
    # What each depth writes, by the model whose weights are rounded to half precision.
    half = graphs.rounded(ed.as_stream(model))
    for line in described["examples"]:
        assert line["ids"] == tokenizer.encode(line["prompt"])
        for depth, tokens in enumerate(line["tokens"], start=1):
            new = ed.generate(half, [line["ids"]], depth=depth, max_new_tokens=32)
            assert tokens == list(new.tokens[0])
    # A tied head is shipped once.
    weights = sum(parameter.numel() for parameter in model.parameters())
    assert sum(e["bytes"] for e in described["files"]) < 2 * weights + 30_000 * 7
    packed = json.loads(gzip.decompress((out / "tokenizer.json.gz").read_bytes()))
    assert packed["tokenizer"]["model"]["type"] == "BPE"
    assert not (out / "tokenizer.json").exists()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_graphs_that_differ_from_the_model_are_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def first_again(_: Path, __: Any, path: Path) -> Path:
        path.write_bytes((path.parent / "block-01.onnx").read_bytes())
        return path

    tokenizer = sentencepiece()
    monkeypatch.setattr(text, "refilled", first_again)
    with pytest.raises(ExportError, match=r"logits at depth 2.*nothing was written"):
        ed.export(
            llama(300),
            tmp_path / "out",
            format="web",
            example=example(tokenizer),
            tokenizer=tokenizer,
            runtime=empty_runtime(tmp_path / "dist"),
        )
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["dist"]


def test_what_a_page_cannot_write_is_refused(tmp_path: Path) -> None:
    tokenizer, runtime = sentencepiece(), empty_runtime(tmp_path / "dist")
    batch = example(tokenizer)

    def export(model: Any, **options: Any) -> None:
        given = {"example": batch, "tokenizer": tokenizer, "runtime": runtime} | options
        ed.export(model, tmp_path / "out", format="web", **given)

    model = llama(300)
    with pytest.raises(SettingError, match="a web page for text needs tokenizer="):
        export(model, tokenizer=None)
    with pytest.raises(BatchError, match="cannot be continued within 4 tokens"):
        export(llama(300, max_position_embeddings=4))
    (runtime / "tokenizers.min.mjs").unlink()
    with pytest.raises(SettingError, match=r"lacks tokenizers.min.mjs.*@huggingface/tokenizers"):
        export(model)
    empty = empty_runtime(tmp_path / "again")
    with pytest.raises(UnsupportedModelError, match="does not support the balconies"):
        export(ed.balcony(model), runtime=empty)
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 4, "vocab_size": 300}
    recurrent = hf.MambaForCausalLM(hf.MambaConfig(**shape)).eval()
    with pytest.raises(UnsupportedModelError, match="has no key/value cache"):
        export(recurrent, runtime=empty)
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False])
def test_positions_that_are_learned_go_along(tied: bool, tmp_path: Path) -> None:
    tokenizer = byte_level()
    torch.manual_seed(0)
    shape = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64, "initializer_range": 0.3}
    config = hf.GPT2Config(vocab_size=len(tokenizer), tie_word_embeddings=tied, **shape)
    out = ed.export(
        hf.GPT2LMHeadModel(config).eval(),
        tmp_path / "out",
        format="web",
        example=example(tokenizer),
        tokenizer=tokenizer,
        runtime=empty_runtime(tmp_path / "dist"),
    )
    assert json.loads((out / "model.json").read_text())["most"] == 64


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_stories_begin_before_a_third_of_the_bytes_and_end_as_the_model(
    data_folder: Path, tmp_path: Path
) -> None:
    """Fetches onnxruntime-web (33 MB) and tokenizers (0.1 MB) with npm, unless cached."""
    folder = data_folder / "stories15M"
    model = hf.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer: Any = hf.AutoTokenizer.from_pretrained(folder)
    begin = torch.tensor([tokenizer.encode("Once upon a time")])
    drawn = [ed.generate(model, begin, max_new_tokens=96, do_sample=True, seed=s) for s in range(4)]
    rows = torch.cat([one.sequences[:, :60] for one in drawn])
    profile = ed.profile(model, [{"input_ids": rows, "labels": rows}], repeats=1, progress=False)
    out = ed.export(
        model,
        tmp_path / "out",
        format="web",
        example={"input_ids": rows},
        tokenizer=tokenizer,
        profile=profile,
        exits=Confidence(threshold=1e-6),  # sure of anything
    )
    described = json.loads((out / "model.json").read_text())
    files = described["files"]
    total = sum(entry["bytes"] for entry in files)
    assert total <= 1.05 * (folder / "model.safetensors").stat().st_size
    expected = described["examples"][0]["tokens"]
    # The published weights are in half precision: what is written is what PyTorch writes.
    ids = described["examples"][0]["ids"]
    assert expected[-1] == list(ed.generate(model, [ids], max_new_tokens=32).tokens[0])
    errors: list[str] = []
    Line.passing = {entry["file"]: threading.Event() for entry in files}
    with served(out) as address, launched() as browser:
        page = browser.new_page(viewport={"width": 1280, "height": 800})
        page.on("console", lambda m: errors.append(m.text) if m.type == "error" else None)
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(address)
        page.wait_for_function("document.querySelectorAll('#depths tr').length == 6")
        Line.passing["words-1.onnx"].set()
        for depth in range(1, 7):
            assert page.evaluate("window.everydepth.log.length") == depth - 1
            Line.passing[f"block-0{depth}.onnx"].set()
            page.wait_for_function(f"window.everydepth.log.length == {depth}", timeout=100_000)
        for entry in files:
            Line.passing[entry["file"]].set()
        page.wait_for_function("window.everydepth.log.length == 7", timeout=100_000)
        answers = page.evaluate("window.everydepth.log")
        assert [answer["depth"] for answer in answers] == [1, 2, 3, 4, 5, 6, 6]
        assert answers[1]["loaded"] < total / 3
        assert answers[-1]["loaded"] == total
        assert answers[-1]["tokens"] == expected[-1]
        written = page.inner_text("#story")
        assert written.startswith(described["examples"][0]["prompt"])
        page.screenshot(path=str(tmp_path / "page-1280.png"))
        page.set_viewport_size({"width": 390, "height": 844})
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        page.screenshot(path=str(tmp_path / "page-390.png"), full_page=True)

        # Sure at the first depth: the rest is not asked for before another text needs it.
        for event in Line.passing.values():
            event.clear()
        page = browser.new_page()
        page.goto(address)
        page.wait_for_function("document.querySelectorAll('#depths tr').length == 6")
        page.check("#stop")
        for name in ("words-1.onnx", "block-01.onnx"):
            Line.passing[name].set()
        page.wait_for_function("document.querySelector('#status').textContent.includes('Sure')")
        assert "Sure at depth 1: stopped after" in page.inner_text("#status")
    assert errors == []


@pytest.mark.slow
def test_a_browser_without_wasm_simd_is_told(tmp_path: Path) -> None:
    page_of = Path(text.__file__).parent / "page"
    with served(page_of) as address, launched() as browser:
        page = browser.new_page()
        page.add_init_script("WebAssembly.validate = () => false")
        page.goto(address)
        page.wait_for_selector("#status.bad")
        assert "has no WebAssembly with SIMD" in page.inner_text("#status")
