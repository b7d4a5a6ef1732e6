"""ONNX graphs whose large tensors are stored in half precision."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from everydepth.exits.onnx import quiet_export
from everydepth.stream import ResidualStream, as_stream, unwrapped

_LARGE = 256  # fewest entries of a tensor stored in half precision
_HALF = ".half"  # appended to the name of a half-precision tensor


def write_graph(
    module: nn.Module,
    inputs: tuple[Tensor, ...],
    path: Path,
    names: Sequence[str],
    outputs: Sequence[str],
    *,
    dynamic: Any = None,
    named: bool = False,
) -> Path:
    """Write a graph for one row, since a page shows one at a time.

    named: keep every tensor of the module under its name, for `refilled`.
    """
    with quiet_export():
        program: Any = torch.onnx.export(
            module.eval(),
            inputs,
            dynamo=True,
            dynamic_shapes=dynamic,
            input_names=list(names),
            output_names=list(outputs),
            optimize=not named,
            verbose=False,
        )
    program.save(str(path), external_data=False)
    _halve(path)
    return path


def _halve(path: Path) -> None:
    """Store large tensors in half precision, to be cast to float32 when the graph is loaded.

    WebAssembly cannot compute in half precision.
    """
    onnx: Any = import_module("onnx")
    graph: Any = onnx.load(path)
    casts: list[Any] = []
    for tensor in graph.graph.initializer:
        values = onnx.numpy_helper.to_array(tensor)
        if values.dtype == "float32" and values.size >= _LARGE:
            name = tensor.name
            half = onnx.numpy_helper.from_array(values.astype("float16"), name + _HALF)
            tensor.CopyFrom(half)
            to = onnx.TensorProto.FLOAT
            casts.append(onnx.helper.make_node("Cast", [name + _HALF], [name], to=to))
    nodes = [*casts, *graph.graph.node]
    del graph.graph.node[:]
    graph.graph.node.extend(nodes)
    del graph.graph.value_info[:]
    graph.graph.doc_string = ""
    for node in graph.graph.node:
        del node.metadata_props[:]
        node.doc_string = ""
    onnx.save(graph, path)


def refilled(graph_of: Path, module: nn.Module, path: Path) -> Path | None:
    """Copy a graph written with `named`, with the tensors of another module of the same structure.

    Faster than tracing, which takes seconds per graph. Returns None if names or shapes differ.
    """
    onnx: Any = import_module("onnx")
    graph: Any = onnx.load(graph_of)
    given = {**dict(module.named_parameters(remove_duplicate=False)), **module.state_dict()}
    given |= dict(module.named_buffers())
    for tensor in graph.graph.initializer:
        name = tensor.name.removesuffix(_HALF)
        if name not in given:
            if tensor.name.endswith(_HALF):
                return None
            continue  # a constant in the code
        if list(tensor.dims) != list(given[name].shape):
            return None
        kind = onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type)
        values = given[name].detach().numpy().astype(kind)
        tensor.CopyFrom(onnx.numpy_helper.from_array(values, tensor.name))
    onnx.save(graph, path)
    return path


def rounded(stream: ResidualStream) -> ResidualStream:
    """The model with its large tensors rounded to half precision."""
    # Not model.float(), which transformers refuses for models loaded from a GGUF file.
    model = nn.Module.float(copy.deepcopy(unwrapped(stream.model))).eval()
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_floating_point() and tensor.numel() >= _LARGE:
            tensor.data = tensor.data.half().float()
    return as_stream(model, **stream.options)
