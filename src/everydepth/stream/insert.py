"""A deeper model that computes the same function: one more block, whose output is zero."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, overload

import torch
from torch import nn

from everydepth.config import checked
from everydepth.errors import (
    BatchError,
    DepthError,
    NonFiniteError,
    SettingError,
    UnsupportedModelError,
)
from everydepth.stream.block import Block
from everydepth.stream.contract import ResidualStream
from everydepth.stream.edit import block_copy, shapes
from everydepth.stream.modes import evaluating
from everydepth.stream.registry import as_stream
from everydepth.stream.wrapping import check_copied, check_plain, rewrapped, unwrapped

Model = TypeVar("Model", bound=nn.Module)


@overload
def insert(
    model: Model,
    after: int,
    *,
    like: int | None = None,
    init: str = "fresh",
    share: bool = False,
    **options: Any,
) -> Model: ...
@overload
def insert(
    model: ResidualStream,
    after: int,
    *,
    like: int | None = None,
    init: str = "fresh",
    share: bool = False,
    **options: Any,
) -> nn.Module: ...
@checked
def insert(
    model: nn.Module | ResidualStream,
    after: int,
    *,
    like: int | None = None,
    init: str = "fresh",
    share: bool = False,
    **options: Any,
) -> nn.Module:
    """A model of the same class with one more block after depth `after` (0: before the first).

    The new block's branches end in a zero projection, so in eval mode the output is the same bit
    for bit. Config, layer numbers and per-layer lists are updated, so that `save_pretrained` and
    `from_pretrained` keep working. In training mode, dropout and batch statistics act inside the
    new block, but its output is still zero.

    A post-norm network applies a norm to every sum, and `Norm(h + 0)` is not h, so its new block
    omits these norms. The stock class cannot build such a block: the deeper model can be trained,
    cut and exported as "onnx", but not as "hf" (`export` refuses it).

    like: the block (from 1) whose kind and shape the new one has; by default the block before it,
        or the one after it if that changes the shape.
    init: "fresh" uses the model's own initialization; "copy" the weights of `like`, except the last
        projection of each branch.
    share: use the model's own tensors instead of copies, except in the new block.

    >>> big = ed.insert(model, after=2).eval()
    >>> images = test.pixel_values[:4]
    >>> big.config.num_hidden_layers, torch.equal(big(images).logits, model(images).logits)
    (4, True)
    """
    return inserted(as_stream(model, **options), after, like=like, init=init, share=share).model


def inserted(
    stream: ResidualStream,
    after: int,
    *,
    like: int | None = None,
    init: str = "fresh",
    share: bool = False,
    trainable: bool = False,
) -> ResidualStream:
    """`insert` that takes a stream and returns the deeper model's stream.

    trainable: if a branch ends in a norm, zero the *linear* map before it and make the norm
        neutral, instead of zeroing the norm: the map then gets a gradient, and the block is still
        silent in eval mode.
    """
    if init not in ("fresh", "copy"):
        raise SettingError(f"init={init!r}; use 'fresh' or 'copy'")
    check_copied(stream.model)
    check_plain(stream.model, "insert")
    stream.check_depth(after)
    like, copyable = template(stream, after, like)
    if init == "copy" and not copyable:
        raise DepthError(
            f"after={after}: there is no block of this shape to copy, because block {like} changes "
            "the shape; use init='fresh'"
        )
    pattern = stream.blocks[like - 1].module
    block = block_copy(pattern) if copyable else stream.block_like(like)
    assert block is not None
    block.train(pattern.training)
    grown = stream.inserted(after, block, like, share=share)
    try:
        deeper = as_stream(rewrapped(stream.model, grown), **stream.options)
    except (BatchError, UnsupportedModelError) as error:
        raise UnsupportedModelError(
            f"{stream.name} cannot run a block more after depth {after}: its forward needs "
            f"{stream.depth} blocks, or numbers them ({error})"
        ) from error
    if deeper.depth == stream.depth:
        raise UnsupportedModelError(
            f"{stream.name} does not call a new block after depth {after}: its forward always runs "
            f"{stream.depth} blocks, whatever its list holds, so no block can be inserted there"
        )
    if _leave_out_norms(deeper.blocks[after]):
        deeper = as_stream(deeper.model, **stream.options)
    new = deeper.blocks[after]
    if init == "fresh":
        initialize(unwrapped(stream.model), new.module)
    with torch.no_grad():
        for branch in new.branches:
            last = branch.zeroed()
            if trainable and branch.mixing is not None:
                _neutralize(branch.proj)
                last = (
                    parameter
                    for module in (branch.mixing, *branch.others)
                    for parameter in module.parameters(recurse=False)
                )
            for parameter in last:
                parameter.zero_()
    _check_same(stream, deeper, after)
    return deeper


def _neutralize(norm: nn.Module) -> None:
    """Scale 1, shift 0, and running statistics 0 and 1."""
    reset: Any = getattr(norm, "reset_parameters", None)
    if reset is not None:
        reset()
        return
    for name, parameter in norm.named_parameters(recurse=False):
        parameter.fill_(float("bias" not in name))


@torch.no_grad()
def _check_same(stream: ResidualStream, deeper: ResidualStream, after: int) -> None:
    """Raise if a silent block changed the model's function."""
    batch = stream.trial()
    if batch is None:
        return
    found: list[torch.Tensor] = []
    for each in (stream, deeper):
        with evaluating(each):
            found.append(each.prediction(each.call(each.arguments(batch, None))))
    if not found[0].isfinite().all():
        raise NonFiniteError(
            f"{stream.name} predicts NaN or infinity even on numbers made up; look at its weights",
            stream.depth,
        )
    if not torch.equal(*found):
        raise UnsupportedModelError(
            f"a silent block after depth {after} changes what {stream.name} computes: later blocks "
            "depend on their number, or the model also reads intermediate blocks; insert "
            f"after={stream.depth}"
        )


