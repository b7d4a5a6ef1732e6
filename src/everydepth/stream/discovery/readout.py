"""The readout as pick, norm and linear head, for tails that consist of these."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from everydepth.stream.discovery.recording import Key, Operation, Recording
from everydepth.stream.discovery.residual import MOVES, base

_PICKS = MOVES | frozenset((
    "mean", "sum", "gather", "div", "_adaptive_avg_pool2d", "avg_pool2d", "max", "amax", "squeeze_",
))  # fmt: skip
_ELEMENTWISE = frozenset((
    "mul", "mul_", "div", "div_", "tanh", "tanh_", "relu", "relu_", "gelu", "silu", "silu_",
    "sigmoid", "add", "add_", "sub", "hardswish", "hardswish_", "hardtanh", "clamp",
))  # fmt: skip


@dataclass(frozen=True)
class Elementwise:
    """A recorded elementwise operation, such as a scale or soft cap."""

    operation: Operation
    place: int

    @property
    def name(self) -> str:
        return base(self.operation).rstrip("_")

    def __call__(self, x: Tensor) -> Tensor:
        args = list(self.operation.args)
        args[self.place] = x
        name = self.operation.func
        # Use the out-of-place variant of an operation recorded in place.
        plain = getattr(torch.ops.aten, base(self.operation).rstrip("_"), None)
        overload = self.operation.name.partition(".")[2]
        function = getattr(plain, overload, name) if plain is not None else name
        return function(*args, **self.operation.kwargs)


Step = nn.Module | Elementwise


class Capped(nn.Module):
    """A linear head and what the model applies to its logits, such as a soft cap."""

    def __init__(self, linear: nn.Module, after: Sequence[Step]) -> None:
        super().__init__()
        self.linear, self.after = linear, tuple(after)

    @property
    def weight(self) -> Any:
        return self.linear.weight

    def forward(self, x: Tensor) -> Tensor:
        z = self.linear(x)
        for step in self.after:
            z = step(z)
        return z


class Whole(nn.Module):
    """Replaces a head if the prediction is not the output of a linear map: the identity."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.out_features = outputs

    def forward(self, x: Tensor) -> Tensor:
        return x


@dataclass(frozen=True)
class Parts:
    """The tail as steps: `before` the linear head, the head, and `after` it; without the pick.

    whole: whether the steps go back all the way to the last state.
    """

    before: tuple[Step, ...]
    linear: nn.Module | None
    after: tuple[Step, ...]
    whole: bool


def parts(recording: Recording, end: Key, prediction: Key) -> Parts:
    """The steps from the last state to the prediction, found backward, one value at a time."""
    steps: list[Step] = []
    key, whole = prediction, False
    leaves: dict[Key, list[Any]] = {}
    for call in recording.calls:
        if call.given is not None and next(call.module.children(), None) is None:
            leaves.setdefault(call.given, []).append(call)
    for _ in range(200):
        calls = leaves.get(key, [])
        steps.extend(
            c.module for c in calls if c.state == c.given and isinstance(c.module, nn.Dropout)
        )
        if key == end:
            whole = True
            break
        made = [c for c in calls if c.state is not None and c.state != c.given]
        if made:
            call = max(made, key=lambda c: c.order)
            pools = recording.values[call.state].shape != recording.values[key].shape
            # A module that only pools is a pick, found by measurement.
            if not pools or next(call.module.parameters(), None) is not None:
                steps.append(call.module)
            key = call.state
            continue
        operation = recording.producer(key)
        if operation is None or not operation.reads:
            break
        name = base(operation)
        constant = [i for i, a in enumerate(operation.args) if isinstance(a, Tensor)]
        floats = [
            (place, read)
            for place, read in zip(constant, operation.reads, strict=False)
            if not _fixed(recording, read)
        ]
        if name in _ELEMENTWISE and len(floats) == 1 and floats[0][0] < len(operation.args):
            others = [a for i, a in enumerate(operation.args) if i != floats[0][0]]
            if all(
                not isinstance(a, Tensor) or a.numel() == 1 or isinstance(a, nn.Parameter)
                for a in others
            ):
                steps.append(Elementwise(operation, floats[0][0]))
                key = floats[0][1]
                continue
        if name in _PICKS:
            key = operation.reads[0]
            continue
        break
    steps.reverse()
    where = [i for i, step in enumerate(steps) if isinstance(step, nn.Module) and _is_linear(step)]
    if not where:
        return Parts(tuple(steps), None, (), whole)
    head = where[-1]
    linear = steps[head]
    assert isinstance(linear, nn.Module)
    return Parts(tuple(steps[:head]), linear, tuple(steps[head + 1 :]), whole)


def _fixed(recording: Recording, key: Key) -> bool:
    return recording.producer(key) is None and (
        isinstance(recording.tensors[key[0]], nn.Parameter)
        or recording.tensors[key[0]].numel() == 1
    )


def _is_linear(module: nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    return isinstance(weight, Tensor) and weight.ndim == 2 and not isinstance(module, nn.Embedding)


# -- which part of the state predicts -------------------------------------------------------------

Pick = Callable[[Tensor, Mapping[str, Any]], Tensor]


def _rows(h: Tensor) -> Tensor:
    return torch.arange(h.shape[0], device=h.device)


def _last_unpadded(pad: int) -> Pick:
    def pick(h: Tensor, batch: Mapping[str, Any]) -> Tensor:
        ids = batch.get("input_ids")
        if ids is None:
            return h[:, -1]
        places = torch.arange(ids.shape[-1], device=ids.device, dtype=torch.int32)
        return h[_rows(h), (places * (ids != pad).to(torch.int32)).argmax(-1).to(h.device)]

    return pick


def _last_masked(h: Tensor, batch: Mapping[str, Any]) -> Tensor:
    mask = batch["attention_mask"]
    places = torch.arange(mask.shape[-1], device=mask.device)
    return h[_rows(h), (places * mask).argmax(-1).to(h.device)]


def _masked_mean(h: Tensor, batch: Mapping[str, Any]) -> Tensor:
    mask = batch["attention_mask"].to(h.dtype)[..., None]
    return (h * mask).sum(1) / mask.sum(1).clamp(min=1e-9)


def _end_token(end: int) -> Pick:
    def pick(h: Tensor, batch: Mapping[str, Any]) -> Tensor:
        found = (batch["input_ids"] == end).int()
        last = found.shape[1] - 1 - found.flip(1).argmax(-1)
        return h[_rows(h), last.to(h.device)]

    return pick


def picks(config: Any, *, looks: bool) -> dict[str, Pick]:
    """Ways to choose the part of the state that predicts, by name, to be tried out.

    looks: only those that look at the batch, as padding shows where the others go wrong.
    """
    pad, end = getattr(config, "pad_token_id", None), getattr(config, "eos_token_id", None)
    fixed: dict[str, Pick] = {
        "every token": lambda h, batch: h,
        "the first token": lambda h, batch: h[:, 0],
        "the mean": lambda h, batch: h.flatten(1, -2).mean(1),
        "the mean of all tokens but the first": lambda h, batch: h[:, 1:].mean(1),
        "the mean over positions": lambda h, batch: h.flatten(2).mean(2),
    }
    found: dict[str, Pick] = {**({} if looks else fixed), "the mean of real tokens": _masked_mean}
    if isinstance(pad, int):
        found["the last token that is not padding"] = _last_unpadded(pad)
    found["the last token of the mask"] = _last_masked
    if isinstance(end, int):
        found["the end token"] = _end_token(end)
    if not looks:
        found["the last token"] = lambda h, batch: h[:, -1]
    return found
