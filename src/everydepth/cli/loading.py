"""Data from the words of a command line, as a model takes it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from everydepth.errors import DataError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from everydepth.data import Batch, Batches, Rows
    from everydepth.data.batches import Transform


def load_batches(
    name: str,
    model: PreTrainedModel,
    data: str,
    *,
    split: str = "test",
    root: str | None = None,
    batch_size: int = 32,
    max_length: int = 128,
    max_samples: int | None = None,
) -> Batches:
    """Data by name or path, as the model called `name` (a folder, a run, a hub name) takes it.

    Images become floats of the model's size and channels, normalized as its preprocessor_config
    says; texts go through its tokenizer; one long text becomes blocks of `max_length` tokens.
    """
    from everydepth.data import Images, Points, Texts, batches, load, trim_padding
    from everydepth.exits.load import model_folder

    name = model_folder(name)
    found = load(data, split=split, root=root)
    if isinstance(found, Images):
        return batches(found.first(max_samples), batch_size, transform=_image_input(name, model))
    if isinstance(found, Points):
        return batches(found.first(max_samples), batch_size)
    rows = _tokens(name, model, found, data, max_length, max_samples)
    return batches(rows, batch_size, transform=trim_padding if isinstance(found, Texts) else None)


def _tokens(
    name: str,
    model: PreTrainedModel,
    found: Any,
    data: str,
    max_length: int,
    max_samples: int | None,
) -> Rows:
    from everydepth.data import Corpus, Texts, token_blocks, tokenized
    from everydepth.exits.load import load_tokenizer
    from everydepth.stream import as_stream

    if not isinstance(found, Texts | Corpus):
        raise DataError(
            f"{data!r} holds {type(found).__name__}, but a model takes images, points or text; "
            "say which columns are text with everydepth.data.load_table, in Python"
        )
    tokenizer: Any = load_tokenizer(name)
    longest = getattr(model.config, "max_position_embeddings", None) or max_length
    length = min(max_length, longest)
    if isinstance(found, Texts):
        labels = "tokens" if as_stream(model).task == "causal_lm" else None
        return tokenized(found.first(max_samples), tokenizer, length, labels=labels)
    # A few characters per token: no need to encode a whole corpus for its first thousand tokens.
    text = found.text if max_samples is None else found.text[: max_samples * length * 8]
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return token_blocks(ids, length).first(max_samples)


def _image_input(name: str, model: PreTrainedModel) -> Transform:
    """A transform of batches: bytes to floats of the model's size, channels, mean and std."""
    from everydepth.data.pictures import Lens, floats

    settings = preprocessing_of(name)

    def change(batch: Batch, generator: torch.Generator) -> Batch:
        pixels = floats(batch["pixel_values"])
        lens = Lens.of(model.config, settings, like=pixels)
        return batch | {"pixel_values": lens.normalized(lens.resized(pixels))}

    return change


def preprocessing_of(name: str) -> dict[str, Any]:
    """How a model's pictures are prepared; empty where it does not say."""
    file = preprocessor_file(name)
    return {} if file is None else json.loads(file.read_text(encoding="utf-8"))


def preprocessor_file(name: str) -> Path | None:
    """The config of the image processor that was saved with a model, here or on the hub."""
    from transformers.utils.hub import cached_file

    file = cached_file(
        name,
        "preprocessor_config.json",
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    return None if file is None else Path(file)
