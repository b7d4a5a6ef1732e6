"""Laws of loss against depth: fits with known answers."""

from __future__ import annotations

import numpy as np
import pytest

from everydepth.errors import DataError, SettingError
from everydepth.stream.gradients import disagreement_bound
from everydepth_papers.evidence.depth_law import Coupling, DepthFit, fit_depth, rows_to_agree


def test_the_recursion_of_excess_is_recovered_and_its_closed_form_bounds_it() -> None:
    a, beta, excess = 0.05, 1.8, [2.0]
    for _ in range(40):
        excess.append(excess[-1] - a * excess[-1] ** beta)
    found = fit_depth(excess, bootstrap=50)
    assert (found.a, found.beta) == pytest.approx((a, beta), rel=1e-6)
    assert (np.array(excess) <= found.excess(2.0, np.arange(41)) + 1e-9).all()
    assert found.exponent(1.0) == pytest.approx(1 / (3 * 0.8))
    assert fit_depth(0.8 ** np.arange(9)).beta == pytest.approx(1.0)
    with pytest.raises(DataError, match="give 4 or more, all above the floor"):
        fit_depth([1.0, 0.5])


@pytest.mark.parametrize("alpha", [1.0, 0.5])
def test_along_a_coupling_the_recursion_falls_with_the_exponent_of_table_2(alpha: float) -> None:
    law, coupling = DepthFit(0.1, 2.5, 0.0, None), Coupling(alpha=alpha)
    sizes = np.array([1e12, 1e14])
    excess = []
    for n in sizes:
        left = 1.0
        for _ in range(round(coupling.at(n)[0])):
            left -= law.a * left**law.beta
        excess.append(left)
    slope = np.diff(np.log(excess))[0] / np.diff(np.log(sizes))[0]
    assert -slope == pytest.approx(law.exponent(alpha), rel=0.05)
    depth, width = coupling.at(1e12)
    assert 12 * width**2 * depth == pytest.approx(1e12)
    with pytest.raises(SettingError, match="numbers above 0"):
        Coupling(alpha=0.0)


@pytest.mark.parametrize("trace", [0.0, 40.0])
def test_the_rows_to_see_a_gain_bound_the_chance_of_disagreement(trace: float) -> None:
    rows = rows_to_agree(0.5, 3.0, trace, 0.05)
    assert rows < 1e6
    # Rows are whole numbers there, so make them many.
    assert disagreement_bound(0.5 / 1e6, 3.0, trace, round(1e6 * rows), round(1e6 * rows)) == (
        pytest.approx(0.05, rel=1e-3)
    )
    assert rows_to_agree(0.0, 3.0, trace, 0.05) == np.inf


def test_deeper_gains_need_more_rows_and_width_pays_for_them() -> None:
    law = DepthFit(0.1, 2.0, 0.0, None)
    how = {"signal": 0.5, "top": 3.0, "trace": 40.0}
    early, late = (law.rows_to_see(1.0, k, **how) for k in (0, 50))
    assert early == pytest.approx(rows_to_agree(0.5, 3.0, 40.0, 0.05))
    # Excess 1 / (1 + 0.1 k): a sixth, its signal a 36th.
    assert late == pytest.approx(36 * early)
    assert law.rows_to_see(1.0, 50, width=36.0, **how) == pytest.approx(early)
