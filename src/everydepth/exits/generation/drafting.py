"""Drafting: a cheap head for a shallow depth, and how many tokens to draft."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from everydepth.exits.generation.sampling import Draft, Sampling
from everydepth.stream import ResidualStream, plain_value

# Measured on CPUs: calling a block costs as much as reading this many parameters, ...
CALL = 2_000_000
# ... and one more token in a verification this share of the head.
MORE = 0.25


class DraftHead:
    """The shared readout at the draft's depth, over the tokens that are likely here.

    The head of a large vocabulary costs more than a few small blocks. A draft need not know rare
    tokens: one that is missing is only a draft the full depth corrects. The list is made of the
    tokens in the text so far and of those the full depth found likely, and made anew when a token
    turns up that was missing.
    """

    def __init__(
        self, stream: ResidualStream, depth: int, sampling: Sampling, size: int | None
    ) -> None:
        self._stream, self._depth, self._sampling = stream, depth, sampling
        head, vocabulary = stream.head, stream.classes
        size = max(1024, vocabulary // 16) if size is None else size
        # Only a plain linear map can be cut to some of its rows.
        self.size = size if isinstance(head, nn.Linear) and 2 * size <= vocabulary else None
        self._ids: Tensor | None = None

    def see(self, tokens: Tensor, logits: Tensor) -> None:
        """Learn from tokens of the text and from logits of the full depth, `(rows, v)`."""
        if self.size is None:
            return
        if self._ids is None:
            self._likely = torch.zeros(logits.shape[-1], device=logits.device)
            self._known = torch.zeros_like(self._likely, dtype=torch.bool)
        if bool(self._known[tokens].all()):
            return
        self._likely += logits.float().softmax(-1).sum(0)
        self._likely[tokens] += 1
        self._refresh()

    def draft(self, h: Tensor, generator: torch.Generator | None) -> Draft:
        """Propose the token after a state `(rows, 1, dim)` of the draft's depth."""
        logits = self._logits(h)[:, 0]
        if not self._sampling.do_sample:
            confidence, best = logits.softmax(-1).max(-1)
            return Draft(best if self._ids is None else self._ids[best], confidence)
        q = self._sampling.probabilities(logits)
        drawn = torch.multinomial(q, 1, generator=generator)[:, 0]
        tokens = drawn if self._ids is None else self._ids[drawn]
        return Draft(tokens, q.max(-1).values, q, self._ids)

    def _logits(self, h: Tensor) -> Tensor:
        if self._ids is None:
            return self._stream.readout(h, self._depth, {})
        feature = self._stream.feature(h, self._depth, {})
        return linear(self._stream.normed(feature, self._depth), self._weight, self._bias)

    def _refresh(self) -> None:
        assert self.size is not None
        ids = self._likely.topk(self.size).indices.sort().values
        head = self._stream.head
        assert isinstance(head, nn.Linear)
        self._ids, self._weight = ids, plain_value(head, "weight")[ids]
        bias = getattr(head, "bias", None)  # None, though its type says otherwise
        self._bias = None if bias is None else plain_value(head, "bias")[ids]
        self._known.zero_()[ids] = True


class DraftLength:
    """When to stop drafting: when one more token costs more than it is worth.

    With S_i the chance that the first i drafts are all accepted, a round of n drafts gives
    `E_n = S_0 + ... + S_{n-1}` tokens (the last draft, if wrong, is replaced at no cost) and costs
    `C_n = verify + n draft`. Another draft pays if `S_n / draft > E_n / C_n`. The chance of a
    draft is learnt while decoding, for each tenth of its confidence.
    """

    BINS = 10

    def __init__(self, stream: ResidualStream, draft_depth: int, top: int, head: DraftHead) -> None:
        sizes = [_size(block.module) + CALL for block in stream.blocks]
        full = _size(stream.head)
        part = 1.0 if head.size is None else head.size / stream.classes
        exit_ = stream.exits.get(draft_depth)
        beside = 0 if exit_ is None else _size(exit_) + CALL
        self._draft = CALL / 2 + sum(sizes[:draft_depth]) + beside + (part + MORE) * full
        self._verify = CALL / 2 + sum(sizes[draft_depth:top]) + full
        # Two imagined drafts a bin say that the confidence is right.
        centres = [(i + 0.5) / self.BINS for i in range(self.BINS)]
        self._tried, self._right = [2.0] * self.BINS, [2 * c for c in centres]

    def begin(self, rows: int) -> None:
        self._alive = [1.0] * rows
        self._tokens = 0.0
        self._bins: list[list[int]] = []

    def goes_on(self, confidence: Tensor) -> bool:
        """Note the confidences of one draft a row; True if another draft pays."""
        bins = [min(int(c * self.BINS), self.BINS - 1) for c in confidence.tolist()]
        self._bins.append(bins)
        self._tokens += sum(self._alive) / len(self._alive)
        for row, i in enumerate(bins):
            self._alive[row] *= self._right[i] / self._tried[i]
        cost = self._verify + len(self._bins) * self._draft
        alive = sum(self._alive) / len(self._alive)
        return alive * cost > self._tokens * self._draft

    def learn(self, accepted: list[int]) -> None:
        """What became of the drafts since `begin`."""
        for row, count in enumerate(accepted):
            for step, bins in enumerate(self._bins[: count + 1]):
                self._tried[bins[row]] += 1
                self._right[bins[row]] += step < count


def _size(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())
