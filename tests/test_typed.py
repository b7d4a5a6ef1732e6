"""While tests run, wrong types and shapes that do not fit together are errors."""

from __future__ import annotations

import inspect
import sys
from typing import Any

import pytest
import torch
from beartype.roar import BeartypeCallHintParamViolation
from jaxtyping import TypeCheckError
from tests.helpers import typed
from tests.zoo import ENTRIES

import everydepth as ed
from everydepth.ablations.memorize import wilson
from everydepth.exits.policies import exit_depths
from everydepth.stream.block import Branch
from everydepth.stream.discovery import recording


def test_a_wrong_type_is_an_error() -> None:
    wrong: Any = "eight"
    with pytest.raises(BeartypeCallHintParamViolation):
        wilson(wrong, 10)


def test_a_wrong_type_in_a_dataclass_is_an_error() -> None:
    layer, wrong = torch.nn.Linear(2, 2), 3
    Branch(kind="mlp", entry=layer, out=layer, proj=layer)
    with pytest.raises(BeartypeCallHintParamViolation):
        Branch(kind="mlp", entry=layer, out=layer, proj=wrong)  # pyright: ignore[reportArgumentType]


def test_shapes_that_do_not_fit_together_are_an_error() -> None:
    with pytest.raises(TypeCheckError):
        exit_depths(torch.rand(4, 3), torch.rand(2))


def test_checks_can_be_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxtyping.config.jaxtyping_disable", True)
    wrong: Any = "eight"
    with pytest.raises(TypeError):  # scipy's own
        wilson(wrong, 10)


@pytest.fixture
def checked_too(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """What runs for every operation is checked as well, wherever its module or class holds it."""
    owners = [sys.modules[name] for name in typed.HOT]
    owners += [v for m in owners for v in vars(m).values() if inspect.isclass(v)]
    found: set[str] = set()
    for owner in owners:
        for name, value in list(vars(owner).items()):
            kind = type(value) if isinstance(value, property | classmethod | staticmethod) else None
            function = getattr(value, "fget", getattr(value, "__func__", value))
            if inspect.isfunction(function) and function in typed.hot:
                checked = typed.hot[function]
                monkeypatch.setattr(owner, name, checked if kind is None else kind(checked))
                found.add(function.__qualname__)
    assert found == {function.__qualname__ for function in typed.hot}
    return found


@pytest.mark.parametrize(
    "name",
    [
        "ResidualMLP-norm1-skips1-regression0",
        "CifarResNet-post-projection",
        "Beit-mean-pooling",
        "Bert-SequenceClassification",
        "GPTNeoX-parallel-CausalLM-left",
        "Detr-plain",
    ],
)
def test_what_runs_for_every_operation_keeps_its_types(name: str, checked_too: set[str]) -> None:
    assert {"tensors_in", "Recording.key", "ModuleCall.__init__", "base"} <= checked_too
    model, batch = ENTRIES[name].make()
    assert ed.check_stream(model, batch).ok


def test_what_runs_for_every_token_keeps_its_types(checked_too: set[str]) -> None:
    assert {"Pace.drafts", "Experience.of", "Recent.__init__", "Ledger.plain"} <= checked_too
    model, batch = ENTRIES["Llama-untied-CausalLM-left"].make()
    found = ed.generate(model, batch["input_ids"], max_new_tokens=20, draft_depth=1)
    assert found.sequences.shape[0] == 3


@pytest.mark.usefixtures("checked_too")
def test_a_wrong_type_in_what_runs_for_every_operation_is_then_an_error() -> None:
    with pytest.raises(BeartypeCallHintParamViolation):
        recording.Recording().key("no tensor")  # pyright: ignore[reportArgumentType]
