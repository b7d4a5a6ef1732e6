"""Untrusted folders: nothing in them runs, and nothing outside of them is read.

Weights are safetensors and the rest is JSON. Three things could still lead out of a folder or to
code: a link, a path written into a file, and a setting that names code to fetch. All are refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from everydepth import files
from everydepth.errors import DataError
from everydepth.files import explained

LARGEST_JSON = 64 * 2**20  # bytes
# Settings by which a config asks for code from somewhere else, or for another model.
_CODE = (
    *("auto_map", "custom_pipelines", "quantization_config", "base_model_name_or_path"),
    *("backbone", "use_pretrained_backbone", "use_timm_backbone"),
)


def check_inside(folder: Path, root: Path) -> Path:
    """The folder, if neither it nor a file in it is a link that leads out of `root`."""
    home = root.resolve()
    for entry in (folder, *folder.iterdir()) if folder.is_dir() else (folder,):
        if not entry.resolve().is_relative_to(home):
            raise DataError(
                f"{entry} leads out of {root}, and of an untrusted folder only what is inside is "
                "read; replace the link by a copy if you trust it"
            )
    return folder


def check_config(file: Path) -> None:
    """An error if a model's config asks for code or weights from elsewhere."""
    for name, value in _settings(read_json(file)):
        if name in _CODE and value:
            raise DataError(
                f"{file} has {name}, which asks for code or weights from elsewhere; of untrusted "
                "models only those whose folder is all there is to them are opened"
            )
        # A name with a slash is a repository of compiled kernels.
        if name.endswith("_implementation") and "/" in str(value):
            raise DataError(
                f"{file} asks for {name} {str(value)[:80]!r}, code from a hub; remove the line, or "
                'use "sdpa" or "eager"'
            )


def read_json(file: Path) -> Any:
    """What a JSON file holds, if it is one and of a reasonable size."""
    with explained(f"{file} cannot be read", DataError):
        if file.stat().st_size > LARGEST_JSON:
            raise DataError(f"{file} is larger than {LARGEST_JSON // 2**20} MiB; shorten it")
    return files.read_json(file, DataError)


def _settings(tree: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Every name and value in a config, however deep."""
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield str(key), value
            yield from _settings(value, str(key))
    elif isinstance(tree, list):
        for value in tree:
            yield from _settings(value, name)
