"""Calibration: the promise holds over many draws, and nothing is promised that cannot be shown."""

from __future__ import annotations

import pytest
import torch
from scipy.stats import binom
from tests.zoo import ENTRIES

from everydepth.errors import BatchError, LabelError, SettingError
from everydepth.exits.calibrate import NotCertifiedWarning, Outcomes, calibrate, certified, observe
from everydepth.exits.policies import NEVER, POLICIES, Confidence, Policy, exit_depths
from everydepth.stream import as_stream

SPLITS, DELTA = 200, 0.1
# More failures than this in 200 splits would have a chance of 0.1 % if each had chance delta.
MOST = int(binom.ppf(0.999, SPLITS, DELTA))


def synthetic(rows: int, seed: int = 0, depths: int = 6, classes: int = 5) -> Outcomes:
    """Samples of varying difficulty: deeper is better, certain is likelier right, not surely."""
    draw = torch.Generator().manual_seed(seed)
    difficulty = torch.rand(rows, 1, generator=draw)
    depth = torch.arange(1, depths + 1) / depths
    skill = torch.sigmoid(6 * (depth + 0.3 - difficulty))
    labels = torch.randint(classes, (rows,), generator=draw)
    # One number per row decides at all depths, so that predictions of a row are alike.
    luck = (
        torch.rand(rows, 1, generator=draw) * 0.7 + torch.rand(rows, depths, generator=draw) * 0.3
    )
    wrong = (labels[:, None] + 1) % classes
    predicted = torch.where(luck < skill, labels[:, None], wrong)
    noise = torch.randn(rows, depths, generator=draw) * 0.8
    certainty = torch.sigmoid(torch.logit(skill, 1e-4) + noise)[:, :-1]
    return Outcomes(certainty, predicted, labels, classes)


def true_risk(policy: Policy, population: Outcomes, against: str) -> float:
    thresholds = torch.tensor(policy.threshold, dtype=torch.float64)
    leaving = exit_depths(population.certainty.double(), thresholds)
    loss = population.losses(against).gather(1, leaving[:, None] - 1)
    return float(loss.double().mean())


@pytest.mark.filterwarnings("ignore::everydepth.exits.calibrate.NotCertifiedWarning")
@pytest.mark.parametrize("per_depth", [False, True])
@pytest.mark.parametrize("against", ["full", "labels"])
def test_over_200_draws_the_risk_exceeds_epsilon_in_at_most_a_share_delta(
    against: str, per_depth: bool
) -> None:
    population, risk = synthetic(20_000), 0.08
    draw = torch.Generator().manual_seed(1)
    failures, left_early = 0, 0
    for split in range(SPLITS):
        rows = torch.randint(20_000, (600,), generator=draw)
        policy = certified(
            population.rows(rows),
            Confidence,
            risk=risk,
            delta=DELTA,
            against=against,
            per_depth=per_depth,
            seed=split,
        )
        failures += true_risk(policy, population, against) > risk
        left_early += policy.certificate is not None and policy.certificate.speedup > 1.05
    assert failures <= MOST
    assert left_early > SPLITS / 2, "a policy that never leaves promises nothing"


def test_choosing_by_the_observed_risk_alone_breaks_the_promise() -> None:
    # The control: without a test, the same 200 draws exceed the risk far more often.
    population, risk = synthetic(20_000), 0.08
    draw = torch.Generator().manual_seed(1)
    grid = torch.tensor(Confidence.path(5, 6), dtype=torch.float64)
    failures = 0
    for _ in range(SPLITS):
        sample = population.rows(torch.randint(20_000, (600,), generator=draw))
        chosen = NEVER
        for threshold in grid.tolist():
            policy = Confidence(threshold=(threshold,) * 5)
            if true_risk(policy, sample, "full") > risk:
                break
            chosen = threshold
        failures += true_risk(Confidence(threshold=(chosen,) * 5), population, "full") > risk
    assert failures > 2 * MOST, failures


def test_a_larger_risk_never_gives_a_more_careful_policy() -> None:
    outcomes = synthetic(2000)
    speedups = [
        certified(outcomes, Confidence, risk=risk, delta=0.05).certificate.speedup
        for risk in (0.05, 0.1, 0.2, 0.4)
    ]
    assert speedups == sorted(speedups)
    assert speedups[-1] > speedups[0]


def test_the_note_says_what_is_bounded_and_with_which_probability() -> None:
    found = certified(synthetic(2000), Confidence, risk=0.2, delta=0.07).certificate
    assert found is not None
    assert found.note.startswith(
        "with probability 0.93 over 2,000 calibration samples, the share of predictions that "
        "differ from the full model's is at most 0.2"
    )


