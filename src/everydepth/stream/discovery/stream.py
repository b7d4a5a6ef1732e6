"""A stream discovered from a running model. No model class is named here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, final

import torch
from torch import Tensor, nn

from everydepth.errors import BatchError, EveryDepthError, SettingError, UnsupportedModelError
from everydepth.stream.block import Block
from everydepth.stream.contract import ResidualStream, Task, sample_task
from everydepth.stream.cursor import CallAxes
from everydepth.stream.discovery.branches import BlockParts, NotFound
from everydepth.stream.discovery.chain import Chain, chains, predicting, same, skips
from everydepth.stream.discovery.example import ROWS, examples, parameters_of
from everydepth.stream.discovery.lists import lengthened, shortened
from everydepth.stream.discovery.memory import recall, remember
from everydepth.stream.discovery.readout import Capped, Parts, Pick, Whole, parts, picks
from everydepth.stream.discovery.recording import Recording, recording, tensors_in
from everydepth.stream.discovery.residual import equal
from everydepth.stream.discovery.tail import Form, Tail
from everydepth.stream.modes import evaluating
from everydepth.stream.rows import row_axes, select_rows
from everydepth.stream.taps import first_tensor, hooked
from everydepth.stream.wrapping import unwrapped

_FAILURES = (
    RuntimeError,
    TypeError,
    ValueError,
    IndexError,
    KeyError,
    AttributeError,
    AssertionError,
    ImportError,
)


@dataclass(frozen=True)
class Readout:
    """How a state becomes a prediction.

    how: "modules" if pick, norms and head are known; "head" if only the head is, and the tail
        computes its input; "tail" if the tail computes the prediction.
    picked: what `pick` does, in words. late: the model picks after its head.
    exact: the modules reproduce the model's own prediction bit for bit.
    """

    how: str
    head: nn.Module
    parts: Parts
    pick: Pick | None = None
    picked: str = ""
    late: bool = False
    exact: bool = False


@dataclass(frozen=True)
class Structure:
    """What one batch revealed about a model.

    missing: block (from 1) -> why its branches are unknown.
    others: the names of other chains in the model.
    idle: modules of the blocks' class in their lists that were not called.
    early: paths of residual blocks before the stream, from which the model reads more than one
        state.
    axis: the batch dimension of a state.
    outputs: numbers per prediction.
    batch: the batch that was run.
    """

    blocks: tuple[Block, ...]
    tail: Tail
    readout: Readout
    task: Task
    paths: tuple[str, ...]
    missing: Mapping[int, str]
    others: tuple[str, ...]
    idle: tuple[nn.Module, ...]
    early: tuple[str, ...]
    axis: int
    outputs: int
    batch: Mapping[str, Any]


@final
class DiscoveredStream(ResidualStream):
    """The residual stream of any model, discovered on its first batch or a made-up one.

    stream: which of several chains to follow, as part of its path.
    example: a batch to run now; by default one is made up from the model's config.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        stream: str | None = None,
        example: Mapping[str, Any] | Tensor | None = None,
    ) -> None:
        self.model = model
        self._inner = unwrapped(model)
        self._names, self._more = parameters_of(self._inner)
        self._stream = stream
        self._found: Structure | None = None
        self._axes: Sequence[Any] | None = None
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
        known = recall(self._inner, (self.model, self._stream))
        if known is not None:
            self._found, self._more = known
        return known is not None

    def _keep(self, found: Structure) -> None:
        self._found = found
        if found.batch:  # there is none if the model has no weights yet
            remember(self._inner, (self.model, self._stream), (found, self._more))

    def confirm(self, batch: Mapping[str, Any]) -> None:
        if self._found is None and not self._recalled():
            # Recording keeps every value, so use a few rows of a large batch.
            rows = self.rows(batch)
            few = batch if rows <= ROWS else select_rows(batch, torch.arange(ROWS), rows)
            self._keep(self._look(few))

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
        reason = f" ({errors[-1]})" if errors else ""
        raise UnsupportedModelError(
            f"{type(self._inner).__name__} does not run on a made-up batch{reason}; pass a real "
            "one: as_stream(model, example=batch)"
        ) from (errors[-1] if errors else None)

    def _try(self, batch: Mapping[str, Any]) -> Any:
        """Call the model; if it rejects `use_cache`, stop passing it."""
        try:
            return self.call(self.arguments(batch, None))
        except TypeError:
            if not self._can_cache or "use_cache" in self._names:
                raise
            self._more = False
            return self.call(self.arguments(batch, None))

    @torch.no_grad()
    def _look(self, batch: Mapping[str, Any]) -> Structure:
        with evaluating(self._inner):
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
            except _FAILURES as error:
                shapes = {k: tuple(v.shape) for k, v in batch.items() if isinstance(v, Tensor)}
                raise BatchError(
                    f"{self._label()} failed on the batch {shapes} used to discover its structure: "
                    f"{type(error).__name__}: {error}"
                ) from error
        prediction = self.prediction(record.output)
        whole, others = self._chain(record, prediction)
        if prediction.is_meta:
            return self._outline(record, whole, others, prediction)
        chain, tail, missing = self._predicting(record, whole, prediction, batch)
        return Structure(
            blocks=tuple(tail.blocks),
            tail=tail,
            readout=self._readout(record, chain, tail, prediction, batch),
            task=self._task(prediction, batch),
            paths=chain.paths,
            missing=missing,
            others=others,
            idle=self._idle(record, chain),
            early=tuple(path for path in whole.paths if path not in chain.paths),
            axis=self._row_axis(tail.blocks[-1].module, record.values[chain.end], batch),
            outputs=prediction.shape[-1],
            batch=batch,
        )

    def _predicting(
        self, record: Recording, whole: Chain, prediction: Tensor, batch: Mapping[str, Any]
    ) -> tuple[Chain, Tail, dict[int, str]]:
        """The longest end of a chain that predicts alone, its tail, and why branches are unknown.

        A model may also use states of its early stages for the prediction, or pass more than one
        state on to later stages. Such early stages are not part of the stream.
        """
        refused: UnsupportedModelError | None = None
        for chain in whole.ends():
            tail, missing = self._tail(record, chain)
            try:
                self._check_tail(record, chain, tail, prediction, batch)
            except UnsupportedModelError as error:
                refused = refused or error
            else:
                return chain, tail, missing
        assert refused is not None
        raise refused

    def _tail(self, record: Recording, chain: Chain) -> tuple[Tail, dict[int, str]]:
        blocks: list[Block] = []
        missing: dict[int, str] = {}
        for number, link in enumerate(chain.links, start=1):
            try:
                blocks.append(BlockParts(record, link).block())
            except NotFound as reason:
                missing[number] = str(reason)
                blocks.append(Block(module=link.call.module, plain=link.call.plain))
        following = (*chain.links[1:], None)
        forms = [
            Form.of(link.call, None if after is None else after.call)
            for link, after in zip(chain.links, following, strict=True)
        ]
        direct = [
            same(record, link.call.given, after.call.state)
            for link, after in zip(chain.links, chain.links[1:], strict=False)
        ]
        return Tail(self._output, blocks, forms, _skips(chain), direct), missing

    def _output(self, batch: Mapping[str, Any]) -> Any:
        return self.call(self.arguments(batch, None))

    def _check_tail(
        self,
        record: Recording,
        chain: Chain,
        tail: Tail,
        prediction: Tensor,
        batch: Mapping[str, Any],
    ) -> None:
        """Raise if the prediction does not depend on the end of the chain alone."""
        seen: list[Mapping[str | int, Any]] = []
        try:
            output = tail.output(record.values[chain.end], len(tail.blocks), batch, seen)
            found = self.prediction(output)
        except _FAILURES as error:
            raise UnsupportedModelError(
                f"the blocks of {self._label()} in {chain.name} cannot be skipped: what follows "
                f"needs more than a state ({type(error).__name__}: {error}); write an adapter "
                "(docs/add-an-architecture.md)"
            ) from error
        if not _same(found, prediction):
            raise UnsupportedModelError(
                f"the prediction of {self._label()} does not come from the end of {chain.name} "
                "alone: it changes if all blocks pass the last state through; the model may be "
                "random, keep a state between calls, or read intermediate blocks; switch that off, "
                "or write an adapter (docs/add-an-architecture.md)"
            )
        changed = _changed(chain, tail, seen)
        if changed is not None and len(chain.paths) > 1:
            raise UnsupportedModelError(
                f"block {changed} of {self._label()} in {chain.name} depends on more than the "
                "previous state; write an adapter (docs/add-an-architecture.md)"
            )

    def _outline(
        self, record: Recording, chain: Chain, others: tuple[str, ...], prediction: Tensor
    ) -> Structure:
        """The structure of a model on the meta device: its blocks, so that it can be cut."""
        blocks = tuple(
            Block(module=link.call.module, plain=link.call.plain) for link in chain.links
        )
        forms = [Form.of(link.call, None) for link in chain.links]
        outputs = prediction.shape[-1]
        found = parts(record, chain.end, record.key(prediction))
        readout = Readout("tail", found.linear or Whole(outputs), found)
        told = dict.fromkeys(range(1, len(blocks) + 1), "the model has no weights yet")
        return Structure(
            blocks=blocks,
            tail=Tail(self._output, blocks, forms, _skips(chain), (True,) * (len(blocks) - 1)),
            readout=readout,
            task="classification",
            paths=chain.paths,
            missing=told,
            others=others,
            idle=(),
            early=(),
            axis=0,
            outputs=outputs,
            batch={},
        )

    def _idle(self, record: Recording, chain: Chain) -> tuple[nn.Module, ...]:
        called = {call.module for call in record.calls}
        kinds = {type(module) for module in chain.modules}
        held = [m for path in chain.paths for m in self._inner.get_submodule(path).children()]
        return tuple(m for m in held if type(m) in kinds and m not in called)

    def _row_axis(self, last: nn.Module, h: Tensor, batch: Mapping[str, Any]) -> int:
        rows = self.rows(batch)
        fitting = [axis for axis, size in enumerate(h.shape) if size == rows]
        if len(fitting) == 1:
            return fitting[0]
        # Several dimensions have this size, or none because rows share theirs with something else
        # (windows, patches); only the batch dimension grows with the rows.
        shapes: list[torch.Size] = []
        see = last.register_forward_hook(lambda *seen: shapes.append(first_tensor(seen[-1]).shape))
        with hooked(see):
            self.call(self.arguments(_doubled(batch, rows), None))
        sizes = zip(h.shape, shapes[-1], strict=True)
        grown = [axis for axis, (one, two) in enumerate(sizes) if two == 2 * one]
        return next((axis for axis in fitting if axis in grown), (*grown, 0)[0])

    def _chain(self, record: Recording, prediction: Tensor) -> tuple[Chain, tuple[str, ...]]:
        found = chains(self._inner, record)
        if not found:
            raise UnsupportedModelError(self._without(record))
        names = tuple(chain.name for chain in found)
        if self._stream is not None:
            chosen = [chain for chain in found if any(self._stream in path for path in chain.paths)]
            if not chosen:
                raise SettingError(
                    f"stream={self._stream!r}, but {self._label()} has the chains {list(names)}; "
                    "use a part of one of these paths"
                )
            chain = max(chosen, key=lambda each: each.size)
        else:
            ends = predicting(found, record, prediction)
            if not ends:
                raise UnsupportedModelError(
                    f"no chain of {self._label()} leads to its prediction (found {list(names)}); "
                    'name its blocks: as_stream(model, blocks="path.to.blocks", readout=(...))'
                )
            largest = max(ends, key=lambda each: each.size)
            rivals = [each for each in ends if each is not largest and 4 * each.size > largest.size]
            if rivals:
                raise SettingError(
                    f"{self._label()} has {1 + len(rivals)} streams that predict: "
                    f"{', '.join(repr(each.name) for each in (largest, *rivals))}; choose one: "
                    f"as_stream(model, stream={largest.paths[0]!r})"
                )
            chain = largest
        return chain, tuple(name for name in names if name != chain.name)

    def _without(self, record: Recording) -> str:
        """Why there is no chain, and what to do."""
        adding = [_named(self._inner, module) or self._label() for module in skips(record)]
        if not adding:
            return (
                f"{self._label()} has no residual connections: it never adds two computed values, "
                "so it has no stream; use a network with skips"
            )
        some = ", ".join(adding[:3]) + (", ..." if len(adding) > 3 else "")
        return (
            f"{self._label()} has no chain of residual blocks: it adds in {len(adding)} modules "
            f"({some}), but none of them adds to the one state that it is given and hands the sum "
            "to the next; follow a part of the model that does (as_stream(model.part, "
            "example=...)), make each of its blocks a module, or name them: as_stream(model, "
            'blocks="path.to.blocks", readout=(...))'
        )

    # -- the readout ------------------------------------------------------------------------------

    def _readout(
        self,
        record: Recording,
        chain: Chain,
        tail: Tail,
        prediction: Tensor,
        batch: Mapping[str, Any],
    ) -> Readout:
        found = parts(record, chain.end, record.key(prediction))
        whole = Whole(prediction.shape[-1])
        if found.linear is None:
            return Readout("tail", whole, found)
        head = Capped(found.linear, found.after) if found.after else found.linear
        h = record.values[chain.end]
        if found.whole:
            # Some classifiers score every token and pick afterward, which affects rounding.
            calls = [call for call in record.calls if call.module is found.linear and call.given]
            scored = record.values[calls[-1].given].shape if calls and calls[-1].given else None
            late = scored is not None and scored[:-1] != prediction.shape[:-1]
            picked = self._picked(found, head, tail, h, batch, late=late)
            if picked is not None:
                return picked
        try:
            x = tail.input_of(found.linear, h, len(tail.blocks), batch)
            if _near(head(x), prediction):
                return Readout("head", head, found)
        except (*_FAILURES, EveryDepthError):
            pass
        return Readout("tail", whole, found)

    def _picked(
        self,
        found: Parts,
        head: nn.Module,
        tail: Tail,
        h: Tensor,
        batch: Mapping[str, Any],
        *,
        late: bool,
    ) -> Readout | None:
        """The readout whose pick agrees with the tail on every variant of the batch, if any."""
        last = len(tail.blocks)
        generator = torch.Generator().manual_seed(0)
        other = torch.randn(h.shape, generator=generator).to(h)
        cases = [(h, batch), (other, batch)]
        cases += [(other, variant) for variant in _padded(batch, self._inner)]
        wanted: list[tuple[Tensor, Mapping[str, Any], Tensor]] = []
        for state, given in cases:
            try:
                wanted.append((state, given, self.prediction(tail.output(state, last, given))))
            except _FAILURES:  # the model does not accept this variant
                continue
        close: Readout | None = None
        for name, pick in picks(_text_config(self._inner)).items():
            ready = Readout("modules", head, found, pick, name, late)
            try:
                got = [_read(ready, state, given) for state, given, _ in wanted]
            except (*_FAILURES, EveryDepthError):
                continue
            pairs = [(a, z) for a, (_, _, z) in zip(got, wanted, strict=True)]
            if all(_same(a, z) for a, z in pairs):
                return replace(ready, exact=True)
            if close is None and all(_near(a, z) for a, z in pairs):
                close = ready
        return close

    def _task(self, prediction: Tensor, batch: Mapping[str, Any]) -> Task:
        inner: Any = self._inner
        if not hasattr(inner, "config"):
            return "classification"
        if prediction.ndim <= 2:
            return sample_task(inner)
        return "causal_lm" if self._causal(prediction, batch) else "masked_lm"

    def _causal(self, prediction: Tensor, batch: Mapping[str, Any]) -> bool:
        """Whether changing the last token leaves all earlier predictions unchanged."""
        ids = batch.get("input_ids")
        generates = getattr(self._inner, "can_generate", None)
        if not isinstance(ids, Tensor) or generates is None or not generates():
            return False
        if "decoder_input_ids" in batch or ids.shape != prediction.shape[:2] or ids.shape[1] < 2:
            return False
        changed = ids.clone()
        changed[:, -1] = changed[:, 0]
        other = self.prediction(self.call(self.arguments({**batch, "input_ids": changed}, None)))
        return _near(other[:, :-1], prediction[:, :-1])

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
        found = self.structure
        if found.readout.how == "modules":
            assert found.readout.pick is not None
            return found.readout.pick(self._arrived(h, depth, batch), batch)
        if found.readout.how == "head":
            assert found.readout.parts.linear is not None
            return found.tail.input_of(found.readout.parts.linear, h, depth, batch)
        return self.prediction(found.tail.output(h, depth, batch))

    def normed(self, feature: Tensor, depth: int) -> Tensor:
        readout = self.structure.readout
        if readout.how == "modules":
            for step in readout.parts.before:
                feature = step(feature)
        return feature

    def readout(self, h: Tensor, depth: int, batch: Mapping[str, Any]) -> Tensor:
        found = self.structure
        self.check_depth(depth)
        if found.readout.exact:
            return _read(found.readout, self._arrived(h, depth, batch), batch)
        return self.prediction(found.tail.output(h, depth, batch))

    def _arrived(self, h: Tensor, depth: int, batch: Mapping[str, Any]) -> Tensor:
        """The output of the last block if all blocks after `depth` were silent."""
        found = self.structure
        return h if found.tail.still(depth) else found.tail.arriving(h, depth, batch)

    def between(self, h: Tensor, depth: int, batch: Mapping[str, Any]) -> Tensor:
        found = self.structure
        if depth == len(found.blocks) or found.tail.direct[depth - 1]:
            return h
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

    def truncated(self, depth: int, *, share: bool) -> nn.Module:
        found = self.structure
        return shortened(
            self._inner,
            [block.module for block in found.blocks],
            depth,
            found.tail,
            share=share,
        )

    def inserted(self, after: int, block: nn.Module, like: int, *, share: bool) -> nn.Module:
        modules = [each.module for each in self.structure.blocks]
        if any(list(m.children()) == modules for m in self._inner.modules()):
            return super().inserted(after, block, like, share=share)
        return lengthened(self._inner, modules, after, block, like, share=share)

    # -- how it is called -------------------------------------------------------------------------

    @property
    def _caches(self) -> bool:
        return "past_key_values" in self._names and self._can_cache

    @property
    def _can_cache(self) -> bool:
        if "use_cache" in self._names:
            return True
        config = _text_config(self._inner)
        return self._more and getattr(config, "use_cache", None) is True

    def completed(self, batch: Mapping[str, Any]) -> Mapping[str, Any]:
        labels = batch.get("labels")
        if self.inputs[0] != "decoder_input_ids" or not isinstance(labels, Tensor):
            return batch
        shift = getattr(self._inner, "prepare_decoder_input_ids_from_labels", None)
        if batch.get("decoder_input_ids") is not None or shift is None or labels.ndim != 2:
            return batch
        return {**batch, "decoder_input_ids": shift(labels=labels)}

    def arguments(self, batch: Mapping[str, Any], cache: Any) -> dict[str, Any]:
        # Otherwise the model would build and fill its own cache on every pass.
        own: dict[str, Any] = {"use_cache": cache is not None} if self._can_cache else {}
        if self._caches:
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
        return _prediction(output)

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

        return DynamicCache(config=_text_config(self._inner)) if kind is DynamicCache else kind()

    @cached_property
    def _cache_class(self) -> Any:
        """The class of the model's own cache; None if it has none that works."""
        for batch in examples(self._inner):
            try:
                with torch.no_grad(), evaluating(self._inner):
                    made = self.call({**self.arguments(batch, None), "use_cache": True})
                    kind: Any = type(made.past_key_values)
                    same = kind is not type(None) and self._reproduces(kind, batch)
            except _FAILURES:
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
        return _near(found[:, -1], wanted[:, -1])

    @property
    def heads(self) -> int | None:
        found = getattr(_text_config(self._inner), "num_attention_heads", None)
        return found if isinstance(found, int) else None

    @property
    def positions(self) -> int | None:
        return getattr(_text_config(self._inner), "max_position_embeddings", None)

    @property
    def slotted(self) -> bool | None:
        return None if self._caches and self.task == "causal_lm" else False

    @property
    def row_axis(self) -> int:
        return self.structure.axis

    @property
    def call_axes(self) -> CallAxes:
        return self._call_axes

    def _call_axes(self, batch: Mapping[str, Any]) -> Sequence[Any]:
        """Measured once on a batch with every row twice: batch dimensions double."""
        if self._axes is None:
            twice = _doubled(batch, self.rows(batch))
            with torch.no_grad(), evaluating(self._inner):
                pair = self.start(batch).calls, self.start(twice).calls
            self._axes = [
                (row_axes(one.args, two.args), row_axes(dict(one.kwargs), dict(two.kwargs)))
                for one, two in zip(*pair, strict=True)
            ]
        return self._axes

    def window(self, depth: int) -> int | None:
        config = _text_config(self._inner)
        kinds = getattr(config, "layer_types", None)
        slides = kinds is None or kinds[depth - 1] == "sliding_attention"
        return getattr(config, "sliding_window", None) if slides else None

    def _label(self) -> str:
        return type(self._inner).__name__

    def account(self) -> Mapping[str, str]:
        found = self.structure
        readout = found.readout
        head = type(readout.head).__name__
        steps = [*(_named(self._inner, s) for s in readout.parts.before)]
        last = readout.parts.linear
        head = head if last is None else _named(self._inner, last)
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
        return {"found in": ", ".join(found.paths), "readout": how, **others, **unknown}


