"""The text that a language model would write at every depth."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn

from everydepth.config import Count, Seed, Setting, checked
from everydepth.errors import DataError, SettingError
from everydepth.files import check_kernels, explained, read_json, weight_files
from everydepth.results.result import Result, defined
from everydepth.stream import ResidualStream, as_stream, evaluating
from everydepth.stream.embedding import POOLS
from everydepth.stream.states import are_finite, holds_from
from everydepth.stream.text import encoded, new_tokens_of
from everydepth.tracing.sums import DEPTH, array

SentenceEncoder = Callable[[Sequence[str]], np.ndarray]
"""Texts -> (text, dim)."""


@runtime_checkable
class Tokenizer(Protocol):
    """The required methods of a tokenizer; those of Hugging Face have them."""

    def encode(self, text: str, /) -> list[int]: ...

    def decode(self, ids: Any, /) -> Any: ...


@checked
def token_grid(
    model: nn.Module | ResidualStream,
    tokenizer: Tokenizer,
    prompt: str,
    *,
    new_tokens: Annotated[int, Setting(least=0)] | None = None,
    top: Count = 5,
    **options: Any,
) -> Result:
    """Each depth's top predictions at every position of a prompt and its greedy continuation.

    Column t predicts the token after token t: `text[l, t]` is the top prediction at depth l and
    `probability[l, t]` its probability; `top_text` and `top_probability` have the best `top`.
    `saturated_at[t]` is the depth from which the top prediction is the final one.

    new_tokens: by default 20, or as many as fit into the model's context.

    >>> grid = ed.token_grid(llama, tokenizer, "Once", new_tokens=3)
    >>> grid.arrays["probability"].shape[0]  # one row per depth, 0..3
    4
    """
    stream = _causal(model, options)
    with torch.no_grad(), evaluating(stream):
        ids = _encoded(stream, tokenizer, prompt)
        new = new_tokens_of(stream, ids.shape[1], new_tokens, "new_tokens", 20)
        start = ids.shape[1]
        for token in _continued(stream, ids, stream.depth, new, lambda z: z.argmax(-1)):
            ids = torch.cat([ids, token[:, None]], 1)
        states = stream.observe({"input_ids": ids}).check_predictions(0)
        found: list[tuple[Tensor, Tensor]] = []
        for depth in range(stream.depth + 1):
            chances = states.logits(depth)[0].float().softmax(-1)
            found.append(tuple(chances.topk(min(top, chances.shape[-1]), -1)))  # pyright: ignore[reportArgumentType]
    chance = np.stack([array(c) for c, _ in found])
    token = np.stack([array(t) for _, t in found])
    words = {i: _text(tokenizer, i) for i in {*token.flatten().tolist(), *ids[0].tolist()}}
    text = np.array([[[words[i] for i in cell] for cell in row] for row in token.tolist()])
    agree = torch.from_numpy(token[:, :, 0] == token[-1, :, 0])
    return Result(
        name="token_grid",
        kind="grid",
        title="Tokens",
        about="Most likely next token at each depth, above the token read; darker is more likely.",
        section="tokens",
        series=("text",),
        arrays={
            "depth": np.arange(stream.depth + 1),
            "tokens": np.array([words[i] for i in ids[0].tolist()]),
            "text": text[:, :, 0].copy(),
            "probability": chance[:, :, 0].copy(),
            "top_text": text,
            "top_probability": chance,
            "saturated_at": holds_from(agree).numpy(),
        },
        labels={"depth": DEPTH, "tokens": "token", "probability": "probability"},
        meta={"prompt": prompt, "prompt_tokens": start, "new_tokens": ids.shape[1] - start},
    )


@checked
def text_at_depth(
    model: nn.Module | ResidualStream,
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    *,
    depths_wanted: Sequence[int] | None = None,
    new_tokens: Count | None = None,
    nucleus: Annotated[float, Setting(above=0, most=1)] = 0.95,
    seed: Seed = 0,
    encoder: SentenceEncoder | str | Path | None = None,
    **options: Any,
) -> Result:
    """Text sampled at every depth, with its diversity and its coherence with the prompt.

    At depth l only the first l blocks run.

    new_tokens: by default 40, or as many as fit into the model's context.
    nucleus: tokens are drawn from the smallest set with this total probability (top-p).
    encoder: for coherence: a function from texts to vectors, or the folder of a Hugging Face
        encoder.

    >>> found = ed.text_at_depth(llama, tokenizer, ["Once upon a time"], new_tokens=8)
    >>> found.arrays["text"].shape  # depths 1..3, one prompt
    (3, 1)
    """
    stream = _causal(model, options)
    if not prompts:
        raise SettingError("no prompts; pass at least one text")
    encode = sentence_encoder(encoder) if isinstance(encoder, (str, Path)) else encoder
    wanted = list(range(1, stream.depth + 1) if depths_wanted is None else depths_wanted)
    if not wanted:
        raise SettingError(f"depths_wanted={depths_wanted!r}; give 1 or more, or leave it out")
    written: list[list[str]] = []
    diverse: list[list[float]] = []
    starts = [_encoded(stream, tokenizer, prompt) for prompt in prompts]
    longest = max(start.shape[1] for start in starts)
    new = new_tokens_of(stream, longest, new_tokens, "new_tokens", 40)
    with torch.no_grad(), evaluating(stream):
        for depth in map(stream.check_depth, wanted):
            generator = torch.Generator().manual_seed(seed)  # each depth draws the same numbers
            pick = _nucleus(nucleus, generator)
            ids = [
                [int(t) for t in _continued(stream, start, depth, new, pick)] for start in starts
            ]
            written.append([str(tokenizer.decode(line)) for line in ids])
            diverse.append([diversity(line) for line in ids])
    value = np.ma.masked_invalid(np.array(diverse))  # texts too short to have a diversity
    mean = np.ma.filled(value.mean(1), np.nan)
    arrays = {"depth": np.array(wanted), "diversity": defined(mean)}
    series = ["diversity"]
    if encode is not None:
        start = _unit(encode(list(prompts)))
        close = [(start * _unit(encode(texts))).sum(1).mean() for texts in written]
        arrays["coherence"] = np.array(close)
        series.insert(0, "coherence")
    short = "the continuations are too short for 4-grams; raise new_tokens"
    return Result(
        name="text_at_depth",
        kind="curve",
        title="Text",
        about="The first prompt, continued by each depth's predictions.",
        section="tokens",
        series=tuple(series),
        arrays={**arrays, "text": np.array(written), "prompts": np.array(list(prompts))},
        labels={
            "depth": DEPTH,
            "coherence": "coherence, cosine of prompt and continuation",
            "diversity": "diversity, unique over total n-grams (n = 2, 3, 4)",
        },
        meta={"new_tokens": new, "nucleus": nucleus, "seed": seed, "prompts": len(prompts)},
        note=short if np.ma.is_masked(value) else None,
    )


@checked
def diversity(tokens: Sequence[Any]) -> float:
    """The product over n = 2, 3, 4 of unique over total n-grams; NaN for fewer than 4 tokens."""
    if len(tokens) < 4:
        return float("nan")
    total = 1.0
    for n in (2, 3, 4):
        grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
        total *= len(set(grams)) / len(grams)
    return total


@checked
@explained("the encoder cannot be read", DataError)
def sentence_encoder(
    folder: str | Path, *, pool: Literal["mean", "first"] = "mean"
) -> SentenceEncoder:
    """A Hugging Face encoder from a folder, as a function from texts to vectors.

    pool: "mean" of the last states over real tokens, or "first" for the [CLS] token, as in SimCSE.
    """
    from transformers import AutoModel, AutoTokenizer

    place = Path(folder)
    if not (place / "config.json").exists():
        raise SettingError(
            f"no encoder in {place} (config.json is missing); pass the folder of a Hugging Face "
            "encoder, or a function from texts to vectors"
        )
    weight_files(place)  # raises if any is outside the folder: transformers would open it
    check_kernels(read_json(place / "config.json", DataError), place / "config.json")
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(str(place), trust_remote_code=False)
    except ValueError as error:
        raise DataError(
            f"no tokenizer in {place}; save the encoder's there: tokenizer.save_pretrained(folder)"
        ) from error
    encoder: Any = AutoModel.from_pretrained(
        str(place), use_safetensors=True, trust_remote_code=False
    ).eval()

    @torch.no_grad()
    def encode(texts: Sequence[str]) -> np.ndarray:
        # With some tokenizers, an empty text would have no tokens to pool.
        batch = tokenizer(
            [text or " " for text in texts], padding=True, truncation=True, return_tensors="pt"
        )
        return array(POOLS[pool](encoder(**batch).last_hidden_state, batch))

    return encode


# -- writing -----------------------------------------------------------------------------------


def _continued(
    stream: ResidualStream,
    ids: Tensor,
    depth: int,
    count: int,
    pick: Callable[[Tensor], Tensor],
) -> Generator[Tensor, None, None]:
    """Tokens generated with the first `depth` blocks, one at a time, with a cache."""
    cache, read = stream.new_cache(), ids
    for _ in range(count):
        cursor = stream.advance(stream.start({"input_ids": ids}, cache=cache), to=depth)
        logits = stream.logits(cursor)[:, -1].float()
        if not bool(are_finite(logits).all()):
            stream.observe({"input_ids": read}).check_predictions(depth)
        token = pick(logits)
        yield token
        ids = token[:, None]
        read = torch.cat([read, ids], 1)


def _nucleus(share: float, generator: torch.Generator) -> Callable[[Tensor], Tensor]:
    def pick(logits: Tensor) -> Tensor:
        chance, token = logits.softmax(-1).sort(-1, descending=True)
        # Keep tokens until the share is reached; in float32, a tiny share is 0.
        kept = chance.cumsum(-1) - chance < share
        kept[..., 0] = True
        kept = torch.where(kept, chance, 0)
        drawn = torch.multinomial(kept.cpu(), 1, generator=generator).to(token.device)
        return token.gather(-1, drawn)[:, 0]

    return pick


def _causal(model: nn.Module | ResidualStream, options: Mapping[str, Any]) -> ResidualStream:
    stream = as_stream(model, **options)
    if stream.task != "causal_lm":
        raise SettingError(
            f"{stream.name} predicts {stream.task!r}; text needs a causal language model"
        )
    return stream


def _encoded(stream: ResidualStream, tokenizer: Tokenizer, prompt: str) -> Tensor:
    return encoded(prompt, tokenizer)["input_ids"].to(stream.device)


def _text(tokenizer: Tokenizer, token: int) -> str:
    """A token as text; decoding a single token may lose its leading space."""
    text = str(tokenizer.decode([token]))
    pieces = getattr(tokenizer, "convert_ids_to_tokens", None)
    piece = "" if pieces is None else str(pieces(token))
    if piece.startswith("▁") and not text.startswith(" "):
        return f" {text}"
    return text or piece


def _unit(vectors: np.ndarray) -> np.ndarray:
    length = np.linalg.norm(vectors, axis=1, keepdims=True)
    return np.asarray(vectors, np.float64) / np.maximum(length, 1e-12)
