"""`generate`: text from any depth, from drafts of a shallow depth, or with early exits."""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from everydepth.config import Seed, brief, checked
from everydepth.errors import NonFiniteError, SettingError, UnsupportedModelError
from everydepth.exits.generation import speculative
from everydepth.exits.generation.answering import answer, answers
from everydepth.exits.generation.early import agreement, decode_with_exits
from everydepth.exits.generation.grouped import shared_keys
from everydepth.exits.generation.output import OnTokens, Output
from everydepth.exits.generation.packing import PACKED_FROM, packed_maps
from everydepth.exits.generation.request import (
    ANSWERING,
    Prompt,
    Prompts,
    check_depths,
    check_known,
    check_model,
    check_prompt,
    pad_token,
    stop_tokens,
    tokens_of,
    with_config,
)
from everydepth.exits.generation.rerun import has_slots, tape_for
from everydepth.exits.generation.result import Generation, GenerationStats
from everydepth.exits.generation.sampling import NoToken, Sampling
from everydepth.exits.generation.speculative import Drafters, decode_with_drafts
from everydepth.exits.generation.tape import Tape
from everydepth.exits.generation.text import OnText, Written
from everydepth.exits.policies import Policy
from everydepth.stream import ResidualStream, as_stream, evaluating, without_gradients
from everydepth.stream.text import check_tokenizer, is_text

