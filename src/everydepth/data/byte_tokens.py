"""A tokenizer made here: from bytes, so that it encodes any text."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

END = "<|end|>"


def byte_tokenizer(texts: Iterable[str] | None = None, size: int = 400) -> PreTrainedTokenizerFast:
    """One token per byte, and one that ends a text: token 256.

    texts, size: merge frequent bytes of these texts until there are `size` tokens; the one that
        ends a text is then token 0.

    >>> from everydepth.data.byte_tokens import byte_tokenizer
    >>> byte_tokenizer().encode("né")
    [77, 127, 102]
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate([*alphabet, END])}
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=[]) if texts is None else models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    if texts is not None:
        trainer = trainers.BpeTrainer(
            vocab_size=size, initial_alphabet=alphabet, special_tokens=[END], show_progress=False
        )
        inner.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token=END, pad_token=END)
