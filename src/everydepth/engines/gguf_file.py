"""Read a GGUF file: its metadata as raw bytes, and the positions of its tensors.

The reader of the `gguf` package creates an array for every token of the vocabulary: 160 MB and
several seconds for 49,000 tokens. To move blocks, the raw bytes are enough.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

from everydepth.environment import require
from everydepth.errors import DataError

MAGIC = b"GGUF"

# Value types of the format, by number; struct's letters for those of a fixed size.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q"}
_SCALARS[12] = "d"
UINT32, STRING, ARRAY = 4, 8, 9
_VERSIONS = (2, 3)  # version 1 had shorter numbers, and llama.cpp no longer reads it
_ALIGNMENT = 32  # bytes, unless the file says otherwise


@dataclass(frozen=True, kw_only=True)
class Value:
    """A metadata value as raw bytes."""

    kind: int
    raw: bytes

    def scalar(self) -> Any:
        """The value as a number, bool or string."""
        if self.kind == STRING:
            return self.raw[8:].decode()
        return struct.unpack(f"<{_SCALARS[self.kind]}", self.raw)[0]

    @property
    def length(self) -> int | None:
        """The length of an array; None for anything else."""
        return struct.unpack_from("<Q", self.raw, 4)[0] if self.kind == ARRAY else None

    def selected(self, places: list[int]) -> Value:
        """The entries of an array at `places`; only for entries of a fixed size."""
        (inner,) = struct.unpack_from("<I", self.raw)
        size = struct.calcsize(f"<{_SCALARS[inner]}")
        entries = (self.raw[12 + size * place :][:size] for place in places)
        raw = struct.pack("<IQ", inner, len(places)) + b"".join(entries)
        return Value(kind=ARRAY, raw=raw)

    @classmethod
    def text(cls, text: str) -> Value:
        return cls(kind=STRING, raw=packed(text))

    @classmethod
    def number(cls, value: int, kind: int = UINT32) -> Value:
        return cls(kind=kind, raw=struct.pack(f"<{_SCALARS[kind]}", value))


@dataclass(frozen=True, kw_only=True)
class Tensor:
    """The name, shape, type and position of a tensor in the file, in bytes."""

    name: str
    shape: tuple[int, ...]
    kind: int
    start: int
    size: int


@dataclass(frozen=True, kw_only=True)
class GGUF:
    """The header of a GGUF file."""

    path: Path
    version: int
    values: Mapping[str, Value]
    tensors: tuple[Tensor, ...]
    alignment: int

    @classmethod
    def read(cls, path: str | Path) -> GGUF:
        """Read the header; the tensors stay on disk."""
        path = Path(path)
        try:
            with open(path, "rb") as file:
                return _Header(file, path).read()
        except DataError:
            raise
        except (OSError, ValueError) as error:  # ValueError: a null byte in the path
            raise DataError(f"{path} cannot be read ({error}); give the path of a GGUF file") from (
                error
            )

    @property
    def architecture(self) -> str:
        return str(self.required("general.architecture"))

    @property
    def depth(self) -> int:
        """The number of blocks, according to the metadata."""
        return int(self.required(f"{self.architecture}.block_count"))

    def required(self, key: str) -> Any:
        """A scalar value that every model must have."""
        if key not in self.values or self.values[key].kind == ARRAY:
            raise DataError(
                f"{self.path} has no {key} in its metadata, so it is not a model with blocks; give "
                "a GGUF file that llama.cpp runs as a language model"
            )
        return self.values[key].scalar()


def is_gguf(path: str | Path) -> bool:
    """Whether a path is a GGUF file, by its name or its first bytes."""
    path = Path(path)
    if not path.is_file():
        return path.suffix == ".gguf" and not path.is_dir()
    with open(path, "rb") as file:
        return path.suffix == ".gguf" or file.read(4) == MAGIC


def packed(text: str) -> bytes:
    """A string in GGUF's format: its length, then its bytes."""
    content = text.encode()
    return struct.pack("<Q", len(content)) + content