_DEFAULTS = {
    "max_new_tokens": None,
    "do_sample": False,
    "temperature": 1.0,
    "top_k": None,
    "top_p": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


@checked
def generate(
    model: nn.Module | ResidualStream,
    prompts: Prompts | None = None,
    *,
    tokenizer: Any = None,
    input_ids: Any = None,
    max_new_tokens: int | None = None,
    depth: int | None = None,
    draft_depth: int | Sequence[int] | None = None,
    policy: Policy | None = None,
    attention_mask: Any = None,
    do_sample: bool = False,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    eos_token_id: int | Sequence[int] | None = None,
    pad_token_id: int | None = None,
    seed: Seed | None = None,
    generator: torch.Generator | None = None,
    generation_config: Any = None,
    stop: str | Sequence[str] = (),
    on_tokens: OnTokens | None = None,
    on_text: OnText | None = None,
    max_draft: int = 16,
    draft_vocabulary: int | None = None,
    draft_words: Sequence[int] | Tensor | None = None,
    draft_always: bool = False,
    **options: Any,
) -> Generation:
    """Continue prompts with the first `depth` blocks of a causal language model (all, if None).

    An encoder-decoder answers them instead, with the first blocks of its decoder. `sequences` then
    holds only the answer, from its start token on; drafts and policies are not available.

    prompts: text (one string or several) with a `tokenizer`, token ids in any form, or nothing and
        a tokenizer's output as keywords: `generate(model, **tokenizer(text, return_tensors="pt"))`.
    tokenizer: its `encode` and `decode` turn text into tokens and back; the result has `texts`. By
        default that of the stream, if it was made with `tokenizer=`.
    max_new_tokens: None: 64, or fewer if the model has no positions for more.
    depth: 1..L; the text is that of the model cut to this depth.
    draft_depth: draft at this shallower depth and verify several tokens at once. The text stays the
        same token for token: greedy text, and that of a seed (with several rows, that of the seed
        with drafts, since each row then draws its own random numbers). It pays off if a shallow
        depth often agrees with the last one: train for it with `lpa` or `balcony`. The cost of
        drafts is measured while decoding, and drafting stops if it does not pay off; what it may
        lose is limited to two percent of the time it measures. 0 drafts from the text itself, what
        followed the same words before: no block runs for that, and text that quotes or repeats
        itself gains. If several depths are given, as in `(0, 4)`, the fastest one drafts.
    policy: read out each token at the first depth whose certainty reaches the policy's threshold.
        Every depth with a finite threshold costs a readout, so a few are better than all.
    attention_mask: False or 0 where `prompts` is padding, on the left or on the right; a tensor, or
        lists.
    eos_token_id: tokens that end a row; None: the model's own, (): none.
    seed, generator: determine the samples; pass at most one of them.
    generation_config: a Hugging Face `GenerationConfig`, for settings that are not given here. What
        it asks for and `generate` does not support is an error. Without it, only the end tokens of
        the model's own config count; an encoder-decoder also has its forced tokens and penalties.
    stop: strings that end a text; they are not part of it.
    on_text: called as `on_text(row, piece)` while the text grows; `stream_text` is an iterator.
    on_tokens: called as `on_tokens(row, tokens)` while the text grows.
    max_draft: the most tokens to draft in a round; the number adapts to how many are accepted.
    draft_vocabulary: how many tokens a draft may choose from; None: a sixteenth of a large
        vocabulary, or all of a small one. They are those in the text and those that the full depth
        finds likely. This changes only the speed.
    draft_words: token ids of similar text, whose frequent tokens a draft may choose as well.
    draft_always: draft in every round, even if that is slower.
    options: passed to `as_stream`.

    The model runs in eval mode, and its mode is restored.

    >>> prompt = tokenizer.encode("Once upon a time")
    >>> plain = ed.generate(llama, prompt, max_new_tokens=12)
    >>> drafted = ed.generate(llama, prompt, max_new_tokens=12, draft_depth=1)
    >>> drafted.tokens == plain.tokens  # the same text, drafted by the first block
    True
    >>> said = ed.generate(llama, "Once upon a time", tokenizer=tokenizer, max_new_tokens=12)
    >>> said.tokens == plain.tokens, type(said.text)
    (True, <class 'str'>)
    >>> cut = ed.generate(llama, prompt, max_new_tokens=12, depth=2)
    >>> len(cut.stats.passes)  # two blocks ran
    2
    """
    options.pop("token_type_ids", None)  # from a tokenizer's output; decoders do not use it
    stream = as_stream(model, **options)
    if reads := answers(stream):
        _refuse_beside_answers(stream, draft_depth, policy)
    else:
        check_model(stream)
    given = {
        "max_new_tokens": max_new_tokens,
        "do_sample": do_sample,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "eos_token_id": eos_token_id,
        "pad_token_id": pad_token_id,
    }
    check_known(stream, eos_token_id=eos_token_id, pad_token_id=pad_token_id)
    more = ANSWERING if reads else ()
    settings = with_config(given, generation_config, _DEFAULTS, more)
    max_new_tokens, do_sample = settings["max_new_tokens"], settings["do_sample"]
    stops_at = [stop] if isinstance(stop, str) else list(stop)
    if not all(stops_at):
        raise SettingError(
            f"stop={brief(stop)}: every text contains the empty string; leave it out"
        )
    if tokenizer is None and (stops_at or on_text is not None or is_text(prompts)):
        tokenizer = stream.tokenizer
    if (stops_at or on_text is not None) and tokenizer is None:
        raise SettingError("stop and on_text need text; pass tokenizer= as well")
    if tokenizer is not None:
        check_tokenizer(tokenizer)
    top, draft_depths = check_depths(stream, depth, draft_depth, policy)
    for name, value in (("max_new_tokens", max_new_tokens), ("max_draft", max_draft)):
        if value is not None and value < 1:
            raise SettingError(f"{name} {value}; use 1 or more")
    if draft_vocabulary is not None and not 1 <= draft_vocabulary <= stream.classes:
        raise SettingError(
            f"draft_vocabulary {draft_vocabulary}, but {stream.name} knows {stream.classes} "
            f"tokens; use 1 to {stream.classes}, or None"
        )
    words = None if draft_words is None else _words(stream, draft_words)
    sampling = Sampling(
        **{name: settings[name] for name in ("do_sample", "temperature", "top_k", "top_p")}
    )
    stops = stop_tokens(stream, settings["eos_token_id"])
    pad = pad_token(stream, settings["pad_token_id"], stops)
    ids = tokens_of(prompts, input_ids, tokenizer)
    most = settings.get("max_length")
    prompt, limit = check_prompt(stream, ids, attention_mask, max_new_tokens, pad, most, reads)
    generator = _generator(seed, generator, prompt.ids.device)

    rows = prompt.ids.shape[0]
    written = None if tokenizer is None else Written(tokenizer, rows, stops_at, on_text)
    out = Output(rows, limit, stops, on_tokens, written)
    details: dict[str, Any] = {}
    start = time.perf_counter()
    if reads:
        said = answer(
            *(stream, prompt, top, sampling),
            limit=limit,
            stops=stops,
            pad=pad,
            generator=generator,
            more={name: settings[name] for name in more if name in settings},
        )
        out.emit(said[:, 1:].tolist())
        new, lengths = out.padded(pad, said), tuple(map(len, out.tokens))
        passes = (sum(lengths),) * top
        stats = GenerationStats(
            seconds=time.perf_counter() - start, tokens=sum(lengths), passes=passes
        )
        return Generation(
            sequences=torch.cat([said[:, :1], new], 1),
            prompt_length=1,
            lengths=lengths,
            stats=stats,
            texts=() if written is None else written.end(),
        )
    with ExitStack() as stack:
        stack.enter_context(evaluating(stream))
        stack.enter_context(without_gradients(stream.model))
        stack.enter_context(_with_its_depth(stream, prompt))
        stack.enter_context(shared_keys())
        if draft_depth is not None and not has_slots(stream, prompt.ids):
            raise UnsupportedModelError(
                f"draft_depth={draft_depth}, but drafts need a cache of keys and values from which "
                f"tokens can be removed, and {stream.name} keeps another state; leave draft_depth "
                "out"
            )
        drafters, read = None, () if policy is None else range(1, top)
        if draft_depths:
            drafters = Drafters(
                *(stream, prompt, top, draft_depths, sampling),
                tokens=limit,
                longest=max_draft,
                vocabulary=draft_vocabulary,
                words=words,
                always=draft_always,
            )
        begun = speculative.clock()
        if limit >= PACKED_FROM:
            used = _used(stream, top, read if drafters is None else drafters.likely)
            # For plain steps: a drafted text should not pay for more than they would.
            stack.enter_context(packed_maps(used, len(prompt.ids)))
        packed = speculative.clock()
        room = prompt.ids.shape[1] + limit + max_draft
        read = [k for k in draft_depths if k] or read
        tape = tape_for(*(stream, prompt.ids, prompt.real), top=top, room=room, read=read)
        if policy is not None:
            left = decode_with_exits(tape, out, policy, sampling, generator)
            details["exit_depths"] = tuple(map(tuple, left))
        else:
            logits = tape.last_logits(top)
            first = sampling.draw(logits, generator)
            if drafters is None:
                _decode(tape, out, first, sampling, generator)
            else:
                seconds = packed - begun, speculative.clock() - packed
                drafters.begin(logits, *seconds)
                decode_with_drafts(tape, out, first, drafters, sampling, generator)
                drafters.remember()
                details |= drafters.counts
                details["from_draft"] = tuple(map(tuple, out.drafted))
    seconds = time.perf_counter() - start
    # Outside of inference mode, so that the result is an ordinary tensor.
    new = out.padded(pad, prompt.ids)
    sequences = torch.cat([prompt.ids.masked_fill(~prompt.real, pad), new], 1)
    lengths = tuple(map(len, out.tokens))
    if policy is not None and not do_sample:
        with evaluating(stream), without_gradients(stream.model):
            details["agreement"] = agreement(stream, prompt, new, lengths, top)
    stats = GenerationStats(
        seconds=seconds,
        tokens=sum(lengths),
        passes=tuple(tape.passes),
        compactions=tape.compactions,
        **details,
    )
    return Generation(
        sequences=sequences,
        prompt_length=prompt.ids.shape[1],
        lengths=lengths,
        stats=stats,
        texts=() if written is None else written.end(),
    )


@contextmanager
def _with_its_depth(stream: ResidualStream, prompt: Prompt) -> Generator[None, None, None]:
    """If no token can be chosen, raise an error that names the first depth with NaN."""
    try:
        yield
    except NoToken as error:
        batch = {"input_ids": prompt.ids, "attention_mask": prompt.real.long()}
        stream.observe(batch).check_predictions()
        raise NonFiniteError(
            f"{error} after some new tokens, but not after the prompt; use a wider number format",
            stream.depth,
        ) from error


def _refuse_beside_answers(stream: ResidualStream, draft_depth: Any, policy: Any) -> None:
    for name, value in (("draft_depth", draft_depth), ("policy", policy)):
        if value is not None:
            raise UnsupportedModelError(
                f"{name} was given, but {stream.name} is an encoder-decoder, which decodes with "
                f"its own generate; leave {name} out, or choose depth="
            )


def _decode(
    tape: Tape, out: Output, tokens: Tensor, sampling: Sampling, generator: torch.Generator | None
) -> None:
    """One token at a time through all blocks."""
    while True:
        going = out.emit([[token] for token in tokens.tolist()])
        if not out.active:
            return
        tape.feed(tape.continued(going, tokens))
        tokens = sampling.draw(tape.last_logits(tape.top), generator)


def _used(stream: ResidualStream, top: int, read: Sequence[int]) -> nn.ModuleList:
    """The modules that run if the top and these depths are read out."""
    blocks = [block.module for block in stream.blocks[:top]]
    exits = [stream.exits[depth] for depth in (*read, top) if depth in stream.exits]
    return nn.ModuleList([*blocks, *exits, stream.head])


def _words(stream: ResidualStream, given: Sequence[int] | Tensor) -> Tensor:
    words = torch.as_tensor(given).flatten()
    whole = not (words.is_floating_point() or words.is_complex() or words.dtype == torch.bool)
    if not len(words) or not whole:
        raise SettingError(
            f"draft_words has {len(words)} values of {words.dtype}; pass token ids of some text"
        )
    low, high = int(words.min()), int(words.max())
    if low < 0 or high >= stream.classes:
        raise SettingError(
            f"draft_words from {low} to {high}, but {stream.name} knows {stream.classes} tokens; "
            f"use 0 to {stream.classes - 1}"
        )
    return words


def _generator(
    seed: int | None, generator: torch.Generator | None, device: torch.device
) -> torch.Generator | None:
    if seed is None:
        return generator
    if generator is not None:
        raise SettingError(
            f"seed={seed} and a generator both determine the samples; pass one of them"
        )
    return torch.Generator(device).manual_seed(seed)
