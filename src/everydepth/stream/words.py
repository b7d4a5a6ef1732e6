"""Statistics of every depth's predictions over a large vocabulary, computed block by block."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from everydepth.stream.contract import TOKEN_TASKS, ResidualStream
from everydepth.stream.ordered import can_order, ordered, product

# A product of 2,048 rows (depths times tokens) and 2,048 words runs at a core's full speed, and its
# 16 MB of logits stay in the cache.
ROWS = 2048
WORDS = 2048


def has_plain_weights(head: nn.Module) -> bool:
    """Whether a head is a bare linear map, without adapter, hooks or offloading."""
    if type(head) is not nn.Linear or head.weight.is_meta:
        return False
    return not (head._forward_hooks or head._forward_pre_hooks)  # pyright: ignore[reportPrivateUsage]


def predicts_words(stream: ResidualStream) -> bool:
    """Whether every token predicts a word of a large vocabulary through a bare linear head."""
    tokens = stream.task in TOKEN_TASKS
    return tokens and has_plain_weights(stream.head) and (stream.outputs or 0) >= WORDS


def row_blocks(rows: int, depths: int) -> list[slice]:
    """Slices of the rows such that a slice at all depths has about `ROWS` rows."""
    size = max(1, ROWS // depths)
    return [slice(start, min(start + size, rows)) for start in range(0, rows, size)]


@torch.no_grad()
def word_statistics(
    blocks: Sequence[Float[Tensor, "depth _ dim"]],
    weight: Float[Tensor, "word dim"],
    bias: Float[Tensor, " word"] | None,
    follow: Int[Tensor, " token"],
    names: Collection[str],
) -> dict[str, Tensor]:
    """Fields of `Predictions` for all depths, in one pass over the head's weight.

    blocks: the head's inputs, in blocks of rows. follow: the target of every row.
    names: the fields to compute.
    """
    starts = [0]
    for block in blocks:
        starts.append(starts[-1] + block.shape[1])
    sums = [
        _Sums(block, weight, bias, follow[start : start + block.shape[1]], frozenset(names))
        for block, start in zip(blocks, starts, strict=False)
    ]
    for start in range(0, len(weight), WORDS):
        words = _Words(weight, bias, start)
        for block in sums:
            block.add(words)
    found = [block.found() for block in sums]
    return {name: torch.cat([f[name] for f in found], 1) for name in found[0]}


class _Words:
    """Rows of the head, for some words."""

    def __init__(self, weight: Tensor, bias: Tensor | None, start: int) -> None:
        self.start = start
        self.weight = weight[start : start + WORDS]
        self.bias = None if bias is None else bias[start : start + WORDS]
        self._ordered = ordered(self.weight, ROWS) if can_order(weight) else None

    def logits(self, x: Tensor) -> Tensor:
        """The logits of all rows of `x`, which the caller may change."""
        if self._ordered is not None:
            return product(x, self._ordered, self.bias)
        return torch.nn.functional.linear(x, self.weight, self.bias)


@dataclass(eq=False)
class _Sums:
    """Running statistics of one block of rows."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    follow: Tensor
    names: frozenset[str]
    rows: int = field(init=False)

    def __post_init__(self) -> None:
        depths, rows, dim = self.x.shape
        self.shape = (depths, rows)
        self.x = self.x.reshape(-1, dim)
        self.rows = len(self.x)
        self.wide = torch.float64 if self.x.dtype == torch.float64 else torch.float32
        self.wants_total = bool(self.names & {"loss", "error", "confidence"})
        self.wants_top = bool(self.names & {"top", "margin", "confidence"})
        self.followed = self._followed()
        low = torch.finfo(self.wide).min  # not -inf: the difference of two would be NaN
        self.highest = self.followed.new_full((self.rows,), low)
        self.second = self.highest.clone()
        self.top = self.follow.new_zeros(self.rows)
        self.total = self.highest.new_zeros(self.rows, dtype=torch.float64)
        self.squares, self.rank = self.total.clone(), self.total.clone()
        self.steps = self.total.new_zeros(max(depths - 1, 0), rows)

    def _followed(self) -> Tensor:
        picked = self.weight[self.follow]
        x = self.x.view(*self.shape, -1)
        found = torch.einsum("drk,rk->dr", x.to(self.wide), picked.to(self.wide))
        if self.bias is not None:
            found += self.bias[self.follow].to(self.wide)
        # Rounded as the head would: ranks compare it with logits of that dtype.
        return found.to(self.x.dtype).to(self.wide).flatten()

    def add(self, words: _Words) -> None:
        """Count some words, in the order of the vocabulary."""
        z = words.logits(self.x).to(self.wide)
        if "step" in self.names:
            depths = z.view(*self.shape, -1)
            step = torch.linalg.vector_norm(depths[1:] - depths[:-1], dim=-1)
            self.steps += step.double().square()
        if "rank" in self.names:
            self._rank(z, words.start)
        before = self.highest
        if self.wants_top:
            self._add_top(z, words.start)
        elif self.wants_total and (words.start == 0 or "error" in self.names):
            self.highest = torch.maximum(before, z.amax(1))
        if self.wants_total and not self._add_exponentials(z, before):
            # Only the loss skips the maximum after the first block, and a later logit is so much
            # higher that its exponential overflows.
            z = words.logits(self.x).to(self.wide)
            self.highest = torch.maximum(before, z.amax(1))
            self._add_exponentials(z, before)

    def _add_top(self, z: Tensor, start: int) -> None:
        """Update the two highest logits; few rows have one of them in a later block."""
        known = self.second if "margin" in self.names else self.highest
        rows = (~(z.amax(1) <= known)).nonzero().flatten()  # NaN stays
        before, first, second, top = self.highest[rows], *_two(z[rows], "margin" in self.names)
        self.top[rows] = torch.where(first > before, top + start, self.top[rows])
        self.second[rows] = torch.minimum(before, first).maximum(self.second[rows]).maximum(second)
        self.highest = self.highest.index_copy(0, rows, torch.maximum(before, first))

    def _rank(self, z: Tensor, start: int) -> None:
        place = self.follow.repeat(self.shape[0]) - start
        here = ((place >= 0) & (place < z.shape[1])).nonzero().flatten()
        # The target's own logit, bit for bit: it must not outrank itself.
        z[here, place[here]] = self.followed[here]
        self.rank += (z > self.followed[:, None]).sum(1)

    def _add_exponentials(self, z: Tensor, before: Tensor) -> bool:
        """Add `exp(z - highest)`, in place of `z`; False, and nothing added, if it overflows."""
        e = z.sub_(self.highest[:, None]).exp_()
        sums = e.sum(1)
        if self.highest is before and not bool(torch.isfinite(sums).all()):
            return False
        shrunk = (before - self.highest).double().exp()
        self.total = self.total * shrunk + sums
        if "error" in self.names:
            squares = torch.linalg.vector_norm(e, dim=1).double().square()
            self.squares = self.squares * shrunk.square() + squares
        return True

    def found(self) -> dict[str, Tensor]:
        total = self.highest.double() + self.total.log()
        followed = self.followed.double()
        # ||p - y||^2 = sum p^2 - 2 p_y + 1
        error = self.squares / self.total.square() - 2 * (followed - total).exp() + 1
        rows = {
            "loss": total - followed,
            "error": error.clamp(min=0).sqrt(),
            "confidence": (self.highest.double() - total).exp(),
            "margin": self.highest - self.second,
            "followed": followed,
        }
        values = {name: value.to(self.wide) for name, value in rows.items()}
        values |= {"top": self.top.int(), "rank": self.rank.int()}
        values = {name: value.view(self.shape) for name, value in values.items()}
        values["step"] = self.steps.sqrt().to(self.wide)
        return {name: values[name] for name in self.names}


def _two(z: Tensor, both: bool) -> tuple[Tensor, Tensor, Tensor]:
    """The highest logit of every row, the second highest if `both`, and the highest's index."""
    if not both or z.shape[1] == 1:
        first, place = z.max(1)
        return first, torch.full_like(first, torch.finfo(z.dtype).min), place
    values, places = z.topk(2, 1)
    return values[:, 0], values[:, 1], places[:, 0]
