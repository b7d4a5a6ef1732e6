"""One batch for requests of any depth, length and kind; each block runs once for all of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from everydepth.errors import BatchError, UnsupportedModelError
from everydepth.exits.generation.grouped import shared_keys
from everydepth.exits.generation.parts import Parts, attending
from everydepth.exits.generation.rerun import FAILURES, alike, has_slots
from everydepth.exits.generation.sampling import Sampling
from everydepth.exits.generation.visible import attention_bias, windowed
from everydepth.serving.cache import Aim, RowCache
from everydepth.serving.courses import Asked, Course, Said, Team
from everydepth.stream import Cursor, ResidualStream, evaluating, unwrapped
from everydepth.stream.discovery.structure import text_config

CHUNK = 256
"""The most tokens of prompts per round, so that long prompts do not block other requests."""


class Row:
    """A running request: its tokens, and the states that wait at each depth."""

    def __init__(
        self, course: Course, prompt: Sequence[int], limit: int, ends: Sequence[int] = ()
    ) -> None:
        self.course, self.limit, self.ends = course, limit, frozenset(ends)
        self.tokens = list(prompt)
        self.said: list[int] = []
        # The number of tokens that reached each depth (0 is the embedding), and waiting states.
        self.reached = [0] * (course.top + 1)
        self.waiting: dict[int, Tensor] = {}
        # For depths with an exit: the number of tokens it has seen, and states it has not.
        self.looked: dict[int, int] = {}
        self.outside: dict[int, list[Tensor]] = {}
        self.index = -1
        self.unread = len(self.tokens)

    @property
    def remaining(self) -> int:
        return self.limit - len(self.said)

    @property
    def done(self) -> bool:
        return self.remaining <= 0 or (bool(self.said) and self.said[-1] in self.ends)

    def wait(self, depth: int, h: Tensor) -> None:
        """Keep states at this depth until the row continues; at the top they are not needed."""
        if depth < self.course.top:
            known = self.waiting.get(depth)
            self.waiting[depth] = h if known is None else torch.cat([known, h], 1)

    def unseen(self, depth: int) -> int:
        """The number of tokens that passed the exit at this depth without going through it."""
        return self.reached[depth] - self.looked.get(depth, 0)

    def read_ahead(self, tokens: Sequence[int]) -> None:
        """Also read these, which may be taken back."""
        self.tokens.extend(tokens)
        self.unread += len(tokens)

    def hear(self, said: Said) -> list[int]:
        """Apply what its course says; returns the new tokens."""
        if said.dropped:
            del self.tokens[len(self.tokens) - said.dropped :]
            kept = len(self.tokens)
            self.reached = [kept] * len(self.reached)
            self.looked = {depth: min(seen, kept) for depth, seen in self.looked.items()}
            for depth, parts in self.outside.items():
                parts[:] = [torch.cat(parts, 1)[:, : kept - self.looked.get(depth, 0)]]
        self.tokens.append(said.tokens[-1] if said.feed is None else said.feed)
        self.unread = 1
        return self.take(said.tokens)

    def take(self, tokens: Sequence[int]) -> list[int]:
        """Add tokens up to the limit or an end token; returns those added."""
        taken: list[int] = []
        for token in tokens:
            if self.done:
                break
            self.said.append(token)
            taken.append(token)
        return taken


@dataclass(frozen=True)
class Work:
    """The work of one round: block calls, tokens through blocks, tokens read out, readout calls."""

    calls: int = 0
    passes: int = 0
    readouts: int = 0
    reads: int = 0

    def __add__(self, other: Work) -> Work:
        return Work(*map(sum, zip(self.counts, other.counts, strict=True)))

    @property
    def counts(self) -> tuple[int, int, int, int]:
        return self.calls, self.passes, self.readouts, self.reads


def climb(
    depths: Sequence[int], counts: Sequence[int], extra: Mapping[int, int], *, joins: bool = True
) -> Work:
    """The work to take rows to these depths, with `counts[i]` tokens each, without readouts.

    extra: additional blocks that a depth needs, such as a balcony's.
    joins: see `SharedBatch`.
    """
    rows = list(zip(depths, counts, strict=True))
    passes = sum(count * (depth + extra.get(depth, 0)) for depth, count in rows)
    groups = [depths] if joins else [[k for k, n in rows if n == count] for count in {*counts}]
    calls = sum(max(group) + sum(extra.get(k, 0) for k in {*group}) for group in groups)
    return Work(calls, passes)


def fed(rows: Iterable[Row], chunk: int) -> list[tuple[Row, int]]:
    """How many tokens each row reads in a round; prompts have to share a chunk."""
    found: list[tuple[Row, int]] = []
    for row in rows:
        # Drafts of a text are read at once; only prompts are long.
        count = row.unread if row.said else min(row.unread, chunk)
        chunk -= 0 if row.said else count
        if count:
            found.append((row, count))
    return found


def extra_blocks(stream: ResidualStream) -> dict[int, int]:
    """The number of blocks in the balcony of each depth."""
    return {depth: len(blocks) for depth, blocks in stream.exits.items()}


def check_length(stream: ResidualStream, prompt: int, new: int) -> None:
    """Raise an error if a row could get longer than rows of a shared batch may be.

    LongRoPE rotates all tokens of a call by the factors for its largest position, so that a row
    beyond the limit of the short ones would change what other rows say.
    """
    rope = getattr(text_config(unwrapped(stream.model)), "rope_parameters", None) or {}
    # One set of parameters, or one for each type of layer.
    kinds = [kind for kind in (rope, *rope.values()) if isinstance(kind, Mapping)]
    long = [kind for kind in kinds if kind.get("rope_type") == "longrope"]
    most = min((kind["original_max_position_embeddings"] for kind in long), default=None)
    if most is not None and prompt + new > most:
        raise BatchError(
            f"{prompt} prompt tokens + {new} new ones = {prompt + new}, but beyond {most} tokens "
            f"{stream.name} rotates positions in another way, which rows of a batch cannot share; "
            "shorten the prompt, lower max_tokens, or serve the model with --engine vllm"
        )


@dataclass
class _Group:
    """Rows for the next block, those with equally many tokens beside one another.

    ends: the slots that those with a number of tokens see.
    parts: tells attention which tokens belong together, if the numbers differ; `h` is then
        `(1, all tokens, dim)` in place of `(rows, tokens, dim)`.
    """

    rows: list[Row]
    counts: list[int]
    ends: dict[int, int]
    cursor: Cursor
    h: Tensor
    parts: Parts | None

    @property
    def states(self) -> list[Tensor]:
        """Those of each row: `(1, tokens, dim)`."""
        if self.parts is None:
            return list(self.h.split(1))
        return list(self.h.split(self.counts, 1))


class SharedBatch:
    """Rows join and leave between rounds; a round takes every row to its next stop.

    A row gets the tokens it would get alone, up to rounding, and takes no part above its depth.
    A block runs once for all rows, whatever their numbers of tokens, which differ for prompts,
    drafts to judge, and tokens that exited early and now catch up. For that, attention has to tell
    the tokens of different rows apart (`joins`: models with transformers' `sdpa`, tried once per
    model); otherwise only rows with the same number share a call.

    >>> from everydepth.exits.generation.sampling import Sampling
    >>> from everydepth.serving import Plain, Row, SharedBatch
    >>> batch = SharedBatch(ed.as_stream(llama))
    >>> rows = [Row(Plain(depth, Sampling()), [1, 2, 3], limit=4) for depth in (1, 3)]
    >>> for row in rows:
    ...     batch.join(row)
    >>> while batch.rows:
    ...     _ = batch.round()
    >>> rows[1].said == ed.generate(llama, [1, 2, 3], max_new_tokens=4, eos_token_id=()).tokens[0]
    True
    """

    def __init__(
        self, stream: ResidualStream, *, chunk: int = CHUNK, joins: bool | None = None
    ) -> None:
        few = torch.arange(min(4, stream.classes), device=stream.device)
        if not has_slots(stream, few[None]):
            raise UnsupportedModelError(
                "requests share a batch by a cache of keys and values, with a slot for each token, "
                f"and {stream.name} keeps another state; serve it with --engine vllm"
            )
        self.stream, self.chunk = stream, chunk
        self.cache = RowCache(stream.depth + sum(extra_blocks(stream).values()))
        self.rows: list[Row] = []
        self.work = Work()
        """The work of the last round."""
        self._stops: dict[Row, Sequence[int]] = {}  # in this round
        self._windows = tuple(stream.window(depth) for depth in range(1, stream.depth + 1))
        self._dtype, self._device = next(stream.model.parameters()).dtype, stream.device
        self.joins = joined(stream) if joins is None else joins

    def join(self, row: Row) -> None:
        check_length(self.stream, len(row.tokens), row.limit)
        row.index = len(self.rows)
        self.rows.append(row)

    @torch.inference_mode()
    def leave(self, row: Row) -> None:
        """Remove a row; the last one takes its place."""
        last = self.rows.pop()
        if last is not row:
            self.cache.move(last.index, row.index)
            self.rows[row.index], last.index = last, row.index
        row.index = -1
        if self.rows:
            self.cache.trim(max(len(one.tokens) for one in self.rows))
        else:
            self.cache.release()

    def clear(self) -> None:
        """Remove all rows."""
        self.rows.clear()
        self.cache.release()

    @torch.inference_mode()
    @shared_keys()
    def round(self) -> list[tuple[Row, list[int]]]:
        """Run one round; returns each row's new tokens. Rows that are done have left."""
        said: list[tuple[Row, list[int]]] = []
        self.work = Work()
        rows = {row.course: row for row in self.rows}
        for team, courses in _by_team(rows).items():
            for course, tokens in team.begin(courses).items():
                rows[course].read_ahead(tokens)
        self._stops = {row: row.course.stops for row in self.rows}
        asked = {depth for stops in self._stops.values() for depth in stops}
        groups = self._fed()
        depth = 0
        while groups:
            depth += 1
            for group in groups:
                self._step(group, depth)
                self._pass_by(group, depth)
            if depth in asked:
                groups = self._asked(groups, depth, said)
        for row, _ in said:
            if row.done:
                self.leave(row)
        return said

    # -- one round --------------------------------------------------------------------------------

    def _fed(self) -> list[_Group]:
        """The rows with unread tokens; together, prompts have up to a chunk of them."""
        rows, counts = list[Row](), list[int]()
        for row, count in fed(self.rows, self.chunk):
            row.unread -= count
            row.reached[0] = len(row.tokens) - row.unread
            rows.append(row)
            counts.append(count)
        return self._grouped(rows, counts, _reached(rows, 1))

    def _step(self, group: _Group, depth: int) -> None:
        starts = _reached(group.rows, depth)
        for row, start, count in zip(group.rows, starts, group.counts, strict=True):
            row.reached[depth] = start + count
        self.cache.aim(self._aims(group.rows, group.counts, starts, group.ends), group.parts)
        with attending(group.parts):
            group.h = self.stream.step(replace(group.cursor, depth=depth - 1, h=group.h)).h
        self.work += Work(calls=1, passes=sum(group.counts))

    def _pass_by(self, group: _Group, depth: int) -> None:
        """Keep states for an exit, which needs all tokens of a row, but only once it is asked."""
        if depth in self.stream.exits:
            for row, h in zip(group.rows, group.states, strict=True):
                if depth in row.course.reads:
                    row.outside.setdefault(depth, []).append(h)

    def _asked(
        self, groups: list[_Group], depth: int, said: list[tuple[Row, list[int]]]
    ) -> list[_Group]:
        """Ask the rows that stop here; returns the groups that continue."""
        here = {
            row: h
            for group in groups
            for row, h in zip(group.rows, group.states, strict=True)
            if depth in self._stops[row]
        }
        shown = here
        if depth in self.stream.exits:
            shown = {row: h for group in groups for row, h in self._outside(group, depth)}
        # A row with an incomplete prompt is not asked.
        answers = self._answers([(row, h) for row, h in shown.items() if not row.unread], depth)
        stay: set[Row] = set()
        for row, h in here.items():
            answer = answers.get(row.course)
            if answer is None and not row.unread:
                continue  # nothing to say yet: the row continues
            stay.add(row)
            row.wait(depth, h)
            if answer is not None:
                said.append((row, row.hear(answer)))
        return self._going(groups, depth, stay)

    def _outside(self, group: _Group, depth: int) -> list[tuple[Row, Tensor]]:
        """The exit's states of the rows that stop here, for the readout."""
        stops = [i for i, row in enumerate(group.rows) if depth in self._stops[row]]
        if not stops:
            return []
        rows = [group.rows[i] for i in stops]
        counts = [row.unseen(depth) for row in rows]
        states = [torch.cat(row.outside.pop(depth), 1) for row in rows]
        if group.parts is None and counts == [group.counts[i] for i in stops]:
            found = [_picked(group, stops, torch.cat(states))]
        else:  # some have passed this exit before
            starts = [row.looked.get(depth, 0) for row in rows]
            found = self._grouped(rows, counts, starts, states)
        shown = dict(zip(group.rows, group.counts, strict=True))
        return [
            (row, h[:, -shown[row] :])
            for part in found
            for row, h in zip(part.rows, self._exited(part, depth), strict=True)
        ]

    def _exited(self, group: _Group, depth: int) -> list[Tensor]:
        """The exit's output for each row."""
        starts, blocks = [row.looked.get(depth, 0) for row in group.rows], self.stream.exits[depth]
        for row, start, count in zip(group.rows, starts, group.counts, strict=True):
            row.looked[depth] = start + count
        self.cache.aim(self._aims(group.rows, group.counts, starts, group.ends), group.parts)
        with attending(group.parts):
            h = self.stream.exit_state(replace(group.cursor, depth=depth, h=group.h))
        self.work += Work(calls=len(blocks), passes=len(blocks) * sum(group.counts))
        return replace(group, h=h).states

    def _answers(self, asked: list[tuple[Row, Tensor]], depth: int) -> dict[Course, Said | None]:
        seen = {
            row.course: Asked(row.course, h, logits, row.remaining)
            for (row, h), logits in zip(asked, self._logits(asked, depth), strict=True)
        }
        said = {
            course: course.see(depth, one) for course, one in seen.items() if course.team is None
        }
        for team, courses in _by_team(seen).items():
            told = team.see(depth, [seen[course] for course in courses])
            said |= dict(zip(courses, told, strict=True))
        return said

    def _logits(self, asked: list[tuple[Row, Tensor]], depth: int) -> list[Tensor]:
        """The logits of each row's last tokens, as many as it wants, from one readout."""
        wanted = [row.course.wants(depth) for row, _ in asked]
        if not any(wanted):
            return [h.new_zeros(0, 0) for _, h in asked]
        # Rows may also carry tokens that waited at an earlier stop.
        states = [h[0, h.shape[1] - n :] for (_, h), n in zip(asked, wanted, strict=True) if n]
        tokens = torch.cat(states)[:, None]
        self.work += Work(readouts=len(tokens), reads=1)
        read = self.stream.readout(tokens, depth, {})[:, 0]
        return list(read.split(wanted))

    def _going(self, groups: list[_Group], depth: int, stay: set[Row]) -> list[_Group]:
        """The groups that continue, with the states that waited for them here."""
        going = [[i for i, row in enumerate(one.rows) if row not in stay] for one in groups]
        late = any(
            depth in group.rows[i].waiting
            for group, of in zip(groups, going, strict=True)
            for i in of
        )
        if not late and all(
            group.parts is None or len(of) in (0, len(group.rows))
            for group, of in zip(groups, going, strict=True)
        ):
            return [_picked(group, of) for group, of in zip(groups, going, strict=True) if of]
        rows, states = list[Row](), list[Tensor]()
        for group, of in zip(groups, going, strict=True):
            for i, h in enumerate(group.states):
                if i in of:
                    row = group.rows[i]
                    waited = row.waiting.pop(depth, None)
                    rows.append(row)
                    states.append(h if waited is None else torch.cat([waited, h], 1))
        counts = [h.shape[1] for h in states]
        return self._grouped(rows, counts, _reached(rows, depth + 1), states)

    # -- how blocks are called --------------------------------------------------------------------

    def _grouped(
        self,
        rows: Sequence[Row],
        counts: Sequence[int],
        starts: Sequence[int],
        states: Sequence[Tensor] | None = None,
    ) -> list[_Group]:
        """Rows with `counts[i]` tokens each, from slot `starts[i]` on, and with these states.

        One group if attention can tell the tokens of different rows apart; else one per count.
        """
        order = sorted(range(len(rows)), key=counts.__getitem__)
        groups = [list(found) for _, found in groupby(order, counts.__getitem__)]
        if self.joins:
            groups = [order] if order else []
        return [
            self._group(
                [rows[i] for i in of],
                [counts[i] for i in of],
                [starts[i] for i in of],
                None if states is None else [states[i] for i in of],
            )
            for of in groups
        ]

    def _group(
        self, rows: list[Row], counts: list[int], starts: list[int], states: list[Tensor] | None
    ) -> _Group:
        ends = dict[int, int]()
        for start, count in zip(starts, counts, strict=True):
            ends[count] = max(ends.get(count, 0), start + count)
        aims = self._aims(rows, counts, starts, ends)
        ids = [row.tokens[at : at + n] for row, at, n in zip(rows, starts, counts, strict=True)]
        positions = [_positions(aim) for aim in aims]
        parts, first = None, self._windows[0]
        if len(aims) == 1:
            (aim,), (where,) = aims, positions
            given, mask = torch.tensor(ids, device=self._device), self._mask(aim)

            def seen(window: int | None) -> Tensor:
                return self._visible(aim, window)
        else:
            where = torch.cat([part.flatten() for part in positions])[None]
            given = torch.tensor([[token for row in ids for token in row]], device=where.device)
            parts = Parts([(len(aim.rows), aim.count) for aim in aims])
            like = torch.zeros((), dtype=self._dtype, device=where.device)

            def seen(window: int | None) -> Tensor:
                assert parts is not None
                return parts.mask([self._part_mask(aim, window) for aim in aims], like)

            mask = seen(first)
        batch = {"input_ids": given, "position_ids": where, "attention_mask": mask}
        self.cache.aim(aims, parts)
        top = max(row.course.top for row in rows)
        cursor = self.stream.start(batch, cache=self.cache, to=top)
        cursor = windowed(cursor, self._windows, seen)
        h = cursor.h
        if states is not None:
            h = torch.cat(states, 0 if parts is None else 1)
        # `aim` selects the rows of the cache, not the cursor.
        return _Group(rows, counts, ends, replace(cursor, cache=None), h, parts)

    def _aims(
        self,
        rows: Sequence[Row],
        counts: Sequence[int],
        starts: Sequence[int],
        ends: Mapping[int, int],
    ) -> list[Aim]:
        """One for each number of tokens; rows are in that order."""
        found: dict[int, tuple[list[int], list[int]]] = {}
        for row, count, start in zip(rows, counts, starts, strict=True):
            indices, first = found.setdefault(count, ([], []))
            indices.append(row.index)
            first.append(start)
        device = self._device
        return [
            Aim(places, first, count, ends[count], device)
            for count, (places, first) in found.items()
        ]

    def _mask(self, aim: Aim) -> Tensor | None:
        """The attention mask of a call; None if the model's own causal mask is right."""
        whole = aim.end == aim.count
        if aim.level and (whole or (aim.count == 1 and not any(map(aim.beyond, self._windows)))):
            return None
        return self._visible(aim, self._windows[0])

    def _part_mask(self, aim: Aim, window: int | None) -> Tensor | None:
        """That of a part; None if a causal mask is right."""
        if aim.level and aim.count in (1, aim.end) and not aim.beyond(window):
            return None
        return self._visible(aim, window)

    def _visible(self, aim: Aim, window: int | None) -> Tensor:
        """A mask in which token `p` sees the slots up to `p`, or the last `window` of them."""
        positions = _positions(aim)
        slots = torch.arange(aim.end, device=positions.device)
        seen = slots <= positions[..., None]
        if window is not None:
            seen &= slots > positions[..., None] - window
        return attention_bias(seen, self._dtype)


