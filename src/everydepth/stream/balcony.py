"""Balconies: beside a frozen model, one more block at some depths, between state and readout."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, cast, final

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from everydepth.errors import DataError, DepthError, SettingError, UnsupportedModelError
from everydepth.stream.block import Block
from everydepth.stream.contract import ResidualStream
from everydepth.stream.cursor import CallAxes, Cursor
from everydepth.stream.edit import block_copy, move
from everydepth.stream.insert import inserted, template
from everydepth.stream.registry import as_stream
from everydepth.stream.taps import first_tensor
from everydepth.stream.wrapping import unwrapped

WEIGHTS, FACTS = "balconies.safetensors", "balconies.json"
INITS = ("last", "copy", "fresh")


class Balcony(nn.Module):
    """A model, frozen, and one or more blocks of its own kind at each of some depths.

    At depth k with a balcony the readout gets what those blocks make of `h_k`. The model's own
    output is untouched, always. With m blocks depth k is then a plain model of k + m blocks. Where
    stages follow, those that begin one come first: the head was made for the last stage's states.

    model: stays in eval mode. blocks: by depth. init: "last", "copy" or "fresh"; see `balcony`.
    likes: by depth, the numbers of the model's blocks as which those of a balcony are called.
    reaches: by depth, that of the model whose states have the shape of what the balcony gives.
    """

    def __init__(
        self,
        model: nn.Module | ResidualStream,
        depths: Sequence[int],
        *,
        blocks: int = 1,
        init: str = "last",
        **options: Any,
    ) -> None:
        super().__init__()
        trunk = as_stream(model, **options)
        self.depths = _checked(trunk, depths, init)
        if isinstance(blocks, bool) or not 1 <= blocks < trunk.depth:
            raise SettingError(
                f"blocks={blocks!r} a balcony, but {trunk.name} has {trunk.depth} blocks; "
                f"use 1 to {trunk.depth - 1}"
            )
        self.model = trunk.model
        self._options = dict(trunk.options)
        self._stream: BalconyStream | None = None
        self._facts = {"depths": self.depths, "blocks": blocks, "init": init}
        self.likes: dict[int, tuple[int, ...]] = {}
        self.reaches: dict[int, int] = {}
        self.blocks = nn.ModuleDict()
        for depth in self.depths:
            first = trunk.depth + sum(map(len, self.likes.values()))  # its first place in a cache
            leads = trunk.leads(depth) if init == "last" else ()
            self.reaches[depth] = trunk.depth if leads else depth
            if leads:
                last = range(max(leads[-1], trunk.depth - blocks) + 1, trunk.depth + 1)
                self.likes[depth] = (*leads, *last)
                made = [block_copy(trunk.blocks[like - 1].module) for like in self.likes[depth]]
            else:
                self.likes[depth] = (template(trunk, depth, None)[0],) * blocks
                made = _new_blocks(trunk, depth, first, blocks, init)
            self.blocks[str(depth)] = nn.ModuleList(made)
        self.model.requires_grad_(False)
        self.blocks.requires_grad_(True)
        self.train(self.model.training)

    @property
    def stream(self) -> BalconyStream:
        """The model with its balconies, seen as a stream."""
        if self._stream is None:
            self._stream = BalconyStream(self, as_stream(self.model, **self._options))
        return self._stream

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own."""
        return self.model(*args, **kwargs)

    def train(self, mode: bool = True) -> Balcony:
        super().train(mode)
        self.model.eval()
        return self

    def save_pretrained(
        self, directory: str | Path, state_dict: Mapping[str, Tensor] | None = None, **kwargs: Any
    ) -> None:
        """The plain model as itself, and the balconies in two files beside it."""
        state = dict(self.state_dict() if state_dict is None else state_dict)
        own = _below(state, "model.")
        unwrapped_model: Any = unwrapped(self.model)
        unwrapped_model.save_pretrained(directory, state_dict=own, **kwargs)
        blocks = {key: value.contiguous() for key, value in _below(state, "blocks.").items()}
        save_file(blocks, Path(directory) / WEIGHTS)
        (Path(directory) / FACTS).write_text(json.dumps(self._facts) + "\n", "utf-8")

    @property
    def config(self) -> Any:
        """The model's."""
        return getattr(unwrapped(self.model), "config", None)

    def get_input_embeddings(self) -> Any:
        """The model's, if it has some."""
        found = getattr(unwrapped(self.model), "get_input_embeddings", None)
        return None if found is None else found()

    @property
    def generation_config(self) -> Any:
        """The model's."""
        return getattr(unwrapped(self.model), "generation_config", None)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_stream": None}


