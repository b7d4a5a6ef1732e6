"""Models and tokenizers from a folder of a stranger: nothing in it runs, nothing outside is read.

Weights are safetensors and the rest is JSON. Three things could still lead out of a folder or to
code: a link, a path written into a file, and a setting that names code to fetch. All are refused.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from everydepth.errors import DataError, EveryDepthError
from everydepth.exits import load

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

LARGEST_JSON = 64 * 2**20  # bytes
# Settings by which a config asks for code from somewhere else, or for another model.
_CODE = ("auto_map", "custom_pipelines", "quantization_config", "base_model_name_or_path")


def model_folder(path: Path) -> Path:
    """The folder of the model in a run directory, or the folder itself."""
    return path / "model" if (path / "model" / "config.json").is_file() else path


def open_model(path: Path) -> PreTrainedModel:
    """The model of a run directory or in a folder, in evaluation mode."""
    folder = check_inside(model_folder(path), path)
    config = read_json(folder / "config.json")
    for name, value in _settings(config):
        if name in _CODE and value:
            raise DataError(
                f"{folder / 'config.json'} has {name}, which asks for code or weights from "
                "elsewhere; the playground opens only models whose folder is all there is to them"
            )
        # A name with a slash is a repository of compiled kernels.
        if name.endswith("_implementation") and "/" in str(value):
            raise DataError(
                f"{folder / 'config.json'} asks for {name} {str(value)[:80]!r}, code from a hub; "
                'remove the line, or use "sdpa" or "eager"'
            )
    try:
        return load(folder)
    except EveryDepthError:
        raise
    except (ArithmeticError, AttributeError, LookupError, OSError, TypeError, ValueError) as error:
        raise DataError(
            f"the model in {folder} cannot be opened ({type(error).__name__}: {error}); give a "
            "folder written by save_pretrained"
        ) from error
    except RuntimeError as error:  # sizes that do not fit together, or do not fit into the memory
        raise DataError(f"the model in {folder} cannot be built ({error})") from error


def open_tokenizer(path: Path) -> PreTrainedTokenizerFast:
    """The tokenizer beside a model, from its tokenizer.json alone.

    The other files of a tokenizer may name a class or a path; this one is data only.
    """
    from transformers import PreTrainedTokenizerFast

    folder = check_inside(model_folder(path), path)
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise DataError(
            f"{folder} has no tokenizer.json; save a fast tokenizer beside the model with "
            "tokenizer.save_pretrained"
        )
    read_json(file)  # an error of our own, if it is not even JSON
    try:
        return PreTrainedTokenizerFast(tokenizer_file=str(file))
    except Exception as error:  # the parser raises nothing more special
        raise DataError(
            f"{file} is not a tokenizer ({error}); save the tokenizer again with save_pretrained"
        ) from error


def check_inside(folder: Path, root: Path) -> Path:
    """The folder, if neither it nor a file in it is a link that leads out of `root`."""
    home = root.resolve()
    for entry in (folder, *folder.iterdir()) if folder.is_dir() else (folder,):
        if not entry.resolve().is_relative_to(home):
            raise DataError(
                f"{entry} leads out of {root}, and the playground reads only what is inside; "
                "replace the link by a copy if you trust it"
            )
    return folder


def read_json(file: Path) -> Any:
    try:
        if file.stat().st_size > LARGEST_JSON:
            raise DataError(f"{file} is larger than {LARGEST_JSON // 2**20} MiB; shorten it")
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, RecursionError, ValueError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{file} cannot be read as JSON ({error}); check the path") from error


def _settings(tree: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Every name and value in a config, however deep."""
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield str(key), value
            yield from _settings(value, str(key))
    elif isinstance(tree, list):
        for value in tree:
            yield from _settings(value, name)
