"""Many small residual networks trained at once: one batched product where a loop would need many.

A network of width 30 leaves a processor idle: calling its operations takes longer than doing them.
Stacked along a first dimension, networks of one shape with weights, targets and objectives of their
own share every call. Gradients are written out, block by block; the tests compare with autograd.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.optim import SGD, Adam, Optimizer

from everydepth.architectures.residual_mlp import ResidualMLP, ResidualMLPConfig
from everydepth.data import SURFACES, Points, surface_data
from everydepth.errors import SettingError
from everydepth.objectives import Objective

Errors = dict[str, Float[Tensor, "networks depths"]]


class ManyMLPs:
    """Residual perceptrons of one shape, stacked. `network(i)` is the state dictionary of one.

    The stream carries one more unit that is always 1, so that a bias is a row of its matrix and
    costs no pass over the activations of its own; its last column is fixed. Units that fill the
    width up to a multiple of 16 are 0 and stay 0. `parameters`: embed (network, inputs + 1, width),
    blocks (2 L, network, width, width), head (network, width, outputs), all parts of `flat`.

    one_map: blocks `x + relu(W x + b)`; the second map is the identity, and stays.
    """

    def __init__(
        self,
        models: Sequence[ResidualMLP],
        dtype: torch.dtype = torch.float32,
        *,
        one_map: bool = False,
    ) -> None:
        config = models[0].config
        if not config.skips or not config.regression or config.norm:
            raise SettingError(
                "networks with a norm, without skips or for classes cannot be trained together; "
                "use ResidualMLPConfig(norm=False, skips=True, regression=True)"
            )
        self.one_map = one_map
        self.depth: int = config.num_hidden_layers
        self.size: int = config.hidden_size
        self.inner: int = config.intermediate_size
        if one_map and self.inner != self.size:
            raise SettingError(
                f"one_map=True, but the width inside a block is {self.inner} and that of the "
                f"stream {self.size}; a single map needs them alike"
            )
        self.width = 16 * math.ceil((max(self.size, self.inner) + 1) / 16)
        states = [model.state_dict() for model in models]
        maps = [f"blocks.{n}.fc{k}" for n in range(self.depth) for k in (1, 2)]
        self._one = torch.zeros(self.width)  # a 1 for the unit that is always 1
        self._one[-1] = 1.0
        embed = self._stacked(states, "embed", inputs=config.num_inputs)
        blocks = torch.stack([self._stacked(states, name) for name in maps])
        embed[:, -1] += self._one.to(embed)
        blocks[0::2, :, -1] += self._one.to(embed)
        if one_map:
            blocks[1::2] = torch.eye(self.width).to(embed)
            blocks[1::2, :, -1] = 0.0  # nothing is added to the unit that is always 1
        head = self._stacked(states, "head", outputs=config.num_outputs)
        parts = {"embed": embed, "blocks": blocks, "head": head}
        # One tensor for the optimizer, whose calls would otherwise cost as much as its arithmetic.
        self.flat = torch.cat([part.flatten() for part in parts.values()]).to(dtype)
        self.flat.grad = torch.zeros_like(self.flat)
        shapes = {name: part.shape for name, part in parts.items()}
        self.parameters = _views(self.flat, shapes)
        self.grads = _views(self.flat.grad, shapes)
        self._maps = list(self.parameters["blocks"])
        self._grads = list(self.grads["blocks"])
        self._spaces: dict[tuple[Any, ...], list[Tensor]] = {}

    def _stacked(
        self,
        states: Sequence[Mapping[str, Tensor]],
        name: str,
        inputs: int | None = None,
        outputs: int | None = None,
    ) -> Tensor:
        """Of one linear map: (network, in, out), with the bias in the last row."""
        rows = self.width if inputs is None else inputs + 1
        columns = self.width if outputs is None else outputs
        weights = torch.stack([state[f"{name}.weight"] for state in states]).mT
        found = weights.new_zeros(len(states), rows, columns)
        found[:, : weights.shape[1], : weights.shape[2]] = weights
        found[:, -1, : weights.shape[2]] = torch.stack([s[f"{name}.bias"] for s in states])
        return found

    def network(self, index: int, *, grad: bool = False) -> dict[str, Tensor]:
        """The state dictionary of one network, or its gradient."""
        parts = self.grads if grad else self.parameters
        found = self._linear_of("embed", parts["embed"][index], columns=self.size)
        for place in range(2 * self.depth):
            name = f"blocks.{place // 2}.fc{1 + place % 2}"
            sizes = (self.size, self.inner)[:: 1 - 2 * (place % 2)]
            found |= self._linear_of(name, parts["blocks"][place, index], *sizes)
        return found | self._linear_of("head", parts["head"][index], rows=self.size)

    def _linear_of(
        self, name: str, matrix: Tensor, rows: int | None = None, columns: int | None = None
    ) -> dict[str, Tensor]:
        rows = len(matrix) - 1 if rows is None else rows
        columns = matrix.shape[1] if columns is None else columns
        weight, bias = matrix[:rows, :columns].T, matrix[-1, :columns]
        return {f"{name}.weight": weight, f"{name}.bias": bias}

    def losses_and_gradients(
        self,
        inputs: Float[Tensor, "rows inputs"],
        targets: Float[Tensor, "networks rows outputs"],
        weights: Float[Tensor, "networks depths"],
    ) -> Float[Tensor, "networks depths"]:
        """Mean squared error of each depth; `.grad` gets the gradient of its weighted sum."""
        x = self._inputs(inputs, len(targets))
        states, inner = self._forward(x)
        maps, grads = self._maps, self._grads
        errors = self._readouts(states).sub_(targets)
        losses = errors.square().mean((2, 3)).T
        # The gradient of the loss with respect to what is read out: (depth, network, row, output).
        pulls = errors.mul_((2.0 / targets[0].numel() * weights).T[:, :, None, None])
        by_depth = torch.bmm(pulls.flatten(0, 1).mT, self._side_by_side(states))
        self.grads["head"].copy_(by_depth.view(len(states), len(x), -1, self.width).sum(0).mT)
        head = self.parameters["head"].mT
        used = weights.any(0).tolist()
        dh, da, more = self._space("backward", 3, states[0].shape)
        torch.bmm(pulls[-1], head, out=dh)
        for block in reversed(range(self.depth)):
            first, second = 2 * block, 2 * block + 1
            torch.bmm(inner[block].mT, dh, out=grads[second])
            torch.bmm(dh, maps[second].mT, out=da)
            torch.ops.aten.threshold_backward.grad_input(da, inner[block], 0, grad_input=da)
            torch.bmm(states[block].mT, da, out=grads[first])
            dh.add_(torch.bmm(da, maps[first].mT, out=more))
            if used[block]:
                dh.baddbmm_(pulls[block], head)
        torch.bmm(x.mT, dh, out=self.grads["embed"])
        for name in ("embed", "blocks"):
            self.grads[name][..., -1] = 0.0  # the unit that is always 1
        if self.one_map:
            self.grads["blocks"][1::2] = 0.0
        return losses

    def errors(
        self,
        inputs: Float[Tensor, "rows inputs"],
        targets: Float[Tensor, "networks rows outputs"],
        rows: int = 100,
    ) -> Errors:
        """Mean squared, mean absolute and largest error of every depth 0..L.

        toward_residual: of each block 1..L, the cosine over the points of what it adds to the
        prediction with what is missing before it, `y - z_{l-1}` (Eq. 7); residual_share: the length
        of the one over the other.
        """
        shape = self.depth + 1, len(targets)
        squared, absolute, largest = (inputs.new_zeros(shape, dtype=torch.float64) for _ in "abc")
        added = inputs.new_zeros((self.depth, len(targets)), dtype=torch.float64)
        for x, y in zip(inputs.split(rows), targets.split(rows, dim=1), strict=True):
            states, _ = self._forward(self._inputs(x, len(targets)))
            error = self._readouts(states).sub_(y).double()
            added += error.diff(dim=0).square().sum((2, 3))
            error.abs_()
            squared += error.square().sum((2, 3))
            absolute += error.sum((2, 3))
            largest = largest.maximum(error.amax((2, 3)))
        count = targets[0].numel()
        # |y - z_l|^2 = |y - z_{l-1}|^2 - 2 <what is missing, what is added> + |what is added|^2
        before, after = squared[:-1], squared[1:]
        lengths = (before * added).sqrt().clamp(min=1e-300)
        return {
            "mse": squared.T / count,
            "mae": absolute.T / count,
            "sup": largest.T,
            "toward_residual": ((before - after + added) / 2 / lengths).T,
            "residual_share": (added / before.clamp(min=1e-300)).sqrt().T,
        }

    def predictions(
        self, inputs: Float[Tensor, "rows inputs"]
    ) -> Float[Tensor, "depths networks rows outputs"]:
        """z_0 .. z_L."""
        networks = self.parameters["head"].shape[0]
        return self._readouts(self._forward(self._inputs(inputs, networks))[0]).clone()

    def spread(self, values: Float[Tensor, " networks"]) -> Tensor:
        """A number a network, at the places of its parameters in `flat`."""
        shapes = {name: part.shape for name, part in self.parameters.items()}
        found = torch.ones_like(self.flat)
        for name, view in _views(found, shapes).items():
            view *= values.view(-1, 1, 1) if name != "blocks" else values.view(1, -1, 1, 1)
        return found

    def _inputs(self, inputs: Tensor, networks: int) -> Tensor:
        ones = inputs.new_ones(len(inputs), 1)
        return torch.cat([inputs, ones], 1).expand(networks, -1, -1)

    def _forward(self, x: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """The states h_0 .. h_L, and what is inside each block after its ReLU."""
        shape = len(x), x.shape[1], self.width
        states = self._space("states", self.depth + 1, shape)
        inner = self._space("inner", self.depth, shape)
        torch.bmm(x, self.parameters["embed"], out=states[0])
        for block in range(self.depth):
            torch.bmm(states[block], self._maps[2 * block], out=inner[block]).relu_()
            torch.bmm(inner[block], self._maps[2 * block + 1], out=states[block + 1])
            states[block + 1].add_(states[block])
        return states, inner

    def _readouts(self, states: list[Tensor]) -> Tensor:
        """z_0 .. z_L: (depth, network, row, output)."""
        head = self.parameters["head"].repeat(len(states), 1, 1)
        read = torch.bmm(self._side_by_side(states), head)
        return read.view(len(states), len(states[0]), *read.shape[1:])

    def _side_by_side(self, states: list[Tensor]) -> Tensor:
        """All depths in one dimension with the networks, without a copy: they share a buffer."""
        networks, rows, width = states[0].shape
        return states[0].as_strided(
            (len(states) * networks, rows, width), (rows * width, width, 1), 0
        )

    def _space(self, name: str, count: int, shape: Sequence[int]) -> list[Tensor]:
        """A buffer reused by every step: allocating costs more than filling it."""
        key = name, *shape
        if key not in self._spaces:
            self._spaces[key] = list(self.flat.new_empty((count, *shape)))
        return self._spaces[key]


def _views(flat: Tensor, shapes: Mapping[str, Sequence[int]]) -> dict[str, Tensor]:
    sizes = [math.prod(shape) for shape in shapes.values()]
    parts = zip(shapes.items(), flat.split(sizes), strict=True)
    return {name: part.view(tuple(shape)) for (name, shape), part in parts}


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


OPTIMIZERS: Mapping[str, Callable[..., Optimizer]] = {
    "adam": partial(Adam, fused=True),
    "sgd": SGD,
    "momentum": partial(SGD, momentum=0.9),
}
SIDE = 24
"""Points along a side of the grid on which predictions are kept to be drawn."""


def grid(name: str, side: int, dtype: torch.dtype = torch.float32) -> Points:
    """Evenly spaced points of a surface's square, edges included."""
    surface = SURFACES[name]
    along = torch.linspace(*surface.domain, side, dtype=torch.float64)
    inputs = torch.cartesian_prod(along, along)
    return Points(inputs.to(dtype), surface(inputs).unsqueeze(-1).to(dtype))


