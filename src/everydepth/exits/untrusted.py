"""Untrusted folders: nothing in them runs, and nothing outside of them is read.

Weights are safetensors and the rest is JSON. Three things could still lead out of a folder or to
code: a link, a path written into a file, and a setting that names code to fetch. All are refused.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from everydepth import files
from everydepth.errors import DataError
from everydepth.files import check_kernels, explained, settings_in

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


def check_config(file: Path, *, trusted: bool = False) -> Any:
    """What a model's config holds; an error if it asks for code, or for weights from elsewhere.

    trusted: code alone is refused. `auto_map` names code too, which nothing of ours runs.
    """
    config = read_json(file)
    for name, value in settings_in(config):
        if name in _CODE and value and not trusted:
            raise DataError(
                f"{file} has {name}, which asks for code or weights from elsewhere; of untrusted "
                "models only those whose folder is all there is to them are opened"
            )
    check_kernels(config, file)
    return config


def read_json(file: Path) -> Any:
    """What a JSON file holds, if it is one and of a reasonable size."""
    with explained(f"{file} cannot be read", DataError):
        if file.stat().st_size > LARGEST_JSON:
            raise DataError(f"{file} is larger than {LARGEST_JSON // 2**20} MiB; shorten it")
    return files.read_json(file, DataError)
