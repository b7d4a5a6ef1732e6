"""Gradients at every tap against captum, single samples, finite differences and closed forms."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from captum._utils.gradient import compute_layer_gradients_and_eval
from tests.helpers import tracing as samples
from tests.zoo import CLASSIFIERS
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 (its usual name)

import everydepth as ed
from everydepth.errors import SettingError
from everydepth.stream import observe_gradients, record_branches
from everydepth.tracing import Trace, gradient_alignment


def batch_of(count: int) -> tuple[nn.Module, dict[str, Tensor]]:
    return samples.vit(), samples.pictures(count)


def test_norms_agree_with_captum_at_the_norm_modules() -> None:
    model, data = batch_of(10)
    t = ed.trace(model, data, ["gradient_norm"], batch_size=4, progress=False)

    def losses(x: Tensor) -> Tensor:
        return F.cross_entropy(model(x).logits, data["labels"], reduction="none")

    layers = list(model.vit.layers)
    for name, modules in (
        ("attention", [layer.layernorm_before for layer in layers]),
        ("mlp", [layer.layernorm_after for layer in layers]),
    ):
        grads, _ = compute_layer_gradients_and_eval(
            losses, modules, data["pixel_values"], attribute_to_layer_input=True
        )
        for depth, (gradient,) in enumerate(grads, start=1):
            expected = gradient.flatten(1).norm(dim=1).mean()
            found = t.result("gradient_norm").arrays[name][depth]
            assert found == pytest.approx(float(expected), rel=1e-5)


def test_norms_agree_with_one_sample_at_a_time() -> None:
    model, data = batch_of(6)
    _, _, taps = observe_gradients(ed.as_stream(model), data)
    stream = ed.as_stream(model)
    for i in range(6):
        one = {key: value[i : i + 1] for key, value in data.items()}
        states = stream.observe(one)
        loss = F.cross_entropy(states.output.logits, one["labels"])
        own = torch.autograd.grad(loss, list(states.h))
        for depth, gradient in enumerate(own):
            assert float(taps.state_norms[depth, i]) == pytest.approx(
                float(gradient.norm()), rel=1e-5
            )


def test_the_gradient_between_the_branches_includes_the_skip() -> None:
    # Finite differences in float64: move x~ itself and let both the MLP and its skip see it.
    model, data = batch_of(3)
    model, data["pixel_values"] = model.double(), data["pixel_values"].double()
    stream = ed.as_stream(model)
    _, records, taps = observe_gradients(stream, data)
    layer, block = model.vit.layers[1], 1
    x = records[block][1].x.detach()
    random = torch.Generator().manual_seed(0)
    direction = torch.randn(x.shape, generator=random, dtype=x.dtype)

    @torch.no_grad()
    def loss_from(middle: Tensor) -> Tensor:
        h = middle + layer.mlp(layer.layernorm_after(middle))
        for later in model.vit.layers[block + 1 :]:
            h = later(h)
        h = h if isinstance(h, Tensor) else h[0]
        z = stream.readout(h, stream.depth, data)
        return F.cross_entropy(z, data["labels"], reduction="none")

    step = 1e-6
    numeric = (loss_from(x + step * direction) - loss_from(x - step * direction)) / (2 * step)
    analytic = (taps.branches[block][1] * direction).flatten(1).sum(1)
    torch.testing.assert_close(numeric, analytic, rtol=1e-5, atol=1e-8)
    # The MLP's part alone, which leaves out the skip, is another number.
    with torch.enable_grad():
        y = x.clone().requires_grad_()
        (branch_only,) = torch.autograd.grad(
            layer.mlp(layer.layernorm_after(y)), y, taps.states[block + 1]
        )
    alone = (branch_only * direction).flatten(1).sum(1)
    assert not torch.allclose(alone, analytic, rtol=0.1)


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_gradients_reach_every_tap_of_every_family_also_when_frozen(name: str) -> None:
    model, batch = CLASSIFIERS[name].make()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    stream = ed.as_stream(model, **CLASSIFIERS[name].options)
    data = {**batch, "labels": torch.arange(len(next(iter(batch.values())))) % stream.classes}
    t = ed.trace(stream, data, "gradients", batch_size=2, progress=False)
    assert (t["gradient_norm"] > 0).all()
    for kind in t.result("gradient_norm").series[1:]:
        assert (t.result("gradient_norm").arrays[kind].compressed() > 0).all()


def test_a_sequence_is_one_sample_with_the_mean_loss_of_its_tokens() -> None:
    model, data = samples.gpt2(), samples.sentences()
    t = ed.trace(model, data, ["gradient_norm"], batch_size=4, progress=False)
    stream = ed.as_stream(model)
    norms = []
    for i in range(len(data["input_ids"])):
        length = int(data["attention_mask"][i].sum())
        ids = data["input_ids"][i : i + 1, :length]
        states = stream.observe({"input_ids": ids})
        loss = F.cross_entropy(states.output.logits[0, :-1], ids[0, 1:])
        norms.append([float(g.norm()) for g in torch.autograd.grad(loss, list(states.h))])
    np.testing.assert_allclose(t["gradient_norm"], np.mean(norms, 0), rtol=1e-5)


def vectors(model: nn.Module, data: dict[str, Tensor]) -> np.ndarray:
    """(depth, sample, dim), summed over tokens."""
    _, _, taps = observe_gradients(ed.as_stream(model), data)
    return np.stack([g.double().sum(1).numpy() for g in taps.states])


def test_mean_variance_and_covariance_agree_with_numpy() -> None:
    model, data = batch_of(40)
    t = ed.trace(model, data, "gradients", batch_size=7, progress=False)
    g = vectors(model, data)
    mean = t.result("gradient_mean")
    np.testing.assert_allclose(t["gradient_mean"], np.linalg.norm(g.mean(1), axis=-1), rtol=1e-5)
    for depth, rows in enumerate(g):
        covariance = np.cov(rows.T, bias=True)
        np.testing.assert_allclose(mean.arrays[f"mean_{depth}"], rows.mean(0), atol=1e-6)
        assert mean.arrays["variance"][depth] == pytest.approx(np.trace(covariance), rel=1e-5)
        largest = np.linalg.eigvalsh(covariance)[-1]
        assert mean.arrays["largest_variance"][depth] == pytest.approx(largest, rel=1e-5)
        result = t.result("gradient_covariance").arrays
        np.testing.assert_allclose(
            result["covariance"][depth], covariance, atol=1e-6 * np.abs(covariance).max()
        )
        off = covariance[~np.eye(32, dtype=bool)] / (np.trace(covariance) / 32)
        assert result["within_10"][depth] == pytest.approx((np.abs(off) <= 0.1).mean(), abs=2e-3)
        assert result["counts"][depth].sum() == 32 * 31


def test_of_many_coordinates_only_some_are_kept() -> None:
    from everydepth.tracing.metrics.gradients import GradientCovariance

    model, data = batch_of(20)
    t = ed.trace(model, data, [GradientCovariance(coordinates=5)], progress=False)
    result = t.result("gradient_covariance").arrays
    where = result["coordinates"][0]
    assert result["covariance"].shape == (4, 5, 5)
    assert (where[0], where[-1]) == (0, 31)
    covariance = np.cov(vectors(model, data)[2].T, bias=True)[np.ix_(where, where)]
    np.testing.assert_allclose(
        result["covariance"][2], covariance, atol=1e-6 * np.abs(covariance).max()
    )


def test_raw_coordinates_are_those_of_the_state_and_noise_is_what_halves_differ_by() -> None:
    from everydepth.tracing.metrics.gradients import GradientCovariance

    model, data = batch_of(20)
    metric = GradientCovariance(coordinates=6, pooled=False)
    t = ed.trace(model, data, [metric], batch_size=7, progress=False)
    found = t.result("gradient_covariance").arrays
    _, _, taps = observe_gradients(ed.as_stream(model), data)
    raw = taps.states[2].double().flatten(1).numpy()[:, found["coordinates"][2]]
    whole = np.cov(raw.T, bias=True)
    np.testing.assert_allclose(found["covariance"][2], whole, atol=1e-6 * np.abs(whole).max())
    halves = [np.cov(raw[start::2].T, bias=True) for start in (0, 1)]
    noise = (halves[0] - halves[1])[~np.eye(6, dtype=bool)] / 2 / (np.trace(whole) / 6)
    assert found["noise_10"][2] == pytest.approx((np.abs(noise) <= 0.1).mean(), abs=1e-9)


def test_before_a_linear_head_the_mean_gradient_is_the_mean_error_through_it() -> None:
    model = samples.mlp(regression=False, num_outputs=4)
    data = {"inputs": torch.randn(30, 2), "labels": torch.arange(30) % 4}
    t = ed.trace(model, data, ["gradient_mean"], progress=False)
    with torch.no_grad():
        error = model(data["inputs"]).logits.softmax(-1) - F.one_hot(data["labels"], 4)
        expected = error.mean(0) @ model.head.weight
    np.testing.assert_allclose(
        t.result("gradient_mean").arrays["mean_4"], expected.numpy(), atol=1e-6
    )


@pytest.mark.parametrize("one_class", [False, True])
def test_alignment_compares_two_data_sets_and_bounds_their_disagreement(one_class: bool) -> None:
    model = samples.vit()
    sets = [samples.pictures(n, seed) for n, seed in ((60, 1), (40, 2))]
    if one_class:  # gradients agree enough for a bound below 1
        sets = [{**data, "labels": torch.zeros_like(data["labels"])} for data in sets]
    a, b = (ed.trace(model, data, ["gradient_mean"], progress=False) for data in sets)
    found = gradient_alignment(a, b)
    x, y = (vectors(model, data) for data in sets)
    assert (found.arrays["bound"] < 0.5).any() == one_class
    for depth in range(4):
        p, q = x[depth].mean(0), y[depth].mean(0)
        cosine = p @ q / np.linalg.norm(p) / np.linalg.norm(q)
        assert found.arrays["cosine"][depth] == pytest.approx(cosine, abs=1e-5)
        covariance = np.cov(x[depth].T)
        kappa, mu = np.linalg.eigvalsh(covariance)[-1], p @ p - np.trace(covariance) / 60
        if mu <= 0:
            assert found.arrays["bound"][depth] == 1
            continue
        bound = 4 * kappa / (60 * mu) + 4 * kappa / (40 * mu)
        bound += 4 * kappa * np.trace(covariance) / (60 * 40 * mu**2)
        assert found.arrays["bound"][depth] == pytest.approx(min(bound, 1), rel=1e-4)
    same = gradient_alignment(a, a)
    np.testing.assert_allclose(same.arrays["cosine"], 1)


def test_where_the_mean_gradient_is_noise_alignment_has_no_bound() -> None:
    # Labels drawn evenly, whatever the input, agree on no direction.
    model = samples.mlp(regression=False, num_outputs=64)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        model.head.weight.normal_(0, 1e-3, generator=generator)
        model.head.bias.zero_()

    def traced(rows: int) -> Trace:
        labels = torch.randint(0, 64, (rows,), generator=generator)
        data = {"inputs": torch.randn(rows, 2, generator=generator), "labels": labels}
        return ed.trace(model, data, ["gradient_mean"], progress=False)

    large = traced(2000)
    bounds = [gradient_alignment(traced(40), large).arrays["bound"][-1] for _ in range(10)]
    assert np.mean(bounds) > 0.8
    assert (gradient_alignment(traced(1), large).arrays["bound"] == 1).all()


def test_alignment_refuses_two_models() -> None:
    data = samples.pictures(8)
    a = ed.trace(samples.vit(), data, ["gradient_mean"], progress=False)
    b = ed.trace(samples.vit(layers=2), data, ["gradient_mean"], progress=False)
    with pytest.raises(SettingError, match="the traces have 3 and 2 blocks; trace one model"):
        gradient_alignment(a, b)


def test_batch_norm_does_not_mix_samples() -> None:
    from tests.zoo import ENTRIES

    model, _ = ENTRIES["CifarResNet-post-pad"].make()
    data = {"pixel_values": torch.randn(5, 3, 32, 32), "labels": torch.arange(5)}
    model.train()  # trace uses eval mode, in which a sample's gradient is its own
    together = ed.trace(model, data, ["gradient_norm"], batch_size=5, progress=False)
    alone = ed.trace(model, data, ["gradient_norm"], batch_size=1, progress=False)
    np.testing.assert_allclose(together["gradient_norm"], alone["gradient_norm"], rtol=1e-5)


def test_stream_and_weight_statistics_agree_with_torch() -> None:
    model, data = samples.vit(), samples.pictures(30)
    t = ed.trace(model, data, ["statistics"], batch_size=7, progress=False)
    stream = ed.as_stream(model)
    with torch.no_grad(), record_branches(stream.blocks) as records:
        stream.observe({"pixel_values": data["pixel_values"]})
    for depth, (attention, mlp) in enumerate(records):
        for name, record in (("attention", attention), ("mlp", mlp)):
            expected = float(record.x.double().std(correction=0))
            found = t.result("stream_std").arrays[name][depth]
            assert found == pytest.approx(expected, rel=1e-5)
        weight = model.vit.layers[depth].mlp.fc1.weight
        found = t.result("weight_std").arrays["mlp_fc1"][depth]
        assert found == pytest.approx(float(weight.detach().std(correction=0)), rel=1e-5)
    assert {"attention_q_proj", "attention_o_proj", "mlp_fc2"} <= set(t.result("weight_std").series)


def test_stream_statistics_leave_out_padding_and_survive_a_large_mean() -> None:
    model, data = samples.gpt2(), samples.sentences()
    with torch.no_grad():
        model.transformer.wte.weight += 50
    t = ed.trace(model, data, ["stream_std"], batch_size=2, progress=False)
    with torch.no_grad():
        states = ed.as_stream(model).observe({k: v for k, v in data.items() if k != "labels"})
    real = states.h[0][data["attention_mask"].bool()].double()
    assert t["stream_std"][0] == pytest.approx(float(real.std(correction=0)), rel=1e-5)