def _skips(chain: Chain) -> dict[int, nn.Module]:
    """Block (from 1) -> the module on its skip, if it has one."""
    firsts = ((number, link.sums[0].skip) for number, link in enumerate(chain.links, start=1))
    return {number: skip.module for number, skip in firsts if skip is not None}


def _changed(chain: Chain, tail: Tail, seen: Sequence[Mapping[str | int, Any]]) -> int | None:
    """The first block whose other arguments change if earlier blocks are silent; None if none."""
    carried: Mapping[str | int, int] = {}
    for number, (link, given) in enumerate(zip(chain.links, seen, strict=True), start=1):
        for key, value in link.call.arguments.items():
            own = key in carried or key == (0 if link.call.key is None else link.call.key)
            pairs = zip(tensors_in(value), tensors_in(given.get(key)), strict=False)
            if not own and not all(equal(a, b) for a, b in pairs):
                return number
        carried = tail.forms[number - 1].carried
    return None


def _named(model: nn.Module, step: Any) -> str:
    """The path of a module in the model, or the name of a function."""
    if not isinstance(step, nn.Module):
        return step.name
    return next((name for name, m in model.named_modules() if m is step), type(step).__name__)


def _text_config(model: nn.Module) -> Any:
    config = getattr(model, "config", None)
    own = getattr(config, "get_text_config", None)
    return config if own is None else own()


