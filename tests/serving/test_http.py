"""The server as clients see it."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from fastapi.testclient import TestClient
from tests.helpers.talking import Talker
from tests.helpers.tokenizing import sentencepiece
from tokenizers import decoders
from transformers import LlamaConfig, LlamaForCausalLM

import everydepth as ed
from everydepth.errors import PolicyError, SettingError
from everydepth.exits.policies import Certificate
from everydepth.exits.profile import DepthProfile, Latency, Profile
from everydepth.serving import ServeConfig, Served, application
from everydepth.serving.bodies import Completion


@pytest.fixture(scope="module")
def client(talker: Talker) -> Iterator[TestClient]:
    served = Served(
        name="talker",
        model=talker.model,
        tokenizer=talker.tokenizer,
        policies={"sure": ed.Confidence(threshold=0.05)},
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
        ({"draft_depth": 0}, {}, 4),
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


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_follows_its_prompt_though_the_tokenizer_drops_leading_blanks(
    stream: bool,
) -> None:
    """Llama's decodes " upon" alone as "upon"; after "Once" it must not become "Onceupon"."""
    tokenizer = sentencepiece()
    parts = [decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.backend_tokenizer.decoder = decoders.Sequence(parts)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
    )
    model = LlamaForCausalLM(config).eval()
    word = tokenizer.convert_tokens_to_ids("▁the")
    torch.nn.init.zeros_(model.model.norm.weight)  # only the bias speaks, always the same word
    model.lm_head.bias = torch.nn.Parameter(torch.eye(len(tokenizer))[word])
    served = Served(name="talker", model=model, tokenizer=tokenizer)
    with TestClient(application(served)) as client:
        body = {"model": "talker", "prompt": "the", "max_tokens": 3, "stream": stream}
        answer = client.post("/v1/completions", json=body).text
    lines = [line.removeprefix("data: ") for line in answer.splitlines() if "choices" in line]
    assert "".join(json.loads(x)["choices"][0]["text"] for x in lines) == " the the the"
    assert tokenizer.decode([word]) == "the"


def test_several_prompts_are_several_choices(client: TestClient, talker: Talker) -> None:
    answer = complete(client, prompt=["ab", "xyz"], depth=2)
    assert [c["text"] for c in answer["choices"]] == [
        alone(talker, text, depth=2) for text in ("ab", "xyz")
    ]
    tokens = complete(client, prompt=talker.ids("ab"), depth=2)
    assert tokens["choices"][0]["text"] == answer["choices"][0]["text"]


def test_a_policy_by_name_exits_early(client: TestClient, talker: Talker) -> None:
    answer = complete(client, prompt="Once", policy="sure")
    policy = ed.Confidence(threshold=0.05)
    assert answer["choices"][0]["text"] == alone(talker, "Once", policy=policy)


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_with_a_policy_gives_the_depth_of_each_token(
    client: TestClient, talker: Talker, stream: bool
) -> None:
    body = {"model": "talker", "prompt": "Once", "max_tokens": 8, "policy": "sure"}
    answer = client.post("/v1/completions", json=body | {"stream": stream})
    choices = [part["choices"][0] for part in parts_of(answer.text)]
    policy = ed.Confidence(threshold=0.05)
    alone = ed.generate(talker.model, talker.ids("Once"), max_new_tokens=8, policy=policy)
    said = [depth for choice in choices for depth in choice["exit_depths"]]
    assert said == list(alone.stats.exit_depths[0])
    assert len(set(said)) > 1  # or this could not tell one depth from another


def parts_of(text: str) -> list[dict[str, Any]]:
    """The objects of an answer, streamed or not."""
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line]
    return [json.loads(line) for line in lines if line != "[DONE]"]


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


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"messages": [{"role": "user", "content": "hi", "name": "Ann"}]}, "name is not supported"),
        ({"stream": True, "stream_options": {"include_use": True}}, "include_use is not"),
    ],
)
def test_unknown_fields_inside_others_are_refused(
    client: TestClient, wrong: dict[str, Any], words: str
) -> None:
    body = {"model": "talker", "messages": [{"role": "user", "content": "hi"}]}
    answer = client.post("/v1/chat/completions", json=body | wrong)
    assert answer.status_code == 400
    assert words in answer.json()["error"]["message"]


