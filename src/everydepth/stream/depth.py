"""A plain model at a depth."""

from __future__ import annotations

from typing import Any, TypeVar, overload

from torch import nn

from everydepth.stream.contract import ResidualStream
from everydepth.stream.registry import as_stream

Model = TypeVar("Model", bound=nn.Module)


@overload
def at_depth(model: Model, depth: int, *, share: bool = False, **options: Any) -> Model: ...
@overload
def at_depth(
    model: ResidualStream, depth: int, *, share: bool = False, **options: Any
) -> nn.Module: ...
def at_depth(
    model: nn.Module | ResidualStream, depth: int, *, share: bool = False, **options: Any
) -> nn.Module:
    """A plain model of the same class with `depth` blocks, its config corrected.

    Its output is the readout of the full model at that depth. `share=True` uses the full model's
    own parameters, so training one trains the other; by default they are copied.

    >>> small = ed.at_depth(model, 2)
    >>> type(small) is type(model), small.config.num_hidden_layers
    (True, 2)
    >>> batch = test.batch(range(4))
    >>> full = ed.as_stream(model).observe(batch)
    >>> torch.allclose(small(**batch).logits, full.logits(2), atol=1e-5)
    True
    """
    stream = as_stream(model, **options)
    return stream.truncated(stream.check_depth(depth, lowest=1), share=share)
