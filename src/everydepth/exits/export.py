"""Export a depth to files that load without everydepth."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import Tensor, nn

from everydepth.config import checked
from everydepth.engines.gguf_cut import cut_gguf
from everydepth.errors import ExportError, SettingError, UnsupportedModelError
from everydepth.exits import narrow
from everydepth.exits.card import model_card
from everydepth.exits.measure import checkpoint_bytes
from everydepth.exits.narrow import Narrowed, Weights
from everydepth.exits.policies import Policy
from everydepth.exits.profile import Profile
from everydepth.exits.reopen import check_reopened
from everydepth.exits.sentences import write_pooling
from everydepth.files import explained, not_written, write_folder
from everydepth.progress import quiet_transformers
from everydepth.stream import (
    Batch,
    ResidualStream,
    adapter,
    as_stream,
    check_plain,
    merged,
    rewrapped,
    shareable,
    unwrapped,
)
from everydepth.stream.feed import Feed
from everydepth.stream.text import encoded, is_text

Format = Literal["hf", "onnx", "gguf", "peft", "web"]

MANIFEST = "everydepth.json"
POLICY = "exit_policy.json"


@runtime_checkable
class Saveable(Protocol):
    """A tokenizer or processor."""

    def save_pretrained(self, save_directory: str) -> Any: ...


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The contents of a directory written by `export`.

    balcony: blocks of the balcony that follow the first `depth` blocks.
    """

    model: str
    depth: int
    of: int
    format: Format
    exits: bool
    balcony: int = 0