def test_messages_that_the_chat_template_refuses_get_its_words(talker: Talker) -> None:
    tokenizer = copy.deepcopy(talker.tokenizer)
    tokenizer.chat_template = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    )
    served = Served(name="talker", model=talker.model, tokenizer=tokenizer)
    body = {"model": "talker", "messages": [{"role": "system", "content": "Hi"}]}
    with TestClient(application(served), raise_server_exceptions=False) as client:
        answer = client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400
    assert "these messages: no system role" in answer.json()["error"]["message"]


def test_the_parts_of_a_streamed_chat_add_up_to_one_message(
    client: TestClient, talker: Talker
) -> None:
    body = {"model": "talker", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 8}
    answer = client.post("/v1/chat/completions", json=body | {"stream": True})
    deltas = [part["choices"][0]["delta"] for part in parts_of(answer.text)]
    assert len(deltas) > 1
    # As OpenAI's client does it: strings of the same name are joined.
    joined = {name: "".join(d.get(name, "") for d in deltas) for name in ("role", "content")}
    assert joined == {"role": "assistant", "content": alone(talker, "user: hi\nassistant: ")}


def test_a_stop_string_ends_the_text_before_it(client: TestClient, talker: Talker) -> None:
    whole = alone(talker, "Once upon a")
    stop = whole[3:5]
    answer = complete(client, prompt="Once upon a", stop=[stop])
    assert answer["choices"][0]["text"] == whole[: whole.index(stop)]
    assert answer["choices"][0]["finish_reason"] == "stop"


def test_fields_that_change_no_answer_are_passed_over(client: TestClient) -> None:
    more = {
        "user": "me",
        "logprobs": None,
        "presence_penalty": 0,
        "metadata": {"a": "b"},
        "top_p": 1,
    }
    plain, same = (complete(client, prompt="Once", **body) for body in ({}, more))
    assert same["choices"] == plain["choices"]


PLAIN = {"model": "talker", "prompt": "ab", "max_tokens": 64}


@pytest.fixture(scope="module")
def plainly(client: TestClient) -> Any:
    return client.post("/v1/completions", json=PLAIN).json()["choices"]


@pytest.mark.parametrize("name", sorted(Completion.model_fields.keys() - {"model", "prompt"}))
def test_a_field_that_is_null_is_as_good_as_missing(
    client: TestClient, name: str, plainly: Any
) -> None:
    found = client.post("/v1/completions", json=PLAIN | {name: None})
    assert found.status_code == 200, found.text
    assert found.json()["choices"] == plainly


def test_models_lists_every_depth(client: TestClient) -> None:
    listed = client.get("/v1/models").json()["data"]
    assert [one["id"] for one in listed] == ["talker", *(f"talker@{k}" for k in range(1, 5))]
    assert listed[0]["policies"] == ["sure"]
    assert all(isinstance(one["created"], int) for one in listed)


def test_one_model_can_be_looked_up(client: TestClient) -> None:
    assert client.get("/v1/models/talker@3").json()["depth"] == 3
    assert client.get("/v1/models/talker@5").status_code == 404


def test_an_unknown_path_is_told_the_routes(client: TestClient) -> None:
    answer = client.post("/v1/complete", json={"model": "talker", "prompt": "a"})
    assert answer.status_code == 404
    said = answer.json()["error"]["message"]
    assert said.startswith("Not Found: POST /v1/complete; the routes are /health, ")
    assert "/v1/completions" in said
    assert client.get("/v1/completions").status_code == 405


def test_a_stream_tells_its_usage_if_it_is_asked(client: TestClient, talker: Talker) -> None:
    body = {"model": "talker", "prompt": "ab", "max_tokens": 3, "stream": True, "echo": False}
    plain = client.post("/v1/completions", json=body).text
    assert "usage" not in plain
    told = client.post("/v1/completions", json=body | {"stream_options": {"include_usage": True}})
    *_, last, done, _ = told.text.split("\n\n")
    assert done == "data: [DONE]"
    usage = json.loads(last.removeprefix("data: "))["usage"]
    assert usage["prompt_tokens"] == len(talker.ids("ab"))
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


def test_metrics_count_tokens_by_depth(client: TestClient) -> None:
    complete(client, prompt="a", depth=1)
    text = client.get("/metrics").text
    assert 'everydepth_generated_tokens_total{depth="1",model="talker"}' in text
    assert "everydepth_engine_running" in text
    assert client.get("/health").status_code == client.get("/ready").status_code == 200


