"""Real language models: greedy text stays the same, in the numbers they are published in."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from everydepth.exits.generation import generate

pytestmark = pytest.mark.slow

TEXTS = [
    "Once upon a time",
    "One day, a little girl named Lily found a needle.",
    "Tom and his dog",
    "The sun was hot. A frog",
    "Ben likes",
    "There was a big house in the wood and",
    "Mom said",
    "In the night",
]


@pytest.fixture(scope="module")
def root() -> Path:
    beside = Path(__file__).parents[4] / "shared" / "data"
    folder = Path(os.environ.get("EVERYDEPTH_DATA", beside))
    if not folder.is_dir():
        pytest.fail(f"no models in {folder}; set EVERYDEPTH_DATA to the folder that holds them")
    return folder


def loaded(root: Path, name: str, dtype: torch.dtype) -> tuple[Any, Any]:
    model = AutoModelForCausalLM.from_pretrained(root / name, dtype=dtype).eval()
    tokenizer = AutoTokenizer.from_pretrained(root / name)
    tokenizer.padding_side, tokenizer.pad_token_id = "left", 0
    return model, tokenizer(TEXTS, return_tensors="pt", padding=True, return_token_type_ids=False)


@pytest.mark.parametrize("draft_depth", [None, 1, 4])
@pytest.mark.parametrize("name", ["stories260K", "stories15M"])
def test_eight_rows_say_what_transformers_says(
    root: Path, name: str, draft_depth: int | None
) -> None:
    model, batch = loaded(root, name, torch.float64)
    theirs = model.generate(**batch, max_new_tokens=100, do_sample=False, pad_token_id=0)
    ours = generate(model, dict(batch), max_new_tokens=100, draft_depth=draft_depth, pad_token_id=0)
    assert torch.equal(ours.sequences, theirs)


@pytest.mark.parametrize("name", ["stories260K", "stories15M"])
def test_one_row_in_float32_drafts_what_it_says(root: Path, name: str) -> None:
    model, _ = loaded(root, name, torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(root / name)
    for text in TEXTS[:3]:
        ids = tokenizer(text)["input_ids"]
        plain = generate(model, ids, max_new_tokens=200)
        assert generate(model, ids, max_new_tokens=200, draft_depth=3).tokens == plain.tokens
        assert len(plain.tokens[0]) > 20
