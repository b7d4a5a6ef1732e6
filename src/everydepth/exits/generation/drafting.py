"""A cheap readout for drafts from a shallow depth."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from everydepth.exits.generation.sampling import Dice, Draft, Sampling
from everydepth.stream import ResidualStream, plain_value


class DraftHead:
    """The shared readout at the draft's depth, over a list of likely tokens.

    The head of a large vocabulary costs more than a few small blocks. A draft need not know rare
    tokens: the full depth corrects a draft whose token is missing. The list holds the tokens in the
    text so far, those that the full depth found likely, and those that are frequent in `words`, a
    sample of other text. It is made again when the text contains a token that is missing.

    size: the length of the list; None: a sixteenth of a large vocabulary, all of a small one.
    """

    def __init__(
        self,
        stream: ResidualStream,
        depth: int,
        sampling: Sampling,
        size: int | None,
        words: Tensor | None = None,
    ) -> None:
        self._stream, self._depth, self._sampling = stream, depth, sampling
        head, vocabulary = stream.head, stream.classes
        size = max(1024, vocabulary // 16) if size is None else size
        # Only a plain linear map can be cut to some of its rows.
        self.size = size if isinstance(head, nn.Linear) and 2 * size <= vocabulary else None
        self.share = 1.0 if self.size is None else self.size / vocabulary
        """The share of the vocabulary in the list."""
        self._ids: Tensor | None = None
        self._words, self._turn = words, 0

    def see(self, tokens: Tensor, logits: Tensor) -> None:
        """Learn from tokens of the text and from logits of the full depth, `(rows, v)`."""
        if self.size is None:
            return
        if self._ids is None:
            self._likely = torch.zeros(logits.shape[-1], device=logits.device)
            self._known = torch.zeros_like(self._likely, dtype=torch.bool)
            if self._words is not None:
                # The whole sample counts as much as one token of the text itself.
                share = torch.full(self._words.shape, 1 / len(self._words), device=logits.device)
                self._likely.index_add_(0, self._words.to(logits.device), share)
        missing = not bool(self._known[tokens].all())
        # Rows take turns: one row at a time is enough, and costs little.
        row = logits if missing else logits[self._turn % len(logits)][None]
        self._turn += 1
        self._likely += row.float().softmax(-1).sum(0)
        if missing:
            self._likely[tokens] += 1
            self._refresh()

    def draft(self, h: Tensor, dice: Dice | None) -> Draft:
        """Propose the token after a state `(rows, 1, dim)` of the draft's depth.

        dice: the random numbers with which full depth will judge it: from the same ones, it mostly
            draws the same token. None: the likeliest token.
        """
        logits = self._logits(h)[:, 0]
        if dice is None:
            confidence, best = logits.softmax(-1).max(-1)
            return Draft(best if self._ids is None else self._ids[best], confidence)
        p = self._sampling.probabilities(logits)
        confidence = p.max(-1).values
        if self._ids is not None:  # each number belongs to a word of the whole vocabulary
            p = p.new_zeros(len(p), len(self._known)).index_copy_(1, self._ids, p)
        return Draft(dice.draw_all(p), confidence)

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
        bias = getattr(head, "bias", None)  # None, although its type says otherwise
        self._bias = None if bias is None else plain_value(head, "bias")[ids]
        self._known.zero_()[ids] = True