@checked
def export(
    model: nn.Module | ResidualStream | str | Path,
    directory: str | Path,
    *,
    depth: int | None = None,
    keep: str | Iterable[int] | None = None,
    format: Format = "hf",  # noqa: A002 - what users call it
    exits: Policy | None = None,
    example: Batch | None = None,
    tokenizer: Saveable | None = None,
    processor: Saveable | None = None,
    profile: Profile | None = None,
    recalibrate: Any = None,
    runtime: str | Path | None = None,
    weights: Weights = "float32",
    data: Any = None,
    overwrite: bool = False,
    **options: Any,
) -> Path:
    """Write the first `depth` blocks of a model (by default all) to a new directory.

    The output is compared with the model before the directory appears, which happens atomically.

    format: "hf" writes config, safetensors weights and a model card, for stock
        `AutoModel...from_pretrained`. PEFT adapters are merged; with `exits`, the policy is saved
        next to the full model. With `task="embedding"` and a `tokenizer`, it also loads as
        `SentenceTransformer(directory)`.
        "peft" writes only the adapters, in PEFT's format, for a base model of `depth` blocks.
        "onnx" writes one graph for any batch size and sequence length. With `exits`, it stops as
        soon as every row is done, and returns `logits` and `depth` like `predict`.
        "gguf" writes a file for llama.cpp, which includes the model's own `tokenizer`.
        "web" writes a folder for any web server: an image classifier or, with its `tokenizer`, a
        causal language model, one graph per block in half precision, and a page that answers as
        soon as the first block has arrived.
    exits: an exit policy. On a web page (confidence only), it can stop the download early.
    example: a batch to compare outputs on, and for "onnx" and "web" to trace the graph with. On a
        web page for text, it also determines which words come first.
    tokenizer, processor: saved with the model.
    profile: for the model card; on a web page, the quality shown.
    recalibrate: data to re-estimate the batch norm statistics of the cut model on.
    runtime: for "web", a folder with onnxruntime-web; by default npm downloads it once.
    weights: "int8" or "int4" quantizes an ONNX graph without exits (by ONNX Runtime) or the
        matrices of a GGUF file (Q8_0, Q4_0); the card shows what this costs at every depth.
    data: the data to measure that cost on; for ONNX by default `example`.
    overwrite: replace an earlier export. A directory that holds anything else is never touched.

    `model` may also be the path of a GGUF file, and `directory` that of a new one. Its first
    `depth` blocks, or those of `keep` ("1-12,20-24"), are copied byte for byte, still quantized,
    and checked in llama.cpp (`everydepth.engines.gguf_cut`).

    >>> folder = ed.export(model, "small", depth=2)
    >>> ViTForImageClassification.from_pretrained(folder).config.num_hidden_layers
    2
    """
    if isinstance(model, str | Path):
        given = {"exits": exits, "example": example, "tokenizer": tokenizer, "processor": processor}
        given |= {"profile": profile, "recalibrate": recalibrate, "runtime": runtime, "data": data}
        given["weights"] = None if weights == "float32" else weights
        refuse("a GGUF file", given | options)
        if format not in ("hf", "gguf"):  # "hf" is the default
            raise SettingError(f"format={format!r} for a GGUF file, which stays one; leave it out")
        return cut_gguf(model, directory, depth=depth, keep=keep, overwrite=overwrite).path
    refuse("a model; use depth=, or export at_depth(model, keep=...)", {"keep": keep})
    stream = as_stream(model, **options)
    if is_text(example):
        own = stream.tokenizer if tokenizer is None else tokenizer
        example = encoded(example, own, stream.positions)
    depth = stream.depth if depth is None else stream.check_depth(depth, lowest=1)
    _check_weights(weights, format, exits, data)
    if format == "peft" and adapter(stream.model) is None:
        raise SettingError(f"format='peft', but {stream.name} has no PEFT adapter; use format='hf'")
    if exits is not None:
        # A web page for text exits as a whole: it writes all tokens at the depth it has.
        (exits.thresholds if format == "web" else exits.for_stream)(stream)
        if depth != stream.depth:
            raise SettingError(
                f"depth={depth} with exits=, which needs all {stream.depth} depths; leave one out"
            )
        if stream.exits:
            raise SettingError(
                "exits= with balconies, which no stock model can hold; save the balconies "
                "(save_pretrained) and the policy, or export one depth"
            )
    if format == "web" and stream.exits:
        raise UnsupportedModelError(
            f"format='web' does not support the balconies of {stream.name}; export the model "
            "without them, or one depth in another format"
        )
    path = Path(directory).absolute()
    with explained(f"{path} cannot be written", ExportError):
        _check_target(path, overwrite)
    # The copy shares the model's tensors, unless they will change or are on another device.
    share = recalibrate is None and stream.device.type == "cpu" and shareable(stream.model)
    small = rewrapped(stream.model, stream.truncated(depth, share=share))
    small = (small if format == "peft" else merged(small)).cpu().eval()
    _forget_gguf(unwrapped(small))
    cut = as_stream(small, **stream.options)
    if recalibrate is not None:
        recalibrated(cut, recalibrate)
    manifest = Manifest(
        model=cut.name,
        depth=depth,
        of=stream.depth,
        format=format,
        exits=exits is not None,
        balcony=len(stream.exits.get(depth, ())),
    )
    if format == "gguf":
        refuse("format='gguf'", {"exits": exits, "example": example, "processor": processor})
        write, tokenizer = _gguf(cut, tokenizer, weights, data), None
    elif format == "web":
        write = _web(cut, example, tokenizer, exits, profile, runtime)
        tokenizer = None if cut.task == "causal_lm" else tokenizer
    elif format == "onnx":
        write = _onnx(cut, example, exits, weights, data)
    else:
        write = {"hf": _huggingface, "peft": _adapter}[format](cut, example)
    if format != "web":
        refuse(f"format={format!r}", {"runtime": runtime})

    def fill(folder: Path) -> None:
        usage, costs = write(folder)
        for part in (tokenizer, processor):
            if part is not None:
                part.save_pretrained(str(folder))
        if exits is not None:
            exits.save(folder / POLICY)
        card = model_card(manifest, small, profile=profile, policy=exits, usage=usage, costs=costs)
        (folder / "README.md").write_text(card, encoding="utf-8")
        (folder / MANIFEST).write_text(json.dumps(asdict(manifest), indent=2) + "\n", "utf-8")

    with explained(f"{path} cannot be written", ExportError):
        try:
            write_folder(path, fill)
        except (OSError, SafetensorError) as error:
            raise not_written(path, error) from error
    return path


