"""The shallowest fixed depth with a bounded risk, for texts, servers and exports."""

from __future__ import annotations

import warnings
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from everydepth.config import Share, checked
from everydepth.errors import PolicyError, SettingError
from everydepth.exits.calibrate import NotCertifiedWarning
from everydepth.exits.identity import identity
from everydepth.exits.policies import NEVER, Against, Certificate, Confidence, Policy
from everydepth.exits.risk import bounded, bounded_p_value
from everydepth.stream import Feed, ResidualStream, Targets, as_stream, evaluating
from everydepth.stream.states import are_finite


@checked
def certify_depth(
    model: nn.Module | ResidualStream,
    data: Any,
    *,
    risk: Share,
    delta: Share = 0.05,
    against: Literal["full", "labels"] = "full",
    batch_size: int | None = None,
    progress: bool = True,
    **options: Any,
) -> Policy:
    """Certify the shallowest depth to use for whole samples; returns a policy that always exits
    there.

    With probability 1 - delta over the draw of `data`, on new samples from the same source, the
    share of predictions that differ from full depth (`against="full"`), or the loss of accuracy
    (`"labels"`), is at most `risk`. For a language model, a sample is a text, since its tokens are
    not independent. Depths are tested from the last one down, each with all of delta, until one
    fails (fixed-sequence testing).

    >>> from everydepth.exits.certify import certified_depth, certify_depth
    >>> policy = certify_depth(model, valid, risk=0.5, progress=False)
    >>> 1 <= certified_depth(policy, ed.as_stream(model)) <= 3
    True
    """
    stream = as_stream(model, **options)
    losses = depth_risks(stream, data, against, batch_size, progress)
    depth, p, failed = stream.depth, 1.0, ""
    for tried in range(stream.depth - 1, 0, -1):
        found = bounded_p_value(losses[:, tried - 1], risk)
        if found > delta:
            mean = losses[:, tried - 1].mean()
            failed = f"; depth {tried} has risk {mean:.4f} on them, p-value {found:.3g}"
            break
        depth, p = tried, found
    sure = depth < stream.depth
    note = (
        f"depth {depth}: {bounded(risk, delta, len(losses), against)}{failed}"
        if sure
        else f"only the last depth is certain at risk {risk:g}, from {len(losses)} samples{failed}"
    )
    if not sure:
        warnings.warn(note, NotCertifiedWarning, stacklevel=2)
    return Confidence(
        threshold=tuple(0.0 if k >= depth else NEVER for k in range(1, stream.depth)),
        model=identity(stream),
        certificate=Certificate(
            certified=sure,
            risk=risk,
            delta=delta,
            against=against,
            samples=len(losses),
            observed=float(losses[:, depth - 1].mean()),
            p_value=p,
            speedup=stream.depth / depth,
            note=note,
        ),
    )


def certified_depth(policy: Policy, stream: ResidualStream) -> int:
    """The depth found by `certify_depth`; an error for a policy that decides row by row."""
    thresholds = policy.thresholds(stream)
    open_at = [k for k, threshold in enumerate(thresholds, start=1) if threshold != NEVER]
    if policy.certificate is None or any(thresholds[k - 1] > 0 for k in open_at):
        raise PolicyError(
            "this policy decides row by row, so it certifies no fixed depth; create one with "
            "everydepth.exits.certify.certify_depth(model, data, risk=...)"
        )
    return open_at[0] if open_at else stream.depth


@torch.no_grad()
def depth_risks(
    stream: ResidualStream,
    data: Any,
    against: Against = "full",
    batch_size: int | None = None,
    progress: bool = False,
) -> NDArray[np.float64]:
    """`(samples, depths 1..L)`: the share of each sample's predictions that are worse."""
    found: list[NDArray[np.float64]] = []
    with evaluating(stream):
        for batch in Feed(data, stream, batch_size=batch_size).shown("observe", progress):
            states = stream.observe(batch)
            if against == "labels":
                targets = Targets.of(stream, batch, weighted=False)
            else:
                targets = Targets.every(stream, batch, states.logits(stream.depth))
            last = targets.predicted(states, stream.depth).argmax(-1)
            classes, columns, finite = targets.classes, list[torch.Tensor](), list[torch.Tensor]()
            counts = targets.sample_sums(torch.ones(len(targets), device=last.device))
            for depth in range(1, stream.depth + 1):
                z = targets.predicted(states, depth)
                finite.append(are_finite(z).all())
                best = z.argmax(-1)
                worse = (best != last).double()
                if against == "labels":
                    assert classes is not None
                    worse = (best != classes).double() - (last != classes).double()
                columns.append(targets.sample_sums(worse) / counts.clamp(min=1))
            if not all(map(bool, finite)):
                states.check_predictions()
            found.append(torch.stack(columns, 1)[counts > 0].cpu().numpy())
    if not found or not sum(map(len, found)):
        raise SettingError("no sample in the data has anything to predict; pass at least one")
    return np.concatenate(found)
