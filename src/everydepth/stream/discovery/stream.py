"""A stream discovered from a running model. No model class is named here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any, final

import torch
from torch import Tensor, nn

from everydepth.config import checked
from everydepth.errors import BatchError, SettingError, UnsupportedModelError
from everydepth.stream.block import Block
from everydepth.stream.contract import BESIDE_INPUTS, IGNORE_INDEX, ResidualStream, Task
from everydepth.stream.cursor import CallAxes, Cursor
from everydepth.stream.discovery.example import ROWS, examples, parameters_of
from everydepth.stream.discovery.finding import Finding, doubled
from everydepth.stream.discovery.lists import (
    in_lists_of_lists,
    lengthened,
    listed,
    shortened,
)
from everydepth.stream.discovery.memory import recall, remember
from everydepth.stream.discovery.recording import recording
from everydepth.stream.discovery.structure import (
    FAILURES,
    Structure,
    can_cache,
    close,
    path_of,
    prediction_in,
    text_config,
)
from everydepth.stream.edit import BlockList
from everydepth.stream.modes import as_written, evaluating, without_packing, without_tracking
from everydepth.stream.rows import row_axes, select_rows
from everydepth.stream.taps import replaced_forward, silence
from everydepth.stream.wrapping import unwrapped

# Inputs with which a model computes the same things, of tokens at other places.
_PLACES = ("position_ids", "cache_position")
Names = frozenset[str]


@final
class DiscoveredStream(ResidualStream):
    """The residual stream of any model, discovered on its first batch or a made-up one.

    A model may compute something else with an optional input, such as the mean of the real tokens
    with a mask, so it is discovered again on the first batch with an input that was not there yet.

    stream: which of several chains to follow, as part of its path.
    output: which of several outputs is the prediction, by its name or number.
    example: a batch to run now; by default one is made up from the model's config.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        stream: str | None = None,
        output: str | int | None = None,
        example: Mapping[str, Any] | Tensor | None = None,
    ) -> None:
        self.model = model
        self._inner = unwrapped(model)
        self._names, self._more = parameters_of(self._inner)
        self._stream, self._asked = stream, output
        self._found: Structure | None = None
        # By the names of a batch's inputs.
        self._facts: dict[Names, Structure] = {}
        self._axes: dict[Names, Sequence[Any]] = {}
        main = getattr(self._inner, "main_input_name", None)
        first = main if main in self._names else (self._names[0] if self._names else "input")
        text = ("input_ids", "inputs_embeds") if first == "input_ids" else ()
        # If there is a decoder, its tokens predict.
        decoded = ("decoder_input_ids",) if "decoder_input_ids" in self._names else ()
        self.inputs = tuple(dict.fromkeys((*decoded, first, *text)))
        if not hasattr(self._inner, "config"):
            self.inputs = tuple(dict.fromkeys((first, "pixel_values", "inputs", "input", "x")))
        if example is not None:
            self.confirm(self.check_batch(example))

    # -- discovery --------------------------------------------------------------------------------

    @property
    def structure(self) -> Structure:
        if self._found is None and not self._recalled():
            self._keep(self._from_example())
        assert self._found is not None
        return self._found

    def _recalled(self) -> bool:
        """Restore an earlier discovery of this model; whether there was one that still holds."""
        known = recall(self._inner, self._question)
        if known is not None:
            self._facts, self._more = known
            self._found = next(iter(self._facts.values()))
        return known is not None

    def _keep(self, found: Structure, names: Names | None = None) -> None:
        """names: of the inputs it holds for, by default those of the batch it was found on."""
        self._found = found
        if found.batch:  # there is none if the model has no weights yet
            self._facts[self._given_names(found.batch) if names is None else names] = found
            remember(self._inner, self._question, (self._facts, self._more))

    @property
    def _question(self) -> tuple[Any, ...]:
        return self.model, self._stream, self._asked

    def confirm(self, batch: Mapping[str, Any]) -> None:
        if self._chosen(batch):
            return
        # Recording keeps every value, so use a few rows of a large batch.
        rows = self.rows(batch)
        few = batch if rows <= ROWS else select_rows(batch, torch.arange(ROWS), rows)
        try:
            self._keep(self._look(few))
        except BatchError:
            if self._found is None:
                raise
            # It only runs with a cache that is not part of the batch, or not at all.
            self._keep(self._found, self._given_names(batch))

    def _chosen(self, batch: Mapping[str, Any]) -> bool:
        """Choose what was found with the inputs of this batch; whether there is such."""
        if self._found is None and not self._recalled():
            return False
        assert self._found is not None
        if torch.compiler.is_compiling():  # chosen before, by what is not traced
            return True
        names = self._given_names(batch)
        fitting = [known for known in self._facts if names <= known]
        if fitting:
            self._found = self._facts[min(fitting, key=len)]
        return bool(fitting) or not self._found.batch

    def _given_names(self, batch: Mapping[str, Any]) -> Names:
        """The names of a batch's inputs that may change what the model computes."""
        return frozenset(
            key
            for key, value in batch.items()
            if value is not None
            and (key in self._names or self._more)
            and key not in (*BESIDE_INPUTS, *_PLACES)
        )

    def trial(self) -> Mapping[str, Any]:
        weights = (p.dtype for p in self._inner.parameters() if p.is_floating_point())
        dtype = next(weights, torch.float32)
        return {
            key: value.to(self.device, dtype if value.is_floating_point() else None)
            if isinstance(value, Tensor)
            else value
            for key, value in self.structure.batch.items()
        }

    def _from_example(self) -> Structure:
        errors: list[BaseException | None] = []
        for batch in examples(self._inner):
            try:
                return self._look(batch)
            except BatchError as error:
                errors.append(error.__cause__)
        self.check_loaded()
        likeliest = errors[0] if errors else None
        reason = f" ({likeliest})" if likeliest else ""
        raise UnsupportedModelError(
            f"{type(self._inner).__name__} does not run on a made-up batch{reason}; if it runs on "
            "yours, pass one: as_stream(model, example=batch)"
        ) from likeliest

    def _try(self, batch: Mapping[str, Any]) -> Any:
        """Call the model; if it rejects `use_cache`, stop passing it."""
        try:
            return self._output(batch)
        except TypeError:
            if not self._can_cache or "use_cache" in self._names:
                raise
            self._more = False
            return self._output(batch)

    @torch.no_grad()
    def _look(self, batch: Mapping[str, Any]) -> Structure:
        with evaluating(self._inner), silence(), as_written(self._inner):
            return self._seen(batch)

    def _seen(self, batch: Mapping[str, Any]) -> Structure:
        pieces = getattr(getattr(self._inner, "config", None), "chunk_size_feed_forward", 0)
        if pieces:
            raise UnsupportedModelError(
                f"chunk_size_feed_forward is {pieces}, which splits one residual connection into "
                "pieces; load the model with chunk_size_feed_forward=0"
            )
        with recording(self._inner) as record:
            try:
                record.output = self._try(batch)
            except FAILURES as error:
                config = getattr(self._inner, "config", None)
                if isinstance(error, AttributeError) and not getattr(config, "return_dict", True):
                    raise UnsupportedModelError(
                        f"config.return_dict is False, and {self._label()} cannot read the tuples "
                        f"of its own parts ({error}); set model.config.return_dict = True"
                    ) from error
                shapes = {k: tuple(v.shape) for k, v in batch.items() if isinstance(v, Tensor)}
                raise BatchError(
                    f"{self._label()} failed on the batch {shapes} used to discover its structure: "
                    f"{type(error).__name__}: {error}"
                ) from error
        finding = Finding(
            self._inner,
            record,
            batch,
            self._output,
            self.rows(batch),
            chosen=self._stream,
            asked=self._asked,
            decodes=self._decodes,
        )
        return finding.structure()

    def _output(self, batch: Mapping[str, Any]) -> Any:
        with without_packing(self._encoders):
            return self.call(self.arguments(batch, None))

    @property
    def task(self) -> Task:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.structure.task

    @property
    def blocks(self) -> Sequence[Block]:
        return self.structure.blocks

    @property
    def head(self) -> nn.Module:
        return self.structure.readout.head

    @property
    def outputs(self) -> int:
        return self.structure.outputs

    def feature(self, h: Tensor, depth: int, batch: Mapping[str, Any]) -> Tensor:
        self._chosen(batch)
        found = self.structure
        with without_tracking(self._norms):
            if found.readout.how == "modules":
                assert found.readout.pick is not None
                return found.readout.pick(self._arrived(self.given(h), depth, batch), batch)
            if found.readout.how == "head":
                assert found.readout.parts.linear is not None
                return found.tail.input_of(found.readout.parts.linear, h, depth, batch)
            return self.prediction(found.tail.output(h, depth, batch))

    def normed(self, feature: Tensor, depth: int) -> Tensor:
        readout = self.structure.readout
        if readout.how == "modules":
            with without_tracking(self._norms):
                for step in readout.parts.before:
                    feature = step(feature)
        return feature

    def readout(self, h: Tensor, depth: int, batch: Mapping[str, Any]) -> Tensor:
        self._chosen(batch)
        with without_tracking(self._norms):
            return self._read(h, self.check_depth(depth), batch)

    def _read(self, h: Tensor, depth: int, batch: Mapping[str, Any]) -> Tensor:
        found = self.structure
        if found.readout.exact:
            return found.readout.read(self._arrived(self.given(h), depth, batch), batch)
        return self.prediction(found.tail.output(h, depth, batch))

    @torch.no_grad()
    def conclude(self, cursor: Cursor) -> None:
        behind = self.structure.behind
        if any(norm.training for norm in behind):
            with without_tracking(norm for norm in self._norms if norm not in behind):
                self._read(cursor.h, self.depth, cursor.batch)

    def _arrived(self, h: Tensor, depth: int, batch: Mapping[str, Any]) -> Tensor:
        """The output of the last block if all blocks after `depth` were silent."""
        found = self.structure
        return h if found.tail.still(depth) else found.tail.arriving(h, depth, batch)

    def between(self, h: Tensor, depth: int, batch: Mapping[str, Any]) -> Tensor:
        found = self.structure
        if depth == len(found.blocks) or found.tail.direct[depth - 1]:
            return h
        with without_tracking(self._norms):
            return found.tail.following(h, depth, batch)

    @property
    def idle(self) -> Sequence[nn.Module]:
        return self.structure.idle

    @property
    def gaps(self) -> frozenset[int]:
        direct = self.structure.tail.direct
        return frozenset(depth for depth, one in enumerate(direct, start=1) if not one)

    def silent(
        self, h: Tensor, number: int, run: Callable[[], Any], given: Mapping[str | int, Any]
    ) -> Any:
        del run
        return self.structure.tail.silent(h, number, given)

    def carried(self, number: int) -> Mapping[str | int, int]:
        return self.structure.tail.forms[number - 1].carried

    # -- other depths -----------------------------------------------------------------------------

    @checked
    def truncated(self, depth: int, *, share: bool) -> nn.Module:
        found = self.structure
        depth = self.check_depth(depth, lowest=1)
        blocks = [block.module for block in found.blocks]
        cut = partial(shortened, self._inner, blocks, depth, found.tail, share=share)
        small = cut()
        if in_lists_of_lists(self._inner, blocks) and not self._runs(small):
            small = cut(filled=True)
        return small

    @torch.no_grad()
    def _runs(self, small: nn.Module) -> bool:
        """Whether a copy of the model with fewer blocks runs on the batch it was found on."""
        batch = self.trial()
        if not batch:  # the model has no weights yet
            return True
        with evaluating(small), silence(), replaced_forward(self._inner, small.forward):
            try:
                self._output(batch)
            except FAILURES:
                return False
        return True

    def inserted(self, after: int, block: nn.Module, like: int, *, share: bool) -> nn.Module:
        modules = [each.module for each in self.structure.blocks]
        lists = (m for m in self._inner.modules() if isinstance(m, BlockList))
        if any(list(held) == modules for held in lists):
            return super().inserted(after, block, like, share=share)
        given = self._inner, modules, after, block, like
        grown = lengthened(*given, share=share)
        if in_lists_of_lists(self._inner, modules) and not self._runs(grown):
            grown = listed(*given, self.structure.tail, share=share)
        return grown

    # -- how it is called -------------------------------------------------------------------------

    @property
    def _caches(self) -> bool:
        return "past_key_values" in self._names and self._can_cache

    @property
    def _can_cache(self) -> bool:
        return can_cache(self._inner, self._names, self._more)

    @property
    def _decodes(self) -> bool:
        """Whether it is an encoder-decoder that writes text."""
        generates = getattr(self._inner, "can_generate", bool)
        return "decoder_input_ids" in self._names and generates()

    def completed(self, batch: Mapping[str, Any]) -> Mapping[str, Any]:
        labels = batch.get("labels")
        given = batch.get("decoder_input_ids") is not None or "decoder_inputs_embeds" in batch
        if not self._decodes or given or not isinstance(labels, Tensor) or labels.ndim != 2:
            return batch
        shift = getattr(self._inner, "prepare_decoder_input_ids_from_labels", self._shifted)
        try:
            return {**batch, "decoder_input_ids": shift(labels=labels)}
        except FAILURES as error:
            raise BatchError(
                f"{self._label()} cannot make its decoder's inputs of the labels ({error}); set "
                "config.decoder_start_token_id and config.pad_token_id, or add decoder_input_ids "
                "to the batch"
            ) from error

    def _shifted(self, labels: Tensor) -> Tensor:
        """The start token, then all labels but the last, as encoder-decoders are trained."""
        config: Any = self._inner.config
        start = labels.new_full((len(labels), 1), config.decoder_start_token_id)
        ids = torch.cat([start, labels[:, :-1]], 1)
        return ids.masked_fill(ids == IGNORE_INDEX, config.pad_token_id)

    def arguments(self, batch: Mapping[str, Any], cache: Any) -> dict[str, Any]:
        # Otherwise the model would build and fill its own cache on every pass.
        own: dict[str, Any] = {"use_cache": cache is not None} if self._can_cache else {}
        if self._caches:
            if cache is not None and not hasattr(cache, "get_seq_length"):
                raise SettingError(
                    f"cache is {type(cache).__name__}; pass `new_cache()` of the stream, or None"
                )
            own["past_key_values"] = cache
            cache = None
        given = super().arguments(batch, cache)
        if not self._more and "position_ids" not in self._names:
            given.pop("position_ids", None)  # the model computes them itself
        return {**given, **own}

    def call(self, arguments: Mapping[str, Any]) -> Any:
        if hasattr(self._inner, "config"):
            return self.model(**arguments)
        key = next(key for key in self.inputs if arguments.get(key) is not None)
        rest = {k: v for k, v in arguments.items() if k != key and k in self._names}
        return self.model(arguments[key], **rest)

    def prediction(self, output: Any) -> Tensor:
        return prediction_in(output, self.structure.returned[0])

    def new_cache(self) -> Any:
        if not self._caches or self.task != "causal_lm":
            return super().new_cache()
        if self._cache_class is None:
            raise UnsupportedModelError(
                f"{self.name} has no cache that reproduces its predictions token by token; call "
                "without `cache`"
            )
        return self._cache(self._cache_class)

    def _cache(self, kind: Any) -> Any:
        from transformers import DynamicCache

        return DynamicCache(config=text_config(self._inner)) if kind is DynamicCache else kind()

    @cached_property
    def _cache_class(self) -> Any:
        """The class of the model's own cache; None if it has none that works."""
        for batch in examples(self._inner):
            try:
                with torch.no_grad(), evaluating(self._inner):
                    made = self.call({**self.arguments(batch, None), "use_cache": True})
                    kind: Any = type(made.past_key_values)
                    same = kind is not type(None) and self._reproduces(kind, batch)
            except FAILURES:
                continue
            return kind if same else None
        return None

    def _reproduces(self, kind: Any, batch: Mapping[str, Any]) -> bool:
        """Whether the model predicts the same if it reads the tokens in pieces with a cache."""
        ids, cache = batch["input_ids"], self._cache(kind)
        mask, last = torch.ones_like(ids), ids.shape[1]
        whole = {"input_ids": ids, "attention_mask": mask}
        wanted = self.prediction(self.call(self.arguments(whole, None)))
        found = wanted
        for start, end in ((0, last - 2), (last - 2, last - 1), (last - 1, last)):
            part = {"input_ids": ids[:, start:end], "attention_mask": mask[:, :end]}
            found = self.prediction(self.call(self.arguments(part, cache)))
        return close(found[:, -1], wanted[:, -1])

    @property
    def heads(self) -> int | None:
        found = getattr(text_config(self._inner), "num_attention_heads", None)
        return found if isinstance(found, int) else None

    @property
    def positions(self) -> int | None:
        return getattr(text_config(self._inner), "max_position_embeddings", None)

    @property
    def slotted(self) -> bool | None:
        return None if self._caches and self.task == "causal_lm" else False

    @property
    def overwrites(self) -> bool:
        return self.structure.tail.overwrites

    @property
    def row_axis(self) -> int:
        return self.structure.axis

    @property
    def padding(self) -> str:
        return self.structure.padding

    @property
    def call_axes(self) -> CallAxes:
        return self._call_axes

    def _call_axes(self, batch: Mapping[str, Any]) -> Sequence[Any]:
        """Measured on a batch with every row twice: batch dimensions double.

        Once for each set of inputs: with positions of its own, every row has its own rotary table.
        """
        names = frozenset(key for key, value in batch.items() if value is not None)
        if names not in self._axes:
            twice = doubled(batch, self.rows(batch))
            with torch.no_grad(), evaluating(self._inner):
                pair = self.start(batch).calls, self.start(twice).calls
            self._axes[names] = [
                (row_axes(one.args, two.args), row_axes(dict(one.kwargs), dict(two.kwargs)))
                for one, two in zip(*pair, strict=True)
            ]
        return self._axes[names]

    def window(self, depth: int) -> int | None:
        config = text_config(self._inner)
        kinds = getattr(config, "layer_types", None)
        slides = kinds is None or kinds[depth - 1] == "sliding_attention"
        return getattr(config, "sliding_window", None) if slides else None

    def _label(self) -> str:
        return type(self._inner).__name__

    def account(self) -> Mapping[str, str]:
        found = self.structure
        readout = found.readout
        head = type(readout.head).__name__
        steps = [*(path_of(self._inner, s) for s in readout.parts.before)]
        last = readout.parts.linear
        head = head if last is None else path_of(self._inner, last)
        if readout.how == "modules":
            chain = " -> ".join([readout.picked, *steps, head])
            sure = "the model's own bit for bit" if readout.exact else "checked against the tail"
            how = f"{chain} ({sure})"
        elif readout.how == "head":
            how = f"the model's own forward up to {head}, with silent blocks"
        else:
            how = "the model's own forward, with silent blocks"
        others = {"other streams": ", ".join(found.others)} if found.others else {}
        if found.early:
            early = f"{', '.join(found.early)}: the model reads more than one state of them"
            others = {"before the stream": early, **others}
        if self.gaps:
            places = f"after block {', '.join(map(str, sorted(self.gaps)))}"
            others = {"between blocks": f"the model changes the state {places}", **others}
        unknown = {
            f"block {number}": f"residual connections unknown: {why}"
            for number, why in found.missing.items()
        }
        told: dict[str, str] = {}
        if found.returned[0]:
            which, *rest = found.returned
            few = ", ".join(rest[:3]) + (", ..." if len(rest) > 3 else "")
            told = {"prediction": f"output {which}" + (f" (and not {few})" if rest else "")}
        return {"found in": ", ".join(found.paths), **told, "readout": how, **others, **unknown}
