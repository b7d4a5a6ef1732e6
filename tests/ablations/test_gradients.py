"""Per-sample gradients, statistics, the bound and its counter-example, the unified view."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from tests.zoo import ENTRIES, PAD
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

import everydepth as ed
from everydepth.ablations import (
    GradientWatch,
    is_ordered,
    spearman,
    tapped,
    unified_view,
    upper_bound,
    weight_widths,
)
from everydepth.data import flip_labels
from everydepth.errors import LabelError, SettingError, UnsupportedModelError
from everydepth.stream import as_stream, record_branches

NAMES = [
    "ViT",
    "Beit-mean-pooling",
    "CifarResNet-post-projection",
    "ResNetForImageClassification-basic",
    "Bert-SequenceClassification",
    "OPT-prenorm-SequenceClassification-left",
    "GPTNeoX-parallel-SequenceClassification-left",
    "GPT2-CausalLM-left",
    "ResidualMLP-norm1-skips1-regression0",
]


def labeled(name: str, dtype: torch.dtype = torch.float64) -> tuple[nn.Module, dict[str, Tensor]]:
    model, batch = ENTRIES[name].make(dtype)
    stream = as_stream(model)
    if stream.task == "causal_lm":
        pad = batch["input_ids"] == PAD
        batch["labels"] = batch["input_ids"].masked_fill(pad, -100)
        batch["labels"][:, 1:][pad[:, :-1]] = -100  # padding predicts nothing
    else:
        batch["labels"] = torch.randint(0, stream.classes, (len(next(iter(batch.values()))),))
    return model, batch


def one_at_a_time(model: nn.Module, batch: dict[str, Tensor]) -> list[list[list[float]]]:
    """By sample, layer and branch: plain autograd on a batch of one row."""
    stream = as_stream(model)
    found: list[list[list[float]]] = []
    for i in range(len(batch["labels"])):
        row = {k: v[i : i + 1] for k, v in batch.items()}
        labels = row.pop("labels")
        with record_branches(stream.blocks) as records:
            z = model(**row).logits
        if z.ndim == 3:
            loss = F.cross_entropy(z[0, :-1], labels[0, 1:], ignore_index=-100)
        else:
            loss = F.cross_entropy(z, labels)
        norms: list[list[float]] = []
        for block in records:
            grads = [torch.autograd.grad(loss, r.x, retain_graph=True)[0] for r in block]
            norms.append([float(g.norm()) for g in grads])
        found.append(norms)
    return found


@pytest.mark.parametrize("name", NAMES)
def test_per_sample_norms_equal_one_at_a_time_autograd(name: str) -> None:
    model, batch = labeled(name)
    taps = tapped(as_stream(model), batch)
    for i, sample in enumerate(one_at_a_time(model, batch)):
        for layer, norms in enumerate(sample):
            found = taps.norms[layer][:, i]
            torch.testing.assert_close(
                found, torch.tensor(norms, dtype=torch.float64), rtol=1e-6, atol=1e-12
            )
    assert all(p.grad is None for p in model.parameters())
    assert all(p.requires_grad for p in model.parameters())


def test_norms_do_not_depend_on_the_batch_size() -> None:
    model, batch = labeled("ViT")
    clean = {k: torch.cat([v] * 3) for k, v in batch.items()}
    studies = [
        ed.gradient_study(model, clean, clean, flipped=[1, 5, 7], batch_size=size)
        for size in (1, 2, 9)
    ]
    for study in studies[1:]:
        for side in ("learning", "memorization"):
            first, other = getattr(studies[0], side), getattr(study, side)
            for tap in first.norms:
                np.testing.assert_allclose(other.norms[tap], first.norms[tap], rtol=1e-6)
                np.testing.assert_allclose(other.std[tap], first.std[tap], rtol=1e-6)


def test_only_flipped_rows_are_memorization() -> None:
    model, batch = labeled("ViT")
    study = ed.gradient_study(model, batch, batch, flipped=[2])
    alone = ed.gradient_study(model, batch, {k: v[2:] for k, v in batch.items()}, flipped=[0])
    assert study.memorization.error.shape == (1,)
    np.testing.assert_allclose(study.memorization.norm, alone.memorization.norm)
    from_batches = ed.gradient_study(
        model,
        batch,
        [{k: v[:2] for k, v in batch.items()}, {k: v[2:] for k, v in batch.items()}],
        flipped=[2],
    )
    np.testing.assert_allclose(from_batches.memorization.norm, alone.memorization.norm)


def test_the_error_is_the_distance_between_softmax_and_label() -> None:
    model, batch = labeled("ViT")
    taps = tapped(as_stream(model), batch)
    labels = batch.pop("labels")
    p = model(**batch).logits.softmax(-1)
    expected = (p - F.one_hot(labels, 10)).norm(dim=1)
    torch.testing.assert_close(taps.error, expected.detach())


def test_the_std_leaves_padding_out() -> None:
    model, batch = labeled("GPT2-SequenceClassification-left")
    stream = as_stream(model)
    taps = tapped(stream, batch)
    states = stream.observe(batch)
    for i, mask in enumerate(batch["attention_mask"].bool()):
        expected = states.h[0][i][mask].std(correction=0)
        torch.testing.assert_close(taps.std[0][0, i], expected.detach())


def test_x_of_a_layer_is_the_state_before_it() -> None:
    model, batch = labeled("ViT")
    stream = as_stream(model)
    taps = tapped(stream, batch)
    states = stream.observe(batch)
    loss = F.cross_entropy(states.logits(4), batch["labels"], reduction="sum")
    for layer in (1, 2, 3, 4):
        (gradient,) = torch.autograd.grad(loss, states.h[layer - 1], retain_graph=True)
        torch.testing.assert_close(taps.norms[layer - 1][0], gradient.flatten(1).norm(dim=1))


# -- the bound ------------------------------------------------------------------------------------


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
    study = ed.gradient_study(model, batch, batch, flipped=[0, 1, 2])
    assert study.bound_is_ordered
    assert study.learning.bounds is not None
    for form in ("corrected", "repaired"):
        assert is_ordered(study.learning.bounds[form]["mlp"])
    found = study.learning.violations("repaired")
    assert found is not None
    assert all((share == 0).all() for share in found.values())


@pytest.mark.parametrize("name", RANDOM)
def test_the_bound_of_the_theorem_fails_at_the_last_tap(name: str) -> None:
    """Theorem 1 takes y_out = W y_N; stock transformers divide by a small std in between."""
    model, batch = labeled(name)
    found = ed.gradient_study(model, batch, batch, flipped=[0]).learning.violations("corrected")
    assert found is not None
    assert found["mlp"][-1] == 1.0


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
    study = ed.gradient_study(model.eval(), batch, batch, flipped=[0, 1])
    found = study.learning.violations("repaired")
    assert found is not None
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
    study = ed.gradient_study(model, batch, batch, flipped=[0])
    for form in ("corrected", "as_printed", "repaired"):
        found = study.learning.violations(form)
        assert found is not None
        assert any(share.any() for share in found.values()), form


def test_families_without_a_bound_say_why() -> None:
    for name, words in (
        ("Bert-SequenceClassification", "a norm or map in the skip path"),
        ("CifarResNet-post-pad", "has conv"),
        ("GPTNeoX-parallel-SequenceClassification-left", "in parallel"),
    ):
        model, batch = labeled(name)
        study = ed.gradient_study(model, batch, batch, flipped=[0])
        assert study.learning.bounds is None
        assert study.bound_is_ordered is None
        assert study.note is not None
        assert words in study.note
        assert study.table()


# -- the unified view -----------------------------------------------------------------------------


def test_spearman_agrees_with_scipy() -> None:
    from scipy.stats import spearmanr

    a, b = np.array([1.0, 5.0, 2.0, 2.0, 9.0]), np.array([3.0, 1.0, 4.0, 1.0, 5.0])
    assert spearman(a, b) == pytest.approx(spearmanr(a, b).statistic)
    assert np.isnan(spearman(a, np.ones(5)))


def test_the_unified_view_joins_study_and_ablation() -> None:
    model, batch = labeled("ViT")
    study = ed.gradient_study(model, batch, batch, flipped=[0])
    view = unified_view(study, ed.ablate(model, batch, c=(0.0,)))
    assert set(view.spearman) == {
        "gradient_norm/margin",
        "gradient_norm/accuracy",
        "margin/accuracy",
    }
    with pytest.raises(SettingError, match="ablate all layers of the same model"):
        unified_view(study, ed.ablate(model, batch, layers=1, c=0.0))
    with pytest.raises(SettingError, match=r"c=0.0, but this ablation has 0.5"):
        unified_view(study, ed.ablate(model, batch, c=0.5))


def test_bad_input_of_a_study_is_named() -> None:
    model, batch = labeled("ViT")
    with pytest.raises(SettingError, match="it is unknown which samples have a wrong label"):
        ed.gradient_study(model, batch, batch)
    with pytest.raises(LabelError, match=r"measuring ViT.* needs 'labels'"):
        tapped(as_stream(model), {"pixel_values": batch["pixel_values"]})
    generic = as_stream(
        nn.Sequential(nn.Sequential(nn.Linear(2, 2)), nn.Linear(2, 3)), blocks="0", readout="1"
    )
    with pytest.raises(UnsupportedModelError, match="without its branches"):
        tapped(generic, {"input": torch.randn(2, 2), "labels": torch.tensor([0, 1])})


def test_the_watch_follows_a_training_and_changes_nothing() -> None:

    from everydepth.architectures.residual_mlp import ResidualMLP, ResidualMLPConfig

    x = torch.randn(16, 2)
    labels = (x[:, 0] > 0).long()
    noise = flip_labels(labels, 0.25, classes=2)
    rows = [{"inputs": x[i : i + 4], "labels": noise.labels[i : i + 4]} for i in (0, 4, 8, 12)]
    clean = {"inputs": x, "labels": labels}
    noisy = {"inputs": x, "labels": noise.labels}

    def trained(callbacks: list[Any]) -> tuple[Any, Any]:
        torch.manual_seed(0)
        model = ResidualMLP(
            ResidualMLPConfig(num_outputs=2, num_hidden_layers=3, hidden_size=8, regression=False)
        )
        net = ed.EveryDepth(model, ed.end_to_end())
        return model, ed.fit(net, rows, epochs=4, callbacks=callbacks, progress=False)

    watch = GradientWatch(clean, noisy, flipped=noise, every=2)
    model, result = trained([watch])
    plain, _ = trained([])
    assert all(
        torch.equal(a, b)
        for a, b in zip(model.state_dict().values(), plain.state_dict().values(), strict=True)
    )
    seen = result.callbacks["GradientWatch"]["epochs"]
    assert [look["epoch"] for look in seen] == [2, 4]
    study = ed.gradient_study(model, clean, noisy, flipped=noise)
    assert list(seen[-1]["learning_norm"]) == ["1", "2", "3"]
    assert seen[-1]["learning_norm"]["2"] == pytest.approx(float(study.learning.norm[1]))
    again = GradientWatch(clean, noisy, flipped=noise)
    again.load_state_dict(watch.state_dict())
    assert again.results() == watch.results()
