"""Observing works where models really run: compiled, in bfloat16, checkpointed, distributed."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tests.zoo import ENTRIES
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import everydepth as ed
from everydepth.stream import States

KINDS = ["ViT", "Llama-tied-CausalLM-left", "Bert-SequenceClassification"]


def summed(states: States) -> Tensor:
    return torch.stack([states.logits(d).square().mean() for d in range(1, len(states))]).sum()


def all_depths_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return summed(ed.as_stream(model).observe(batch))


@pytest.mark.parametrize("kind", KINDS)
def test_a_compiled_model_is_observed(kind: str) -> None:
    model, batch = ENTRIES[kind].make()
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad():
        compiled(**batch)  # compiled once before any hook is there
        states = ed.as_stream(compiled).observe(batch)
        plain = ed.as_stream(model).observe(batch)
    for ours, theirs in zip(states, plain, strict=True):
        assert torch.equal(ours, theirs)


INSIDE = """
import torch
import everydepth as ed
from tests.zoo import ENTRIES

model, batch = ENTRIES["ViT"].make()
stream = ed.as_stream(model)

def loss(pixel_values):
    states = stream.observe(pixel_values)
    return sum(states.logits(d).square().mean() for d in range(1, 5))

compiled = torch.compile(loss, backend="eager")
for scale in (1.0, 2.0, 3.0):
    x = scale * batch["pixel_values"]
    assert torch.equal(compiled(x), loss(x)), scale
"""


def test_observing_inside_a_compiled_function_sees_every_call() -> None:
    """In a process of its own: Dynamo cannot trace the run-time type checks of the tests."""
    subprocess.run([sys.executable, "-c", INSIDE], check=True, timeout=120)


@pytest.mark.parametrize("kind", KINDS)
def test_compiled_blocks_are_observed_and_driven(kind: str) -> None:
    model, batch = ENTRIES[kind].make()
    stream = ed.as_stream(model)
    with torch.no_grad():
        expected = stream.observe(batch)
        stream.compile_blocks(backend="aot_eager")
        for _ in range(2):
            for ours, theirs in zip(stream.observe(batch), expected, strict=True):
                torch.testing.assert_close(ours, theirs)
        driven = stream.advance(stream.start(batch))
    torch.testing.assert_close(driven.h, expected[4])


@pytest.mark.parametrize("kind", KINDS)
def test_autocast_gives_the_models_own_output(kind: str) -> None:
    model, batch = ENTRIES[kind].make()
    stream = ed.as_stream(model)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        states = stream.observe(batch)
        assert torch.equal(stream.readout(states[4], 4, batch), model(**batch).logits)
        assert torch.equal(stream.advance(stream.start(batch)).h, states[4])


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_gradient_checkpointing_changes_no_gradient(kind: str, reentrant: bool) -> None:
    model, batch = ENTRIES[kind].make(torch.float64)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    model.train()
    all_depths_loss(model, batch).backward()
    expected = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    all_depths_loss(model, batch).backward()
    for name, gradient in expected.items():
        torch.testing.assert_close(model.get_parameter(name).grad, gradient, rtol=0, atol=1e-12)


@pytest.fixture
def one_process_group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_process_group")
@pytest.mark.parametrize("kind", KINDS)
def test_a_distributed_model_is_observed_with_its_gradient_hooks(kind: str) -> None:
    model, batch = ENTRIES[kind].make(torch.float64)
    all_depths_loss(model, batch).backward()
    expected = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    wrapped = DistributedDataParallel(model)
    all_depths_loss(wrapped, batch).backward()
    for name, gradient in expected.items():
        torch.testing.assert_close(model.get_parameter(name).grad, gradient, rtol=0, atol=1e-12)
    report = ed.check_stream(wrapped, batch)
    assert report.ok, str(report)
