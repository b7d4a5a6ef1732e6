"""A stream from paths: the user names the blocks and the readout."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final, get_args

import torch
from torch import Tensor, nn

from everydepth.errors import SettingError, UnsupportedModelError
from everydepth.stream.block import Block
from everydepth.stream.contract import ResidualStream, Task
from everydepth.stream.cursor import Cursor
from everydepth.stream.discovery.example import ROWS, parameters_of
from everydepth.stream.discovery.finding import doubled
from everydepth.stream.discovery.structure import (
    can_cache,
    close,
    prediction_in,
    predictions_in,
)
from everydepth.stream.modes import evaluating, without_tracking
from everydepth.stream.rows import select_rows
from everydepth.stream.states import States
from everydepth.stream.taps import silence
from everydepth.stream.wrapping import unwrapped


class _Function(nn.Module):
    """A readout given as a function, as a module."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, h: Tensor) -> Tensor:
        return self.function(h)


@final
class GenericStream(ResidualStream):
    """Blocks by path, readout by paths or a function, token by name. Branches are unknown."""

    def __init__(
        self,
        model: nn.Module,
        *,
        blocks: str,
        readout: str | Sequence[str] | Callable[[Tensor], Tensor] | None = None,
        token: str | int | Callable[..., Tensor] = "all",
        task: Task = "classification",
    ) -> None:
        inner = self._inner = unwrapped(model)
        self.model, self.task, self._token = model, task, token
        if not (callable(token) or isinstance(token, int) or token in _TOKENS):
            raise SettingError(
                f"token {token!r}; use one of {sorted(_TOKENS)}, a position, or a function "
                "f(h, batch)"
            )
        if task not in get_args(Task):
            raise SettingError(f"task {task!r}; use one of {list(get_args(Task))}")
        found = _submodule(inner, blocks)
        if not isinstance(found, (nn.ModuleList, nn.Sequential)):
            raise UnsupportedModelError(
                f"blocks={blocks!r} is a {type(found).__name__}; "
                "name the ModuleList or Sequential that holds the blocks"
            )
        self._list = found
        self._blocks = tuple(Block(module=module, plain=False) for module in found)
        if readout is None:
            raise UnsupportedModelError(
                "blocks= needs readout=, how a state becomes a prediction: for example "
                'readout=("norm", "head") or readout=lambda h: model.head(h)'
            )
        if callable(readout):
            self._readout: dict[str, nn.Module] = {"the function": _Function(readout)}
        else:
            paths = [readout] if isinstance(readout, str) else list(readout)
            self._readout = {path: _submodule(inner, path) for path in paths}
        # Numbers per prediction, as seen from the readout and from the model itself.
        self._outputs: dict[str, int] = {}
        main = getattr(inner, "main_input_name", None)
        first = main or next(iter(inspect.signature(inner.forward).parameters))
        self.inputs = (first,)
        self._returned: str | None = None
        self._overwrites, self._trying, self._tried, self._axis = False, False, False, 0

    @property
    def blocks(self) -> Sequence[Block]:
        return self._blocks

    @property
    def head(self) -> nn.Module:
        return list(self._readout.values())[-1]

    @property
    def outputs(self) -> int | None:
        return super().outputs or next(iter(self._outputs.values()), None)

    @property
    def overwrites(self) -> bool:
        return self._overwrites

    def arguments(self, batch: Mapping[str, Any], cache: Any) -> dict[str, Any]:
        # Otherwise blocks would extend the model's own cache whenever they are driven.
        own = {"use_cache": False} if can_cache(self._inner, *parameters_of(self._inner)) else {}
        return {**super().arguments(batch, cache), **own}

    @property
    def row_axis(self) -> int:
        return self._axis

    def overwritten(self, depth: int) -> None:
        if not self._trying:
            super().overwritten(depth)
        self._overwrites = True

    def confirm(self, batch: Mapping[str, Any]) -> None:
        if self._tried or self._trying or torch.compiler.is_compiling():
            return
        self._trying = True
        try:
            # Outside inference mode, because its tensors do not count what is written to them.
            with evaluating(self), torch.inference_mode(False), torch.no_grad(), silence():
                rows = torch.arange(min(self.rows(batch), ROWS))
                few = select_rows(batch, rows, self.rows(batch))
                states = self.observe(few)
                self._check_named(self.observe(few) if self._overwrites else states)
                one, two = (self.start(each).h.shape for each in (few, doubled(few, len(rows))))
                grown = (axis for axis, size in enumerate(one) if two[axis] == 2 * size)
                self._axis = next(grown, 0)
            self._tried = True
        finally:
            self._trying = False

    def _check_named(self, states: States) -> None:
        """Raise if the blocks or the readout are not those of the model."""
        cursor = self.start(states.batch)
        for depth, h in enumerate(states):
            cursor = self.step(cursor) if depth else cursor
            if not close(cursor.h, h) and depth < self.depth:
                raise UnsupportedModelError(
                    f"block {depth} of {self.name} does not return the state that block "
                    f"{depth + 1} is given: the model adds its skip, or does something else, "
                    "between them; make that a part of the block, or leave out blocks= and "
                    "readout=, so that the stream is discovered"
                )
        found = self.readout(states[self.depth], self.depth, states.batch)
        returned = predictions_in(states.output)
        # Of several outputs, the prediction is the one that the readout gives.
        self._returned = next(
            (n for n, z in returned.items() if close(found, z)), next(iter(returned))
        )
        own = self.prediction(states.output)
        if not close(found, own):
            raise UnsupportedModelError(
                f"the readout of {self.name} does not give its own prediction: shape "
                f"{tuple(found.shape)}, and the model's {tuple(own.shape)}; name in readout= what "
                f"the model applies to its last state, in order, in token= (now {self._token!r}) "
                "what predicts, or leave out blocks= and readout=, so that they are discovered"
            )

    def feature(self, h: Tensor, depth: int, batch: Mapping[str, Any]) -> Tensor:
        if callable(self._token):
            return self._token(h, batch)
        return h[:, self._token] if isinstance(self._token, int) else _TOKENS[self._token](h)

    def normed(self, feature: Tensor, depth: int) -> Tensor:
        with without_tracking(self._norms):
            return self._applied(feature)

    def _applied(self, feature: Tensor) -> Tensor:
        """The feature after all modules of the readout but the head."""
        *steps, (last, head) = self._readout.items()
        for path, module in steps:
            shape = tuple(feature.shape)
            try:
                feature = module(feature)
            except (RuntimeError, ValueError) as error:
                raise self._misfit(path, shape, str(error)) from error
        if isinstance(head, nn.Linear) and feature.shape[-1] != head.in_features:
            wanted = f"it takes {head.in_features} features"
            raise self._misfit(last, tuple(feature.shape), wanted)
        return feature

    def readout(self, h: Tensor, depth: int, batch: Mapping[str, Any]) -> Tensor:
        with without_tracking(self._norms):
            feature = self.feature(h, self.check_depth(depth), batch)
            return self._noted("the readout", self.head(self._applied(feature)))

    @torch.no_grad()
    def conclude(self, cursor: Cursor) -> None:
        if unwrapped(self.model).training:
            self.head(self._applied(self.feature(cursor.h, self.depth, cursor.batch)))

    def prediction(self, output: Any) -> Tensor:
        return self._noted("the model itself", prediction_in(output, self._returned))

    def _noted(self, who: str, value: Tensor) -> Tensor:
        """The prediction; raise if readout and model predict different numbers of outputs."""
        self._outputs[who] = value.shape[-1]
        if isinstance(self.head, nn.Linear):
            self._outputs["the readout"] = self.head.out_features
        if len(set(self._outputs.values())) > 1:
            both = " and ".join(f"{n} from {key}" for key, n in sorted(self._outputs.items()))
            raise UnsupportedModelError(
                f"predictions of {self.name} have two widths, {both}; end readout= with the head "
                "whose output the model returns"
            )
        return value

    def _misfit(self, path: str, shape: tuple[int, ...], why: str) -> UnsupportedModelError:
        return UnsupportedModelError(
            f"the readout of {self.name} does not fit: {path!r} cannot take an input of shape "
            f"{shape} (token={self._token!r}): {why}; name the modules that the model itself "
            "applies to its last state, in order"
        )


_TOKENS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "all": lambda h: h,
    "first": lambda h: h[:, 0],
    "last": lambda h: h[:, -1],
    "mean": lambda h: h.mean(1),
}


def _submodule(model: nn.Module, path: str) -> nn.Module:
    try:
        return model.get_submodule(path)
    except AttributeError as error:
        children = [name for name, _ in model.named_children()]
        raise UnsupportedModelError(
            f"{type(model).__name__} has no module {path!r} ({error}); its children are {children}"
        ) from error
