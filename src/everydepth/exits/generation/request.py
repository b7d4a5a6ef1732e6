"""Check the arguments of `generate` before any work."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import index
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from everydepth.config import brief
from everydepth.errors import BatchError, DepthError, SettingError, UnsupportedModelError
from everydepth.stream import ResidualStream
from everydepth.stream.rows import as_tensor
from everydepth.stream.text import encoded, is_text, new_tokens_of

Ids = Tensor | np.ndarray | Sequence[int] | Sequence[Sequence[int] | Tensor]
Prompts = str | Sequence[str] | Mapping[str, Any] | Ids
"""Text (with a tokenizer): one string or several. Token ids: a tensor or array `(rows, length)`, a
tokenizer's output, a list of ids, or several such lists or tensors, which may differ in length."""

DEFAULT_NEW_TOKENS = 64

# Only these support arbitrary masks, which rows of different lengths need.
ATTENTION = ("sdpa", "eager")


@dataclass(frozen=True)
class Prompt:
    """Left-padded ids, and a mask that is True for tokens and False for padding."""

    ids: Tensor
    real: Tensor


def tokens_of(prompts: Prompts | None, input_ids: Any, tokenizer: Any) -> Prompts:
    """The prompts as tokens, which may be given as such, as a tokenizer's output, or as text."""
    given: Any = prompts if input_ids is None else input_ids
    if given is None or (prompts is not None and input_ids is not None):
        raise SettingError("pass either prompts or input_ids, as in **tokenizer(text)")
    if not is_text(given):
        return given
    found = encoded(given, tokenizer)
    real = found["attention_mask"].sum(1).tolist()
    return [row[:n] for row, n in zip(found["input_ids"].tolist(), real, strict=True)]


_KNOWN = ("max_new_tokens", "do_sample", "temperature", "top_k", "top_p")
_TOKENS = ("eos_token_id", "pad_token_id")
_HARMLESS = ("bos_token_id", "use_cache", "return_dict_in_generate", "cache_implementation")
# What the own `generate` of an encoder-decoder does, with one answer per row.
ANSWERING = (
    "decoder_start_token_id",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "min_length",
    "min_new_tokens",
    "repetition_penalty",
    "encoder_repetition_penalty",
    "no_repeat_ngram_size",
    "encoder_no_repeat_ngram_size",
    "bad_words_ids",
    "sequence_bias",
    "suppress_tokens",
    "begin_suppress_tokens",
)


def with_config(
    given: dict[str, Any],
    config: Any,
    defaults: Mapping[str, Any],
    more: Sequence[str] = (),
) -> dict[str, Any]:
    """The settings, with those of a `GenerationConfig` in place of defaults.

    more: settings that are returned as well if the config has them.
    """
    if config is None:
        return given
    if not hasattr(config, "to_diff_dict"):
        raise SettingError(
            f"generation_config is {brief(config)}; pass a GenerationConfig, such as "
            "model.generation_config, or leave it out"
        )
    said = {
        name: value
        for name, value in config.to_diff_dict().items()
        # False switches off what nothing else would switch on.
        if value is not None and value is not False and not name.startswith(("_", "transformers"))
    }
    known = (*_KNOWN, "max_length", *_TOKENS, *more)
    foreign = sorted(set(said) - {*known, *_HARMLESS})
    if foreign:
        raise SettingError(
            f"generation_config has {', '.join(foreign)}, which generate does not support"
            f"{' (pass stop= instead)' if foreign == ['stop_strings'] else ''}; use "
            f"{', '.join(known)}"
        )
    sampled = said.get("do_sample", False)
    found = dict(given) | {name: said[name] for name in ("max_length", *more) if name in said}
    for name in (*_KNOWN, *_TOKENS):
        # Without sampling, Hugging Face keeps these in the config but does not use them.
        if name in ("temperature", "top_k", "top_p") and not sampled:
            continue
        if name in said and found[name] == defaults[name]:
            found[name] = said[name]
    if sampled and found["top_k"] == defaults["top_k"] and "top_k" not in said:
        found["top_k"] = getattr(config, "top_k", None)  # 50 by default
    return found


