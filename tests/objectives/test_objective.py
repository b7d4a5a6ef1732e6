"""The weight of every depth at every step is what the papers and the docstrings say."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.helpers.objectives import FACTORIES
from torch import Tensor

import everydepth as ed
from everydepth.errors import SettingError
from everydepth.objectives import CosineDistance, Equilibrium, Given, LayerDropout


def weights(
    objective: ed.Objective, step: int = 0, total: int | None = 100, depth: int = 4
) -> list:
    return objective.weights(step, total, depth).tolist()


def close(found: list[float] | Tensor, expected: list[float]) -> bool:
    return np.allclose(np.asarray(found), expected, rtol=1e-12, atol=0)


def test_end_to_end_supervises_the_last_depth_only() -> None:
    assert weights(ed.end_to_end()) == [0, 0, 0, 0, 1]


def test_lpa_gives_a_tenth_to_every_depth_but_the_last() -> None:
    assert weights(ed.lpa()) == [0, 0.1, 0.1, 0.1, 1]
    assert weights(ed.lpa(early=0.5, final=2.0, top=2)) == [0, 0, 0, 0.5, 2]
    assert weights(ed.lpa(top=1)) == [0, 0, 0, 0, 1]


def test_a_ladder_supervises_the_quarters_or_the_depths_it_is_given() -> None:
    assert weights(ed.ladder(), depth=8) == [0, 0, 0.2, 0, 0.2, 0, 0.2, 0, 1]
    assert weights(ed.ladder(), depth=6) == [0, 0, 0.2, 0.2, 0, 0.2, 1]
    assert weights(ed.ladder(), depth=2) == [0, 0.2, 1]
    assert weights(ed.ladder(), depth=1) == [0, 1]
    assert weights(ed.ladder([3, 1, 4], early=0.5, final=2.0)) == [0, 0.5, 0, 0.5, 2]


def test_a_ladder_is_sampled_and_annealed_like_any_shape() -> None:
    objective = ed.ladder([1, 3], early=0.5).sampled(1).annealed(by=1.0)
    for step in range(20):
        found = weights(objective, step=step)
        assert found[4] == 1
        assert sorted(found[:4])[:3] == [0, 0, 0]
        assert found[2] == 0
        assert math.isclose(max(found[:4]), 1.0 * (1 - step / 100))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ed.ladder([2, 2]), r"depths \[2, 2\] have 2 twice; give it once"),
        (lambda: ed.ladder([]), r"depths \[\] has no rung; give at least one, or None"),
        (lambda: ed.ladder([5]).check(4), "depth 5, but the network has 4 blocks; use 1 to 4"),
        (lambda: ed.ladder([0]).check(4), "depth 0, but the network has 4 blocks; use 1 to 4"),
        (
            lambda: LayerDropout(most=0.1, rises=True, decays=True),
            "rises=True and decays=True; choose one",
        ),
    ],
)
def test_a_ladder_or_dropout_that_makes_no_sense_is_refused(make: object, message: str) -> None:
    with pytest.raises(SettingError, match=message):
        make()  # type: ignore[operator]


def test_decaying_layer_dropout_ends_with_all_blocks() -> None:
    dropout = ed.lpa().layer_dropout(0.9).get(LayerDropout)
    assert dropout is not None
    objective = ed.lpa().layer_dropout(0.9)
    shares = [
        float(dropout.kept(objective.moment(step, 11, 4), 4000)[3].float().mean())
        for step in (0, 5, 10)
    ]
    assert shares[0] == pytest.approx(0.1, abs=0.03)
    assert shares[1] == pytest.approx(0.55, abs=0.03)
    assert shares[2] == 1
    assert objective.needs_total


def test_aligned_weights_grow_with_the_depth_and_sum_to_one() -> None:
    assert close(weights(ed.aligned()), [0, 2 / 20, 4 / 20, 6 / 20, 8 / 20])
    assert weights(ed.aligned(weights="uniform")) == [0, 0.25, 0.25, 0.25, 0.25]


def test_aligned_uses_the_last_depth_only_at_odd_steps() -> None:
    assert weights(ed.aligned(), step=1) == [0, 0, 0, 0, 1]
    assert weights(ed.aligned(), step=2) == weights(ed.aligned(), step=0)
    assert weights(ed.aligned(alternate=False), step=1) == weights(ed.aligned())
    turns = ed.multi_classifier(1.0, alternate=True)
    assert weights(turns, step=1) == weights(ed.aligned(), step=1)
    assert weights(turns) == weights(ed.multi_classifier())


def test_cosine_regularized_supervises_the_last_depth_and_pulls_on_all() -> None:
    objective = ed.cosine_regularized(0.5)
    assert weights(objective) == [0, 0, 0, 0, 1]
    term = objective.get(CosineDistance)
    assert term is not None
    assert close(term.beta * term.shape.weights(4), [0, 0.05, 0.1, 0.15, 0.2])


def layerskip_by_its_paper(depth: int, scale: float) -> list[float]:
    """e(l) of Elhoushi et al. 2024, with layers 0..L-1, as sums."""
    e = [scale * sum(range(layer + 1)) for layer in range(depth - 1)]
    return [*e, depth - 1 + scale * sum(range(depth - 1))]


def test_layerskip_weights_are_its_papers_sums_normalized() -> None:
    e = np.array(layerskip_by_its_paper(6, 0.2))
    found = weights(ed.layerskip(0.2, curriculum=None), depth=6)
    assert close(found, [0, *(e / e.sum())])


def test_the_rotational_curriculum_visits_every_depth_once_a_cycle() -> None:
    objective = ed.layerskip(0.2, every=3)
    cycle = [objective.weights(step, None, 6) > 0 for step in range(objective.cycle(6))]
    visits = torch.stack(cycle).sum(0).tolist()
    assert len(cycle) == 3
    # Depth 1 is the paper's layer 0, whose weight is the empty sum.
    assert visits == [0, 0, 1, 1, 1, 1, 3]


def test_the_gradual_curriculum_adds_a_depth_every_total_over_two_depths() -> None:
    objective = ed.layerskip(0.2, curriculum="gradual")
    deepest_first = [
        (objective.weights(step, 120, 6) > 0).nonzero().flatten().tolist()
        for step in (0, 9, 10, 20, 30, 40, 119)
    ]
    five = [2, 3, 4, 5, 6]
    assert deepest_first == [[6], [6], [5, 6], [4, 5, 6], [3, 4, 5, 6], five, five]


def test_annealing_takes_the_early_weights_to_zero_by_the_given_share() -> None:
    objective = ed.lpa().annealed(to=0.0, by=0.8)
    assert weights(objective, step=0) == weights(ed.lpa())
    assert close(weights(objective, step=40), [0, 0.05, 0.05, 0.05, 1])
    assert weights(objective, step=80) == weights(objective, step=99) == [0, 0, 0, 0, 1]
    assert close(weights(ed.lpa().annealed(to=0.5, by=0.5), step=70), [0, 0.05, 0.05, 0.05, 1])


def test_warm_up_raises_the_early_weights() -> None:
    objective = ed.lpa().warmed_up(over=0.2, start=0.5)
    assert close(weights(objective, step=0), [0, 0.05, 0.05, 0.05, 1])
    assert close(weights(objective, step=10), [0, 0.075, 0.075, 0.075, 1])
    assert weights(objective, step=20) == weights(ed.lpa())


def test_options_compose() -> None:
    objective = ed.lpa().warmed_up(over=0.2).annealed(by=0.8).sampled(2).equilibrated()
    w = objective.weights(40, 100, 4)
    assert objective.get(Equilibrium)
    assert int((w[1:4] > 0).sum()) == 2
    assert close(w[w > 0], [0.05 * 3 / 2, 0.05 * 3 / 2, 1])


def test_sampling_is_unbiased_and_keeps_the_last_depth() -> None:
    objective = ed.aligned(alternate=False).sampled(2, seed=3)
    draws = torch.stack([objective.weights(step, None, 6) for step in range(4000)])
    expected = objective.expected_weights(0, None, 6)
    assert ((draws > 0).sum(1) == 3).all()
    assert (draws[:, -1] == expected[-1]).all()
    # Five standard errors of the mean.
    error = draws.std(0) / math.sqrt(len(draws))
    assert ((draws.mean(0) - expected).abs() <= 5 * error + 1e-12).all()


def test_what_is_drawn_depends_on_seed_and_step_alone() -> None:
    one, other = ed.lpa().sampled(1, seed=1), ed.lpa().sampled(1, seed=2)
    torch.manual_seed(99)
    again = [weights(one, step, depth=12) for step in reversed(range(30))]
    assert again[::-1] == [weights(one, step, depth=12) for step in range(30)]
    assert again[::-1] != [weights(other, step, depth=12) for step in range(30)]


def test_layer_dropout_rises_with_depth_as_in_its_paper() -> None:
    objective = ed.layerskip(dropout=0.4)
    kept = torch.stack([kept_rows(objective, s, None, 5, 50) for s in range(400)]).double()
    chance = 1 - kept.mean((0, 2))
    expected = [0.4 * (math.exp(layer * math.log(2) / 4) - 1) for layer in range(5)]
    assert chance[0] == 0
    assert np.allclose(chance, expected, atol=5 * 0.5 / math.sqrt(400 * 50))


def kept_rows(
    objective: ed.Objective, step: int, total: int | None, depth: int, rows: int
) -> Tensor:
    dropout = objective.get(LayerDropout)
    assert dropout is not None
    return dropout.kept(objective.moment(step, total, depth), rows)


def test_rising_layer_dropout_starts_at_zero_and_is_whole_at_the_last_step() -> None:
    rising, always = (ed.layerskip(dropout=0.9, dropout_rises=rises) for rises in (True, False))
    assert bool(kept_rows(rising, 0, 100, 4, 200).all())
    # Step T - 1 is the last: LayerSkip's S(t) = 2^(t/(T-1)) - 1 is 1 there.
    last = kept_rows(rising, 99, 100, 4, 200)
    assert not bool(last[-1].all())
    assert torch.equal(last, kept_rows(always, 99, 100, 4, 200))


@given(depth=st.integers(2, 30), step=st.integers(0, 500), name=st.sampled_from(sorted(FACTORIES)))
def test_weights_are_never_negative_and_the_last_depth_always_counts(
    depth: int, step: int, name: str
) -> None:
    objective = FACTORIES[name]
    if isinstance(objective.shape, Given):
        depth = 4
    w = objective.weights(step, 500, depth)
    assert w.shape == (depth + 1,)
    assert bool((w >= 0).all())
    assert w[-1] > 0


@pytest.mark.parametrize("name", FACTORIES)
def test_an_objective_survives_json(name: str) -> None:
    objective = FACTORIES[name]
    stored = json.loads(json.dumps(objective.to_json()))
    assert ed.Objective.from_json(stored) == objective


def from_json(**values: object) -> ed.Objective:
    return ed.Objective.from_json({"name": "mine", **values})


# -- bad input ------------------------------------------------------------------------------------


def test_weights_of_the_wrong_length_are_refused() -> None:
    with pytest.raises(SettingError, match="3 weights, but the network has 4 blocks; give 5"):
        ed.weighted([0.0, 1.0, 1.0]).check(4)


def test_negative_weights_are_refused() -> None:
    with pytest.raises(SettingError, match=r"weight of depth 1 is -1.0; use a number of 0 or more"):
        ed.weighted([0.0, -1.0, 1.0])
    with pytest.raises(SettingError, match=r"lpa: early=-0.1; use a number of 0 or more"):
        ed.lpa(early=-0.1)
    with pytest.raises(SettingError, match="depth 0 is nan"):
        ed.weighted([math.nan, 1.0])


def test_weights_that_are_all_zero_are_refused() -> None:
    with pytest.raises(SettingError, match="all 3 weights are 0, so nothing would be trained"):
        ed.weighted([0.0, 0.0, 0.0])
    with pytest.raises(SettingError, match="all weights of lpa are 0"):
        ed.lpa(early=0.0, final=0.0).check(4)


def test_a_zero_at_the_last_depth_warns_and_names_the_consequence() -> None:
    message = "last depth .4. has weight 0 .*no block above depth 2 gets .*use it at depth 2"
    with pytest.warns(UserWarning, match=message):
        ed.weighted([0.0, 1.0, 1.0, 0.0, 0.0]).check(4)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ed.lpa(top=5).check(4), "top=5, but the network has 4 blocks; use 1 to 4"),
        (lambda: ed.lpa(top=0), "top=0; use a whole number of 1 or more"),
        (
            lambda: ed.lpa().sampled(4).check(4),
            "sampled: k=4, .*only 3 depths below the last; use 1 to 3",
        ),
        (lambda: ed.lpa().annealed(by=1.5), r"annealed: by=1.5; use a number above 0, up to 1"),
        (
            lambda: ed.lpa().warmed_up(over=1.0),
            "warmed_up: over=1.0; use a number from 0",
        ),
        (
            lambda: ed.layerskip(dropout=1.0),
            "layer_dropout: most=1.0; use .* below 1",
        ),
        (lambda: from_json(parts=["spiral"]), "has no part 'spiral'"),
        (lambda: from_json(parts=[{"part": "square"}]), "has no part 'square'"),
        (lambda: ed.multi_classifier(kl=1.0, temperature=0.0), r"temperature=0.0; use a number"),
        (lambda: ed.multi_classifier(temperature=2.0), r"temperature=2.0 without kl"),
        (lambda: ed.layerskip(curriculum="gradual", every=2), "every=2 is for curriculum='rot"),
        (
            lambda: ed.layerskip(dropout=0.0, dropout_rises=True),
            "but dropout=0; give dropout a value above 0",
        ),
        (lambda: ed.lpa().annealed().weights(0, None, 4), "call `net.set_progress"),
        (lambda: from_json(color=1), "an objective has no setting 'color'. It has name, parts"),
    ],
)
def test_a_setting_that_makes_no_sense_is_refused(make: object, message: str) -> None:
    with pytest.raises(SettingError, match=message):
        make()  # type: ignore[operator]
