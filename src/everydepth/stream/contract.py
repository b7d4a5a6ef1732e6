"""The contract: a network is `h_0 -> h_1 -> ... -> h_L` with one shared readout."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import cached_property
from operator import index
from types import MappingProxyType
from typing import Any, Literal, TypeVar, cast, final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from everydepth.config import checked
from everydepth.errors import (
    BatchError,
    DepthError,
    EveryDepthError,
    UnsupportedModelError,
)
from everydepth.stream.block import Block, Instead
from everydepth.stream.cursor import Call, CallAxes, Cursor, apart
from everydepth.stream.edit import BlockList, edited, lengthened, shortened
from everydepth.stream.given import check_given
from everydepth.stream.modes import packing, tracking, without_packing, without_tracking
from everydepth.stream.states import States
from everydepth.stream.taps import (
    first_tensor,
    hooked,
    listening,
    parts_of,
    replaced_forward,
    state_in,
    version,
    with_first_tensor,
    with_state,
)
from everydepth.stream.tree import tree
from everydepth.stream.wrapping import device_of, unwrapped, without_values

Task = Literal[
    "classification",
    "regression",
    "causal_lm",
    "masked_lm",
    "seq2seq_lm",
    "token_classification",
    "detection",
    "embedding",
]
"""What the readout predicts: a class per sample, numbers per sample, the next token at every
position, the token at every position, the next token of a decoder's text, a class at every
position, a class and a box per query, or a vector per sample."""

WORD_TASKS: frozenset[Task] = frozenset(("causal_lm", "masked_lm", "seq2seq_lm"))
"""The tasks in which every token predicts a word."""

TOKEN_TASKS: frozenset[Task] = frozenset((*WORD_TASKS, "token_classification"))
"""The tasks in which every token predicts."""

LABELED_TOKEN_TASKS: frozenset[Task] = TOKEN_TASKS - {"causal_lm"}
"""The tasks in which labels select the tokens that count."""

IGNORE_INDEX = -100

BESIDE_INPUTS = ("labels", "loss_weights", "num_items_in_batch")
"""Keys of a batch that describe the loss and are not passed to the model."""

Batch = Mapping[str, Any] | Tensor | str | Sequence[str]


Method = TypeVar("Method", bound=Callable[..., Any])


def _untraced(method: Method) -> Method:
    """Exclude from `torch.compile`: compiled code would keep the hooks of its first call."""
    return cast(Method, torch.compiler.disable(method))


class _Started(Exception):
    """Stops the model's forward once every block's call is known; never leaves `start`."""


class ResidualStream(ABC):
    """A model as a stream of states. Architectures implement the abstract members.

    model: the model that is called, possibly wrapped (DDP, FSDP); hooks go on its blocks.
    inputs: batch keys of which the model needs at least one.
    options: the options given to `as_stream`, for opening another model the same way.
    tokenizer: for data that is text; None if none was given.

    >>> stream = ed.as_stream(model)
    >>> stream.depth, stream.task, stream.classes
    (3, 'classification', 10)
    >>> stream.observe(test.batch(range(4))).logits(1).shape  # predictions after one block
    torch.Size([4, 10])
    """

    model: nn.Module
    inputs: tuple[str, ...]
    task: Task
    options: Mapping[str, Any] = MappingProxyType({})
    tokenizer: Any = None

    # -- what an architecture defines -------------------------------------------------------------

    @property
    @abstractmethod
    def blocks(self) -> Sequence[Block]:
        """The blocks, in order; block `l` (from 1) maps `h_{l-1}` to `h_l`."""

    @property
    @abstractmethod
    def head(self) -> nn.Module:
        """The last linear map of the readout."""

    @abstractmethod
    def feature(
        self, h: Float[Tensor, "batch ..."], depth: int, batch: Mapping[str, Any]
    ) -> Float[Tensor, "batch ..."]:
        """The part of the state that predicts: the class token, a pooled state, every token, ...

        If stages change the shape, it is mapped to the coordinates of the last depth.
        """

    @abstractmethod
    def normed(self, feature: Float[Tensor, "batch ..."], depth: int) -> Float[Tensor, "batch ..."]:
        """The input of the head's linear map: a feature after the final norm or pooler."""

    def readout(
        self, h: Float[Tensor, "batch ..."], depth: int, batch: Mapping[str, Any]
    ) -> Float[Tensor, "batch ..."]:
        """`z_l = R(h_l)`: the model's own readout, applied to the state at any depth.

        Override it only if the model applies these steps in another order, which changes rounding.
        """
        return self.head(self.normed(self.feature(h, self.check_depth(depth), batch), depth))

    @checked
    def truncated(self, depth: int, *, share: bool) -> nn.Module:
        """A plain model of the same class with `depth` blocks."""
        depth, blocks = self.check_depth(depth, lowest=1), self._block_list("truncated")
        return shortened(unwrapped(self.model), blocks, depth, share=share)

    @checked
    def kept(self, numbers: Sequence[int], *, share: bool) -> nn.Module:
        """A plain model of the same class with only these blocks (from 1), in this order."""
        order = [self.check_depth(number, lowest=1) - 1 for number in numbers]
        return edited(unwrapped(self.model), self._block_list("kept"), order, share=share)

    def inserted(self, after: int, block: nn.Module, like: int, *, share: bool) -> nn.Module:
        """A plain model of the same class with the new `block` after depth `after`.

        like: the existing block (from 1) whose kind and stage it shares.
        """
        blocks = self._block_list("inserted")
        return lengthened(unwrapped(self.model), blocks, after, block, like, share=share)

    def reach(self, depth: int) -> int:
        """The number of blocks whose arguments the exits up to a depth need."""
        return depth

    def leads(self, depth: int) -> Sequence[int]:
        """The later blocks that change the shape, if a model may continue with these alone."""
        return ()

    def ended(
        self, depth: int, blocks: Sequence[nn.Module], likes: Sequence[int], *, share: bool
    ) -> nn.Module:
        """A plain model of the first `depth` blocks followed by new ones; see `leads`.

        likes: for each new block, the existing block (from 1) whose stage it joins.
        """
        raise UnsupportedModelError(
            f"{self.name} cannot continue with other blocks after depth {depth}"
        )

    def block_like(self, number: int) -> nn.Module | None:
        """A new block that keeps the shape of block `number`'s output, if that block changes it."""
        return None

    def arguments(self, batch: Mapping[str, Any], cache: Any) -> dict[str, Any]:
        """The model's keyword arguments for a batch, without `BESIDE_INPUTS`."""
        if cache is not None:
            raise UnsupportedModelError(f"{self.name} has no key/value cache; call without `cache`")
        return {key: value for key, value in batch.items() if key not in BESIDE_INPUTS}

    def completed(self, batch: Mapping[str, Any]) -> Mapping[str, Any]:
        """A batch with the inputs that the model derives from its labels; few models do."""
        return batch

    def call(self, arguments: Mapping[str, Any]) -> Any:
        """The output of the untouched model."""
        return self.model(**arguments)

    def prediction(self, output: Any) -> Tensor:
        """The logits (or numbers) inside the model's own output."""
        return output if isinstance(output, Tensor) else output.logits

    def after_block(self, h: Tensor, depth: int) -> Tensor:
        """What the model does to the state between two blocks; usually the identity."""
        return h

    def between(self, h: Tensor, depth: int, batch: Mapping[str, Any]) -> Tensor:
        """The output of block `depth` as the next block receives it; may depend on the batch."""
        return self.after_block(h, depth)

    def conclude(self, cursor: Cursor) -> None:
        """End a driven pass in training mode: norms behind the blocks see its last state.

        Reading out never updates running statistics, or two read-outs would do it twice.
        """
        del cursor

    @property
    def idle(self) -> Sequence[nn.Module]:
        """Modules like the blocks that the model did not call."""
        return ()

    @property
    def gaps(self) -> frozenset[int]:
        """Depths after which the model itself changes the state before the next block."""
        return frozenset()

    def silent(
        self, h: Tensor, number: int, run: Callable[[], Any], given: Mapping[str | int, Any]
    ) -> Any:
        """The output of block `number` for state `h` if its branches added nothing.

        run: calls the block, for outputs other than the state.
        given: the arguments of that call, by position or keyword.
        """
        if self.blocks[number - 1].plain:
            return h
        with without_tracking(self._norms):
            return with_first_tensor(run(), h)

    def carried(self, number: int) -> Mapping[str | int, int]:
        """Arguments of the next block, other than its state, that block `number` outputs.

        By position or keyword, the index of the output: a second state, or a bias that the first
        block computes for all.
        """
        del number
        return {}

    def confirm(self, batch: Mapping[str, Any]) -> None:
        """Called with every batch before it is used, to check what only a batch can show."""
        del batch

    def trial(self) -> Mapping[str, Any] | None:
        """A small batch for trying out a changed model; None if unknown."""
        return None

    def extras(
        self, h: Float[Tensor, "batch ..."], depth: int, batch: Mapping[str, Any]
    ) -> dict[str, Tensor]:
        """Predictions other than the logits, by their names in the model's own output."""
        return {}

    def new_cache(self) -> Any:
        """An empty key/value cache for `start(..., cache=)`."""
        raise UnsupportedModelError(
            f"{self.name} has no key/value cache; only causal language models have one"
        )

    @property
    def positions(self) -> int | None:
        """The longest sequence the model has positions for; None if unlimited."""
        return None

    @property
    def heads(self) -> int | None:
        """The number of heads that masks may fold into their rows; None if there are none."""
        return None

    @property
    def overwrites(self) -> bool:
        """Whether the model writes over states, so that it must be given copies of them."""
        return False

    def overwritten(self, depth: int) -> None:
        """Called if the model wrote over the state at this depth, which `overwrites` denies."""
        mode = "training" if unwrapped(self.model).training else "eval"
        raise UnsupportedModelError(
            f"{self.name} writes over its state at depth {depth} (in {mode} mode), which would "
            "then hold a later one; use operations that do not: x = x + ..., inplace=False (an "
            "adapter may say `overwrites` instead)"
        )

    @property
    def row_axis(self) -> int:
        """The batch dimension of a state."""
        return 0

    @property
    def padding(self) -> str:
        """The batch key of the mask that says which tokens of a state are real."""
        return "attention_mask"

    @property
    def call_axes(self) -> CallAxes | None:
        """The batch dimensions of the blocks' arguments; None to infer them from shapes."""
        return None

    @property
    def slotted(self) -> bool | None:
        """Whether its cache is a plain table of keys and values per token; None if untested."""
        return True

    def window(self, depth: int) -> int | None:
        """The attention window of block `depth` in tokens, including the current; None if full."""
        return None

    @property
    def kinds(self) -> frozenset[str]:
        """The kinds of blocks that the model distinguishes, each with its own masks; often none."""
        return frozenset(self._setting("config", "layer_types") or ())

    @property
    def attention(self) -> str | None:
        """The model's attention implementation, such as "sdpa"; None if unknown."""
        return self._setting("config", "_attn_implementation")

    @property
    def end_tokens(self) -> tuple[int, ...]:
        """The tokens that end a text."""
        found = self._setting("generation_config", "eos_token_id")
        found = self._setting("config", "eos_token_id") if found is None else found
        return () if found is None else (found,) if isinstance(found, int) else tuple(found)

    @property
    def pad_token(self) -> int | None:
        """The padding token; None if unknown."""
        return self._setting("config", "pad_token_id")

    @property
    def exits(self) -> Mapping[int, nn.ModuleList]:
        """Blocks between state and readout, by depth (balconies); usually none."""
        return MappingProxyType({})

    def exit_state(self, cursor: Cursor) -> Tensor:
        """The state that the readout receives: the cursor's, after its exit if it has one."""
        return cursor.h

    def account(self) -> Mapping[str, str]:
        """Lines for `print(stream)` other than the blocks, by title."""
        return {}

    # -- what every stream can do -----------------------------------------------------------------

    @property
    @final
    def depth(self) -> int:
        """L, the number of blocks."""
        return len(self.blocks)

    def __str__(self) -> str:
        return tree(self)

    @property
    @final
    def name(self) -> str:
        return type(unwrapped(self.model)).__name__

    @property
    @final
    def device(self) -> torch.device:
        """The device of the first parameter; for an offloaded model, where it computes."""
        return device_of(unwrapped(self.model))

    @property
    def outputs(self) -> int | None:
        """Numbers per prediction (classes, for a classifier); None if not yet known."""
        weight = getattr(self.head, "weight", None)
        return weight.shape[0] if isinstance(weight, Tensor) else None

    @property
    @final
    def classes(self) -> int:
        """`outputs`; raise if it is not known yet."""
        if self.outputs is None:
            raise UnsupportedModelError(
                f"the readout of {self.name} is a function, so its number of classes is known only "
                "after a prediction: call `stream.observe(batch).logits(0)` first, or give "
                "readout= as paths of modules"
            )
        return self.outputs

    @final
    def linear_head(self, purpose: str) -> nn.Linear:
        """The head, if it is linear; raise otherwise. purpose: for the error."""
        if not isinstance(self.head, nn.Linear):
            kind = type(self.head).__name__
            raise UnsupportedModelError(
                f"{purpose} needs the weight of a linear head, but the readout of {self.name} ends "
                f"in {kind.lstrip('_')}; give readout= as paths of modules that end in an nn.Linear"
            )
        return self.head

    @final
    def given(self, h: Tensor) -> Tensor:
        """A state as it is given to the model: a copy if the model would write over it."""
        return h.clone() if self.overwrites else h

    @final
    @_untraced
    @checked
    def observe(
        self,
        batch: Batch,
        *,
        check_finite: bool = False,
        logits: bool = True,
        calls: bool = False,
    ) -> States:
        """Run the model's own forward and keep every state. Exact and differentiable.

        logits: False skips the model's own head, for a large vocabulary that is read out another
        way; `output` is then None, and predictions are computed on request.
        calls: also keep how the model calls each block, as `States.calls`.
        """
        batch = self.check_batch(batch)
        self.confirm(batch)
        calls = calls or bool(self.exits)
        h: list[Tensor] = []
        ran: list[nn.Module] = []
        last: list[Tensor] = []
        seen: list[Call] = []
        written: list[int | None] = []
        ended: list[int | None] = []
        overwrites, listens = self.overwrites, listening()

        def see_input(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if not listens():
                return None
            ran.append(module)
            h.append(state_in(args, kwargs))
            written.append(version(h[-1]))
            if calls:
                seen.append(Call.of(args, kwargs))
            return with_state(args, kwargs, h[-1].clone()) if overwrites else None

        def see_output(_: nn.Module, __: Any, output: Any) -> Any:
            if not listens():
                return None
            block = self.blocks[-1]
            last[:] = [block.after(h[-1], first_tensor(output))]
            ended[:] = [version(last[0])]
            if block.outside:  # so that the model goes on from this very tensor, or is refused
                return with_first_tensor(output, Instead.of(last[0]))
            return with_first_tensor(output, last[0].clone()) if overwrites else None

        # One module may serve as several blocks. The input of a block is the previous output.
        modules = list(dict.fromkeys(block.module for block in self.blocks))
        with ExitStack() as stack:
            for module in modules:
                pre = module.register_forward_pre_hook(see_input, with_kwargs=True)
                stack.enter_context(hooked(pre))
            ends = modules if self.blocks[-1].outside else [self.blocks[-1].module]
            stack.enter_context(hooked(*(m.register_forward_hook(see_output) for m in ends)))
            if not logits:
                # No exception: a checkpointed or sharded module must finish its call.
                stack.enter_context(replaced_forward(self.head, _no_logits))
            output = self.called(batch, None)
        self._check_observed(len(h) if last else min(len(h), self.depth - 1))
        self._check_order(ran)
        self._check_kept([*h, *last], [*written, *ended])
        h.extend(self.after_block(given, self.depth) for given in last)
        states = States(self, tuple(h), batch, output if logits else None, tuple(seen))
        return states.check_finite() if check_finite else states

    @final
    def called(self, batch: Mapping[str, Any], cache: Any = None) -> Any:
        """The model's own output; its errors become errors about the batch."""
        arguments = self.arguments(batch, cache)
        if torch.compiler.is_compiling():
            return self.call(arguments)
        refusing = [module.register_forward_pre_hook(self._refuse) for module in self.idle]
        try:
            with hooked(*refusing), without_packing(self._encoders):
                return self.call(arguments)
        except (EveryDepthError, torch.OutOfMemoryError):
            raise
        except (IndexError, RuntimeError, ValueError) as error:
            given = ", ".join(
                f"{name} {tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}"
                for name, value in arguments.items()
                if isinstance(value, Tensor)
            )
            raise BatchError(
                f"{self.name} cannot run on this batch ({given}): {error}; check sizes, channels, "
                "length and token ids, or call model(**batch) to see where it fails"
            ) from error

    @final
    def start(self, batch: Batch, *, cache: Any = None, to: int | None = None) -> Cursor:
        """Embed a batch and record how the model calls each block, without running any.

        The model's own forward runs with its blocks passing the state through, and stops at the
        last one, so that masks, positions and rotary tables are the model's own.

        to: record only the calls that depths up to this one need, which is faster; the cursor
            cannot go further.
        """
        batch = self.check_batch(batch)
        self.confirm(batch)
        known = self.depth if to is None else self.reach(self.check_depth(to, lowest=1))
        calls: list[Call] = []
        ran: list[nn.Module] = []
        embedded: list[Tensor] = []
        # An exporter cannot trace an exception: there the blocks run, and are removed as dead code.
        exporting = torch.compiler.is_compiling()

        def noting(module: nn.Module) -> Callable[..., Any]:
            forward = module.forward

            def note(*args: Any, **kwargs: Any) -> Any:
                h = state_in(args, kwargs)
                ran.append(module)
                calls.append(Call.of(args, kwargs))
                embedded.append(self.given(h))
                if exporting:
                    return forward(*args, **kwargs)
                if len(calls) == known and not (self.idle and known == self.depth):
                    raise _Started  # if more blocks may follow, only the whole forward can tell
                given = {**dict(enumerate(args)), **kwargs}
                return self.silent(h, len(calls), lambda: forward(*args, **kwargs), given)

            return note

        with ExitStack() as stack:
            for block in {id(block.module): block for block in self.blocks[:known]}.values():
                stack.enter_context(replaced_forward(block.module, noting(block.module)))
            with suppress(_Started):
                self.called(batch, cache)
        if len(calls) == known:
            self._check_order(ran)
            axes = (self.row_axis, self.call_axes, self.rows(batch))
            return Cursor(0, embedded[0], batch, tuple(calls), cache, self.heads, *axes)
        raise UnsupportedModelError(
            f"{self.name} called {len(calls)} of its {self.depth} blocks, but each must run once "
            "per forward (is layer drop on? call `model.eval()` first)"
        )

    @final
    def compile_blocks(self, **options: Any) -> None:
        """`torch.compile` each block's forward in place, permanently; observe and drive still work.

        Compiling the whole model would hide the states; `observe` then runs it uncompiled.
        """
        for block in self.blocks:
            block.module.forward = torch.compile(block.module.forward, **options)

    @final
    def step(self, cursor: Cursor) -> Cursor:
        """Run the next block."""
        if cursor.depth >= len(cursor.calls):
            last = "the last" if cursor.depth == self.depth else "the last it was started for"
            raise DepthError(
                f"the cursor is at depth {cursor.depth}, {last} of {self.name}; "
                "read it out, or start again"
            )
        depth = cursor.depth + 1
        block = self.blocks[cursor.depth]
        if cursor.cache is None:
            cursor = replace(cursor, calls=apart(cursor.calls, cursor.depth))
        before = version(cursor.h)
        output = cursor.calls[cursor.depth](block.module, self.given(cursor.h))
        self._check_kept([cursor.h], [before], cursor.depth)
        h = self.between(block.after(cursor.h, first_tensor(output)), depth, cursor.batch)
        carried = self.carried(depth) if depth < len(cursor.calls) else {}
        if not carried:
            return replace(cursor, depth=depth, h=h)
        parts = parts_of(output)
        then = cursor.calls[depth].given({key: parts[place] for key, place in carried.items()})
        calls = (*cursor.calls[:depth], then, *cursor.calls[depth + 1 :])
        return replace(cursor, depth=depth, h=h, calls=calls)

    @final
    def advance(self, cursor: Cursor, to: int | None = None) -> Cursor:
        """Run blocks up to depth `to` (by default the last)."""
        goal = self.depth if to is None else self.check_depth(to)
        if goal < cursor.depth:
            raise DepthError(
                f"the cursor is at depth {cursor.depth} and cannot go back to {goal}; "
                f"keep the earlier cursor, or use {cursor.depth} to {self.depth}"
            )
        while cursor.depth < goal:
            cursor = self.step(cursor)
        return cursor

    @final
    def logits(self, cursor: Cursor) -> Tensor:
        """The prediction at a cursor."""
        return self.readout(self.exit_state(cursor), cursor.depth, cursor.batch)

    # -- checks before any work -------------------------------------------------------------------

    @final
    def check_depth(self, depth: int, *, lowest: int = 0) -> int:
        """`depth` as an int; raise if it is not in `lowest`..L."""
        try:
            whole = index(depth)  # accepts NumPy and torch integers, too
        except TypeError:
            whole = None
        if whole is None or isinstance(depth, bool):
            raise DepthError(f"depth {depth!r} is not a whole number; use {lowest} to {self.depth}")
        depth = whole
        if not lowest <= depth <= self.depth:
            raise DepthError(
                f"depth {depth}, but {self.name} has {self.depth} blocks; "
                f"use {lowest} to {self.depth}"
            )
        return depth

    @final
    def check_batch(self, batch: Batch) -> Mapping[str, Any]:
        """The batch as a mapping; raise if it is empty or lacks what the model needs."""
        return self.completed(check_given(self, batch))

    @final
    def check_vocabulary(self, low: int, high: int, size: int) -> None:
        """Raise if the lowest or highest token is not in a vocabulary of this size."""
        if low < 0 or high >= size:
            raise BatchError(
                f"token {low if low < 0 else high}, but the vocabulary of {self.name} has {size}; "
                f"use 0 to {size - 1} (is this the tokenizer of another model?)"
            )

    @final
    def check_loaded(self) -> None:
        """Raise if the weights have shapes but no values."""
        absent = without_values(unwrapped(self.model))
        if absent is not None:
            of = "" if self.device.type == "meta" else f"{absent} of "
            raise UnsupportedModelError(
                f"{of}{self.name} is on the 'meta' device, where weights have no values; load them "
                "first (from_pretrained, everydepth.load)"
            )

    @final
    def first_input(self, batch: Mapping[str, Any]) -> Tensor:
        """The model's first input in a batch: its tokens, images or features."""
        return next(batch[key] for key in self.inputs if batch.get(key) is not None)

    @final
    def rows(self, batch: Mapping[str, Any]) -> int:
        """The number of rows of a batch."""
        return self.first_input(batch).shape[0]

    @cached_property
    def _norms(self) -> tuple[nn.Module, ...]:
        """Only the model's own pass updates their running statistics."""
        return tracking(unwrapped(self.model))

    @cached_property
    def _encoders(self) -> tuple[nn.TransformerEncoder, ...]:
        return packing(unwrapped(self.model))

    def _setting(self, holder: str, name: str) -> Any:
        return getattr(getattr(unwrapped(self.model), holder, None), name, None)

    def _block_list(self, need: str) -> BlockList:
        """The module list that holds the blocks and nothing else. need: for the error."""
        wanted = [block.module for block in self.blocks]
        for module in unwrapped(self.model).modules():
            if isinstance(module, BlockList) and list(module) == wanted:
                return module
        raise UnsupportedModelError(
            f"the {self.depth} blocks of {self.name} are not in one module list, so they cannot be "
            f"changed; give {type(self).__name__} a `{need}` (docs/add-an-architecture.md)"
        )

    def _check_order(self, ran: Sequence[nn.Module]) -> None:
        """Raise if the blocks, as many as there are, did not run one after the other."""
        modules = [block.module for block in self.blocks]
        for number, (module, wanted) in enumerate(zip(ran, modules, strict=False), start=1):
            if module is not wanted:
                raise UnsupportedModelError(
                    f"{self.name} called block {modules.index(module) + 1} in place of block "
                    f"{number}: which blocks run, and in which order, depends on the batch or the "
                    "mode, so they are no stream; switch that off, or call `model.eval()`"
                )

    def _check_observed(self, ran: int) -> None:
        if ran != self.depth:
            raise UnsupportedModelError(
                f"{self.name} ran {ran} of its {self.depth} blocks, but each must run once per "
                "forward (is layer drop on? set it to 0, or call `model.eval()`; does it stop "
                "early? switch that off; is it compiled inside a wrapper? use "
                "`as_stream(model).compile_blocks()` instead)"
            )

    def _check_kept(
        self, states: Sequence[Tensor], before: Sequence[int | None], depth: int = 0
    ) -> None:
        """Notice a state that the model wrote over. before: their versions. depth: of the first."""
        if self.overwrites:  # it was given copies
            return
        for number, (h, then) in enumerate(zip(states, before, strict=True), start=depth):
            if version(h) != then:
                self.overwritten(number)

    def _refuse(self, *_: Any) -> None:
        raise UnsupportedModelError(
            f"{self.name} ran a block that did not run on the batch its {self.depth} blocks were "
            "discovered with, so how many run depends on the data; switch early stopping off, and "
            "make a new stream"
        )


def _no_logits(x: Tensor) -> Tensor:
    """Replaces a head: logits with no classes."""
    return x[..., :0]


def sample_task(model: nn.Module) -> Task:
    """Classification, or as in Hugging Face regression if the head has one output."""
    config = getattr(unwrapped(model), "config", None)
    numbers = getattr(config, "problem_type", None) == "regression"
    one = getattr(config, "num_labels", None) == 1
    return "regression" if numbers or one else "classification"


StreamFactory = Callable[..., ResidualStream]