def check_model(stream: ResidualStream) -> None:
    """Raise an error unless the model predicts the next token and its rows may differ in length."""
    if stream.task != "causal_lm":
        raise UnsupportedModelError(
            f"{stream.name} predicts {stream.task}, not the next token; "
            "load the model with a language-modeling head (AutoModelForCausalLM)"
        )
    if stream.attention not in (None, *ATTENTION):
        raise UnsupportedModelError(
            f"{stream.name} runs with {stream.attention!r} attention, which cannot mask tokens row "
            f"by row; load it with attn_implementation={' or '.join(map(repr, ATTENTION))}"
        )


def check_depths(
    stream: ResidualStream,
    depth: int | None,
    draft_depth: int | Sequence[int] | None,
    policy: Any,
) -> tuple[int, tuple[int, ...]]:
    """The depth that decides, and the draft depths; 0 is the text itself."""
    top = stream.depth if depth is None else stream.check_depth(depth, lowest=1)
    if draft_depth is None:
        return top, ()
    if policy is not None:
        raise SettingError(
            f"draft_depth={draft_depth} with a policy: drafting keeps every token of depth {top}, "
            "but a policy changes some; choose one"
        )
    given: list[Any] = np.atleast_1d(cast(Any, draft_depth)).tolist()
    for k in given:
        if not isinstance(k, int) or isinstance(k, bool) or not 0 <= k < top:
            blocks = f", or 1 to {top - 1} for that many blocks" if top > 1 else ""
            raise DepthError(
                f"draft_depth {k!r}, but it must be below depth {top}, which decides; use 0 to "
                f"draft from the text itself{blocks}"
            )
    return top, tuple(dict.fromkeys(given))


def check_prompt(
    stream: ResidualStream,
    prompts: Prompts,
    attention_mask: Any,
    max_new_tokens: int | None,
    pad: int,
    max_length: int | None = None,
    answers: bool = False,
) -> tuple[Prompt, int]:
    """The prompt, and the most tokens that may follow it.

    max_length: the most tokens in all, where `max_new_tokens` is not given. answers: tokens follow
        a start token instead of the prompt.
    """
    ids, mask = _as_tensors(prompts, attention_mask, pad)
    ids = ids.to(stream.device)
    if ids.ndim != 2 or ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise BatchError(
            f"the prompt has shape {tuple(ids.shape)} and type {ids.dtype}; "
            "pass whole numbers of shape (rows, length)"
        )
    if ids.numel() == 0:
        raise BatchError(
            f"the prompt is empty: shape {tuple(ids.shape)}; pass at least one token per row, such "
            "as the tokenizer's beginning-of-text token"
        )
    stream.check_vocabulary(int(ids.min()), int(ids.max()), stream.classes)
    real = torch.ones_like(ids, dtype=torch.bool) if mask is None else _checked_mask(mask, ids)
    longest = int(real.sum(1).max())
    if max_new_tokens is None and max_length is not None:
        before = 1 if answers else longest
        if max_length <= before:
            raise BatchError(
                f"generation_config.max_length is {max_length}, but there are {before} tokens "
                "before the first new one; raise it, or set max_new_tokens instead"
            )
        most = max_length if stream.positions is None else min(max_length, stream.positions)
        max_new_tokens = max(most - before, 1)
    limit = (max_new_tokens, "max_new_tokens", DEFAULT_NEW_TOKENS)
    return _left_padded(ids, real), new_tokens_of(stream, longest, *limit)


def stop_tokens(stream: ResidualStream, eos_token_id: int | Sequence[int] | None) -> list[int]:
    if eos_token_id is None:
        return list(stream.end_tokens)
    return _tokens("eos_token_id", eos_token_id)


def _tokens(name: str, given: Any) -> list[int]:
    try:
        found = cast(Any, list(given) if isinstance(given, Sequence) else [given])
        if any(isinstance(token, bool) for token in found):
            raise TypeError
        return [index(token) for token in found]
    except TypeError as error:
        said = f"{name}={brief(given)}"
        raise SettingError(f"{said}; pass the number of a token, or several") from error


def check_known(stream: ResidualStream, **tokens: Any) -> None:
    """Raise an error if a token given by the user is not in the vocabulary.

    A config may use -1 for no token, but an explicit setting must be a token.
    """
    for name, given in tokens.items():
        for token in [] if given is None else _tokens(name, given):
            if not 0 <= token < stream.classes:
                raise SettingError(
                    f"{name}={token}, but {stream.name} knows {stream.classes} tokens; use 0 to "
                    f"{stream.classes - 1}"
                )


