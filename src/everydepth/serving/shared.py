"""One batch for requests of any depth, length and kind: a block runs once for all that need it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from everydepth.exits.generation.visible import attention_bias, windowed
from everydepth.serving.cache import RowCache
from everydepth.serving.courses import Course
from everydepth.stream import Cursor, ResidualStream

CHUNK = 256
"""Tokens of a prompt that are read in one round, so that a long one does not hold up the others."""


class Row:
    """One request on its way: its tokens, how far each depth has come, and what waits there."""

    def __init__(
        self, course: Course, prompt: Sequence[int], limit: int, ends: Sequence[int] = ()
    ) -> None:
        self.course, self.limit, self.ends = course, limit, frozenset(ends)
        self.tokens = list(prompt)
        self.said: list[int] = []
        # How many tokens have reached each depth, the embedding first, and the states that wait.
        self.reached = [0] * (course.top + 1)
        self.waiting: dict[int, Tensor] = {}
        self.index = -1
        self.unread = len(self.tokens)

    @property
    def remaining(self) -> int:
        return self.limit - len(self.said)

    @property
    def done(self) -> bool:
        return self.remaining <= 0 or (bool(self.said) and self.said[-1] in self.ends)

    def take(self, tokens: Sequence[int]) -> list[int]:
        """Add what is certain, up to the limit or an end; what was added."""
        taken: list[int] = []
        for token in tokens:
            if self.done:
                break
            self.said.append(token)
            taken.append(token)
        return taken


@dataclass(frozen=True)
class Work:
    """What one round took: calls of a block, tokens through a block, tokens read out."""

    calls: int = 0
    passes: int = 0
    readouts: int = 0

    def __add__(self, other: Work) -> Work:
        return Work(
            self.calls + other.calls, self.passes + other.passes, self.readouts + other.readouts
        )


@dataclass
class _Group:
    """Rows that bring the same number of tokens to the next block; `end` slots are seen."""

    rows: list[Row]
    count: int
    end: int
    cursor: Cursor
    h: Tensor


class SharedBatch:
    """Rows join and leave between rounds; a round takes every row to where it next says something.

    The tokens of a row are those it would get alone, up to rounding: rows share only the calls.
    Rows of a depth `k` take no part above `k`. Rows that bring different numbers of tokens to a
    block (a prompt, drafts to be judged, tokens that left early and now catch up) cannot be one
    call of it; those that bring the same number are.

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
        self.stream, self.chunk = stream, chunk
        self.cache = RowCache(stream.depth)
        self.rows: list[Row] = []
        self.work = Work()
        """Of the last round."""
        self._windows = tuple(stream.window(depth) for depth in range(1, stream.depth + 1))
        self._dtype = next(stream.model.parameters()).dtype

    def join(self, row: Row) -> None:
        row.index = len(self.rows)
        self.rows.append(row)

    @torch.inference_mode()
    def leave(self, row: Row) -> None:
        """Take a row out; the last one gets its place."""
        last = self.rows.pop()
        if last is not row:
            self.cache.move(last.index, row.index)
            self.rows[row.index], last.index = last, row.index
        row.index = -1
        if not self.rows:
            self.cache.release()

    def clear(self) -> None:
        """Take all rows out."""
        self.rows.clear()
        self.cache.release()

    @torch.inference_mode()
    def round(self) -> list[tuple[Row, list[int]]]:
        """Take every row up once; the certain tokens each got. Rows that are done have left."""
        said: list[tuple[Row, list[int]]] = []
        self.work = Work()
        groups = self._fed()
        depth = 0
        while groups:
            depth += 1
            for group in groups:
                self._step(group, depth)
            if any(depth in row.course.stops for group in groups for row in group.rows):
                groups = self._asked(groups, depth, said)
        for row, _ in said:
            if row.done:
                self.leave(row)
        return said

    # -- one round --------------------------------------------------------------------------------

    def _fed(self) -> list[_Group]:
        """Every row with the tokens that it has not read."""
        counts: dict[int, list[Row]] = {}
        for row in self.rows:
            count = min(row.unread, self.chunk)
            row.unread -= count
            row.reached[0] = len(row.tokens) - row.unread
            counts.setdefault(count, []).append(row)
        return [self._grouped(rows, count, 0) for count, rows in counts.items()]

    def _step(self, group: _Group, depth: int) -> None:
        self._aim(group, depth)
        group.h = self.stream.step(replace(group.cursor, depth=depth - 1, h=group.h)).h
        self.work += Work(calls=1, passes=len(group.rows) * group.count)

    def _asked(
        self, groups: list[_Group], depth: int, said: list[tuple[Row, list[int]]]
    ) -> list[_Group]:
        """Ask the rows that stop here; the groups that climb on."""
        asked = [
            (row, group.h[i : i + 1])
            for group in groups
            for i, row in enumerate(group.rows)
            if depth in row.course.stops and row.unread == 0
        ]
        logits = self._logits(asked, depth)
        stay: set[Row] = set()
        for (row, h), seen in zip(asked, logits, strict=True):
            answer = row.course.see(depth, h, seen, row.remaining)
            if answer is None:
                continue
            stay.add(row)
            self._stay(row, depth, h)
            if answer.dropped:
                del row.tokens[len(row.tokens) - answer.dropped :]
                row.reached = [len(row.tokens)] * len(row.reached)
            row.tokens.append(answer.tokens[-1] if answer.feed is None else answer.feed)
            row.unread = 1
            said.append((row, row.take(answer.tokens)))
        for group in groups:
            for i, row in enumerate(group.rows):
                if row.unread and row not in stay and depth in row.course.stops:
                    # A part of a prompt: read so far, and nothing asked.
                    stay.add(row)
                    self._stay(row, depth, group.h[i : i + 1])
        return self._regrouped(groups, depth, stay)

    def _logits(self, asked: list[tuple[Row, Tensor]], depth: int) -> list[Tensor]:
        """What the asked rows want to know of their last tokens, by one readout."""
        wanted = [row.course.wants(depth) for row, _ in asked]
        if not any(wanted):
            return [h.new_zeros(0, 0) for _, h in asked]
        # After a stop come the tokens that waited there; they are all needed only at the top.
        states = [h[0, h.shape[1] - n :] for (_, h), n in zip(asked, wanted, strict=True) if n]
        tokens = torch.cat(states)[:, None]
        self.work += Work(readouts=len(tokens))
        read = self.stream.readout(tokens, depth, {})[:, 0]
        return list(read.split(wanted))

    def _stay(self, row: Row, depth: int, h: Tensor) -> None:
        if depth < row.course.top:
            before = row.waiting.get(depth)
            row.waiting[depth] = h if before is None else torch.cat([before, h], 1)

    def _regrouped(self, groups: list[_Group], depth: int, stay: set[Row]) -> list[_Group]:
        """Those that climb on, with what waited for them here."""
        parts: dict[int, list[tuple[_Group, list[int], Tensor]]] = {}
        for group in groups:
            going: dict[int, list[int]] = {}
            late: list[tuple[int, Tensor]] = []
            for i, row in enumerate(group.rows):
                if row in stay:
                    continue
                waited = row.waiting.pop(depth, None)
                if waited is None:
                    going.setdefault(group.count, []).append(i)
                else:
                    late.append((i, torch.cat([waited, group.h[i : i + 1]], 1)))
            for count, places in going.items():
                h = group.h if len(places) == len(group.rows) else group.h[places]
                parts.setdefault(count, []).append((group, places, h))
            for i, h in late:
                parts.setdefault(h.shape[1], []).append((group, [i], h))
        return [self._joined(count, found, depth) for count, found in parts.items()]

    def _joined(
        self, count: int, parts: list[tuple[_Group, list[int], Tensor]], depth: int
    ) -> _Group:
        if len(parts) == 1 and parts[0][0].count == count:
            group, places, h = parts[0]
            if len(places) == len(group.rows):
                return group
            cursor = group.cursor.select(torch.tensor(places, device=h.device))
            rows = [group.rows[i] for i in places]
            return _Group(rows, count, group.end, cursor, h)
        rows = [group.rows[i] for group, places, _ in parts for i in places]
        joined = self._grouped(rows, count, depth)
        joined.h = torch.cat([h for _, _, h in parts])
        return joined

    # -- how blocks are called --------------------------------------------------------------------

    def _grouped(self, rows: list[Row], count: int, depth: int) -> _Group:
        """Rows that bring `count` tokens each to the block above `depth`, and how it is called."""
        starts = [row.reached[depth + 1] for row in rows]
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
        # The rows of the cache are picked by `aim`, not by the cursor.
        return _Group(rows, count, end, replace(cursor, cache=None), cursor.h)

    def _aim(self, group: _Group, depth: int) -> None:
        starts = [row.reached[depth] for row in group.rows]
        self.cache.aim([row.index for row in group.rows], starts, group.count, group.end)
        for row, start in zip(group.rows, starts, strict=True):
            row.reached[depth] = start + group.count

    def _mask(self, positions: Tensor, end: int, level: bool) -> Tensor | None:
        """None where the model's own mask is right: every token sees all before it."""
        count = positions.shape[1]
        narrow = any(window is not None and window < end for window in self._windows)
        if level and (end == count or (count == 1 and not narrow)):
            return None
        return self._visible(positions, end, self._windows[0])

    def _visible(self, positions: Tensor, end: int, window: int | None) -> Tensor:
        """Token `p` sees the slots up to `p`, of a window the last ones."""
        slots = torch.arange(end, device=positions.device)
        seen = slots <= positions[..., None]
        if window is not None:
            seen &= slots > positions[..., None] - window
        return attention_bias(seen, self._dtype)