def _reached(rows: Iterable[Row], depth: int) -> list[int]:
    return [row.reached[depth] for row in rows]


def _positions(aim: Aim) -> Tensor:
    return aim.index[1]


def _picked(group: _Group, places: list[int], h: Tensor | None = None) -> _Group:
    """Some rows of a group without parts, or all of any."""
    if len(places) == len(group.rows):
        return group if h is None else replace(group, h=h)
    at = torch.tensor(places, device=group.h.device)
    rows, counts = [group.rows[i] for i in places], [group.counts[i] for i in places]
    h = group.h[at] if h is None else h
    return replace(group, rows=rows, counts=counts, cursor=group.cursor.select(at), h=h)


def _by_team(courses: Iterable[Course]) -> dict[Team, list[Course]]:
    found: dict[Team, list[Course]] = {}
    for course in courses:
        if course.team is not None:
            found.setdefault(course.team, []).append(course)
    return found


# -- which models join rows with different numbers of tokens ---------------------------------------

_joined: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()


class _Noted(Course):
    """Says a fixed token, and notes the logits."""

    def __init__(self, top: int, token: int) -> None:
        super().__init__(top, Sampling())
        self.token, self.logits = token, list[Tensor]()

    def see(self, depth: int, asked: Asked) -> Said | None:
        self.logits.append(asked.logits)
        return Said((self.token,))


