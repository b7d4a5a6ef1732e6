"""Untrusted folders: nothing in them is executed, and nothing outside of them is read.

Weights are safetensors, and everything else is JSON. Three things could still lead out of a folder
or to code, and are refused: links, paths in files, and settings that name code to download.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from everydepth import files
from everydepth.errors import DataError
from everydepth.files import check_kernels, explained, settings_in

LARGEST_JSON = 64 * 2**20  # bytes
# Settings of a config that refer to code or models elsewhere.
_CODE = (
    *("auto_map", "custom_pipelines", "quantization_config", "base_model_name_or_path"),
    *("backbone", "use_pretrained_backbone", "use_timm_backbone"),
)


def check_inside(folder: Path, root: Path) -> Path:
    """The folder; an error if it or a file in it is a link that leads out of `root`."""
    # Not `resolve`, which raises a bare error at links that lead to one another.
    home = os.path.realpath(root)
    for entry in (folder, *folder.iterdir()) if folder.is_dir() else (folder,):
        if not Path(os.path.realpath(entry)).is_relative_to(home):
            raise DataError(
                f"{entry} leads out of {root}, an untrusted folder, outside of which nothing is "
                "read; replace the link by a copy if you trust it"
            )
    return folder


def check_config(file: Path, *, trusted: bool = False) -> Any:
    """A model's config; an error if it refers to code, or to weights elsewhere.

    trusted: only refuse code to download. (`auto_map` also names code, but it is never run.)
    """
    config = read_json(file)
    for name, value in settings_in(config):
        if name in _CODE and value and not trusted:
            raise DataError(
                f"{file} has {name}, which refers to code or weights elsewhere; untrusted models "
                "must be complete in their folder, so load it as trusted if you trust it"
            )
    check_kernels(config, file)
    return config


def read_json(file: Path) -> Any:
    """The content of a JSON file of at most `LARGEST_JSON` bytes."""
    with explained(f"{file} cannot be read", DataError):
        if file.stat().st_size > LARGEST_JSON:
            raise DataError(f"{file} is larger than {LARGEST_JSON // 2**20} MiB; shorten it")
    return files.read_json(file, DataError)
