"""One batch for requests of any depth, length and kind; each block runs once for all of them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from everydepth.errors import BatchError, UnsupportedModelError
from everydepth.exits.generation.grouped import shared_keys
from everydepth.exits.generation.rerun import has_slots
from everydepth.exits.generation.visible import attention_bias, windowed
from everydepth.serving.cache import RowCache
from everydepth.serving.courses import Asked, Course, Said, Team
from everydepth.stream import Cursor, ResidualStream, unwrapped
from everydepth.stream.discovery.structure import text_config

CHUNK = 256
"""The most tokens of a prompt per round, so that long prompts do not block other requests."""


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


def climb(depths: Collection[int], count: int, extra: Mapping[int, int]) -> Work:
    """The work to take rows to these depths, with `count` tokens each, without readouts.

    extra: additional blocks that a depth needs, such as a balcony's.
    """
    calls = max(depths) + sum(extra.get(depth, 0) for depth in set(depths))
    return Work(calls, count * sum(depth + extra.get(depth, 0) for depth in depths))


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
    """Rows with `count` tokens each for the next block, which sees the slots up to `end`."""

    rows: list[Row]
    count: int
    end: int
    cursor: Cursor
    h: Tensor


class SharedBatch:
    """Rows join and leave between rounds; a round takes every row to its next stop.

    A row gets the tokens it would get alone, up to rounding, and takes no part above its depth.
    Rows with the same number of tokens for a block share a call; the numbers differ for prompts,
    drafts to judge, and tokens that exited early and now catch up.

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

    def __init__(self, stream: ResidualStream, *, chunk: int = CHUNK) -> None:
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
        self._windows = tuple(stream.window(depth) for depth in range(1, stream.depth + 1))
        self._dtype = next(stream.model.parameters()).dtype

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
        groups = self._fed()
        depth = 0
        while groups:
            depth += 1
            for group in groups:
                self._step(group, depth)
                self._pass_by(group, depth)
            if any(depth in row.course.stops for group in groups for row in group.rows):
                groups = self._asked(groups, depth, said)
        for row, _ in said:
            if row.done:
                self.leave(row)
        return said

    # -- one round --------------------------------------------------------------------------------

    def _fed(self) -> list[_Group]:
        """All rows with their unread tokens, grouped by the number of tokens."""
        counts: dict[int, list[Row]] = {}
        for row in self.rows:
            # Drafts of a text are read at once; only prompts are long.
            count = row.unread if row.said else min(row.unread, self.chunk)
            row.unread -= count
            row.reached[0] = len(row.tokens) - row.unread
            counts.setdefault(count, []).append(row)
        return [self._grouped(rows, count, _reached(rows, 1)) for count, rows in counts.items()]

    def _step(self, group: _Group, depth: int) -> None:
        self._aim(group, depth)
        group.h = self.stream.step(replace(group.cursor, depth=depth - 1, h=group.h)).h
        self.work += Work(calls=1, passes=len(group.rows) * group.count)

    def _pass_by(self, group: _Group, depth: int) -> None:
        """Keep states for an exit, which needs all tokens of a row, but only once it is asked."""
        if depth in self.stream.exits:
            for i, row in enumerate(group.rows):
                if depth in row.course.reads:
                    row.outside.setdefault(depth, []).append(group.h[i : i + 1])

    def _asked(
        self, groups: list[_Group], depth: int, said: list[tuple[Row, list[int]]]
    ) -> list[_Group]:
        """Ask the rows that stop here; returns the groups that continue."""
        here = {
            row: group.h[i : i + 1]
            for group in groups
            for i, row in enumerate(group.rows)
            if depth in row.course.stops
        }
        shown = here
        if depth in self.stream.exits:
            shown = {row: h for group in groups for row, h in self._outside(group, depth).items()}
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
        return self._regrouped(groups, depth, stay)

    def _outside(self, group: _Group, depth: int) -> dict[Row, Tensor]:
        """The exit's states of the rows that stop here, for the readout."""
        stops = [i for i, row in enumerate(group.rows) if depth in row.course.stops]
        level = [i for i in stops if group.rows[i].unseen(depth) == group.count]
        parts = [_picked(group, level)] if level else []
        for i in stops:
            row = group.rows[i]
            if i not in level:  # it has passed this exit before
                seen = row.looked.get(depth, 0)
                parts.append(self._grouped([row], row.unseen(depth), [seen]))
        return {row: h for part in parts for row, h in self._exited(part, group.count, depth)}

    def _exited(self, part: _Group, count: int, depth: int) -> list[tuple[Row, Tensor]]:
        """The exit's output for the last `count` states of each row."""
        rows, blocks = part.rows, len(self.stream.exits[depth])
        starts = [row.looked.get(depth, 0) for row in rows]
        h = torch.cat([torch.cat(row.outside.pop(depth), 1) for row in rows])
        self.cache.aim([row.index for row in rows], starts, part.count, part.end)
        h = self.stream.exit_state(replace(part.cursor, depth=depth, h=h))
        for row, start in zip(rows, starts, strict=True):
            row.looked[depth] = start + part.count
        self.work += Work(calls=blocks, passes=blocks * len(rows) * part.count)
        return [(row, h[i : i + 1, -count:]) for i, row in enumerate(rows)]

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

    def _regrouped(self, groups: list[_Group], depth: int, stay: set[Row]) -> list[_Group]:
        """The groups that continue, with the states that waited for them here."""
        parts: dict[int, list[tuple[_Group, list[int], Tensor]]] = {}
        for group in groups:
            going = [i for i, row in enumerate(group.rows) if row not in stay]
            late = [i for i in going if depth in group.rows[i].waiting]
            level = [i for i in going if depth not in group.rows[i].waiting]
            if level:
                h = group.h if len(level) == len(group.rows) else group.h[level]
                parts.setdefault(group.count, []).append((group, level, h))
            for i in late:
                h = torch.cat([group.rows[i].waiting.pop(depth), group.h[i : i + 1]], 1)
                parts.setdefault(h.shape[1], []).append((group, [i], h))
        return [self._joined(count, found, depth) for count, found in parts.items()]

    def _joined(
        self, count: int, parts: list[tuple[_Group, list[int], Tensor]], depth: int
    ) -> _Group:
        if len(parts) == 1 and parts[0][0].count == count:
            group, places, h = parts[0]
            return replace(_picked(group, places), h=h)
        rows = [group.rows[i] for group, places, _ in parts for i in places]
        joined = self._grouped(rows, count, _reached(rows, depth + 1))
        joined.h = torch.cat([h for _, _, h in parts])
        return joined

    # -- how blocks are called --------------------------------------------------------------------

    def _grouped(self, rows: list[Row], count: int, starts: list[int]) -> _Group:
        """A group of rows with `count` tokens each, from slot `starts[i]` on."""
        end = max(starts) + count
        ids = [row.tokens[at : at + count] for row, at in zip(rows, starts, strict=True)]
        first = torch.tensor(starts, device=self.stream.device)
        positions = first[:, None] + torch.arange(count, device=first.device)
        level = min(starts) == max(starts)
        self.cache.aim([row.index for row in rows], starts, count, end)
        batch = {
            "input_ids": torch.tensor(ids, device=first.device),
            "position_ids": positions,
            "attention_mask": self._mask(positions, end, level),
        }
        top = max(row.course.top for row in rows)
        cursor = self.stream.start(batch, cache=self.cache, to=top)
        cursor = windowed(
            cursor, self._windows, lambda window: self._visible(positions, end, window)
        )
        # `aim` selects the rows of the cache, not the cursor.
        return _Group(rows, count, end, replace(cursor, cache=None), cursor.h)

    def _aim(self, group: _Group, depth: int) -> None:
        starts = _reached(group.rows, depth)
        self.cache.aim([row.index for row in group.rows], starts, group.count, group.end)
        for row, start in zip(group.rows, starts, strict=True):
            row.reached[depth] = start + group.count

    def _mask(self, positions: Tensor, end: int, level: bool) -> Tensor | None:
        """The attention mask; None if the model's own causal mask is right."""
        count = positions.shape[1]
        narrow = any(window is not None and window < end for window in self._windows)
        if level and (end == count or (count == 1 and not narrow)):
            return None
        return self._visible(positions, end, self._windows[0])

    def _visible(self, positions: Tensor, end: int, window: int | None) -> Tensor:
        """A mask in which token `p` sees the slots up to `p`, or the last `window` of them."""
        slots = torch.arange(end, device=positions.device)
        seen = slots <= positions[..., None]
        if window is not None:
            seen &= slots > positions[..., None] - window
        return attention_bias(seen, self._dtype)


def _reached(rows: Iterable[Row], depth: int) -> list[int]:
    return [row.reached[depth] for row in rows]


def _picked(group: _Group, places: list[int]) -> _Group:
    """Some rows of a group."""
    if len(places) == len(group.rows):
        return group
    cursor = group.cursor.select(torch.tensor(places, device=group.h.device))
    rows = [group.rows[i] for i in places]
    return replace(group, rows=rows, cursor=cursor)


def _by_team(courses: Iterable[Course]) -> dict[Team, list[Course]]:
    found: dict[Team, list[Course]] = {}
    for course in courses:
        if course.team is not None:
            found.setdefault(course.team, []).append(course)
    return found
