"""Small made-up batches for a model, from its signature and config."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from everydepth.stream.wrapping import device_of

ROWS, TOKENS = 2, 6
# How configs call the number of features per step of a sound.
_BINS = ("num_mel_bins", "input_feat_per_channel", "feature_projection_input_dim", "feature_size")


def parameters_of(model: nn.Module) -> tuple[list[str], bool]:
    """The parameter names of a model's forward, and whether it accepts other keywords."""
    known = inspect.signature(model.forward).parameters.values()
    open_ended = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    named = [parameter.name for parameter in known if parameter.kind not in open_ended]
    return named, any(p.kind is inspect.Parameter.VAR_KEYWORD for p in known)


def examples(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Batches that the model may accept, the likeliest first; deterministic."""
    names, _ = parameters_of(model)
    config = getattr(model, "config", None)
    main = getattr(model, "main_input_name", None)
    generator = torch.Generator().manual_seed(0)
    parameter = next((p for p in model.parameters() if p.is_floating_point()), None)
    like = torch.zeros(()) if parameter is None else parameter

    def numbers(*shape: int) -> Tensor:
        drawn = torch.randn(*shape, generator=generator)
        dtype = like.dtype if like.dtype.itemsize > 1 else torch.float32
        return drawn.to(device=device_of(model), dtype=dtype)

    def tokens(count: int, length: int) -> Tensor:
        ids = torch.randint(min(5, count - 1), count, (ROWS, length), generator=generator)
        return ids.to(device_of(model))

    if main in (None, "input_ids") and "input_ids" in names:
        texts = list(_text(model, config, names, tokens))
        yield from texts
        if "pixel_values" in names:  # two towers that only run together
            channels = getattr(config, "num_channels", None) or 3
            for size in _sizes(model, config):
                yield {**texts[0], "pixel_values": numbers(ROWS, channels, *size)}
        return
    if main in ("input_features", "input_values"):
        yield from _sound(config, main, names, numbers, tokens)
    key = main or (names[0] if names else "input")
    first = next((m for m in model.modules() if _reads_input(m)), None)
    if isinstance(first, nn.Embedding):
        yield {key: tokens(first.num_embeddings, TOKENS)}
    elif isinstance(first, nn.Linear):
        yield {key: numbers(ROWS, first.in_features)}
        yield {key: numbers(ROWS, TOKENS, first.in_features)}
    elif isinstance(first, (nn.LayerNorm, nn.RMSNorm)):
        yield {key: numbers(ROWS, *first.normalized_shape)}
        yield {key: numbers(ROWS, TOKENS, *first.normalized_shape)}
    elif isinstance(first, nn.Conv1d):
        for length in (64, 1024):
            yield {key: numbers(ROWS, first.in_channels, length)}
    channels = getattr(first, "in_channels", None) or getattr(config, "num_channels", None) or 3
    for size in _sizes(model, config):
        yield {key: numbers(ROWS, channels, *size)}


def _reads_input(module: nn.Module) -> bool:
    leaf = next(module.children(), None) is None
    return leaf and next(module.parameters(recurse=False), None) is not None


def _sizes(model: nn.Module, config: Any) -> Iterator[tuple[int, int]]:
    own = getattr(model, "default_cfg", None) or getattr(model, "pretrained_cfg", None) or {}
    wanted = own.get("input_size") if isinstance(own, Mapping) else None
    if wanted is not None:
        yield (wanted[-2], wanted[-1])
    inner = getattr(config, "vision_config", None) or config
    size = getattr(inner, "image_size", None) or getattr(model, "image_size", None)
    if isinstance(size, int):
        yield size, size
    elif isinstance(size, (list, tuple)) and len(size) == 2:
        yield size[0], size[1]
    for guess in (64, 224, 32, 256, 28):
        yield guess, guess


def _text(
    model: nn.Module, config: Any, names: list[str], tokens: Any
) -> Iterator[dict[str, Tensor]]:
    known = getattr(model, "get_input_embeddings", None)
    embedding = None
    if known is not None:
        try:
            embedding = known()
        except NotImplementedError:
            embedding = None
    count = getattr(embedding, "num_embeddings", None) or getattr(config, "vocab_size", None)
    if not isinstance(count, int):
        found = [m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)]
        count = max(found, default=32)
    end = getattr(config, "eos_token_id", None)
    for known in dict.fromkeys((count, min(count, 32))):  # another vocabulary may be smaller
        ids = tokens(known, TOKENS)
        # Rows that share all but their last tokens: if the model is causal, their predictions
        # agree until there.
        ids[1:, :-2] = ids[:1, :-2]
        if isinstance(end, int) and 0 <= end < known:
            ids[:, -1] = end
        batch = {"input_ids": ids}
        if "attention_mask" in names:
            batch["attention_mask"] = torch.ones_like(ids)
        if "bbox" in names:
            batch["bbox"] = torch.zeros(ROWS, TOKENS, 4, dtype=torch.long, device=ids.device)
        if "decoder_input_ids" in names:
            yield {**batch, "decoder_input_ids": tokens(known, TOKENS)}
        yield batch
        yield {"input_ids": ids}


def _sound(
    config: Any, main: str, names: list[str], numbers: Any, tokens: Any
) -> Iterator[dict[str, Tensor]]:
    more: dict[str, Tensor] = {}
    if "decoder_input_ids" in names:
        more["decoder_input_ids"] = tokens(getattr(config, "vocab_size", 32), TOKENS)
    parts = (getattr(config, name, None) for name in ("audio_config", "encoder_config"))
    inner = next((part for part in parts if part), config)
    sizes = (getattr(inner, name, None) for name in _BINS)
    bins = next((size for size in sizes if isinstance(size, int)), 80)
    positions = getattr(inner, "max_source_positions", None)
    length = getattr(inner, "max_length", None)
    if main == "input_features" and isinstance(positions, int):
        yield {main: numbers(ROWS, bins, 2 * positions), **more}
    if main == "input_values" and isinstance(length, int):
        yield {main: numbers(ROWS, length, bins)}
    if main == "input_values":
        yield {main: numbers(ROWS, 4000), **more}
    yield {main: numbers(ROWS, 64, bins), **more}
    yield {main: numbers(ROWS, bins, 64), **more}
