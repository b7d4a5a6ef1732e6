"""Every supported class keeps the contract of the waist."""

from __future__ import annotations

import pytest
import torch
from tests.zoo import CAUSAL, ENTRIES, MODELS, Entry

import everydepth as ed

# In float32 the first of each family; float64 has the tighter tolerance, and keeps them all.
FAMILIES = {entry.name.partition("-")[0]: entry for entry in reversed(ENTRIES.values())}
CASES = [
    *(pytest.param(one, torch.float64, id=f"{one.name}-float64") for one in ENTRIES.values()),
    *(pytest.param(one, torch.float32, id=f"{one.name}-float32") for one in FAMILIES.values()),
]
EVERY_CLAUSE = {
    "last depth is the model",
    "observe equals drive",
    "branches add up",
    "a zero projection is silent",
    "gradient reaches every block",
    "rows can be selected",
    "truncation gives the same",
    "nothing is left behind",
}


@pytest.mark.parametrize(("entry", "dtype"), CASES)
def test_every_architecture_keeps_the_contract(entry: Entry, dtype: torch.dtype) -> None:
    model, batch = entry.make(dtype)
    report = ed.check_stream(model, batch, **entry.options)
    assert report.ok, str(report)
    held = {check.name for check in report.checks if check.passed}
    wanted = EVERY_CLAUSE | ({"cache equals full forward"} if entry.name in CAUSAL else set())
    assert held == wanted, str(report)


# ResNets, towers and DETR give their states per stage or under other names.
HIDDEN_STATES = {
    name: entry
    for name, entry in MODELS.items()
    if not name.startswith(("ResidualMLP", "CifarResNet", "ResNet", "Detr", "CLIP"))
}


@pytest.mark.parametrize("entry", HIDDEN_STATES.values(), ids=HIDDEN_STATES)
def test_states_are_the_hidden_states_of_transformers(entry: Entry) -> None:
    """An independent witness: what `output_hidden_states` gives, but for the last, normed one."""
    model, batch = entry.make()
    stream = ed.as_stream(model)
    with torch.no_grad():
        states = stream.observe(batch)
        theirs = model(**batch, output_hidden_states=True).hidden_states
    assert len(theirs) == len(states)
    for ours, other in zip(states.h[:-1], theirs[:-1], strict=True):
        assert torch.equal(ours, other)


@pytest.mark.parametrize("entry", ENTRIES.values(), ids=ENTRIES)
def test_the_readout_of_the_last_state_is_the_models_own_output(entry: Entry) -> None:
    model, batch = entry.make()
    stream = ed.as_stream(model, **entry.options)
    with torch.no_grad():
        states = stream.observe(batch)
        expected = stream.prediction(stream.call(stream.arguments(batch, None)))
    assert torch.equal(stream.readout(states[stream.depth], stream.depth, batch), expected)
    assert torch.equal(states.logits(stream.depth), expected)


@pytest.mark.parametrize("entry", ENTRIES.values(), ids=ENTRIES)
def test_training_mode_is_observed_exactly_too(entry: Entry) -> None:
    """Dropout and batch statistics included: the same random state gives the same output."""
    model, batch = entry.make()
    stream = ed.as_stream(model, **entry.options)
    model.train()
    torch.manual_seed(1)
    with torch.no_grad():
        plain = stream.prediction(stream.call(stream.arguments(batch, None)))
        torch.manual_seed(1)
        observed = stream.observe(batch).logits(stream.depth)
    assert torch.equal(plain, observed)
