"""Networks trained together are the networks trained one by one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import mse_loss

from everydepth.architectures.residual_mlp import ResidualMLP, ResidualMLPConfig
from everydepth.data import surface_data
from everydepth.errors import SettingError
from everydepth.objectives import Objective, aligned, end_to_end, lpa
from everydepth.stream import as_stream
from everydepth_papers.evidence.surfaces import ManyMLPs, order, rate, starts, train_surfaces

SURFACES = ["exponential_saddle", "standing_wave_grid"]
OBJECTIVES = {
    "end_to_end": end_to_end(),
    "lpa": lpa(),
    "lpa_annealed": lpa().annealed(to=0.0, by=0.8),
    "aligned": aligned(),
}
HOW = {"epochs": 4, "points": 60, "batch_size": 25}
SIZES = {"hidden_size": 7, "num_hidden_layers": 3}


def alone(surface: str, objective: Objective, seed: int, schedule: str) -> ResidualMLP:
    """One network, plainly: the model's own forward pass, autograd, a step of Adam a batch."""
    train, _ = surface_data(surface, n_train=60, n_test=60, seed=seed, dtype=torch.float64)
    model = starts(SURFACES, seed, **SIZES)[SURFACES.index(surface)].double()
    stream = as_stream(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, foreach=False)
    step, total = 0, 8
    for epoch in range(4):
        for rows in order(60, 25, epoch, seed):
            optimizer.param_groups[0]["lr"] = rate(step, total, 1e-3, schedule)
            states = stream.observe({"inputs": train.inputs[rows]})
            weights = objective.weights(step, total, stream.depth)
            losses = [
                mse_loss(states.logits(depth), train.labels[rows])
                for depth in range(stream.depth + 1)
            ]
            loss = sum(w * one for w, one in zip(weights, losses, strict=True))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
    return model


@pytest.mark.parametrize("schedule", ["cosine", "constant"])
def test_training_together_is_training_one_by_one(schedule: str) -> None:
    together = train_surfaces(
        SURFACES, OBJECTIVES, seed=3, schedule=schedule, dtype=torch.float64, **HOW, **SIZES
    )["networks"]
    for surface in SURFACES:
        _, test = surface_data(surface, n_train=60, n_test=60, seed=3, dtype=torch.float64)
        for name, objective in OBJECTIVES.items():
            states = as_stream(alone(surface, objective, 3, schedule)).observe(
                {"inputs": test.inputs}
            )
            errors = [states.logits(depth) - test.labels for depth in range(4)]
            found = together[surface][name]
            # Results carry five digits; the gradients below are compared to 1e-12.
            expect = {
                "mse": [e.square().mean().item() for e in errors],
                "mae": [e.abs().mean().item() for e in errors],
                "sup": [e.abs().max().item() for e in errors],
            }
            for what, values in expect.items():
                assert found[what] == pytest.approx(values, rel=6e-5)
            assert found["history"][-1] == found["mse"][-1]


def test_a_training_cut_short_goes_on_to_the_same_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    how = {"seed": 0, "epochs": 5, "points": 60, "batch_size": 25, "every": 2, **SIZES}
    whole = train_surfaces(SURFACES, OBJECTIVES, **how)
    evaluations = 0
    measured = ManyMLPs.errors

    def dies(*args: Any, **kwargs: Any) -> Any:
        nonlocal evaluations
        evaluations += 1
        if evaluations == 3:  # the start, after epoch 2, after epoch 4
            raise KeyboardInterrupt
        return measured(*args, **kwargs)

    monkeypatch.setattr(ManyMLPs, "errors", dies)
    with pytest.raises(KeyboardInterrupt):
        train_surfaces(SURFACES, OBJECTIVES, folder=tmp_path, **how)
    assert train_surfaces(SURFACES, OBJECTIVES, folder=tmp_path, **how) == whole
    assert evaluations == 3 + 4  # epochs 3 to 5 only: after 4, after 5, at the end, on a grid
    assert not list(tmp_path.iterdir())


