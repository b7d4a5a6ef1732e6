"""The ledger of claims: verdicts follow from intervals, networks are trained once, errors help."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import everydepth as ed
from everydepth.cli.main import build_app
from everydepth.data import batches, load_digits
from everydepth.errors import DataError, RunError, SettingError
from everydepth.objectives import lpa
from everydepth.training import EveryDepth, fit
from everydepth_papers.claims import CLAIMS, Claim, standard
from everydepth_papers.claims.checking import check_claims, groups_of
from everydepth_papers.claims.claim import ask, entry, measured
from everydepth_papers.claims.facts import GROUPS, Facts, Missing, plain
from everydepth_papers.claims.ledger import Ledger
from everydepth_papers.paper import PAPERS
from everydepth_papers.premise import Premise

CHEAP = ("lpa-worst-error", "one-layer-reaches")
"""Claims on perceptrons and single layers: a second."""


def _rounded(found: Any) -> Any:
    """Sums in float32 depend on where in memory their terms lie: 1e-8 of -2.1 was seen."""
    return json.loads(json.dumps(found.to_json()), parse_float=lambda text: round(float(text), 5))


def _claim(relation: Any = ">=", threshold: float = 0.5, **more: Any) -> Claim:
    settings: dict[str, Any] = {
        "name": "test",
        "paper": "progressive",
        "source": "",
        "statement": "",
        "test": "",
        "cells": {"MLP": ("mlp:lpa",)},
        "value": lambda f: f["x"],
    }
    return Claim(relation=relation, threshold=threshold, **{**settings, **more})


# -- verdicts --------------------------------------------------------------------------------------


def test_a_claim_holds_only_where_its_whole_interval_is_on_the_claimed_side() -> None:
    above, below = _claim(">="), _claim("<=")
    assert above.verdict(0.6, 0.7) == "holds"
    assert above.verdict(0.4, 0.6) == "inconclusive"
    assert above.verdict(0.1, 0.4) == "does not hold"
    assert below.verdict(0.6, 0.7) == "does not hold"
    assert below.verdict(0.4, 0.6) == "inconclusive"
    assert below.verdict(0.1, 0.5) == "holds"


def test_the_interval_is_students() -> None:
    from scipy.stats import ttest_1samp

    values = np.array([0.2, 0.5, 0.4])
    expected = ttest_1samp(values, 0.0).confidence_interval(0.95)
    found = measured(_claim(), "ViT", values.tolist())
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high))


def test_a_claim_about_every_case_is_judged_by_the_worst() -> None:
    claim = _claim("<=", 1.0, worst=True)
    close = measured(claim, "layer", [0.2, 0.9, 0.99])
    assert (close.verdict, close.low, close.high) == ("holds", 0.2, 0.99)
    # Student's interval of these three reaches beyond 1, and says nothing about the largest.
    assert measured(_claim("<=", 1.0), "layer", [0.2, 0.9, 0.99]).verdict == "inconclusive"
    assert measured(claim, "layer", [0.2, 0.9, 1.01]).verdict == "does not hold"
    assert measured(claim, "layer", [0.2]).verdict == "inconclusive"


def _facts(**values: Any) -> Facts:
    return Facts({"values": values, "missing": {}})


FITTED = Premise(test="training accuracy", value=lambda f: f["fitted"], least=0.99)


def test_a_seed_whose_premise_fails_does_not_count() -> None:
    claim = _claim(premises=(FITTED,))
    pairs = ((0.9, 1.0), (0.91, 1.0), (0.92, 1.0), (-5.0, 0.8))
    cases = [(_facts(x=x, fitted=f),) for x, f in pairs]
    found = ask(claim, "ViT", cases)
    assert (found.values, found.verdict) == ((0.9, 0.91, 0.92), "holds")
    assert str(found.premises[0]).endswith("needed >= 0.99: 3 of 4")


def test_two_seeds_decide_nothing_where_a_third_failed_its_premise() -> None:
    cases = [(_facts(x=0.9, fitted=f),) for f in (1.0, 1.0, 0.8)]
    assert ask(_claim(premises=(FITTED,)), "ViT", cases).verdict == "not applicable"


def test_a_row_whose_premise_fails_is_not_applicable_and_shows_the_figure() -> None:
    cases = [(_facts(x=0.9, fitted=f),) for f in (0.8, 0.81, 1.0)]
    found = ask(_claim(premises=(FITTED,)), "ViT", cases)
    assert found.verdict == "not applicable"
    assert found.premises[0].figures == (0.8, 0.81, 1.0)
    shown = Ledger.of("test", [entry(_claim(premises=(FITTED,)), [found])], seeds=3)
    assert "training accuracy 0.87 (0.8 to 1), needed >= 0.99: 1 of 3" in shown.markdown()
    weak = replace(FITTED, failing="inconclusive")
    assert ask(_claim(premises=(weak,)), "ViT", cases).verdict == "inconclusive"


def test_a_premise_that_was_not_measured_is_not_met() -> None:
    found = ask(_claim(premises=(FITTED,)), "ViT", [(_facts(x=0.9),)] * 2)
    assert found.verdict == "not applicable"
    assert "training accuracy undefined" in str(found.premises[0])


@pytest.mark.parametrize(
    ("name", "premise"),
    [
        ("memorization-gradient-smaller", "training accuracy, wrong labels included"),
        ("memorization-survives-removal", "training accuracy, wrong labels included"),
        ("removal-impairs-learning", "training accuracy, wrong labels included"),
        ("early-removal-worse", "training accuracy, wrong labels included"),
        ("statistics-consistent", "training accuracy, wrong labels included"),
        ("exits-keep-accuracy", "share that leaves before the last layer"),
        ("aligned-exits-earlier", "share that leaves before the last layer"),
        ("jumpboard-generalizes", "cosine of mean training and test gradients at the site"),
        ("covariance-diagonal", "share that noise alone leaves within 10 %"),
        ("aligned-effective-depth", "training accuracy"),
    ],
)
def test_a_claim_about_something_asks_whether_it_happened(name: str, premise: str) -> None:
    assert premise in [one.test for one in CLAIMS[name].premises]


def test_every_claim_about_a_trained_network_asks_whether_it_learned() -> None:
    identities = {"insertion", "bound", "alignment"}  # true of any network, or not at all
    for claim in CLAIMS.values():
        trained = {n.partition(":")[0] for names in claim.cells.values() for n in names}
        if trained <= {"layer", "cost"} or claim.name.partition("-")[0] in identities:
            continue
        assert claim.premises, claim.name


def test_one_value_alone_decides_nothing() -> None:
    found = measured(_claim(), "ViT", [0.9])
    assert found.verdict == "inconclusive"
    assert found.low is None
    assert found.note == "one value has no interval"


def test_undefined_values_are_left_out_and_said() -> None:
    found = measured(_claim(), "ViT", [0.9, 0.91, float("nan")])
    assert found.values == (0.9, 0.91)
    assert found.note == "1 of 3 undefined"


def test_a_claim_on_several_kinds_fails_where_one_kind_fails() -> None:
    claim = _claim()
    good, bad = measured(claim, "ViT", [0.9, 0.91]), measured(claim, "LM", [0.1, 0.11])
    unsure = measured(claim, "MLP", [0.1, 0.9])
    assert entry(claim, [good]).verdict == "holds"
    both = entry(claim, [good, bad])
    assert (both.verdict, both.note) == ("does not hold", "not on LM")
    assert entry(claim, [good, unsure]).verdict == "inconclusive"
    assert entry(claim, [], "no labels").verdict == "not applicable"


# -- the catalog ---------------------------------------------------------------------------------


def test_every_claim_names_cells_and_facts_that_exist() -> None:
    assert len(CLAIMS) >= 30
    assert {claim.paper for claim in CLAIMS.values()} == set(PAPERS)
    for claim in CLAIMS.values():
        assert claim.statement
        assert claim.test
        assert set(claim.needs) <= set(GROUPS)
        for cells in claim.cells.values():
            assert {name.partition(":")[0] for name in cells} <= set(standard.KINDS)


def _straight(depth: int = 4) -> dict[str, Any]:
    """Facts of a network whose every depth is better and more like the last than the one before."""
    place = np.arange(depth + 1)
    near = 1 - np.abs(place[:, None] - place) / (depth + 1)
    return {
        "depth": depth,
        "loss": 2.0 - 0.3 * place,
        "accuracy": 0.1 + 0.2 * place,
        "cos": near,
        "cka": near**2,
        "saturation": place / depth,
        "gradient_norm": 5.0 - place,
        "separation": -1.0 * place,
        "removed_accuracy": 0.1 + 0.2 * place[1:],
        "removed_margin": 0.1 + 0.2 * place[1:],
        "whole_margin": 2.0,
        "within_10": np.ones(depth + 1),
        "straight": 0.95,
        "norm_ratio": np.full(depth, 3.0),
    }


def _value(name: str, **changes: Any) -> float:
    content = {**_straight(), **changes}
    facts = Facts({"values": {k: plain(v) for k, v in content.items()}, "missing": {}})
    return CLAIMS[name].value(facts)


def _fits(name: str, value: float) -> bool:
    return CLAIMS[name].verdict(value, value) == "holds"


@pytest.mark.parametrize(
    "name",
    [
        "lpa-monotone",
        "cos-agrees-with-cka",
        "similarity-grows-with-closeness",
        "layers-positively-correlated",
        "accuracy-follows-similarity",
        "decisions-saturate",
        "aligned-monotone-accuracy",
        "progressive-separation",
        "early-residuals-matter-most",
        "early-margins-fall-most",
        "early-gradients-larger",
        "covariance-diagonal",
        "skip-dominates",
    ],
)
def test_a_network_made_to_fit_the_claim_fits_it(name: str) -> None:
    assert _fits(name, _value(name))


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("lpa-monotone", {"loss": np.array([2.0, 1.0, 0.5, 0.9, 0.4])}),
        ("cos-agrees-with-cka", {"cka": -_straight()["cos"]}),
        ("similarity-grows-with-closeness", {"cos": 1 - _straight()["cos"]}),
        ("layers-positively-correlated", {"cos": -_straight()["cos"]}),
        ("accuracy-follows-similarity", {"accuracy": np.array([0.9, 0.8, 0.6, 0.4, 0.2])}),
        ("decisions-saturate", {"saturation": np.array([0, 0, 0, 0.1, 1.0])}),
        ("aligned-monotone-accuracy", {"accuracy": np.array([0.1, 0.5, 0.4, 0.6, 0.7])}),
        ("early-residuals-matter-most", {"removed_accuracy": np.array([0.9, 0.8, 0.3, 0.1])}),
        ("early-gradients-larger", {"gradient_norm": np.array([1.0, 2.0, 3.0, 4.0, 5.0])}),
    ],
)
def test_a_network_made_to_break_the_claim_breaks_it(name: str, changes: dict[str, Any]) -> None:
    assert not _fits(name, _value(name, **changes))


def test_a_fact_that_is_not_there_says_why() -> None:
    facts = Facts({"values": {}, "missing": {"accuracy": "the data has no labels"}})
    with pytest.raises(Missing, match="the data has no labels"):
        facts["accuracy"]


# -- standard networks -----------------------------------------------------------------------------


def test_networks_are_trained_once_and_an_interrupted_ledger_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[tuple[str, int]] = []
    real = standard.cell

    def counted(name: str, seed: int, *rest: Any) -> dict[str, Any]:
        made.append((name, seed))
        if len(made) == 2:
            raise KeyboardInterrupt
        return real(name, seed, *rest)

    monkeypatch.setattr("everydepth_papers.claims.checking.cell", counted)
    settings: dict[str, Any] = {"only": CHEAP, "preset": "smoke", "seeds": 2, "progress": False}
    with pytest.raises(KeyboardInterrupt):
        check_claims(**settings, run=tmp_path / "run")
    # Each claim by the seeds it has: one of the first, none of the second, and nothing is trained.
    part = check_claims(**settings, run=tmp_path / "run", finished=True)
    assert len(made) == 2
    assert len(part.entry(CHEAP[0]).measured[0].premises[0].figures) == 1
    assert part.entry(CHEAP[1]).measured[0].values == ()
    monkeypatch.setattr("everydepth_papers.claims.checking.cell", real)
    resumed = check_claims(**settings, run=tmp_path / "run")
    whole = check_claims(**settings)
    for name in CHEAP:
        assert _rounded(resumed.entry(name)) == _rounded(whole.entry(name))
    stored = Ledger.load(tmp_path / "run" / "claims")
    assert stored.counts() == whole.counts()
    assert stored.entry(CHEAP[0]) == resumed.entry(CHEAP[0])
    assert len(list((tmp_path / "run" / "cells").iterdir())) == 4
    # What is there is not made again.
    monkeypatch.setattr("everydepth_papers.claims.checking.cell", counted)
    made.clear()
    check_claims(**settings, run=tmp_path / "run")
    assert made == []
    with pytest.raises(RunError, match="preset 'smoke' -> 'standard'"):
        check_claims(only=CHEAP[0], run=tmp_path / "run", progress=False)


def test_constructed_layers_keep_their_promise_in_the_ledger() -> None:
    found = check_claims(only="one-layer-reaches", preset="smoke", seeds=2, progress=False)
    assert found.entry("one-layer-reaches").verdict == "holds"


def test_a_standard_network_whose_data_is_absent_is_not_applicable_with_the_way_to_get_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def absent(*_: Any) -> dict[str, Any]:
        raise DataError("no folder tinyshakespeare; set EVERYDEPTH_DATA")

    monkeypatch.setattr("everydepth_papers.claims.checking.cell", absent)
    found = check_claims(only="lpa-final-perplexity", preset="smoke", progress=False)
    line = found.entry("lpa-final-perplexity")
    assert line.verdict == "not applicable"
    assert "set EVERYDEPTH_DATA" in line.note


@pytest.mark.slow
def test_the_whole_ledger_runs_on_the_smallest_networks() -> None:
    found = check_claims(preset="smoke", seeds=2, progress=False)
    assert len(found["claim"]) == len(CLAIMS)
    gone = [name for name in found["claim"] if not found.entry(name).measured]
    assert gone == []


@pytest.mark.parametrize(
    "name", ["vit:end_to_end", "noisy:arms", "perceptron:skips", "sweep:deep-narrow"]
)
def test_a_cell_has_every_fact_that_the_claims_on_it_read(name: str) -> None:
    found = Facts(standard.cell(name, 0, standard.SCALES["smoke"], groups_of(name)))
    alone = [c for c in CLAIMS.values() if (name,) in c.cells.values()]
    for claim in alone:
        assert isinstance(claim.value(found), float)
        assert all(isinstance(one.value(found), float) for one in claim.premises)
    assert plain(found.content) == json.loads(json.dumps(found.content))


# -- somebody's model ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def digits_vit() -> torch.nn.Module:
    scale = standard.SCALES["smoke"]
    torch.manual_seed(0)
    model = standard.vit(replace(scale, blocks=3))
    rows = load_digits("train").subset(range(256))
    fit(EveryDepth(model, lpa()), rows, epochs=2, progress=False)
    return model


def test_ones_own_model_gets_a_verdict_where_one_model_can_be_asked(
    digits_vit: torch.nn.Module,
) -> None:
    rows = load_digits("test").subset(range(128))
    names = ("lpa-monotone", "cos-agrees-with-cka", "one-head-suffices", "lpa-worst-error")
    found = check_claims(digits_vit, rows, only=names, batch_size=16, progress=False)
    asked = found.entry("lpa-monotone").measured[0]
    assert asked.on == "ViTForImageClassification"
    assert len(asked.values) == 8
    assert asked.low is not None
    # The number of a part is the one that a trace of that part gives.
    part = list(batches(rows, 16))[0::8]
    loss = ed.trace(digits_vit, part, metrics=["loss"], progress=False)["loss"][1:]
    assert asked.values[0] == pytest.approx(float(np.diff(loss).max() / loss[0]))
    assert found.entry("one-head-suffices").verdict == "not applicable"
    assert "compares two training runs" in found.entry("one-head-suffices").note
    assert found.entry("lpa-worst-error").verdict == "not applicable"
    assert "regression" in found.entry("lpa-worst-error").note


def test_a_claim_that_needs_labels_is_not_applicable_without(digits_vit: torch.nn.Module) -> None:
    pixels = load_digits("test").pixel_values[:64]
    data = [{"pixel_values": part} for part in pixels.split(16)]
    names = ("lpa-monotone", "cos-agrees-with-cka", "early-residuals-matter-most")
    found = check_claims(digits_vit, data, only=names, progress=False)
    assert found.entry("lpa-monotone").verdict == "not applicable"
    assert "labels" in found.entry("lpa-monotone").note
    assert found.entry("early-residuals-matter-most").verdict == "not applicable"
    assert found.entry("cos-agrees-with-cka").measured


# -- errors ----------------------------------------------------------------------------------------


def test_wrong_requests_say_what_to_do(digits_vit: torch.nn.Module) -> None:
    with pytest.raises(SettingError, match="did you mean 'lpa-monotone'"):
        check_claims(only="lpa-monoton")
    with pytest.raises(SettingError, match="paper '007'; use one of progressive, expansion"):
        check_claims(paper="007")
    with pytest.raises(SettingError, match="none of these claims is of Depth Expansion"):
        check_claims(only="lpa-monotone", paper="expansion")
    with pytest.raises(SettingError, match="preset 'huge'; use smoke or standard"):
        check_claims(preset="huge")
    with pytest.raises(SettingError, match="model without data; give both"):
        check_claims(digits_vit)
    with pytest.raises(SettingError, match="finished=True without run="):
        check_claims(finished=True)
    with pytest.raises(SettingError, match="0 seeds"):
        check_claims(seeds=0)
    with pytest.raises(DataError, match="an interval needs 2 parts or more"):
        check_claims(digits_vit, load_digits("test").subset(range(8)), only="lpa-monotone")


# -- shown -----------------------------------------------------------------------------------------


def test_the_command_prints_writes_and_reports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["claims", "--preset", "smoke", "--seeds", "2", "--only", "one-layer-reaches"]
    run = CliRunner().invoke(build_app(), [*words, "--record", "ledger.json", "--docs", "page.md"])
    assert run.exit_code == 0, run.output
    assert "one-layer-reaches" in run.output
    recorded = json.loads((tmp_path / "ledger.json").read_text())
    assert recorded["machine"]
    page = Ledger.of_json(recorded).markdown()
    assert (tmp_path / "page.md").read_text() == page
    assert "`one-layer-reaches`" in page
    assert str(tmp_path) not in (tmp_path / "ledger.json").read_text()
    page = ed.report(tmp_path / "runs" / "claims-smoke", tmp_path / "page.html").read_text()
    assert "Claims of the papers" in page
    assert CLAIMS["one-layer-reaches"].statement in page
    listed = CliRunner().invoke(build_app(), ["claims", "--list"])
    assert listed.output.count("\n") >= len(CLAIMS)
    wrong = CliRunner().invoke(build_app(), ["claims", "--data", "digits"])
    assert "give both to ask your own model" in str(wrong.exception)


def test_some_claims_are_recorded_within_the_ledger_of_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    def record(claim: str, seeds: str) -> Any:
        words = ["claims", "--preset", "smoke", "--record", "ledger.json", "--run", f"run-{seeds}"]
        return CliRunner().invoke(build_app(), [*words, "--seeds", seeds, "--only", claim])

    assert record("one-layer-reaches", "2").exit_code == 0
    first = json.loads((tmp_path / "ledger.json").read_text())
    assert record("one-layer-width", "2").exit_code == 0
    both = json.loads((tmp_path / "ledger.json").read_text())
    assert [row["name"] for row in both["claims"]] == ["one-layer-reaches", "one-layer-width"]
    assert both["claims"][0] == first["claims"][0]
    assert sum(both["counts"].values()) == 2
    refused = str(record("one-layer-width", "3").exception)
    assert "a ledger of seeds 3 cannot become part of one of 2" in refused


def test_the_page_of_the_documentation_is_the_recorded_ledger_of_all_claims() -> None:
    root = Path(__file__).parents[3]
    file = root / "benchmarks/results/claims.json"
    shown = json.loads(file.read_text(encoding="utf-8"))
    page = Ledger.of_json(shown).markdown()
    assert (root / "docs/claims.md").read_text(encoding="utf-8") == page
    assert {row["name"] for row in shown["claims"]} == set(CLAIMS)
    for row in shown["claims"]:
        assert row["threshold"] == CLAIMS[row["name"]].threshold
        assert row["test"] == CLAIMS[row["name"]].test


def test_a_claim_that_was_not_measured_is_an_error() -> None:
    found = check_claims(only="one-layer-reaches", preset="smoke", seeds=2, progress=False)
    with pytest.raises(SettingError, match="was not asked for; measured are one-layer-reaches"):
        found.entry("lpa-monotone")
