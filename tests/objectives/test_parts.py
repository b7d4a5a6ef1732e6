"""A part of an objective is one class: defined anywhere, it is known everywhere."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest
import torch
from tests.helpers.training import mlp, points

import everydepth as ed
from everydepth.config import setting
from everydepth.errors import SettingError
from everydepth.objectives import (
    Annealed,
    Moment,
    Normalized,
    Objective,
    Pass,
    Sampled,
    Stage,
    Term,
    WeightSchedule,
)
from everydepth.objectives.factories import FACTORIES, factory
from everydepth.objectives.part import parts
from everydepth.objectives.text import objective_of


@dataclass(frozen=True, kw_only=True)
class Energy(Term, name="test_energy"):
    """`weight * mean(h_L^2)`: a term that no file of ours knows."""

    whole_logits: ClassVar[bool] = False
    weight: float = setting(above=0, help="Its weight.")

    def __call__(self, seen: Pass) -> torch.Tensor:
        last = seen.states.feature(seen.states.depth)
        return self.weight * seen.targets.pick(last).square().mean()


@dataclass(frozen=True, kw_only=True)
class Blinking(WeightSchedule, name="test_blinking"):
    """Every n-th step supervises the last depth only."""

    order: ClassVar[int] = Stage.CHOOSE
    n: int = setting(2, least=1, help="How often.")

    def __call__(self, weights: np.ndarray, moment: Moment) -> np.ndarray:
        weights[:-1] *= moment.step % self.n > 0
        return weights

    def period(self, depth: int) -> int:
        return self.n


@pytest.fixture
def bright() -> Iterator[None]:
    @factory
    def test_bright(energy: float = 0.5) -> Objective:
        return ed.lpa() + Energy(weight=energy)

    yield
    del FACTORIES["test_bright"]


def test_a_term_and_a_schedule_from_outside_train_survive_json_and_are_words_of_the_command() -> (
    None
):
    objective = ed.lpa(early=0.5) + Energy(weight=0.25) + Blinking(n=3)
    assert objective.weights(3, None, 3).tolist() == [0, 0, 0, 1]
    assert objective.weights(4, None, 3).tolist() == [0, 0.5, 0.5, 1]
    assert Objective.from_json(json.loads(json.dumps(objective.to_json()))) == objective
    text = "lpa:early=0.5+test_energy:weight=0.25+test_blinking:n=3"
    assert objective_of(text) == objective

    net, batch = ed.EveryDepth(mlp(), objective).train(), points(8).batch(range(8))
    net.set_progress(4)
    out = net(**batch)
    energy = 0.25 * net.stream.observe({"inputs": batch["inputs"]}).feature(3).square().mean()
    assert torch.allclose(out.regularizer, energy)
    weighted = 0.5 * (out.losses[1] + out.losses[2]) + out.losses[3]
    assert torch.allclose(out.loss, weighted + energy)
    assert ed.check_objective(net, batch).ok
    assert ed.fit(net, points(16), steps=2, progress=False).steps == 2


@pytest.mark.usefixtures("bright")
def test_a_factory_from_outside_is_a_word_of_the_command() -> None:
    assert objective_of("test_bright:energy=0.1+annealed") == (
        (ed.lpa() + Energy(weight=0.1)).annealed()
    )


def test_two_terms_are_summed() -> None:
    batch = points(8).batch(range(8))
    one, other = Energy(weight=0.25), ed.cosine_regularized(0.5).terms[0]
    both, first, second = (
        ed.EveryDepth(mlp(), objective)(**batch).regularizer
        for objective in (ed.lpa() + one + other, ed.lpa() + one, ed.lpa() + other)
    )
    assert torch.allclose(both, first + second)


def test_the_order_in_which_parts_are_given_does_not_matter() -> None:
    a = ed.lpa() + Sampled(k=1) + Normalized() + Annealed(by=0.5)
    b = ed.lpa() + Annealed(by=0.5) + Normalized() + Sampled(k=1)
    assert a == b
    assert [part.part for part in a.parts] == ["lpa", "annealed", "normalized", "sampled"]


def test_a_part_takes_the_place_of_one_of_its_kind() -> None:
    assert ed.lpa().annealed(by=0.5).annealed(by=0.7) == ed.lpa().annealed(by=0.7)
    assert (ed.lpa() + ed.aligned().shape).shape == ed.aligned().shape


def test_every_part_names_itself_and_explains_its_settings() -> None:
    for name, part in parts().items():
        assert part.part == name
        assert part.__doc__


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Energy(weight=0), "test_energy: weight=0.0; use a number above 0"),
        (lambda: Energy(weight=float("nan")), "test_energy: weight=nan; use a number above 0"),
        (lambda: Blinking(n=1.5), "test_blinking: n=1.5; use a whole number of 1 or more"),
        (
            lambda: Objective(name="two", parts=(Annealed(), Annealed(by=0.5))),
            "two has the parts annealed, annealed; give each once",
        ),
        (
            lambda: Objective(name="two", parts=(ed.lpa().shape, ed.aligned().shape)),
            "two has the parts lpa, linear; give each once, and one shape",
        ),
        (lambda: Objective(name="mine", seed=-1), "seed=-1; use a whole number of 0 or more"),
    ],
)
def test_a_part_that_makes_no_sense_is_refused(make: object, message: str) -> None:
    with pytest.raises(SettingError, match=message):
        make()  # type: ignore[operator]


def test_a_name_that_is_taken_is_refused() -> None:
    with pytest.raises(
        SettingError, match=r"part 'annealed' already exists \(Annealed\); use another name"
    ):

        class Other(Term, name="annealed"):
            pass


# -- in one line -----------------------------------------------------------------------------------


def test_an_objective_is_written_in_one_line() -> None:
    assert objective_of("lpa") == ed.lpa()
    assert objective_of("lpa:early=0.2,top=3") == ed.lpa(early=0.2, top=3)
    assert objective_of("lpa+annealed:by=0.8 + sampled:k=2") == ed.lpa().annealed().sampled(2)
    assert objective_of("lpa+sampled:k=2,seed=7") == ed.lpa().sampled(2, seed=7)
    assert objective_of("lpa:early=1e+0+equilibrated") == ed.lpa(1.0).equilibrated()
    assert objective_of("weighted:weights=[0.0,1.0,2.0]+normalized") == (
        ed.weighted([0.0, 1.0, 2.0]) + Normalized()
    )
    assert objective_of("aligned:weights=uniform,alternate=false") == ed.aligned("uniform", False)
    assert objective_of("ladder:depths=[1,2]+distilled:temperature=2+sampled:k=1") == (
        ed.ladder([1, 2]).distilled(temperature=2.0).sampled(1)
    )
    assert objective_of("ladder+layer_dropout:most=0.2,decays=true") == (
        ed.ladder().layer_dropout(0.2)
    )
    assert objective_of("lpa+cosine:beta=0.5,shape=uniform").terms == (
        ed.cosine_regularized(0.5, "uniform").terms
    )


def test_or_as_a_mapping() -> None:
    assert objective_of({"name": "layerskip", "every": 2}) == ed.layerskip(every=2)
    made = ed.lpa().annealed().sampled(1, seed=3)
    assert objective_of(made.to_json()) == objective_of(json.dumps(made.to_json())) == made


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lap", "everydepth has no objective 'lap'. Did you mean 'lpa'"),
        ("lpa:erly=1", "the objective lpa has no setting 'erly'. Did you mean 'early'"),
        ("lpa+aneal", "everydepth has no part of objectives 'aneal'. Did you mean 'annealed'"),
        ("lpa+annealed:bi=1", "the part annealed has no setting 'bi'. It has to, by"),
        ("lpa+sampled", "the part sampled needs k="),
        ("lpa:0.2", r"'0.2' in the objective 'lpa:0.2'; write name:key=value"),
        ("cosine_regularized", "cosine_regularized: .*'beta'; write"),
        ("{lpa", "is not JSON"),
    ],
)
def test_a_word_that_is_not_known_names_the_closest(text: str, message: str) -> None:
    with pytest.raises(SettingError, match=message):
        objective_of(text)
