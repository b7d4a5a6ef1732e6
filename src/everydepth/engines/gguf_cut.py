"""Copy some blocks of a GGUF file to a new one, byte for byte, and check it in llama.cpp."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from everydepth.config import brief, checked
from everydepth.engines import llama_cpp
from everydepth.engines.gguf_file import GGUF, MAGIC, Tensor, Value, packed
from everydepth.errors import DepthError, ExportError, SettingError, UnsupportedModelError
from everydepth.files import not_written, whole_file

_BLOCK = re.compile(r"blk\.(\d+)\.(.+)")
_PIECE = 1 << 22  # bytes copied at a time

# Sizes of the whole model, which would be wrong for a part.
_SIZES = ("general.size_label", "general.parameter_count")
# Counts of leading blocks that differ from the rest.
_LEADING = ("leading_dense_block_count",)
# Additional blocks after the last one, for multi-token prediction; included in the block count.
_EXTRA = "nextn_predict_layers"

# Silent blocks add zeros, which changes nothing; but sums may be computed in another order.
_TOLERANCE = 1e-3


@dataclass(frozen=True, kw_only=True)
class Cut:
    """The outcome of `cut_gguf`.

    kept: the copied blocks, counted from 1, of the `of` blocks in the source.
    gap: the largest difference of a log-probability from the whole file with silent other blocks.
    """

    path: Path
    kept: tuple[int, ...]
    of: int
    bytes: int
    gap: float


@checked
def cut_gguf(
    source: str | Path,
    target: str | Path,
    *,
    depth: int | None = None,
    keep: str | Iterable[int] | None = None,
    overwrite: bool = False,
) -> Cut:
    """Copy some blocks of a GGUF file to a new one, still quantized, byte for byte.

    The file appears only after llama.cpp has continued two prompts with it exactly as with the
    whole file whose other blocks are silent (zero weights, which add nothing). Neither file is ever
    entirely in memory.

    depth: keep the first `depth` blocks.
    keep: instead, keep these blocks, counted from 1: "1-12,20-24", or numbers.

    >>> cut = cut_gguf("model.gguf", "small.gguf", depth=2)
    >>> cut.kept, cut.of
    ((1, 2), 3)
    """
    llama_cpp.check_installed()
    whole = GGUF.read(source)
    path = Path(target).absolute()
    _check_target(path, Path(source), overwrite)
    _check_supported(whole)  # first: a damaged file may claim billions of blocks
    kept = _kept(whole, depth, keep)
    values, tensors = _cut_values(whole, kept), _cut_tensors(whole, kept)
    others = {t.name for t in whole.tensors if _number(t) is not None and _number(t) not in kept}
    try:
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
        raise not_written(path, error) from error
    return Cut(path=path, kept=kept, of=whole.depth, bytes=size, gap=gap)


_MOST = 10**6  # blocks; far more than any model has, and the list still fits in memory


def ranges(text: str) -> tuple[int, ...]:
    """The numbers in "1-12,20-24"."""
    numbers: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise SettingError(
                f"keep={text!r}: {part.strip()!r} is neither a block nor a range; write, for "
                "example, 1-12,20-24"
            )
        low, high = int(first), int(last if dash else first)
        if high >= _MOST:
            raise SettingError(f"keep={brief(text)}: no model has {high} blocks")
        if high < low:
            raise SettingError(
                f"keep={text!r}: {part.strip()!r} runs backwards; write {high}-{low}"
            )
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
        raise ExportError(f"{path} is a directory; give a file name that ends in .gguf")
    if path.exists() and source.exists() and path.samefile(source):
        raise ExportError(f"{path} is the file to cut; choose another name")
    if path.exists() and not overwrite:
        raise ExportError(
            f"{path} already exists; pass overwrite=True (--overwrite) to replace it, or choose "
            "another name"
        )


def _kept(whole: GGUF, depth: int | None, keep: str | Iterable[int] | None) -> tuple[int, ...]:
    if (depth is None) == (keep is None):
        raise SettingError(f"depth={depth} and keep={keep}; give one: how many blocks, or which")
    of = whole.depth
    if depth is not None:
        if not 1 <= depth <= of:
            raise DepthError(f"depth {depth}, but {whole.path.name} has {of} blocks; use 1 to {of}")
        return tuple(range(1, depth + 1))
    kept = ranges(keep) if isinstance(keep, str) else tuple(keep or ())
    if not kept or list(kept) != sorted(set(kept)) or not 1 <= kept[0] <= kept[-1] <= of:
        raise DepthError(
            f"keep={spelled(kept) or 'nothing'}, but {whole.path.name} has {of} blocks; use "
            f"numbers from 1 to {of} in ascending order, each once"
        )
    return kept


def _check_supported(whole: GGUF) -> None:
    name = whole.architecture
    extra = whole.values.get(f"{name}.{_EXTRA}")
    if extra is not None and extra.scalar():
        raise UnsupportedModelError(
            f"{whole.path.name} has {extra.scalar()} additional blocks for multi-token prediction "
            f"({name}.{_EXTRA}); convert the model without them, then cut it"
        )
    numbers = {_number(tensor) for tensor in whole.tensors} - {None}
    if len(numbers) != whole.depth or numbers != set(range(1, whole.depth + 1)):
        raise UnsupportedModelError(
            f"{whole.path.name} claims {whole.depth} blocks ({name}.block_count), but has tensors "
            f"of {len(numbers)} (blk.0, ...); only models with a single chain of blocks can be cut"
        )


def _number(tensor: Tensor) -> int | None:
    """The block of a tensor, counted from 1; None if it belongs to none."""
    found = _BLOCK.fullmatch(tensor.name)
    return None if found is None else int(found[1]) + 1


def _cut_values(whole: GGUF, kept: tuple[int, ...]) -> dict[str, Value]:
    """The metadata, with the block count and all per-block arrays adapted."""
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
    """Each kept tensor and its new name."""
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
    """Write a file, one tensor at a time. Silent ones are holes: zeros that take no disk space."""
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
    """Compare the written bytes with the source."""
    written = GGUF.read(path)
    with open(whole.path, "rb") as source, open(path, "rb") as out:
        for old, new in zip(tensors, written.tensors, strict=True):
            source.seek(old.start)
            out.seek(new.start)
            for done in range(0, old.size, _PIECE):
                count = min(_PIECE, old.size - done)
                if source.read(count) != out.read(count):
                    raise ExportError(f"{new.name} was not written correctly; try another disk")


def _check_runs(path: Path, silent: Path, prompts: list[list[int]]) -> float:
    try:
        found, expected = llama_cpp.continued([path, silent], prompts)
    except ExportError as error:
        raise ExportError(f"{error}; nothing was written") from error
    words = llama_cpp.difference(found, expected)
    gap = float("inf") if words else llama_cpp.gap(found, expected)
    if gap > _TOLERANCE:
        raise ExportError(
            "in llama.cpp, these blocks predict something else than the whole file with silent "
            f"other blocks: {words or f'log-probabilities differ by {gap:.1e}'}. Blocks of this "
            "architecture depend on their position; keep others, or the first ones with depth. "
            "Nothing was written"
        )
    return gap


def _prompts(whole: GGUF) -> list[list[int]]:
    """Two prompts of tokens from across the vocabulary."""
    tokens = whole.values.get("tokenizer.ggml.tokens")
    count = tokens.length if tokens is not None else None
    if not count:
        raise UnsupportedModelError(
            f"{whole.path.name} has no tokenizer (tokenizer.ggml.tokens), so llama.cpp cannot "
            "continue a prompt with it; convert the model with its tokenizer"
        )
    return [[(step * number) % count for number in range(1, 9)] for step in (count // 9 + 1, 7)]
