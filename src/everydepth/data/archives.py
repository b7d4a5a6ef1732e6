"""Text collections in one tar file, read in memory: nothing is extracted to disk."""

from __future__ import annotations

import lzma
import tarfile
import zlib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import torch

from everydepth.config import checked
from everydepth.data.reading import check_unpacked, decode, lines, pick_split
from everydepth.data.sets import Texts
from everydepth.data.tables import encode_labels
from everydepth.errors import DataError


def members(path: Path) -> Iterator[tuple[str, bytes]]:
    """Name and content of every regular file in a tar archive; links and devices are skipped."""
    size = done = 0
    try:
        size = path.stat().st_size
        with tarfile.open(path, mode="r:*") as archive:
            for member in archive:
                # Skipped members count as well: skipping unpacks them.
                check_unpacked(done + member.size, path, size)
                done += member.size
                if member.isreg() and (file := archive.extractfile(member)) is not None:
                    yield member.name, file.read()
    except (tarfile.TarError, EOFError, OSError, lzma.LZMAError, zlib.error) as error:
        reason = str(error).partition("\n")[0].rstrip(":")
        raise DataError(
            f"{path} cannot be read as a tar archive ({reason}); it may be truncated, so download "
            "it again"
        ) from error


@checked
def load_newsgroups(path: Path, split: str) -> Texts:
    """20 Newsgroups "by date": `<split>/<group>/<message>`."""
    suffix = pick_split("20newsgroups", split, {"train": "-train", "test": "-test"})
    texts: list[str] = []
    groups: list[str] = []
    for name, content in members(path):
        place = PurePosixPath(name)
        if len(place.parts) == 3 and place.parts[0].endswith(suffix):
            texts.append(decode(content, f"{path}:{name}", "latin-1"))
            groups.append(place.parts[1])
    if not texts:
        raise DataError(
            f"{path} has no messages under a folder ending in {suffix!r}; expected "
            f"20news-bydate{suffix}/<group>/<number>, so fetch the by-date version"
        )
    labels, classes = encode_labels(groups, None, str(path))
    return Texts(tuple(texts), labels=labels, classes=classes)


@checked
def load_tweeteval(path: Path, split: str, *, task: str | None = None) -> Texts:
    """One task of TweetEval: `<task>/<split>_text.txt`, `_labels.txt` and `mapping.txt`."""
    stem = pick_split("tweeteval", split, {"train": "train", "valid": "val", "test": "test"})
    files = {
        PurePosixPath(*PurePosixPath(name).parts[1:]): content for name, content in members(path)
    }
    tasks = sorted({str(name.parent) for name in files if name.name.endswith("_labels.txt")})
    if task is None or task not in tasks:
        raise DataError(f"task {task!r}, but {path} has {', '.join(tasks)}; give one as task=")

    def read(name: PurePosixPath) -> list[str]:
        if name not in files:
            have = sorted(str(file) for file in files if file.parent == name.parent)
            raise DataError(
                f"{path} has no {name}; it holds {', '.join(have)}, so use another split or fetch "
                "the complete archive"
            )
        return lines(decode(files[name], f"{path}:{name}"))

    folder = PurePosixPath(task)
    texts, cells = read(folder / f"{stem}_text.txt"), read(folder / f"{stem}_labels.txt")
    # The last nonempty cell is the readable name; the emoji task has the emoji before it.
    mapping = read(PurePosixPath(folder.parts[0], "mapping.txt"))
    classes = tuple(line.strip().split("\t")[-1] for line in mapping if line.strip())
    # Labels are numbers here; a class could be called "1" (the archive's own example).
    numbers, _ = encode_labels(cells, [str(place) for place in range(len(classes))], str(path))
    return Texts(tuple(texts), labels=numbers.to(torch.long), classes=classes)
