"""A plain model at a depth, or with some of its blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar, overload

from torch import nn

from everydepth.errors import DepthError
from everydepth.stream.contract import ResidualStream
from everydepth.stream.registry import as_stream
from everydepth.stream.wrapping import rewrapped

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
def at_depth(
    model: nn.Module | ResidualStream,
    depth: int | None = None,
    *,
    keep: Sequence[int] | None = None,
    share: bool = False,
    **options: Any,
) -> nn.Module:
    """A plain model of the same class with `depth` blocks, its config corrected.

    Its output is the readout of the full model at that depth. `share=True` uses the full model's
    own parameters, so training one trains the other; by default they are copied.

    keep: instead of the first `depth` blocks these, from 1, in their order (`choose_blocks` finds
        some).

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
            f"depth={depth} and keep={keep}; give one of them: how many blocks from the first on, "
            "or which"
        )
    if depth is not None:
        small = stream.truncated(stream.check_depth(depth, lowest=1), share=share)
    else:
        small = stream.kept(_checked(stream, list(keep or ())), share=share)
    return rewrapped(stream.model, small)


def _checked(stream: ResidualStream, keep: list[int]) -> list[int]:
    if not keep or sorted(set(keep)) != keep:
        raise DepthError(
            f"keep={keep}; name blocks of {stream.name} from 1 to {stream.depth}, each once, in "
            "their order"
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
