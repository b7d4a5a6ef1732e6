"""The branches of a block, from the residual sums recorded in it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from everydepth.stream.block import Block, Branch, BranchKind, Scale, times
from everydepth.stream.discovery.chain import Link
from everydepth.stream.discovery.recording import Key, ModuleCall, Operation, Recording
from everydepth.stream.discovery.residual import KEEPS, MOVES, Paths, Sum, Turned, base, equal


class NotFound(Exception):
    """The modules of a residual connection were not found; the message says why."""


@dataclass(frozen=True)
class _Part:
    """One summand of a residual connection."""

    value: Key
    scale: Scale
    out: ModuleCall
    turn: tuple[int, ...] | None = None


@dataclass(frozen=True)
class _Last:
    """The last map of a summand; if its weights are zero, so is the summand.

    mixing: if it is a norm, which acts on single channels, the linear map before it.
    """

    module: nn.Module
    mixing: nn.Module | None = None


class BlockParts:
    """Finds the modules of one block's branches in a recording."""

    def __init__(self, recording: Recording, link: Link) -> None:
        self.recording, self.link = recording, link
        self.inner = [call for call in recording.calls if call.inside(link.call)]
        self.inner += [link.call] if link.outside else []
        self.paths = Paths(recording, self.inner)
        self._maps: dict[Key, list[_Last]] = {}
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
                        weights=self._last_weights(part, x, (proj, *others)),
                        skip=None if each.skip is None or place else each.skip.module,
                        post=each.post,
                        call=self._number(part.out),
                        dropout=self.recording.drops.get(part.value, 0.0),
                        scale=part.scale,
                        weight=1.0 if place else each.weight,
                        beside=place > 0,
                        turn=self._turn(part, entry, x),
                    )
                )
        parallel = len(branches) > 1 and len(set(read)) == 1
        if not parallel and read != self._in_order():
            raise NotFound("a branch reads the stream elsewhere than right before its own sum")
        if parallel:
            posts = {id(each.post) for each in self.link.sums if each.post is not None}
            if posts:
                raise NotFound("something is applied to a partial sum of parallel branches")
        return Block(
            module=self.link.call.module,
            branches=tuple(branches),
            parallel=parallel,
            plain=self.link.call.plain,
            outside=self.link.outside,
        )

    def _turn(self, part: _Part, entry: ModuleCall, x: Key) -> tuple[int, ...] | None:
        """How `out` is turned; None if `entry` reads the stream turned in the same way."""
        if part.turn is None or entry.state is None or not self._turns(entry.state, x):
            return part.turn
        seen, stream = (self.recording.values[key] for key in (entry.state, x))
        if seen.ndim != len(part.turn):  # then nothing is turned, see `Branch.turned`
            return part.turn
        if not equal(seen.permute(part.turn), stream):
            raise NotFound("a branch reads the stream with other axes than it adds")
        return None

    def _in_order(self) -> list[Key]:
        return [each.x for each in self.link.sums for _ in self._parts(each)]

    # -- what is added ----------------------------------------------------------------------------

    def _parts(self, each: Sum) -> list[_Part]:
        """The summands of a connection, each the output of a module, in call order."""
        return sorted(self._split(each.out, each.scale), key=lambda part: part.out.order)

    def _split(self, key: Key, scale: Scale) -> Sequence[_Part]:
        call = self._giver(key)
        if call is not None:
            return [_Part(key, scale, call)]
        value, more = self.paths.factor(key)
        if value != key:
            return self._split(value, times(scale, more))
        operation = self.recording.producer(key)
        if (
            operation is not None
            and base(operation) in ("add", "add_")
            and len(operation.reads) > 1
        ):
            return [part for side in operation.reads[:2] for part in self._split(side, scale)]
        before, turn = self.paths.turned(key)
        call = None if turn is None else self._giver(before)
        if call is not None:
            return [_Part(before, scale, call, turn)]
        raise NotFound("something added to the stream is not the output of a module")

    def _giver(self, key: Key) -> ModuleCall | None:
        """The last module whose first output is this value, or failing that, a view of it."""
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
        """Which of the calls of its module it is, within this call of the block."""
        before = [c for c in self.inner if c.module is out.module and c.begin <= out.begin]
        return before.index(out)

    # -- where the stream is read -----------------------------------------------------------------

    def _entry(self, each: Sum, part: _Part, streams: Sequence[Key]) -> tuple[ModuleCall, Key]:
        """The first module that reads the stream for this summand, and the value it reads."""
        if isinstance(each.post, Turned) and each.x == self.link.call.state:
            return self.link.call, each.x  # `post` needs the block's own layout
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
            # An identity may also feed the skip.
            readers = [c for c in readers if not isinstance(c.module, nn.Identity)] or readers
            # If the stream is cut into windows before the sum, prefer a reader of windows.
            arranged = [call for call in readers if call.state == each.side]
            if not readers:
                continue
            first = min(arranged or readers, key=lambda call: (call.begin, -call.order))
            if arranged or part.turn is not None or not self._turns(first.state, x):
                return first, x
            break  # it reads the stream with other axes than the sum's
        if each.x == self.link.call.state:
            # Modules receive only parts of the stream; the block receives all of it.
            return self.link.call, each.x
        raise NotFound("no module of the branch reads the whole stream")

    def _reads(self, state: Key, x: Key) -> bool:
        return self._moves(state, x) is not None

    def _turns(self, state: Key | None, x: Key) -> bool:
        """Whether axes of the stream are permuted before a module reads it."""
        moves = () if state is None else self._moves(state, x) or ()
        return not {"permute", "transpose"}.isdisjoint(moves)

    def _moves(self, state: Key, x: Key) -> list[str] | None:
        """The operations from `x` to `state` if all of them only move entries; None otherwise."""
        names: list[str] = []
        while state != x:
            operation = self.recording.producer(state)
            if operation is None or base(operation) not in KEEPS or not operation.reads:
                return None
            names.append(base(operation))
            state = operation.reads[0]
        return names

    def _time(self, key: Key) -> int:
        return self.recording.producers.get(key, len(self.recording.operations))

    # -- the last linear map ----------------------------------------------------------------------

    def _projection(self, part: _Part) -> tuple[nn.Module, nn.Module | None, tuple[nn.Module, ...]]:
        """The maps to zero in a summand: `proj`, `mixing` and `others` of a `Branch`."""
        found = list(dict.fromkeys(self._last_maps(part.value, 0)))
        if not found:  # a Fourier transform, pooling, or weights used by a function
            found = [_Last(self._owner(part) or part.out.module)]
        proj, *others = self._family([last.module for last in found])
        return proj, found[0].mixing, tuple(others)

    def _last_weights(
        self, part: _Part, x: Key, last: Sequence[nn.Module]
    ) -> tuple[nn.Parameter, ...]:
        """If maps hold several matrices each (experts in one module), those applied last."""
        own = {id(p): p for m in last for p in m.parameters(recurse=False)}
        if not any(sum(p.ndim > 2 for p in m.parameters(recurse=False)) > 1 for m in last):
            return ()
        read: dict[int, list[int]] = {}
        for place, op in enumerate(self.paths.cone(part.value, x)):
            for key in op.reads:
                held = self.recording.tensors[self.paths.moved(key, MOVES)[0]]
                if id(held) in own:
                    read.setdefault(id(held), []).append(place)
        matrices = [held for held in read if own[held].ndim > 2]
        if len(matrices) < 2:
            return ()
        final = max(matrices, key=lambda held: max(read[held]))
        # A bias added after it contributes on its own.
        behind = [h for h in read if h not in matrices and max(read[h]) > min(read[final])]
        return tuple(own[held] for held in (final, *behind))

    def _family(self, found: Sequence[nn.Module]) -> list[nn.Module]:
        """The modules, with all other experts of their kind, which this batch may not have used."""
        patterns = {re.sub(r"\d+", "#", self.names.get(id(m), "")) for m in found}
        kin = [
            m
            for name, m in ((self.names[id(m)], m) for m in self.link.call.module.modules())
            if re.sub(r"\d+", "#", name) in patterns and "experts" in name
        ]
        return list(dict.fromkeys([*found, *kin]))

    def _owner(self, part: _Part) -> nn.Module | None:
        """The innermost module with its own parameters that returns the summand."""
        values = {part.value, self._view(part.value)}
        given = [call for value in values for call in self.by_output.get(value, ())]
        own = [c for c in given if next(c.module.parameters(recurse=False), None) is not None]
        return min(own, key=lambda call: call.order).module if own else None

    def _last_maps(self, key: Key, depth: int) -> list[_Last]:
        """The maps that, if zero, make a value zero."""
        if key in self._maps or depth > 60:
            return self._maps.get(key, [])
        self._maps[key] = []  # ends recursion
        self._maps[key] = self._find_maps(key, depth)
        return self._maps[key]

    def _find_maps(self, key: Key, depth: int) -> list[_Last]:
        leaves = [
            call
            for call in self.by_output.get(key, ())
            if call.state is not None
            and (next(call.module.children(), None) is None or _matrix(call.module))
        ]
        for call in sorted(leaves, key=lambda c: c.order):  # the innermost first
            module = call.module
            assert call.state is not None
            if call.state == call.given:
                continue  # a dropout in eval mode, an identity
            if _matrix(module):
                return [_Last(module)]
            if _keeps_zero(module, self.recording.values[call.state]):
                return self._last_maps(call.state, depth + 1)
            if next(module.parameters(recurse=False), None) is not None:
                before = self._last_maps(call.state, depth + 1)
                return [_Last(module, before[0].mixing or before[0].module if before else None)]
        operation = self.recording.producer(key)
        if operation is None or not operation.reads:
            return []
        name = base(operation)
        if name in ("add", "add_", "cat"):  # zero if every part is
            parts = [self._last_maps(read, depth + 1) for read in operation.reads]
            if all(parts):
                return [last for part in parts for last in part]
        if name in MOVES or name in _KEEP_ZERO:
            return next(filter(None, (self._last_maps(r, depth + 1) for r in operation.reads)), [])
        return []

    # -- what it computes -------------------------------------------------------------------------

    def _kind(self, part: _Part, x: Key) -> BranchKind:
        """The kind of a branch, from its operations."""
        cone = self.paths.cone(part.value, x)
        names = {base(op) for op in cone}
        values = self._attended(cone)
        if values:
            own = _computed(cone, {x})
            return "attention" if own.intersection(values) else "cross_attention"
        if any("convolution" in name for name in names):
            ndim = self.recording.values[x].ndim
            return "conv" if ndim == 4 else "mixer"
        if any("fft" in name or "pool" in name for name in names):
            return "mixer"
        # A running sum, or a product of two computed values, mixes tokens, unless a router does it.
        routed = names & {"topk", "sort", "argsort", "histc", "bincount", "argmax", "max"}
        if not routed and ("cumsum" in names or any(self._product(op) for op in cone)):
            return "mixer"
        return "mlp"

    def _attended(self, cone: Sequence[Operation]) -> set[Key]:
        """The values averaged with softmax weights; empty without attention."""
        found: set[Key] = set()
        weights: set[Key] = set()
        for op in cone:
            name = base(op)
            if "scaled_dot_product" in name:
                found.add(op.reads[2])
            elif "softmax" in name:
                weights.update(op.made)
                # Four dimensions: attention weights, however they are used.
                found.update(op.reads if self.recording.values[op.made[0]].ndim > 3 else ())
            elif name in MOVES or name in _WEIGHS:
                weights.update(op.made if weights.intersection(op.reads) else ())
            elif weights.intersection(op.reads) and self._product(op):
                found.update(key for key in op.reads if key not in weights)
        return found

    def _product(self, operation: Operation) -> bool:
        """Whether it is a product of two matrices that are not parameters."""
        if base(operation) not in ("bmm", "baddbmm"):
            return False
        values = (self.recording.values[key] for key in operation.reads[-2:])
        return not any(self.paths.constant(value) for value in values)


# Operations that map zero to zero.
_KEEP_ZERO = frozenset(
    ("sum", "mean", "index_add", "index_add_", "scatter_add_", "mul", "mul_", "div", "div_")
)
# Operations that may be applied to attention weights.
_WEIGHS = frozenset(("mul", "mul_", "div", "div_", "masked_fill", "add", "add_", "where"))


def _computed(cone: Sequence[Operation], start: set[Key]) -> set[Key]:
    """All values computed from `start` by the operations."""
    found = set(start)
    for op in cone:
        if found.intersection(op.reads):
            found.update(op.made)
    return found


def _matrix(module: nn.Module) -> bool:
    """Whether a module holds a matrix or a kernel."""
    own = module.parameters(recurse=False)
    return any(sum(size > 1 for size in p.shape) > 1 for p in own)


@torch.no_grad()
def _keeps_zero(module: nn.Module, like: Tensor) -> bool:
    """Whether a module maps zero to zero."""
    try:
        output = module(torch.zeros_like(like))
    except (RuntimeError, TypeError, ValueError, IndexError):
        return False
    return isinstance(output, Tensor) and not bool(output.any())
