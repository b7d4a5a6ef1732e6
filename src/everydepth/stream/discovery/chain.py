"""The chains of residual blocks in a recorded forward pass, and which of them predicts."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain as chained
from itertools import groupby

from torch import Tensor, nn

from everydepth.stream.discovery.recording import Key, ModuleCall, Recording
from everydepth.stream.discovery.residual import Paths, Sum, base, equal


@dataclass(frozen=True)
class Link:
    """One block of a chain: the call of a module, and the residual sums from its input on.

    held: the path of the list that holds the block; of a block that none holds, where it is.
    """

    call: ModuleCall
    sums: tuple[Sum, ...]
    held: str

    @property
    def identity(self) -> bool:
        """Every skip passes the state on as it is."""
        return all(each.skip is None for each in self.sums)


@dataclass(frozen=True)
class Chain:
    """Residual blocks in the order in which they are called, each fed by the one before."""

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
        """The value that the last block gives."""
        end = self.links[-1].call.given
        assert end is not None
        return end

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        return tuple(dict.fromkeys(link.call.module for link in self.links))

    @property
    def size(self) -> int:
        """How many parameters its blocks have."""
        own = {id(p): p.numel() for module in self.modules for p in module.parameters()}
        return sum(own.values())

    def ends(self) -> Iterator[Chain]:
        """The chain, the chain without its first list, without its first two, and so on."""
        runs = [tuple(run) for _, run in groupby(self.links, key=lambda link: link.held)]
        for first in range(len(runs)):
            yield Chain(tuple(chained.from_iterable(runs[first:])))


def chains(model: nn.Module, recording: Recording) -> list[Chain]:
    """Every chain of residual blocks, in the order in which they ran."""
    groups = _groups(model, recording) or _apart(model, recording)
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
    return found


def _follows(reach: Reach, first: Chain, then: Chain) -> bool:
    """Whether one list goes on where another ended: stages of one stream."""
    end, start = first.end, then.links[0].call.state
    assert start is not None
    if same(reach.recording, start, end):
        return True
    alike = _pattern(first.paths[-1]) == _pattern(then.paths[0])
    return alike and reach.leads(end, start)


def same(recording: Recording, a: Key | None, b: Key | None) -> bool:
    """Whether two values of a recording are one, or equal."""
    if a is None or b is None:
        return False
    return a == b or equal(recording.values[a], recording.values[b])


def _pattern(path: str) -> str:
    return re.sub(r"\d+", "#", path)


def _groups(model: nn.Module, recording: Recording) -> list[Chain]:
    """Lists of modules whose members are residual: outermost of equals, innermost of stages.

    A list is taken as it is if most of its members pass the state on by identity skips. A member
    that changes the shape (a stage with its downsampling) is not a block: then the lists inside.
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
        """Stages of one kind are all taken as they are, or none: most members decide."""
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
    """Residual modules that no list holds: blocks under names of their own, the innermost ones."""
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


def _called(
    paths: Paths,
    held: str,
    children: Sequence[nn.Module],
    by_module: Mapping[int, Sequence[ModuleCall]],
) -> tuple[list[Link], int]:
    """The residual ones among the calls of a list's members, in order, and how many calls."""
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
    # What another module computed before is no skip of this one, and what needs more than a state
    # cannot be read alone.
    own = found is not None and all(
        s.skip is None or (s.skip.inside(call) and len(s.skip.arguments) == 1) for s in found
    )
    # A bias alone is no branch.
    computed = (not paths.constant(paths.recording.values[s.out]) for s in found or ())
    return found if own and any(computed) else None


def _lists(model: nn.Module) -> Iterator[tuple[str, list[nn.Module]]]:
    """The lists of modules, outermost first; a module called again and again is a list of one."""
    for path, module in model.named_modules():
        if isinstance(module, (nn.ModuleList, nn.Sequential, nn.ModuleDict)):
            yield path, list(module.children())


class Reach:
    """Which values depend on which, in one recording."""

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        self._readers: dict[Key, list[int]] | None = None

    def leads(self, start: Key, end: Key, *, around: Iterable[Key] = ()) -> bool:
        """Whether `end` was computed from `start`, without passing any value of `around`."""
        return end in self.after(start, around=around)

    def after(self, start: Key, *, around: Iterable[Key] = ()) -> set[Key]:
        """All values computed from one."""
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


def skips(recording: Recording) -> bool:
    """Whether any two values that were computed are added, as every residual connection does."""
    for operation in recording.operations:
        if base(operation) in ("add", "add_") and len(operation.reads) > 1:
            a, b = (recording.values[key] for key in operation.reads[:2])
            computed = all(recording.producer(key) is not None for key in operation.reads[:2])
            if computed and a.ndim > 2 and a.shape == b.shape and a.is_floating_point():
                return True
    return False


def predicting(found: Sequence[Chain], recording: Recording, prediction: Tensor) -> list[Chain]:
    """The chains whose end leads to the prediction other than through the blocks of another."""
    reach, goal = Reach(recording), recording.key(prediction)
    result: list[Chain] = []
    for chain in found:
        others = [
            link.call.given
            for other in found
            if other is not chain
            for link in other.links
            if link.call.given is not None
        ]
        if reach.leads(chain.end, goal, around=others):
            result.append(chain)
    return result