def test_too_few_samples_give_the_full_model_and_say_how_many_are_needed() -> None:
    outcomes = synthetic(20)
    with pytest.warns(
        NotCertifiedWarning, match="even without a single error, it takes 59 samples, not 20"
    ):
        policy = certified(outcomes, Confidence, risk=0.05, delta=0.05)
    assert policy.threshold == (NEVER,) * 5
    assert policy.certificate is not None
    assert not policy.certificate.certified
    assert policy.certificate.speedup == 1


def test_a_model_that_changes_its_mind_at_the_end_cannot_be_certified() -> None:
    outcomes = synthetic(1000)
    turned = outcomes.predicted.clone()
    turned[:, -1] = (turned[:, -1] + 1) % 5
    hopeless = Outcomes(torch.ones_like(outcomes.certainty), turned, outcomes.labels, 5)
    with pytest.warns(NotCertifiedWarning, match="not even the most careful threshold passes"):
        policy = certified(hopeless, Confidence, risk=0.05, delta=0.05)
    assert policy.threshold == (NEVER,) * 5


def test_depths_that_are_not_allowed_stay_closed() -> None:
    allowed = [False, True, False, True, False]
    policy = certified(synthetic(2000), Confidence, risk=0.3, delta=0.05, allowed=allowed)
    assert isinstance(policy.threshold, tuple)
    assert [t < NEVER for t in policy.threshold] == allowed


@pytest.mark.filterwarnings("ignore::everydepth.exits.calibrate.NotCertifiedWarning")
@pytest.mark.parametrize("kind", POLICIES)
def test_ties_and_no_certainty_at_all_give_thresholds_that_the_policy_allows(kind: str) -> None:
    rows = 400
    tied = torch.zeros(rows, 3)
    tied[:, 1] = 1.0  # all alike: nobody is certain at the first depth, everybody at the second
    tied[:200, 2] = 1.0
    alike = Outcomes(tied, torch.zeros(rows, 4, dtype=torch.long), None, 5)
    found = certified(alike, POLICIES[kind], risk=0.1, delta=0.05, per_depth=True)
    assert isinstance(found.threshold, tuple)
    assert found.threshold[0] == NEVER
    assert found.threshold[1] <= 1
    assert Policy.from_json(found.to_json()) == found


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_a_sample_or_two_certify_nothing_and_say_how_many_are_needed(rows: int) -> None:
    for per_depth in (False, True):
        with pytest.warns(NotCertifiedWarning, match=r"it takes \d+ samples, not \d+"):
            found = certified(
                synthetic(rows), Confidence, risk=0.1, delta=0.05, per_depth=per_depth
            )
        assert found.certificate is not None
        assert not found.certificate.certified


@pytest.mark.parametrize("against", ["full", "labels"])
@pytest.mark.parametrize("risk", [1e-15, 1e-300, 5e-324])
def test_a_risk_that_no_number_of_samples_can_show_is_not_certified(
    risk: float, against: str
) -> None:
    with pytest.warns(
        NotCertifiedWarning, match=r"without a single error, it takes \d{12,13} samples"
    ):
        certified(synthetic(50), Confidence, risk=risk, delta=0.05, against=against)


def test_own_thresholds_let_no_sample_lie_on_a_threshold() -> None:
    outcomes = synthetic(2000)
    policy = certified(outcomes, Confidence, risk=0.1, delta=0.05, per_depth=True)
    assert isinstance(policy.threshold, tuple)
    assert len(set(policy.threshold)) > 1
    for place, threshold in enumerate(policy.threshold):
        assert threshold not in outcomes.certainty[:, place].tolist()


@pytest.mark.parametrize("kind", sorted(POLICIES))
def test_one_pass_gives_the_certainties_that_the_readout_of_each_depth_gives(kind: str) -> None:
    model, batch = ENTRIES["ViT"].make(torch.float64)
    stream, policy = as_stream(model), POLICIES[kind](threshold=NEVER)
    outcomes = observe(stream, batch, POLICIES[kind], batch_size=2)
    with torch.no_grad():
        states, memory = stream.observe(batch), ()
        for depth in range(1, 5):
            logits = states.logits(depth)
            assert torch.equal(outcomes.predicted[:, depth - 1], logits.argmax(-1))
            score, memory = policy.certainty(logits, memory)
            if depth < 4:
                torch.testing.assert_close(outcomes.certainty[:, depth - 1], score)


