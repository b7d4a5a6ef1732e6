"""Atomic writes, and safe reads of JSON and safetensors files."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Container, Generator, Iterator
from contextlib import contextmanager, suppress
from mmap import ACCESS_READ, mmap
from pathlib import Path
from tokenize import TokenError
from typing import Any, cast

import psutil

from everydepth.errors import DataError, EveryDepthError, ExportError, RunError

TEMPORARY = ".tmp-"
"""Prefix of unfinished files and folders, which may be deleted at any time."""

CHECKSUMS = "checksums.json"

# What NumPy raises for a malformed array: its header is parsed as Python, its size is believed.
MALFORMED_ARRAY = (EOFError, MemoryError, SyntaxError, TokenError, ValueError)

_FULL = {errno.ENOSPC, errno.EDQUOT}
_NEXT = {
    errno.ENAMETOOLONG: "use a shorter name",
    errno.ENOENT: "it was moved, deleted or never there: check the path",
    errno.EACCES: "use a path that you may read and write, or change its permissions",
    errno.EPERM: "use a path that you may read and write, or change its permissions",
    errno.EROFS: "use a path that is not read-only",
    errno.EEXIST: "a file is in the way of a folder: use another path",
    errno.ENOTDIR: "a file is in the way of a folder: use another path",
    errno.EISDIR: "a folder is in the way of a file: use another path",
    errno.ENOSPC: "free some space, then try again",
    errno.EDQUOT: "free some space, then try again",
}


def write_text(path: Path, text: str) -> None:
    """Replace a file atomically: after a crash it is either the old version or the new one."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, content: bytes) -> None:
    """`write_text` for bytes."""
    with whole_file(path) as temporary:
        temporary.write_bytes(content)


@contextmanager
def whole_file(path: Path) -> Generator[Path, None, None]:
    """A temporary path to write to, renamed to `path` at the end unless an error occurs."""
    if not path.name or path.is_dir():  # "", "." and "/" have no name
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if path.exists() and not path.is_file():  # root may replace even /dev/null
        said = "it is a device, a pipe or a socket, which a file would replace"
        raise OSError(errno.EINVAL, said, str(path))
    with _on_the_way(path) as temporary:
        yield temporary
        sync(temporary)
        os.replace(temporary, path)
    sync(path.parent)


@contextmanager
def _on_the_way(path: Path) -> Generator[Path, None, None]:
    """A temporary path next to `path`; errors name `path` itself."""
    temporary = path.with_name(f"{TEMPORARY}{path.name}-{os.getpid()}")
    remove_orphans(path)
    try:
        with removed_on_error(temporary):
            yield temporary
    except OSError as error:
        error.filename = error.filename and str(error.filename).replace(str(temporary), str(path))
        raise


def write_json(path: Path, content: Any) -> None:
    write_text(path, json.dumps(content, indent=2) + "\n")


def read_json(path: Path, kind: type[EveryDepthError] = RunError) -> Any:
    """The content of a JSON file; raise `kind` if it is missing or not JSON."""
    with explained(f"{path} cannot be read", kind):
        if path.is_fifo() or path.is_socket():  # reading these would block forever
            raise kind(f"{path} is not a regular file; restore it from a copy")
        return parse_json(path.read_text(encoding="utf-8"), str(path), kind)


def parse_json(text: str | bytes, where: str, kind: type[EveryDepthError]) -> Any:
    """Parse JSON; raise `kind` if it is invalid or nested too deeply. where: for the error."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise kind(f"{where} is JSON nested too deeply to be read; flatten it") from error
    except ValueError as error:
        raise kind(
            f"{where} is not JSON ({error}); it may be cut short: restore it from a copy"
        ) from error


@contextmanager
def explained(what: str, kind: type[EveryDepthError] = RunError) -> Generator[None, None, None]:
    """Turn an error of the operating system into `kind`, with the reason and the next step.

    what: a description of the failure. Also works as a decorator.

    >>> from everydepth.files import explained
    >>> with explained("the notes cannot be read"):
    ...     open("nowhere/notes")
    Traceback (most recent call last):
    everydepth.errors.RunError: the notes cannot be read: No such file or directory \