def test_what_clients_saw_is_published_as_results(client: TestClient) -> None:
    complete(client, prompt="a", depth=3)
    found = ed.Results.from_json(client.get("/v1/results").json())
    load = found.result("load").arrays
    assert load["requests"] >= 1
    assert load["running"] == 0
    assert load["p50_seconds"] <= load["p95_seconds"]
    assert found.result("depths").at_depth()[3] >= 1


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        ("{", 400, "not JSON"),
        ({"model": "talker", "prompt": "a", "echo": True}, 400, "echo is not supported"),
        ({"model": "talker", "prompt": "a", "presence_penalty": 1}, 400, "presence_penalty is"),
        ({"model": "talker", "prompt": "a", "logprobs": 5}, 400, "logprobs is not supported"),
        ({"model": "talker", "prompt": "a", "max_token": 5}, 400, "max_token is not supported"),
        ({"model": "talker", "prompt": "a", "stream_options": {}}, 400, "go with stream"),
        ({"model": "talker", "prompt": ["a", 1]}, 400, "prompt: Input should be a valid string"),
        ({"model": "talker", "prompt": 1}, 400, "prompt: Input should be a valid string"),
        ({"model": "talker", "prompt": [1, -2]}, 400, "greater than or equal to 0"),
        ({"model": "talker", "prompt": [[1], [2.5]]}, 400, "prompt: Input should be a valid int"),
        ({"model": "talker"}, 400, "the body lacks 'prompt'; add it"),
        ({"prompt": "a"}, 400, "lacks 'model'; add it (/v1/models lists the models"),
        ({"model": "other", "prompt": "a"}, 404, "no model 'other'"),
        ({"model": "talker@9", "prompt": "a"}, 400, "talker@1 to @4"),
        ({"model": "talker@", "prompt": "a"}, 400, "depth ''; use talker@1 to @4"),
        ({"model": "talker@02", "prompt": "a"}, 400, "depth '02'; use talker@1 to @4"),
        ({"model": "talker@" + "9" * 5000, "prompt": "a"}, 400, "use talker@1 to @4"),
        ({"model": "talker@2", "depth": 3, "prompt": "a"}, 400, "disagree"),
        ({"model": "talker", "prompt": "a", "depth": 10**30}, 400, "depth: Input should be less"),
        ({"model": "talker", "prompt": "a", "max_tokens": 10**30}, 400, "max_tokens: Input should"),
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


@pytest.mark.parametrize(
    "body",
    [
        b'{"model": "talker", "prompt": "\\ud800"}',
        b'{"model": "talker", "prompt": "a", "\\ud800": 1}',
        b'{"model": "talker", "prompt": [-1]}',
        b'{"model": "talker", "prompt": [1000000000000000000000000]}',
        b'{"model": "talker", "prompt": "a", "temperature": 1, "seed": 1000000000000000000000000}',
        b'{"model": "talker", "prompt": "a", "temperature": NaN}',
        b'{"model": "talker", "prompt": ' + b"[" * 100_000,
        b"\xff\xfe",
        b"null",
    ],
)
def test_a_body_that_no_client_would_send_is_refused(client: TestClient, body: bytes) -> None:
    answer = client.post(
        "/v1/completions", content=body, headers={"content-type": "application/json"}
    )
    assert answer.status_code == 400
    assert "Traceback" not in answer.text


@pytest.mark.parametrize("body", [b"", b"[]", b"null", b'"a"', b"model=talker"])
@pytest.mark.parametrize("declared", [{}, {"content-type": "application/json"}])
def test_a_body_that_is_no_object_is_told_what_to_send(
    client: TestClient, body: bytes, declared: dict[str, str]
) -> None:
    answer = client.post("/v1/completions", content=body, headers=declared)
    assert answer.status_code == 400
    message = answer.json()["error"]["message"]
    assert ("header Content-Type: application/json" in message) or ("is not JSON" in message)


@pytest.mark.parametrize("prompts", [["a"] * 257, [[3]] * 200_000])
def test_a_request_of_very_many_prompts_is_refused_before_any_work(
    client: TestClient, prompts: list[Any]
) -> None:
    answer = client.post("/v1/completions", json={"model": "talker", "prompt": prompts})
    assert answer.status_code == 400
    message = answer.json()["error"]["message"]
    assert message == (
        f"prompt: {len(prompts)} rows, but a request may have 256; send several requests"
    )
    most = complete(client, prompt=["a"] * 256, depth=1, max_tokens=1)
    assert len(most["choices"]) == 256