def sites(model: nn.Module | ResidualStream, **options: Any) -> tuple[int, ...]:
    """The depths after which a block can be inserted; empty if there are none."""
    stream = as_stream(model, **options)
    return tuple(after for after in range(stream.depth + 1) if _choices(stream, after))


def initialize(model: nn.Module, block: nn.Module) -> None:
    """Initialize a block as the model itself would.

    Parameters that neither the model nor their module can initialize (a scale, a token) keep the
    values of the block that was copied.
    """
    own: Any = getattr(model, "_init_weights", None)
    if own is not None and not _takes_one(own):
        own = None  # some models' method of this name needs more than the module
    with torch.no_grad():
        for module in block.modules():
            if own is not None:
                own(module)
            reset: Any = getattr(
                module, "reset_parameters" if own is None else "reset_running_stats", None
            )
            if reset is not None:
                reset()


def _takes_one(function: Callable[..., Any]) -> bool:
    try:
        inspect.signature(function).bind(None)
    except TypeError:
        return False
    return True


def template(stream: ResidualStream, after: int, like: int | None) -> tuple[int, bool]:
    """The block (from 1) to use as a pattern after a depth, and whether it can be copied."""
    choices = _choices(stream, after)
    if like is None and choices:
        return next(iter(choices.items()))
    if like is not None and like in choices:
        return like, choices[like]
    near = _near(stream, after)
    reason = next(filter(None, (refusal(stream.blocks[n - 1]) for n in near)), None)
    if not choices and reason is not None:
        legal = sites(stream)
        rest = f"; use one of {list(legal)}" if legal else ""
        error = DepthError if legal else UnsupportedModelError
        raise error(
            f"no block can be inserted after depth {after} of {stream.name}: {reason}{rest}"
        )
    raise DepthError(
        f"like={like}, but after depth {after} of {stream.name} a block must be like one of "
        f"{sorted(choices)}; leave it out to take {next(iter(choices))}"
    )


def _choices(stream: ResidualStream, after: int) -> dict[int, bool]:
    """The blocks that may serve as a pattern after a depth, and whether each can be copied."""
    forms = [shapes(block.module) for block in stream.blocks]
    # Last, a block like no other: T5's first has a bias that no config gives to a second one.
    near = sorted(_near(stream, after), key=lambda number: forms.count(forms[number - 1]) == 1)
    reasons = {number: refusal(stream.blocks[number - 1]) for number in near}
    found = {number: True for number in near if reasons[number] is None}
    # Without stages, all blocks have the same shape and any will do.
    if found and all(refusal(block) is None for block in stream.blocks):
        found |= dict.fromkeys(range(1, stream.depth + 1), True)
    if not found and after > 0 and stream.block_like(after) is not None:
        return {after: False}
    return found


def _near(stream: ResidualStream, after: int) -> list[int]:
    """The blocks on both sides of a depth; of a gap the one behind it, which gets that state."""
    numbers = (after + 1,) if after in stream.gaps else (after, after + 1)
    return [number for number in numbers if 1 <= number <= stream.depth]


def refusal(block: Block) -> str | None:
    """Why a block with silent branches would not be the identity; None if it would."""
    if not block.branches:
        return (
            "its branches are unknown, and with them the projections to zero; write an adapter "
            "that declares them (docs/add-an-architecture.md)"
        )
    for branch in block.branches:
        if branch.skip is not None:
            kind = type(branch.skip).__name__
            return f"the skip of its {branch.kind} branch is not the identity ({kind})"
        if not isinstance(branch.weight, float) or branch.weight != 1.0:
            by = f"{branch.weight:.4g}" if isinstance(branch.weight, float) else "a parameter"
            return f"it multiplies the skip of its {branch.kind} branch by {by}"
        for last in branch.last:
            if next(last.parameters(), None) is None:
                return (
                    f"its {branch.kind} branch ends in {type(last).__name__}, which has no weights "
                    "to zero"
                )
            if any(True for _ in _inside(last)):
                return (
                    f"the last map of its {branch.kind} branch is somewhere inside "
                    f"{type(last).__name__}, so it is unknown which weights to zero"
                )
        if _norms(branch.post) and branch.post not in set(block.module.modules()):
            kind = type(branch.post).__name__
            return (
                f"the model applies {kind} to the sum outside the block, and {kind}(h + 0) is not "
                "h, so the function would change"
            )
    return None


def _inside(last: nn.Module) -> Iterator[nn.Parameter]:
    """Parameters of submodules of a last map, except those of an adapter."""
    if not hasattr(last, "get_base_layer"):
        for child in last.children():
            yield from child.parameters()


def _norms(post: nn.Module | None) -> bool:
    # The output of a ReLU is not negative, so another ReLU does not change it.
    return post is not None and not isinstance(post, (nn.ReLU, nn.Identity))


def _leave_out_norms(block: Block) -> bool:
    """Remove the norms that a new block applies to its sums; return whether it had any."""
    posts = {branch.post for branch in block.branches if _norms(branch.post)}
    for path, module in list(block.module.named_modules()):
        if module in posts:
            block.module.set_submodule(path, nn.Identity())
    return bool(posts)
