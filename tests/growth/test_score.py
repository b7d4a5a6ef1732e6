"""The gradient of every possible block, and the verdict on it."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.helpers.growth import GROWABLE, labeled, mlp, points
from tests.zoo import ENTRIES, Entry
from torch import Tensor, nn
from transformers import FalconConfig, FalconForCausalLM

import everydepth as ed
from everydepth.errors import (
    BatchError,
    DepthError,
    LabelError,
    NonFiniteError,
    SettingError,
)
from everydepth.growth import Score, score
from everydepth.growth.losses import row_losses
from everydepth.growth.scoring import alignment, covariance
from everydepth.stream.gradients import spectrum
from everydepth.stream.maps import LinearMap

# Its two branches share a norm, and one is added to the other in place.
FALCON = Entry(
    "Falcon",
    lambda: FalconForCausalLM(
        FalconConfig(
            vocab_size=40, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, alibi=False
        )
    ),
    lambda: {"input_ids": torch.randint(0, 40, (3, 6))},
)


# A decoder that classifies has the blocks of one that writes: one of them shows its loss.
SCORED = {
    name: entry
    for name, entry in {**GROWABLE, "Falcon": FALCON}.items()
    if not name.endswith("SequenceClassification-left") or name.startswith("GPT2")
}


@pytest.mark.parametrize("entry", SCORED.values(), ids=SCORED)
def test_G_is_the_gradient_of_the_zero_projection_at_every_site(entry: Entry) -> None:
    model, batch = labeled(entry)
    found = score(model, batch, **entry.options)
    assert len(found.sites) == ed.as_stream(model, **entry.options).depth + 1
    for after, tried in found.candidates.items():
        stream = tried.stream
        output = stream.call(stream.arguments(stream.check_batch(batch), None))
        losses, counts = row_losses(stream, stream.prediction(output), batch)
        total = 0.0
        for module, direction in zip(tried.maps, found.directions[after], strict=True):
            names = [n for n, p in module.named_parameters(recurse=False)]
            wanted = torch.autograd.grad(
                losses.sum() / counts.sum(),
                list(module.parameters(recurse=False)),
                retain_graph=True,
            )
            for name, gradient in zip(names, wanted, strict=True):
                ours = (
                    LinearMap(module).as_weight(direction.weight)
                    if name == "weight"
                    else direction.bias
                )
                # Some norms compute in float32 whatever the model's type.
                torch.testing.assert_close(
                    ours, gradient, rtol=0, atol=1e-6 * float(gradient.abs().max())
                )
                total += float(gradient.square().sum())
        assert found.at(after).norm == pytest.approx(math.sqrt(total), rel=1e-5)


def test_before_a_linear_classifier_the_mean_gradient_is_known_in_closed_form() -> None:
    """E g = W^T (E p - E y)."""
    model, batch = labeled(ENTRIES["CifarResNet-post-projection"])
    found = score(model, batch, at=[6])
    with torch.no_grad():
        p = model(pixel_values=batch["pixel_values"]).logits.softmax(-1).mean(0)
    y = nn.functional.one_hot(batch["labels"], 7).double().mean(0)
    expected = (p - y) @ model.linear.weight
    assert found.at(6).signal == pytest.approx(expected.norm().item(), rel=1e-9)


def test_the_gain_is_the_u_statistic_of_per_row_gradients() -> None:
    model = mlp().double()
    batch = {
        k: v.double() if v.is_floating_point() else v for k, v in points(model.float(), 16).items()
    }
    model = model.double()
    found = score(model, batch, at=[1], batch_size=5)
    tried = found.candidates[1]
    rows: list[Tensor] = []
    for i in range(16):
        loss = nn.functional.cross_entropy(
            tried.model(inputs=batch["inputs"][i : i + 1]).logits, batch["labels"][i : i + 1]
        )
        weight, bias = torch.autograd.grad(loss, [tried.maps[0].weight, tried.maps[0].bias])
        rows.append(torch.cat([weight.flatten(), bias]))
    g = torch.stack(rows)
    gram = (g @ g.T).numpy()
    off = gram - np.diag(np.diag(gram))
    assert found.at(1).gain == pytest.approx(off.sum() / (16 * 15), rel=1e-9)
    assert found.at(1).low <= found.at(1).gain <= found.at(1).high


def test_a_wide_map_seen_through_projections_keeps_its_gain() -> None:
    model = mlp(hidden_size=100, intermediate_size=200)
    batch = points(mlp(1), 256)
    found = score(model, batch, at=[2]).at(2)
    # The squared norm of the mean is larger than that of the expectation, by the noise.
    assert 0.5 * found.norm**2 < found.gain < 1.5 * found.norm**2


def test_scoring_leaves_the_model_and_the_random_numbers_alone() -> None:
    model, batch = labeled(ENTRIES["ViT"], torch.float32)
    model.train()
    for parameter in list(model.parameters())[::2]:
        parameter.requires_grad_(False)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    flags = [p.requires_grad for p in model.parameters()]
    state = torch.get_rng_state()
    first = score(model, batch)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert [p.requires_grad for p in model.parameters()] == flags
    assert all(p.grad is None for p in model.parameters())
    assert {m.training for m in model.modules()} == {True}
    assert first.to_json() == score(model.eval(), batch).to_json()


def test_the_batches_do_not_matter() -> None:
    model, batch = labeled(ENTRIES["Llama-tied-CausalLM-left"])
    whole, parts = score(model, batch), score(model, batch, batch_size=5)
    for a, b in zip(whole.sites, parts.sites, strict=True):
        assert (a.norm, a.z, a.signal) == pytest.approx((b.norm, b.z, b.signal), rel=1e-6)


def test_a_model_that_draws_its_own_labels_has_nothing_to_gain() -> None:
    model = mlp()
    assert score(model, points(model, 512, seed=3)).verdict.startswith(("deepest", "not enough"))


def test_another_model_s_labels_are_a_reason_to_deepen() -> None:
    found = score(mlp(), points(mlp(7), 512, scale=3.0))
    assert found.verdict.startswith("deepen here: after")
    assert found.ranked[0] is found.best
    assert found.best.needed is None


def test_an_unsure_score_reports_how_many_rows_would_settle_it() -> None:
    unsure = [score(mlp(), points(mlp(), 64, seed=s)) for s in range(20)]
    sites = [site for found in unsure for site in found.sites if site.verdict == "not enough data"]
    assert sites
    assert all(site.needed is not None and 64 < site.needed <= 640 for site in sites)


def test_alignment_is_the_bound_of_the_theorem() -> None:
    torch.manual_seed(0)
    mean = torch.tensor([3.0, 0.0], dtype=torch.float64)
    g, test = (torch.randn(n, 2, dtype=torch.float64) + mean for n in (400, 200))
    found = alignment(g, test)
    trace, top = spectrum(g)
    mu = float(g.mean(0).square().sum()) - trace / 400
    expected = 4 * top / mu * (1 / 400 + 1 / 200) + 4 * top * trace / (400 * 200 * mu**2)
    assert found.bound == pytest.approx(expected)
    assert found.cosine > 0.99
    assert alignment(torch.randn(50, 2).double(), test).bound == 1.0


def test_alignment_is_measured_where_test_data_is_given() -> None:
    model = mlp()
    found = score(model, points(mlp(7), 128, scale=3.0), points(mlp(7), 64, seed=1, scale=3.0))
    assert all(s.alignment is not None and s.alignment.rows == 64 for s in found.sites)
    assert found.best.alignment is not None
    assert found.best.alignment.cosine > 0.5


def test_the_covariance_is_that_of_numpy_whichever_side_is_longer() -> None:
    for shape in ((30, 8), (8, 30)):
        g = torch.randn(*shape, dtype=torch.float64)
        full = np.cov(g.numpy(), rowvar=False)
        trace, top = spectrum(g)
        assert trace == pytest.approx(np.trace(full))
        assert top == pytest.approx(np.linalg.eigvalsh(full)[-1])
        part = covariance(g)
        chosen = list(part.coordinates)
        scale = np.trace(full) / shape[1]
        assert np.array(part.matrix) == pytest.approx(full[np.ix_(chosen, chosen)] / scale)


def test_a_score_prints_is_drawn_and_loads_again(tmp_path: Path) -> None:
    found = score(mlp(), points(mlp(7), 256, scale=3.0))
    assert "ResidualMLP: deepen here" in str(found)
    assert len(found.table().rows) == 3
    (axes,) = found.plot("z").axes
    assert [bar.get_height() for bar in axes.patches] == [site.z for site in found.sites]
    assert axes.get_xlabel() == "a new block after depth"
    again = Score.load(found.save(tmp_path / "score"))
    assert again.sites == found.sites
    assert again.verdict == found.verdict


def test_a_loss_of_your_own_gives_one_number_a_row() -> None:
    model, batch = ENTRIES["CLIPVision"].make()
    batch = {"pixel_values": batch["pixel_values"].repeat(4, 1, 1, 1), "labels": torch.zeros(12)}
    with pytest.raises(SettingError, match="pass criterion="):
        score(model, batch)
    found = score(model, batch, criterion=lambda z, _, __: z.square().mean(1))
    assert found.loss > 0
    with pytest.raises(SettingError, match=r"criterion returned shape \(\), but there are 12 rows"):
        score(model, batch, criterion=lambda z, _, __: z.square().mean())


def test_bad_input_is_explained() -> None:
    model = mlp()
    batch = points(model, 7)
    with pytest.raises(BatchError, match=r"7 rows are too few .* pass at least 8"):
        score(model, batch)
    with pytest.raises(LabelError, match="measuring ResidualMLP needs 'labels'"):
        score(model, {"inputs": torch.randn(8, 6)})
    with pytest.raises(SettingError, match="alpha=2"):
        score(model, batch, alpha=2.0)
    with pytest.raises(DepthError, match="depth 9, but ResidualMLP has 2 blocks"):
        score(model, points(model, 8), at=[9])
    with pytest.raises(SettingError, match=r"after=1 was not scored; use one of \[0\]"):
        score(model, points(model, 8), at=[0]).at(1)
    with pytest.raises(BatchError, match="data is int"):
        score(model, 3)
    with pytest.raises(BatchError, match="no batches"):
        score(model, [])
    bad = points(model, 8)
    bad["inputs"][2, 0] = math.nan
    with pytest.raises(NonFiniteError, match="NaN or infinity"):
        score(model, bad)
