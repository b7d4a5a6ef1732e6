"""Files that are either the old version or the new one, never half of either."""

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
from typing import Any, cast

import psutil

from everydepth.errors import DataError, EveryDepthError, RunError

TEMPORARY = ".tmp-"
"""How the name of something half written starts; such leftovers may be deleted at any time."""

CHECKSUMS = "checksums.json"
_FULL = {errno.ENOSPC, errno.EDQUOT}
_NEXT = {
    errno.ENAMETOOLONG: "use a shorter name",
    errno.ENOENT: "it was moved, deleted or never there: check the path",
    errno.EACCES: "use a place that you may read and write, or change its permissions",
    errno.EPERM: "use a place that you may read and write, or change its permissions",
    errno.EROFS: "use a place that can be written",
    errno.EEXIST: "a file is in the way of a folder: use another path",
    errno.ENOTDIR: "a file is in the way of a folder: use another path",
    errno.EISDIR: "a folder is in the way of a file: use another path",
    errno.ENOSPC: "free some space, then try again",
    errno.EDQUOT: "free some space, then try again",
}


def write_text(path: Path, text: str) -> None:
    """Replace a file by a new version, safe against a crash at any moment."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, content: bytes) -> None:
    """`write_text` for what is no text."""
    with whole_file(path) as temporary:
        temporary.write_bytes(content)


@contextmanager
def whole_file(path: Path) -> Generator[Path, None, None]:
    """A path to write a file to, which becomes `path` in one step unless something goes wrong."""
    if not path.name:  # "", "." and "/"
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    temporary = path.with_name(f"{TEMPORARY}{path.name}-{os.getpid()}")
    with removed_on_error(temporary):
        yield temporary
        sync(temporary)
        os.replace(temporary, path)
    sync(path.parent)


def write_json(path: Path, content: Any) -> None:
    write_text(path, json.dumps(content, indent=2) + "\n")


def read_json(path: Path, kind: type[EveryDepthError] = RunError) -> Any:
    """What a JSON file holds; `kind` is raised if there is none, or it is not JSON."""
    with explained(f"{path} cannot be read", kind):
        if path.is_fifo() or path.is_socket():  # which would be waited for without end
            raise kind(f"{path} is no regular file; restore it from a copy")
        return parse_json(path.read_text(encoding="utf-8"), str(path), kind)


def parse_json(text: str | bytes, where: str, kind: type[EveryDepthError]) -> Any:
    """What a text says as JSON; one nested so deep that it cannot be read is not JSON either."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise kind(f"{where} is JSON nested too deep to be read; flatten it") from error
    except ValueError as error:
        raise kind(
            f"{where} is not JSON ({error}); it may be cut short: restore it from a copy"
        ) from error


