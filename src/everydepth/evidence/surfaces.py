"""Many small residual networks trained at once: one batched product where a loop would need many.

A network of width 30 leaves a processor idle: calling its operations takes longer than doing them.
Stacked along a first dimension, networks of one shape with weights, targets and objectives of their
own share every call. Gradients are written out, block by block; the tests compare with autograd.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.optim import Adam

from everydepth.architectures.residual_mlp import ResidualMLP, ResidualMLPConfig
from everydepth.data import SURFACES, surface_data
from everydepth.errors import SettingError
from everydepth.objectives import Objective

Errors = dict[str, Float[Tensor, "networks depths"]]


class ManyMLPs:
    """Residual perceptrons of one shape; `parameters[name][i]` is the parameter of network i."""

    def __init__(self, models: Sequence[ResidualMLP]) -> None:
        config = models[0].config
        if config.norm or not config.skips or not config.regression:
            raise SettingError(
                "networks with a norm, without skips or for classes cannot be trained together; "
                "use ResidualMLPConfig(norm=False, skips=True, regression=True)"
            )
        self.depth: int = config.num_hidden_layers
        states = [model.state_dict() for model in models]
        self.parameters = {name: torch.stack([s[name] for s in states]) for name in states[0]}
        for parameter in self.parameters.values():
            parameter.grad = torch.zeros_like(parameter)
        self._buffers: dict[tuple[Any, ...], Tensor] = {}

    def network(self, index: int) -> dict[str, Tensor]:
        """The state dictionary of one network."""
        return {name: parameter[index] for name, parameter in self.parameters.items()}

    def losses_and_gradients(
        self,
        inputs: Float[Tensor, "rows inputs"],
        targets: Float[Tensor, "networks rows outputs"],
        weights: Float[Tensor, "networks depths"],
    ) -> Float[Tensor, "networks depths"]:
        """Mean squared error of each depth; `.grad` gets the gradient of its weighted sum."""
        x = inputs.expand(len(targets), *inputs.shape)
        states, inner = self._forward(x)
        head = self.parameters["head.weight"]
        errors = [self._readout(h, depth).sub_(targets) for depth, h in enumerate(states)]
        losses = torch.stack([e.square().mean((1, 2)) for e in errors], dim=1)
        # From here on: the gradient of the loss with respect to what was read out at each depth.
        scale = 2.0 / targets[0].numel() * weights
        pulls = [e.mul_(scale[:, d, None, None]) for d, e in enumerate(errors)]
        used = [depth for depth, any_weight in enumerate(weights.any(0).tolist()) if any_weight]
        grads = {name: _grad(parameter) for name, parameter in self.parameters.items()}
        grads["head.weight"].zero_()
        for depth in used:
            grads["head.weight"].baddbmm_(pulls[depth].mT, states[depth])
        torch.sum(sum(pulls[1:], pulls[0]), 1, out=grads["head.bias"])
        dh = self._space("dh", states[-1].shape).zero_()
        for depth in reversed(range(self.depth + 1)):
            if depth in used:
                dh.baddbmm_(pulls[depth], head)
            if depth == 0:
                break
            name = f"blocks.{depth - 1}"
            torch.bmm(dh.mT, inner[depth - 1], out=grads[f"{name}.fc2.weight"])
            torch.sum(dh, 1, out=grads[f"{name}.fc2.bias"])
            da = self._space("da", inner[depth - 1].shape)
            torch.bmm(dh, self.parameters[f"{name}.fc2.weight"], out=da)
            torch.ops.aten.threshold_backward.grad_input(da, inner[depth - 1], 0, grad_input=da)
            torch.bmm(da.mT, states[depth - 1], out=grads[f"{name}.fc1.weight"])
            torch.sum(da, 1, out=grads[f"{name}.fc1.bias"])
            dh.baddbmm_(da, self.parameters[f"{name}.fc1.weight"])
        torch.bmm(dh.mT, x, out=grads["embed.weight"])
        torch.sum(dh, 1, out=grads["embed.bias"])
        return losses

    def errors(
        self,
        inputs: Float[Tensor, "rows inputs"],
        targets: Float[Tensor, "networks rows outputs"],
        rows: int = 100,
    ) -> Errors:
        """Mean squared, mean absolute and largest error of every depth 0..L (SPEC 1.1)."""
        shape = len(targets), self.depth + 1
        squared, absolute, largest = (inputs.new_zeros(shape, dtype=torch.float64) for _ in "abc")
        for x, y in zip(inputs.split(rows), targets.split(rows, dim=1), strict=True):
            states, _ = self._forward(x.expand(len(targets), *x.shape))
            for depth, h in enumerate(states):
                error = (self._readout(h, depth) - y).double()
                squared[:, depth] += error.square().sum((1, 2))
                absolute[:, depth] += error.abs().sum((1, 2))
                largest[:, depth] = largest[:, depth].maximum(error.abs().amax((1, 2)))
        count = targets[0].numel()
        return {"mse": squared / count, "mae": absolute / count, "sup": largest}

    def _forward(self, x: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """The states h_0 .. h_L, and what is inside each block after its ReLU."""
        states, inner = [self._linear("embed", x)], list[Tensor]()
        for depth in range(self.depth):
            inner.append(self._linear(f"blocks.{depth}.fc1", states[-1]).relu_())
            states.append(self._linear(f"blocks.{depth}.fc2", inner[-1]).add_(states[-1]))
        return states, inner

    def _readout(self, h: Tensor, depth: int) -> Tensor:
        return self._linear("head", h, depth)

    def _linear(self, name: str, x: Tensor, copy: int = 0) -> Tensor:
        weight, bias = self.parameters[f"{name}.weight"], self.parameters[f"{name}.bias"]
        out = self._space(f"{name} {copy}", (*x.shape[:2], bias.shape[1]))
        # Two calls: baddbmm would first copy the bias to every row.
        return torch.bmm(x, weight.mT, out=out).add_(bias[:, None])

    def _space(self, name: str, shape: Sequence[int]) -> Tensor:
        """Memory that the next step uses again: to ask for it anew costs more than to fill it."""
        key = name, *shape
        if key not in self._buffers:
            self._buffers[key] = self.parameters["head.bias"].new_empty(tuple(shape))
        return self._buffers[key]


def _grad(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def starts(surfaces: Sequence[str], seed: int, **sizes: Any) -> list[ResidualMLP]:
    """An initial network for each surface; the same for the same (surface, seed)."""
    found: list[ResidualMLP] = []
    for surface in surfaces:
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(1000 * seed + list(SURFACES).index(surface))
            found.append(ResidualMLP(ResidualMLPConfig(**sizes)))
    return found


def rate(step: int, total: int, lr: float, schedule: str) -> float:
    """The learning rate of a step: constant, or along half a cosine to 0."""
    if schedule == "constant":
        return lr
    return lr * 0.5 * (1 + math.cos(math.pi * step / total))


def order(points: int, batch_size: int, epoch: int, seed: int) -> Iterator[Tensor]:
    """The rows of each step of an epoch; a last batch that is not full is left out."""
    generator = torch.Generator().manual_seed(10_000 * seed + epoch)
    rows = torch.randperm(points, generator=generator)
    yield from rows[: points // batch_size * batch_size].split(batch_size)


def train_surfaces(
    surfaces: Sequence[str],
    objectives: Mapping[str, Objective],
    *,
    seed: int,
    epochs: int = 300,
    points: int = 10_000,
    batch_size: int = 100,
    lr: float = 1e-3,
    schedule: str = "cosine",
    every: int = 25,
    dtype: torch.dtype = torch.float32,
    **sizes: Any,
) -> dict[str, Any]:
    """Train a network for each (surface, objective), all at once, from one start for each surface.

    Adam, the same batches for all. Returns by surface and objective: errors of every depth on the
    test points, and the mean squared error of the last depth every so many epochs.
    """
    data = [
        surface_data(s, n_train=points, n_test=points, seed=seed, dtype=dtype) for s in surfaces
    ]
    inputs, test_inputs = data[0][0].inputs, data[0][1].inputs
    each = len(objectives)
    train = torch.stack([part.labels for part, _ in data]).repeat_interleave(each, 0)
    test = torch.stack([part.labels for _, part in data]).repeat_interleave(each, 0)
    begun = [model.to(dtype) for model in starts(surfaces, seed, **sizes)]
    nets = ManyMLPs([model for model in begun for _ in range(each)])
    optimizer = Adam(nets.parameters.values(), lr=lr, fused=True)
    total = epochs * (points // batch_size)
    history: list[tuple[int, Tensor]] = [(0, nets.errors(test_inputs, test)["mse"][:, -1])]
    step = 0
    for epoch in range(epochs):
        for rows in order(points, batch_size, epoch, seed):
            weights = [o.weights(step, total, nets.depth) for o in objectives.values()]
            weights = torch.stack(weights).to(dtype).repeat(len(surfaces), 1)
            for group in optimizer.param_groups:
                group["lr"] = rate(step, total, lr, schedule)
            nets.losses_and_gradients(inputs[rows], train[:, rows], weights)
            optimizer.step()
            step += 1
        if (epoch + 1) % every == 0 or epoch + 1 == epochs:
            history.append((epoch + 1, nets.errors(test_inputs, test)["mse"][:, -1]))
    final = nets.errors(test_inputs, test)
    names = [(surface, objective) for surface in surfaces for objective in objectives]
    found: dict[str, dict[str, Any]] = {surface: {} for surface in surfaces}
    for index, (surface, objective) in enumerate(names):
        found[surface][objective] = {
            **{name: _digits(values[index]) for name, values in final.items()},
            "history": _digits(torch.stack([mse[index] for _, mse in history])),
        }
    return {"epochs": [epoch for epoch, _ in history], "networks": found}


def _digits(values: Tensor) -> list[float]:
    return [float(f"{value:.5g}") for value in values.tolist()]
