"""Balconies: extra blocks between state and readout at some depths of a frozen model."""

from __future__ import annotations

import copy
import inspect
import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, chain
from pathlib import Path
from typing import Any, cast, final

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from everydepth.errors import DataError, DepthError, SettingError, UnsupportedModelError
from everydepth.stream.around import StreamAround
from everydepth.stream.contract import ResidualStream
from everydepth.stream.cursor import Cursor
from everydepth.stream.edit import block_copy, move, shapes
from everydepth.stream.insert import inserted, template
from everydepth.stream.registry import as_stream
from everydepth.stream.taps import first_tensor
from everydepth.stream.wrapping import ModelAround, unwrapped

WEIGHTS, FACTS = "balconies.safetensors", "balconies.json"
INITS = ("last", "copy", "fresh")


class Balcony(ModelAround):
    """A frozen model with one or more extra blocks of its own kind at some depths.

    At depth k with a balcony, the readout receives the output of these blocks for `h_k`; the
    model's own output never changes. With m blocks, depth k cut out is a plain model of k + m
    blocks. In a model with stages, copies of the blocks that start each later stage come first,
    because the head expects states of the last stage.

    model: stays in eval mode. depths: of the balconies. blocks: per balcony.
    init: "last", "copy" or "fresh"; see `everydepth.balcony`.

    likes: by depth, the numbers of the model's blocks whose arguments the balcony's blocks get.
    reaches: by depth, the depth of the model whose state has the shape of the balcony's output.
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
        if trunk.exits:
            shown = ", ".join(map(str, trunk.exits))
            raise UnsupportedModelError(
                f"{trunk.name} has balconies already, at depths {shown}; "
                "build all of them at once, on the plain model inside (its `model`)"
            )
        self.depths = _checked(trunk, depths, init)
        if isinstance(blocks, bool) or not 1 <= blocks < trunk.depth:
            raise SettingError(
                f"blocks={blocks!r} per balcony, but {trunk.name} has {trunk.depth} blocks; "
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
            first = trunk.depth + sum(map(len, self.likes.values()))  # its first cache slot
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
        self.name_inputs()

    @property
    def stream(self) -> BalconyStream:
        """The stream of the model with its balconies."""
        if self._stream is None:
            self._stream = BalconyStream(self, as_stream(self.model, **self._options))
        return self._stream

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own forward; balconies do not take part."""
        return self.model(*args, **kwargs)

    def signature(self) -> inspect.Signature:
        """The model's."""
        return inspect.signature(unwrapped(self.model).forward)

    def train(self, mode: bool = True) -> Balcony:
        super().train(mode)
        self.model.eval()
        return self

    def save_pretrained(
        self, directory: str | Path, state_dict: Mapping[str, Tensor] | None = None, **kwargs: Any
    ) -> None:
        """Save the plain model, with the balconies in two files next to it."""
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
        """The model's; None if it has none."""
        found = getattr(unwrapped(self.model), "get_input_embeddings", None)
        return None if found is None else found()

    @property
    def generation_config(self) -> Any:
        """The model's."""
        return getattr(unwrapped(self.model), "generation_config", None)


def has_balconies(folder: Path) -> bool:
    """Whether a folder holds a model with balconies."""
    return (folder / FACTS).is_file()


def with_balconies(model: nn.Module, folder: Path) -> Balcony:
    """A model loaded from a folder, with the balconies saved there."""
    facts = json.loads((folder / FACTS).read_text("utf-8"))
    found = Balcony(model, **facts).eval()
    try:
        found.blocks.load_state_dict(load_file(folder / WEIGHTS))
    except (OSError, RuntimeError, SafetensorError) as error:
        raise DataError(
            f"the balconies in {folder} do not fit the model saved with them ({error}); save both "
            "again"
        ) from error
    return found


