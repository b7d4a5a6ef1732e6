"""The default models of the playground, trained once, offline, and saved.

`make demo` trains two digit classifiers. Whatever is missing is trained here: those, a small
language model, and a surface learned end-to-end and with LPA.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from everydepth.app.tales import tales
from everydepth.data import load_digits, surface_data, token_blocks
from everydepth.data.byte_tokens import byte_tokenizer
from everydepth.objectives import Objective, end_to_end, lpa
from everydepth.results.saving import is_saved
from everydepth.runs import Run
from everydepth.tracing import trace
from everydepth.training import EveryDepth, fit
from everydepth.training.snapshot import kept_random_state

DEMO = Path("runs/demo")
"""Where `make demo` saves its runs."""

ROW = 64  # tokens of a tale used for training
WAYS: Mapping[str, Callable[[], Objective]] = {"end-to-end": end_to_end, "lpa": lpa}
SURFACE = "asymmetric_power_modulated_wave"


@dataclass(frozen=True, kw_only=True)
class Effort:
    """How long to train each model; the defaults take seconds."""

    digits_epochs: int = 8
    tales: int = 3000
    tales_steps: int = 500
    surface_points: int = 4000
    surface_epochs: int = 40
    progress: bool = True


QUICK = Effort()


@kept_random_state()
def prepare(
    folder: Path = DEMO, effort: Effort = QUICK, *, say: Callable[[str], None] = print
) -> None:
    """Train the models that are missing in the folder; resumes after an interruption."""
    for what, is_there, make in (
        ("two digit classifiers", _has_digits, _digits),
        ("a language model of small tales", _has_tales, _tales),
        (
            "a surface, end-to-end and with LPA",
            lambda folder: is_learned(folder, SURFACE),
            lambda folder, effort: learn_surface(folder, SURFACE, effort),
        ),
    ):
        if not is_there(folder):
            say(f"training {what} for the playground (once; saved in {folder})")
            make(folder, effort)


def surface_folder(folder: Path, name: str, way: str) -> Path:
    return folder / "surfaces" / name / way


def is_learned(folder: Path | None, name: str) -> bool:
    return folder is not None and all(_whole(surface_folder(folder, name, way)) for way in WAYS)


@kept_random_state()
def learn_surface(
    folder: Path,
    name: str,
    effort: Effort = QUICK,
    *,
    progress: Callable[[float], object] = lambda _: None,
) -> None:
    """Train a surface end-to-end and with LPA, from the same weights, unless it is saved."""
    from everydepth.architectures.residual_mlp import ResidualMLP, ResidualMLPConfig

    train, test = surface_data(name, n_train=effort.surface_points, n_test=1000)
    for place, (way, objective) in enumerate(WAYS.items()):
        progress(place / len(WAYS))
        run = surface_folder(folder, name, way)
        if _whole(run):
            continue
        torch.manual_seed(0)
        model = ResidualMLP(ResidualMLPConfig(architectures=["ResidualMLP"]))
        how = {"epochs": effort.surface_epochs, "batch_size": 100, "lr": 5e-3}
        _learned(EveryDepth(model, objective()), train, test, run, effort, f"surface:{name}", **how)
    progress(1.0)


# -- the three parts -------------------------------------------------------------------------------


def _has_digits(folder: Path) -> bool:
    return _whole(folder / "lpa") or all(_whole(folder / "digits" / way) for way in WAYS)


def _digits(folder: Path, effort: Effort) -> None:
    from transformers import ViTConfig, ViTForImageClassification

    for way, objective in WAYS.items():
        run = folder / "digits" / way
        torch.manual_seed(0)
        model = ViTForImageClassification(
            ViTConfig(
                image_size=8,
                patch_size=2,
                num_channels=1,
                num_labels=10,  # pyright: ignore[reportCallIssue]  # of every config
                hidden_size=64,
                num_hidden_layers=6,
                num_attention_heads=4,
                intermediate_size=128,
            )
        )
        net, (train, test) = EveryDepth(model, objective()), map(load_digits, ("train", "test"))
        how = {"epochs": effort.digits_epochs, "batch_size": 64, "lr": 2e-3}
        _learned(net, train, test, run, effort, "digits", **how)


def _has_tales(folder: Path) -> bool:
    return _whole(folder / "tales") and (folder / "tales" / "model" / "tokenizer.json").is_file()


def _tales(folder: Path, effort: Effort) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    run = folder / "tales"
    texts = tales(effort.tales)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = byte_tokenizer(texts).backend_tokenizer
    tokenizer.save(str(folder / "tokenizer.json"))
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=tokenizer.get_vocab_size(),
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=5,
            num_attention_heads=4,
            max_position_embeddings=256,
            bos_token_id=0,
            eos_token_id=0,
            pad_token_id=0,
        )
    )

    def rows(some: list[str]) -> Any:
        """One tale per row, from its beginning, which its end refers to."""
        lines = (line.ids + [0] * ROW for line in tokenizer.encode_batch(some))
        return token_blocks([token for line in lines for token in line[:ROW]], ROW)

    how = {"steps": effort.tales_steps, "batch_size": 16, "lr": 6e-3, "clip": 1.0}
    test = rows(tales(100, seed=1))
    _learned(EveryDepth(model, lpa()), rows(texts), test, run, effort, None, **how)
    # Last: it marks the run as complete.
    (folder / "tokenizer.json").replace(run / "model" / "tokenizer.json")


def _whole(run: Path) -> bool:
    """Whether a run is complete: trained to the end, and traced."""
    parts = ("results.json", "model/model.safetensors")
    return (
        Run.exists(run)
        and all((run / part).is_file() for part in parts)
        and is_saved(run / "trace")
    )


def _learned(
    net: EveryDepth, train: Any, test: Any, run: Path, effort: Effort, data: str | None, **how: Any
) -> None:
    """Train a run, resuming it if needed, and trace it. data: the dataset's name, for the run."""
    keep: dict[str, Any] = {"run": run, "resume": True, "progress": effort.progress}
    about = None if data is None else {"data": data}
    fit(net, train, schedule="one_cycle", about=about, **keep, **how)
    trace(net.model.eval(), test, progress=False).save(run / "trace")