def test_gradients_and_losses_are_those_of_autograd() -> None:
    models = [ResidualMLP(ResidualMLPConfig(num_outputs=2, **SIZES)).double() for _ in range(3)]
    inputs = torch.randn(11, 2, dtype=torch.float64)
    targets = torch.randn(3, 11, 2, dtype=torch.float64)
    weights = torch.rand(3, 4, dtype=torch.float64)
    weights[0] = torch.tensor([0.0, 0.0, 0.0, 1.0])
    nets = ManyMLPs(models, torch.float64)
    for _ in range(2):  # the second time in memory that was used before
        losses = nets.losses_and_gradients(inputs, targets, weights)
    for index, model in enumerate(models):
        states = as_stream(model).observe({"inputs": inputs})
        each = torch.stack([mse_loss(states.logits(d), targets[index]) for d in range(4)])
        assert torch.allclose(losses[index], each, rtol=1e-12)
        model.zero_grad()
        (weights[index] * each).sum().backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            grad = nets.network(index, grad=True)[name]
            assert torch.allclose(grad, parameter.grad, rtol=1e-10, atol=1e-12), name
        assert all(torch.equal(nets.network(index)[n], p) for n, p in model.state_dict().items())


def test_parameters_after_many_steps_agree_to_1e_10() -> None:
    model = starts(SURFACES, 0, **SIZES)[0].double()
    nets = ManyMLPs([model], torch.float64)
    together = torch.optim.Adam([nets.flat], lr=1e-2, fused=True)
    plain = torch.optim.Adam(model.parameters(), lr=1e-2, foreach=False)
    inputs = torch.rand(20, 2, dtype=torch.float64)
    targets = torch.rand(1, 20, 1, dtype=torch.float64)
    weights = lpa().weights(0, None, 3)
    for _ in range(50):
        nets.losses_and_gradients(inputs, targets, weights[None])
        together.step()
        states = as_stream(model).observe({"inputs": inputs})
        loss = sum(weights[d] * mse_loss(states.logits(d), targets[0]) for d in range(4))
        plain.zero_grad()
        loss.backward()
        plain.step()
    for name, parameter in model.state_dict().items():
        assert torch.allclose(nets.network(0)[name], parameter, rtol=1e-10, atol=1e-10), name


def test_objectives_start_from_the_same_network_and_surfaces_from_their_own() -> None:
    first, second = starts(SURFACES, 0), starts(SURFACES, 0)
    assert torch.equal(first[0].embed.weight, second[0].embed.weight)
    assert not torch.equal(first[0].embed.weight, first[1].embed.weight)
    assert not torch.equal(first[0].embed.weight, starts(SURFACES, 1)[0].embed.weight)


def test_networks_that_cannot_be_stacked_are_refused() -> None:
    with pytest.raises(SettingError, match="without skips or for classes cannot"):
        ManyMLPs([ResidualMLP(ResidualMLPConfig(norm=True))])
    narrow = ResidualMLP(ResidualMLPConfig(hidden_size=2, intermediate_size=30))
    with pytest.raises(SettingError, match="a single map needs them alike"):
        ManyMLPs([narrow], one_map=True)


def test_blocks_of_one_map_add_relu_of_one_map() -> None:
    model = ResidualMLP(ResidualMLPConfig(**SIZES)).double()
    inputs, targets = torch.randn(9, 2).double(), torch.randn(1, 9, 1).double()
    nets = ManyMLPs([model], torch.float64, one_map=True)
    nets.losses_and_gradients(inputs, targets, torch.ones(1, 4).double())
    h = model.embed(inputs)
    z = [model.head(h)]
    for block in model.blocks:
        h = h + block.fc1(h).relu()
        z.append(model.head(h))
    assert torch.allclose(nets.predictions(inputs)[:, 0], torch.stack(z), rtol=1e-12)
    sum(mse_loss(one, targets[0]) for one in z).backward()
    for name, parameter in model.named_parameters():
        grad = nets.network(0, grad=True)[name]
        if ".fc2." in name:
            assert not grad.any()
        else:
            assert parameter.grad is not None
            assert torch.allclose(grad, parameter.grad, rtol=1e-10, atol=1e-12), name


