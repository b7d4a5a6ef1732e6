"""What each block and branch adds to the prediction (Progressive Approximation, Eq. 10)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from everydepth.results.result import Result
from everydepth.stream import TOKEN_TASKS, Block, BranchRecord, Task
from everydepth.tracing.metric import BatchMetric, register_metric
from everydepth.tracing.metrics.predictive import LABELS, NUMBERS
from everydepth.tracing.observation import BlockRecords, Observation
from everydepth.tracing.predictions import LOGIT_BYTES
from everydepth.tracing.sums import array

FEW_OUTPUTS: frozenset[Task] = frozenset({"classification", "regression"})


class _Contribution(BatchMetric):
    section = "blocks"
    group = "contributions"
    tasks = FEW_OUTPUTS | TOKEN_TASKS


@register_metric
class Contributions(_Contribution):
    """`z_l - z_{l-1}`: its norm, and what it adds to the logit of the target.

    The target is the label, or without one the final prediction; in a regression, the first output.
    The second series telescopes: `start + sum(target) = end`.
    """

    reads = frozenset({"step", "followed"})
    some_depths = True
    name = "contributions"
    title = "What each block adds"
    about = "How much each block changes the output, and how much of that goes to the right answer."

    def update(self, observation: Observation) -> None:
        p = observation.predictions
        self.sums.add(
            steps=p.step.sum(1, dtype=torch.float64),
            followed=p.followed.sum(1, dtype=torch.float64),
        )
        self.rows += p.step.shape[1]

    def compute(self) -> Result:
        followed = self.sums.array("followed") / self.rows
        return self.over_depths(
            {"norm": self.sums.array("steps") / self.rows, "target": np.diff(followed)},
            first=1,
            beside={"start": followed[:1], "end": followed[-1:]},
            labels={
                "norm": "‖z after - z before‖ (logit)",
                "target": "added to the target's logit (logit)",
            },
            meta={"rows": self.rows},
        )


@register_metric
class ResidualTarget(_Contribution):
    """How close block l comes to adding what is missing, `y - z_{l-1}` (Eqs. 7 and 8).

    cosine: between the block's contribution in output space and what is missing, over all data.
    share: the norm of the contribution over that of what is missing; 1 is ideal.
    """

    reads = frozenset({"error", "step"})
    some_depths = True
    name = "residual_target"
    title = "Contribution to what is missing"
    about = "How well each block's contribution matches what the previous prediction lacks."
    needs = LABELS
    tasks = NUMBERS
    better = "higher"

    def update(self, observation: Observation) -> None:
        p = observation.predictions
        self.sums.add(
            missing=p.error.double().square().sum(1), added=p.step.double().square().sum(1)
        )
        self.rows += p.step.shape[1]

    def compute(self) -> Result:
        missing, added = self.sums.array("missing"), self.sums.array("added")
        before, after = missing[:-1], missing[1:]
        # |y - z_l|^2 = |y - z_{l-1}|^2 - 2 <missing, added> + |added|^2
        with np.errstate(divide="ignore", invalid="ignore"):
            cosine = (before - after + added) / 2 / np.sqrt(before * added)
            share = np.sqrt(added / before)
        return self.over_depths(
            {
                "cosine": np.where(np.isfinite(cosine), cosine, np.nan),
                "share": np.where(np.isfinite(share), share, np.nan),
            },
            first=1,
            labels={
                "cosine": "cosine of the contribution with what is missing",
                "share": "‖contribution‖ / ‖what is missing‖",
            },
            meta={"rows": self.rows},
        )


@register_metric
class BranchContributions(_Contribution):
    """The contribution of each block, divided among its branches.

    The state between two branches is read out like any other, so the parts add up exactly to
    `z_l - z_{l-1}`. One series of norms per kind of branch, and `<kind>_target` for what it adds to
    the target's logit.
    """

    reads = frozenset({"step", "top"})
    name = "branch_contributions"
    title = "What each branch adds"
    about = "How much each attention or feed-forward branch changes the output."
    needs = frozenset({"branches"})
    # Twice as many readouts are expensive with a large vocabulary.
    default = FEW_OUTPUTS

    def __init__(self) -> None:
        super().__init__()
        self.parts: dict[tuple[str, int], np.ndarray] = {}
        self.between: dict[int, list[Tensor]] = {}
        self.depth = 0

    def see_block(self, seen: BlockRecords) -> None:
        stream, depth, batch = seen.stream, seen.depth, seen.batch
        # Contiguous, because a view of one token would keep all others in memory.
        self.between[depth] = [
            stream.feature(stream.between(h, depth, batch), depth, batch).contiguous()
            for h in _states_between(seen.block, seen.branches)
        ]

    def update(self, observation: Observation) -> None:
        o = observation
        self.depth = o.depth
        n = o.features.shape[1]
        self.rows += n
        size = max(1, LOGIT_BYTES // (4 * o.outputs))
        follow = _followed(o)
        for depth, block in enumerate(o.stream.blocks, start=1):
            between = [o.rows.pick(f) for f in self.between.pop(depth)]
            for start in range(0, n, size):
                rows = slice(start, start + size)
                points = [
                    o.logits(depth - 1, rows),
                    *(o.stream.head(o.stream.normed(f[rows], depth)) for f in between),
                    o.logits(depth, rows),
                ]
                self._add(depth, block, points, follow[rows])

    def _add(self, depth: int, block: Block, points: list[Tensor], follow: Tensor) -> None:
        names = block.names if len(points) > 2 else ["block"]
        steps = torch.stack(points).diff(dim=0)
        target = steps.gather(-1, follow.expand(steps.shape[:-1])[..., None])[..., 0]
        norms = torch.linalg.vector_norm(steps, dim=-1)
        found = torch.stack([norms, target], 1).sum(-1, dtype=torch.float64)
        for name, sums in zip(names, array(found), strict=True):
            self.parts[name, depth] = self.parts.get((name, depth), np.zeros(2)) + sums

    def compute(self) -> Result:
        series: dict[str, np.ndarray] = {}
        labels: dict[str, str] = {}
        for k, (suffix, what) in enumerate((("", "‖added‖"), ("_target", "added to the target"))):
            sums = {key: float(found[k]) for key, found in self.parts.items()}
            for name, column in by_branch(sums, range(1, self.depth + 1)).items():
                series[f"{name}{suffix}"] = column / self.rows
                labels[f"{name}{suffix}"] = f"{name.replace('_', ' ')}: {what} (logit)"
        return self.over_depths(series, first=1, labels=labels, meta={"rows": self.rows})


def by_branch(values: Mapping[tuple[str, int], float], depths: range) -> dict[str, np.ndarray]:
    """Values by branch and depth as a column per branch; NaN where a block has no such branch."""
    names = dict.fromkeys(name for name, _ in values)
    return {name: np.array([values.get((name, d), np.nan) for d in depths]) for name in names}


def _states_between(block: Block, seen: Sequence[BranchRecord]) -> list[Tensor]:
    # Parallel branches are added one after the other.
    states, h = list[Tensor](), seen[0].x
    for i, (branch, record) in enumerate(zip(block.branches[:-1], seen, strict=False)):
        then = seen[i + 1]
        together = block.parallel or block.branches[i + 1].beside
        h = branch.added(h, record.out) if together else then.x
        states.append(h.reshape(then.shape))
    return states


def _followed(o: Observation) -> Tensor:
    """The class whose logit is followed: the label, or the final prediction."""
    p = o.predictions
    if o.stream.task == "regression":
        return torch.zeros(p.step.shape[1], dtype=torch.long, device=p.step.device)
    top = p.top[-1].long()
    return top if o.targets is None else torch.where(p.labeled, o.targets, top)
