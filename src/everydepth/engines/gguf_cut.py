"""Some blocks of a GGUF file as a GGUF file: their bytes as they are, run in llama.cpp."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from everydepth.config import checked
from everydepth.engines import llama_cpp
from everydepth.engines.gguf_file import GGUF, MAGIC, Tensor, Value, packed
from everydepth.errors import DepthError, ExportError, SettingError, UnsupportedModelError
from everydepth.files import is_full, remove_orphans, whole_file

_BLOCK = re.compile(r"blk\.(\d+)\.(.+)")
_PIECE = 1 << 22  # bytes copied at a time

# Sizes of the whole model, in words or numbers: of a part they would be wrong.
_SIZES = ("general.size_label", "general.parameter_count")
# Counts of blocks at the beginning that differ from the rest.
_LEADING = ("leading_dense_block_count",)
# Blocks behind the last one, which predict further tokens; the count of blocks includes them.
_BEHIND = "nextn_predict_layers"

# Silent blocks add zeros, which changes no bit; other orders of the same sums change the last ones.
_TOLERANCE = 1e-3


@dataclass(frozen=True, kw_only=True)
class Cut:
    """What was written, and how it was checked."""

    path: Path
    kept: tuple[int, ...]
    """Blocks of the source, counted from 1."""
    of: int
    bytes: int
    gap: float
    """Largest difference of a log-probability to the whole file with the other blocks silent."""


@checked
def cut_gguf(
    source: str | Path,
    target: str | Path,
    *,
    depth: int | None = None,
    keep: str | Iterable[int] | None = None,
    overwrite: bool = False,
) -> Cut:
    """Write a GGUF file with some of the blocks of another, still quantized, byte for byte.

    The file appears after llama.cpp has continued two prompts with it exactly as with the whole
    file in which all other blocks are silent (their weights are zero, so that they add nothing).
    Neither file is ever in memory as a whole.

    depth: keep the first `depth` blocks.
    keep: or these, counted from 1: "1-12,20-24", or the numbers.

    >>> cut = cut_gguf("model.gguf", "small.gguf", depth=2)
    >>> cut.kept, cut.of
    ((1, 2), 3)
    """
    llama_cpp.check_installed()
    whole = GGUF.read(source)
    path = Path(target).absolute()
    _check_target(path, Path(source), overwrite)
    _check_known(whole)  # first: a damaged file may count billions of blocks
    kept = _kept(whole, depth, keep)
    values, tensors = _cut_values(whole, kept), _cut_tensors(whole, kept)
    others = {t.name for t in whole.tensors if _number(t) is not None and _number(t) not in kept}
    try:
        remove_orphans(path)
        with whole_file(path) as temporary:
            _write(temporary, whole, values, tensors)
            _check_bytes(temporary, whole, [tensor for tensor, _ in tensors])
            silent = temporary.with_name(f"{temporary.name}-silent")
            try:
                same = [(tensor, tensor.name) for tensor in whole.tensors]
                _write(silent, whole, whole.values, same, silent=others)
                gap = _check_runs(temporary, silent, _prompts(whole))
            finally:
                silent.unlink(missing_ok=True)
            size = temporary.stat().st_size
    except OSError as error:
        reason = "the disk is full" if is_full(error) else str(error)
        raise ExportError(
            f"{path} was not written: {reason}; nothing of it is left. Make room or choose another "
            "place, then export again"
        ) from error
    return Cut(path=path, kept=kept, of=whole.depth, bytes=size, gap=gap)


_MOST = 10**6  # blocks; far beyond any model, and a list of that many still fits


def ranges(text: str) -> tuple[int, ...]:
    """The numbers of "1-12,20-24"."""
    numbers: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise SettingError(
                f"keep={text!r}: {part.strip()!r} is neither a block nor a range; write for "
                "example 1-12,20-24"
            )
        low, high = int(first), int(last if dash else first)
        if high >= _MOST:
            raise SettingError(f"keep={text!r:.80}: no model has {high} blocks")
        numbers.extend(range(low, high + 1))
    return tuple(numbers)


def spelled(numbers: Iterable[int]) -> str:
    """The inverse of `ranges`."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def _check_target(path: Path, source: Path, overwrite: bool) -> None:
    if path.is_dir():
        raise ExportError(f"{path} is a directory; give the name of a file that ends in .gguf")
    if path.exists() and source.exists() and path.samefile(source):
        raise ExportError(f"{path} is the file to cut; choose another name")
    if path.exists() and not overwrite:
        raise ExportError(
            f"{path} already exists; pass overwrite=True (--overwrite) to replace it, or choose "
            "another name"
        )


def _kept(whole: GGUF, depth: int | None, keep: str | Iterable[int] | None) -> tuple[int, ...]:
    if (depth is None) == (keep is None):
        raise SettingError("give either depth or keep: how many blocks, or which")
    of = whole.depth
    if depth is not None:
        if not 1 <= depth <= of:
            raise DepthError(f"depth {depth}, but {whole.path.name} has {of} blocks; use 1 to {of}")
        return tuple(range(1, depth + 1))
    kept = ranges(keep) if isinstance(keep, str) else tuple(keep or ())
    if not kept or list(kept) != sorted(set(kept)) or not 1 <= kept[0] <= kept[-1] <= of:
        raise DepthError(
            f"keep={spelled(kept) or 'nothing'}, but {whole.path.name} has {of} blocks; name some "
            f"of 1 to {of} in ascending order, each once"
        )
    return kept


