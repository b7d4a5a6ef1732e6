"""Tensors that stay on disk until they are needed; exactly their bytes are then read."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from everydepth.errors import DataError
from everydepth.files import (
    CHECKSUMS,
    read_json,
    tensor_checksum,
    tensor_header,
    weight_files,
)

_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
}


@dataclass(frozen=True)
class LazyTensor:
    """A tensor in a safetensors file; `lazy[...]` reads it, as transformers does when it loads.

    Not a memory map: the kernel would read ahead, on some disks by megabytes, into the blocks to be
    skipped.

    entry: its entry in the file's header, which the checksum covers.
    """

    file: Path
    start: int
    length: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    entry: dict[str, Any] = field(default_factory=dict[str, Any], repr=False)
    checksum: str | None = None

    def __getitem__(self, index: Any) -> Tensor:
        whole = torch.empty(self.length, dtype=torch.uint8)
        bytes_of: Any = whole.numpy()
        view = memoryview(bytes_of)
        with open(self.file, "rb", buffering=0) as stream:
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
            stream.seek(self.start)
            done = 0
            while done < self.length:
                count = stream.readinto(view[done:])
                if not count:
                    raise DataError(f"{self.file} ends early; copy it again from its source")
                done += count
        if self.checksum is not None and tensor_checksum(self.entry, view) != self.checksum:
            raise DataError(
                f"{self.file} is damaged: a checksum differs; restore it from a copy, or delete "
                f"{CHECKSUMS} next to it if you changed the weights yourself"
            )
        return whole.view(self.dtype).view(self.shape)[index]

    def is_floating_point(self) -> bool:
        return self.dtype.is_floating_point


def lazy_tensors(folder: Path) -> dict[str, LazyTensor]:
    """All tensors of a checkpoint directory, in one file or several with an index."""
    try:
        found: dict[str, LazyTensor] = {}
        sums: dict[str, dict[str, str]] = {}
        if (folder / CHECKSUMS).is_file():
            sums = read_json(folder / CHECKSUMS, DataError)
        for file in weight_files(folder):
            found |= _tensors(file, sums.get(file.name, {}))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(
            f"the weights in {folder} cannot be read ({error}); restore its safetensors files"
        ) from error
    return found


def _tensors(file: Path, sums: dict[str, str]) -> dict[str, LazyTensor]:
    size = file.stat().st_size
    header, first = tensor_header(file)
    if sums and header.keys() != sums.keys():
        raise ValueError(f"{file.name} has other tensors than {CHECKSUMS}")
    found: dict[str, LazyTensor] = {}
    for name, entry in header.items():
        dtype, (start, end) = _DTYPES[entry["dtype"]], entry["data_offsets"]
        shape = tuple(int(n) for n in entry["shape"])
        whole = end - start == torch.Size(shape).numel() * dtype.itemsize
        if not whole or start < 0 or first + end > size:
            raise ValueError(f"{file.name} ends early, or lies about {name}")
        found[name] = LazyTensor(
            file, first + start, end - start, dtype, shape, entry, sums.get(name)
        )
    return found
