"""An image classifier: one graph with the embedding and the readout, and one per block."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor, as_tensor, nn, stack

from everydepth.errors import UnsupportedModelError
from everydepth.exits.onnx import OfStream, check_same, opened
from everydepth.exits.reading import exit_logits
from everydepth.exits.web.graphs import rounded, write_graph
from everydepth.stream import ResidualStream, unwrapped

_EXAMPLES = 8


def write(stream: ResidualStream, example: Mapping[str, Tensor], folder: Path) -> dict[str, Any]:
    """Write and compare the graphs; returns their description for the page."""
    (name,) = _only_picture(stream, example)
    pictures = example[name]
    if len(pictures) < 2:
        pictures = pictures.repeat(2, 1, 1, 1)
    half = rounded(stream)
    paths = _graphs(half, pictures, folder)
    logits = _compare(half, pictures, paths)
    return {
        "kind": "pictures",
        "input": name,
        "shape": list(pictures.shape[1:]),
        "low": float(pictures.min()),
        "high": float(pictures.max()),
        "labels": _labels(stream),
        "state": [1, *half.observe({name: pictures[:1]})[0].shape[1:]],
        "files": [
            {"file": p.name, "bytes": p.stat().st_size, "part": part}
            for p, part in zip(paths, ["ends", *["block"] * stream.depth], strict=True)
        ],
        "examples": [
            {"pixels": picture.flatten().tolist(), "logits": row.tolist()}
            for picture, row in zip(pictures[:_EXAMPLES], logits[:_EXAMPLES], strict=True)
        ],
    }


class _Ends(OfStream):
    """The part before the first block, and the readout, each with its own input.

    One graph, since they may share tensors.
    """

    def __init__(self, stream: ResidualStream, name: str) -> None:
        super().__init__(stream)
        self.name = name

    def forward(self, pictures: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        (stream,) = self._stream
        cursor = stream.start({self.name: pictures})
        return cursor.h, exit_logits(stream, h, stream.depth, cursor.batch)


class _Step(nn.Module):
    """One block. Its other inputs are computed from the shape of the images."""

    def __init__(self, stream: ResidualStream, name: str, depth: int, like: Tensor) -> None:
        super().__init__()
        self.block = stream.blocks[depth].module
        self.depth = depth
        self._cursor = (stream, stream.start({name: like}))

    def forward(self, h: Tensor) -> Tensor:
        stream, cursor = self._cursor
        return stream.step(replace(cursor, depth=self.depth, h=h)).h


def _graphs(stream: ResidualStream, pictures: Tensor, folder: Path) -> list[Path]:
    """The files, in the order in which a page needs them."""
    (name,) = _names(stream)
    states = stream.observe({name: pictures})
    shapes = {tuple(state.shape[1:]) for state in states}
    if len(shapes) > 1:
        raise UnsupportedModelError(
            f"the states of {stream.name} have several shapes ({', '.join(map(str, shapes))}), so "
            "one readout graph cannot serve all depths; use format='onnx' with one depth"
        )
    ends = folder / "ends.onnx"
    one = pictures[:1]
    inputs = (one, states[0][:1])
    write_graph(_Ends(stream, name), inputs, ends, ["pictures", "h"], ["start", "logits"])
    blocks = [
        write_graph(
            _Step(stream, name, depth, one),
            (states[depth][:1],),
            folder / f"block-{depth + 1:02d}.onnx",
            ["h"],
            ["out"],
        )
        for depth in range(stream.depth)
    ]
    return [ends, *blocks]


def _compare(stream: ResidualStream, pictures: Tensor, paths: list[Path]) -> Tensor:
    """Compare the graphs, run as on the page; returns the logits of each image at each depth."""
    ends, *blocks = (opened(path) for path in paths)
    (name,) = _names(stream)
    rows: list[Tensor] = []
    for picture in pictures.split(1):
        given = {name: picture}
        states = stream.observe(given)
        h, _ = ends.run(None, {"pictures": picture.numpy(), "h": states[0].numpy()})
        found: list[Tensor] = []
        for depth, block in enumerate(blocks, start=1):
            (h,) = block.run(None, {"h": h})
            _, logits = ends.run(None, {"pictures": picture.numpy(), "h": h})
            check_same(f"logits at depth {depth}", states.logits(depth), logits, given)
            found.append(as_tensor(logits)[0])
        rows.append(stack(found))
    return stack(rows)


def _only_picture(stream: ResidualStream, example: Mapping[str, Tensor]) -> list[str]:
    names = list(example)
    if names != _names(stream) or example[names[0]].ndim != 4:
        shapes = {name: tuple(value.shape) for name, value in example.items()}
        raise UnsupportedModelError(
            f"a web page needs images alone, or the text of a language model, but the example has "
            f"{shapes}; use format='onnx' for other inputs"
        )
    return names


def _names(stream: ResidualStream) -> list[str]:
    return [str(getattr(unwrapped(stream.model), "main_input_name", "pixel_values"))]


def _labels(stream: ResidualStream) -> list[str]:
    names: Mapping[int, str] = (
        getattr(getattr(unwrapped(stream.model), "config", None), "id2label", None) or {}
    )
    plain = all(str(name) == f"LABEL_{number}" for number, name in names.items())
    return [
        str(number) if plain else str(names.get(number, number)) for number in range(stream.classes)
    ]
