"""Quantize weights to eight or four bits, and measure the cost at every depth."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from everydepth.errors import UnsupportedModelError
from everydepth.exits.onnx import opened, write
from everydepth.exits.quality import Totals, quality_of, watch, watch_given
from everydepth.stream import ResidualStream, no_labels
from everydepth.stream.rows import pick_rows

Weights = Literal["float32", "int8", "int4"]

_BLOCK = 32  # four-bit weights that share a scale
# The nodes of a quantized graph; a graph without them has nothing to quantize.
_NODES = {
    "int8": ("MatMulInteger", "ConvInteger", "DynamicQuantizeMatMul"),
    "int4": ("MatMulNBits",),
}


@dataclass(frozen=True, kw_only=True)
class Narrowed:
    """The size and the quality per depth, before and after quantization."""

    weights: Weights
    bytes: int
    bytes_before: int
    metric: str
    quality: list[float]
    quality_before: list[float]
    samples: int


@torch.no_grad()
def narrow(
    stream: ResidualStream,
    path: Path,
    example: Mapping[str, Tensor],
    data: Iterable[Mapping[str, Any]],
    weights: Weights,
) -> Narrowed:
    """Quantize the graph in a file, and measure every depth before and after.

    example: the inputs the graph was traced with.
    data: batches to measure the quality on: by labels, or else by agreement with the model.
    """
    before = path.stat().st_size
    if path.with_name(f"{path.name}.data").exists():
        raise UnsupportedModelError(
            f"{stream.name} is too large for one file, and only single files can be quantized; "
            "leave out weights=, or export a shallower depth"
        )
    _write(path, weights)
    onnx: Any = import_module("onnx")
    kinds = {node.op_type for node in onnx.load(path).graph.node}
    if not kinds & set(_NODES[weights]):
        raise UnsupportedModelError(
            f"ONNX Runtime found nothing in {stream.name} to store as {weights}; leave out weights="
        )
    # The same blocks, quantized in the same way, in a graph with the readouts of all depths.
    every = path.with_name("every.onnx")
    write(stream, example, every, None, every=True)
    _unshare(every)
    _write(every, weights)
    session, names = opened(every), list(example)

    def found(batch: Mapping[str, Any]) -> list[Tensor]:
        logits = session.run(None, {name: batch[name].numpy() for name in names})
        return [torch.as_tensor(depth) for depth in logits]

    costs = measured(stream, found, data, weights, path.stat().st_size, before)
    every.unlink()
    return costs


@torch.no_grad()
def measured(
    stream: ResidualStream,
    found: Callable[[Mapping[str, Any]], Sequence[Tensor]],
    data: Iterable[Mapping[str, Any]],
    weights: Weights,
    size: int,
    before: int,
) -> Narrowed:
    """The quality at every depth of the model, and of its quantized version.

    found: computes the quantized logits of all depths for a batch.
    size, before: bytes of the quantized and the float32 weights.
    """
    depths = range(1, stream.depth + 1)
    totals: tuple[Totals, Totals] | None = None
    for rows in data:
        count = stream.rows(rows)
        for row in range(count):  # the logits of all depths of a batch may take gigabytes
            batch = pick_rows(rows, slice(row, row + 1), count)
            if totals is None:
                totals = quality_of(stream, batch), quality_of(stream, batch)
            states = stream.observe(batch)
            watch(totals[0], states, depths)
            watch_given(totals[1], stream, batch, found(batch), states.logits(stream.depth))
    if totals is None:
        raise no_labels()
    wide, narrowed = totals
    return Narrowed(
        weights=weights,
        bytes=size,
        bytes_before=before,
        metric=wide.metric,
        quality=[narrowed.quality(depth) for depth in depths],
        quality_before=[wide.quality(depth) for depth in depths],
        samples=wide.samples,
    )


def _unshare(path: Path) -> None:
    """Give every Gemm its own matrix: the quantizer transposes a shared one more than once. These
    are the heads of classifiers, which are small."""
    onnx: Any = import_module("onnx")
    model: Any = onnx.load(path)
    tensors = {tensor.name: tensor for tensor in model.graph.initializer}
    gemms = [node for node in model.graph.node if node.op_type == "Gemm"]
    for number, node in enumerate(gemms):
        if node.input[1] in tensors:
            own = model.graph.initializer.add()
            own.CopyFrom(tensors[node.input[1]])
            own.name = node.input[1] = f"{own.name}.{number}"
    onnx.save(model, path)


def _write(path: Path, weights: Weights) -> None:
    # The quantizer recommends a preprocessing step that graphs from torch do not need.
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    onnx: Any = import_module("onnx")
    graph: Any = onnx.load(path)
    del graph.graph.value_info[:]  # stale: from before torch optimized the graph
    try:
        if weights == "int8":
            quantization: Any = import_module("onnxruntime.quantization")
            quantization.quantize_dynamic(graph, path, weight_type=quantization.QuantType.QInt8)
        else:
            module: Any = import_module("onnxruntime.quantization.matmul_nbits_quantizer")
            found = module.MatMulNBitsQuantizer(graph, block_size=_BLOCK)
            found.process()
            onnx.save(found.model.model, path)
    finally:
        logging.disable(before)


def words(found: Narrowed) -> str:
    """The costs as Markdown, for a model card."""
    rows = [
        f"| {depth} | {before:.4g} | {now:.4g} |"
        for depth, (before, now) in enumerate(
            zip(found.quality_before, found.quality, strict=True), start=1
        )
    ]
    return (
        f"Weights in {found.weights}: {found.bytes:,} bytes instead of {found.bytes_before:,}. The "
        f"{found.metric} at every depth, on {found.samples:,} samples:\n\n"
        f"| depth | float32 | {found.weights} |\n|---|---|---|\n" + "\n".join(rows)
    )
