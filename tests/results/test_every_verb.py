"""What any verb gives is saved, loaded, tabulated and drawn without a word about the verb."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import pytest
import torch
import transformers as hf

import everydepth as ed
from everydepth.results import Results
from everydepth.runs.sweep import sweep
from everydepth.serving import Arrival, Price, simulate


@pytest.fixture(scope="module")
def model() -> hf.PreTrainedModel:
    torch.manual_seed(0)
    config = hf.ViTConfig(
        image_size=8,
        patch_size=4,
        num_channels=1,
        num_labels=3,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=16,
    )
    return hf.ViTForImageClassification(config).eval()


def rows(count: int = 24) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randn(count, 1, 8, 8, generator=generator)
    return {"pixel_values": pixels, "labels": torch.arange(count) % 3}


def squared(*, n: int, seed: int) -> dict[str, int]:
    return {"square": n * n + seed}


VERBS: dict[str, Callable[[hf.PreTrainedModel], Results]] = {
    "trace": lambda m: ed.trace(m, rows(), progress=False),
    "profile": lambda m: ed.profile(m, rows(), batch_size=4, repeats=1, progress=False),
    "evaluation": lambda m: ed.evaluate(m, rows(), ed.Confidence(threshold=0.5)),
    "ablation": lambda m: ed.ablate(m, rows(), c=(0.0, 1.0), progress=False),
    "memorization": lambda m: ed.memorization(m, rows(), flipped=[1, 2], progress=False),
    "gradient_study": lambda m: ed.gradient_study(
        m, rows(), rows(), flipped=[1, 2], progress=False
    ),
    "audit": lambda m: ed.audit(m, rows(), progress=False),
    "growth_score": lambda m: ed.growth.score(m, rows(), progress=False),
    "growth_comparison": lambda m: ed.growth.compare(
        m,
        rows(),
        rows(),
        steps=1,
        evaluations=1,
        seeds=(0,),
        arms=("longer", "stacked"),
        progress=False,
    ),
    "fit": lambda m: ed.fit(
        ed.as_stream(hf.ViTForImageClassification(m.config)),
        [rows(4)],
        [rows(4)],
        steps=1,
        progress=False,
    ),
    "choice": lambda m: ed.choose_blocks(m, rows(), keep=1, progress=False),
    "load": lambda m: simulate(
        ed.as_stream(m),
        [Arrival(at=0.0, prompt=1, tokens=2)],
        Price(call=1e-3, token=1e-4, readout=1e-4),
    ),
    "sweep": lambda _: sweep({"n": [1, 2], "seed": [0, 1]}, squared, progress=False),
}


def test_there_is_an_example_of_every_kind() -> None:
    for package in ("ablations", "exits", "growth", "runs", "serving", "tracing", "training"):
        module = import_module(f"everydepth.{package}")
        for name in dir(module):  # each is imported when it is first asked for
            getattr(module, name)
    ours = [kind for kind in Results.__subclasses__() if kind.__module__.startswith("everydepth.")]
    assert {kind.own_kind for kind in ours} == set(VERBS)


@pytest.mark.parametrize("kind", VERBS)
def test_what_a_verb_gives_is_loaded_without_naming_the_verb(
    kind: str, model: hf.PreTrainedModel, tmp_path: Path
) -> None:
    made = VERBS[kind](model)
    assert made.kind == kind
    loaded = Results.load(made.save(tmp_path / "answers"))
    assert type(loaded) is type(made)
    assert loaded.to_json() == made.to_json()
    assert str(loaded.table()) == str(made.table())
    loaded.figure().draw_without_rendering()
