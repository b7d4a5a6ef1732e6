"""A network with a loss at every depth: an ordinary `nn.Module` around the plain model."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers.utils.generic import ModelOutput

from everydepth.errors import NonFiniteError, SettingError, UnsupportedModelError
from everydepth.objectives import Objective, lpa
from everydepth.stream import IGNORE_INDEX, ResidualStream, States, as_stream, unwrapped
from everydepth.training.layer_dropout import observe_with_layer_dropout
from everydepth.training.targets import Targets

Criterion = Callable[[Tensor, Any, Mapping[str, Tensor]], Tensor]
"""A loss of your own: `f(logits, labels, extras)` gives one number; extras are what the readout
predicts beside the logits (boxes, for instance)."""


@dataclass
class EveryDepthOutput(ModelOutput):
    """What one pass gives.

    loss: the objective, to call `backward` on; None without labels.
    logits: the model's own, at the last depth.
    losses: the loss at each supervised depth, unweighted, detached.
    logits_at: predictions at the depths that were asked for with `depths=`.
    """

    loss: Tensor | None = None
    logits: Tensor | None = None
    losses: dict[int, Tensor] | None = None
    logits_at: dict[int, Tensor] | None = None


class EveryDepth(nn.Module):
    """`model`, trained by an objective that supervises its depths.

    net = EveryDepth(model, objective=lpa()); net(**batch).loss.backward()

    The model stays as it is: `net.model` is the plain one, and `net.state_dict()` has its own keys.
    A batch may hold, beside the model's inputs and "labels", "loss_weights" (one number a label).

    label_smoothing, class_weights: as in `torch.nn.functional.cross_entropy`.
    criterion: a loss of your own, for tasks other than classes, numbers and tokens.
    raise_on_nan: stop with an error that names the first depth at which NaN appears; it waits for
        the device once a step.
    options: passed to `as_stream`.
    """

    def __init__(
        self,
        model: nn.Module,
        objective: Objective | None = None,
        *,
        label_smoothing: float = 0.0,
        class_weights: Tensor | Sequence[float] | None = None,
        criterion: Criterion | None = None,
        raise_on_nan: bool = False,
        **options: Any,
    ) -> None:
        super().__init__()
        if not 0 <= label_smoothing < 1:
            raise SettingError(f"label_smoothing={label_smoothing}; use a share from 0 to below 1")
        self.model = model
        self._options = options
        self._stream: ResidualStream | None = None
        self.objective = (lpa() if objective is None else objective).check(self.stream.depth)
        self.label_smoothing = label_smoothing
        self.criterion = criterion
        self.raise_on_nan = raise_on_nan
        self.step = 0
        self.total_steps: int | None = None
        self._counts_itself = True
        self._labels_checked = False
        self.class_weights: Tensor | None
        self.register_buffer("class_weights", self._checked_weights(class_weights), False)
        self.heads = nn.ModuleDict()
        if self.objective.heads:
            for depth in range(1, self.stream.depth):
                self.heads[str(depth)] = copy.deepcopy(self.stream.head)
        self.register_load_state_dict_pre_hook(_with_inner_keys)

    @property
    def stream(self) -> ResidualStream:
        """The model, seen as a stream."""
        if self._stream is None:
            self._stream = as_stream(self.model, **self._options)
        return self._stream

    def set_progress(self, step: int, total_steps: int | None = None) -> None:
        """Tell the objective where training is, in optimizer steps from 0.

        Without it, passes in training mode are counted.
        """
        self.step, self.total_steps, self._counts_itself = step, total_steps, False

    def forward(self, *, depths: Sequence[int] = (), **batch: Any) -> EveryDepthOutput:
        """One pass. `depths`: also give the predictions at these depths."""
        stream = self.stream
        asked = [stream.check_depth(depth) for depth in depths]
        labels = batch.pop("labels", None)
        targets = self._targets(batch, labels)
        states = self._observe(batch)
        out = EveryDepthOutput(logits=self.logits_of(states, stream.depth))
        if asked:
            out.logits_at = {depth: self.logits_of(states, depth) for depth in asked}
        if labels is None:
            return out
        weights = self.objective.weights(self.step, self.total_steps, stream.depth).tolist()
        supervised = {depth: weight for depth, weight in enumerate(weights) if weight > 0}
        losses: dict[int, Tensor] = {}
        total = None
        for depth, weight in supervised.items():
            losses[depth] = self._loss(states, depth, targets, labels)
            part = weight * losses[depth]
            total = part if total is None else total + part
        out.loss = total
        out.losses = {depth: loss.detach() for depth, loss in losses.items()}
        if self.training and self._counts_itself:
            self.step += 1
        return out

    def logits_of(self, states: States, depth: int) -> Tensor:
        """The prediction at a depth, through that depth's own head if it has one."""
        if str(depth) not in self.heads:
            return states.logits(depth)
        return self.heads[str(depth)](self.stream.normed(states.feature(depth), depth))

    def save_pretrained(self, directory: str | Path, **kwargs: Any) -> None:
        """Save the plain model, as itself."""
        cast(Any, unwrapped(self.model)).save_pretrained(directory, **kwargs)

    def state_dict(self, *args: Any, prefix: str = "", **kwargs: Any) -> dict[str, Any]:
        """The plain model's own state dict; heads of a multi-classifier are under `heads.`."""
        state = self.model.state_dict(*args, prefix=prefix, **kwargs)
        if self.heads:
            kwargs["destination"] = state
            self.heads.state_dict(prefix=f"{prefix}heads.", **kwargs)
        return state

    def __getstate__(self) -> dict[str, Any]:
        # A stream may hold functions that know their model; a copy needs its own.
        return {**self.__dict__, "_stream": None}

    def _observe(self, batch: Mapping[str, Any]) -> States:
        objective, stream = self.objective, self.stream
        if self.training and objective.layer_dropout:
            batch = stream.check_batch(batch)
            rows = next(batch[k] for k in stream.inputs if batch.get(k) is not None).shape[0]
            kept = objective.kept_rows(
                self.step, self.total_steps, stream.depth, rows, stream=_rank()
            )
            assert kept is not None
            return observe_with_layer_dropout(stream, batch, kept)
        return stream.observe(batch)

    def _targets(self, batch: dict[str, Any], labels: Any) -> Targets | None:
        weights = batch.pop("loss_weights", None)
        items = batch.pop("num_items_in_batch", None)
        if labels is None or self.criterion is not None:
            return None
        return Targets.of(
            self.stream,
            batch,
            labels,
            loss_weights=weights,
            items=items,
            class_weights=self.class_weights,
            label_smoothing=self.label_smoothing,
        )

    def _loss(self, states: States, depth: int, targets: Targets | None, labels: Any) -> Tensor:
        if targets is None:
            assert self.criterion is not None
            extras = self.stream.extras(states.h[depth], depth, states.batch)
            return self.criterion(self.logits_of(states, depth), labels, extras)
        return targets.loss(targets.pick(self.logits_of(states, depth)))

    def _checked_weights(self, weights: Tensor | Sequence[float] | None) -> Tensor | None:
        if weights is None:
            return None
        found = torch.as_tensor(weights, dtype=torch.float32)
        if found.shape != (self.stream.classes,):
            raise SettingError(
                f"class_weights have shape {tuple(found.shape)}, but the head of "
                f"{self.stream.name} has {self.stream.classes} classes; give one number a class"
            )
        return found


def _with_inner_keys(
    module: nn.Module, state: dict[str, Any], prefix: str, *_: Any
) -> None:
    """Rename the plain model's keys to those of the wrapped one, before they are loaded."""
    heads = f"{prefix}heads." if cast(EveryDepth, module).heads else None
    for key in [k for k in state if k.startswith(prefix)]:
        if heads is None or not key.startswith(heads):
            state[f"{prefix}model.{key[len(prefix) :]}"] = state.pop(key)


def _rank() -> int:
    from torch import distributed

    ready = distributed.is_available() and distributed.is_initialized()
    return distributed.get_rank() if ready else 0