def has_balconies(folder: Path) -> bool:
    """Whether a model with balconies was saved in a folder."""
    return (folder / FACTS).is_file()


def with_balconies(model: nn.Module, folder: Path) -> Balcony:
    """A model that was loaded from a folder, with the balconies saved there."""
    facts = json.loads((folder / FACTS).read_text("utf-8"))
    found = Balcony(model, **facts).eval()
    try:
        found.blocks.load_state_dict(load_file(folder / WEIGHTS))
    except (OSError, RuntimeError, SafetensorError) as error:
        raise DataError(
            f"the balconies in {folder} do not fit the model beside them ({error}); save both again"
        ) from error
    return found


@final
class BalconyStream(ResidualStream):
    """The stream of the frozen model; its readouts look from the balconies."""

    def __init__(self, model: Balcony, trunk: ResidualStream) -> None:
        self.model, self._trunk = model, trunk
        self.inputs, self.task, self.options = trunk.inputs, trunk.task, trunk.options
        self._exits = {int(k): cast(nn.ModuleList, found) for k, found in model.blocks.items()}
        self._likes, self._reaches = model.likes, model.reaches
        counts = accumulate((len(found) for found in self._exits.values()), initial=trunk.depth)
        self._places = dict(zip(self._exits, counts, strict=False))

    @property
    def exits(self) -> Mapping[int, nn.ModuleList]:
        return self._exits

    def exit_state(self, cursor: Cursor) -> Tensor:
        h, depth = cursor.h, cursor.depth
        for block, like in zip(self._exits.get(depth, ()), self._likes.get(depth, ()), strict=True):
            # Called as the block it is like: same masks and positions, a cache place of its own.
            output = cursor.calls[like - 1](block, h)
            h = self._trunk.between(first_tensor(output), depth, cursor.batch)
        return h

    def truncated(self, depth: int, *, share: bool) -> nn.Module:
        likes = self._likes.get(depth, ())
        # What is found in the memo is not copied: tensors here, and the configs of the model.
        own = [
            copy.deepcopy(block, {id(held): held for held in _held(block)})
            for block in self._exits.get(depth, ())
        ]
        if self._reaches.get(depth, depth) > depth:
            return self._trunk.ended(depth, own, likes, share=share)
        grown = self._trunk
        for count, (block, like) in enumerate(zip(own, likes, strict=True)):
            move(block, like - 1 - self._places[depth] - count)
            deeper = grown.inserted(depth + count, block, like, share=True)
            grown = as_stream(deeper, **self.options)
        return grown.truncated(depth + len(own), share=share)

    def kept(self, numbers: Sequence[int], *, share: bool) -> nn.Module:
        return self._trunk.kept(numbers, share=share)

    def new_cache(self) -> Any:
        cache = self._trunk.new_cache()
        layers = getattr(cache, "layers", [])
        if layers:
            alike = [like for likes in self._likes.values() for like in likes]
            layers += [copy.deepcopy(layers[like - 1]) for like in alike]
        return cache

    # -- as the frozen model has it ----------------------------------------------------------------

    @property
    def blocks(self) -> Sequence[Block]:
        return self._trunk.blocks

    @property
    def head(self) -> nn.Module:
        return self._trunk.head

    def feature(self, h: Tensor, depth: int, batch: Mapping[str, Any]) -> Tensor:
        return self._trunk.feature(h, self._reaches.get(depth, depth), batch)

    def normed(self, feature: Tensor, depth: int) -> Tensor:
        return self._trunk.normed(feature, self._reaches.get(depth, depth))

    def readout(self, h: Tensor, depth: int, batch: Mapping[str, Any]) -> Tensor:
        return self._trunk.readout(h, self._reaches.get(depth, depth), batch)

    def arguments(self, batch: Mapping[str, Any], cache: Any) -> dict[str, Any]:
        return self._trunk.arguments(batch, cache)

    def call(self, arguments: Mapping[str, Any]) -> Any:
        return self._trunk.call(arguments)

    def prediction(self, output: Any) -> Tensor:
        return self._trunk.prediction(output)

    def after_block(self, h: Tensor, depth: int) -> Tensor:
        return self._trunk.after_block(h, depth)

    def between(self, h: Tensor, depth: int, batch: Mapping[str, Any]) -> Tensor:
        return self._trunk.between(h, depth, batch)

    def silent(
        self, h: Tensor, number: int, run: Callable[[], Any], given: Mapping[str | int, Any]
    ) -> Any:
        return self._trunk.silent(h, number, run, given)

    def confirm(self, batch: Mapping[str, Any]) -> None:
        self._trunk.confirm(batch)

    def extras(self, h: Tensor, depth: int, batch: Mapping[str, Any]) -> dict[str, Tensor]:
        return self._trunk.extras(h, self._reaches.get(depth, depth), batch)

    def carried(self, number: int) -> Mapping[str | int, int]:
        return self._trunk.carried(number)

    @property
    def row_axis(self) -> int:
        return self._trunk.row_axis

    @property
    def call_axes(self) -> CallAxes | None:
        return self._trunk.call_axes

    @property
    def slotted(self) -> bool | None:
        return self._trunk.slotted

    @property
    def positions(self) -> int | None:
        return self._trunk.positions

    @property
    def heads(self) -> int | None:
        return self._trunk.heads

    def window(self, depth: int) -> int | None:
        return self._trunk.window(depth)

    @property
    def outputs(self) -> int | None:
        return self._trunk.outputs

    def account(self) -> Mapping[str, str]:
        shown = ", ".join(map(str, self._exits))
        counts = sorted({len(likes) for likes in self._likes.values()})
        each = "one block" if counts == [1] else f"{_span(counts)} blocks"
        return {**self._trunk.account(), "balconies": f"{each} each at depths {shown}"}


