"""Plain references: no cache, no batch, no padding; one forward pass a token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from tests.zoo import CAUSAL, PAD, VOCABULARY
from torch import Tensor, nn

from everydepth.stream import as_stream

DECODERS = sorted({name.rsplit("-", 2)[0] for name in CAUSAL})


def decoder(name: str) -> str:
    return f"{name}-CausalLM-left"


def talkative(name: str, *, quiet_after: int | None = None, scale: float = 0.3) -> nn.Module:
    """A random decoder in float64 whose text varies.

    quiet_after: scale what the blocks above this depth add, so that it often predicts the same.
    """
    model, _ = CAUSAL[name].make(torch.float64)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(6)
        for block in as_stream(model).blocks[quiet_after:] if quiet_after is not None else ():
            for branch in block.branches:
                for parameter in branch.proj.parameters():
                    parameter.mul_(scale)
    return model


def prompts(rows: int, longest: int = 6, seed: int = 0) -> list[list[int]]:
    """Token lists of different lengths."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest + 1, (rows,), generator=generator).tolist()
    return [torch.randint(3, VOCABULARY, (n,), generator=generator).tolist() for n in lengths]


def padded(rows: list[list[int]], side: str) -> dict[str, Tensor]:
    longest = max(map(len, rows))
    pads = [longest - len(row) for row in rows]
    left = side == "left"
    ids = [[PAD] * n + row if left else row + [PAD] * n for n, row in zip(pads, rows, strict=True)]
    mask = [
        [0] * n + [1] * len(row) if left else [1] * len(row) + [0] * n
        for n, row in zip(pads, rows, strict=True)
    ]
    return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}


@torch.no_grad()
def reference(
    model: nn.Module,
    row: list[int],
    new: int,
    *,
    depth: int | None = None,
    stop: int | None = None,
    leaves: Callable[[Tensor, int], bool] | None = None,
) -> tuple[list[int], list[int]]:
    """Greedy tokens of one row and the depths they were read out at."""
    stream = as_stream(model)
    top = stream.depth if depth is None else depth
    text, exits = list(row), []
    for _ in range(new):
        states = stream.observe({"input_ids": torch.tensor([text])})
        at = top
        if leaves is not None:
            at = next(
                d for d in range(1, top + 1) if d == top or leaves(states.logits(d)[0, -1], d)
            )
        text.append(int(states.logits(at)[0, -1].argmax()))
        exits.append(at)
        if text[-1] == stop:
            break
    return text[len(row) :], exits


def references(
    model: nn.Module, rows: list[list[int]], new: int, **options: Any
) -> list[list[int]]:
    return [reference(model, row, new, **options)[0] for row in rows]