def pad_token(stream: ResidualStream, pad_token_id: int | None, stops: list[int]) -> int:
    """What fills shorter rows; a config may name a token the model does not have, such as -1."""
    named = (pad_token_id, stream.pad_token, *stops)
    return next((t for t in named if t is not None and 0 <= t < stream.classes), 0)


def _as_tensors(prompts: Prompts, attention_mask: Any, pad: int) -> tuple[Tensor, Tensor | None]:
    if isinstance(prompts, Mapping):
        if "input_ids" not in prompts:
            raise BatchError(
                f"the prompt has keys {sorted(map(str, prompts))}, but 'input_ids' is needed; "
                "pass the tokenizer's output as it is"
            )
        mask = prompts.get("attention_mask") if attention_mask is None else attention_mask
        return _as_tensors(prompts["input_ids"], mask, pad)
    if isinstance(prompts, np.ndarray | Tensor):
        prompts = as_tensor(prompts)
        ids = prompts[None] if prompts.ndim == 1 else prompts
        if attention_mask is None:
            return ids, None
        mask = as_tensor(attention_mask)
        return ids, mask[None] if prompts.ndim == mask.ndim == 1 else mask
    if not isinstance(prompts, Sequence):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise BatchError(
            f"the prompt is a {type(prompts).__name__}; pass a tensor or lists of token ids, or "
            "text with tokenizer="
        )
    rows = _rows(prompts)
    if not rows or not all(rows):
        empty = next((i for i, row in enumerate(rows) if not row), None)
        where = "no rows" if empty is None else f"row {empty} has no tokens"
        raise BatchError(f"the prompt is empty: {where}; pass at least one token per row")
    odd = [token for row in rows for token in row if not hasattr(token, "__index__")]
    if odd:
        raise BatchError(f"token {brief(odd[0])}; pass whole numbers, or text with tokenizer=")
    marks = [[1] * len(row) for row in rows]
    if attention_mask is not None:
        plain = isinstance(attention_mask, Sequence)
        marks = _rows(attention_mask if plain else as_tensor(attention_mask).tolist())
        sizes, own = list(map(len, marks)), list(map(len, rows))
        if sizes != own:
            raise BatchError(
                f"attention_mask has rows of {_few(sizes)} values, but the prompt has rows of "
                f"{_few(own)} tokens; pass one value for each token, as the tokenizer returns it"
            )
    longest = max(map(len, rows))
    ids = torch.tensor([[pad] * (longest - len(row)) + row for row in rows])
    real = torch.tensor([[0] * (longest - len(row)) + row for row in marks])
    return ids, real


def _rows(given: Any) -> list[list[Any]]:
    """A list of lists; a plain list is one row."""
    arrays = Tensor | np.ndarray
    given = [as_tensor(row).tolist() if isinstance(row, arrays) else row for row in given]
    rows: list[list[Any]] = [list(row) if isinstance(row, Sequence) else [row] for row in given]
    if rows and not isinstance(given[0], Sequence):
        rows = [[value for row in rows for value in row]]
    return rows


def _few(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers[:4])) + (", ..." if len(numbers) > 4 else "")


def _checked_mask(mask: Tensor, ids: Tensor) -> Tensor:
    if mask.shape != ids.shape:
        raise BatchError(
            f"attention_mask has shape {tuple(mask.shape)}, but the prompt has "
            f"{tuple(ids.shape)}; pass one of the same shape"
        )
    real = mask.to(ids.device).bool()
    steps = real.long().diff(dim=1).abs().sum(1)
    ends = real[:, 0] | real[:, -1]
    for row in range(real.shape[0]):
        if not bool(real[row].any()):
            raise BatchError(
                f"row {row} of the prompt is all padding; pass at least one token per row"
            )
        if int(steps[row]) > 1 or not bool(ends[row]):
            raise BatchError(
                f"row {row} of attention_mask is {mask[row].int().tolist()}; padding must be on "
                "the left (tokenizer.padding_side = 'left') or on the right, without gaps"
            )
    return real


def _left_padded(ids: Tensor, real: Tensor) -> Prompt:
    """Move all padding to the left, and drop columns that are all padding."""
    order = real.long().argsort(dim=1, stable=True)
    longest = int(real.sum(1).max())
    order = order[:, -longest:]
    return Prompt(ids.gather(1, order), real.gather(1, order))
