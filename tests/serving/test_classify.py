"""Classifiers behind the server."""

from __future__ import annotations

import asyncio
import base64
import copy
import io
from typing import Any

import numpy as np
import pytest
import torch
from fastapi.testclient import TestClient
from PIL import Image
from tests.helpers.talking import Talker
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    ViTConfig,
    ViTForImageClassification,
)

import everydepth as ed
from everydepth.errors import PolicyError, SettingError
from everydepth.serving import Busy, ServeConfig, Served, application
from everydepth.serving.classify import Classifier, at_depths
from everydepth.stream import as_stream


@pytest.fixture(scope="module")
def vit() -> ViTForImageClassification:
    torch.manual_seed(0)
    config = ViTConfig(
        image_size=8,
        patch_size=4,
        num_channels=3,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_labels=5,
        initializer_range=0.5,
    )
    return ViTForImageClassification(config).double().eval()


def picture(seed: int) -> str:
    values = np.random.default_rng(seed).integers(0, 255, (8, 8, 3), dtype=np.uint8)
    out = io.BytesIO()
    Image.fromarray(values).save(out, "PNG")
    return base64.b64encode(out.getvalue()).decode()


def test_rows_of_different_depths_share_blocks_and_get_what_they_get_alone(
    vit: ViTForImageClassification,
) -> None:
    stream = ed.as_stream(vit)
    batch = {"pixel_values": torch.randn(5, 3, 8, 8, dtype=torch.float64)}
    depths = [2, 3, 0, 1, 3]
    with torch.no_grad():
        found = at_depths(stream, batch, depths)
        states = stream.observe(batch)
        for row, depth in enumerate(depths):
            torch.testing.assert_close(found[row], states.logits(depth)[row])


def test_pictures_are_classified_at_the_depth_that_is_asked(vit: ViTForImageClassification) -> None:
    vit = vit.float()
    policies = {"sure": ed.Confidence(threshold=0.5)}
    with TestClient(application(Served(name="vit", model=vit, policies=policies))) as client:

        def ask(**body: Any) -> Any:
            return client.post("/v1/classify", json={"model": "vit", "input": picture(0)} | body)

        first = ask(model="vit@1").json()["data"][0]
        assert first["depth"] == 1
        many = ask(input=[picture(i) for i in range(4)]).json()["data"]
        assert [one["depth"] for one in many] == [3] * 4
        assert all(one["label"] == f"LABEL_{one['class']}" for one in many)
        early = ask(policy="sure").json()["data"][0]
        assert early["probability"] >= 0.5 or early["depth"] == 3
        assert ask(policy="sure", depth=2).status_code == 400
        assert ask(depth=4).status_code == 400
        unknown = ask(dept=2)
        assert unknown.status_code == 400
        assert "dept is not supported here" in unknown.json()["error"]["message"]
        assert ask(user="me").status_code == 200
        assert ask(input="no picture").status_code == 400
        assert "not base64" in ask(input="caf\u00e9").json()["error"]["message"]
        assert "input: 257 rows" in ask(input=["a"] * 257).json()["error"]["message"]
        assert ask(input=[]).status_code == 400
        assert ask(input=base64.b64encode(b"GIF89a").decode()).status_code == 400


def test_no_class_is_served_of_predictions_that_are_no_numbers(
    vit: ViTForImageClassification,
) -> None:
    broken = copy.deepcopy(vit).float()
    with torch.no_grad():
        broken.classifier.weight[0, 0] = torch.nan
    with TestClient(application(Served(name="vit", model=broken))) as client:
        answer = client.post("/v1/classify", json={"model": "vit", "input": picture(0)})
    assert answer.status_code == 500
    assert "predictions at depth 1 of 3 are NaN or infinite" in answer.json()["error"]["message"]


def test_a_classifier_has_a_depth_of_its_own_and_refuses_what_it_cannot_do(
    vit: ViTForImageClassification,
) -> None:
    served = Served(name="vit", model=vit.float())
    with TestClient(application(served, ServeConfig(depth=2))) as client:
        body = {"model": "vit", "input": [picture(0), picture(1)]}
        found = client.post("/v1/classify", json=body).json()["data"]
        assert [one["depth"] for one in found] == [2, 2]
        seen = ed.Results.from_json(client.get("/v1/results").json()).result("load").arrays
        assert (seen["requests"], seen["mean_depth"]) == (2, 2)
    for wrong in ({"target": 1.0}, {"floor": 0.5}, {"engine": "vllm"}):
        with pytest.raises(SettingError, match=f"--{next(iter(wrong))}: only for language models"):
            application(served, ServeConfig(**wrong))


def test_more_inputs_than_may_wait_are_refused(vit: ViTForImageClassification) -> None:
    classifier = Classifier(as_stream(vit.float()), lambda rows: {"pixel_values": rows[0]}, queue=2)

    async def asked() -> list[Any]:
        row = torch.zeros(1, 3, 8, 8)
        several = [classifier.run([row], 3, None) for _ in range(4)]
        found = await asyncio.gather(*several, return_exceptions=True)
        classifier.stop()
        return found

    found = asyncio.run(asked())
    assert [isinstance(one, Busy) for one in found] == [False, False, True, True]


def test_texts_of_different_lengths_are_one_batch(talker: Talker) -> None:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(talker.tokenizer),
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=32,
        num_labels=3,
        pad_token_id=0,
    )
    model = BertForSequenceClassification(config).eval()
    served = Served(name="bert", model=model, tokenizer=talker.tokenizer)
    with TestClient(application(served)) as client:
        texts = ["short", "a longer text", "x"]
        body = {"model": "bert@2", "input": texts}
        found = client.post("/v1/classify", json=body).json()["data"]
        for text, one in zip(texts, found, strict=True):
            ids = torch.tensor([talker.ids(text)])
            with torch.no_grad():
                alone = model(input_ids=ids).logits[0].softmax(-1)
            assert one["class"] == int(alone.argmax())
            assert one["probability"] == pytest.approx(float(alone.max()), rel=1e-5)
        long = client.post("/v1/classify", json={"model": "bert", "input": "y" * 40})
        assert long.status_code == 400
        assert "32" in long.json()["error"]["message"]


def test_an_input_that_fails_costs_those_of_other_policies_nothing(
    vit: ViTForImageClassification,
) -> None:
    classifier = Classifier(
        as_stream(vit.float()), lambda rows: {"pixel_values": torch.stack(list(rows))}
    )
    foreign = ed.Confidence(threshold=(0.5, 0.5, 0.5))  # for a model of four depths

    async def asked() -> list[Any]:
        row = torch.zeros(3, 8, 8)
        several = [classifier.run([row], 3, policy) for policy in (None, foreign, None)]
        found = await asyncio.gather(*several, return_exceptions=True)
        classifier.stop()
        return found

    first, wrong, last = asyncio.run(asked())
    assert isinstance(wrong, PolicyError)
    assert first[0].depth == last[0].depth == 3
