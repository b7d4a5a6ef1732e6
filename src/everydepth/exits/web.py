"""A classifier of pictures as a web page that answers while it downloads.

One graph holds the embedding and the readout, which every depth needs, and one each block. The page
answers as soon as the first block is there.
"""

from __future__ import annotations

import copy
import json
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from everydepth.errors import ExportError, SettingError, UnsupportedModelError
from everydepth.exits.onnx import check_same, quiet_export, runtime
from everydepth.exits.policies import NEVER, Policy
from everydepth.exits.profile import Profile
from everydepth.exits.reading import exit_logits
from everydepth.stream import ResidualStream, as_stream, unwrapped

RUNTIME = "onnxruntime-web"
_VERSION = "1.30.0"
_RUNTIME_FILES = ("ort.wasm.bundle.min.mjs", "ort-wasm-simd-threaded.wasm")
_LARGE = 256  # entries from which a tensor is stored in half precision
_EXAMPLES = 8
_PAGE = Path(__file__).parent / "page"


def runtime_files(given: str | Path | None) -> list[Path]:
    """The files of onnxruntime-web: in the folder given, or fetched by npm.

    given: a folder that holds them, such as node_modules/onnxruntime-web/dist.
    """
    if given is not None:
        folders = [Path(given), Path(given) / "dist"]
        for folder in folders:
            files = [folder / name for name in _RUNTIME_FILES]
            if all(file.is_file() for file in files):
                return files
        raise SettingError(
            f"runtime={str(given)!r} lacks {' or '.join(_RUNTIME_FILES)}; give the folder of the "
            f"npm package {RUNTIME} ({_VERSION}), or leave it out to have npm fetch it"
        )
    kept = Path.home() / ".cache" / "everydepth" / f"{RUNTIME}-{_VERSION}"
    if not all((kept / name).is_file() for name in _RUNTIME_FILES):
        _fetch(kept)
    return [kept / name for name in _RUNTIME_FILES]