def _read(readout: Readout, h: Tensor, batch: Mapping[str, Any]) -> Tensor:
    assert readout.pick is not None
    x = h if readout.late else readout.pick(h, batch)
    for step in readout.parts.before:
        x = step(x)
    x = readout.head(x)
    return readout.pick(x, batch) if readout.late else x


def _prediction(output: Any) -> Tensor:
    if isinstance(output, Tensor):
        return output
    for name in ("logits", "prediction_logits", "logits_per_image"):
        value = output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)
        if isinstance(value, Tensor):
            return value
    values = output.values() if isinstance(output, Mapping) else output
    return next(v for v in values if isinstance(v, Tensor) and v.is_floating_point())


def _same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and bool(torch.equal(a.nan_to_num(), b.nan_to_num()))


def _near(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape:
        return False
    tolerance = {torch.float64: 1e-9, torch.float32: 1e-4}.get(b.dtype, 5e-2)
    scale = float(b.detach().float().nan_to_num().abs().max()) if b.numel() else 0.0
    gap = (a.float().nan_to_num() - b.float().nan_to_num()).abs()
    return not gap.numel() or float(gap.max()) <= tolerance * max(scale, 1e-3)


def _doubled(batch: Mapping[str, Any], rows: int) -> Mapping[str, Any]:
    """The batch with every row twice."""
    return select_rows(batch, torch.arange(rows).repeat(2), rows)


def _padded(batch: Mapping[str, Any], model: nn.Module) -> list[dict[str, Any]]:
    """The batch with padding on the right, and with padding on the left."""
    ids, mask = batch.get("input_ids"), batch.get("attention_mask")
    pad = getattr(_text_config(model), "pad_token_id", None)
    if not isinstance(ids, Tensor) or ids.ndim != 2 or ids.shape[1] < 4:
        return []
    found: list[dict[str, Any]] = []
    for where in (slice(ids.shape[1] - 2, None), slice(0, 2)):
        changed = dict(batch)
        if isinstance(pad, int):
            changed["input_ids"] = ids.clone()
            changed["input_ids"][-1, where] = pad
        if isinstance(mask, Tensor) and mask.shape == ids.shape:
            changed["attention_mask"] = mask.clone()
            changed["attention_mask"][-1, where] = 0
        found.append(changed)
    return found