def test_no_text_is_served_of_predictions_that_are_no_numbers(talker: Talker) -> None:
    broken = copy.deepcopy(talker.model)
    with torch.no_grad():
        broken.model.layers[1].mlp.down_proj.weight[0, 0] = torch.nan
    with TestClient(
        application(Served(name="talker", model=broken, tokenizer=talker.tokenizer))
    ) as client:
        body = {"model": "talker", "prompt": "ab", "max_tokens": 2}
        answer = client.post("/v1/completions", json=body)
        assert answer.status_code == 500
        assert "NaN or infinite" in answer.json()["error"]["message"]
        # below the block that is broken, the model is as good as before
        assert client.post("/v1/completions", json=body | {"depth": 1}).status_code == 200


def test_a_policy_of_another_model_is_refused_before_the_server_starts(talker: Talker) -> None:
    foreign = ed.Confidence(threshold=(0.5, 0.5))  # for a model of three depths
    served = Served(
        name="talker",
        model=talker.model,
        tokenizer=talker.tokenizer,
        policies={"foreign": foreign},
    )
    with pytest.raises(PolicyError, match="policy 'foreign': this policy has thresholds for 3"):
        application(served)


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
    with pytest.raises(SettingError, match="give one of them"):
        application(served, ServeConfig(target=1.0, speed=5.0))
    with pytest.raises(SettingError, match="served at 1 to 4"):
        application(served, ServeConfig(depth=5))
    with pytest.raises(SettingError, match="give --target"):
        application(served, ServeConfig(floor=0.5))
    with pytest.raises(SettingError, match="needs --profile"):
        application(served, ServeConfig(floor=0.5, target=1.0))


def test_under_any_load_depths_are_balconies_at_the_floor_of_a_partial_profile(
    talker: Talker,
) -> None:
    took = Latency(low=1.0, median=1.0, high=1.0)
    counts = {"parameters": 1, "checkpoint_bytes": 1, "flops": 1, "peak_bytes": 1}
    depths = [
        DepthProfile(depth=depth, quality=found, latency=took, batch_latency=took, **counts)
        for depth, found in {1: 9.0, 2: 5.0, 4: 3.0}.items()
    ]
    profile = Profile.of(depths, metric="perplexity", batch_size=2, row_tokens=8)
    net = ed.balcony(talker.model, [1, 2]).eval()
    served = Served(name="talker", model=net, tokenizer=talker.tokenizer, profile=profile)
    with pytest.raises(SettingError, match="best perplexity of a depth is 3"):
        application(served, ServeConfig(target=1e-6, floor=2.0))
    with TestClient(application(served, ServeConfig(target=1e-6, floor=5.0))) as client:
        assert complete(client, prompt="Once")["choices"][0]["depth"] == 2
        assert client.get("/v1/models/talker@2").json()["perplexity"] == 5.0
        assert "perplexity" not in client.get("/v1/models/talker@3").json()
        found = ed.Results.from_json(client.get("/v1/results").json())
        assert found.result("load").arrays["mean_quality"] == 5.0


def test_the_governor_stays_at_the_certified_depth_or_above(talker: Talker) -> None:
    promised = ed.Confidence(threshold=(float("inf"), 0.0, 0.0), certificate=certificate())
    served = Served(
        name="talker", model=talker.model, tokenizer=talker.tokenizer, certificate=promised
    )
    with pytest.raises(SettingError, match="give --target"):
        application(served)
    with pytest.raises(SettingError, match="certificate 2 and deeper, and --depth 1 and shallower"):
        application(served, ServeConfig(target=1.0, depth=1))
    # A target nobody can meet: as shallow as it may be.
    with TestClient(application(served, ServeConfig(target=1e-6))) as client:
        assert complete(client, prompt="Once")["choices"][0]["depth"] == 2


def certificate() -> Certificate:
    return Certificate(
        certified=True,
        risk=0.1,
        delta=0.05,
        against="full",
        samples=100,
        observed=0.01,
        p_value=0.01,
        speedup=2.0,
        note="",
    )