def test_a_stream_of_width_two_is_trained_as_by_autograd() -> None:
    config = ResidualMLPConfig(hidden_size=2, intermediate_size=9, num_hidden_layers=3)
    model = ResidualMLP(config).double()
    inputs, targets = torch.randn(9, 2).double(), torch.randn(1, 9, 1).double()
    nets = ManyMLPs([model], torch.float64)
    nets.losses_and_gradients(inputs, targets, torch.ones(1, 4).double())
    states = as_stream(model).observe({"inputs": inputs})
    sum(mse_loss(states.logits(depth), targets[0]) for depth in range(4)).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        grad = nets.network(0, grad=True)[name]
        assert torch.allclose(grad, parameter.grad, rtol=1e-10, atol=1e-12), name


@pytest.mark.parametrize("optimizer", ["adam", "sgd", "momentum"])
def test_a_factor_of_the_rate_is_another_rate(optimizer: str) -> None:
    how: dict[str, Any] = {
        "seed": 0,
        "optimizer": optimizer,
        "dtype": torch.float64,
        **HOW,
        **SIZES,
    }
    both = {"end_to_end": end_to_end(), "faster": end_to_end()}
    factors = {"faster": 1.5}
    together = train_surfaces(SURFACES, both, lr=1e-2, factors=factors, **how)["networks"]
    alone = train_surfaces(SURFACES, {"end_to_end": end_to_end()}, lr=1.5e-2, **how)["networks"]
    for surface in SURFACES:
        assert together[surface]["faster"]["mse"] == pytest.approx(
            alone[surface]["end_to_end"]["mse"], rel=1e-4
        )
        assert together[surface]["faster"]["mse"] != together[surface]["end_to_end"]["mse"]


def test_a_training_that_diverges_has_no_error_and_harms_no_other() -> None:
    how: dict[str, Any] = {"seed": 0, "optimizer": "sgd", "lr": 1e-2, **HOW, **SIZES}
    both = {"end_to_end": end_to_end(), "wild": end_to_end()}
    found = train_surfaces(SURFACES, both, factors={"wild": 1e12}, **how)["networks"]
    calm = train_surfaces(SURFACES, {"end_to_end": end_to_end()}, **how)["networks"]
    for surface in SURFACES:
        assert found[surface]["wild"]["mse"][-1] is None
        assert found[surface]["end_to_end"] == calm[surface]["end_to_end"]


def test_what_is_drawn_are_predictions_on_an_even_grid() -> None:
    found = train_surfaces(SURFACES, {"lpa": lpa()}, seed=0, draw=SURFACES[1], **HOW, **SIZES)
    assert len(found["drawn"]["lpa"]) == 4
    assert {len(depth) for depth in found["drawn"]["lpa"]} == {24 * 24}


def test_what_a_block_adds_is_compared_with_what_was_missing() -> None:
    model = starts(SURFACES, 0, **SIZES)[0].double()
    points, _ = surface_data(SURFACES[0], n_train=40, n_test=40, seed=0, dtype=torch.float64)
    found = ManyMLPs([model], torch.float64).errors(points.inputs, points.labels[None])
    states = as_stream(model).observe({"inputs": points.inputs})
    z = [states.logits(depth).detach().flatten() for depth in range(4)]
    for block in range(3):
        added, missing = z[block + 1] - z[block], points.labels.flatten() - z[block]
        cosine = torch.cosine_similarity(added, missing, dim=0)
        assert found["toward_residual"][0, block].item() == pytest.approx(cosine.item())
        share = added.norm() / missing.norm()
        assert found["residual_share"][0, block].item() == pytest.approx(share.item())
