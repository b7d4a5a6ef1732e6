"""The sweep after training, and one training for each cell."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.zoo import ENTRIES, PAD
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

import everydepth as ed
from everydepth.ablations import Ablation, scaled_skip
from everydepth.data import flip_labels
from everydepth.errors import BatchError, RunError, SettingError
from everydepth.runs import held
from everydepth.stream import as_stream

NAMES = [
    "ViT",
    "CifarResNet-post-projection",
    "GPT2-SequenceClassification-left",
    "GPTNeoX-parallel-CausalLM-left",
    "Qwen2-window-CausalLM-right",
    "Bert-SequenceClassification",
    "DistilBert-MaskedLM",
    "ResidualMLP-norm1-skips1-regression1",
]


def labeled(name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    model, batch = ENTRIES[name].make(torch.float64)
    stream = as_stream(model)
    rows = next(iter(batch.values())).shape[0]
    if stream.task == "regression":
        batch["labels"] = torch.randn(rows, 2, dtype=torch.float64)
    elif stream.task in ("causal_lm", "masked_lm"):
        ids = batch["input_ids"]
        batch["labels"] = ids.masked_fill(ids == PAD, -100)
    else:
        batch["labels"] = torch.randint(0, stream.classes, (rows,))
    return model, batch


@torch.no_grad()
def naive(model: nn.Module, batch: dict[str, Tensor], layer: int, c: float) -> dict[str, float]:
    """A full pass for every cell, and each metric from its definition, row by row."""
    inputs = {k: v for k, v in batch.items() if k != "labels"}
    plain = model(**inputs).logits
    with scaled_skip(model, layer=layer, c=c):
        z = model(**inputs).logits
    labels, task = batch["labels"], as_stream(model).task
    if task == "regression":
        return {"loss": float((z - labels).square().mean())}
    rows: list[tuple[Tensor, Tensor, int]] = []
    for i in range(len(z)):
        if z.ndim == 2:
            rows.append((z[i], plain[i], int(labels[i])))
            continue
        for t in range(z.shape[1]):
            at = t + 1 if task == "causal_lm" else t
            # Padding predicts nothing, also not the first token behind it.
            real = "attention_mask" not in batch or batch["attention_mask"][i, t]
            if real and at < z.shape[1] and labels[i, at] != -100:
                rows.append((z[i, t], plain[i, t], int(labels[i, at])))
    two = [row.sort(descending=True).values for row, _, _ in rows]
    found = {
        "loss": np.mean([float(F.cross_entropy(row, torch.tensor(y))) for row, _, y in rows]),
        "accuracy": np.mean([int(row.argmax()) == y for row, _, y in rows]),
        "margin": np.mean([float(t[0] - t[1]) for t in two]),
        "agreement": np.mean([int(row.argmax()) == int(p.argmax()) for row, p, _ in rows]),
    }
    if task != "classification":
        found["perplexity"] = np.exp(found["loss"])
    return {k: float(v) for k, v in found.items()}


@pytest.mark.parametrize("name", NAMES)
def test_the_shared_sweep_equals_a_full_pass_for_every_cell(name: str) -> None:
    model, batch = labeled(name)
    layers, scales = (1, 3), (0.0, 0.5, 1.0)
    found = ed.ablate(model, batch, layers=layers, c=scales, batch_size=2)
    for i, layer in enumerate(layers):
        for j, c in enumerate(scales):
            expected = naive(model, batch, layer, c)
            assert set(expected) == set(found.metrics)
            for metric, value in expected.items():
                assert found[metric][i, j] == pytest.approx(value, rel=1e-8, abs=1e-8), metric


def test_a_scale_of_one_is_the_untouched_model_exactly() -> None:
    model, batch = labeled("ViT")
    found = ed.ablate(model, batch)
    assert found.layers == (1, 2, 3, 4)
    for metric in found.metrics:
        assert (found.at(metric, 1.0) == found.untouched[metric][0]).all()
    assert (found.at("agreement", 1.0) == 1.0).all()


def test_the_sweep_leaves_the_model_as_it_was() -> None:
    model, batch = labeled("ViT")
    model.train()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    ed.ablate(model, batch, layers=1, c=0.0)
    assert model.training
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_an_ablation_is_the_same_after_saving_and_loading(tmp_path: Path) -> None:
    model, batch = labeled("ViT")
    found = ed.ablate(model, batch, layers=(2, 4), c=(0.0, 1.0))
    again = Ablation.load(found.save(tmp_path / "ablation"))
    assert again.layers == found.layers
    assert again.c == found.c
    for metric in found.metrics:
        np.testing.assert_array_equal(again[metric], found[metric])
    assert found.table("accuracy").column("layer") == [2, 4]
    assert found.table("accuracy").headings == ("layer", "c = 0", "c = 1")
    json.dumps(found.to_json())


def test_detection_reports_margin_and_agreement_only() -> None:
    model, batch = ENTRIES["Detr-plain"].make()
    found = ed.ablate(model, batch, layers=1, c=0.0)
    assert set(found.metrics) == {"margin", "agreement"}


def test_bad_settings_of_a_sweep_are_named() -> None:
    model, batch = labeled("ViT")
    with pytest.raises(SettingError, match="give each scale once"):
        ed.ablate(model, batch, c=(0.0, 0.0))
    with pytest.raises(SettingError, match="noisy= needs train=; leave it out"):
        ed.ablate(model, batch, noisy=batch)
    with pytest.raises(SettingError, match="pass a trained model, or give train="):
        ed.ablate(lambda seed: model, batch)
    with pytest.raises(BatchError, match="which can be iterated only once"):
        ed.ablate(model, iter([batch]))
    with pytest.raises(BatchError, match="no batches"):
        ed.ablate(model, [])
    clip, pair = ENTRIES["CLIPVision"].make()
    with pytest.raises(SettingError, match="produces embeddings"):
        ed.ablate(clip, pair)
    with pytest.raises(SettingError, match="this ablation has no 'speed'; it has"):
        ed.ablate(model, batch, layers=1, c=0.0)["speed"]


# -- one training for each cell -------------------------------------------------------------------


def small(seed: int) -> nn.Module:
    from everydepth.architectures.residual_mlp import ResidualMLP, ResidualMLPConfig

    torch.manual_seed(seed)
    return ResidualMLP(
        ResidualMLPConfig(num_outputs=3, num_hidden_layers=2, hidden_size=8, regression=False)
    )


def points(rows: int = 24) -> dict[str, Tensor]:
    x = torch.randn(rows, 2)
    return {"inputs": x, "labels": (x[:, 0] > 0).long() + (x[:, 1] > 0).long()}


class Trainer:
    """A plain loop that counts how often it was called, and can break at one call."""

    def __init__(self, data: dict[str, Tensor], breaks_at: int | None = None) -> None:
        self.data, self.breaks_at, self.calls = data, breaks_at, 0

    def __call__(self, model: nn.Module, folder: Path | None, seed: int) -> dict[str, Any]:
        self.calls += 1
        if self.calls == self.breaks_at:
            raise KeyboardInterrupt
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            model(**self.data).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return {"steps": 3}


def test_each_cell_is_trained_with_its_own_skip_scaled() -> None:
    data = points()
    found = ed.ablate(small, data, c=(0.0, 1.0), train=Trainer(data), seeds=(0, 1), progress=False)
    assert found.mode == "training"
    assert found.runs["accuracy"].shape == (2, 2, 2)
    for s, seed in enumerate((0, 1)):
        for layer in (None, 1, 2):
            model = small(seed)
            with scaled_skip(model, layer=layer or 1, c=1.0 if layer is None else 0.0):
                Trainer(data)(model, None, seed)
                expected = model(**data).loss.item()
            got = (
                found.untouched["loss"][s] if layer is None else found.runs["loss"][s, layer - 1, 0]
            )
            assert got == pytest.approx(expected, rel=1e-5)


def test_a_broken_sweep_goes_on_where_it_stopped(tmp_path: Path) -> None:
    data = points()
    with pytest.raises(KeyboardInterrupt):
        ed.ablate(small, data, c=(0.0,), train=Trainer(data, breaks_at=3), run=tmp_path / "run")
    again = Trainer(data)
    found = ed.ablate(small, data, c=(0.0,), train=again, run=tmp_path / "run")
    assert again.calls == 1  # two of three cells were finished
    whole = ed.ablate(small, data, c=(0.0,), train=Trainer(data))
    np.testing.assert_array_equal(found["loss"], whole["loss"])
    with pytest.raises(RunError, match="started with other settings"):
        ed.ablate(small, data, c=(0.5,), train=again, run=tmp_path / "run")
    saved = Ablation.load(tmp_path / "run" / "ablation")
    np.testing.assert_array_equal(saved["loss"], found["loss"])


def test_a_run_of_trained_cells_has_one_writer(tmp_path: Path) -> None:
    data = points()
    with held(tmp_path / "run"), pytest.raises(RunError, match="is in use by process"):
        ed.ablate(small, data, c=(0.0,), train=Trainer(data), run=tmp_path / "run")


def test_cells_report_memorization_and_whether_all_was_fitted() -> None:
    data = points()
    noise = flip_labels(data["labels"], 0.25, classes=3)
    noisy = {**data, "labels": noise.labels}
    found = ed.ablate(
        small, data, layers=1, c=0.0, train=Trainer(noisy), noisy=noisy, flipped=noise
    )
    assert {"memorization", "train_accuracy", "reached"} <= set(found.metrics)
    assert (found["reached"] == (found["train_accuracy"] == 1)).all()
    with pytest.raises(SettingError, match=r"needs both noisy= .* and flipped="):
        ed.ablate(small, data, train=Trainer(data), noisy=noisy)


def test_a_language_model_is_right_about_a_sample_if_it_writes_the_whole_label() -> None:
    start, batch = ENTRIES["GPT2-CausalLM-left"].make()
    with torch.no_grad():
        predicted = start(**batch).logits[:, -3:-1].argmax(-1)
    # The label is the last two tokens: both right, but one of them wrong in the first row.
    batch["labels"] = torch.full_like(batch["input_ids"], -100)
    batch["labels"][:, -2:] = predicted
    batch["labels"][0, -1] = (predicted[0, -1] + 1) % 10

    def train(*_: Any) -> None:
        """The model stays what it is."""

    found = ed.ablate(start, batch, layers=1, c=0.0, train=train, noisy=batch, flipped=[0])
    rows = len(predicted)
    assert found.untouched["sample_accuracy"][0] == pytest.approx((rows - 1) / rows)
    assert found.untouched["accuracy"][0] == pytest.approx((2 * rows - 1) / (2 * rows))


def test_a_model_as_a_start_is_copied_for_every_cell() -> None:
    data, start = points(), small(0)
    before = {k: v.clone() for k, v in start.state_dict().items()}
    ed.ablate(start, data, layers=1, c=0.0, train=Trainer(data))
    assert all(torch.equal(v, before[k]) for k, v in start.state_dict().items())


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_ray_gives_the_same_cells(tmp_path: Path) -> None:
    data = points()
    here = ed.ablate(small, data, c=(0.0, 1.0), train=Trainer(data))
    there = ed.ablate(
        small, data, c=(0.0, 1.0), train=Trainer(data), run=tmp_path / "run", engine="ray"
    )
    np.testing.assert_allclose(there["loss"], here["loss"], rtol=1e-6)
