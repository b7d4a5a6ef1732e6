"""Exit thresholds with a guarantee (learn, then test), from samples not used for training."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from everydepth.config import Seed, Share, checked
from everydepth.errors import LabelError, SettingError
from everydepth.exits.clock import ExitClock
from everydepth.exits.identity import Identity, identity
from everydepth.exits.policies import (
    NEVER,
    Against,
    Certificate,
    Confidence,
    Policy,
    check_classifier,
    exit_depths,
    layer_speedup,
    policy_class,
)
from everydepth.exits.reading import certainties, exit_logits
from everydepth.exits.risk import P_VALUES, Counts, bounded, bounded_p_value, samples_needed
from everydepth.stream import (
    ResidualStream,
    States,
    Targets,
    as_stream,
    evaluating,
    has_labels,
    labeled_samples,
    no_labels,
)
from everydepth.stream.feed import Feed


class NotCertifiedWarning(UserWarning):
    """Calibration could not certify any threshold; the policy runs the full model."""


class FullDepthWarning(UserWarning):
    """Early exit would be slower than the full model, which the policy runs instead."""


RowLoss = Callable[[Tensor, Tensor | None], Tensor]
"""`f(logits, labels)`: one number from 0 to 1 for each row."""


@dataclass(frozen=True)
class Outcomes:
    """Everything thresholds are judged by, from one pass over the data.

    certainty: at depths 1..L-1. predicted: classes at depths 1..L. costs: a custom loss, likewise.
    """

    certainty: Float[Tensor, "rows places"]
    predicted: Int[Tensor, "rows depths"]
    labels: Int[Tensor, " rows"] | None
    classes: int
    costs: Float[Tensor, "rows depths"] | None = None

    def rows(self, index: Tensor) -> Outcomes:
        labels = None if self.labels is None else self.labels[index]
        costs = None if self.costs is None else self.costs[index]
        return Outcomes(self.certainty[index], self.predicted[index], labels, self.classes, costs)

    def losses(self, against: Against) -> Tensor:
        """The loss of exiting at each depth: 1 worse than the full model, 0 equal, -1 better."""
        if against == "loss":
            assert self.costs is not None
            return self.costs - self.costs[:, -1:]
        if against == "full":
            return (self.predicted != self.predicted[:, -1:]).long()
        if self.labels is None:
            raise LabelError(
                "against='labels', but the batches have no 'labels'; add them, or use "
                "against='full' to compare with the full model"
            )
        wrong = (self.predicted != self.labels[:, None]).long()
        return wrong - wrong[:, -1:]


@checked
def calibrate(
    model: nn.Module | ResidualStream,
    data: Any,
    *,
    risk: Share,
    delta: Share = 0.05,
    against: Literal["full", "labels"] = "full",
    risk_of: str | RowLoss | None = None,
    policy: str | type[Policy] = Confidence,
    clock: bool | None = None,
    depths: Sequence[int] | None = None,
    per_depth: bool = False,
    seed: Seed = 0,
    batch_size: int | None = None,
    progress: bool = True,
    **options: Any,
) -> Policy:
    """Choose the thresholds of an exit policy so that its risk is bounded.

    With probability 1 - delta over the draw of `data`, the risk on new samples from the same source
    is at most `risk`. The risk is the probability of a prediction that differs from the full
    model's (`against="full"`), or the loss of accuracy (`"labels"`). If nothing can be certified,
    the policy runs the full model, its certificate says why, and a `NotCertifiedWarning` is issued.

    risk_of: instead of `against`: "disagreement", "accuracy" (lost), or your own loss,
        `f(logits, labels)`, which returns one number from 0 to 1 per row; `risk` then bounds its
        increase.
    clock: blocks and readouts are timed on the first batch, to predict the wall-clock speedup
        (`certificate.clock`); a `FullDepthWarning` is issued if the full model is faster. True:
        exits are allowed only where a readout can pay off, and if the full model is faster, the
        policy runs it. False: nothing is timed, as with data that can be iterated only once.
    policy: "confidence", "entropy", "margin", "patience" or "agreement", or the class.
    depths: where samples may exit; by default everywhere.
    per_depth: a threshold per depth, found on half of the samples (drawn with `seed`) and tested on
        the other half. Needs a few thousand samples.

    >>> policy = ed.calibrate(model, valid, risk=0.2, delta=0.05, progress=False)
    >>> print(policy.certificate.note)
    with probability 0.95 over 180 calibration samples, the share of predictions...
    """
    compared, loss = (against, None) if risk_of is None else _meant(risk_of)
    stream = as_stream(model, **options)
    check_classifier(stream)
    chosen = policy_class(policy) if isinstance(policy, str) else policy
    if depths is not None and len(depths) == 0:
        raise SettingError("depths is empty; name at least one, or leave it out for all of them")
    timed = None
    if clock or (clock is None and not isinstance(data, Iterator)):
        feed = Feed(data, stream, batch_size=batch_size, again=True)
        with evaluating(stream), torch.no_grad():
            timed = ExitClock.measured(stream, feed.peek())
    if timed is not None and clock:
        where = timed.tested()
        depths = where if depths is None else [k for k in depths if k in where]
    allowed = _allowed(stream, depths)
    outcomes = observe(stream, data, chosen, batch_size=batch_size, progress=progress, loss=loss)
    outcomes.losses(compared)  # raises if labels are missing
    found = certified(
        outcomes,
        chosen,
        risk=risk,
        delta=delta,
        against=compared,
        allowed=allowed,
        per_depth=per_depth,
        seed=seed,
        model=identity(stream),
    )
    return found if timed is None else by_the_clock(found, outcomes, timed, decides=bool(clock))


def by_the_clock(policy: Policy, outcomes: Outcomes, timed: ExitClock, *, decides: bool) -> Policy:
    """The policy with its predicted wall-clock speedup.

    decides: use the full model instead if that is faster.
    """
    assert policy.certificate is not None
    thresholds = torch.tensor(policy.threshold, dtype=torch.float64)
    open_at = [k for k, value in enumerate(thresholds.tolist(), start=1) if value < NEVER]
    if not open_at:
        return policy
    leaving = exit_depths(outcomes.certainty.double(), thresholds)
    last = outcomes.predicted.shape[1]
    tested = list(range(1, last)) if policy.remembers else open_at
    expected = timed.speedup(leaving, tested)
    found = replace(policy.certificate, clock=expected, block_speedup=timed.block_speedup(leaving))
    saved = f"early exit runs {found.saved}"
    note = (
        f"{found.note}; {saved}, and is expected to run at {expected:.2f}x the speed, "
        f"in batches of {timed.rows}"
    )
    if expected >= 1:
        return replace(policy, certificate=replace(found, note=note))
    slower = (
        f"full depth is faster: {saved}, but would run at {expected:.2f}x the speed in batches of "
        f"{timed.rows}; {{}}. Use larger batches, fewer depths, or one depth: everydepth.at_depth"
    )
    if not decides:
        warnings.warn(
            slower.format("the policy exits all the same, unless calibrate(clock=True) decides"),
            FullDepthWarning,
            stacklevel=3,
        )
        return replace(policy, certificate=replace(found, note=note))
    note = slower.format("the policy runs the full model")
    warnings.warn(note, FullDepthWarning, stacklevel=3)
    return replace(
        policy,
        threshold=(NEVER,) * len(thresholds),
        certificate=replace(found, speedup=1.0, block_speedup=1.0, note=note),
    )


@torch.no_grad()
def observe(
    stream: ResidualStream,
    data: Any,
    policy: type[Policy],
    *,
    batch_size: int | None = None,
    progress: bool = False,
    loss: RowLoss | None = None,
) -> Outcomes:
    """The certainty and prediction of every sample at every depth, and labels if all have one."""
    certainty: list[Tensor] = []
    predicted: list[Tensor] = []
    labels: list[Tensor] = []
    costs: list[Tensor] = []
    with evaluating(stream):
        for batch in Feed(data, stream, batch_size=batch_size).shown("observe", progress):
            kept = labeled_samples(stream, batch) if has_labels(stream, batch) else batch
            if kept is None:
                continue
            states = stream.observe(kept)
            scores, classes = certainties(states, policy(threshold=NEVER))
            certainty.append(scores.cpu())
            predicted.append(classes.cpu())
            given: Tensor | None = None
            if has_labels(stream, kept):
                given = Targets.every(stream, kept, states.logits(stream.depth)).classes
                assert given is not None
                given = given.cpu()
                labels.append(given)
            if loss is not None:
                costs.append(_costs(states, loss, given))
    if not certainty:
        raise no_labels()
    rows = torch.cat(certainty)
    all_labeled = sum(map(len, labels)) == len(rows)
    return Outcomes(
        rows,
        torch.cat(predicted),
        torch.cat(labels) if all_labeled else None,
        stream.classes,
        torch.cat(costs) if costs else None,
    )


def _costs(states: States, loss: RowLoss, labels: Tensor | None) -> Float[Tensor, "rows depths"]:
    stream = states.stream
    found: list[Tensor] = []
    for depth in range(1, stream.depth + 1):
        z = exit_logits(stream, states.exit_state(depth), depth, states.batch).cpu()
        value = loss(z, labels).double()
        inside = value.shape == (len(states.h[0]),) and bool(((value >= 0) & (value <= 1)).all())
        if not inside:
            raise SettingError(
                f"risk_of returned shape {tuple(value.shape)} with values from "
                f"{float(value.min()):.3g} to {float(value.max()):.3g}; return one number from 0 "
                f"to 1 for each of the {len(states.h[0])} rows (scale and clamp your loss)"
            )
        found.append(value)
    return torch.stack(found, 1)


def _meant(risk_of: str | RowLoss) -> tuple[Against, RowLoss | None]:
    if not isinstance(risk_of, str):
        return "loss", risk_of
    words: dict[str, Against] = {"disagreement": "full", "accuracy": "labels"}
    if risk_of not in words:
        raise SettingError(
            f"risk_of={risk_of!r}; use 'disagreement', 'accuracy', or a function f(logits, labels)"
        )
    return words[risk_of], None


def certified(
    outcomes: Outcomes,
    policy: type[Policy],
    *,
    risk: float,
    delta: float,
    against: Against = "full",
    allowed: Sequence[bool] | None = None,
    per_depth: bool = False,
    seed: int = 0,
    model: Identity | None = None,
) -> Policy:
    """Test thresholds from careful to bold, and keep the last one before the first failure.

    The order does not depend on the tested samples, so each test may use all of delta
    (fixed-sequence testing): the probability that a threshold with a higher risk passes is at most
    delta, however many thresholds there are.
    """
    places = outcomes.certainty.shape[1]
    closed = torch.tensor([not place for place in (allowed or [True] * places)], dtype=torch.bool)
    if per_depth:
        order = torch.randperm(
            len(outcomes.predicted), generator=torch.Generator().manual_seed(seed)
        )
        half = len(order) // 2
        path = _own_path(outcomes.rows(order[:half]), risk, against)
        outcomes = outcomes.rows(order[half:])
    else:
        steps = torch.tensor(policy.path(outcomes.classes, places + 1), dtype=torch.float64)
        path = steps[:, None].expand(-1, places)
    losses, samples = outcomes.losses(against), len(outcomes.predicted)
    certainty = outcomes.certainty.double()
    best = torch.full((places,), NEVER, dtype=torch.float64)
    found = (1.0, 0.0, torch.full((samples,), places + 1))
    failed = ""
    for thresholds in path:
        thresholds = thresholds.masked_fill(closed, NEVER)
        leaving = exit_depths(certainty, thresholds)
        loss = losses.gather(1, leaving[:, None] - 1)
        counts = Counts(samples, int((loss == 1).sum()), int((loss == -1).sum()))
        if against == "loss":
            rate, p = float(loss.mean()), bounded_p_value(loss[:, 0].numpy(), risk)
        else:
            rate, p = counts.risk, P_VALUES[against](counts, risk)
        if p > delta:
            failed = f"; the next threshold has risk {rate:.4f} on them, p-value {p:.3g}"
            break
        best, found = thresholds, (p, rate, leaving)
    p, observed, leaving = found
    certain = bool((best < NEVER).any())
    speedup = layer_speedup(leaving, places + 1)
    note = (
        f"{bounded(risk, delta, samples, against)}{failed}"
        if certain
        else _why_not(samples, risk, delta, against, failed)
    )
    if not certain:
        warnings.warn(note, NotCertifiedWarning, stacklevel=3)
    return policy(
        threshold=tuple(map(policy.least, best.tolist())),
        model=model,
        certificate=Certificate(
            certified=certain,
            risk=risk,
            delta=delta,
            against=against,
            samples=samples,
            observed=observed,
            p_value=p,
            speedup=speedup,
            note=note,
        ),
    )


def _own_path(outcomes: Outcomes, risk: float, against: Against) -> Float[Tensor, "steps places"]:
    """Thresholds per depth that let as many samples exit as an error rate allows.

    Each step allows a higher error rate among the samples that exit at a depth, from far below to
    far above `risk`.
    """
    rates = risk * torch.logspace(-2, 1, 60, dtype=torch.float64)
    losses = outcomes.losses(against)
    if len(losses) == 0:
        return torch.full((1, outcomes.certainty.shape[1]), NEVER, dtype=torch.float64)
    columns: list[Tensor] = []
    for place in range(outcomes.certainty.shape[1]):
        certainty, order = outcomes.certainty[:, place].double().sort(descending=True)
        loss = losses[order, place].double().cumsum(0) / torch.arange(1, len(order) + 1)
        # Ties exit together: only the last of equal certainties ends a group. Samples with a
        # certainty of 0 never exit.
        ends = torch.cat([certainty[1:] != certainty[:-1], torch.tensor([True])]) & (certainty > 0)
        fits = (loss <= rates[:, None]) & ends
        last = fits.long() * torch.arange(1, len(order) + 1)
        count = last.amax(1)
        # Halfway between the last that exits and the first that stays, so no sample is on it.
        following = torch.cat([certainty[1:], torch.zeros(1, dtype=torch.float64)])
        middle = (certainty + following) / 2
        columns.append(torch.cat([torch.tensor([NEVER], dtype=torch.float64), middle])[count])
    return torch.stack(columns, 1)


def _allowed(stream: ResidualStream, depths: Sequence[int] | None) -> list[bool]:
    places = range(1, stream.depth)
    if depths is None:
        return [True for _ in places]
    wanted = {stream.check_depth(depth, lowest=1) for depth in depths}
    return [place in wanted for place in places]


def _why_not(samples: int, risk: float, delta: float, against: Against, failed: str) -> str:
    needed = samples_needed(risk, delta, against)
    count = f"{samples} sample{'' if samples == 1 else 's'}"
    reason = (
        f"even without a single error, it takes {needed} samples, not {samples}"
        if samples < needed
        else f"on {count}, not even the most careful threshold passes{failed}"
    )
    return (
        f"nothing can be certified at risk {risk}, delta {delta}: {reason}; the policy runs the "
        "full model. Use more samples, a larger risk, or a model trained at every depth"
    )
