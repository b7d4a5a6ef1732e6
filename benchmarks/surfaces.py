"""Many small networks at once against one after another (Progressive Approximation, Table 1).

    python benchmarks/surfaces.py

Networks of Table 1 (6 residual blocks of width 30), four objectives, Adam, batches of 100 points.
*Together*: `everydepth_papers.evidence.surfaces`, 16 networks a cell as the recipe has it, and 32.
*Alone*: a plain loop, one network after another: forward pass, the losses of the depths the
objective asks for, autograd, fused Adam. Interleaved, one compute thread, CPU seconds, best of
several rounds. Written to benchmarks/results/surfaces.json.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
from record import record_times, sized
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor
from torch.nn.functional import mse_loss
from torch.optim import Adam

from everydepth.architectures.residual_mlp import ResidualMLP
from everydepth.data import SURFACES, surface_data
from everydepth.objectives import Objective, aligned, end_to_end, lpa
from everydepth_papers.evidence.surfaces import ManyMLPs, starts

OBJECTIVES: dict[str, Objective] = {
    "end_to_end": end_to_end(),
    "lpa": lpa(),
    "lpa_annealed": lpa().annealed(to=0.0, by=0.8),
    "aligned": aligned(),
}
BATCH, WANTED = 100, 10.0


def together(surfaces: list[str]) -> Callable[[int], None]:
    """Steps of all networks of the surfaces."""
    data = [surface_data(s, n_train=BATCH, n_test=1)[0] for s in surfaces]
    targets = torch.stack([d.labels for d in data]).repeat_interleave(len(OBJECTIVES), 0)
    nets = ManyMLPs([m for m in starts(surfaces, 0) for _ in OBJECTIVES])
    optimizer = Adam([nets.flat], lr=1e-3, fused=True)

    def run(steps: int) -> None:
        for step in range(steps):
            weights = [o.weights(step, steps, nets.depth) for o in OBJECTIVES.values()]
            repeated = torch.stack(weights).float().repeat(len(surfaces), 1)
            nets.losses_and_gradients(data[0].inputs, targets, repeated)
            optimizer.step()

    return run


def forward(model: ResidualMLP, inputs: Tensor, weights: list[float]) -> list[tuple[float, Tensor]]:
    """What is read out at each depth that counts, with its weight."""
    h = model.embed(inputs)
    found: list[tuple[float, Tensor]] = []
    for block, weight in zip(model.blocks, weights[1:], strict=True):
        h = block(h)
        if weight:
            found.append((weight, model.head(h)))
    return found


def alone(surface: str, objective: Objective) -> Callable[[int], None]:
    """Steps of one network."""
    data, _ = surface_data(surface, n_train=BATCH, n_test=1)
    model = starts([surface], 0)[0]
    optimizer = Adam(model.parameters(), lr=1e-3, fused=True)

    def run(steps: int) -> None:
        for step in range(steps):
            weights = objective.weights(step, steps, len(model.blocks)).tolist()
            read = forward(model, data.inputs, weights)
            loss = sum((w * mse_loss(z, data.labels) for w, z in read), torch.zeros(()))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return run


def seconds(run: Callable[[int], None], steps: int) -> float:
    start = time.process_time()
    run(steps)
    return time.process_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=sized(7, 1))
    parser.add_argument("--steps", type=int, default=sized(60, 1))
    args = parser.parse_args()
    torch.set_num_threads(1)
    names = list(SURFACES)
    groups = {f"together, {4 * n}": (together(names[:n]), 4 * n) for n in (4, 8)}
    singles = [alone(names[0], objective) for objective in OBJECTIVES.values()]
    best: dict[str, float] = {}

    def note(name: str, value: float) -> None:
        best[name] = min(best.get(name, float("inf")), value)

    for _ in track(range(args.rounds), "surfaces", transient=True):
        # A mean over the four objectives: they ask for different numbers of readouts.
        each = sum(seconds(run, args.steps) for run in singles)
        note("alone", each / len(singles) / args.steps)
        for name, (run, count) in groups.items():
            note(name, seconds(run, args.steps) / args.steps / count)
    figures: dict[str, Any] = {
        "microseconds_per_network_and_step": {k: round(1e6 * v, 1) for k, v in best.items()},
        "throughput": {name: round(best["alone"] / best[name], 1) for name in groups},
        "wanted": WANTED,
    }
    table = Table(title="A training step of one network")
    for column in ("way", "µs", "throughput"):
        table.add_column(column, justify="left" if column == "way" else "right")
    for name, value in best.items():
        table.add_row(name, f"{1e6 * value:.0f}", f"{best['alone'] / value:.1f}x")
    Console().print(table)
    print(f"wrote {record_times('surfaces', figures)}")


if __name__ == "__main__":
    main()
