"""A batch of growing sequences, in which a block may be a few tokens behind the block below."""

from __future__ import annotations

import sys
from collections.abc import Collection, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from everydepth.exits.generation.cache import SlotCache
from everydepth.exits.generation.visible import attention_bias, windowed
from everydepth.stream import Cursor, ResidualStream, unwrapped
from everydepth.stream.cursor import Call
from everydepth.stream.taps import first_tensor, hooked, state_in


class Tape:
    """The tokens of a batch, in slots, and the number of slots that each block has seen.

    `feed` appends tokens. `advance(to)` brings every token to depth `to`; each block runs once,
    over all tokens that it has not seen. The state of a token that stops at depth k is kept: the
    blocks above see it together with the next token that goes deeper. So nothing is approximated,
    and no block sees a token twice.

    Rows may keep different numbers of tokens. Slots that a row does not keep are masked for that
    row, and positions are counted per row.
    """

    def __init__(
        self,
        stream: ResidualStream,
        ids: Tensor,
        real: Tensor,
        *,
        top: int,
        room: int,
        read: Collection[int] = (),
    ) -> None:
        """Start with a prompt.

        ids, real: the left-padded prompt, and True at its tokens.
        room: the number of slots to allocate.
        read: the depths below the top that may be read out. An exit there has to see every token,
            since it may attend to all of them; their states are kept until it is first needed.
        """
        self.stream, self.top = stream, top
        # For each exit: the first slot it has not seen, and the states it has not seen.
        self._exits = dict.fromkeys({*read, top} & {*stream.exits}, 0)
        self._outside: dict[int, list[Tensor]] = {depth: [] for depth in self._exits}
        self.cache = SlotCache(stream.depth + sum(map(len, stream.exits.values())), room)
        self._limit = stream.positions or sys.maxsize
        self._windows = tuple(stream.window(depth) for depth in range(1, stream.depth + 1))
        self._narrowest = min((w for w in self._windows if w is not None), default=None)
        self._same_window = len({*self._windows}) == 1
        # A compiled or sharded model cannot be called with our cache.
        self._is_whole = (
            unwrapped(stream.model) is stream.model and top not in self._exits and self._same_window
        )
        self._alike = False
        rows, length = ids.shape
        self._tokens = ids.new_zeros(rows, room)
        self._positions = ids.new_zeros(rows, room)
        self._real = torch.zeros(rows, room, dtype=torch.bool, device=ids.device)
        # The first slot that block l has not seen (l = 0: the embedding), and the states at depth
        # l that block l + 1 has not seen.
        self._seen = [0] * (top + 1)
        self._waiting: list[list[Tensor]] = [[] for _ in range(top + 1)]
        self._cursor: tuple[tuple[int, int], Cursor] | None = None
        self._bias: Tensor | None = None
        self.passes = [0] * top
        """The number of tokens that each block has processed, without padding."""
        self.compactions = 0
        self._tokens[:, :length], self._real[:, :length] = ids, real
        self._positions[:, :length] = (real.cumsum(1) - 1).clamp(min=0)
        self._next = real.sum(1)
        self._kept = [int(n) for n in self._next.tolist()]
        self._ragged = min(self._kept) < length
        self._uneven = False
        self._seen[0] = length

    @property
    def length(self) -> int:
        """The number of slots in use."""
        return self._seen[0]

    @property
    def rows(self) -> int:
        return self._tokens.shape[0]

    @property
    def uneven(self) -> bool:
        """Whether rows have kept different numbers of tokens after the prompt."""
        return self._uneven

    def feed(self, tokens: Tensor) -> None:
        """Append one token to each row."""
        at, end = self.length, self.length + 1
        if end > self._tokens.shape[1]:
            self._grow()
        self._tokens[:, at] = tokens
        # Drafts beyond the end of a row are discarded, but they need some position.
        fits = end <= self._limit
        self._positions[:, at] = self._next if fits else self._next.clamp(max=self._limit - 1)
        self._real[:, at] = True
        self._next = self._next + 1
        self._kept = [n + 1 for n in self._kept]
        self._seen[0] = end

    def advance(self, to: int) -> Tensor:
        """Bring every token to depth `to`; returns the states of those that were not there yet, as
        that depth's readout needs them."""
        h = cursor = None
        for depth in range(1, to + 1):
            first, last = self._seen[depth], self._seen[depth - 1]
            if first == last:
                continue
            states = self._waiting[depth - 1]
            if cursor is None or len(states) > 1:  # else the last step has left it here
                cursor = self._started(first, last)
                if depth > 1:
                    h = states[0] if len(states) == 1 else torch.cat(states, 1)
                    cursor = replace(cursor, depth=depth - 1, h=h)
            cursor = self.stream.step(cursor)
            h = cursor.h
            self._seen[depth], self._waiting[depth - 1] = last, []
            if depth < self.top:
                self._waiting[depth].append(h)
            if depth in self._exits:
                self._outside[depth].append(h)
                h = self._read(depth)[:, first - last :] if depth == to else h
            self.passes[depth - 1] += sum(self._kept) if first == 0 else h.shape[0] * h.shape[1]
        assert h is not None, "nothing was fed after the last call"
        return h

    def catch_up(self, depth: int) -> None:
        """Let the exit at this depth, if there is one, see the tokens it has not seen."""
        if self._outside.get(depth):
            self._read(depth)

    def _read(self, depth: int) -> Tensor:
        """The exit's output for the tokens it has not seen."""
        states, end = self._outside[depth], self._seen[depth]
        cursor = self._started(self._exits[depth], end)
        h = states[0] if len(states) == 1 else torch.cat(states, 1)
        self._exits[depth], self._outside[depth] = end, []
        return self.stream.exit_state(replace(cursor, depth=depth, h=h))

    def logits(self, to: int) -> Tensor:
        """Bring every token to depth `to`, and read out those that were not there yet."""
        return self.stream.readout(self.advance(to), to, {})

    def best(self, to: int, first: int) -> Tensor:
        """The likeliest token after each slot from `first` on; one readout at a time."""
        h = self.advance(to)[:, first:]
        places = h.split(1, dim=1)
        return torch.cat([self.stream.readout(x, to, {}).argmax(-1) for x in places], 1)

    def last_logits(self, to: int) -> Tensor:
        """Bring every token to depth `to`, and read out the last one: `(rows, v)`."""
        if to == self.stream.depth and self._is_plain_step():
            return self._plain_step()
        return self.stream.readout(self.advance(to)[:, -1:], to, {})[:, 0]

    def reject(self, kept: list[int], span: int) -> None:
        """Keep the first `kept[row]` of the last `span` tokens, all of which are at the top."""
        longest = max(kept)
        start = self.length - span
        end = start + longest
        self._kept = [n - span + k for n, k in zip(self._kept, kept, strict=True)]
        if min(kept) < longest:
            counts = torch.tensor(kept, device=self._tokens.device)
            slots = torch.arange(longest, device=counts.device)
            self._real[:, start:end] = slots < counts[:, None]
            self._next = self._next - span + counts
            self._ragged = self._uneven = True
        else:
            self._next = self._next - span + longest
        self._seen = [end] * (self.top + 1)
        self._recall_exits(end)
        self._cursor = self._bias = None
        # Unused slots cost time in every call; moving the others takes as long as a few calls.
        if end - max(self._kept) > max(32, max(self._kept) // 4):
            self._compact()

    def forget(self, count: int) -> None:
        """Remove the last tokens, at whatever depth each of them is."""
        end = self.length - count
        for depth in range(1, self.top):
            first, states = self._seen[depth + 1], self._waiting[depth]
            if states and self._seen[depth] > end:
                self._waiting[depth] = (
                    [torch.cat(states, 1)[:, : end - first]] if first < end else []
                )
        self._seen = [min(seen, end) for seen in self._seen]
        self._next, self._kept = self._next - count, [n - count for n in self._kept]
        self._recall_exits(end)
        self._cursor = self._bias = None

    def _recall_exits(self, end: int) -> None:
        for depth, seen in self._exits.items():
            self._exits[depth], states = min(seen, end), self._outside[depth]
            self._outside[depth] = [torch.cat(states, 1)[:, : end - seen]] if seen < end else []

    def continued(self, going: list[int] | None, tokens: Tensor) -> Tensor:
        """Keep only the rows `going` (None: all); returns their tokens."""
        if going is None:
            return tokens
        rows = torch.tensor(going, device=tokens.device)
        self.select(rows)
        return tokens[rows]

    def select(self, rows: Tensor) -> None:
        """Keep only these rows."""
        kept = rows.tolist()
        self.cache.batch_select_indices(rows)
        self._tokens, self._positions = self._tokens[rows], self._positions[rows]
        self._real, self._next = self._real[rows], self._next[rows]
        self._waiting = [[h[rows] for h in states] for states in self._waiting]
        self._outside = {k: [h[rows] for h in states] for k, states in self._outside.items()}
        self._kept = [self._kept[row] for row in kept]
        self._cursor = self._bias = None

    # -- how blocks are called --------------------------------------------------------------------

    def _is_plain_step(self) -> bool:
        """Whether exactly one token is new to every block, and all blocks need the same mask."""
        at = self.length - 1
        even = at > 0 and all(seen == at for seen in self._seen[1:])
        return even and self._is_whole

    def _plain_step(self) -> Tensor:
        """The model's own forward, which is faster than calling its blocks one by one."""
        at, end = self.length - 1, self.length
        self.cache.at, batch = at, self._batch(at, end)
        with ExitStack() as stack:
            for depth in self._exits:
                stack.enter_context(self._noted(depth, batch))
            output = self.stream.called(batch, self.cache)
        self._seen = [end] * (self.top + 1)
        self.passes = [count + self.rows for count in self.passes]
        return self.stream.prediction(output)[:, -1]

    @contextmanager
    def _noted(self, depth: int, batch: Mapping[str, Any]) -> Generator[None, None, None]:
        """Keep the output of the block at this depth for the exit there."""

        block = self.stream.blocks[depth - 1]

        def see(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            h = block.after(state_in(args, kwargs), first_tensor(output))
            self._outside[depth].append(self.stream.between(h, depth, batch))

        with hooked(block.module.register_forward_hook(see, with_kwargs=True)):
            yield

    def _started(self, at: int, end: int) -> Cursor:
        """A cursor with the calls of all blocks for these slots; blocks above the depth in question
        often follow with the same slots."""
        self.cache.at = at
        if self._cursor is not None and self._cursor[0] == (at, end):
            return self._cursor[1]
        # If every block gets the very same arguments, the first call is enough.
        known = 1 if self._alike else self.top
        cursor = self.stream.start(self._batch(at, end), cache=self.cache, to=known)
        if self._alike:
            cursor = replace(cursor, calls=cursor.calls * self.stream.reach(self.top))
        else:
            cursor = self._windowed(cursor, at, end)
            self._alike = self._same_window and self._are_alike(cursor.calls)
        self._dtype = cursor.h.dtype
        self._cursor = ((at, end), cursor)
        return cursor

    def _are_alike(self, calls: Sequence[Call]) -> bool:
        # Masks that are None for a short text may later differ between blocks of several kinds.
        carries = any(self.stream.carried(depth) for depth in range(1, self.top + 1))
        if carries or len(self.stream.kinds) > 1:
            return False
        first, *others = calls
        return all(first.same_as(call) for call in others)

    def _batch(self, at: int, end: int) -> dict[str, Tensor | None]:
        return {
            "input_ids": self._tokens[:, at:end],
            "position_ids": self._positions[:, at:end],
            "attention_mask": self._mask(at, end),
        }

    def _mask(self, at: int, end: int) -> Tensor | None:
        """The mask: None if every token sees all earlier ones; for the prompt, where tokens are."""
        if at == 0:
            return self._real[:, :end].long() if self._ragged else None
        narrow = self._narrowest is not None and end > self._narrowest
        if end - at == 1 and not narrow:
            return self._seen_by_last(end) if self._ragged else None
        return self._visible(at, end, self._windows[0])

    def _seen_by_last(self, end: int) -> Tensor:
        """As `_visible` for the last token alone, without windows: it sees all slots that its row
        keeps, and these do not change before the next `reject`."""
        if self._bias is None:
            self._bias = attention_bias(self._real[:, None], self._dtype)
            self._bias[..., end - 1 :] = 0
        return self._bias[..., :end]

    def _windowed(self, cursor: Cursor, at: int, end: int) -> Cursor:
        """Give blocks whose window differs from the first one's their own mask."""
        return windowed(cursor, self._windows, lambda window: self._visible(at, end, window))

    def _visible(self, at: int, end: int, window: int | None) -> Tensor:
        """A mask to add to attention scores: 0 where a token is seen, else the lowest number.

        Slots are in the order of the tokens, but distances are measured in positions, because rows
        keep different slots.
        """
        slots = torch.arange(end, device=self._tokens.device)
        seen = (slots <= slots[at:, None])[None]
        if self._ragged:
            seen = seen & self._real[:, None, :end]
        if window is not None:
            positions = self._positions if self._ragged else self._positions[:1]
            seen = seen & (positions[:, None, :end] > positions[:, at:end, None] - window)
        return attention_bias(seen, self._dtype)

    # -- room -------------------------------------------------------------------------------------

    def _grow(self) -> None:
        def doubled(slots: Tensor) -> Tensor:
            return torch.cat([slots, torch.zeros_like(slots)], 1)

        self._tokens, self._positions = doubled(self._tokens), doubled(self._positions)
        self._real, self._bias = doubled(self._real), None

    def _compact(self) -> None:
        """Move the kept tokens of every row to the front."""
        for depth in self._exits:
            self.catch_up(depth)
        length = max(self._kept)
        # Slots that are not kept come first, so that rows end together, as with left padding.
        order = self._real[:, : self.length].long().argsort(dim=1, stable=True)[:, -length:]
        self.cache.compact(order)
        for slots in (self._tokens, self._positions, self._real):
            slots[:, :length] = slots.gather(1, order)
        self._seen = [length] * (self.top + 1)
        self._exits = dict.fromkeys(self._exits, length)
        self._cursor = self._bias = None
        self._ragged = min(self._kept) < length
        self.compactions += 1
