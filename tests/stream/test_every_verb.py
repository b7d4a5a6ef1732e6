"""Every verb on a dozen networks of different structure: it works, or says what is missing."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.zoo.stock import stock
from torch import Tensor, nn
from transformers import SwinConfig, SwinForImageClassification

import everydepth as ed
from everydepth.errors import EveryDepthError
from everydepth.growth import score

Batch = dict[str, Tensor]

MODELS = {
    "causal:GPTJForCausalLM": "parallel branches",
    "causal:Gemma2ForCausalLM": "sandwich norms, soft-capped logits",
    "causal:GraniteForCausalLM": "multipliers",
    "causal:MixtralForCausalLM": "a mixture of experts",
    "causal:MambaForCausalLM": "a state space, one branch",
    "masked:AlbertForMaskedLM": "one module called again and again, post-norm",
    "masked:ModernBertForMaskedLM": "a first block without a norm",
    "seq2seq:T5ForConditionalGeneration": "encoder and decoder",
    "SwinForImageClassification": "stages that change the shape",
    "image:ConvNextForImageClassification": "convolutions, stages",
    "image:Dinov2ForImageClassification": "layer scale",
    "audio:WhisperForAudioClassification": "an encoder of sound",
}


def _swin() -> tuple[nn.Module, Batch]:
    sizes = {"depths": [2, 2], "num_heads": [2, 2], "embed_dim": 8, "window_size": 2}
    torch.manual_seed(0)
    config = SwinConfig(**sizes, image_size=16, patch_size=2, num_labels=3)
    return SwinForImageClassification(config).eval(), {"pixel_values": torch.randn(2, 3, 16, 16)}


@cache
def _found(name: str) -> tuple[nn.Module, Batch]:
    own = next((each.make for each in stock() if each.name == name), _swin)
    model, batch = own()
    stream = ed.as_stream(model)
    z = stream.observe(batch).logits(stream.depth)
    labels = torch.randint(0, z.shape[-1], z.shape[:-1], generator=torch.Generator().manual_seed(0))
    if stream.inputs[0] == "decoder_input_ids" and labels.shape != batch["decoder_input_ids"].shape:
        labels = labels[:, :1]
    return model, {**batch, "labels": labels}


def train(model: nn.Module, batch: Batch, _: Path) -> None:
    ed.EveryDepth(model, objective=ed.lpa())(**batch).loss.backward()
    stream = ed.as_stream(model)
    assert all(any(p.grad is not None for p in b.module.parameters()) for b in stream.blocks)
    model.zero_grad()


def trace(model: nn.Module, batch: Batch, _: Path) -> None:
    found = ed.trace(model, [batch], metrics=["loss", "cos", "cka"], progress=False)
    assert found["loss"].shape == (ed.as_stream(model).depth + 1,)


def profile(model: nn.Module, batch: Batch, _: Path) -> None:
    assert len(ed.profile(model, [batch], repeats=1).depths) == ed.as_stream(model).depth


def at_depth(model: nn.Module, batch: Batch, _: Path) -> None:
    cut = ed.as_stream(ed.at_depth(model, 1))
    with torch.no_grad():
        z = cut.prediction(cut.call(cut.arguments(batch, None)))
        wanted = ed.as_stream(model).observe(batch).logits(1)
    torch.testing.assert_close(z, wanted, rtol=1e-4, atol=1e-5)


def export(model: nn.Module, batch: Batch, path: Path) -> None:
    example = {key: value for key, value in batch.items() if key != "labels"}
    folder = ed.export(model, path / "cut", depth=1, example=example)
    opened = ed.as_stream(type(model).from_pretrained(folder))  # pyright: ignore[reportAttributeAccessIssue]
    assert opened.depth == 1


def predict(model: nn.Module, batch: Batch, _: Path) -> None:
    found = ed.predict(model, batch, policy=ed.exits.Confidence(threshold=0.4))
    assert len(found.depths) == 2


def generate(model: nn.Module, batch: Batch, _: Path) -> None:
    ids = next(iter(batch.values()))
    whole = ed.generate(model, ids, max_new_tokens=3)
    drafted = ed.generate(model, ids, max_new_tokens=3, draft_depth=1)
    assert whole.tokens == drafted.tokens


def scaled_skip(model: nn.Module, batch: Batch, _: Path) -> None:
    stream = ed.as_stream(model)
    with torch.no_grad():
        before = stream.observe(batch).logits(stream.depth)
        with ed.scaled_skip(stream, layer=1, c=0.0):
            assert not torch.equal(stream.observe(batch).logits(stream.depth), before)
        assert torch.equal(stream.observe(batch).logits(stream.depth), before)


def ablate(model: nn.Module, batch: Batch, _: Path) -> None:
    ed.ablate(model, [batch], progress=False)


def audit(model: nn.Module, batch: Batch, _: Path) -> None:
    ed.audit(model, [batch], progress=False)


def insert(model: nn.Module, batch: Batch, _: Path) -> None:
    stream = ed.as_stream(model)
    grown = ed.as_stream(ed.insert(model, after=stream.depth).eval())
    assert grown.depth == stream.depth + 1
    with torch.no_grad():
        z = grown.prediction(grown.call(grown.arguments(batch, None)))
        assert torch.equal(z, stream.prediction(stream.call(stream.arguments(batch, None))))


def growth(model: nn.Module, batch: Batch, _: Path) -> None:
    rows = {key: torch.cat([value] * 4) for key, value in batch.items()}
    assert score(model, rows, at=[ed.as_stream(model).depth]).sites


VERBS: dict[str, Callable[[nn.Module, Batch, Path], Any]] = {
    verb.__name__: verb
    for verb in (
        *(train, trace, profile, at_depth, export, predict, generate),
        *(scaled_skip, ablate, audit, insert, growth),
    )
}

CLASSES = "leaving early needs a class per sample"
LABELS = "an audit is of class labels"
NEXT = "not the next token"
SHARED = "one module (that is called )?at several depths"
EXPERTS = "is a MixtralExperts, and only that of a single linear map"
CACHE = "drafts need a cache of keys and values by token"

# (model, verb) -> the property that is missing, in the words of the error.
MISSING: dict[tuple[str, str], str] = {
    **{(name, "predict"): CLASSES for name in MODELS if "Classification" not in name},
    **{(name, "audit"): LABELS for name in MODELS if "Classification" not in name},
    **{(name, "generate"): NEXT for name in MODELS if not name.startswith("causal")},
    **{
        ("masked:AlbertForMaskedLM", verb): SHARED
        for verb in ("scaled_skip", "ablate", "insert", "growth")
    },
    ("causal:MixtralForCausalLM", "growth"): EXPERTS,
    ("causal:MambaForCausalLM", "generate"): CACHE,
}


# A sample by default; all of them with `make slow`.
SAMPLE = ("AlbertForMaskedLM", "T5ForConditionalGeneration", "ConvNextForImageClassification")
CASES = [
    pytest.param(name, marks=() if name.endswith(SAMPLE) else pytest.mark.slow) for name in MODELS
]


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("name", CASES)
def test_a_verb_works_or_says_which_property_is_missing(
    name: str, verb: str, tmp_path: Path
) -> None:
    model, batch = _found(name)
    missing = MISSING.get((name, verb))
    if missing is None:
        VERBS[verb](model, batch, tmp_path)
    else:
        with pytest.raises(EveryDepthError, match=missing):
            VERBS[verb](model, batch, tmp_path)