def plane_error(name: str, points: int, seed: int) -> float:
    """Mean squared test error of the least-squares plane: what a network that learned beats.

    >>> from everydepth_papers.evidence.surfaces import plane_error
    >>> 0.0 < plane_error("standing_wave_grid", 100, seed=0) < 1.0
    True
    """
    train, test = surface_data(name, n_train=points, n_test=points, seed=seed)
    x, x_test = (torch.cat([p.inputs, torch.ones(len(p), 1)], 1) for p in (train, test))
    plane = torch.linalg.lstsq(x, train.labels).solution
    return float((x_test @ plane - test.labels).square().mean())


def train_surfaces(
    surfaces: Sequence[str],
    objectives: Mapping[str, Objective],
    *,
    seed: int,
    epochs: int = 300,
    points: int = 10_000,
    batch_size: int = 100,
    optimizer: str = "adam",
    lr: float = 1e-3,
    factors: Mapping[str, float] | None = None,
    schedule: str = "cosine",
    one_map: bool = False,
    every: int = 25,
    draw: str | None = None,
    dtype: torch.dtype = torch.float32,
    folder: Path | None = None,
    **sizes: Any,
) -> dict[str, Any]:
    """Train a network for each (surface, objective), all at once, from one start for each surface.

    The same batches for all. factors: of the learning rate, by objective. With a folder, the state
    is kept there at intervals, and an interrupted run continues from it, to the
    same numbers. Returns by surface and objective: errors of every depth on random test points, the
    mean squared and absolute error of the last depth on an even grid of as many, and the mean
    squared error by epoch, of the last depth and of all. Where training diverged,
    errors are None. draw: a surface of which predictions of every depth are returned.
    """
    data = [
        surface_data(s, n_train=points, n_test=points, seed=seed, dtype=dtype) for s in surfaces
    ]
    even = [grid(s, math.isqrt(points), dtype) for s in surfaces]
    each = len(objectives)

    def stacked(parts: Iterable[Points]) -> Tensor:
        return torch.stack([part.labels for part in parts]).repeat_interleave(each, 0)

    inputs, test_inputs = data[0][0].inputs, data[0][1].inputs
    train, test = stacked(p for p, _ in data), stacked(p for _, p in data)
    begun = starts(surfaces, seed, **sizes)
    models = [model for model in begun for _ in range(each)]
    nets = ManyMLPs(models, dtype, one_map=one_map)
    stepper = OPTIMIZERS[optimizer]([nets.flat], lr=lr)
    scales = torch.tensor([(factors or {}).get(name, 1.0) for name in objectives]).to(dtype)
    faster = None if bool((scales == 1).all()) else nets.spread(scales.repeat(len(surfaces)))
    total = epochs * (points // batch_size)
    kept = _Kept(folder, nets, stepper)
    history = kept.load() or {0: nets.errors(test_inputs, test)["mse"]}
    for epoch in range(max(history), epochs):
        for place, rows in enumerate(order(points, batch_size, epoch, seed)):
            step = epoch * (points // batch_size) + place
            weights = [o.weights(step, total, nets.depth) for o in objectives.values()]
            weights = torch.stack(weights).to(dtype).repeat(len(surfaces), 1)
            stepper.param_groups[0]["lr"] = rate(step, total, lr, schedule)
            nets.losses_and_gradients(inputs[rows], train[:, rows], weights)
            before = None if faster is None else nets.flat.clone()
            stepper.step()
            if before is not None and faster is not None:
                # A step is proportional to the rate, in each of the optimizers.
                torch.lerp(before, nets.flat, faster, out=nets.flat)
        if (epoch + 1) % every == 0 or epoch + 1 == epochs:
            history[epoch + 1] = nets.errors(test_inputs, test)["mse"]
            kept.save(history)
    final = nets.errors(test_inputs, test)
    on_grid = nets.errors(even[0].inputs, stacked(even))
    final |= {f"grid_{name}": on_grid[name][:, -1:] for name in ("mse", "mae")}
    names = [(surface, objective) for surface in surfaces for objective in objectives]
    found: dict[str, dict[str, Any]] = {surface: {} for surface in surfaces}
    for index, (surface, objective) in enumerate(names):
        layers = torch.stack([mse[index] for mse in history.values()])
        found[surface][objective] = {
            **{name: _digits(values[index]) for name, values in final.items()},
            "history": _digits(layers[:, -1]),
            "layers": [_digits(row, 3) for row in layers],
        }
    drawn: dict[str, Any] = {}
    if draw is not None:
        shown = nets.predictions(grid(draw, SIDE, dtype).inputs)
        first = list(surfaces).index(draw) * each
        for place, objective in enumerate(objectives):
            drawn[objective] = [_digits(z.flatten(), 3) for z in shown[:, first + place]]
    kept.remove()
    return {"epochs": list(history), "networks": found, **({"drawn": drawn} if drawn else {})}


class _Kept:
    """Parameters, the optimizer's state and the history on the disk: one file, whole or not."""

    def __init__(self, folder: Path | None, nets: ManyMLPs, optimizer: Optimizer) -> None:
        self.file = None if folder is None else folder / "state.safetensors"
        self.nets, self.optimizer = nets, optimizer

    def save(self, history: Mapping[int, Tensor]) -> None:
        if self.file is None:
            return
        state = {
            f"state.{k}": v
            for k, v in self.optimizer.state[self.nets.flat].items()
            if isinstance(v, Tensor)
        }
        errors = {f"epoch.{epoch}": mse.contiguous() for epoch, mse in history.items()}
        unfinished = self.file.with_suffix(".unfinished")
        save_file({"flat": self.nets.flat, **state, **errors}, unfinished)
        unfinished.replace(self.file)

    def load(self) -> dict[int, Tensor] | None:
        """The saved history; None if nothing was saved."""
        if self.file is None or not self.file.exists():
            return None
        stored = load_file(self.file)
        self.nets.flat.copy_(stored["flat"])
        state = {k.removeprefix("state."): v for k, v in stored.items() if k.startswith("state.")}
        self.optimizer.state[self.nets.flat] = state
        epochs = sorted(int(k.split(".")[1]) for k in stored if k.startswith("epoch."))
        return {epoch: stored[f"epoch.{epoch}"] for epoch in epochs}

    def remove(self) -> None:
        if self.file is not None:
            self.file.unlink(missing_ok=True)


def _digits(values: Tensor, digits: int = 5) -> list[float | None]:
    return [
        float(f"{value:.{digits}g}") if math.isfinite(value) else None for value in values.tolist()
    ]