@contextmanager
def explained(what: str, kind: type[EveryDepthError] = RunError) -> Generator[None, None, None]:
    """Turn what the system refuses into an error of ours: `what` failed, why, and the next step.

    Also a decorator of functions.

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
    except UnicodeError as error:
        raise kind(f"{what}: it is not text ({error}); restore it from a copy") from error
    except ValueError as error:
        if "null byte" not in str(error) and "null character" not in str(error):
            raise
        raise kind(f"{what}: a path cannot hold a null character; use another path") from error


def settings_in(tree: Any) -> Iterator[tuple[str, Any]]:
    """Every name and value in a config, however deep."""
    if isinstance(tree, dict):
        for key, value in cast(dict[Any, Any], tree).items():
            yield str(key), value
            yield from settings_in(value)
    elif isinstance(tree, list):
        for value in cast(list[Any], tree):
            yield from settings_in(value)


def check_kernels(config: Any, file: Path) -> None:
    """An error if a model's config names compiled kernels, which would be fetched and run."""
    for name, value in settings_in(config):
        if name.endswith("_implementation") and "/" in str(value):  # a repository
            raise DataError(
                f"{file} asks for {name} {str(value)[:80]!r}, code from a hub; remove the line, or "
                'use "sdpa" or "eager"'
            )


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model's folder, none of them outside of it.

    Neither a name in the index nor a link leads out. The hub's cache is made of links: there a
    folder of `snapshots` belongs to the `blobs` beside it.
    """
    index, names = folder / "model.safetensors.index.json", ["model.safetensors"]
    if index.is_file():
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    home = folder.resolve()
    if home.parent.name == "snapshots" and (home.parent.parent / "blobs").is_dir():
        home = home.parent.parent
    for name in names:
        plain = Path(name).name == name and name.endswith(".safetensors")
        if not plain or not (folder / name).resolve().is_relative_to(home):
            raise DataError(
                f"the weights in {folder} are said to be in {name!r}, but only safetensors files "
                "inside the folder are read; copy the file there, or save the model again with "
                "save_pretrained"
            )
        if (folder / name).exists() and not (folder / name).is_file():
            raise DataError(f"{folder / name} is no regular file; copy the weights there")
    return [folder / name for name in names]


def tensor_header(file: Path) -> tuple[dict[str, dict[str, Any]], int]:
    """What a safetensors file says of its tensors, and where the first of them begins."""
    size = file.stat().st_size
    with open(file, "rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if not 2 <= length <= size - 8:
            raise ValueError(f"{file.name} is no safetensors file, or torn")
        header: dict[str, Any] = json.loads(stream.read(length))
    header.pop("__metadata__", None)
    return header, 8 + length


def tensor_checksum(entry: dict[str, Any], content: Any) -> str:
    """Of what a tensor is and holds, so that it can be checked without the rest of its file."""
    about = json.dumps([entry["dtype"], entry["shape"]])
    return hashlib.sha256(about.encode() + b"\n" + hashlib.sha256(content).digest()).hexdigest()


def write_checksums(folder: Path) -> None:
    """Note what the tensors of a folder are: `load` checks each one that it reads."""
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
    """Let `fill` write a folder elsewhere, then put it at `path` in one step."""
    temporary = path.with_name(f"{TEMPORARY}{path.name}-{os.getpid()}")
    with removed_on_error(temporary):
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        fill(temporary)
        for file in temporary.iterdir():
            sync(file)
        sync(temporary)
        remove_folder(path)  # only left there by a run that was resumed from an earlier step
        os.replace(temporary, path)
    sync(path.parent)


def remove_folder(path: Path) -> None:
    """Delete a folder so that a crash never leaves half of it under its name."""
    if path.exists():
        doomed = path.with_name(f"{TEMPORARY}old-{path.name}-{os.getpid()}")
        shutil.rmtree(doomed, ignore_errors=True)
        os.replace(path, doomed)
        shutil.rmtree(doomed)


def remove_leftovers(folder: Path) -> None:
    """Delete what a killed process left half written."""
    for entry in folder.glob(f"{TEMPORARY}*"):
        if entry.is_dir():
            shutil.rmtree(entry, ignore_errors=True)
        else:
            entry.unlink(missing_ok=True)


def remove_orphans(path: Path) -> None:
    """Delete what processes that were killed left of their way to `path`."""
    for entry in path.parent.glob(f"{TEMPORARY}*"):
        found = re.fullmatch(rf"{re.escape(TEMPORARY + path.name)}-(\d+)(-\w+)?", entry.name)
        if found is not None and not psutil.pid_exists(int(found[1])):
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def is_full(error: BaseException) -> bool:
    """Whether an error says that the disk is full; safetensors wraps it in an error of its own."""
    if isinstance(error, OSError) and error.errno in _FULL:
        return True
    return any(f"os error {number}" in str(error) for number in _FULL)


@contextmanager
def removed_on_error(path: Path) -> Generator[None, None, None]:
    """Free the space of something half written, whatever went wrong."""
    try:
        yield
    except BaseException:
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            with suppress(OSError):  # what went wrong first is what is said
                path.unlink(missing_ok=True)
        raise


def untaken(name: str, taken: Container[str], numbered: str = "{} ({})") -> str:
    """The name, or the first of `name (2)`, `name (3)`, ... that is not taken."""
    free, count = name, 1
    while free in taken:
        count += 1
        free = numbered.format(name, count)
    return free
