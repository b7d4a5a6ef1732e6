"""What a round costs, learned while serving."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from everydepth.serving.shared import Work


@dataclass(frozen=True, kw_only=True)
class Price:
    """Seconds of one call of a block, of a token in it, and of a token read out.

    read: of a call of the readout, whatever the number of its tokens.
    """

    call: float
    token: float
    readout: float
    read: float = 0.0

    @property
    def each(self) -> tuple[float, float, float, float]:
        return self.call, self.token, self.readout, self.read

    def of(self, work: Work) -> float:
        return sum(price * count for price, count in zip(self.each, work.counts, strict=True))


class Costs:
    """Prices fitted to the rounds so far, recent ones more than old ones.

    Least squares with forgetting. What is known before, from a profile or only that work is not
    free, counts as much as a thousandth of a round.

    >>> from everydepth.serving import Costs, Work
    >>> costs = Costs()
    >>> for rows in range(1, 30):
    ...     work = Work(calls=6, passes=6 * rows, readouts=rows)
    ...     costs.learn(work, 6 * 0.002 + 7 * rows * 0.0005)
    >>> abs(costs.price.of(Work(calls=6, passes=60, readouts=10)) - 0.047) < 0.001
    True
    """

    MEMORY = 0.99  # of a round's weight is left a round later: about a hundred rounds count

    def __init__(self, prior: Price | None = None) -> None:
        usual = Price(call=1e-4, token=1e-5, readout=1e-5, read=1e-4)
        self._scale = np.array(usual.each)  # so that all count alike
        self._squares = 1e-3 * np.eye(len(self._scale))
        self._products = 1e-3 * np.array((prior or usual).each) / self._scale
        self.rounds = 0

    def learn(self, work: Work, seconds: float) -> None:
        x = np.array(work.counts) * self._scale
        size = float(np.linalg.norm(x))
        if size == 0:
            return
        # Relative errors: a long prompt must not outweigh a hundred small rounds.
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
