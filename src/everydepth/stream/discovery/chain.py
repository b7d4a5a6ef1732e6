"""Chains of residual blocks in a recorded forward pass, and which of them predicts."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain as chained
from itertools import groupby

from torch import Tensor, nn

from everydepth.stream.discovery.recording import Key, ModuleCall, Recording
from everydepth.stream.discovery.residual import Paths, Sum, base, equal
from everydepth.stream.discovery.tail import Silent


@dataclass(frozen=True)
class Link:
    """One block of a chain: a module call, and the residual sums from its input to its output.

    held: the path of the list that holds the block, or of the module if none does.
    outside: the model adds the module's output to the state, outside of it.
    """

    call: ModuleCall
    sums: tuple[Sum, ...]
    held: str
    outside: bool = False

    @property
    def given(self) -> Key | None:
        """The value of the state after it."""
        return self.sums[-1].after if self.outside else self.call.given

    @property
    def identity(self) -> bool:
        """Whether every skip is the identity."""
        return all(each.skip is None for each in self.sums)


@dataclass(frozen=True)
class Chain:
    """Residual blocks in call order, each fed by the previous one."""

    links: tuple[Link, ...]

    @property
    def paths(self) -> tuple[str, ...]:
        """The module lists that hold the blocks."""
        return tuple(dict.fromkeys(link.held for link in self.links))

    @property
    def name(self) -> str:
        return " + ".join(self.paths)

    @property
    def end(self) -> Key:
        """The output of the last block."""
        end = self.links[-1].given
        assert end is not None
        return end

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        return tuple(dict.fromkeys(link.call.module for link in self.links))

    @property
    def size(self) -> int:
        """The number of parameters in its blocks."""
        own = {id(p): p.numel() for module in self.modules for p in module.parameters()}
        return sum(own.values())

    def ends(self) -> Iterator[Chain]:
        """The chain, then without its first list, without its first two, and so on."""
        runs = [tuple(run) for _, run in groupby(self.links, key=lambda link: link.held)]
        for first in range(len(runs)):
            yield Chain(tuple(chained.from_iterable(runs[first:])))


def chains(model: nn.Module, recording: Recording) -> list[Chain]:
    """Every chain of residual blocks, in call order."""
    lists = _groups(model, recording)
    groups = lists or _apart(model, recording)
    groups.sort(key=lambda group: group.links[0].call.begin)
    found: list[Chain] = []
    reach = Reach(recording)
    for group in groups:
        for index in range(len(found) - 1, -1, -1):
            if _follows(reach, found[index], group):
                found[index] = Chain(found[index].links + group.links)
                break
        else:
            found.append(group)
    added = [] if lists else _added(model, recording)
    # A module that holds such blocks looks like one block itself.
    return max(found, added, key=lambda each: sum(len(chain.links) for chain in each))


def _follows(reach: Reach, first: Chain, then: Chain) -> bool:
    """Whether one list continues another, as stages of one stream do."""
    end, start = first.end, then.links[0].call.state
    assert start is not None
    if same(reach.recording, start, end):
        return True
    alike = _pattern(first.paths[-1]) == _pattern(then.paths[0])
    return alike and reach.leads(end, start)


def same(recording: Recording, a: Key | None, b: Key | None) -> bool:
    """Whether two values of a recording are identical or equal."""
    if a is None or b is None:
        return False
    return a == b or equal(recording.values[a], recording.values[b])


def _pattern(path: str) -> str:
    return re.sub(r"\d+", "#", path)


def _groups(model: nn.Module, recording: Recording) -> list[Chain]:
    """Lists of residual modules.

    A list is used if most of its members have identity skips. Members that change the shape are
    stages rather than blocks: then the lists inside them are used.
    """
    paths = Paths(recording, [call for call in recording.calls if call.end >= 0])
    by_module: dict[int, list[ModuleCall]] = {}
    for call in paths.calls:
        by_module.setdefault(id(call.module), []).append(call)
    taken: list[Chain] = []
    inside: list[str] = []
    spare: list[Chain] = []
    lists = dict(_lists(model))
    known: dict[str, tuple[list[Link], int]] = {}

    def called(path: str) -> tuple[list[Link], int]:
        if path not in known:
            known[path] = _called(paths, path, lists[path], by_module)
        return known[path]

    def kept(pattern: str) -> int:
        """Positive if lists of this kind are to be used: all or none, as most members decide."""
        alike = [called(other) for other in lists if _pattern(other) == pattern]
        return sum(2 * sum(link.identity for link in links) - count for links, count in alike)

    for path in lists:
        if any(path == done or path.startswith(f"{done}.") for done in inside):
            continue
        links, _ = called(path)
        if not links:
            continue
        chain = Chain(tuple(links))
        if kept(_pattern(path)) > 0:
            taken.append(chain)
            inside.append(path)
        else:
            spare.append(chain)
    for chain in sorted(spare, key=lambda c: -len(c.paths[0])):
        path = chain.paths[0]
        if not any(other == path or other.startswith(f"{path}.") for other in inside):
            taken.append(chain)
            inside.append(path)
    return taken


def _apart(model: nn.Module, recording: Recording) -> list[Chain]:
    """Residual modules outside of lists, as attributes; the innermost ones."""
    paths = Paths(recording, [call for call in recording.calls if call.end >= 0])
    names = {id(module): name for name, module in model.named_modules()}
    links: list[Link] = []
    for call in sorted(paths.calls, key=lambda call: call.order):
        holds = any(link.call.inside(call) for link in links)
        sums = None if holds or not _changes(call) else _sums(paths, call)
        if sums:
            holder, _, name = names[id(call.module)].rpartition(".")
            links.append(Link(call, sums, holder or name))
    return [Chain((link,)) for link in links]


def _added(model: nn.Module, recording: Recording) -> list[Chain]:
    """Modules of lists whose outputs the model itself adds to their inputs, in call order."""
    paths = {id(child): path for path, children in _lists(model) for child in children}
    sums = {
        frozenset(operation.reads): operation.made[0]
        for operation in recording.operations
        if base(operation) == "add" and len(operation.args) == 2 and not operation.kwargs
    }
    found: list[Chain] = []
    reach = Reach(recording)
    for call in sorted(recording.calls, key=lambda call: call.begin):
        if id(call.module) not in paths or not _changes(call) or isinstance(call.module, Silent):
            continue
        assert call.state is not None
        assert call.given is not None
        after = sums.get(frozenset((call.state, call.given)))
        # A dropout of the model's own acts between a module and its sum in training mode.
        between = (c for c in recording.calls if c.given == c.state == call.given)
        drops = call.given in recording.drops or any(c.order > call.order for c in between)
        if after is None or drops or recording.overwritten(call.state):
            continue
        each = Sum(call.state, call.state, call.given, after)
        link = Link(call, (each,), paths[id(call.module)], outside=True)
        for index in range(len(found) - 1, -1, -1):
            if reach.leads(found[index].end, call.state):
                found[index] = Chain((*found[index].links, link))
                break
        else:
            found.append(Chain((link,)))
    return found


def _called(
    paths: Paths,
    held: str,
    children: Sequence[nn.Module],
    by_module: Mapping[int, Sequence[ModuleCall]],
) -> tuple[list[Link], int]:
    """The residual calls of a list's members, in order, and the number of all their calls."""
    called = sorted(
        (
            call
            for child in children
            for call in by_module.get(id(child), ())
            if call.state is not None and call.given is not None
        ),
        key=lambda call: call.begin,
    )
    links = [
        Link(call, sums, held) for call in called if _changes(call) and (sums := _sums(paths, call))
    ]
    return links, len(called)


