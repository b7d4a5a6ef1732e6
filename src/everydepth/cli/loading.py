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
        return batches(_first(found, max_samples), batch_size, transform=_ImageInput(name, model))
    if isinstance(found, Points):
        return batches(_first(found, max_samples), batch_size)
    rows = _tokens(name, model, found, data, max_length, max_samples)
    return batches(rows, batch_size, transform=trim_padding if isinstance(found, Texts) else None)


def _first(rows: Rows, count: int | None) -> Rows:
    return rows if count is None else rows.subset(range(min(count, len(rows))))


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
        next_token = as_stream(model).task == "causal_lm"
        texts = found if max_samples is None else found.subset(range(min(max_samples, len(found))))
        return tokenized(texts, tokenizer, length, labels="tokens" if next_token else None)
    # A few characters a token: no need to encode a whole corpus for its first thousand tokens.
    text = found.text if max_samples is None else found.text[: max_samples * length * 8]
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return _first(token_blocks(ids, length), max_samples)


class _ImageInput:
    """A transform of batches: bytes to floats of the model's size, channels, mean and std."""

    def __init__(self, name: str, model: PreTrainedModel) -> None:
        size: Any = getattr(model.config, "image_size", None)
        self.size = (size, size) if isinstance(size, int) else size
        self.channels = getattr(model.config, "num_channels", None)
        self.mean, self.std = _normalisation(name)

    def __call__(self, batch: Batch, generator: torch.Generator) -> Batch:
        from torch.nn.functional import interpolate

        pixels = batch["pixel_values"]
        if not pixels.is_floating_point():
            pixels = pixels.float() / 255
        if pixels.shape[1] == 1 and self.channels == 3:
            pixels = pixels.expand(-1, 3, -1, -1)
        if self.size is not None and tuple(pixels.shape[-2:]) != tuple(self.size):
            pixels = interpolate(pixels, tuple(self.size), mode="bilinear", antialias=True)
        if self.mean is not None and self.std is not None:
            center, scale = (pixels.new_tensor(v).view(1, -1, 1, 1) for v in (self.mean, self.std))
            pixels = (pixels - center) / scale
        return batch | {"pixel_values": pixels}


def _normalisation(name: str) -> tuple[list[float] | None, list[float] | None]:
    """Mean and std of the saved image processor; none if the model came without one."""
    from transformers.utils.hub import cached_file

    file = cached_file(
        name,
        "preprocessor_config.json",
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    settings = json.loads(Path(file).read_text(encoding="utf-8")) if file else {}
    if not settings.get("do_normalize", bool(settings.get("image_mean"))):
        return None, None
    return settings.get("image_mean"), settings.get("image_std")
