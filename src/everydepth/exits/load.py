"""The first blocks of a checkpoint, without reading the others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from everydepth.errors import DataError
from everydepth.exits.lazy import lazy_tensors
from everydepth.exits.quiet import quiet_transformers
from everydepth.stream import as_stream, model_class

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def load(directory: str | Path, *, depth: int | None = None, **options: Any) -> PreTrainedModel:
    """A plain model with `depth` blocks from a Hugging Face checkpoint directory, in eval mode.

    Only the tensors of these blocks, the embedding and the readout are read, so time and memory
    grow with `depth`. The exception is a depth whose readout is computed from later blocks (one
    before the last change of shape): there the whole checkpoint is read first.

    >>> model.save_pretrained("full")
    >>> small = ed.load("full", depth=1)
    >>> type(small).__name__, small.config.num_hidden_layers
    ('ViTForImageClassification', 1)
    """
    folder = Path(directory)
    cls, config = _described(folder)
    if depth is None:
        return _read(cls, folder, config)
    with torch.device("meta"):
        whole = cls(config)
    stream = as_stream(whole, **options)
    small: Any = stream.truncated(stream.check_depth(depth, lowest=1), share=True)
    known = {name: tensor.shape for name, tensor in whole.state_dict().items()}
    if any(known.get(name) != tensor.shape for name, tensor in small.state_dict().items()):
        full = as_stream(_read(cls, folder, config), **options)
        return cast("PreTrainedModel", full.truncated(depth, share=True))
    return _read(cls, folder, small.config)


def _described(folder: Path) -> tuple[type[PreTrainedModel], Any]:
    """The class and the config of the model in a checkpoint directory."""
    file = folder / "config.json"
    try:
        names = json.loads(file.read_text(encoding="utf-8")).get("architectures") or []
    except (OSError, ValueError) as error:
        raise DataError(
            f"{folder} has no readable config.json ({error}); give a directory written by "
            "save_pretrained or everydepth.export(format='hf')"
        ) from error
    if len(names) != 1:
        raise DataError(
            f"{file} names {names or 'no'} architectures, so the class is unknown; save the model "
            "again with save_pretrained"
        )
    cls = cast("type[PreTrainedModel]", model_class(names[0]))
    return cls, cls.config_class.from_pretrained(folder)  # pyright: ignore[reportOptionalMemberAccess]


def _read(cls: type[PreTrainedModel], folder: Path, config: Any) -> PreTrainedModel:
    """Read what a model of this config needs; all other tensors stay on the disk."""
    from transformers import GenerationConfig

    tensors: Any = lazy_tensors(folder)
    # It would list every tensor of the blocks that are left out.
    with quiet_transformers():
        loaded: Any = cls.from_pretrained(
            None,
            config=config,
            state_dict=tensors,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # reported below
        )
    model, info = loaded
    missing = sorted(map(str, {*info["missing_keys"], *info["mismatched_keys"]}))
    if missing:
        raise DataError(
            f"{folder} lacks {len(missing)} tensors of {cls.__name__} ({', '.join(missing[:3])}, "
            "...) or has them in another shape; it was saved from another class"
        )
    if (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    return model.eval()
