"""The contract: a network is `h_0 -> h_1 -> ... -> h_L` with one shared readout."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from operator import index
from types import MappingProxyType
from typing import Any, Literal, TypeVar, cast, final

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from everydepth.errors import (
    BatchError,
    DepthError,
    EveryDepthError,
    LabelError,
    UnsupportedModelError,
)
from everydepth.stream.block import Block
from everydepth.stream.cursor import Call, CallAxes, Cursor
from everydepth.stream.edit import BlockList, edited, lengthened, shortened
from everydepth.stream.states import States
from everydepth.stream.taps import (
    first_tensor,
    hooked,
    in_silence,
    parts_of,
    replaced_forward,
    state_in,
    with_first_tensor,
)
from everydepth.stream.tree import tree
from everydepth.stream.wrapping import device_of, unwrapped

Task = Literal["classification", "regression", "causal_lm", "masked_lm", "detection", "embedding"]
"""What the readout predicts: a class per sample, numbers per sample, the next token at every
token, the masked token at every token, a class and a box per query, or a vector per sample."""

IGNORE_INDEX = -100

BESIDE_INPUTS = ("labels", "loss_weights", "num_items_in_batch")
"""Keys of a batch that say what is asked, and never reach the model."""

Batch = Mapping[str, Any] | Tensor


Method = TypeVar("Method", bound=Callable[..., Any])


def _untraced(method: Method) -> Method:
    """Keep `torch.compile` out: compiled code would keep the hooks of its first call."""
    return cast(Method, torch.compiler.disable(method))


class _Started(Exception):
    """Leaves the model's forward once every block's call is known; never seen outside `start`."""


class ResidualStream(ABC):
    """One model seen as a stream of states. Architectures implement the abstract members.

    model: what is called; hooks go to its blocks, even when it is wrapped (DDP, FSDP).
    inputs: batch keys of which the model needs at least one.
    options: what `as_stream` was told beside the model, to see another model the same way.
    tokenizer: turns text into tokens, where data is text; None if none was given.

    >>> stream = ed.as_stream(model)
    >>> stream.depth, stream.task, stream.classes
    (3, 'classification', 10)
    >>> stream.observe(test.batch(range(4))).logits(1).shape  # what the first block predicts
    torch.Size([4, 10])
    """

    model: nn.Module
    inputs: tuple[str, ...]
    task: Task
    options: Mapping[str, Any] = MappingProxyType({})
    tokenizer: Any = None

    # -- what an architecture says ----------------------------------------------------------------

    @property
    @abstractmethod
    def blocks(self) -> Sequence[Block]:
        """The blocks, in order; block `l` (from 1) makes `h_l` of `h_{l-1}`."""

    @property
    @abstractmethod
    def head(self) -> nn.Module:
        """The last linear map of the readout."""

    @abstractmethod
    def feature(
        self, h: Float[Tensor, "batch ..."], depth: int, batch: Mapping[str, Any]
    ) -> Float[Tensor, "batch ..."]:
        """The part of the state that predicts: class token, last real token, pooled, every token.

        Where stages change the shape, it is brought to the coordinates of the last depth.
        """

    @abstractmethod
    def normed(self, feature: Float[Tensor, "batch ..."], depth: int) -> Float[Tensor, "batch ..."]:
        """What the head's linear map receives: a feature after the final norm or pooler."""

    def readout(
        self, h: Float[Tensor, "batch ..."], depth: int, batch: Mapping[str, Any]
    ) -> Float[Tensor, "batch ..."]:
        """`z_l = R(h_l)`: the model's own readout, applied to a state of any depth.

        Overridden only where the model works in another order and the last bits depend on it.
        """
        return self.head(self.normed(self.feature(h, self.check_depth(depth), batch), depth))

    def truncated(self, depth: int, *, share: bool) -> nn.Module:
        """A plain model of the same class with `depth` blocks."""
        return shortened(unwrapped(self.model), self._block_list("truncated"), depth, share=share)

    def kept(self, numbers: Sequence[int], *, share: bool) -> nn.Module:
        """A plain model of the same class with these blocks, from 1, in their order."""
        order = [number - 1 for number in numbers]
        return edited(unwrapped(self.model), self._block_list("kept"), order, share=share)

    def inserted(self, after: int, block: nn.Module, like: int, *, share: bool) -> nn.Module:
        """A plain model of the same class with the new `block` behind depth `after`.

        like: the block (from 1) whose kind it has, and in whose stage it goes.
        """
        blocks = self._block_list("inserted")
        return lengthened(unwrapped(self.model), blocks, after, block, like, share=share)

    def leads(self, depth: int) -> Sequence[int]:
        """The blocks after a depth that change the shape, if a model may go on with them alone."""
        return ()

    def ended(
        self, depth: int, blocks: Sequence[nn.Module], likes: Sequence[int], *, share: bool
    ) -> nn.Module:
        """A plain model of the first `depth` blocks and new ones, which end it; see `leads`.

        likes: the block (from 1) in whose stage each of the new ones goes.
        """
        raise UnsupportedModelError(f"{self.name} cannot be ended by other blocks after {depth}")

    def block_like(self, number: int) -> nn.Module | None:
        """A new block of the shape that block `number` gives, where that one changes the shape."""
        return None

    def arguments(self, batch: Mapping[str, Any], cache: Any) -> dict[str, Any]:
        """The keyword arguments with which the model is called, without `BESIDE_INPUTS`."""
        if cache is not None:
            raise UnsupportedModelError(f"{self.name} has no key/value cache; call without `cache`")
        return {key: value for key, value in batch.items() if key not in BESIDE_INPUTS}

    def call(self, arguments: Mapping[str, Any]) -> Any:
        """The untouched model's own output."""
        return self.model(**arguments)

    def prediction(self, output: Any) -> Tensor:
        """The logits (or numbers) inside the model's own output."""
        return output if isinstance(output, Tensor) else output.logits

    def after_block(self, h: Tensor, depth: int) -> Tensor:
        """What the model does to a state between two blocks; the identity for almost all."""
        return h

    def between(self, h: Tensor, depth: int, batch: Mapping[str, Any]) -> Tensor:
        """What block `depth` gave, as the next one receives it; some need the batch for that."""
        return self.after_block(h, depth)

    def silent(
        self, h: Tensor, number: int, run: Callable[[], Any], given: Mapping[str | int, Any]
    ) -> Any:
        """What block `number` gives for `h` if its branches are silent, in the form of its output.

        run: calls the block, for what else it may give beside the state.
        given: the arguments of that call, by position or keyword.
        """
        block = self.blocks[number - 1]
        output = None if block.plain else run()
        return h if output is None else with_first_tensor(output, h)

    def carried(self, number: int) -> Mapping[str | int, int]:
        """Arguments of the next block, beside its state, that block `number` gives: which part.

        A second state beside the first, or a bias that the first block makes for all.
        """
        del number
        return {}

    def confirm(self, batch: Mapping[str, Any]) -> None:
        """Called with every batch before it is used, for what only a batch can tell."""
        del batch

    def trial(self) -> Mapping[str, Any] | None:
        """A small batch to try a changed model on; None where none is known."""
        return None

    def extras(
        self, h: Float[Tensor, "batch ..."], depth: int, batch: Mapping[str, Any]
    ) -> dict[str, Tensor]:
        """Predictions beside the logits, by the name the model's own output gives them."""
        return {}

    def new_cache(self) -> Any:
        """An empty key/value cache for `start(..., cache=)`."""
        raise UnsupportedModelError(
            f"{self.name} has no key/value cache; only causal language models have one"
        )

    @property
    def positions(self) -> int | None:
        """The longest sequence whose tokens the model can place; None where there is no limit."""
        return None

    @property
    def heads(self) -> int | None:
        """How many attention heads fold into the rows of a mask; None where none do."""
        return None

    @property
    def row_axis(self) -> int:
        """The dimension of a state that counts the rows of the batch."""
        return 0

    @property
    def call_axes(self) -> CallAxes | None:
        """Where the rows are in what blocks are called with; None: to be told by shapes."""
        return None

    @property
    def slotted(self) -> bool | None:
        """Whether its cache is keys and values by token, to be written anywhere; None: try it."""
        return True

    def window(self, depth: int) -> int | None:
        """How many tokens block `depth` sees, the token itself included; None: all before it."""
        return None

    @property
    def attention(self) -> str | None:
        """Which implementation of attention the model runs with; None where it does not say."""
        return self._setting("config", "_attn_implementation")

    @property
    def end_tokens(self) -> tuple[int, ...]:
        """The tokens that end a text."""
        found = self._setting("generation_config", "eos_token_id")
        found = self._setting("config", "eos_token_id") if found is None else found
        return () if found is None else (found,) if isinstance(found, int) else tuple(found)

    @property
    def pad_token(self) -> int | None:
        """The token that fills a row up."""
        return self._setting("config", "pad_token_id")

    @property
    def exits(self) -> Mapping[int, nn.ModuleList]:
        """What stands between state and readout, by depth: balconies; for almost all, nothing."""
        return MappingProxyType({})

    def exit_state(self, cursor: Cursor) -> Tensor:
        """What the readout gets of a cursor: the state, or what `exits` makes of it."""
        return cursor.h

    def account(self) -> Mapping[str, str]:
        """What is worth saying of the stream beside its blocks, for `print(stream)`."""
        return {}

    # -- what every stream can do -----------------------------------------------------------------

    @final
    @property
    def depth(self) -> int:
        """L, the number of blocks."""
        return len(self.blocks)

    def __str__(self) -> str:
        return tree(self)

    @final
    @property
    def name(self) -> str:
        return type(unwrapped(self.model)).__name__

    @final
    @property
    def device(self) -> torch.device:
        """Where the first parameter is; of an offloaded model, where it computes."""
        return device_of(unwrapped(self.model))

    @property
    def outputs(self) -> int | None:
        """How many numbers the readout gives per prediction; None while that is not known."""
        weight = getattr(self.head, "weight", None)
        return weight.shape[0] if isinstance(weight, Tensor) else None

    @final
    @property
    def classes(self) -> int:
        """How many numbers the readout gives per prediction."""
        if self.outputs is None:
            raise UnsupportedModelError(
                f"the readout of {self.name} is a function without a weight, so how many classes "
                "it gives is known once it has predicted a batch: call "
                "`stream.observe(batch).logits(0)` first, or give readout= as paths of modules"
            )
        return self.outputs

    @final
    def linear_head(self, purpose: str) -> nn.Linear:
        """The head, for what works on its weights."""
        if not isinstance(self.head, nn.Linear):
            kind = type(self.head).__name__
            raise UnsupportedModelError(
                f"{purpose} works on the weight of a linear head, but the readout of {self.name} "
                f"ends in {kind.lstrip('_')}; give readout= as paths of modules that end in an "
                "nn.Linear"
            )
        return self.head

    @final
    @_untraced
    def observe(
        self,
        batch: Batch,
        *,
        check_finite: bool = False,
        logits: bool = True,
        calls: bool = False,
    ) -> States:
        """Run the model's own forward and keep every state. Exact, and differentiable.

        logits: False passes over the model's own head, for a large vocabulary that is read in
        another way; `output` is then None, and a prediction is computed where it is asked for.
        calls: keep how the model calls each block, too, as `States.calls`.
        """
        batch = self.check_batch(batch)
        self.confirm(batch)
        calls = calls or bool(self.exits)
        h: list[Tensor] = []
        last: list[Tensor] = []
        seen: list[Call] = []

        def see_input(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if in_silence():
                return
            h.append(state_in(args, kwargs))
            if calls:
                seen.append(Call.of(args, kwargs))

        def see_output(_: nn.Module, __: Any, output: Any) -> None:
            if not in_silence():
                last[:] = [first_tensor(output)]

        # One module may be several blocks. What a block gives is what the next receives.
        modules = list(dict.fromkeys(block.module for block in self.blocks))
        with ExitStack() as stack:
            for module in modules:
                pre = module.register_forward_pre_hook(see_input, with_kwargs=True)
                stack.enter_context(hooked(pre))
            final = self.blocks[-1].module.register_forward_hook(see_output)
            stack.enter_context(hooked(final))
            if not logits:
                # Not left by an exception: a checkpointed or sharded module must finish its call.
                stack.enter_context(replaced_forward(self.head, _no_logits))
            output = self.called(batch, None)
        h.extend(self.after_block(given, self.depth) for given in last)
        self._check_observed(h)
        states = States(self, tuple(h), batch, output if logits else None, tuple(seen))
        return states.check_finite() if check_finite else states

    @final
    def called(self, batch: Mapping[str, Any], cache: Any = None) -> Any:
        """The model's own output; what it refuses is an error about the batch."""
        arguments = self.arguments(batch, cache)
        if torch.compiler.is_compiling():
            return self.call(arguments)
        try:
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
                "length and token numbers, or call model(**batch) to see where"
            ) from error

    @final
    def start(self, batch: Batch, *, cache: Any = None, to: int | None = None) -> Cursor:
        """Embed a batch and learn how the model calls each block, without running any.

        The model's own forward runs with its blocks passing the state through, and is left at the
        last one: masks, positions and rotary tables are the model's own, for each block.

        to: learn only the calls of blocks 1..to, beyond which the cursor cannot go; sooner done.
        """
        batch = self.check_batch(batch)
        self.confirm(batch)
        known = self.depth if to is None else self.check_depth(to, lowest=1)
        calls: list[Call] = []
        embedded: list[Tensor] = []
        # An exporter cannot be left by an exception: there the blocks run, as code it finds dead.
        exporting = torch.compiler.is_compiling()

        def noting(forward: Callable[..., Any]) -> Callable[..., Any]:
            def note(*args: Any, **kwargs: Any) -> Any:
                h = state_in(args, kwargs)
                calls.append(Call.of(args, kwargs))
                embedded.append(h)
                if exporting:
                    return forward(*args, **kwargs)
                if len(calls) == known:
                    raise _Started
                given = {**dict(enumerate(args)), **kwargs}
                return self.silent(h, len(calls), lambda: forward(*args, **kwargs), given)

            return note

        with ExitStack() as stack:
            for block in {id(block.module): block for block in self.blocks[:known]}.values():
                note = noting(block.module.forward)
                stack.enter_context(replaced_forward(block.module, note))
            with suppress(_Started):
                self.called(batch, cache)
        if len(calls) == known:
            axes = (self.row_axis, self.call_axes)
            return Cursor(0, embedded[0], batch, tuple(calls), cache, self.heads, *axes)
        raise UnsupportedModelError(
            f"{self.name} called {len(calls)} of its {self.depth} blocks; "
            "each block must run once per forward (is layer drop on? call `model.eval()` first)"
        )

    @final
    def compile_blocks(self, **options: Any) -> None:
        """`torch.compile` each block's forward in place, for good: observe and drive keep working.

        Compiling the whole model hides the states: `observe` then runs the model as it was before.
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
        output = cursor.calls[cursor.depth](block.module, cursor.h)
        h = self.between(first_tensor(output), depth, cursor.batch)
        carried = self.carried(depth) if depth < len(cursor.calls) else {}
        if not carried:
            return replace(cursor, depth=depth, h=h)
        parts = parts_of(output)
        then = cursor.calls[depth].given({key: parts[place] for key, place in carried.items()})
        calls = (*cursor.calls[:depth], then, *cursor.calls[depth + 1 :])
        return replace(cursor, depth=depth, h=h, calls=calls)

    @final
    def advance(self, cursor: Cursor, to: int | None = None) -> Cursor:
        """Run blocks until depth `to` (the last, if not given)."""
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

    # -- clear errors before any work -------------------------------------------------------------

    @final
    def check_depth(self, depth: int, *, lowest: int = 0) -> int:
        """`depth`, if it lies in `lowest`..L."""
        try:
            whole = index(depth)  # also the numbers of NumPy and torch
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
        """The batch as a mapping, if it has what the model needs and is not empty."""
        if isinstance(batch, Tensor):
            batch = {self.inputs[0]: batch}
        key = next((k for k in self.inputs if batch.get(k) is not None), None)
        if key is None:
            raise BatchError(
                f"the batch has keys {sorted(batch)}, but {self.name} needs "
                f"{' or '.join(repr(k) for k in self.inputs)}; "
                f"pass a mapping with that key, or the tensor alone"
            )
        if not isinstance(batch[key], Tensor):
            raise BatchError(
                f"{key} is {type(batch[key]).__name__}; pass a tensor: torch.as_tensor({key})"
            )
        if batch[key].ndim == 0 or batch[key].numel() == 0:
            raise BatchError(
                f"the batch is empty: {key!r} has shape {tuple(batch[key].shape)}; "
                "pass at least one row"
            )
        if key == "input_ids":
            self._check_tokens(batch[key])
            self._check_mask(batch[key], batch.get("attention_mask"))
        labels, rows = batch.get("labels"), batch[key].shape[0]
        if labels is None and "label" in batch:
            raise LabelError(
                f"the batch has keys {sorted(batch)}: rename 'label' to 'labels', or leave it out"
            )
        if isinstance(labels, Tensor) and labels.shape[:1] != (rows,):
            raise LabelError(
                f"labels have shape {tuple(labels.shape)}, but the batch has {rows} rows; give one "
                "label a row"
            )
        return batch

    def _check_tokens(self, ids: Tensor) -> None:
        """An error of ours if a token is not in the embedding; elsewhere a look waits for it."""
        if torch.compiler.is_compiling():  # a traced token has no number
            return
        find = getattr(unwrapped(self.model), "get_input_embeddings", None)
        with suppress(NotImplementedError):
            embedding = None if find is None else find()
            if not isinstance(embedding, nn.Embedding) or ids.device.type != "cpu":
                return
            if ids.is_floating_point() or ids.is_complex():
                raise BatchError(
                    f"tokens are {str(ids.dtype).removeprefix('torch.')} numbers; pass whole "
                    "numbers: input_ids.long()"
                )
            low, high = int(ids.min()), int(ids.max())
            if low < 0 or high >= embedding.num_embeddings:
                raise BatchError(
                    f"token {low if low < 0 else high}, but {self.name} knows "
                    f"{embedding.num_embeddings}; use 0 to {embedding.num_embeddings - 1} (is this "
                    "the tokenizer of another model?)"
                )

    @staticmethod
    def _check_mask(ids: Tensor, mask: Any) -> None:
        """Transformers stretches or drops a mask of another length; with a cache, one is longer."""
        if isinstance(mask, Tensor) and ids.ndim == mask.ndim == 2:
            (rows, tokens), (given, seen) = ids.shape, mask.shape
            if given != rows or seen < tokens:
                raise BatchError(
                    f"attention_mask has shape {tuple(mask.shape)}, input_ids {tuple(ids.shape)}; "
                    "give one number a token"
                )

    @final
    def check_loaded(self) -> None:
        """An error if the weights are only known by their shapes."""
        if self.device.type == "meta":
            raise UnsupportedModelError(
                f"{self.name} is on the device 'meta', where weights have no values; load them "
                "first (from_pretrained, everydepth.load)"
            )

    @final
    def rows(self, batch: Mapping[str, Any]) -> int:
        """The number of rows of a batch."""
        return batch[next(k for k in self.inputs if batch.get(k) is not None)].shape[0]

    @final
    def check_labels(self, labels: Int[Tensor, "..."]) -> None:
        """An error if a class label does not fit the head. Waits for the device once."""
        if self.task in ("regression", "embedding", "detection") or labels.is_floating_point():
            return
        real = labels[labels != IGNORE_INDEX]
        if real.numel() == 0:
            raise LabelError(
                f"all {labels.numel()} labels are {IGNORE_INDEX} (ignored); "
                "pass at least one label to learn from"
            )
        low, high = int(real.min()), int(real.max())
        if low < 0 or (self.outputs is not None and high >= self.outputs):
            wrong, last = low if low < 0 else high, "the last class"
            if self.outputs is not None:
                last = str(self.outputs - 1)
            words = self.task in ("causal_lm", "masked_lm")
            raise LabelError(
                f"label {wrong}, but the head of {self.name} has {self.outputs} classes; use 0 to "
                f"{last}, or {IGNORE_INDEX} to ignore a position"
                f"{' (is this the tokenizer of another model?)' if words else ''}"
            )

    def _setting(self, holder: str, name: str) -> Any:
        return getattr(getattr(unwrapped(self.model), holder, None), name, None)

    def _block_list(self, need: str) -> BlockList:
        """The module list of the model that holds the blocks and nothing else."""
        wanted = [block.module for block in self.blocks]
        for module in unwrapped(self.model).modules():
            if isinstance(module, BlockList) and list(module) == wanted:
                return module
        raise UnsupportedModelError(
            f"the {self.depth} blocks of {self.name} are not one module list, so they cannot be "
            f"changed; give {type(self).__name__} a `{need}` (docs/add-an-architecture.md)"
        )

    def _check_observed(self, h: list[Tensor]) -> None:
        if len(h) != self.depth + 1:
            raise UnsupportedModelError(
                f"{self.name} ran {max(len(h) - 1, 0)} of its {self.depth} blocks; each must run "
                "once per forward (is layer drop on? set it to 0, or call `model.eval()`; is it "
                "compiled inside a wrapper? use `as_stream(model).compile_blocks()` instead)"
            )


def _no_logits(x: Tensor) -> Tensor:
    """In the place of a head: logits of no classes."""
    return x[..., :0]


def sample_task(model: nn.Module) -> Task:
    """One class per sample; of a head with one output a number, as Hugging Face has it."""
    config = getattr(unwrapped(model), "config", None)
    numbers = getattr(config, "problem_type", None) == "regression"
    one = getattr(config, "num_labels", None) == 1
    return "regression" if numbers or one else "classification"


StreamFactory = Callable[..., ResidualStream]
