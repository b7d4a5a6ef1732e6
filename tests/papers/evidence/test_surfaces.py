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
    assert evaluations == 3 + 3  # epochs 3 to 5 only: after 4, after 5, at the end
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
    with pytest.raises(SettingError, match="for classes or with another width inside cannot"):
        ManyMLPs([ResidualMLP(ResidualMLPConfig(norm=True))])
    with pytest.raises(SettingError, match="with another width inside"):
        ManyMLPs([ResidualMLP(ResidualMLPConfig(intermediate_size=60))])
