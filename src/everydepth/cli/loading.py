"""Models and data from the words of a command line: a folder or a name in, objects out."""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from everydepth.errors import DataError, UnsupportedModelError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from everydepth.data import Batch, Batches, Rows

# Our own classes, which transformers does not know by name.
_OWN = {
    "CifarResNet": "everydepth.architectures.cifar_resnet",
    "ResidualMLP": "everydepth.architectures.residual_mlp",
}


def model_folder(name: str) -> str:
    """Where the model of a run directory is; any other name or folder as it is."""
    inner = Path(name) / "model"
    return str(inner) if (inner / "config.json").is_file() else name


def load_model(name: str) -> PreTrainedModel:
    """The model in a folder or of a Hugging Face name, in evaluation mode.

    Its class is the one its own configuration names. Only safetensors weights are read and no code
    of the model is run, so that a model of a stranger is safe to open.
    """
    from transformers import PreTrainedConfig
    from transformers.utils import logging

    if not sys.stderr.isatty():
        logging.disable_progress_bar()
    try:
        config, _ = PreTrainedConfig.get_config_dict(name)
    except (OSError, ValueError) as error:
        raise UnsupportedModelError(_not_found(name)) from error
    if not config:
        raise UnsupportedModelError(_not_found(name))
    try:
        model = _model_class(name, config).from_pretrained(name, use_safetensors=True)
    except OSError as error:
        raise UnsupportedModelError(
            f"{name!r} has no model.safetensors that can be read ({error}); other weights can hold "
            "code, so load them yourself and save it again with save_pretrained"
        ) from error
    return model.eval()


def _model_class(name: str, config: dict[str, Any]) -> type[PreTrainedModel]:
    import transformers

    named = config.get("architectures") or [None]
    architecture = named[0] if isinstance(named, list) else None
    if not isinstance(architecture, str):
        raise UnsupportedModelError(
            f"the config.json of {name!r} names no architecture, so its class is unknown; save the "
            'model again with save_pretrained, or add "architectures": ["ClassName"]'
        )
    home = import_module(_OWN[architecture]) if architecture in _OWN else transformers
    found = getattr(home, architecture, None)
    if not (isinstance(found, type) and issubclass(found, transformers.PreTrainedModel)):
        raise UnsupportedModelError(
            f"{name!r} is a {architecture}, which neither transformers {transformers.__version__} "
            "nor everydepth has; use a model whose class ships with one of them"
        )
    return found


def _not_found(name: str) -> str:
    path = Path(name)
    if path.is_dir():
        inside = ", ".join(sorted(p.name for p in path.iterdir())[:8]) or "nothing"
        return (
            f"the folder {name!r} holds {inside}, but no readable config.json of a model; give a "
            "folder written by save_pretrained"
        )
    return (
        f"{name!r} is neither a folder here nor a model found on the Hugging Face hub; give the "
        "folder of a model, or check the name and the network"
    )


def load_tokenizer(name: str) -> Any:
    """The tokenizer saved beside a model."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise DataError(
            f"text data, but {name!r} has no tokenizer; save one beside the model with "
            "tokenizer.save_pretrained"
        ) from error


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
    """Data by name or path, as the model called `name` takes it.

    Images become floats of the model's size and channels, normalised as its preprocessor_config
    says; texts go through its tokenizer; one long text becomes blocks of `max_length` tokens.
    """
    from everydepth.data import Images, Points, Texts, batches, load, trim_padding

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
    from everydepth.stream import as_stream

    if not isinstance(found, Texts | Corpus):
        raise DataError(
            f"{data!r} holds {type(found).__name__}, but a model takes images, points or text; "
            "say which columns are text with everydepth.data.load_table, in Python"
        )
    tokenizer = load_tokenizer(name)
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
            centre, scale = (pixels.new_tensor(v).view(1, -1, 1, 1) for v in (self.mean, self.std))
            pixels = (pixels - centre) / scale
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