def joined(stream: ResidualStream) -> bool:
    """Whether rows with different numbers of tokens may share a call: tried once per model."""
    model = unwrapped(stream.model)
    if model not in _joined:
        _joined[model] = _can_join(stream)
    return _joined[model]


def _can_join(stream: ResidualStream) -> bool:
    kinds = {"full_attention", "sliding_attention"}
    # A simulation asks for any model that has a profile.
    if stream.task != "causal_lm" or stream.attention != "sdpa" or not stream.kinds <= kinds:
        return False
    with evaluating(unwrapped(stream.model)):
        wanted = _tried(stream, joins=False)
        try:
            found = _tried(stream, joins=True)
        except FAILURES:
            return False
    # Predictions that are no numbers cannot be compared; choosing a token raises an error later.
    sure = wanted.numel() > 0 and bool(wanted.isfinite().all())
    return sure and wanted.shape == found.shape and alike(found, wanted)


def _tried(stream: ResidualStream, *, joins: bool) -> Tensor:
    """The logits of two rows, of which one joins while the other writes."""
    batch = SharedBatch(stream, joins=joins)
    courses = [_Noted(stream.depth, token % stream.classes) for token in (1, 2)]
    for course, prompt in zip(courses, ([3, 1], [2, 0, 1]), strict=True):
        batch.join(Row(course, [token % stream.classes for token in prompt], limit=3))
        batch.round()
    batch.round()
    batch.clear()
    return torch.cat([logits for course in courses for logits in course.logits])