def _changes(call: ModuleCall) -> bool:
    return call.state is not None and call.given is not None and call.given != call.state


def _sums(paths: Paths, call: ModuleCall) -> tuple[Sum, ...] | None:
    assert call.state is not None
    assert call.given is not None
    found = paths.between(call.state, call.given)
    # A skip must be computed inside this module, from the state alone.
    own = found is not None and all(
        s.skip is None or all(c.inside(call) and len(c.arguments) == 1 for c in s.skip.calls)
        for s in found
    )
    # A bias alone is not a branch.
    computed = (not paths.constant(paths.recording.values[s.out]) for s in found or ())
    return found if own and any(computed) else None


def _lists(model: nn.Module) -> Iterator[tuple[str, list[nn.Module]]]:
    """Containers of modules and their members, outermost first."""
    for path, module in model.named_modules():
        if isinstance(module, (nn.ModuleList, nn.Sequential, nn.ModuleDict)):
            yield path, list(module.children())


class Reach:
    """Which values depend on which, in one recording."""

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        self._readers: dict[Key, list[int]] | None = None

    def leads(self, start: Key, end: Key, *, around: Iterable[Key] = ()) -> bool:
        """Whether `end` was computed from `start` on a path that avoids the values of `around`."""
        return end in self.after(start, around=around)

    def learns(self, start: Key, end: Key) -> bool:
        """Whether parameters take part in computing `end` from `start`."""
        later, todo, seen = self.after(start), [end], {end}
        while todo:
            operation = self.recording.producer(todo.pop())
            for key in () if operation is None else operation.reads:
                tensor = self.recording.tensors[key[0]]
                if tensor.ndim and self.recording.constant(tensor, key) is not None:
                    return True
                if key in later and key not in seen and key != start:
                    seen.add(key)
                    todo.append(key)
        return False

    def after(self, start: Key, *, around: Iterable[Key] = ()) -> set[Key]:
        """All values computed from `start`."""
        if self._readers is None:
            self._readers = {}
            for index, operation in enumerate(self.recording.operations):
                for key in operation.reads:
                    self._readers.setdefault(key, []).append(index)
        blocked, seen, todo = set(around), {start}, [start]
        while todo:
            for index in self._readers.get(todo.pop(), ()):
                for key in self.recording.operations[index].made:
                    if key not in seen and key not in blocked:
                        seen.add(key)
                        todo.append(key)
        return seen