def _check_known(whole: GGUF) -> None:
    name = whole.architecture
    behind = whole.values.get(f"{name}.{_BEHIND}")
    if behind is not None and behind.scalar():
        raise UnsupportedModelError(
            f"{whole.path.name} has {behind.scalar()} blocks behind the last one that predict "
            f"further tokens ({name}.{_BEHIND}); convert the model without them, then cut it"
        )
    numbers = {_number(tensor) for tensor in whole.tensors} - {None}
    if len(numbers) != whole.depth or numbers != set(range(1, whole.depth + 1)):
        raise UnsupportedModelError(
            f"{whole.path.name} counts {whole.depth} blocks ({name}.block_count), but has tensors "
            f"of {len(numbers)}, named blk.0 and so on; only models with one chain of blocks can "
            "be cut"
        )


def _number(tensor: Tensor) -> int | None:
    """The block a tensor belongs to, counted from 1."""
    found = _BLOCK.fullmatch(tensor.name)
    return None if found is None else int(found[1]) + 1


def _cut_values(whole: GGUF, kept: tuple[int, ...]) -> dict[str, Value]:
    """The metadata, with the block count and whatever has an entry a block corrected."""
    name, of = whole.architecture, whole.depth
    if len(kept) == of:
        return dict(whole.values)
    values = {key: value for key, value in whole.values.items() if key not in _SIZES}
    for key, value in values.items():
        if key.startswith(f"{name}.") and value.length == of:
            values[key] = value.selected([block - 1 for block in kept])
    for key in (f"{name}.{leading}" for leading in _LEADING):
        if key in values:
            least = values[key].scalar()
            values[key] = Value.number(sum(b <= least for b in kept), values[key].kind)
    count = f"{name}.block_count"
    values[count] = Value.number(len(kept), values[count].kind)
    values["everydepth.blocks"] = Value.text(f"{spelled(kept)} of {of}")
    return values


def _cut_tensors(whole: GGUF, kept: tuple[int, ...]) -> list[tuple[Tensor, str]]:
    """Each tensor that stays, and its new name."""
    places = {block: place for place, block in enumerate(kept)}
    found: list[tuple[Tensor, str]] = []
    for tensor in whole.tensors:
        part = _BLOCK.fullmatch(tensor.name)
        if part is None:
            found.append((tensor, tensor.name))
        elif int(part[1]) + 1 in places:
            found.append((tensor, f"blk.{places[int(part[1]) + 1]}.{part[2]}"))
    return found


def _write(
    path: Path,
    whole: GGUF,
    values: Mapping[str, Value],
    tensors: list[tuple[Tensor, str]],
    *,
    silent: frozenset[str] | set[str] = frozenset(),
) -> None:
    """Write a file, tensor after tensor. Silent ones are holes: zeros that take no room."""
    head = [MAGIC, struct.pack("<IQQ", whole.version, len(tensors), len(values))]
    for key, value in values.items():
        head += [packed(key), struct.pack("<I", value.kind), value.raw]
    offset = 0
    for tensor, name in tensors:
        shape = struct.pack(f"<I{len(tensor.shape)}Q", len(tensor.shape), *tensor.shape)
        head += [packed(name), shape, struct.pack("<IQ", tensor.kind, offset)]
        offset += _aligned(tensor.size, whole)
    with open(whole.path, "rb") as source, open(path, "wb") as out:
        out.write(b"".join(head))
        place = _aligned(out.tell(), whole)
        for tensor, _ in tensors:
            out.seek(place)
            if tensor.name not in silent:
                _copy(source, out, tensor)
            place += _aligned(tensor.size, whole)
        out.truncate(place)


def _aligned(size: int, whole: GGUF) -> int:
    return -(-size // whole.alignment) * whole.alignment


def _copy(source: BinaryIO, out: BinaryIO, tensor: Tensor) -> None:
    source.seek(tensor.start)
    left = tensor.size
    while left:
        piece = source.read(min(left, _PIECE))
        if not piece:
            raise OSError(f"{source.name} became shorter while it was read")
        out.write(piece)
        left -= len(piece)


def _check_bytes(path: Path, whole: GGUF, tensors: list[Tensor]) -> None:
    """Read what was written, and compare it with what it was written from."""
    written = GGUF.read(path)
    with open(whole.path, "rb") as source, open(path, "rb") as out:
        for old, new in zip(tensors, written.tensors, strict=True):
            source.seek(old.start)
            out.seek(new.start)
            for done in range(0, old.size, _PIECE):
                count = min(_PIECE, old.size - done)
                if source.read(count) != out.read(count):
                    raise ExportError(f"{new.name} was not written as it is; try another disk")


def _check_runs(path: Path, silent: Path, prompts: list[list[int]]) -> float:
    try:
        found, expected = llama_cpp.continued([path, silent], prompts)
    except ExportError as error:
        raise ExportError(f"{error}; nothing was written") from error
    words = llama_cpp.difference(found, expected)
    gap = float("inf") if words else llama_cpp.gap(found, expected)
    if gap > _TOLERANCE:
        raise ExportError(
            "with these blocks llama.cpp does not say what the whole file says whose other blocks "
            f"add nothing: {words or f'log-probabilities differ by {gap:.1e}'}. Blocks of this "
            "architecture depend on their place; keep others, or the first ones by depth. Nothing "
            "was written"
        )
    return gap


def _prompts(whole: GGUF) -> list[list[int]]:
    """Two prompts of tokens from all over the vocabulary."""
    tokens = whole.values.get("tokenizer.ggml.tokens")
    count = tokens.length if tokens is not None else None
    if not count:
        raise UnsupportedModelError(
            f"{whole.path.name} has no tokenizer (tokenizer.ggml.tokens), so llama.cpp cannot "
            "continue a prompt with it; convert the model with its tokenizer"
        )
    return [[(step * number) % count for number in range(1, 9)] for step in (count // 9 + 1, 7)]
