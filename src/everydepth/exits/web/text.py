"""A language model, token by token: the vocabulary in pieces, and one graph per block.

The embedding and the readout hold most of a small model's bytes. They are split into pieces, with
the words of the example first, so that the first blocks need not wait for rare words.
"""

from __future__ import annotations

import gzip
import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from everydepth.errors import BatchError, SettingError, UnsupportedModelError
from everydepth.exits.generation import generate
from everydepth.exits.onnx import OfStream, check_same, opened
from everydepth.exits.web.graphs import refilled, rounded, write_graph
from everydepth.stream import Cursor, ResidualStream, as_stream, unwrapped

_PIECES = 4
_FEW = 4096  # largest vocabulary that is kept in one piece
_PROMPT = 8  # tokens of an example that the page uses as a prompt
_NEW = 32  # tokens it writes
_EXAMPLES = 4
_PAST = 5  # tokens in the cache while tracing; any number except 0 and 1


@dataclass(frozen=True)
class _Example:
    """A prompt, its tokens, and the continuation at each depth."""

    prompt: str
    ids: list[int]
    tokens: list[list[int]]


def write(
    stream: ResidualStream,
    example: Mapping[str, Tensor],
    tokenizer: Any,
    folder: Path,
) -> dict[str, Any]:
    """Write and compare the graphs; returns their description for the page."""
    ids = _tokens(stream, example)
    words, packed = _tokenizer(tokenizer)
    half = rounded(stream)
    most = _most(half)
    examples = [_continued(half, words, row, most) for row in ids[:_EXAMPLES]]
    shapes = _cache_shapes(half)
    pieces = _pieces(half, ids, words)
    graphs = _graphs(half, pieces, shapes, folder)
    for one in examples:
        _compare(half, pieces, shapes, graphs, one)
    file = folder / "tokenizer.json.gz"
    file.write_bytes(packed)
    (first, *rest), blocks = graphs
    parts = [(file, "tokens"), (first, "ends"), *((path, "block") for path in blocks)]
    parts += [(path, "ends") for path in rest]
    return {
        "kind": "text",
        "state": [1, 1, half.observe({"input_ids": torch.tensor([[0]])})[0].shape[-1]],
        "caches": [list(shape) for shape in shapes],
        "words": [_ranges(piece) for piece in pieces],
        "most": most,
        "new": _NEW,
        "end": list(stream.end_tokens),
        "files": [{"file": p.name, "bytes": p.stat().st_size, "part": part} for p, part in parts],
        "examples": [vars(one) for one in examples],
    }


