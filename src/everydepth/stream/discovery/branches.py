"""The residual connections of one block, from the sums that were recorded in it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from everydepth.stream.block import Block, Branch, BranchKind
from everydepth.stream.discovery.chain import Link
from everydepth.stream.discovery.recording import Key, ModuleCall, Operation, Recording
from everydepth.stream.discovery.residual import KEEPS, MOVES, Paths, Sum, base


class NotFound(Exception):
    """A residual connection whose parts are not modules; the message says which."""


@dataclass(frozen=True)
class _Part:
    """One summand of a residual connection."""

    value: Key
    scale: float | Tensor
    out: ModuleCall


class BlockParts:
    """Finds the modules of one block's branches in a recording."""

    def __init__(self, recording: Recording, link: Link) -> None:
        self.recording, self.link = recording, link
        self.inner = [call for call in recording.calls if call.inside(link.call)]
        self.paths = Paths(recording, self.inner)
        self._maps: dict[Key, tuple[nn.Module | None, list[nn.Module]]] = {}
        self.by_output: dict[Key, list[ModuleCall]] = {}
        for call in self.inner:
            if call.given is not None:
                self.by_output.setdefault(call.given, []).append(call)
        self.names = {id(m): name for name, m in link.call.module.named_modules()}

    def block(self) -> Block:
        """The block with its branches."""
        branches: list[Branch] = []
        streams: list[Key] = [each.x for each in self.link.sums]
        read: list[Key] = []
        for each in self.link.sums:
            for place, part in enumerate(self._parts(each)):
                entry, x = self._entry(each, part, streams)
                read.append(x)
                proj, mixing, others = self._projection(part)
                branches.append(
                    Branch(
                        kind=self._kind(part, x),
                        entry=entry.module,
                        out=part.out.module,
                        proj=proj,
                        mixing=mixing,
                        others=others,
                        skip=None if each.skip is None or place else each.skip.module,
                        post=each.post,
                        call=self._number(part.out),
                        dropout=self.recording.drops.get(part.value, 0.0),
                        scale=part.scale,
                        weight=1.0 if place else each.weight,
                        beside=place > 0,
                    )
                )
        parallel = len(branches) > 1 and len(set(read)) == 1
        if not parallel and read != self._in_order():
            raise NotFound("branches read the stream at places other than before their own sum")
        if parallel:
            posts = {id(each.post) for each in self.link.sums if each.post is not None}
            if posts:
                raise NotFound("parallel branches with something applied to a part of the sum")
        plain = self.link.call.plain
        return Block(
            module=self.link.call.module, branches=tuple(branches), parallel=parallel, plain=plain
        )

    def _in_order(self) -> list[Key]:
        return [each.x for each in self.link.sums for _ in self._parts(each)]

    # -- what is added ----------------------------------------------------------------------------

    def _parts(self, each: Sum) -> list[_Part]:
        """The summands of a connection, each given by a module."""
        return list(self._split(each.out, each.scale))

    def _split(self, key: Key, scale: float | Tensor) -> Sequence[_Part]:
        call = self._giver(key)
        if call is not None:
            return [_Part(key, scale, call)]
        value, more = self.paths.factor(key)
        if value != key:
            return self._split(value, scale * more)
        operation = self.recording.producer(key)
        if (
            operation is not None
            and base(operation) in ("add", "add_")
            and len(operation.reads) > 1
        ):
            return [part for side in operation.reads[:2] for part in self._split(side, scale)]
        raise NotFound("what is added to the stream is not the output of a module")

    def _giver(self, key: Key) -> ModuleCall | None:
        """The last module whose first output is this value; views of it count if all else fails."""
        for value in (key, self._view(key)):
            given = self.by_output.get(value, ())
            if given:
                return max(given, key=lambda call: call.order)
        return None

    def _view(self, key: Key) -> Key:
        return self.paths.moved(
            key, frozenset(("view", "_unsafe_view", "reshape", "alias", "unsqueeze", "squeeze"))
        )

    def _number(self, out: ModuleCall) -> int:
        """Which call of its module it is within this pass of the block."""
        before = [c for c in self.inner if c.module is out.module and c.begin <= out.begin]
        return before.index(out)

    # -- where the stream is read -----------------------------------------------------------------

    def _entry(self, each: Sum, part: _Part, streams: Sequence[Key]) -> tuple[ModuleCall, Key]:
        """The first module that reads the stream for this summand, and the value it reads."""
        for x in (each.x, *(s for s in streams if s != each.x)):
            cone = self.paths.cone(part.value, x)
            used = {part.value, *(key for operation in cone for key in operation.reads)}
            readers = [
                call
                for call in self.inner
                if call.state is not None
                and self._reads(call.state, x)
                and call.end <= self._time(each.after)
                and (call is part.out or part.out.inside(call) or not used.isdisjoint(call.made))
            ]
            if readers:
                return min(readers, key=lambda call: (call.begin, -call.order)), x
        if each.x == self.link.call.state:
            # Modules get only a part or an arrangement of the stream: the block reads it whole.
            return self.link.call, each.x
        raise NotFound("no module reads the stream for it")

    def _reads(self, state: Key, x: Key) -> bool:
        while state != x:
            operation = self.recording.producer(state)
            if operation is None or base(operation) not in KEEPS or not operation.reads:
                return False
            state = operation.reads[0]
        return True

    def _time(self, key: Key) -> int:
        return self.recording.producers.get(key, len(self.recording.operations))

    # -- the last linear map ----------------------------------------------------------------------

    def _projection(self, part: _Part) -> tuple[nn.Module, nn.Module | None, tuple[nn.Module, ...]]:
        """The maps that silence a summand: the last linear one, what it mixes by, all others."""
        norm, found = self._last_maps(part.value, 0)
        if norm is not None:
            return norm, found[0] if found else None, ()
        if not found:
            owner = self._owner(part)
            if owner is None:
                raise NotFound("no linear map is the last of it")
            found = [owner]
        family = self._family(found)
        return family[0], None, tuple(family[1:])

    def _family(self, found: Sequence[nn.Module]) -> list[nn.Module]:
        """With one expert all its kin, also those this batch was not sent to."""
        patterns = {re.sub(r"\d+", "#", self.names.get(id(m), "")) for m in found}
        kin = [
            m
            for name, m in ((self.names[id(m)], m) for m in self.link.call.module.modules())
            if re.sub(r"\d+", "#", name) in patterns and "experts" in name
        ]
        return list(dict.fromkeys([*found, *kin]))

    def _owner(self, part: _Part) -> nn.Module | None:
        """The innermost module with parameters of its own that gives the summand."""
        values = {part.value, self._view(part.value)}
        given = [call for value in values for call in self.by_output.get(value, ())]
        own = [c for c in given if next(c.module.parameters(recurse=False), None) is not None]
        return min(own, key=lambda call: call.order).module if own else None

    def _last_maps(self, key: Key, depth: int) -> tuple[nn.Module | None, list[nn.Module]]:
        """Back from a summand to the linear maps whose zeros would make it zero."""
        if key in self._maps or depth > 60:
            return self._maps.get(key, (None, []))
        self._maps[key] = (None, [])  # no way back leads through itself
        self._maps[key] = self._find_maps(key, depth)
        return self._maps[key]

    def _find_maps(self, key: Key, depth: int) -> tuple[nn.Module | None, list[nn.Module]]:
        leaves = [
            call
            for call in self.by_output.get(key, ())
            if call.state is not None
            and (next(call.module.children(), None) is None or _matrix(call.module))
        ]
        for call in sorted(leaves, key=lambda c: c.order):  # the innermost of those that give it
            module = call.module
            assert call.state is not None
            if call.state == call.given:
                continue  # a dropout in eval mode, an identity
            if _matrix(module):
                return None, [module]
            if next(module.parameters(recurse=False), None) is not None or _keeps_zero(
                module, self.recording.values[call.state]
            ):
                if not _keeps_zero(module, self.recording.values[call.state]):
                    return module, self._last_maps(call.state, depth + 1)[1]
                return self._last_maps(call.state, depth + 1)
        operation = self.recording.producer(key)
        if operation is None or not operation.reads:
            return None, []
        name = base(operation)
        if name in MOVES or name in ("sum", "mean", "index_add", "index_add_", "scatter_add_"):
            return self._first_of(operation.reads, depth)
        if name in ("mul", "mul_", "div", "div_"):
            return self._first_of(operation.reads, depth)
        if name in ("add", "add_"):
            both = [self._last_maps(read, depth + 1) for read in operation.reads[:2]]
            if all(found for _, found in both):
                return None, [m for _, found in both for m in found]
        return None, []

    def _first_of(
        self, reads: Sequence[Key], depth: int
    ) -> tuple[nn.Module | None, list[nn.Module]]:
        for read in reads:
            norm, found = self._last_maps(read, depth + 1)
            if found or norm is not None:
                return norm, found
        return None, []

    # -- what it computes -------------------------------------------------------------------------

    def _kind(self, part: _Part, x: Key) -> BranchKind:
        """By its operations: attention mixes tokens by weights, a convolution by a kernel."""
        cone = self.paths.cone(part.value, x)
        names = {base(op) for op in cone}
        attends = any("scaled_dot_product" in name for name in names) or any(
            base(op) in ("_softmax", "softmax") and self.recording.values[op.made[0]].ndim >= 4
            for op in cone
            if op.made
        )
        if attends:
            return "cross_attention" if self._foreign(cone, x) else "attention"
        if "convolution" in names or "mkldnn_convolution" in names or "cudnn_convolution" in names:
            ndim = self.recording.values[x].ndim
            return "conv" if ndim == 4 else "mixer"
        if "cumsum" in names and not names & {"topk", "sort", "argsort", "histc", "bincount"}:
            return "mixer"  # a recurrence over tokens; experts are counted with the others
        return "mlp"

    def _foreign(self, cone: Sequence[Operation], x: Key) -> bool:
        """Whether a matrix product reads a state from outside that is not the stream's."""
        state = self.recording.values[x]
        made = {key for op in cone for key in op.made}
        for op in cone:
            if base(op) not in ("addmm", "mm", "linear", "bmm", "native_layer_norm", "view"):
                continue
            for key in op.reads:
                value = self.recording.values.get(key)
                if (
                    value is not None
                    and key not in made
                    and key != x
                    and value.ndim == 3
                    and state.ndim == 3
                    and value.is_floating_point()
                    and value.shape[0] == state.shape[0]
                    and not isinstance(value, nn.Parameter)
                    and value.shape[-1] > 1
                    and not self._reads(key, x)
                ):
                    return True
        return False


def _matrix(module: nn.Module) -> bool:
    """Holds a map between channels: a matrix, or a kernel."""
    own = module.parameters(recurse=False)
    return any(sum(size > 1 for size in p.shape) > 1 for p in own)


@torch.no_grad()
def _keeps_zero(module: nn.Module, like: Tensor) -> bool:
    """Whether a module gives zero where it is given zero."""
    try:
        output = module(torch.zeros_like(like))
    except (RuntimeError, TypeError, ValueError, IndexError):
        return False
    return isinstance(output, Tensor) and not bool(output.any())