def test_calibrating_a_model_binds_the_policy_to_it_and_leaves_it_as_it_was() -> None:
    model, _ = ENTRIES["ViT"].make()
    model.train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    data = [{"pixel_values": torch.randn(50, 3, 32, 32)} for _ in range(4)]
    with torch.no_grad():  # a readout that ignores depth: all depths predict the same class
        model.classifier.weight.zero_()
        model.classifier.bias.copy_(torch.arange(10.0))
    before |= {n: v.clone() for n, v in model.state_dict().items() if "classifier" in n}
    policy = calibrate(model, data, risk=0.05, progress=False)
    assert policy.certificate is not None
    assert policy.certificate.certified
    assert policy.certificate.samples == 200
    assert policy.certificate.speedup == 4
    policy.for_stream(as_stream(model))
    assert model.training
    assert all(torch.equal(before[n], v) for n, v in model.state_dict().items())


def test_labels_that_are_ignored_are_left_out() -> None:
    model, batch = ENTRIES["ViT"].make()
    outcomes = observe(as_stream(model), batch | {"labels": torch.tensor([1, -100, 2])}, Confidence)
    assert outcomes.labels is not None
    assert outcomes.labels.tolist() == [1, 2]
    assert len(outcomes.predicted) == 2


def test_bad_input_is_refused_with_the_next_step() -> None:
    model, batch = ENTRIES["ViT"].make()
    with pytest.raises(BatchError, match="the data has no batches"):
        calibrate(model, [], risk=0.1)
    with pytest.raises(LabelError, match="against='labels', but the batches have no 'labels'"):
        calibrate(model, batch, risk=0.1, against="labels", progress=False)
    for name, value in (("risk", 0.0), ("risk", 1.5), ("delta", 1.0)):
        settings = {"risk": 0.1, "delta": 0.1} | {name: value}
        with pytest.raises(
            SettingError, match=rf"{name}={value}\); use a number above 0 and below 1"
        ):
            calibrate(model, batch, **settings)
    with pytest.raises(SettingError, match="policy 'hope'; use one of"):
        calibrate(model, batch, risk=0.1, policy="hope")


@pytest.mark.slow
@pytest.mark.parametrize("against", ["full", "labels"])
@pytest.mark.filterwarnings("ignore::everydepth.exits.calibrate.NotCertifiedWarning")
def test_on_a_model_trained_on_digits_the_promise_holds_over_200_draws_and_splits(
    against: str,
) -> None:
    from transformers import ViTConfig, ViTForImageClassification

    from everydepth.data import batches, load_digits

    train, rest = load_digits("all").split((0.3, 0.7), seed=0, stratified=True)
    torch.manual_seed(0)
    model = ViTForImageClassification(
        ViTConfig(
            hidden_size=32,
            num_hidden_layers=6,
            num_attention_heads=4,
            intermediate_size=64,
            image_size=8,
            patch_size=2,
            num_channels=1,
            num_labels=10,
        )
    )
    stream = as_stream(model)
    steps = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for _ in range(25):
        for batch in batches(train, 32, shuffle=True):
            states = stream.observe(batch)
            loss = sum(
                torch.nn.functional.cross_entropy(states.logits(depth), batch["labels"])
                for depth in range(1, 7)
            )
            steps.zero_grad()
            loss.backward()
            steps.step()
    outcomes = observe(stream, rest, Confidence)
    assert outcomes.labels is not None
    assert (outcomes.predicted[:, -1] == outcomes.labels).double().mean() > 0.85
    # Two counts. With replacement the digits are the distribution itself and the risk on all of
    # them is exact. A split is judged on its other half, whose own noise is part of the count.
    risk, failures, beyond, speedups = 0.03, 0, 0, []
    draw = torch.Generator().manual_seed(0)
    size = len(outcomes.predicted)

    def chosen(rows: torch.Tensor) -> Policy:
        return certified(outcomes.rows(rows), Confidence, risk=risk, delta=DELTA, against=against)

    for _ in range(SPLITS):
        policy = chosen(torch.randint(size, (size // 2,), generator=draw))
        failures += true_risk(policy, outcomes, against) > risk
        assert policy.certificate is not None
        speedups.append(policy.certificate.speedup)
        order = torch.randperm(size, generator=draw)
        half = chosen(order[: size // 2])
        beyond += true_risk(half, outcomes.rows(order[size // 2 :]), against) > risk
    print(
        f"{against}, of {SPLITS} above {risk}: {failures} draws, {beyond} splits; "
        f"speed-up {sum(speedups) / SPLITS:.2f}"
    )
    assert failures <= MOST
    assert beyond <= MOST
    assert sum(speedups) / SPLITS > 1.2
