"""What can be guaranteed: the theorems' bounds, and the interval that can be acted on."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

from everydepth.errors import SettingError
from everydepth.growth.generalization import CROSS_ENTROPY, Theorem, gamma, log_covering, theorems
from everydepth.growth.held_out import Paired, paired_losses
from everydepth.growth.lipschitz import network_constants
from everydepth.growth.losses import losses_of
from everydepth.stream import Criterion, ResidualStream, as_stream
from everydepth.stream.feed import Feed


@dataclass(frozen=True)
class Guarantee:
    """Old against new. `held_out` is the figure to act on; the theorems are stated beside it.

    margin, gamma_opt, margin_test: `D`, `gamma` and `D_T`. bound: `M`, the largest loss of a row
    seen in any of the evaluations, as the theorems assume a bounded loss and cross-entropy is not.
    log_covering: `log N` of the new model at `eps = 1/n`. n, m: rows of training and test data.
    """

    n: int
    m: int
    margin: float
    gamma_opt: float
    margin_test: float
    bound: float
    log_covering: float
    gamma_n: float
    gamma_m: float
    theorems: tuple[Theorem, ...]
    held_out: Paired

    @property
    def vacuous(self) -> bool:
        return all(theorem.vacuous for theorem in self.theorems)

    def __str__(self) -> str:
        lines = [
            f"held-out: {self.held_out}",
            f"margins: D {self.margin:+.4g}, gamma {self.gamma_opt:+.4g}, "
            f"D_T {self.margin_test:+.4g}",
            *map(str, self.theorems),
        ]
        if self.vacuous:
            lines.append(
                f"all three are vacuous: Gamma_n is {self.gamma_n:.3g} against a loss of at most "
                f"{self.bound:.3g}; act on the held-out interval"
            )
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        plain = asdict(self)
        plain["theorems"] = [{**asdict(t), "vacuous": t.vacuous} for t in self.theorems]
        return {**plain, "held_out": self.held_out.to_json(), "vacuous": self.vacuous}


def guarantee(
    old: nn.Module | ResidualStream,
    new: nn.Module | ResidualStream,
    train: Any,
    test: Any,
    *,
    jump: nn.Module | ResidualStream | None = None,
    delta: float = 0.05,
    lipschitz: float = CROSS_ENTROPY,
    criterion: Criterion | None = None,
    batch_size: int | None = None,
    **options: Any,
) -> Guarantee:
    """Theorems 1 to 3 of Depth Expansion for the new network, and the paired interval.

    jump: the jumpboard, to tell its margin `D` from what training added (`gamma`); without it all
        of the gain counts as `D`.
    lipschitz: of the loss in the prediction; the default is that of cross-entropy.

    >>> big = ed.insert(model, after=3)
    >>> ed.growth.guarantee(model, big, train, test).vacuous  # and says so
    True
    """
    if not 0 < delta < 1:
        raise SettingError(f"delta={delta}; use a probability between 0 and 1, such as 0.05")
    settings: dict[str, Any] = {"criterion": criterion, "batch_size": batch_size, **options}
    stream = as_stream(new, **options)
    middle = new if jump is None else jump
    on_train = [losses_of(model, train, **settings) for model in (old, middle, new)]
    on_test = [losses_of(model, test, **settings) for model in (old, middle, new)]
    means = [float(s.sum() / c.sum()) for s, c in on_train]
    test_means = [float(s.sum() / c.sum()) for s, c in on_test]
    bound = max(float((s / c.clamp_min(1)).max()) for s, c in (*on_train, *on_test))
    n, m = len(on_train[0][0]), len(on_test[0][0])
    constants = network_constants(stream, next(iter(Feed(train, stream, batch_size=batch_size))))
    scale = {"bound": bound, "lipschitz": lipschitz}
    gammas = [gamma(constants, k, d, **scale) for k, d in ((n, delta), (n, delta / 2), (m, delta))]
    margin, opt = means[0] - means[1], max(means[1] - means[2], 0.0)
    margin_test = test_means[0] - test_means[1]
    return Guarantee(
        n=n,
        m=m,
        margin=margin,
        gamma_opt=opt,
        margin_test=margin_test,
        bound=bound,
        log_covering=log_covering(constants, 1 / n),
        gamma_n=gammas[0],
        gamma_m=gammas[2],
        theorems=theorems(
            margin=margin,
            margin_test=margin_test,
            gamma_opt=opt,
            gamma_n=gammas[0],
            gamma_n_half=gammas[1],
            gamma_m=gammas[2],
            delta=delta,
            m=m,
            bound=bound,
        ),
        held_out=paired_losses(on_test[0], on_test[2], confidence=1 - delta),
    )