class _Ends(OfStream):
    """The embedding of a word, and the readout, over a piece of the vocabulary.

    One graph, since they may share tensors. Only the length of `past` matters: the position.
    """

    def forward(self, row: Tensor, past: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        (stream,) = self._stream
        cursor = stream.start({"input_ids": row}, cache=_filled(stream, past, past))
        return cursor.h, stream.logits(replace(cursor, depth=stream.depth, h=h))[0, 0]


class _Step(OfStream):
    """The only block of a stream, run on one new token."""

    def forward(self, h: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        (stream,) = self._stream
        row = torch.zeros(h.shape[:2], dtype=torch.long)
        # While tracing, `start` also runs the block and extends its cache.
        spent, cache = _filled(stream, keys, values), _filled(stream, keys, values)
        cursor = _with_cache(stream.start({"input_ids": row}, cache=spent), spent, cache)
        out = stream.step(replace(cursor, h=h)).h
        return out, cache.layers[0].keys, cache.layers[0].values


def _filled(stream: ResidualStream, keys: Tensor, values: Tensor) -> Any:
    cache = stream.new_cache()
    cache.update(keys, values, 0)
    return cache


def _with_cache(cursor: Cursor, old: Any, new: Any) -> Cursor:
    (call,) = cursor.calls
    return replace(cursor, calls=(call.exchanged(old, new),), cache=new)


Shape = tuple[int, int, int]
"""The number of heads, and the widths of a key and a value."""


def _graphs(
    stream: ResidualStream, pieces: list[Tensor], shapes: list[Shape], folder: Path
) -> tuple[list[Path], list[Path]]:
    """The graphs of the vocabulary's pieces, and those of the blocks."""
    past = {2: torch.export.Dim.AUTO}
    h = torch.zeros(1, 1, stream.observe({"input_ids": torch.tensor([[0]])})[0].shape[-1])
    row = torch.tensor([[0]])

    def only(number: int) -> ResidualStream:
        alone = as_stream(stream.kept([number], share=True), **stream.options)
        alone.new_cache()  # finds the cache's class by trial, which is impossible while tracing
        return alone

    ends: list[Path] = []
    for number, piece in enumerate(pieces, start=1):
        module, path = _Ends(_with_words(only(1), piece)), folder / f"words-{number}.onnx"
        if not ends or refilled(ends[0], module, path) is None:
            inputs = (row, _past(shapes[0])[0], h)
            names = (["row", "past", "h"], ["start", "logits"])
            write_graph(module, inputs, path, *names, dynamic=({}, past, {}), named=True)
        ends.append(path)
    blocks: list[Path] = []
    for number, shape in enumerate(shapes, start=1):
        module, path = _Step(only(number)), folder / f"block-{number:02d}.onnx"
        like = next((n for n in range(1, number) if _alike(stream, n, number)), None)
        if like is None or refilled(blocks[like - 1], module, path) is None:
            names = (["h", "keys", "values"], ["out", "new_keys", "new_values"])
            inputs = (h, *_past(shape))
            write_graph(module, inputs, path, *names, dynamic=({}, past, past), named=True)
        blocks.append(path)
    return ends, blocks


def _alike(stream: ResidualStream, one: int, other: int) -> bool:
    """Whether two blocks seem to differ only in their tensors; the graphs are compared anyway."""
    modules = [str(stream.blocks[number - 1].module) for number in (one, other)]
    return modules[0] == modules[1] and stream.window(one) == stream.window(other)


def _past(shape: Shape, length: int = _PAST) -> tuple[Tensor, Tensor]:
    heads, keys, values = shape
    return torch.zeros(1, heads, length, keys), torch.zeros(1, heads, length, values)


def _with_words(stream: ResidualStream, piece: Tensor) -> ResidualStream:
    """The stream with only these rows of its embedding and head; changes it in place."""
    model: Any = unwrapped(stream.model)
    into, out = model.get_input_embeddings(), stream.linear_head("a page")
    tied = into.weight is out.weight
    into.weight = nn.Parameter(into.weight[piece], requires_grad=False)
    into.num_embeddings, into.padding_idx = len(piece), None
    rows = into.weight if tied else nn.Parameter(out.weight[piece], requires_grad=False)
    out.weight, out.out_features = rows, len(piece)
    bias: Any = out.bias
    if bias is not None:
        out.bias = nn.Parameter(bias[piece], requires_grad=False)
    return stream


def _pieces(stream: ResidualStream, ids: list[list[int]], words: Any) -> list[Tensor]:
    """The vocabulary in pieces: the words of the examples, single characters, then the others."""
    model: Any = unwrapped(stream.model)
    count, known = stream.linear_head("a page").out_features, model.get_input_embeddings().weight
    if count <= _FEW or known.shape[0] != count:
        return [torch.arange(count)]
    used = torch.zeros(count)
    for row in ids:
        used += torch.bincount(torch.tensor(row), minlength=count)
    for number in range(count):
        used[number] += len(words.id_to_token(number) or "long") == 1
    order = used.argsort(descending=True, stable=True)
    return [piece.sort().values for piece in order.chunk(_PIECES)]


def _ranges(piece: Tensor) -> list[list[int]]:
    """Ascending numbers as runs [first, length]."""
    runs: list[list[int]] = []
    for number in piece.tolist():
        if runs and number == sum(runs[-1]):
            runs[-1][1] += 1
        else:
            runs.append([number, 1])
    return runs


def _cache_shapes(stream: ResidualStream) -> list[Shape]:
    cache = stream.new_cache()
    stream.advance(stream.start({"input_ids": torch.zeros(1, 3, dtype=torch.long)}, cache=cache))
    shapes: list[Shape] = []
    for layer in getattr(cache, "layers", ())[: stream.depth]:
        keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
        if keys is None or values is None or keys.ndim != 4 or keys.shape[2] != 3:
            break
        shapes.append((keys.shape[1], keys.shape[3], values.shape[3]))
    if len(shapes) < stream.depth:
        raise UnsupportedModelError(
            f"{stream.name} caches something other than keys and values per token, which a web "
            "page does not support; use format='hf'"
        )
    return shapes


def _most(stream: ResidualStream) -> int | None:
    """The most tokens of a text; None if there is no limit."""
    windows = [stream.window(depth) for depth in range(1, stream.depth + 1)]
    return min((most for most in (*windows, stream.positions) if most is not None), default=None)


def _tokens(stream: ResidualStream, example: Mapping[str, Tensor]) -> list[list[int]]:
    ids = example.get("input_ids")
    if ids is None or ids.ndim != 2:
        raise BatchError(
            f"a web page for text needs tokens in its example, but it has {list(example)}; give "
            "example={'input_ids': ...}, with typical texts"
        )
    real = example.get("attention_mask", torch.ones_like(ids)).bool()
    return [row[mask].tolist() for row, mask in zip(ids, real, strict=True)]


def _tokenizer(tokenizer: Any) -> tuple[Any, bytes]:
    """The tokenizer, and its compressed description for a browser."""
    from tokenizers import Tokenizer

    with tempfile.TemporaryDirectory() as name:
        if tokenizer is not None:
            tokenizer.save_pretrained(name)
        file, beside = Path(name) / "tokenizer.json", Path(name) / "tokenizer_config.json"
        if not file.is_file():
            raise SettingError(
                "a web page for text needs tokenizer=, with a tokenizer.json; give the model's own "
                "fast one, AutoTokenizer.from_pretrained(...)"
            )
        found = {
            "tokenizer": json.loads(file.read_text("utf-8")),
            "config": json.loads(beside.read_text("utf-8")) if beside.is_file() else {},
        }
        text = json.dumps(found, separators=(",", ":"), ensure_ascii=False)
        return Tokenizer.from_file(str(file)), gzip.compress(text.encode(), mtime=0)


def _continued(stream: ResidualStream, words: Any, row: list[int], most: int | None) -> _Example:
    prompt = words.decode(row[:_PROMPT])
    ids = list(words.encode(prompt).ids)
    new = _NEW if most is None else min(_NEW, most - len(ids))
    if not ids or new < 1:
        raise BatchError(
            f"an example begins with the tokens {row[:_PROMPT]} ({prompt!r}), which cannot be "
            f"continued within {most} tokens; give texts of at least one word"
        )
    depths = range(1, stream.depth + 1)
    found = [generate(stream, [ids], depth=depth, max_new_tokens=new) for depth in depths]
    return _Example(prompt, ids, [list(one.tokens[0]) for one in found])


def _compare(
    stream: ResidualStream,
    pieces: list[Tensor],
    shapes: Sequence[Shape],
    graphs: tuple[list[Path], list[Path]],
    example: _Example,
) -> None:
    """Compare every depth of the graphs, run as on the page, along the last depth's text."""
    text = [*example.ids, *example.tokens[-1]]
    batch = {"input_ids": torch.tensor([text])}
    states = stream.observe(batch)
    ends, blocks = ([opened(path) for path in paths] for paths in graphs)
    count = sum(len(piece) for piece in pieces)
    found = torch.zeros(stream.depth, len(text), count)
    caches = [[part.numpy() for part in _past(shape, 0)] for shape in shapes]
    nothing = torch.zeros(1, 1, states[0].shape[-1]).numpy()
    for place, token in enumerate(text):
        number = next(n for n, piece in enumerate(pieces) if bool((piece == token).any()))
        row = (pieces[number] == token).nonzero()
        past = caches[0][0]
        h, _ = ends[number].run(None, {"row": row.numpy(), "past": past, "h": nothing})
        for depth, block in enumerate(blocks):
            keys, values = caches[depth]
            h, *caches[depth] = block.run(None, {"h": h, "keys": keys, "values": values})
            for piece, end in zip(pieces, ends, strict=True):
                _, logits = end.run(None, {"row": row.numpy() * 0, "past": past, "h": h})
                found[depth, place, piece] = torch.as_tensor(logits)
    for depth in range(1, stream.depth + 1):
        mine: Float[Tensor, "tokens words"] = states.logits(depth)[0]
        check_same(f"logits at depth {depth}", mine, found[depth - 1], batch)