(nowhere/notes); it was moved, deleted or never there: check the path
    """
    try:
        yield
    except EveryDepthError:
        raise
    except OSError as error:
        name = str(error.filename or "")
        name = name if len(name) <= 120 else f"{name[:60]}...{name[-40:]}"
        after = _NEXT.get(error.errno or 0, "check the path and the disk")
        reason = error.strerror or str(error) or type(error).__name__
        raise kind(f"{what}: {reason}{f' ({name})' if name else ''}; {after}") from error
    except MemoryError as error:
        raise kind(f"{what}: it does not fit into memory; use a smaller one") from error
    except UnicodeError as error:
        raise kind(f"{what}: it is not text ({error}); restore it from a copy") from error
    except ValueError as error:
        if "null byte" not in str(error) and "null character" not in str(error):
            raise
        raise kind(f"{what}: a path cannot hold a null character; use another path") from error


def settings_in(tree: Any) -> Iterator[tuple[str, Any]]:
    """Every name and value in a nested config."""
    if isinstance(tree, dict):
        for key, value in cast(dict[Any, Any], tree).items():
            yield str(key), value
            yield from settings_in(value)
    elif isinstance(tree, list):
        for value in cast(list[Any], tree):
            yield from settings_in(value)


def check_kernels(config: Any, file: Path) -> None:
    """Raise if a model's config names kernels from a hub, which would be downloaded and run."""
    for name, value in settings_in(config):
        if name.endswith("_implementation") and "/" in str(value):  # a repository
            raise DataError(
                f"{file} sets {name} to {str(value)[:80]!r}, which is code from a hub; remove the "
                'line, or use "sdpa" or "eager"'
            )


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model's folder; raise if one is outside of it.

    Neither names in the index nor links may lead out, except in the hub's cache, where folders in
    `snapshots` link to the `blobs` next to it.
    """
    index, names = folder / "model.safetensors.index.json", ["model.safetensors"]
    if index.is_file():
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    # `resolve` would raise a bare error at links that lead to one another.
    home = Path(os.path.realpath(folder))
    if home.parent.name == "snapshots" and (home.parent.parent / "blobs").is_dir():
        home = home.parent.parent
    for name in names:
        plain = Path(name).name == name and name.endswith(".safetensors")
        if not plain or not Path(os.path.realpath(folder / name)).is_relative_to(home):
            raise DataError(
                f"{folder} refers to weights in {name!r}, but only safetensors files inside the "
                "folder are read; copy the file there, or save the model again with "
                "save_pretrained"
            )
        if (folder / name).exists() and not (folder / name).is_file():
            raise DataError(f"{folder / name} is not a regular file; copy the weights there")
    return [folder / name for name in names]


def tensor_header(file: Path) -> tuple[dict[str, dict[str, Any]], int]:
    """The header of a safetensors file, and the offset of its data."""
    size = file.stat().st_size
    with open(file, "rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if not 2 <= length <= size - 8:
            raise ValueError(f"{file.name} is not a safetensors file, or truncated")
        header: dict[str, Any] = json.loads(stream.read(length))
    header.pop("__metadata__", None)
    return header, 8 + length


def tensor_checksum(entry: dict[str, Any], content: Any) -> str:
    """A checksum of one tensor's dtype, shape and content, independent of the rest of its file."""
    about = json.dumps([entry["dtype"], entry["shape"]])
    return hashlib.sha256(about.encode() + b"\n" + hashlib.sha256(content).digest()).hexdigest()


def write_checksums(folder: Path) -> None:
    """Write checksums of all tensors in a folder; `load` verifies those it reads."""
    found: dict[str, dict[str, str]] = {}
    for file in sorted(folder.glob("*.safetensors")):
        header, start = tensor_header(file)
        with open(file, "rb") as stream, mmap(stream.fileno(), 0, access=ACCESS_READ) as content:
            found[file.name] = {
                name: tensor_checksum(entry, content[start + low : start + high])
                for name, entry in header.items()
                for low, high in [entry["data_offsets"]]
            }
    if found:
        (folder / CHECKSUMS).write_text(json.dumps(found, indent=1) + "\n")


def write_folder(path: Path, fill: Callable[[Path], None]) -> None:
    """Write a folder atomically: `fill` writes a temporary one, which is renamed to `path`."""
    with _on_the_way(path) as temporary:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        fill(temporary)
        for file in temporary.iterdir():
            sync(file)
        sync(temporary)
        remove_folder(path)  # exists only if a run was resumed from an earlier step
        os.replace(temporary, path)
    sync(path.parent)


def remove_folder(path: Path) -> None:
    """Delete a folder atomically: a crash never leaves part of it under its name."""
    if path.exists():
        doomed = path.with_name(f"{TEMPORARY}old-{path.name}-{os.getpid()}")
        shutil.rmtree(doomed, ignore_errors=True)
        os.replace(path, doomed)
        shutil.rmtree(doomed)


def remove_leftovers(folder: Path) -> None:
    """Delete unfinished files and folders of killed processes."""
    for entry in folder.glob(f"{TEMPORARY}*"):
        if entry.is_dir():
            shutil.rmtree(entry, ignore_errors=True)
        else:
            entry.unlink(missing_ok=True)


def remove_orphans(path: Path) -> None:
    """Delete unfinished versions of `path` whose processes no longer exist."""
    for entry in path.parent.glob(f"{TEMPORARY}*"):
        found = re.fullmatch(rf"{re.escape(TEMPORARY + path.name)}-(\d+)(-\w+)?", entry.name)
        if found is not None and not psutil.pid_exists(int(found[1])):
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Flush a file, or the entries of a folder, to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def is_full(error: BaseException) -> bool:
    """Whether an error means that the disk is full, also as wrapped by safetensors."""
    if isinstance(error, OSError) and error.errno in _FULL:
        return True
    return any(f"os error {number}" in str(error) for number in _FULL)


def not_written(path: Path, error: Exception) -> ExportError:
    """The error for an export that could not be written."""
    reason = "the disk is full" if is_full(error) else str(error)
    return ExportError(
        f"{path} was not written: {reason}; nothing of it remains. Free some space or choose "
        "another place, then export again"
    )


@contextmanager
def removed_on_error(path: Path) -> Generator[None, None, None]:
    """Delete a file or folder if an error occurs inside the context."""
    try:
        yield
    except BaseException:
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            with suppress(OSError, ValueError):  # report the first error
                path.unlink(missing_ok=True)
        raise


def untaken(name: str, taken: Container[str], numbered: str = "{} ({})") -> str:
    """The name if it is free, or the first free one of `name (2)`, `name (3)`, ..."""
    free, count = name, 1
    while free in taken:
        count += 1
        free = numbered.format(name, count)
    return free
