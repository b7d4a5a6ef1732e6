"""Per-sample gradients and statistics, and how they change in training."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tests.helpers.gradients import labeled
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

import everydepth as ed
from everydepth.ablations import GradientWatch, tapped
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


class TwoOfAKind(nn.Module):
    """A block of two branches of one kind, as a Conformer has them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.first(x)
        return x + self.second(x)


def test_branches_of_one_kind_are_told_apart() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), TwoOfAKind(), TwoOfAKind(), nn.Linear(8, 3)).eval()
    stream = as_stream(model, example={"input": torch.randn(2, 4)})
    batch = {"input": torch.randn(6, 4), "labels": torch.arange(6) % 3}
    kind = stream.blocks[0].branches[0].kind
    assert stream.blocks[0].names == [f"{kind}_1", f"{kind}_2"]
    study = ed.gradient_study(stream, batch, batch, flipped=[0, 1, 2], progress=False)
    taps = tapped(stream, batch)
    assert list(study.learning.norms) == [f"{kind}_1", f"{kind}_2"]
    for i, norms in enumerate(study.learning.norms.values()):
        np.testing.assert_allclose(norms, [layer[i].tolist() for layer in taps.norms], rtol=1e-5)


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


def test_taps_of_a_model_in_training_mode_are_those_in_eval_mode() -> None:
    model, batch = labeled("Bert-SequenceClassification")
    stream = as_stream(model)
    wanted = tapped(stream, batch)
    model.train()
    state = torch.get_rng_state()
    assert torch.equal(tapped(stream, batch).losses, wanted.losses)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(module.training for module in model.modules())
