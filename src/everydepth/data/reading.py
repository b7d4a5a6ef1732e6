"""Bytes and text of a local file, plain or packed, with errors that name the file."""

from __future__ import annotations

import gzip
import io
import lzma
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

from everydepth.errors import DataError

T = TypeVar("T")

# Real data is compressed tenfold, sorted labels a hundredfold, a zip bomb a thousandfold or more.
MOST_UNPACKED = 2**26  # bytes that any file may unpack to
MOST_SHRUNK = 200
_MAGIC = {".xz": b"\xfd7zXZ\x00", ".gz": b"\x1f\x8b"}
_ALIASES = {"val": "valid", "validation": "valid", "dev": "valid"}
# A byte order mark, and the same after its bytes were read as latin-1 and encoded again (MRPC).
_BYTE_ORDER_MARKS = ("\ufeff", "\u00ef\u00bb\u00bf")


def unpacked_name(path: Path) -> str:
    """The file's name without `.xz` or `.gz`."""
    return path.stem if path.suffix in _MAGIC else path.name


class Absent(DataError):
    """Data that does not exist; callers may fall back to other data."""


def find_file(folder: Path, name: str) -> Path:
    """`name` in `folder`, plain or packed."""
    for candidate in (folder / name, folder / f"{name}.xz", folder / f"{name}.gz"):
        if candidate.is_file():
            return candidate
    raise Absent(f"no {name}, {name}.xz or {name}.gz in {folder}; it holds {listing(folder)}")


def listing(folder: Path) -> str:
    """The first names in a folder, for a message."""
    if not folder.is_dir():
        return "nothing: there is no such folder"
    names = sorted(entry.name for entry in folder.iterdir())
    return (", ".join(names[:8]) + (", ..." if len(names) > 8 else "")) or "nothing"


def read_bytes(path: Path) -> bytes:
    """The content of a file, unpacked if its first bytes show that it is packed."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise DataError(
            f"{path} cannot be read ({error.strerror}); check the path, {path.parent} holds "
            f"{listing(path.parent)}"
        ) from error
    expected = _MAGIC.get(path.suffix)
    if expected is not None and not raw.startswith(expected):
        raise DataError(
            f"{path} starts with {raw[:6].hex(' ') or 'nothing'}, but a {path.suffix} file starts "
            f"with {expected.hex(' ')}; download it again, or rename it if it is not packed"
        )
    try:
        if raw.startswith(_MAGIC[".xz"]):
            with lzma.open(io.BytesIO(raw)) as packed:
                return _unpacked(packed, path, len(raw))
        if raw.startswith(_MAGIC[".gz"]):
            with gzip.open(io.BytesIO(raw)) as packed:
                return _unpacked(packed, path, len(raw))
    except (EOFError, OSError, lzma.LZMAError, zlib.error) as error:
        raise DataError(f"{path} is truncated or corrupt ({error}); download it again") from error
    return raw


def _unpacked(packed: gzip.GzipFile | lzma.LZMAFile, path: Path, size: int) -> bytes:
    """The unpacked content, or an error once it exceeds the limit."""
    content = packed.read(max(MOST_UNPACKED, MOST_SHRUNK * size) + 1)
    check_unpacked(len(content), path, size)
    return content


def check_unpacked(length: int, path: Path, size: int) -> None:
    """Raise an error if a packed file of `size` bytes looks like a zip bomb."""
    most = max(MOST_UNPACKED, MOST_SHRUNK * size)
    if length > most:
        raise DataError(
            f"{path} has {size:,} bytes and unpacks to more than {most:,}, like a zip bomb; unpack "
            "it yourself if you trust it"
        )


def decode(content: bytes, source: Path | str, encoding: str = "utf-8") -> str:
    """Text with Unix line ends and no byte order mark."""
    try:
        text = content.decode(encoding)
    except UnicodeDecodeError as error:
        raise DataError(
            f"{source}: byte {error.start} is not {encoding}; give the file's encoding, for "
            "example encoding='latin-1'"
        ) from error
    for mark in _BYTE_ORDER_MARKS:
        text = text.removeprefix(mark)
    return text.replace("\r\n", "\n")


def read_text(path: Path, encoding: str = "utf-8") -> str:
    """The text of a plain or packed file."""
    return decode(read_bytes(path), path, encoding)


def lines(text: str) -> list[str]:
    """Lines by newline only: tweets contain other characters that `splitlines` splits at."""
    return text.removesuffix("\n").split("\n") if text else []


def pick_split(name: str, split: str, allowed: Mapping[str, T]) -> T:
    """The entry for `split`; val, validation and dev mean valid unless they exist themselves."""
    key = split if split in allowed else _ALIASES.get(split, split)
    if key not in allowed:
        raise Absent(
            f"split {split!r}, but {name} has {', '.join(map(repr, allowed))}; use one of these, "
            "or make a part with .split((0.9, 0.1))"
        )
    return allowed[key]