@final
class BalconyStream(StreamAround):
    """The stream of the frozen model, read out through the balconies."""

    def __init__(self, model: Balcony, trunk: ResidualStream) -> None:
        self.model, self.inner = model, trunk
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
            # Same masks and positions as the block it is like, but a cache slot of its own.
            out = first_tensor(cursor.calls[like - 1](block, self.given(h)))
            h = self.inner.blocks[like - 1].after(h, out)
            if like <= depth:
                h = self.inner.between(h, depth, cursor.batch)
            # Else the block is like one behind what the model does between them.
        return h

    def reach(self, depth: int) -> int:
        below = (likes for place, likes in self._likes.items() if place <= depth)
        return max((depth, *chain.from_iterable(below)))

    def truncated(self, depth: int, *, share: bool) -> nn.Module:
        likes = self._likes.get(self.check_depth(depth, lowest=1), ())
        # deepcopy does not copy what is in its memo: here tensors, and configs of the model.
        own = [
            copy.deepcopy(block, {id(held): held for held in _held(block)})
            for block in self._exits.get(depth, ())
        ]
        if self._reaches.get(depth, depth) > depth:
            return self.inner.ended(depth, own, likes, share=share)
        grown = self.inner
        for count, (block, like) in enumerate(zip(own, likes, strict=True)):
            move(block, like - 1 - self._places[depth] - count)
            deeper = grown.inserted(depth + count, block, like, share=True)
            grown = as_stream(deeper, **self.options)
        return grown.truncated(depth + len(own), share=share)

    def inserted(self, after: int, block: nn.Module, like: int, *, share: bool) -> nn.Module:
        raise UnsupportedModelError(
            f"{type(unwrapped(self.inner.model)).__name__} has balconies, which belong to its "
            "present depths; insert the block first, then add balconies"
        )

    def new_cache(self) -> Any:
        cache = self.inner.new_cache()
        layers = getattr(cache, "layers", [])
        if layers:
            alike = [like for likes in self._likes.values() for like in likes]
            layers += [copy.deepcopy(layers[like - 1]) for like in alike]
        return cache

    # -- where a balcony leads to another stage, that of its last block ---------------------------

    def feature(self, h: Tensor, depth: int, batch: Mapping[str, Any]) -> Tensor:
        return self.inner.feature(h, self._reaches.get(depth, depth), batch)

    def normed(self, feature: Tensor, depth: int) -> Tensor:
        return self.inner.normed(feature, self._reaches.get(depth, depth))

    def readout(self, h: Tensor, depth: int, batch: Mapping[str, Any]) -> Tensor:
        return self.inner.readout(h, self._reaches.get(depth, depth), batch)

    def extras(self, h: Tensor, depth: int, batch: Mapping[str, Any]) -> dict[str, Tensor]:
        return self.inner.extras(h, self._reaches.get(depth, depth), batch)

    def account(self) -> Mapping[str, str]:
        shown = ", ".join(map(str, self._exits))
        counts = sorted({len(likes) for likes in self._likes.values()})
        each = "one block" if counts == [1] else f"{_span(counts)} blocks"
        return {**self.inner.account(), "balconies": f"{each} each at depths {shown}"}


def _checked(trunk: ResidualStream, depths: Sequence[int], init: str) -> tuple[int, ...]:
    last, given = trunk.depth - 1, list(depths)
    if init not in INITS:
        raise SettingError(f"init={init!r}; use one of {', '.join(INITS)}")
    if not given:
        raise DepthError(f"depths=[] has no balcony; use at least one of 1 to {last}")
    for depth in given:
        if isinstance(depth, bool) or not isinstance(depth, int) or not 1 <= depth <= last:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise DepthError(
                f"a balcony at depth {depth!r}, but {trunk.name} has {trunk.depth} blocks and its "
                f"last depth stays unchanged; use 1 to {last}"
            )
        if given.count(depth) > 1:
            raise DepthError(f"depths={given} has {depth} twice; give it once")
        posts = (branch.post for branch in trunk.blocks[depth - 1].branches)
        normed = next((p for p in posts if not isinstance(p, nn.ReLU | nn.Identity | None)), None)
        if normed is not None and init != "last":
            raise UnsupportedModelError(
                f"init={init!r}, but block {depth} of {trunk.name} applies {type(normed).__name__} "
                "to the sum (post-norm), so a block of its class cannot start silent; use "
                "init='last'"
            )
    return tuple(sorted(given))


def _new_blocks(
    trunk: ResidualStream, depth: int, first: int, count: int, init: str
) -> Iterator[nn.Module]:
    """The blocks of one balcony, with layer indices from `first` on."""
    like, copyable = template(trunk, depth, None)
    pattern = trunk.blocks[like - 1].module
    alike = [block.module for block in trunk.blocks if shapes(block.module) == shapes(pattern)]
    for number in range(count):
        if init == "last" and copyable:
            block = block_copy(pattern)
            # If too few blocks have this shape, the first of them is copied more than once.
            source = alike[max(number - count, -len(alike))]
            block.load_state_dict(block_copy(source).state_dict())
            move(block, first + number - (like - 1))
        else:
            block = _silent_block(trunk, depth, like, "copy" if init == "last" else init, copyable)
            move(block, first + number - depth)
        for parameter in block.parameters():
            # Copies of frozen blocks are trainable.
            parameter.requires_grad_(True)
        yield block


def _silent_block(
    trunk: ResidualStream, depth: int, like: int, init: str, copyable: bool
) -> nn.Module:
    """A new silent block, as `insert` makes it."""
    grown = inserted(trunk, depth, init=init if copyable else "fresh", share=True, trainable=True)
    block = grown.blocks[depth].module
    if copyable:
        # It was made for a deeper model; now it refers to this model's config.
        pattern = trunk.blocks[like - 1].module
        for new, old in zip(block.modules(), pattern.modules(), strict=True):
            if "config" in vars(old):
                vars(new)["config"] = vars(old)["config"]
    return block


def _span(counts: Sequence[int]) -> str:
    return str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"


def _held(block: nn.Module) -> list[Any]:
    configs = [vars(module).get("config") for module in block.modules()]
    found = (*block.parameters(), *block.buffers(), *configs)
    return [held for held in found if held is not None]


def _below(state: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    return {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}
