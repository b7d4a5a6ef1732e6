"""Graphs whose large tensors are stored in half precision."""

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

_LARGE = 256  # entries from which a tensor is stored in half precision
_HALF = ".half"  # behind the name of such a tensor


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
    """A graph for one row: a page shows one at a time.

    named: keep every tensor of the module as it is, under its name, for `refilled`.
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
    """Store large tensors in half precision and widen them when the graph is opened.

    WebAssembly has no arithmetic in half precision.
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
    """A graph that was written with `named`, with the tensors of a module of the same structure.

    Tracing takes seconds a graph. None: the tensors have other names or shapes.
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
            continue  # a constant of the code
        if list(tensor.dims) != list(given[name].shape):
            return None
        kind = onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type)
        values = given[name].detach().numpy().astype(kind)
        tensor.CopyFrom(onnx.numpy_helper.from_array(values, tensor.name))
    onnx.save(graph, path)
    return path


def rounded(stream: ResidualStream) -> ResidualStream:
    """The model whose large tensors are what half precision makes of them."""
    # Not model.float(), which transformers refuses to models that it read from a GGUF file.
    model = nn.Module.float(copy.deepcopy(unwrapped(stream.model))).eval()
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_floating_point() and tensor.numel() >= _LARGE:
            tensor.data = tensor.data.half().float()
    return as_stream(model, **stream.options)