def _fetch(kept: Path) -> None:
    """Let npm fetch the package (33 MB) and keep the two files a page needs (14 MB)."""
    if shutil.which("npm") is None:
        raise UnsupportedModelError(
            f"format='web' needs {RUNTIME} {_VERSION}, and there is no npm to fetch it; install "
            "Node.js, or give runtime= a folder that holds " + " and ".join(_RUNTIME_FILES)
        )
    with tempfile.TemporaryDirectory() as folder:
        command = ["npm", "pack", f"{RUNTIME}@{_VERSION}", "--silent"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        archives = list(Path(folder).glob("*.tgz"))
        if done.returncode != 0 or len(archives) != 1:
            raise ExportError(
                f"npm did not fetch {RUNTIME} {_VERSION} ({done.stderr.strip()[-300:]}); check the "
                "network, or give runtime= a folder that holds it"
            )
        kept.mkdir(parents=True, exist_ok=True)
        with tarfile.open(archives[0]) as archive:
            for name in _RUNTIME_FILES:
                member = archive.extractfile(f"package/dist/{name}")
                if member is None:
                    raise ExportError(f"{RUNTIME} {_VERSION} has no dist/{name}")
                (kept / name).write_bytes(member.read())


@torch.no_grad()
def write(
    stream: ResidualStream,
    example: Mapping[str, Tensor],
    folder: Path,
    *,
    exits: Policy | None,
    profile: Profile | None,
    runtime_from: str | Path | None,
) -> None:
    """Write graphs, page and description; every depth is compared with the model first."""
    engine = runtime()
    (name,) = _only_picture(stream, example)
    pictures = example[name]
    if len(pictures) < 2:
        pictures = pictures.repeat(2, 1, 1, 1)
    described: dict[str, Any] = {
        "model": stream.name,
        "depth": stream.depth,
        "input": name,
        "shape": list(pictures.shape[1:]),
        "low": float(pictures.min()),
        "high": float(pictures.max()),
        "labels": _labels(stream),
        "thresholds": _thresholds(stream, exits),
        "metric": None if profile is None else profile.metric,
        "quality": None if profile is None else [d.quality for d in profile.depths],
    }
    files = runtime_files(runtime_from)
    rounded = _rounded(stream)
    paths = _graphs(rounded, pictures, folder)
    logits = _compare(engine, rounded, pictures, paths)
    described["state"] = [1, *rounded.observe({name: pictures[:1]})[0].shape[1:]]
    described["files"] = [{"file": p.name, "bytes": p.stat().st_size} for p in paths]
    described["examples"] = [
        {"pixels": picture.flatten().tolist(), "logits": row.tolist()}
        for picture, row in zip(pictures[:_EXAMPLES], logits[:_EXAMPLES], strict=True)
    ]
    (folder / "model.json").write_text(json.dumps(described), "utf-8")
    (folder / "runtime").mkdir()
    for file in files:
        shutil.copy(file, folder / "runtime" / file.name)
    for file in _PAGE.iterdir():
        shutil.copy(file, folder / file.name)


class _Ends(nn.Module):
    """What comes before the first block, and the readout: one graph, since they may share tensors.

    Each half is computed from an input of its own.
    """

    def __init__(self, stream: ResidualStream, name: str) -> None:
        super().__init__()
        self.model = unwrapped(stream.model)
        self.name = name
        self._stream = (stream,)  # in a tuple: the model's parameters are registered once

    def forward(self, pictures: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        (stream,) = self._stream
        cursor = stream.start({self.name: pictures})
        return cursor.h, exit_logits(stream, h, stream.depth, cursor.batch)


class _Step(nn.Module):
    """One block. What it is given beside the state is computed from the shape of the pictures."""

    def __init__(self, stream: ResidualStream, name: str, depth: int, like: Tensor) -> None:
        super().__init__()
        self.block = stream.blocks[depth].module
        self.depth = depth
        self._cursor = (stream, stream.start({name: like}))

    def forward(self, h: Tensor) -> Tensor:
        stream, cursor = self._cursor
        return stream.step(replace(cursor, depth=self.depth, h=h)).h


def _graphs(stream: ResidualStream, pictures: Tensor, folder: Path) -> list[Path]:
    """The files in the order in which a page needs them."""
    (name,) = _names(stream)
    states = stream.observe({name: pictures})
    shapes = {tuple(state.shape[1:]) for state in states}
    if len(shapes) > 1:
        raise UnsupportedModelError(
            f"the states of {stream.name} change their shape ({', '.join(map(str, shapes))}), so "
            "one readout graph cannot serve all depths; use format='onnx' with one depth"
        )
    ends = folder / "ends.onnx"
    one = pictures[:1]
    _write_graph(_Ends(stream, name), (one, states[0][:1]), ends, ["pictures", "h"])
    paths = [ends]
    for depth in range(stream.depth):
        path = folder / f"block-{depth + 1:02d}.onnx"
        _write_graph(_Step(stream, name, depth, one), (states[depth][:1],), path, ["h"])
        paths.append(path)
    return paths


def _write_graph(
    module: nn.Module, inputs: tuple[Tensor, ...], path: Path, names: list[str]
) -> None:
    """A graph for one picture: a page shows one at a time."""
    outputs = ["out"] if len(names) == 1 else ["start", "logits"]
    with quiet_export():
        program: Any = torch.onnx.export(
            module.eval(),
            inputs,
            dynamo=True,
            input_names=names,
            output_names=outputs,
            verbose=False,
        )
    program.save(str(path), external_data=False)
    _halve(path)


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
            half = onnx.numpy_helper.from_array(values.astype("float16"), f"{name}.half")
            tensor.CopyFrom(half)
            to = onnx.TensorProto.FLOAT
            casts.append(onnx.helper.make_node("Cast", [f"{name}.half"], [name], to=to))
    nodes = [*casts, *graph.graph.node]
    del graph.graph.node[:]
    graph.graph.node.extend(nodes)
    del graph.graph.value_info[:]
    graph.graph.doc_string = ""
    for node in graph.graph.node:
        del node.metadata_props[:]
        node.doc_string = ""
    onnx.save(graph, path)


def _rounded(stream: ResidualStream) -> ResidualStream:
    """The model whose large tensors are what half precision makes of them."""
    model = copy.deepcopy(unwrapped(stream.model)).float().eval()
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_floating_point() and tensor.numel() >= _LARGE:
            tensor.data = tensor.data.half().float()
    return as_stream(model, **stream.options)


def _compare(engine: Any, stream: ResidualStream, pictures: Tensor, paths: list[Path]) -> Tensor:
    """Run the graphs as the page does; give the logits of each picture at each depth."""
    settings = engine.SessionOptions()
    settings.log_severity_level = 3
    ends, *blocks = [
        engine.InferenceSession(str(path), settings, providers=["CPUExecutionProvider"])
        for path in paths
    ]
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
            found.append(torch.as_tensor(logits)[0])
        rows.append(torch.stack(found))
    return torch.stack(rows)


def _only_picture(stream: ResidualStream, example: Mapping[str, Tensor]) -> list[str]:
    names = list(example)
    if names != _names(stream) or example[names[0]].ndim != 4:
        shapes = {name: tuple(value.shape) for name, value in example.items()}
        raise UnsupportedModelError(
            f"a page takes pictures alone, but the example has {shapes}; use format='onnx' for "
            "other inputs"
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


def _thresholds(stream: ResidualStream, exits: Policy | None) -> list[float | None] | None:
    if exits is None:
        return None
    if exits.kind != "confidence":
        raise UnsupportedModelError(
            f"a page can leave by confidence, but this policy goes by {exits.kind}; calibrate with "
            "policy='confidence'"
        )
    return [None if value == NEVER else float(value) for value in exits.for_stream(stream)]
