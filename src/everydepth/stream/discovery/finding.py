"""`Finding`: from the recording of one forward pass to the structure of the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from everydepth.errors import EveryDepthError, SettingError, UnsupportedModelError
from everydepth.stream.block import Block
from everydepth.stream.contract import Task, sample_task
from everydepth.stream.discovery.branches import BlockParts, NotFound
from everydepth.stream.discovery.chain import (
    Chain,
    Reach,
    chains,
    last_values,
    predicting,
    same,
    skips,
    uncalled,
)
from everydepth.stream.discovery.readout import Capped, Parts, Whole, parts, picks
from everydepth.stream.discovery.recording import Recording, tensors_in
from everydepth.stream.discovery.residual import equal
from everydepth.stream.discovery.structure import (
    FAILURES,
    Readout,
    Structure,
    close,
    identical,
    path_of,
    prediction_in,
    predictions_in,
    text_config,
    undecided,
    usual,
)
from everydepth.stream.discovery.tail import Form, Tail
from everydepth.stream.modes import tracking
from everydepth.stream.rows import select_rows
from everydepth.stream.taps import first_tensor, hooked


@dataclass(frozen=True)
class Finding:
    """Finds the structure of a model that ran on a batch.

    run: the model's output for another batch. rows: of the batch.
    chosen: which of several chains to follow, as part of its path. asked: which of several outputs
        is the prediction.
    decodes: whether the model is an encoder-decoder that writes text.
    """

    model: nn.Module
    record: Recording
    batch: Mapping[str, Any]
    run: Callable[[Mapping[str, Any]], Any]
    rows: int
    chosen: str | None
    asked: str | int | None
    decodes: bool

    def structure(self) -> Structure:
        """The structure; raise if the model cannot be followed."""
        try:
            return self._structure()
        except UnsupportedModelError as error:
            path = uncalled(self.model, self.record)
            if path is None:
                raise
            raise UnsupportedModelError(
                f"{self._label} runs the modules in {path} by `layer.forward(...)`, which hooks do "
                "not see, so they cannot be followed; change it to `layer(...)`, or write an "
                "adapter (docs/add-an-architecture.md)"
            ) from error

    @property
    def _label(self) -> str:
        return type(self.model).__name__

    @cached_property
    def _prediction(self) -> Tensor:
        return self._predicted(self.record.output)

    def _predicted(self, output: Any) -> Tensor:
        return prediction_in(output, self._returned[0])

    @cached_property
    def _returned(self) -> tuple[str, ...]:
        """The names of all outputs that may be the prediction; the first of them is."""
        found = predictions_in(self.record.output)
        name = usual(self.record.output, found)
        if self.asked is not None:
            name = str(self.asked)
            if name not in found:
                raise SettingError(
                    f"output={self.asked!r}, but {self._label} returns {', '.join(found)}; use one "
                    "of these"
                )
        elif name is None:
            fitting = [c for c in self._chains if self.chosen is None or self._is_chosen(c)]
            keys = {name: self.record.key(tensor) for name, tensor in found.items()}
            last = last_values(self.record, keys, [chain.end for chain in fitting])
            if len(last) > 1:
                raise SettingError(undecided(self._label, {name: found[name] for name in last}))
            name = next(iter(last))
        return name, *(other for other in found if other != name)

    def _structure(self) -> Structure:
        whole, others = self._chain()
        if self._prediction.is_meta:
            return self._outline(whole, others)
        chain, tail, missing = self._predicting(whole)
        return Structure(
            blocks=tuple(tail.blocks),
            tail=tail,
            readout=self._readout(chain, tail),
            task=self._task(),
            paths=chain.paths,
            missing=missing,
            others=others,
            idle=self._idle(chain),
            early=tuple(path for path in whole.paths if path not in chain.paths),
            behind=self._behind(chain),
            axis=self._row_axis(tail.blocks[-1].module, self.record.values[chain.end]),
            padding=self._padding(chain),
            outputs=self._prediction.shape[-1],
            returned=self._returned,
            batch=self.batch,
        )

    def _outline(self, chain: Chain, others: tuple[str, ...]) -> Structure:
        """The structure of a model on the meta device: its blocks, so that it can be cut."""
        blocks = tuple(
            Block(module=link.call.module, plain=link.call.plain, outside=link.outside)
            for link in chain.links
        )
        forms = [Form.of(link.call, None, added=link.outside) for link in chain.links]
        outputs = self._prediction.shape[-1]
        found = parts(self.record, chain.end, self.record.key(self._prediction))
        return Structure(
            blocks=blocks,
            tail=Tail(self.run, blocks, forms, _skips(chain), (True,) * (len(blocks) - 1)),
            readout=Readout("tail", found.linear or Whole(outputs), found),
            task="classification",
            paths=chain.paths,
            missing=dict.fromkeys(range(1, len(blocks) + 1), "the model has no weights yet"),
            others=others,
            idle=(),
            early=(),
            behind=(),
            axis=0,
            padding="attention_mask",
            outputs=outputs,
            returned=self._returned,
            batch={},
        )

    # -- the chain --------------------------------------------------------------------------------

    @cached_property
    def _chains(self) -> Sequence[Chain]:
        return chains(self.model, self.record)

    def _is_chosen(self, chain: Chain) -> bool:
        return any(str(self.chosen) in path for path in chain.paths)

    def _chain(self) -> tuple[Chain, tuple[str, ...]]:
        """The chain to follow, and the names of all others."""
        found = self._chains
        if not found:
            raise UnsupportedModelError(self._without())
        names = tuple(chain.name for chain in found)
        if self.chosen is not None:
            fitting = [chain for chain in found if self._is_chosen(chain)]
            if not fitting:
                raise SettingError(
                    f"stream={self.chosen!r}, but {self._label} has the chains {list(names)}; "
                    "use a part of one of these paths"
                )
            chain = max(fitting, key=lambda each: each.size)
        else:
            ends = predicting(found, self.record, self._prediction)
            if not ends:
                raise UnsupportedModelError(
                    f"no chain of {self._label} leads to its prediction (found {list(names)}); "
                    'name its blocks: as_stream(model, blocks="path.to.blocks", readout=(...))'
                )
            chain = max(ends, key=lambda each: each.size)
            rivals = [each for each in ends if each is not chain and 4 * each.size > chain.size]
            if rivals:
                raise SettingError(
                    f"{self._label} has {1 + len(rivals)} streams that predict: "
                    f"{', '.join(repr(each.name) for each in (chain, *rivals))}; choose one: "
                    f"as_stream(model, stream={chain.paths[0]!r})"
                )
        return chain, tuple(name for name in names if name != chain.name)

    def _without(self) -> str:
        """Why there is no chain, and what to do."""
        adding = [path_of(self.model, module) or self._label for module in skips(self.record)]
        if not adding:
            return (
                f"{self._label} has no residual connections: it never adds two computed values, "
                "so it has no stream; use a network with skips"
            )
        some = ", ".join(adding[:3]) + (", ..." if len(adding) > 3 else "")
        return (
            f"{self._label} has no chain of residual blocks: it adds in {len(adding)} "
            f"module{'' if len(adding) == 1 else 's'} ({some}), but none of them adds to the one "
            "state that it is given and hands the sum to the next; make each step a module that "
            "does (`return x + self.f(self.norm(x))`), follow a part of the model that has such "
            "modules (as_stream(model.part, example=...)), or write an adapter "
            "(docs/add-an-architecture.md)"
        )

    def _predicting(self, whole: Chain) -> tuple[Chain, Tail, dict[int, str]]:
        """The longest end of a chain that predicts alone, its tail, and why branches are unknown.

        A model may also use states of its early stages for the prediction, or pass more than one
        state on to later stages. Such early stages are not part of the stream.
        """
        refused: UnsupportedModelError | None = None
        for chain in whole.ends():
            tail, missing = self._tail(chain)
            try:
                self._check_tail(chain, tail)
            except UnsupportedModelError as error:
                refused = refused or error
            else:
                return chain, tail, missing
        assert refused is not None
        raise refused

    def _tail(self, chain: Chain) -> tuple[Tail, dict[int, str]]:
        blocks: list[Block] = []
        missing: dict[int, str] = {}
        for number, link in enumerate(chain.links, start=1):
            try:
                block = BlockParts(self.record, link).block()
            except NotFound as reason:
                missing[number] = str(reason)
                block = Block(module=link.call.module, plain=link.call.plain, outside=link.outside)
            read = (link.call.state, *(each.x for each in link.sums))
            over = any(key is not None and self.record.overwritten(key) for key in read)
            blocks.append(replace(block, overwrites=over))
        following = (*chain.links[1:], None)
        forms = [
            Form.of(link.call, None if after is None else after.call, added=link.outside)
            for link, after in zip(chain.links, following, strict=True)
        ]
        direct = [
            same(self.record, link.given, after.call.state)
            for link, after in zip(chain.links, chain.links[1:], strict=False)
        ]
        over = self.record.overwritten(chain.end) or any(block.overwrites for block in blocks)
        return Tail(self.run, blocks, forms, _skips(chain), direct, over), missing

    def _check_tail(self, chain: Chain, tail: Tail) -> None:
        """Raise if the prediction does not depend on the end of the chain alone."""
        seen: list[Mapping[str | int, Any]] = []
        try:
            end = self.record.values[chain.end]
            found = self._predicted(tail.output(end, len(tail.blocks), self.batch, seen))
        except FAILURES as error:
            raise UnsupportedModelError(
                f"the blocks of {self._label} in {chain.name} cannot be skipped: what follows "
                f"needs more than a state ({type(error).__name__}: {error}); "
                f"{self._collected() or 'write an adapter (docs/add-an-architecture.md)'}"
            ) from error
        if not identical(found, self._prediction):
            raise UnsupportedModelError(
                f"the prediction of {self._label} does not come from the end of {chain.name} "
                "alone: it changes if all blocks pass the last state through; the model may be "
                "random, keep a state between calls, or read intermediate blocks; switch that off, "
                "or write an adapter (docs/add-an-architecture.md)"
            )
        reason = _changed(chain, tail, seen) or self._mixed(chain, tail)
        if reason is not None:
            raise UnsupportedModelError(
                f"the blocks of {self._label} in {chain.name} do not depend on the previous state "
                f"alone: {reason}; write an adapter (docs/add-an-architecture.md)"
            )

    def _collected(self) -> str:
        """The settings that make the model return more of each block, and what to do."""
        config = text_config(self.model)
        own = config is getattr(self.model, "config", None)
        holder = "model.config" if own else "model.config.get_text_config()"
        names = [name for name, value in vars(config or self).items() if value is True]
        asked = [f"{holder}.{name}" for name in names if name.startswith("output_")]
        if not asked:
            return ""
        one = len(asked) == 1
        return (
            f"{' and '.join(asked)} {'is' if one else 'are'} True, so the model collects more of "
            f"its blocks than states: set {'it' if one else 'them'} to False (a loss that it would "
            "compute of that, such as the balance of experts, is then left out)"
        )

    def _mixed(self, chain: Chain, tail: Tail) -> str | None:
        """Where the model uses an earlier state between two blocks; None if nowhere."""
        reach = Reach(self.record)
        states = [link.call.state for link in chain.links]
        for number, (link, then) in enumerate(zip(chain.links, states[1:], strict=False), start=1):
            if tail.direct[number - 1] or link.given is None or then is None:
                continue
            early = (state for state in states[:number] if state is not None)
            if any(reach.leads(state, then, around=[link.given]) for state in early):
                return f"between blocks {number} and {number + 1} an earlier state is used again"
        return None

    # -- about the states -------------------------------------------------------------------------

    def _idle(self, chain: Chain) -> tuple[nn.Module, ...]:
        called = {call.module for call in self.record.calls}
        kinds = {type(module) for module in chain.modules}
        held = [m for path in chain.paths for m in self.model.get_submodule(path).children()]
        return tuple(m for m in held if type(m) in kinds and m not in called)

    def _behind(self, chain: Chain) -> tuple[nn.Module, ...]:
        end = chain.links[-1].call.end
        norms = tracking(self.model)
        return tuple(c.module for c in self.record.calls if c.begin >= end and c.module in norms)

    def _row_axis(self, last: nn.Module, h: Tensor) -> int:
        fitting = [axis for axis, size in enumerate(h.shape) if size == self.rows]
        if len(fitting) == 1:
            return fitting[0]
        # Several dimensions have this size, or none because rows share theirs with something else
        # (windows, patches); only the batch dimension grows with the rows.
        shapes: list[torch.Size] = []
        see = last.register_forward_hook(lambda *seen: shapes.append(first_tensor(seen[-1]).shape))
        with hooked(see):
            self.run(doubled(self.batch, self.rows))
        sizes = zip(h.shape, shapes[-1], strict=True)
        grown = [axis for axis, (one, two) in enumerate(sizes) if two == 2 * one]
        return next((axis for axis in fitting if axis in grown), (*grown, 0)[0])

    def _padding(self, chain: Chain) -> str:
        """The batch key of the mask of the states: the decoder's if they depend on its tokens."""
        ids, start = self.batch.get("decoder_input_ids"), chain.links[0].call.state
        if not isinstance(ids, Tensor):
            return "attention_mask"
        decodes = start in Reach(self.record).after(self.record.key(ids))
        return "decoder_attention_mask" if decodes else "attention_mask"

    # -- the readout ------------------------------------------------------------------------------

    def _readout(self, chain: Chain, tail: Tail) -> Readout:
        record, prediction = self.record, self._prediction
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
            looks = self._looks(chain)
            picked = self._picked(found, head, tail, h, late=late, looks=looks)
            if picked is not None:
                return picked
        try:
            x = tail.input_of(found.linear, h, len(tail.blocks), self.batch)
            if close(head(x), prediction):
                return Readout("head", head, found)
        except (*FAILURES, EveryDepthError):
            pass
        return Readout("tail", whole, found)

    def _looks(self, chain: Chain) -> bool:
        """Whether the prediction depends on the batch in another way than through the states."""
        reach, goal = Reach(self.record), self.record.key(self._prediction)
        states = [link.given for link in chain.links if link.given is not None]
        given = [self.record.key(tensor) for tensor in tensors_in(self.batch)]
        return any(reach.leads(key, goal, around=states) for key in given)

    def _picked(
        self, found: Parts, head: nn.Module, tail: Tail, h: Tensor, *, late: bool, looks: bool
    ) -> Readout | None:
        """The readout whose pick agrees with the tail on every variant of the batch, if any."""
        last = len(tail.blocks)
        generator = torch.Generator().manual_seed(0)
        other = torch.randn(h.shape, generator=generator).to(h)
        cases = [(h, self.batch), (other, self.batch)]
        cases += [(other, variant) for variant in self._padded()]
        wanted: list[tuple[Tensor, Mapping[str, Any], Tensor]] = []
        for state, given in cases:
            try:
                z = self._predicted(tail.output(state, last, given))
            except FAILURES:  # the model does not accept this variant
                continue
            wanted.append((state, given, z))
        near: Readout | None = None
        for name, pick in picks(text_config(self.model), looks=looks).items():
            ready = Readout("modules", head, found, pick, name, late)
            try:
                pairs = [(ready.read(tail.given(state), given), z) for state, given, z in wanted]
            except (*FAILURES, EveryDepthError):
                continue
            if all(identical(a, z) for a, z in pairs):
                return replace(ready, exact=True)
            if near is None and all(close(a, z) for a, z in pairs):
                near = ready
        return near

    def _padded(self) -> list[dict[str, Any]]:
        """The batch with padding on the right, and with padding on the left."""
        ids, mask = self.batch.get("input_ids"), self.batch.get("attention_mask")
        pad = getattr(text_config(self.model), "pad_token_id", None)
        if not isinstance(ids, Tensor) or ids.ndim != 2 or ids.shape[1] < 4:
            return []
        found: list[dict[str, Any]] = []
        for where in (slice(ids.shape[1] - 2, None), slice(0, 2)):
            changed = dict(self.batch)
            if isinstance(pad, int):
                changed["input_ids"] = ids.clone()
                changed["input_ids"][-1, where] = pad
            if isinstance(mask, Tensor) and mask.shape == ids.shape:
                changed["attention_mask"] = mask.clone()
                changed["attention_mask"][-1, where] = 0
            found.append(changed)
        return found

    def _task(self) -> Task:
        if not hasattr(self.model, "config"):
            return "classification"
        if self._prediction.ndim <= 2:
            return sample_task(self.model)
        if self.decodes:
            return "seq2seq_lm"
        if self._causal():
            return "causal_lm"
        config, outputs = text_config(self.model), self._prediction.shape[-1]
        classes = outputs == getattr(config, "num_labels", None) != getattr(config, "vocab_size", 0)
        return "token_classification" if classes else "masked_lm"

    def _causal(self) -> bool:
        """Whether a token leaves all earlier predictions unchanged."""
        ids, z = self.batch.get("input_ids"), self._prediction
        generates = getattr(self.model, "can_generate", None)
        if not isinstance(ids, Tensor) or generates is None or not generates():
            return False
        if ids.shape != z.shape[:2] or ids.shape[1] < 2:
            return False
        shared = self._shared_tokens(ids)
        if shared:  # two rows that go on differently tell without another forward
            return close(z[0, :shared], z[1, :shared])
        for other in (ids[:, 0], ids[:, -2]):  # the first may stand for a picture
            changed = torch.cat([ids[:, :-1], other[:, None]], 1)
            try:
                found = self._predicted(self.run({**self.batch, "input_ids": changed}))
            except FAILURES:
                continue
            return close(found[:, :-1], z[:, :-1])
        return True

    def _shared_tokens(self, ids: Tensor) -> int:
        """How many tokens the first two rows share before they differ; 0 if that says nothing."""
        others = [v for k, v in self.batch.items() if isinstance(v, Tensor) and k != "input_ids"]
        if len(ids) < 2 or not all(torch.equal(value[0], value[1]) for value in others):
            return 0
        apart = (ids[0] != ids[1]).nonzero().flatten()
        return int(apart[0]) if len(apart) else 0


def doubled(batch: Mapping[str, Any], rows: int) -> Mapping[str, Any]:
    """The batch with every row twice."""
    return select_rows(batch, torch.arange(rows).repeat(2), rows)


def _skips(chain: Chain) -> dict[int, nn.Module]:
    """Block (from 1) -> the module on its skip, if it has one."""
    firsts = ((number, link.sums[0].skip) for number, link in enumerate(chain.links, start=1))
    return {number: skip.module for number, skip in firsts if skip is not None}


def _changed(chain: Chain, tail: Tail, seen: Sequence[Mapping[str | int, Any]]) -> str | None:
    """Which block's other arguments change if earlier blocks are silent; None if none."""
    carried: Mapping[str | int, int] = {}
    for number, (link, given) in enumerate(zip(chain.links, seen, strict=True), start=1):
        for key, value in link.call.arguments.items():
            own = key in carried or key == (0 if link.call.key is None else link.call.key)
            pairs = zip(tensors_in(value), tensors_in(given.get(key)), strict=False)
            if not own and not all(equal(a, b) for a, b in pairs):
                return f"argument {key!r} of block {number} changes if earlier blocks are silent"
        carried = tail.forms[number - 1].carried
    return None
