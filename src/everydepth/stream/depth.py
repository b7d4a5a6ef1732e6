"""A plain model cut to a depth, or with only some of its blocks."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, TypeVar, overload

import torch
from torch import nn

from everydepth.config import checked
from everydepth.errors import DepthError, SettingError, UnsupportedModelError
from everydepth.stream.contract import ResidualStream
from everydepth.stream.cursor import Cursor
from everydepth.stream.discovery.structure import FAILURES, close
from everydepth.stream.modes import evaluating
from everydepth.stream.registry import as_stream
from everydepth.stream.taps import replaced_forward
from everydepth.stream.wrapping import rewrapped, unwrapped, without_values

Model = TypeVar("Model", bound=nn.Module)


@overload
def at_depth(
    model: Model,
    depth: int | None = None,
    *,
    keep: Sequence[int] | None = None,
    share: bool = False,
    **options: Any,
) -> Model: ...
@overload
def at_depth(
    model: ResidualStream,
    depth: int | None = None,
    *,
    keep: Sequence[int] | None = None,
    share: bool = False,
    **options: Any,
) -> nn.Module: ...
@checked
def at_depth(
    model: nn.Module | ResidualStream,
    depth: int | None = None,
    *,
    keep: Sequence[int] | None = None,
    share: bool = False,
    **options: Any,
) -> nn.Module:
    """A plain model of the same class with the first `depth` blocks and a matching config.

    Its output is the readout of the full model at that depth.

    keep: use these blocks (from 1, in order) instead of the first `depth`; see `choose_blocks`.
    share: use the full model's own parameters instead of copies, so that training one trains the
        other.

    >>> small = ed.at_depth(model, 2)
    >>> type(small) is type(model), small.config.num_hidden_layers
    (True, 2)
    >>> batch = test.batch(range(4))
    >>> full = ed.as_stream(model).observe(batch)
    >>> torch.allclose(small(**batch).logits, full.logits(2), atol=1e-5)
    True
    >>> ed.at_depth(model, keep=[1, 3]).config.num_hidden_layers
    2
    """
    stream = as_stream(model, **options)
    if (depth is None) == (keep is None):
        raise DepthError(
            f"depth={depth} and keep={keep}; give one of them: how many blocks to keep, or which"
        )
    if depth is not None:
        numbers = list(range(1, stream.check_depth(depth, lowest=1) + 1))
        small = stream.truncated(len(numbers), share=share)
    else:
        numbers = _checked(stream, list(keep or ()))
        small = stream.kept(numbers, share=share)
    _check_same(stream, small, numbers)
    return rewrapped(stream.model, small)


@torch.no_grad()
def _check_same(stream: ResidualStream, small: nn.Module, numbers: list[int]) -> None:
    """Raise if a model cut to these blocks does not run, or does not predict what they do.

    The first blocks of a model with a config of Hugging Face are not tried: it says how many there
    are, while the forward of any other may count them in its own way.
    """
    inner, first = unwrapped(stream.model), numbers[-1] == len(numbers)
    config = getattr(inner, "config", None)
    if (first and hasattr(config, "to_dict")) or without_values(inner) is not None:
        return
    batch = stream.trial()
    if not batch:
        return
    instead = "run the full model at a depth instead (predict and observe need no cut model)"
    with evaluating(stream), evaluating(small):
        cursor = stream.start(batch)
        for number in numbers:
            cursor = stream.step(_skipping(stream, cursor, number - 1))
        wanted = stream.logits(cursor)
        try:
            with replaced_forward(inner, small.forward):
                output = stream.call(stream.arguments(batch, None))
        except FAILURES as error:
            raise UnsupportedModelError(
                f"{stream.name} with blocks {numbers} does not run ({type(error).__name__}: "
                f"{error}): its forward needs all {stream.depth}, whatever its list holds; "
                f"{instead}"
            ) from error
        try:
            found = stream.prediction(output)
        except SettingError:  # it returns something of each block, so a cut model returns less
            found = as_stream(small, **stream.options).prediction(output)
    if not close(found, wanted):
        these = f"{len(numbers)} of its {stream.depth} blocks" if first else f"blocks {numbers}"
        what = f"it does at depth {numbers[-1]}" if first else "these do one after another"
        raise UnsupportedModelError(
            f"{stream.name} with {these} does not predict what {what}: its forward depends on "
            f"their number or places, or the model also reads other blocks; {instead}"
        )


def _skipping(stream: ResidualStream, cursor: Cursor, to: int) -> Cursor:
    """The cursor at a later depth, whose block is handed what the next one would have been."""
    calls = list(cursor.calls)
    if 0 < cursor.depth < to:
        keys = stream.carried(cursor.depth).keys() & stream.carried(to).keys()
        calls[to] = calls[to].given({key: calls[cursor.depth][key] for key in keys})
    return replace(cursor, depth=to, calls=tuple(calls))


def _checked(stream: ResidualStream, keep: list[int]) -> list[int]:
    if not keep or sorted(set(keep)) != keep:
        raise DepthError(
            f"keep={keep}; name blocks of {stream.name} from 1 to {stream.depth}, each once and in "
            "ascending order"
        )
    for number in keep:
        stream.check_depth(number, lowest=1)
    for number, block in enumerate(stream.blocks, start=1):
        changed = next((branch for branch in block.branches if branch.skip is not None), None)
        if number not in keep and changed is not None:
            raise DepthError(
                f"keep={keep} drops block {number} of {stream.name}, which changes the shape of "
                "the state; keep it"
            )
    return keep


Depths = int | str | Sequence[int] | None
"""Depths to use: one, several, "every 2nd", a slice such as "20:", or None for all."""


def chosen_depths(stream: ResidualStream, depths: Depths, *, lowest: int = 0) -> tuple[int, ...]:
    """The depths that `depths` selects, ascending; the last depth is always included.

    >>> from everydepth.stream import chosen_depths
    >>> chosen_depths(ed.as_stream(model), "every 2nd")  # the same as "::2"
    (0, 2, 3)
    """
    everything = range(lowest, stream.depth + 1)
    if depths is None:
        return tuple(everything)
    if isinstance(depths, str) and re.fullmatch(r"\d+(,\d+)+", depths.replace(" ", "")):
        depths = [int(number) for number in depths.split(",")]  # as on the command line
    if isinstance(depths, str):
        every = re.fullmatch(r"every ([1-9]\d*)(st|nd|rd|th)", depths.strip())
        try:
            part_of = f"::{every[1]}" if every else depths
            bounds = [int(part) if part.strip() else None for part in part_of.split(":")]
            found = list(range(stream.depth + 1)[slice(*bounds)]) if len(bounds) > 1 else None
        except (TypeError, ValueError):
            found = None
        if found is None:
            raise DepthError(
                f"depths={depths!r}; use 'every 2nd', a slice such as '20:' (from 20 on), or a "
                f"list of numbers from {lowest} to {stream.depth}, as in '{lowest},{stream.depth}'"
            )
        found = [depth for depth in found if depth >= lowest]
    else:
        numbers = depths if isinstance(depths, Iterable) else [depths]
        found = [stream.check_depth(depth, lowest=lowest) for depth in numbers]
    if not found:
        raise DepthError(f"depths={depths!r} selects none of {lowest} to {stream.depth}")
    return tuple(sorted({*found, stream.depth}))
