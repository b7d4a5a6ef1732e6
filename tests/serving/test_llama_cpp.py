"""The smallest of the other engines: llama.cpp with cut files behind the same routes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from fastapi.testclient import TestClient
from tests.helpers.tokenizing import sentencepiece
from transformers import LlamaConfig, LlamaForCausalLM

import everydepth as ed
from everydepth.serving import ServeConfig, Served, application

PROMPT = [3, 4, 5]


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    config = LlamaConfig(
        eos_token_id=2,
        vocab_size=len(sentencepiece()),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        max_position_embeddings=64,
        initializer_range=0.3,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def client(model: LlamaForCausalLM) -> Iterator[TestClient]:
    served = Served(name="m", model=model, tokenizer=sentencepiece())
    config = ServeConfig(engine="llama.cpp", rungs="2,3", places=2)
    with TestClient(application(served, config)) as found:
        yield found


def complete(client: TestClient, **body: Any) -> Any:
    asked = {"model": "m", "prompt": PROMPT, "max_tokens": 6, "return_token_ids": True} | body
    answer = client.post("/v1/completions", json=asked)
    assert answer.status_code == 200, answer.text
    return answer


@pytest.mark.parametrize("depth", [2, 3])
def test_llama_cpp_gives_the_tokens_of_the_depth(
    client: TestClient, model: LlamaForCausalLM, depth: int
) -> None:
    alone = ed.generate(model, PROMPT, max_new_tokens=6, depth=depth).tokens[0]
    (choice,) = complete(client, model=f"m@{depth}").json()["choices"]
    assert (choice["token_ids"], choice["depth"]) == (alone, depth)
    lines = complete(client, depth=depth, stream=True).text.splitlines()
    parts = [
        json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")
    ]
    assert [token for part in parts for token in part["choices"][0]["token_ids"]] == alone


def test_only_the_rungs_are_listed_and_named(client: TestClient) -> None:
    listed = client.get("/v1/models").json()["data"]
    assert [one["id"] for one in listed] == ["m", "m@2", "m@3"]


def test_the_token_that_ends_a_text_is_no_part_of_it(
    client: TestClient, model: LlamaForCausalLM
) -> None:
    for first in range(3, 60):
        alone = ed.generate(model, [first, 5], max_new_tokens=40).tokens[0]
        if alone[-1] == model.config.eos_token_id:
            break
    else:
        pytest.fail("this model never ends")
    (choice,) = complete(client, prompt=[first, 5], max_tokens=40).json()["choices"]
    assert (choice["token_ids"], choice["finish_reason"]) == (alone, "stop")
    told = sentencepiece().decode(alone[:-1], skip_special_tokens=True)
    assert choice["text"].strip() == told.strip()


def test_a_request_that_llama_cpp_refuses_is_the_clients_mistake(client: TestClient) -> None:
    body = {"model": "m@1", "prompt": PROMPT}
    answer = client.post("/v1/completions", json=body)
    assert answer.status_code == 400
    assert "depth '1'; use m@2, @3" in answer.json()["error"]["message"]
