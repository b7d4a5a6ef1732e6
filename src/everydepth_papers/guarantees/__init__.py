"""Guarantees for a grown model: Theorems 1 to 3 of Depth Expansion, and an interval to act on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from everydepth.config import Share, checked
from everydepth.growth.held_out import Paired, paired_losses
from everydepth.growth.losses import losses_of
from everydepth.results import Result, rows
from everydepth.stream import Criterion, ResidualStream, as_stream
from everydepth.stream.feed import Feed
from everydepth_papers.guarantees.generalization import (
    CROSS_ENTROPY,
    Complexity,
    Theorem,
    log_covering,
    theorems,
)
from everydepth_papers.guarantees.lipschitz import network_constants


@dataclass(frozen=True)
class Guarantee:
    """Old model versus new. Act on `held_out`; the theorems are stated for reference.

    n, m: rows of training and test data.
    margin, gamma_opt, margin_test: `D` on the training rows, `gamma` and `D_T`.
    margin_low: a lower bound on the population margin from the test rows, for Theorems 1 and 2.
    bound: `M`, the largest row loss in any evaluation: the theorems assume a bounded loss, and
        cross-entropy has no bound.
    log_covering: `log N` of the new model at `eps = 1/n`, its effective dimension.
    gamma_n, gamma_m: `Gamma_n` and `Gamma_m` at `delta / 2`.
    gamma_block: `Gamma_n(delta)` of the new block alone, with all others fixed (App. K).
    rows_needed: training rows from which Theorem 1 is not vacuous, all else equal; None if there
        is no gain.
    """

    n: int
    m: int
    margin: float
    margin_low: float
    gamma_opt: float
    margin_test: float
    bound: float
    log_covering: float
    gamma_n: float
    gamma_m: float
    gamma_block: float | None
    rows_needed: int | None
    theorems: tuple[Theorem, ...]
    held_out: Paired

    @property
    def vacuous(self) -> bool:
        return all(theorem.vacuous for theorem in self.theorems)

    def __str__(self) -> str:
        lines = [
            f"held-out: {self.held_out}",
            f"margins: D {self.margin:+.4g} (held-out lower bound {self.margin_low:+.4g}), gamma "
            f"{self.gamma_opt:+.4g}, D_T {self.margin_test:+.4g}",
            *map(str, self.theorems),
        ]
        if self.vacuous:
            lines.append(
                f"all bounds are vacuous: Gamma_n is {self.gamma_n:.3g}, but the loss is at most "
                f"{self.bound:.3g}; act on the held-out interval"
            )
        if self.rows_needed is not None:
            lines.append(f"Theorem 1 would need {self.rows_needed:.2g} rows; there are {self.n:,}")
        return "\n".join(lines)

    @property
    def result(self) -> Result:
        """Held-out interval, theorems and margins as a table."""
        lines = self.held_out.lines
        for theorem in self.theorems:
            change = f"at most {theorem.change:+.4g} (p {max(theorem.probability, 0):.2g})"
            verdict = "vacuous" if theorem.vacuous else "better"
            lines.append((f"{theorem.name}: change in risk", change, verdict))
        margins = {
            "D, training rows": self.margin,
            "D, lower bound (held-out rows)": self.margin_low,
            "gamma": self.gamma_opt,
            "D_T": self.margin_test,
            "Gamma_n of the new block alone": self.gamma_block,
            "training rows needed by Theorem 1": self.rows_needed,
        }
        lines += [
            (name, f"{value:+.4g}", "") for name, value in margins.items() if value is not None
        ]
        what, value, verdict = zip(*lines, strict=True)
        note = (
            f"the theorems are vacuous because Gamma_n is {self.gamma_n:.3g} against a loss of at "
            f"most {self.bound:.3g}; act on the held-out gain"
        )
        return rows(
            "guarantees",
            {"what": what, "value": value, "verdict": verdict},
            title="Guarantees",
            about="The grown model compared with the original, on rows used for nothing else.",
            note=note if self.vacuous else None,
            section="growth",
        )


@checked
def guarantee(
    old: nn.Module | ResidualStream,
    new: nn.Module | ResidualStream,
    train: Any,
    test: Any,
    *,
    jump: nn.Module | ResidualStream | None = None,
    after: int | None = None,
    delta: Share = 0.05,
    lipschitz: float = CROSS_ENTROPY,
    criterion: Criterion | None = None,
    batch_size: int | None = None,
    **options: Any,
) -> Guarantee:
    """Theorems 1 to 3 of Depth Expansion for the new network, and the paired interval.

    jump: the jumpboard, to separate its margin `D` from what training added (`gamma`); without it
        the entire gain counts as `D`.
    after: the site of the jumpboard's block, for a bound that counts this block alone (App. K). As
        in the paper, the old blocks count as fixed, although the same rows trained them.
    lipschitz: the constant of the loss in the logits; the default is that of cross-entropy.

    >>> from everydepth_papers.guarantees import guarantee
    >>> big = ed.insert(model, after=3)
    >>> guarantee(model, big, train, test).vacuous
    True
    """
    settings: dict[str, Any] = {"criterion": criterion, "batch_size": batch_size, **options}
    stream = as_stream(new, **options)
    middle = new if jump is None else jump
    on_train = [losses_of(model, train, strict=True, **settings) for model in (old, middle, new)]
    on_test = [losses_of(model, test, strict=True, **settings) for model in (old, middle, new)]
    means = [float(s.sum() / c.sum()) for s, c in on_train]
    test_means = [float(s.sum() / c.sum()) for s, c in on_test]
    bound = max(float((s / c.clamp_min(1)).max()) for s, c in (*on_train, *on_test))
    n, m = len(on_train[0][0]), len(on_test[0][0])
    batch = next(iter(Feed(train, stream, batch_size=batch_size)))
    scale: dict[str, Any] = {"bound": bound, "lipschitz": lipschitz}
    whole = Complexity(constants=network_constants(stream, batch), **scale)
    gamma_n, gamma_m = (whole.gamma(rows, delta / 2) for rows in (n, m))
    margin, opt = means[0] - means[1], max(means[1] - means[2], 0.0)
    # The lower end of a two-sided interval fails with probability delta / 2.
    low = paired_losses(on_test[0], on_test[1], confidence=1 - delta).bernstein[0]
    margin_test = test_means[0] - test_means[1]
    stated: tuple[Theorem, ...] = theorems(
        margin=low,
        margin_test=margin_test,
        gamma_opt=opt,
        gamma_n=gamma_n,
        gamma_m=gamma_m,
        delta=delta,
        m=m,
        bound=bound,
    )
    gamma_block = None
    if jump is not None and after is not None:
        own = network_constants(as_stream(jump, **options), batch)
        gamma_block = Complexity(constants=own, only=after, **scale).gamma(n, delta)
        change = -margin + 2 * gamma_block
        stated += (Theorem("App. K (jumpboard, new block alone)", change, 1 - delta),)
    gained = low + opt
    return Guarantee(
        n=n,
        m=m,
        margin=margin,
        margin_low=low,
        gamma_opt=opt,
        margin_test=margin_test,
        bound=bound,
        log_covering=log_covering(whole.constants, 1 / n),
        gamma_n=gamma_n,
        gamma_m=gamma_m,
        gamma_block=gamma_block,
        rows_needed=whole.rows_needed(gained / 2, delta / 2) if gained > 0 else None,
        theorems=stated,
        held_out=paired_losses(on_test[0], on_test[2], confidence=1 - delta),
    )
