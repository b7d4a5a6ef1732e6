"""The server as clients see it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from fastapi.testclient import TestClient
from tests.serving.conftest import Talker

import everydepth as ed
from everydepth.errors import SettingError
from everydepth.serving import ServeConfig, Served, application


@pytest.fixture(scope="module")
def client(talker: Talker) -> Iterator[TestClient]:
    served = Served(
        name="talker",
        model=talker.model,
        tokenizer=talker.tokenizer,
        policies={"sure": ed.Confidence(threshold=0.3)},
    )
    with TestClient(application(served, ServeConfig(places=4))) as client:
        yield client


def complete(client: TestClient, **body: Any) -> dict[str, Any]:
    answer = client.post("/v1/completions", json={"model": "talker", "max_tokens": 8} | body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def alone(talker: Talker, prompt: str, **told: Any) -> str:
    said = ed.generate(talker.model, talker.ids(prompt), max_new_tokens=8, **told)
    return talker.tokenizer.decode(said.tokens[0], skip_special_tokens=True)


@pytest.mark.parametrize(
    ("asked", "told", "depth"),
    [
        ({}, {}, 4),
        ({"model": "talker@2"}, {"depth": 2}, 2),
        ({"depth": 3}, {"depth": 3}, 3),
        ({"draft_depth": 1}, {}, 4),
        (
            {"temperature": 0.7, "seed": 5, "top_p": 0.9},
            {"do_sample": True, "temperature": 0.7, "seed": 5, "top_p": 0.9},
            4,
        ),
    ],
)
def test_a_completion_is_what_generate_gives_and_says_its_depth(
    client: TestClient, talker: Talker, asked: dict[str, Any], told: dict[str, Any], depth: int
) -> None:
    answer = complete(client, prompt="Once upon", **asked)
    (choice,) = answer["choices"]
    assert choice["text"] == alone(talker, "Once upon", **told)
    assert choice["depth"] == depth
    assert answer["usage"]["prompt_tokens"] == len(talker.ids("Once upon"))


def test_several_prompts_are_several_choices(client: TestClient, talker: Talker) -> None:
    answer = complete(client, prompt=["ab", "xyz"], depth=2)
    assert [c["text"] for c in answer["choices"]] == [
        alone(talker, text, depth=2) for text in ("ab", "xyz")
    ]
    tokens = complete(client, prompt=talker.ids("ab"), depth=2)
    assert tokens["choices"][0]["text"] == answer["choices"][0]["text"]


def test_a_policy_by_name_exits_early(client: TestClient, talker: Talker) -> None:
    answer = complete(client, prompt="Once", policy="sure")
    policy = ed.Confidence(threshold=0.3)
    assert answer["choices"][0]["text"] == alone(talker, "Once", policy=policy)


def test_a_stream_is_the_same_text_in_parts(client: TestClient, talker: Talker) -> None:
    body = {"model": "talker", "prompt": "Once", "max_tokens": 8, "stream": True}
    with client.stream("POST", "/v1/completions", json=body) as answer:
        lines = [line for line in answer.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    parts = [json.loads(line.removeprefix("data: "))["choices"][0] for line in lines[:-1]]
    assert len(parts) >= 2
    assert "".join(part["text"] for part in parts) == alone(talker, "Once")
    assert parts[-1]["finish_reason"] in ("length", "stop")


def test_a_chat_follows_the_template(client: TestClient, talker: Talker) -> None:
    body = {"model": "talker", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 8}
    answer = client.post("/v1/chat/completions", json=body).json()
    message = answer["choices"][0]["message"]
    assert message == {"role": "assistant", "content": alone(talker, "user: hi\nassistant: ")}


def test_a_stop_string_ends_the_text_before_it(client: TestClient, talker: Talker) -> None:
    whole = alone(talker, "Once upon a")
    stop = whole[3:5]
    answer = complete(client, prompt="Once upon a", stop=[stop])
    assert answer["choices"][0]["text"] == whole[: whole.index(stop)]
    assert answer["choices"][0]["finish_reason"] == "stop"


def test_models_lists_every_depth(client: TestClient) -> None:
    listed = client.get("/v1/models").json()["data"]
    assert [one["id"] for one in listed] == ["talker", *(f"talker@{k}" for k in range(1, 5))]
    assert listed[0]["policies"] == ["sure"]


def test_metrics_count_tokens_by_depth(client: TestClient) -> None:
    complete(client, prompt="a", depth=1)
    text = client.get("/metrics").text
    assert 'everydepth_generated_tokens_total{depth="1",model="talker"}' in text
    assert "everydepth_engine_running" in text
    assert client.get("/health").status_code == client.get("/ready").status_code == 200


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        ("{", 400, "JSON"),
        ({"model": "talker"}, 400, "prompt"),
        ({"model": "other", "prompt": "a"}, 400, "no model 'other'"),
        ({"model": "talker@9", "prompt": "a"}, 400, "talker@1 to @4"),
        ({"model": "talker@2", "depth": 3, "prompt": "a"}, 400, "disagree"),
        ({"model": "talker", "prompt": "a", "depth": 9}, 400, "depth 9"),
        ({"model": "talker", "prompt": "a", "policy": "none"}, 400, "there is sure"),
        ({"model": "talker", "prompt": "a" * 100_000}, 400, "positions"),
        ({"model": "talker", "prompt": "a", "max_tokens": 10**6}, 400, "positions"),
        ({"model": "talker", "prompt": [10**9]}, 400, "token 1000000000"),
        ({"model": "talker", "prompt": []}, 400, "empty"),
        ({"model": "talker", "prompt": "a", "temperature": -1}, 400, "temperature"),
        ({"model": "talker", "prompt": "a", "top_p": 0.5}, 400, "temperature above 0"),
        ({"model": "talker", "prompt": "a", "n": 3}, 400, "n:"),
        ({"model": "talker", "prompt": "a", "stop": ""}, 400, "stop"),
        ({"model": "talker", "prompt": "a" * 2**20}, 413, "bytes"),
    ],
)
def test_a_request_that_makes_no_sense_gets_a_status_and_a_reason(
    client: TestClient, body: Any, status: int, words: str
) -> None:
    content = body if isinstance(body, str) else json.dumps(body)
    answer = client.post(
        "/v1/completions", content=content, headers={"content-type": "application/json"}
    )
    assert answer.status_code == status
    assert words in answer.json()["error"]["message"]
    assert complete(client, prompt="a", depth=1)["choices"]  # others are not disturbed


def test_a_body_of_unknown_length_is_counted(client: TestClient) -> None:
    def parts() -> Iterator[bytes]:
        for _ in range(40):
            yield b" " * 2**16

    answer = client.post("/v1/completions", content=parts())
    assert answer.status_code == 413


def test_a_key_is_asked_for_everywhere_but_at_the_doors_of_health(talker: Talker) -> None:
    served = Served(name="talker", model=talker.model, tokenizer=talker.tokenizer)
    with TestClient(application(served, key="secret")) as client:
        assert client.get("/v1/models").status_code == 401
        assert client.get("/health").status_code == 200
        right = {"authorization": "Bearer secret"}
        assert client.get("/v1/models", headers=right).status_code == 200
        wrong = {"authorization": "Bearer secre"}
        assert client.get("/metrics", headers=wrong).status_code == 401


def test_a_floor_without_a_target_or_a_profile_is_refused(talker: Talker) -> None:
    served = Served(name="talker", model=talker.model, tokenizer=talker.tokenizer)
    with pytest.raises(SettingError, match="give --target"):
        application(served, ServeConfig(floor=0.5))
    with pytest.raises(SettingError, match="needs --profile"):
        application(served, ServeConfig(floor=0.5, target=1.0))