def _checked(trunk: ResidualStream, depths: Sequence[int], init: str) -> tuple[int, ...]:
    last, given = trunk.depth - 1, list(depths)
    if init not in INITS:
        raise SettingError(f"init={init!r}; use one of {', '.join(INITS)}")
    if not given:
        raise DepthError(f"depths [] name no balcony; use at least one of 1 to {last}")
    for depth in given:
        if isinstance(depth, bool) or not isinstance(depth, int) or not 1 <= depth <= last:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise DepthError(
                f"a balcony at depth {depth!r}, but {trunk.name} has {trunk.depth} blocks and its "
                f"last depth stays as it is; use 1 to {last}"
            )
        if given.count(depth) > 1:
            raise DepthError(f"depths {given} have {depth} twice; name it once")
        posts = (branch.post for branch in trunk.blocks[depth - 1].branches)
        normed = next((p for p in posts if not isinstance(p, nn.ReLU | nn.Identity | None)), None)
        if normed is not None and init != "last":
            raise UnsupportedModelError(
                f"init={init!r}, but block {depth} of {trunk.name} applies {type(normed).__name__} "
                "to the sum (post-norm), so no block of its class starts silent; use init='last'"
            )
    return tuple(sorted(given))


def _new_blocks(
    trunk: ResidualStream, depth: int, first: int, count: int, init: str
) -> Iterator[nn.Module]:
    """The blocks of one balcony, that call themselves blocks `first` + 1 and on."""
    like, copyable = template(trunk, depth, None)
    pattern = trunk.blocks[like - 1].module
    alike = [block.module for block in trunk.blocks if _shapes(block.module) == _shapes(pattern)]
    for number in range(count):
        if init == "last" and copyable:
            block = block_copy(pattern)
            # Where fewer have its shape, the first balcony blocks are copies of the first of them.
            source = alike[max(number - count, -len(alike))]
            block.load_state_dict(block_copy(source).state_dict())
            move(block, first + number - (like - 1))
        else:
            block = _silent_block(trunk, depth, like, "copy" if init == "last" else init, copyable)
            move(block, first + number - depth)
        for parameter in block.parameters():
            # Shared with nothing: a copy of a frozen block can be trained.
            parameter.requires_grad_(True)
        yield block


def _silent_block(
    trunk: ResidualStream, depth: int, like: int, init: str, copyable: bool
) -> nn.Module:
    """A new block as the growth of a model makes them."""
    grown = inserted(trunk, depth, init=init if copyable else "fresh", share=True, trainable=True)
    block = grown.blocks[depth].module
    if copyable:
        # It was made for a deeper model; here it reads the config of this one.
        pattern = trunk.blocks[like - 1].module
        for new, old in zip(block.modules(), pattern.modules(), strict=True):
            if "config" in vars(old):
                vars(new)["config"] = vars(old)["config"]
    return block


def _shapes(block: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(value.shape) for name, value in block.state_dict().items()}


def _span(counts: Sequence[int]) -> str:
    return str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"


def _held(block: nn.Module) -> list[Any]:
    configs = [vars(module).get("config") for module in block.modules()]
    found = (*block.parameters(), *block.buffers(), *configs)
    return [held for held in found if held is not None]


def _below(state: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    return {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}
