"""Checks of a batch before any work."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from everydepth.errors import BatchError, LabelError
from everydepth.stream.text import encoded, is_text
from everydepth.stream.wrapping import unwrapped

if TYPE_CHECKING:
    from everydepth.stream.contract import ResidualStream


def check_given(
    stream: ResidualStream, batch: Mapping[str, Any] | Tensor | str | Sequence[str]
) -> Mapping[str, Any]:
    """A batch as a mapping; raise if it is empty or lacks what the model needs."""
    if is_text(batch):
        batch = encoded(batch, stream.tokenizer, stream.positions)
    if isinstance(batch, Tensor):
        batch = {stream.inputs[0]: batch}
    if not isinstance(batch, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise BatchError(f"a batch is {type(batch).__name__}; pass a mapping, or one tensor")
    key = next((k for k in stream.inputs if batch.get(k) is not None), None)
    if key is None:
        raise BatchError(
            f"the batch has keys {sorted(map(str, batch))}, but {stream.name} needs "
            f"{' or '.join(repr(k) for k in stream.inputs)}; "
            "pass a mapping with that key, or just the tensor"
        )
    if not isinstance(batch[key], Tensor):
        raise BatchError(
            f"{key} is {type(batch[key]).__name__}; pass a tensor: torch.as_tensor({key})"
        )
    if batch[key].ndim == 0 or batch[key].numel() == 0:
        raise BatchError(
            f"the batch is empty: {key!r} has shape {tuple(batch[key].shape)}; "
            "pass at least one row"
        )
    for name in ("input_ids", "decoder_input_ids"):
        if isinstance(batch.get(name), Tensor):
            _check_tokens(stream, batch[name])
    if key == "input_ids":
        _check_mask(batch[key], batch.get("attention_mask"))
    labels, rows = batch.get("labels"), batch[key].shape[0]
    if labels is None and "label" in batch:
        raise LabelError(
            f"the batch has keys {sorted(map(str, batch))}: rename 'label' to 'labels', or leave "
            "it out"
        )
    if isinstance(labels, Tensor) and labels.shape[:1] != (rows,):
        raise LabelError(
            f"labels have shape {tuple(labels.shape)}, but the batch has {rows} rows; give one "
            "label per row"
        )
    return batch


def _check_tokens(stream: ResidualStream, ids: Tensor) -> None:
    """Raise if a token is not in the embedding. On the CPU only: elsewhere it would wait."""
    if torch.compiler.is_compiling():  # traced tokens have no values
        return
    find = getattr(unwrapped(stream.model), "get_input_embeddings", None)
    with suppress(NotImplementedError):
        embedding = None if find is None else find()
        if not isinstance(embedding, nn.Embedding) or ids.device.type != "cpu":
            return
        if ids.is_floating_point() or ids.is_complex():
            raise BatchError(
                f"tokens are {str(ids.dtype).removeprefix('torch.')}; pass integers: "
                "input_ids.long()"
            )
        if ids.ndim < 2:
            raise BatchError(
                f"tokens have shape {tuple(ids.shape)}; pass (rows, length): one row is ids[None]"
            )
        stream.check_vocabulary(int(ids.min()), int(ids.max()), embedding.num_embeddings)


def _check_mask(ids: Tensor, mask: Any) -> None:
    """Raise if the mask does not fit, which transformers hides; with a cache it is longer."""
    if isinstance(mask, Tensor) and ids.ndim == mask.ndim == 2:
        (rows, tokens), (given, seen) = ids.shape, mask.shape
        if given != rows or seen < tokens:
            raise BatchError(
                f"attention_mask has shape {tuple(mask.shape)}, input_ids {tuple(ids.shape)}; "
                "give one value per token"
            )
        if mask.device.type != "cpu" or torch.compiler.is_compiling():
            return
        # Some models multiply by it, some ask whether it is 0: any other number means nothing.
        odd = None if mask.dtype == torch.bool else mask[(mask != 0) & (mask != 1)]
        if odd is not None and odd.numel():
            raise BatchError(
                f"attention_mask holds {odd[0].item():g}; use 1 for a token, 0 for padding"
            )


class PaddingWarning(UserWarning):
    """Tokens that look like padding count as text, because the batch has no mask."""


def warn_of_padding(
    stream: ResidualStream, batch: Mapping[str, Any], counts: Tensor | None = None
) -> None:
    """Warn if a batch without a mask begins or ends with padding that counts.

    transformers warns of it, too, in some of its classes. On the CPU only: elsewhere it would wait.
    counts: which tokens count; by default all.
    """
    ids, pad = batch.get("input_ids"), stream.pad_token
    if pad is None or not isinstance(ids, Tensor) or ids.ndim != 2 or ids.device.type != "cpu":
        return
    if batch.get("attention_mask") is not None or torch.compiler.is_compiling():
        return
    # One token that also begins or ends a text may be just that.
    config = getattr(unwrapped(stream.model), "config", None)
    marks = (getattr(config, f"{name}_token_id", None) for name in ("bos", "eos", "sep"))
    least = 2 if pad in (*stream.end_tokens, *marks) else 1
    found = ids == pad
    if counts is not None and counts.shape == ids.shape:
        found = found & counts
    rows = found[:, -least:].all(1) | found[:, :least].all(1)
    if ids.shape[1] > least and bool(rows.any()):
        warnings.warn(
            f"{int(rows.sum())} of {len(ids)} rows begin or end with token {pad}, the padding of "
            f"{stream.name}, but the batch has no attention_mask, so padding is read and counted "
            "as text; pass the mask that the tokenizer returns",
            PaddingWarning,
            stacklevel=2,
        )