@torch.no_grad()
def recalibrated(stream: ResidualStream, data: Any) -> None:
    """Re-estimate the statistics of every batch norm as means over the batches of `data`."""
    model = unwrapped(stream.model)
    kinds = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
    norms = [m for m in model.modules() if isinstance(m, kinds) and m.track_running_stats]
    if not norms:
        raise SettingError(
            f"recalibrate does not apply to {stream.name}, which has no batch norm; leave it out"
        )
    before = [norm.momentum for norm in norms]
    try:
        for norm in norms:
            norm.reset_running_stats()
            norm.momentum = None  # the mean over all batches, not a moving average
            norm.train()
        for batch in Feed(data, stream):
            stream.call(stream.arguments(batch, None))
    finally:
        for norm, momentum in zip(norms, before, strict=True):
            norm.momentum = momentum
            norm.eval()


def _forget_gguf(model: nn.Module) -> None:
    """Remove the mark of a model loaded from GGUF: transformers has converted it to plain weights,
    but refuses to save or cast them while the mark is there."""
    source: Any = getattr(getattr(model, "hf_quantizer", None), "quantization_config", None)
    if str(getattr(source, "quant_method", "")).lower().endswith("gguf"):
        del model.hf_quantizer
        config: Any = copy.copy(model.config)
        del config.quantization_config
        model.config = config


def refuse(what: str, given: Mapping[str, Any]) -> None:
    """Raise an error if an argument was given that does not apply."""
    names = [name for name, value in given.items() if value is not None]
    if names:
        raise SettingError(f"leave out {', '.join(names)}, which does not apply to {what}")


def _check_weights(weights: Weights, name: Format, exits: Policy | None, data: Any) -> None:
    if weights == "float32":
        refuse("weights='float32'", {"data": data})
    elif name not in ("onnx", "gguf") or exits is not None:
        raise SettingError(
            f"weights={weights!r} with {'exits=' if name == 'onnx' else f'format={name!r}'}; only "
            "ONNX graphs without exits and GGUF files can be quantized, so leave it out"
        )
    elif name == "gguf" and data is None:
        raise SettingError(
            f"weights={weights!r} with format='gguf' needs data=: texts to measure its cost on"
        )


def _check_target(path: Path, overwrite: bool) -> None:
    if not path.exists():
        return
    if not path.is_dir():
        raise ExportError(f"{path} is a file; choose a new directory")
    inside = sorted(entry.name for entry in path.iterdir())
    if not inside:
        return
    if MANIFEST not in inside:
        raise ExportError(
            f"{path} holds {', '.join(inside[:5])} and is not an export, so it is not touched; "
            "choose another directory"
        )
    if not overwrite:
        raise ExportError(
            f"{path} already holds an export; pass overwrite=True (--overwrite) to replace it, or "
            "choose another directory"
        )


Writer = Callable[[Path], tuple[str, Narrowed | None]]
"""Writes the model to a folder; returns usage and cost of quantization for the card."""


def _huggingface(stream: ResidualStream, example: Batch | None) -> Writer:
    from transformers import PreTrainedModel

    model = unwrapped(stream.model)
    if not isinstance(model, PreTrainedModel):
        raise UnsupportedModelError(
            f"{stream.name} is not a Hugging Face model, so it has no from_pretrained; use "
            "format='onnx', or save the state dict of everydepth.at_depth(model, k)"
        )
    if getattr(model, "hf_quantizer", None) is None:  # a model that was loaded quantized saves it
        check_plain(model, "export")

    def write(folder: Path) -> tuple[str, Narrowed | None]:
        with quiet_transformers():
            try:
                model.save_pretrained(folder)
            except StrictDataclassError as error:
                reason = " ".join(str(error).split()).rstrip(".")
                raise UnsupportedModelError(
                    f"{type(model.config).__name__} cannot describe {type(model).__name__} at "
                    f"depth {stream.depth}: {reason}; export another depth"
                ) from error
        found = check_reopened(stream, folder, example)
        if stream.task == "embedding":
            return write_pooling(stream, found.shape[-1], folder), None
        home = type(model).__module__.partition(".")[0]
        return (
            f"from {home if home == 'transformers' else type(model).__module__} "
            f"import {type(model).__name__}\n\n"
            f'model = {type(model).__name__}.from_pretrained("this directory")'
        ), None

    return write