class _Header:
    """Reads the header and refuses anything that leads beyond the end of the file."""

    def __init__(self, file: BinaryIO, path: Path) -> None:
        self.file = file
        self.path = path
        self.bytes = path.stat().st_size

    def read(self) -> GGUF:
        if self.file.read(4) != MAGIC:
            raise DataError(
                f"{self.path} does not begin with {MAGIC.decode()}, so it is not a GGUF file; give "
                "a .gguf file, or the folder of a Hugging Face model"
            )
        version = self._number("I")
        if version not in _VERSIONS:
            swapped = version & 0xFFFF == 0
            raise DataError(
                f"{self.path} is {'big-endian GGUF' if swapped else f'GGUF version {version}'}; "
                f"only versions {_VERSIONS[0]} and {_VERSIONS[1]} in little-endian order can be "
                "read. Convert it with llama.cpp"
            )
        tensors, count = self._number("Q"), self._number("Q")
        values: dict[str, Value] = {}
        for _ in range(count):
            key = self._string()[8:].decode(errors="replace")
            if key in values:
                raise self._broken(f"its metadata has {key!r} twice")
            kind = self._number("I")
            values[key] = Value(kind=kind, raw=self._value(kind))
        parts = values.get("split.count")
        if parts is not None and int(parts.scalar()) > 1:
            raise DataError(
                f"{self.path} is one of {parts.scalar()} parts of a split model; join them with "
                "`llama-gguf-split --merge`, then give the whole file"
            )
        infos = [self._info() for _ in range(tensors)]
        alignment = _ALIGNMENT
        if "general.alignment" in values:
            alignment = int(values["general.alignment"].scalar())
        if alignment < 8 or alignment & (alignment - 1):
            raise DataError(f"{self.path} has general.alignment {alignment}; it must be 8, 16, ...")
        begin = -(-self.file.tell() // alignment) * alignment
        return GGUF(
            path=self.path,
            version=version,
            values=values,
            tensors=tuple(self._placed(begin, *info) for info in infos),
            alignment=alignment,
        )

    def _info(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()[8:].decode(errors="replace")
        rank = self._number("I")
        if rank > 8:  # ggml allows four; a damaged file may have anything
            raise self._broken(f"tensor {name!r} has {rank} dimensions")
        shape = tuple(self._number("Q") for _ in range(rank))
        return name, shape, self._number("I"), self._number("Q")

    def _placed(
        self, begin: int, name: str, shape: tuple[int, ...], kind: int, offset: int
    ) -> Tensor:
        sizes = block_sizes()
        if kind not in sizes:
            raise DataError(
                f"{self.path}: tensor {name!r} has type {kind}, which is unknown to the package "
                "gguf; install a newer version"
            )
        entries, content = sizes[kind]
        size = prod(shape) // entries * content
        if begin + offset + size > self.bytes:
            raise self._broken(
                f"tensor {name!r} ends at byte {begin + offset + size:,}, the file at "
                f"{self.bytes:,}"
            )
        return Tensor(name=name, shape=shape, kind=kind, start=begin + offset, size=size)

    def _value(self, kind: int, inside: int = 0) -> bytes:
        if kind in _SCALARS:
            return self._take(struct.calcsize(f"<{_SCALARS[kind]}"))
        if kind == STRING:
            return self._string()
        if kind != ARRAY:
            raise self._broken(f"a value has the unknown type {kind}")
        if inside > 8:  # no model has nested arrays
            raise self._broken("its metadata has deeply nested arrays")
        head = self._take(12)
        inner, length = struct.unpack("<IQ", head)
        if inner in _SCALARS:
            return head + self._take(length * struct.calcsize(f"<{_SCALARS[inner]}"))
        parts = [head]
        for _ in range(length):  # a wrong length soon meets the end of the file
            parts.append(self._value(inner, inside + 1))
        return b"".join(parts)

    def _string(self) -> bytes:
        head = self._take(8)
        return head + self._take(struct.unpack("<Q", head)[0])

    def _number(self, letter: str) -> int:
        return struct.unpack(f"<{letter}", self._take(struct.calcsize(f"<{letter}")))[0]

    def _take(self, count: int) -> bytes:
        found = self.file.read(count) if count <= self.bytes else b""
        if len(found) != count:
            raise self._broken("its header is incomplete")
        return found

    def _broken(self, reason: str) -> DataError:
        return DataError(f"{self.path} is damaged or truncated: {reason}; download it again")


def block_sizes() -> dict[int, tuple[int, int]]:
    """By tensor type: the number of entries in a quantization block, and its bytes."""
    require("GGUF", "gguf", extra="gguf")
    constants = import_module("gguf.constants")
    return {int(kind): size for kind, size in constants.GGML_QUANT_SIZES.items()}
