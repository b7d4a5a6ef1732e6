"""A depth in lm-evaluation-harness, on a task of our own: what it writes, and its perplexity."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import lm_eval
import pytest
import torch
import yaml
from lm_eval.tasks import TaskManager
from transformers import LlamaConfig, LlamaForCausalLM

import everydepth as ed
from everydepth.data.byte_tokens import byte_tokenizer
from everydepth.errors import DepthError
from everydepth.exits.harness import DepthLM

TEXT = "the cat sat on the mat and the dog sat on the cat "
QUESTIONS = ("the cat", "on the", "and the d")
NEW = 6


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that writes letters, trained at every depth."""
    place = tmp_path_factory.mktemp("model")
    words = byte_tokenizer()
    words.save_pretrained(place)
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2}
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=257, num_hidden_layers=3, bos_token_id=256, eos_token_id=256, **sizes
        )
    )
    ids = torch.tensor([words.encode(TEXT)])
    ed.fit(ed.EveryDepth(model), [{"input_ids": ids}], steps=30, lr=1e-2, progress=False)
    model.save_pretrained(place)
    return place


def written(folder: Path, depth: int) -> list[str]:
    model, words = ed.load(folder), byte_tokenizer()
    settings: dict[str, Any] = {"depth": depth, "max_new_tokens": NEW, "tokenizer": words}
    return [ed.generate(model, question, **settings).text for question in QUESTIONS]


def evaluated(model: DepthLM, rows: list[dict[str, str]], place: Path, **task: Any) -> Any:
    """The figures of a task that is a file of rows."""
    (place / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    common = {
        "task": "own",
        "dataset_path": "json",
        "dataset_kwargs": {
            "data_files": {"test": str(place / "rows.jsonl")},
            "cache_dir": str(place / "cache"),
        },
        "test_split": "test",
    }
    (place / "own.yaml").write_text(yaml.safe_dump({**common, **task}))
    tasks = TaskManager(include_path=str(place), include_defaults=False)
    found = lm_eval.simple_evaluate(model, tasks=["own"], task_manager=tasks, bootstrap_iters=0)
    assert found is not None
    return found["results"]["own"]


def test_generated_answers_are_those_of_the_depth(folder: Path, tmp_path: Path) -> None:
    first, last = written(folder, 1), written(folder, 3)
    rows = [{"q": q, "a": a} for q, a in zip(QUESTIONS, first, strict=True)]
    task: dict[str, Any] = {
        "output_type": "generate_until",
        "doc_to_text": "{{q}}",
        "doc_to_target": "{{a}}",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": NEW, "do_sample": False},
        "metric_list": [{"metric": "exact_match", "aggregation": "mean"}],
    }
    same = sum(a == b for a, b in zip(first, last, strict=True)) / len(first)
    for depth, expected in ((1, 1.0), (None, same)):
        found = evaluated(DepthLM(str(folder), depth=depth), rows, tmp_path, **task)
        assert found["exact_match,none"] == pytest.approx(expected)


@pytest.mark.parametrize("depth", [1, 3])
def test_perplexity_is_that_of_the_cut_model(folder: Path, tmp_path: Path, depth: int) -> None:
    task: dict[str, Any] = {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "byte_perplexity"}],
    }
    found = evaluated(DepthLM(str(folder), depth=depth), [{"text": TEXT}], tmp_path, **task)
    ids = torch.tensor([[256, *byte_tokenizer().encode(TEXT)]])
    with torch.no_grad():
        loss = ed.at_depth(ed.load(folder), depth)(ids, labels=ids).loss
    assert found["byte_perplexity,none"] == pytest.approx(math.exp(loss), rel=1e-4)


def test_a_balcony_is_evaluated_as_its_depth(folder: Path, tmp_path: Path) -> None:
    net = ed.balcony(ed.load(folder), [1])
    net.save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    blocks = {depth: DepthLM(str(tmp_path), depth=depth).model for depth in (1, 2, None)}
    assert [m.config.num_hidden_layers for m in blocks.values()] == [2, 2, 3]
    assert all(type(m) is LlamaForCausalLM for m in blocks.values())


def test_the_gpu_that_the_harness_asks_for_by_default_is_not_needed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    assert DepthLM(str(folder), depth=1, device="cuda:0").device == torch.device("cpu")


def test_a_depth_the_model_does_not_have_is_refused(folder: Path) -> None:
    with pytest.raises(DepthError, match=r"depth 4, but .* has 3 blocks"):
        DepthLM(str(folder), depth=4)
