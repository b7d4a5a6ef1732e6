"""Write a Hugging Face tokenizer to the metadata of a GGUF file."""

from __future__ import annotations

import json
import re
from typing import Any

from everydepth.errors import UnsupportedModelError

CONVERT = "convert the model with llama.cpp, then cut the file with everydepth.export"

SAMPLES = (
    "Once upon a time, there was a 3-year-old girl who didn't sleep.",
    "It costs $1,234.50; naïve café, 漢字 and 🙂!\n\tdef f(x):  return x**2\n",
)
"""Texts that both tokenizers must tokenize identically."""

_NORMAL, _UNKNOWN, _CONTROL, _USER, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6

_LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
# llama.cpp implements the rules for splitting words, by name.
_SPLITS = {
    rf"{_SHORT}|{_LETTERS}|\p{{N}}{{1,3}}|{_REST}": "llama-bpe",
    rf"{_SHORT}|{_LETTERS}|\p{{N}}|{_REST}": "qwen2",
}


def add_tokens(writer: Any, tokenizer: Any, size: int) -> None:
    """Write vocabulary, merges and special tokens.

    writer: a `gguf.GGUFWriter`. size: the number of embeddings, some of which may have no token.
    """
    described = _described(tokenizer)
    tokens, kinds = _vocabulary(tokenizer, described, size)
    if described["model"].get("byte_fallback"):
        writer.add_tokenizer_model("llama")
        writer.add_token_scores(_scores(tokens, described["model"]["merges"]))
        writer.add_add_space_prefix(_prefix(described))
    else:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(_split(described))
        writer.add_token_merges([" ".join(merge) for merge in _pairs(described["model"]["merges"])])
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    for name in ("bos", "eos", "unk", "pad"):
        number = getattr(tokenizer, f"{name}_token_id", None)
        if number is not None:
            getattr(writer, f"add_{name}_token_id")(number)
    ids = list(tokenizer("a").input_ids)
    writer.add_add_bos_token(ids[:1] == [tokenizer.bos_token_id])
    writer.add_add_eos_token(ids[-1:] == [tokenizer.eos_token_id])
    template = getattr(tokenizer, "chat_template", None)
    if isinstance(template, str):
        writer.add_chat_template(template)


def _described(tokenizer: Any) -> dict[str, Any]:
    """The tokenizer.json of a fast tokenizer."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise UnsupportedModelError(
            f"{type(tokenizer).__name__} is not a fast tokenizer, so it cannot be written to a "
            "GGUF file; give one with a tokenizer.json (AutoTokenizer.from_pretrained)"
        )
    described: dict[str, Any] = json.loads(backend.to_str())
    kind = described["model"].get("type")
    if kind != "BPE":
        raise UnsupportedModelError(
            f"the tokenizer's model is {kind}; only BPE can be written to a GGUF file; {CONVERT}"
        )
    return described


def _vocabulary(
    tokenizer: Any, described: dict[str, Any], size: int
) -> tuple[list[str], list[int]]:
    words = {number: word for word, number in tokenizer.get_vocab().items()}
    if max(words) >= size:
        raise UnsupportedModelError(
            f"the tokenizer has a token {max(words)}, but the model has only {size} embeddings; "
            "give the model's own tokenizer"
        )
    added = {token["id"]: token["special"] for token in described["added_tokens"]}
    kinds: list[int] = []
    for number in range(size):
        word = words.get(number)
        if word is None:
            kinds.append(_UNUSED)
        elif word == tokenizer.unk_token and described["model"].get("byte_fallback"):
            kinds.append(_UNKNOWN)
        elif number in added:
            kinds.append(_CONTROL if added[number] else _USER)
        elif re.fullmatch("<0x[0-9A-F]{2}>", word):
            kinds.append(_BYTE)
        else:
            kinds.append(_NORMAL)
    return [words.get(number, f"[PAD{number}]") for number in range(size)], kinds


def _scores(tokens: list[str], merges: list[Any]) -> list[float]:
    """Token scores: llama.cpp first merges the pair with the highest score."""
    ranks: dict[str, int] = {}
    for rank, pair in enumerate(_pairs(merges)):
        ranks.setdefault("".join(pair), rank)
    return [-float(ranks.get(token, len(merges))) for token in tokens]


def _pairs(merges: list[Any]) -> list[list[str]]:
    """Merges as pairs; older files join them with a space."""
    return [merge.split(" ") if isinstance(merge, str) else merge for merge in merges]


def _parts(step: Any, inner: str) -> list[dict[str, Any]]:
    """The steps of a sequence, or a single step as a list."""
    if step is None:
        return []
    return step[inner] if step["type"] == "Sequence" else [step]


def _prefix(described: dict[str, Any]) -> bool:
    """Whether a space is prepended to a text."""
    parts = _parts(described["normalizer"], "normalizers")
    words = _parts(described["pre_tokenizer"], "pretokenizers")
    return any(part["type"] == "Prepend" for part in parts) or any(
        word["type"] == "Metaspace" and word.get("prepend_scheme") != "never" for word in words
    )


def _split(described: dict[str, Any]) -> str:
    """llama.cpp's name of the rule for splitting words."""
    parts = _parts(described["pre_tokenizer"], "pretokenizers")
    kinds = [part["type"] for part in parts]
    if kinds == ["ByteLevel"] and parts[0].get("use_regex", True):
        return "gpt-2"
    if kinds == ["Digits", "ByteLevel"] and parts[0].get("individual_digits"):
        return "smollm"
    if kinds == ["Split", "ByteLevel"]:
        found = _SPLITS.get(parts[0]["pattern"].get("Regex", ""))
        if found is not None:
            return found
    raise UnsupportedModelError(
        f"the tokenizer splits words by {', '.join(kinds) or 'nothing'}, in a way unknown in "
        f"llama.cpp; {CONVERT}"
    )
