"""Learn the cost of a round while serving."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from everydepth.config import checked
from everydepth.serving.shared import Work


@checked
@dataclass(frozen=True, kw_only=True)
class Price:
    """Seconds per call of a block, per token in it, per token read out, and per readout call."""

    call: float
    token: float
    readout: float
    read: float = 0.0

    @property
    def each(self) -> tuple[float, float, float, float]:
        return self.call, self.token, self.readout, self.read

    def of(self, work: Work) -> float:
        return sum(price * count for price, count in zip(self.each, work.counts, strict=True))


@checked
class Costs:
    """Prices fitted to past rounds by least squares; recent rounds count more than old ones.

    The prior, from a profile or a rough guess, counts as much as a thousandth of a round.

    >>> from everydepth.serving import Costs, Work
    >>> costs = Costs()
    >>> for rows in range(1, 30):
    ...     work = Work(calls=6, passes=6 * rows, readouts=rows)
    ...     costs.learn(work, 6 * 0.002 + 7 * rows * 0.0005)
    >>> abs(costs.price.of(Work(calls=6, passes=60, readouts=10)) - 0.047) < 0.001
    True
    """

    MEMORY = 0.99  # the decay of weights per round: about a hundred rounds count

    def __init__(self, prior: Price | None = None) -> None:
        usual = Price(call=1e-4, token=1e-5, readout=1e-5, read=1e-4)
        self._scale = np.array(usual.each)  # so that all prices are of order 1
        self._squares = 1e-3 * np.eye(len(self._scale))
        self._products = 1e-3 * np.array((prior or usual).each) / self._scale
        self.rounds = 0

    def learn(self, work: Work, seconds: float) -> None:
        x = np.array(work.counts) * self._scale
        size = float(np.linalg.norm(x))
        if size == 0:
            return
        # Relative errors, so that a long prompt does not outweigh a hundred small rounds.
        x, y = x / size, seconds / size
        self._squares = self.MEMORY * self._squares + np.outer(x, x)
        self._products = self.MEMORY * self._products + x * y
        self.rounds += 1

    @property
    def price(self) -> Price:
        call, token, readout, read = (self._solved() * self._scale).tolist()
        return Price(call=call, token=token, readout=readout, read=read)

    def _solved(self) -> NDArray[np.float64]:
        from scipy.optimize import nnls

        factor = np.linalg.cholesky(self._squares + 1e-9 * np.eye(len(self._scale)))
        found, _ = nnls(factor.T, np.linalg.solve(factor, self._products))
        return np.asarray(found)