def skips(recording: Recording) -> list[nn.Module]:
    """The innermost modules that add two values that were computed, as a residual block does."""
    found: list[nn.Module] = []
    for index, operation in enumerate(recording.operations):
        if base(operation) in ("add", "add_") and len(operation.reads) > 1:
            a, b = (recording.values[key] for key in operation.reads[:2])
            computed = all(recording.producer(key) is not None for key in operation.reads[:2])
            if computed and a.ndim > 1 and a.shape == b.shape and a.is_floating_point():
                around = [call for call in recording.calls if call.begin <= index < call.end]
                found.append(max(around, key=lambda call: call.level).module)
    return list(dict.fromkeys(found))


def uncalled(model: nn.Module, recording: Recording) -> str | None:
    """The path of a list whose modules ran by their `forward` alone, so that no hook saw them."""
    called = {call.module for call in recording.calls}
    for path, members in _lists(model):
        plain = [m for m in members if not isinstance(m, (nn.ModuleList, nn.Sequential))]
        if plain and called.isdisjoint(plain) and not called.isdisjoint(plain[0].modules()):
            return path
    return None


def predicting(found: Sequence[Chain], recording: Recording, prediction: Tensor) -> list[Chain]:
    """The chains whose end leads to the prediction without passing through another chain."""
    reach, goal = Reach(recording), recording.key(prediction)
    result: list[Chain] = []
    for chain in found:
        others = [
            link.given
            for other in found
            if other is not chain
            for link in other.links
            if link.given is not None
        ]
        if reach.leads(chain.end, goal, around=others):
            result.append(chain)
    return result


def last_values(
    recording: Recording, values: Mapping[str, Key], ends: Sequence[Key]
) -> tuple[str, ...]:
    """Of several values, by name, those computed of the end of a chain and last: no further ones
    are computed of them by weights, nor are they another form of one (its softmax).

    All of them if none is computed of the end of a chain.
    """
    reach = Reach(recording)
    found: dict[str, Key] = {}
    for name, key in values.items():
        late = any(reach.leads(end, key) for end in ends)
        if late and not any(same(recording, key, other) for other in found.values()):
            found[name] = key
    shapes = {name: recording.values[key].shape for name, key in found.items()}
    pairs = [(a, b) for a in found for b in found if a != b and reach.leads(found[a], found[b])]
    learned = {(a, b) for a, b in pairs if reach.learns(found[a], found[b])}
    earlier = {a for a, _ in learned}
    forms = {b for a, b in pairs if (a, b) not in learned and shapes[a] == shapes[b]}
    return tuple(name for name in found if name not in earlier | forms) or tuple(values)[:1]
