"""Check that an objective trains every block, over one cycle of its curriculum."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from everydepth.config import checked
from everydepth.objectives import LayerDropout
from everydepth.stream import Check, differentiating, unwrapped, with_labels
from everydepth.stream.checks import CheckReport
from everydepth.training.module import EveryDepth
from everydepth.training.snapshot import kept_random_state


@dataclass(frozen=True, kw_only=True)
class ObjectiveReport(CheckReport):
    """The outcome of `check_objective`; prints as a table.

    cycle: its length in steps.
    steps: the steps of the cycle that were run.
    weights: the mean weight of each depth, 0..L, over the cycle.
    """

    objective: str
    cycle: int
    steps: tuple[int, ...]
    weights: tuple[float, ...]

    @property
    def verdict(self) -> str:
        does = "trains every block" if self.ok else "does not work as documented"
        return f"{self.objective} {does} (cycle of {self.cycle} steps, {len(self.steps)} run)"

    def __str__(self) -> str:
        shown = " ".join(f"{weight:.3g}" for weight in self.weights)
        last = len(self.weights) - 1
        return f"{super().__str__()}\nmean weight of depth 0..{last}: {shown}"


@checked
def check_objective(net: EveryDepth, batch: Mapping[str, Any]) -> ObjectiveReport:
    """Run one cycle of the objective on a copy, and check that gradients reach every part.

    Runs only the steps that supervise a depth or run a block for the first time. `batch` must have
    labels.

    >>> net = ed.EveryDepth(model, ed.layerskip())
    >>> print(ed.check_objective(net, train.batch(range(8))))
    layerskip trains every block ...
    """
    # The network may be inside DDP or torch.compile.
    net = copy.deepcopy(unwrapped(net))  # pyright: ignore[reportAssignmentType]
    net.train()
    net.raise_on_nan = True
    batch = net.stream.check_batch(batch)
    if net.objective.needs_labels:
        batch = with_labels(net.stream, batch)
    objective, depth = net.objective, net.stream.depth
    cycle = objective.cycle(depth)
    weights = torch.stack([objective.weights(s, cycle, depth) for s in range(cycle)])
    steps = _steps_to_run(net, weights, batch)
    reached = dict.fromkeys(_parts(net), False)
    worst, unsupervised = 0.0, ""
    for step in steps:
        net.set_progress(step, cycle)
        net.zero_grad()
        with differentiating(), kept_random_state():  # dropout draws
            out = net(**batch)
            assert out.loss is not None
            out.loss.backward()
        assert out.losses is not None
        for name, part in _parts(net).items():
            reached[name] |= any(p.grad is not None and bool(p.grad.any()) for p in part)
        labels = objective.label_weights(weights[step].tolist())
        expected = sum(labels[d] * float(loss) for d, loss in out.losses.items())
        expected += 0.0 if out.regularizer is None else float(out.regularizer)
        worst = max(worst, abs(float(out.loss.detach()) - expected) / max(abs(expected), 1.0))
        if set(out.losses) != set(weights[step].nonzero().flatten().tolist()):
            unsupervised = f"step {step} supervised {sorted(out.losses)}"
    checks = (
        _weights_check(net, weights, cycle),
        Check(
            "the loss is the weighted sum",
            not unsupervised and worst < 1e-4,
            unsupervised or f"largest relative difference {worst:.0e}",
        ),
        *_reach_checks(net, reached),
    )
    return ObjectiveReport(
        objective=objective.name,
        cycle=cycle,
        steps=tuple(steps),
        weights=tuple(weights.mean(0).tolist()),
        checks=checks,
    )


def _steps_to_run(net: EveryDepth, weights: Tensor, batch: Mapping[str, Any]) -> list[int]:
    cycle, rows = len(weights), net.stream.rows(batch)
    supervised = torch.zeros(weights.shape[1], dtype=torch.bool)
    ran = torch.zeros(net.stream.depth, dtype=torch.bool)
    dropout = net.objective.get(LayerDropout)
    steps: list[int] = []
    for step in range(cycle):
        runs = torch.ones_like(ran)
        if dropout is not None:
            moment = net.objective.moment(step, cycle, net.stream.depth)
            runs = dropout.kept(moment, rows).any(1)
        new = (weights[step] > 0) & ~supervised
        if bool(new.any()) or bool((runs & ~ran).any()):
            steps.append(step)
            supervised |= new
            ran |= runs
    return steps


def _parts(net: EveryDepth) -> dict[str, list[nn.Parameter]]:
    """The trainable parameters of every block and head, by readable name."""
    modules = {f"block {i}": b.module for i, b in enumerate(net.stream.blocks, start=1)}
    modules["the head"] = net.stream.head
    modules |= {f"the head of depth {d}": head for d, head in net.heads.items()}
    return {k: [p for p in m.parameters() if p.requires_grad] for k, m in modules.items()}


def _weights_check(net: EveryDepth, weights: Tensor, cycle: int) -> Check:
    objective, depth = net.objective, net.stream.depth
    name = "weights are as documented"
    if weights.shape != (cycle, depth + 1) or not bool((weights >= 0).all()):
        return Check(name, False, f"shape {tuple(weights.shape)}, smallest {float(weights.min())}")
    documented = torch.stack([objective.expected_weights(s, cycle, depth) for s in range(cycle)])
    never = ((documented > 0).any(0) & ~(weights > 0).any(0)).nonzero().flatten().tolist()
    if never:
        return Check(name, False, f"depths {never} are never supervised in {cycle} steps")
    count = int((weights > 0).any(0).sum())
    return Check(name, True, f"{count} of {depth} depths are supervised")


def _reach_checks(net: EveryDepth, reached: Mapping[str, bool]) -> tuple[Check, ...]:
    parts = _parts(net)
    frozen = [name for name, part in parts.items() if not part]
    missed = [name for name in parts if parts[name] and not reached[name]]
    blocks = [name for name in missed if name.startswith("block")]
    heads = [name for name in missed if not name.startswith("block")]
    note = f" ({', '.join(frozen)} frozen)" if frozen else ""

    def check(name: str, missing: list[str], total: int) -> Check:
        detail = f"no gradient: {', '.join(missing)}" if missing else f"{total}{note}"
        return Check(name, not missing, detail)

    return (
        check("gradient reaches every block", blocks, net.stream.depth),
        check("gradient reaches every head", heads, 1 + len(net.heads)),
    )
