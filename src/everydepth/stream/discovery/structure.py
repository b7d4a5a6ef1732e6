"""`Structure`: what one batch revealed about a model."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from everydepth.errors import SettingError, UnsupportedModelError
from everydepth.stream.block import Block
from everydepth.stream.contract import Task
from everydepth.stream.discovery.readout import Parts, Pick
from everydepth.stream.discovery.tail import Tail

FAILURES = (
    RuntimeError, TypeError, ValueError, IndexError, KeyError, AttributeError, AssertionError,
    ImportError,
)  # fmt: skip
"""What a model may raise on a batch it does not accept."""


@dataclass(frozen=True)
class Readout:
    """How a state becomes a prediction.

    how: "modules" if pick, norms and head are known; "head" if only the head is, and the tail
        computes its input; "tail" if the tail computes the prediction.
    picked: what `pick` does, in words. late: the model picks after its head.
    exact: the modules reproduce the model's own prediction bit for bit.
    """

    how: str
    head: nn.Module
    parts: Parts
    pick: Pick | None = None
    picked: str = ""
    late: bool = False
    exact: bool = False

    def read(self, h: Tensor, batch: Mapping[str, Any]) -> Tensor:
        """The prediction, by the modules."""
        assert self.pick is not None
        x = h if self.late else self.pick(h, batch)
        for step in self.parts.before:
            x = step(x)
        x = self.head(x)
        return self.pick(x, batch) if self.late else x


@dataclass(frozen=True)
class Structure:
    """What one batch revealed about a model.

    missing: block (from 1) -> why its branches are unknown.
    others: the names of other chains in the model.
    idle: modules of the blocks' class in their lists that were not called.
    early: paths of residual blocks before the stream, from which the model reads more than one
        state.
    behind: norms with running statistics that are called after the last block.
    axis: the batch dimension of a state. padding: the batch key of its mask.
    outputs: numbers per prediction. returned: the names of what the model returns that may be its
        prediction; the first of them is.
    batch: the batch that was run.
    """

    blocks: tuple[Block, ...]
    tail: Tail
    readout: Readout
    task: Task
    paths: tuple[str, ...]
    missing: Mapping[int, str]
    others: tuple[str, ...]
    idle: tuple[nn.Module, ...]
    early: tuple[str, ...]
    behind: tuple[nn.Module, ...]
    axis: int
    padding: str
    outputs: int
    returned: tuple[str, ...]
    batch: Mapping[str, Any]


_NAMES = ("logits", "prediction_logits", "logits_per_image")


def predictions_in(output: Any) -> dict[str, Tensor]:
    """What may be the prediction in a model's output: float tensors with numbers for every row.

    By the names and numbers that lead to them, as in "scores" or "1.0"; "" if there is only one.
    """
    held = output
    if not isinstance(output, (Tensor, Mapping, tuple, list)):
        told = {name: getattr(output, name) for name in _NAMES if hasattr(output, name)}
        held = told | getattr(output, "__dict__", {})
    values = dict(_named("", held))
    found = {n: t for n, t in values.items() if t.is_floating_point() and t.ndim > 1}
    if found:
        return found
    kinds = [f"{tuple(t.shape)} {str(t.dtype).removeprefix('torch.')}" for t in values.values()]
    where = "" if isinstance(output, Tensor) else f" in its {type(output).__name__}"
    raise UnsupportedModelError(
        f"the model returns {', '.join(kinds) or 'no tensors'}{where}, but a prediction is a float "
        "tensor (rows, ..., scores); let its forward return scores, such as logits, or one number "
        "per row as (rows, 1)"
    )


def _named(name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    """The tensors inside nested tuples, lists and mappings, by their names."""
    if isinstance(value, Tensor):
        yield name, value
        return
    value = value._asdict() if hasattr(value, "_asdict") else value
    value = dict(enumerate(value)) if isinstance(value, (tuple, list)) else value
    for key, item in value.items() if isinstance(value, Mapping) else ():
        yield from _named(f"{name}.{key}" if name else str(key), item)


def usual(output: Any, found: Mapping[str, Tensor]) -> str | None:
    """The name of the prediction if there is one alone or a name says it; else None."""
    # transformers' own outputs name the last state; what they pool of it comes beside.
    names = (*_NAMES, "last_hidden_state") if hasattr(output, "to_tuple") else _NAMES
    return next((n for n in names if n in found), next(iter(found)) if len(found) == 1 else None)


def prediction_in(output: Any, name: str | int | None = None) -> Tensor:
    """The prediction in a model's output. name: the one chosen, if the output has it."""
    found = predictions_in(output)
    if name is not None and str(name) in found:
        return found[str(name)]
    name = usual(output, found)
    if name is None:
        raise SettingError(undecided("the model", found))
    return found[name]


def undecided(who: str, found: Mapping[str, Tensor]) -> str:
    """The message if any of several outputs may be the prediction."""
    each = ", ".join(f"{name!r} {tuple(tensor.shape)}" for name, tensor in found.items())
    return (
        f"{who} returns {len(found)} outputs that may be its prediction: {each}; choose one: "
        f"as_stream(model, output={list(found)[-1]!r})"
    )


def text_config(model: nn.Module) -> Any:
    """The config of a model, or of its text part; None without one."""
    config = getattr(model, "config", None)
    own = getattr(config, "get_text_config", None)
    return config if own is None else own()


def can_cache(model: nn.Module, names: Collection[str], more: bool) -> bool:
    """Whether a model that takes arguments of these names, and perhaps more, may build a cache."""
    if "use_cache" in names:
        return True
    return more and getattr(text_config(model), "use_cache", None) is True


def path_of(model: nn.Module, step: Any) -> str:
    """The path of a module in the model, or the name of a function."""
    if not isinstance(step, nn.Module):
        return step.name
    return next((name for name, m in model.named_modules() if m is step), type(step).__name__)


def identical(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and bool(torch.equal(a.nan_to_num(), b.nan_to_num()))


def close(a: Tensor, b: Tensor) -> bool:
    """Whether two predictions differ by no more than rounding."""
    if a.shape != b.shape:
        return False
    tolerance = {torch.float64: 1e-9, torch.float32: 1e-4}.get(b.dtype, 5e-2)
    scale = float(b.detach().float().nan_to_num().abs().max()) if b.numel() else 0.0
    gap = (a.float().nan_to_num() - b.float().nan_to_num()).abs()
    return not gap.numel() or float(gap.max()) <= tolerance * max(scale, 1e-3)
