"""The bound on gradient norms, where it holds, and its counter-examples."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from tests.helpers.gradients import labeled
from torch import Tensor

import everydepth as ed
from everydepth.ablations import tapped
from everydepth.errors import UnsupportedModelError
from everydepth.stream import as_stream
from everydepth_papers.bound import FORMS, TAPS, bounded, is_ordered, upper_bound, weight_widths


def printed(
    model: Any, x: Tensor, xt: Tensor, error: float, layer: int, tokens: int
) -> tuple[float, float]:
    """The bound of Theorem 1 for one sample of a ViT, layers counted from 1: at x and at x~."""
    config, d = model.config, model.config.hidden_size
    heads, size = config.num_attention_heads, d // config.num_attention_heads
    bound = error * model.classifier.weight.std(correction=0).item()
    bound *= config.num_labels**0.5 + d**0.5
    own = 1.0
    for j, block in enumerate(model.vit.layers[layer - 1 :], start=layer):
        q = block.attention.q_proj.weight.std(correction=0).item()
        jacobian = heads * (
            (tokens**0.5 + 2 + tokens**-0.5) * q**3 * (d**3 * size) ** 0.5
            + q * (d**0.5 + size**0.5)
        )
        o = block.attention.o_proj.weight.std(correction=0).item()
        w1, w2 = (m.weight.std(correction=0).item() for m in (block.mlp.fc1, block.mlp.fc2))
        attention = 1 + o / float(x[j - 1]) * 2 * d * jacobian
        ffn = 1 + w1 * w2 / float(xt[j - 1]) * (d**0.5 + config.intermediate_size**0.5) ** 2
        bound *= attention * ffn
        own = attention if j == layer else own
    return bound, bound / own


def test_the_bound_is_that_of_the_theorem() -> None:
    model, batch = labeled("ViT")
    stream = as_stream(model)
    taps = tapped(stream, batch)
    at_x, at_xt = upper_bound(weight_widths(stream, batch), taps)
    for i in range(3):
        x = torch.stack([s[0, i] for s in taps.std])
        xt = torch.stack([s[1, i] for s in taps.std])
        for layer in (1, 4):
            expected = printed(model, x, xt, float(taps.error[i]), layer, tokens=17)
            found = 10 ** at_x[layer - 1, i], 10 ** at_xt[layer - 1, i]
            assert found == pytest.approx(expected, rel=1e-6)


def test_the_printed_form_differs_at_the_second_tap_only() -> None:
    model, batch = labeled("ViT")
    stream = as_stream(model)
    taps, widths = tapped(stream, batch), weight_widths(stream, batch)
    corrected, as_printed = upper_bound(widths, taps), upper_bound(widths, taps, "as_printed")
    np.testing.assert_array_equal(corrected[0], as_printed[0])
    assert not np.allclose(corrected[1], as_printed[1])


RANDOM = [
    "ViT",
    "DeiT",
    "Llama-untied-SequenceClassification-left",
    "GPT2-SequenceClassification-left",
    "OPT-prenorm-SequenceClassification-left",
    "GPTNeoX-serial-SequenceClassification-left",
]


@pytest.mark.parametrize("name", RANDOM)
def test_repaired_the_bound_bounds_random_transformers(name: str) -> None:
    model, batch = labeled(name)
    found = bounded(model, batch)
    assert found.is_ordered
    for form in ("corrected", "repaired"):
        assert is_ordered(found.bounds[form]["mlp"])
    assert all((share == 0).all() for share in found.violations("repaired").values())


@pytest.mark.parametrize("name", RANDOM)
def test_the_bound_of_the_theorem_fails_at_the_last_tap(name: str) -> None:
    """Theorem 1 takes y_out = W y_N; stock transformers divide by a small std in between."""
    model, batch = labeled(name)
    assert bounded(model, batch).violations("corrected")["mlp"][-1] == 1.0


def test_repaired_the_bound_bounds_a_trained_transformer() -> None:
    torch.manual_seed(0)
    model = hf.ViTForImageClassification(
        hf.ViTConfig(
            image_size=8,
            patch_size=4,
            num_channels=1,
            num_labels=3,
            hidden_size=16,
            num_hidden_layers=3,
            num_attention_heads=2,
            intermediate_size=32,
        )
    )
    labels = torch.arange(24) % 3
    pixels = torch.randn(24, 1, 8, 8) * 0.3 + labels.view(-1, 1, 1, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(40):
        model(pixel_values=pixels, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    batch = {"pixel_values": pixels, "labels": labels}
    found = bounded(model.eval(), batch).violations("repaired")
    assert all((share == 0).all() for share in found.values())


def test_a_head_of_rank_one_and_silent_branches_break_every_form_of_the_bound() -> None:
    """The counter-example of docs/memorization.md: ||W|| <= s (sqrt a + sqrt b) needs random W."""
    model, batch = labeled("ViT")
    stream = as_stream(model)
    with torch.no_grad():
        for block in stream.blocks:
            for branch in block.branches:
                branch.proj.weight.zero_()  # every factor of the product is 1
        row = torch.randn(32, dtype=torch.float64)
        sign = torch.tensor([1.0, -1.0] * 5, dtype=torch.float64)
        model.classifier.weight.copy_(torch.outer(sign, row))
    found = bounded(model, batch)
    for form in FORMS:
        assert any(share.any() for share in found.violations(form).values()), form


def test_families_without_a_bound_say_why() -> None:
    for name, words in (
        ("Bert-SequenceClassification", "a norm or map in the skip path"),
        ("CifarResNet-post-pad", "has conv"),
        ("GPTNeoX-parallel-SequenceClassification-left", "in parallel"),
    ):
        model, batch = labeled(name)
        with pytest.raises(UnsupportedModelError, match=words):
            bounded(model, batch)
        assert ed.gradient_study(model, batch, batch, flipped=[0]).table()


def test_samples_of_several_batches_are_those_of_one() -> None:
    model, batch = labeled("ViT")
    parts = [{k: v[:1] for k, v in batch.items()}, {k: v[1:] for k, v in batch.items()}]
    whole, split = bounded(model, batch), bounded(model, parts)
    study = ed.gradient_study(model, batch, batch, flipped=[0])
    for tap in TAPS:
        np.testing.assert_allclose(10 ** whole.norms[tap], study.learning.norms[tap])
        np.testing.assert_allclose(split.norms[tap], whole.norms[tap])
        for form in FORMS:
            np.testing.assert_allclose(split.bounds[form][tap], whole.bounds[form][tap])
    np.testing.assert_allclose(
        bounded(model, batch, only=torch.tensor([2])).norms["mlp"], whole.norms["mlp"][:, 2:]
    )