def _gguf(
    stream: ResidualStream, tokenizer: Saveable | None, weights: Weights, data: Any
) -> Writer:
    from everydepth.engines.gguf_model import write_gguf

    check_plain(stream.model, "export")
    if tokenizer is None:
        raise SettingError(
            "format='gguf' needs tokenizer=, which is part of the file; give the model's own, "
            "AutoTokenizer.from_pretrained(...)"
        )

    def write(folder: Path) -> tuple[str, Narrowed | None]:
        path = folder / "model.gguf"
        stored = as_stream(write_gguf(stream, tokenizer, path, weights), **stream.options)
        usage = (
            "import xllamacpp\n\n"
            "settings = xllamacpp.CommonParams()\n"
            'settings.model.path = "model.gguf"\n'
            "server = xllamacpp.Server(settings)\n"
            'server.handle_completions({"prompt": "Once upon a time", "n_predict": 32})'
        )
        if weights == "float32":
            return usage, None
        depths = range(1, stream.depth + 1)

        def found(batch: Mapping[str, Any]) -> list[Tensor]:
            states = stored.observe(batch)
            return [states.logits(depth) for depth in depths]

        sizes = path.stat().st_size, checkpoint_bytes(stored.model)
        return usage, narrow.measured(stream, found, Feed(data, stream), weights, *sizes)

    return write


def _adapter(stream: ResidualStream, example: Batch | None) -> Writer:
    from peft import PeftModel

    around = adapter(stream.model)

    def reopened(_: nn.Module, folder: Path) -> nn.Module:
        base = copy.deepcopy(around).unload()
        return PeftModel.from_pretrained(base, str(folder)).eval()

    def write(folder: Path) -> tuple[str, Narrowed | None]:
        around.save_pretrained(str(folder))
        check_reopened(stream, folder, example, reopened)
        return (
            "import everydepth as ed\nfrom peft import PeftModel\n\n"
            f'base = ed.load("the base model", depth={stream.depth})\n'
            'model = PeftModel.from_pretrained(base, "this directory")'
        ), None

    return write


def _web(
    stream: ResidualStream,
    example: Batch | None,
    tokenizer: Saveable | None,
    exits: Policy | None,
    profile: Profile | None,
    runtime: str | Path | None,
) -> Writer:
    from everydepth.exits import web

    check_plain(stream.model, "export")
    batch = _example(stream, example, "web", "to compare every depth on, and to show")

    def write(folder: Path) -> tuple[str, Narrowed | None]:
        web.write(
            stream,
            batch,
            folder,
            tokenizer=tokenizer,
            exits=exits,
            profile=profile,
            runtime_from=runtime,
        )
        return "# in this directory, then open http://localhost:8000\npython -m http.server", None

    return write


def _example(
    stream: ResidualStream, example: Batch | None, name: Format, purpose: str
) -> Mapping[str, Any]:
    if example is None:
        raise SettingError(
            f"format={name!r} needs example=: a batch of model inputs with two rows or more, "
            f"{purpose}"
        )
    return {
        key: value.cpu()
        for key, value in stream.check_batch(example).items()
        if isinstance(value, Tensor) and key != "labels"
    }


def _onnx(
    stream: ResidualStream,
    example: Batch | None,
    exits: Policy | None,
    weights: Weights,
    data: Any,
) -> Writer:
    from everydepth.exits import onnx

    check_plain(stream.model, "export")
    batch = _example(stream, example, "onnx", "to trace the graph and to compare its results")

    def write(folder: Path) -> tuple[str, Narrowed | None]:
        names = onnx.write(stream, batch, folder / "model.onnx", exits)
        feeds = ", ".join(f'"{name}": {name}' for name in names)
        outputs = "logits, depth" if exits is not None else "(logits,)"
        usage = (
            "import onnxruntime\n\n"
            'session = onnxruntime.InferenceSession("model.onnx")\n'
            f"{outputs} = session.run(None, {{{feeds}}})"
        )
        if weights == "float32":
            return usage, None
        rows = Feed([example] if data is None else data, stream)
        return usage, narrow.narrow(stream, folder / "model.onnx", batch, rows, weights)

    return write
