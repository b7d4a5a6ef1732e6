"""Every verb on a dozen networks of different structure: it works, or says what is missing."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch
from tests.zoo.stock import stock
from tests.zoo.verbs import CLASSES, EXPERTS, LABELS, NEXT, SHARED, START, VERBS, labeled
from torch import Tensor, nn
from transformers import SwinConfig, SwinForImageClassification

import everydepth as ed
from everydepth.errors import EveryDepthError
from everydepth.stream import ResidualStream

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
def _found(name: str) -> tuple[ResidualStream, Batch]:
    own = next((each.make for each in stock() if each.name == name), _swin)
    model, batch = own()
    stream = ed.as_stream(model)
    return stream, labeled(stream, batch)


# (model, verb) -> the property that is missing, in the words of the error.
MISSING: dict[tuple[str, str], str] = {
    **{(name, "predict"): CLASSES for name in MODELS if "Classification" not in name},
    **{(name, "audit"): LABELS for name in MODELS if "Classification" not in name},
    **{(name, "generate"): NEXT for name in MODELS if not name.startswith("causal")},
    ("seq2seq:T5ForConditionalGeneration", "generate"): START,
    **{
        ("masked:AlbertForMaskedLM", verb): SHARED
        for verb in ("scaled_skip", "ablate", "insert", "growth")
    },
    ("causal:MixtralForCausalLM", "growth"): EXPERTS,
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
    stream, batch = _found(name)
    missing = MISSING.get((name, verb))
    if missing is None:
        VERBS[verb](stream, batch, tmp_path)
    else:
        with pytest.raises(EveryDepthError, match=missing):
            VERBS[verb](stream, batch, tmp_path)
