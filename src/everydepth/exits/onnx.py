"""Write a stream as an ONNX graph, checked against the model in ONNX Runtime."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from everydepth.errors import BatchError, ExportError, UnsupportedModelError
from everydepth.exits.measure import checkpoint_bytes
from everydepth.exits.policies import NEVER, Memory, Policy
from everydepth.exits.reading import exit_logits
from everydepth.stream import ResidualStream, unwrapped
from everydepth.stream.feed import first_rows
from everydepth.stream.taps import hooked, replaced_forward

# A protobuf holds at most 2 GB; larger weights go to a separate file.
_ONE_FILE = 1_500_000_000

# Relative to the largest logit: float32 sums may be computed in another order.
_TOLERANCE = 1e-4


@torch.no_grad()
def write(
    stream: ResidualStream,
    example: Mapping[str, Tensor],
    path: Path,
    exits: Policy | None,
    *,
    every: bool = False,
) -> list[str]:
    """Write the graph and compare it on several shapes; returns the names of its inputs.

    every: one output per depth with its logits.
    """
    runtime()
    rows = max(2, stream.rows(example))
    batch = first_rows(stream, example, rows)
    names = list(batch)
    module = _Fixed(stream, names, every) if exits is None else _Exits(stream, names, exits, batch)
    outputs = ["logits"] if exits is None else ["logits", "depth"]
    outputs = [f"depth{number}" for number in range(1, stream.depth + 1)] if every else outputs
    # Branches of a graph see states of several shapes, whose sizes dynamo would make dynamic.
    dynamo: Any = import_module("torch._dynamo.config")
    static = dynamo.patch(automatic_dynamic_shapes=False)
    constants = nullcontext() if exits is None else _as_constants(stream, batch)
    with quiet_export(), static, constants:
        program: Any = torch.onnx.export(
            module.eval(),
            tuple(batch.values()),
            dynamo=True,
            dynamic_shapes=(tuple(_dynamic(name, value) for name, value in batch.items()),),
            input_names=names,
            output_names=outputs,
            verbose=False,
        )
    program.save(str(path), external_data=checkpoint_bytes(stream.model) > _ONE_FILE)
    session = opened(path)
    for feeds in _shapes(stream, batch):
        expected = module(*feeds.values())
        expected = expected if isinstance(expected, tuple) else (expected,)
        found = session.run(outputs, {name: value.numpy() for name, value in feeds.items()})
        for name, mine, theirs in zip(outputs, expected, found, strict=True):
            check_same(name, mine, theirs, feeds)
    return names


class OfStream(nn.Module):
    """Base of modules that run a stream."""

    def __init__(self, stream: ResidualStream) -> None:
        super().__init__()
        self.model = unwrapped(stream.model)
        self._stream = (stream,)  # in a tuple, so that parameters are registered only once


class _Fixed(OfStream):
    """The model as a function of tensors in a fixed order."""

    def __init__(self, stream: ResidualStream, names: list[str], every: bool) -> None:
        super().__init__(stream)
        self.names = names
        self.every = every

    def forward(self, *inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
        (stream,) = self._stream
        batch = dict(zip(self.names, inputs, strict=True))
        if self.every:
            states = stream.observe(batch)
            return tuple(states.logits(depth) for depth in range(1, stream.depth + 1))
        return stream.prediction(stream.call(stream.arguments(batch, None)))


class _Exits(OfStream):
    """`predict` as a graph: each group of blocks runs unless all rows are done (`torch.cond`).

    Each row keeps the logits of its exit. Rows stay in the batch, since a graph cannot change its
    size.
    """

    def __init__(
        self, stream: ResidualStream, names: list[str], policy: Policy, example: Mapping[str, Any]
    ) -> None:
        super().__init__(stream)
        self.names = names
        self._policy = policy
        self._thresholds = (*policy.for_stream(stream), -NEVER)
        self._shapes = [h.shape[1:] for h in stream.observe(example)]
        read = [
            depth
            for depth, threshold in enumerate(self._thresholds, start=1)
            if threshold < NEVER or policy.remembers
        ]
        # Each group of blocks ends with a readout.
        self._groups = list(zip([0, *read[:-1]], read, strict=True))

    def forward(self, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        (stream,) = self._stream
        cursor = stream.start(dict(zip(self.names, inputs, strict=True)))
        h = cursor.h
        rows = h.shape[0]
        state = (
            h,
            h.new_zeros(rows, stream.classes),
            torch.zeros(rows, dtype=torch.int64, device=h.device),
            torch.zeros(rows, dtype=torch.bool, device=h.device),
        )

        def run(start: int, end: int) -> Callable[..., tuple[Tensor, ...]]:
            def group(
                h: Tensor, logits: Tensor, depth: Tensor, done: Tensor, *memory: Tensor
            ) -> tuple[Tensor, ...]:
                here = stream.advance(replace(cursor, depth=start, h=h), end)
                found = exit_logits(stream, here.h, end, here.batch)
                score, kept = self._policy.certainty(found, memory)
                threshold = self._thresholds[end - 1]
                leaves = torch.ones_like(done) if threshold == -NEVER else score >= threshold
                new = leaves & ~done
                return (
                    here.h,
                    torch.where(new[:, None], found, logits),
                    torch.where(new, end, depth),
                    done | leaves,
                    *kept,
                )

            return group

        def keep(start: int, end: int) -> Callable[..., tuple[Tensor, ...]]:
            def group(h: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
                # Both branches must return the same shape; the state is not used any more.
                same = self._shapes[start] == self._shapes[end]
                state = h.clone() if same else h.new_zeros(h.shape[0], *self._shapes[end])
                return (state, *(value.clone() for value in rest))

            return group

        first, *others = self._groups
        full = run(*first)(*state, *Memory())
        for ends in others:
            finished, ways = full[3].all(), (keep(*ends), run(*ends))
            if torch.compiler.is_exporting():
                full = torch.cond(finished, *ways, full)
            else:  # the reference that the graph is compared with
                full = ways[0 if finished else 1](*full)
        return full[1], full[2]


@contextmanager
def _as_constants(
    stream: ResidualStream, example: Mapping[str, Any]
) -> Generator[None, None, None]:
    """Inside the context, modules in blocks without tensor inputs, such as tables of relative
    positions, return constants: tensors created inside a branch cannot be exported."""
    found: dict[nn.Module, Tensor] = {}

    def note(module: nn.Module, args: Any, kwargs: dict[str, Any], out: Any) -> None:
        given = any(isinstance(value, Tensor) for value in (*args, *kwargs.values()))
        if isinstance(out, Tensor) and not given:
            found[module] = out

    inner = (module for block in stream.blocks for module in block.module.modules())
    with hooked(*(module.register_forward_hook(note, with_kwargs=True) for module in inner)):
        stream.observe(example)
    with ExitStack() as stack:
        for module, value in found.items():
            module.register_buffer("_constant", value, persistent=False)
            stack.callback(delattr, module, "_constant")
            stack.enter_context(replaced_forward(module, _constant_of(module)))
        yield


def _constant_of(module: nn.Module) -> Callable[..., Tensor]:
    return lambda *_, **__: cast(Tensor, module._constant)


def _dynamic(name: str, value: Tensor) -> dict[int, Any]:
    """Dynamic dimensions: the rows, and for tokens also the length."""
    shape: dict[int, Any] = {0: torch.export.Dim("batch")}
    if value.ndim == 2 and not value.is_floating_point():
        if value.shape[1] < 3:
            raise BatchError(
                f"{name!r} of the example has {value.shape[1]} tokens; use 3 or more, or the "
                "exporter takes the length for a constant"
            )
        shape[1] = torch.export.Dim("tokens")
    return shape


def _shapes(stream: ResidualStream, batch: dict[str, Any]) -> Generator[dict[str, Any], None, None]:
    """The example, one row of it, and one more row with one token less."""
    yield batch
    yield first_rows(stream, batch, 1)
    more = first_rows(stream, batch, stream.rows(batch) + 1)
    tokens = {k for k, v in more.items() if v.ndim == 2 and not v.is_floating_point()}
    yield {k: v[:, 1:].contiguous() if k in tokens else v for k, v in more.items()}


def check_same(name: str, mine: Tensor, found: Any, feeds: Mapping[str, Tensor]) -> None:
    """Raise an error if an output of ONNX Runtime differs from the model's.

    Padding is not compared: for a token that can attend to nothing, such as left padding in a
    causal model, every engine computes something different, which no other token sees.
    """
    theirs = torch.as_tensor(found)
    real = feeds.get("attention_mask")
    if real is None or real.shape != mine.shape[:-1]:
        real = torch.ones(mine.shape[:-1])
    scale = max(1.0, float(mine[real.bool()].abs().max()))
    gap = (
        float((mine - theirs.to(mine.dtype))[real.bool()].abs().max())
        if mine.shape == theirs.shape
        else float("nan")
    )
    if not gap <= _TOLERANCE * scale:
        shapes = {key: tuple(value.shape) for key, value in feeds.items()}
        raise ExportError(
            f"in ONNX Runtime {name!r} has shape {tuple(theirs.shape)} and differs by {gap:.1e} "
            f"from the model's {tuple(mine.shape)} on inputs {shapes}; nothing was written. Try "
            "another version of torch or onnxruntime, or format='hf'"
        )


def opened(path: Path) -> Any:
    """A graph in ONNX Runtime."""
    engine = runtime()
    settings = engine.SessionOptions()
    settings.log_severity_level = 3
    settings.intra_op_num_threads = 1  # idle threads would spin, and many graphs are opened
    return engine.InferenceSession(str(path), settings, providers=["CPUExecutionProvider"])


def runtime() -> Any:
    """The module onnxruntime, or an error that says how to install it."""
    try:
        import_module("onnxscript")  # the exporter of torch needs it
        return import_module("onnxruntime")
    except ImportError as error:
        raise UnsupportedModelError(
            f"format='onnx' needs {error.name}, which is not installed; "
            'pip install "everydepth[onnx]"'
        ) from error


@contextmanager
def quiet_export() -> Generator[None, None, None]:
    """Silence the exporter's warnings about packages and versions that do not matter here."""
    logger = logging.getLogger("torch.onnx")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(before)
