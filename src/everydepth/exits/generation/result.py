"""What `generate` gives back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from jaxtyping import Int
from torch import Tensor

from everydepth.errors import SettingError


@dataclass(frozen=True, kw_only=True)
class GenerationStats:
    """How the tokens were made.

    seconds: wall clock, the prompt included.
    tokens: new tokens, all rows.
    passes: token-passes of each block, block 1 first; the prompt is included, padding is not.
    draft_lengths: tokens drafted in each round; empty without drafting.
    drafted, accepted: draft tokens that were judged before the first wrong one of their round, it
        included, and those that were right.
    draft_depths: in how many rounds each depth drafted.
    from_draft: whether each token was an accepted draft, row by row; empty without drafting.
    exit_depths: the depth at which each token was read out, row by row.
    agreement: share of tokens the full depth would have chosen after the same text; only with a
        policy, and only if greedy.
    """

    seconds: float
    tokens: int
    passes: tuple[int, ...]
    draft_lengths: tuple[int, ...] = ()
    drafted: int = 0
    accepted: int = 0
    draft_depths: Mapping[int, int] = field(default_factory=dict[int, int])
    compactions: int = 0
    from_draft: tuple[tuple[bool, ...], ...] = ()
    exit_depths: tuple[tuple[int, ...], ...] = ()
    agreement: float | None = None

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    @property
    def acceptance(self) -> float | None:
        """The share of judged drafts that were right."""
        return self.accepted / self.drafted if self.drafted else None

    @property
    def mean_draft_length(self) -> float | None:
        lengths = self.draft_lengths
        return sum(lengths) / len(lengths) if lengths else None

    @property
    def mean_exit_depth(self) -> float | None:
        depths = [depth for row in self.exit_depths for depth in row]
        return sum(depths) / len(depths) if depths else None


@dataclass(frozen=True, kw_only=True)
class Generation:
    """Prompts and what follows them.

    sequences: prompts, left-padded, then the new tokens, right-padded.
    prompt_length: where the new tokens begin.
    lengths: new tokens of each row, the stop token included.
    texts: what the new tokens say, row by row, up to a stop string; empty without a tokenizer.

    >>> found = ed.generate(llama, tokenizer.encode("Once upon"), max_new_tokens=5, eos_token_id=())
    >>> found.lengths, found.stats.tokens
    ((5,), 5)
    """

    sequences: Int[Tensor, "rows length"]
    prompt_length: int
    lengths: tuple[int, ...]
    stats: GenerationStats
    texts: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """What one row says."""
        if len(self.texts) != 1:
            raise SettingError(
                f"{len(self.texts)} texts; use `texts`"
                if self.texts
                else "no text was asked for: pass a tokenizer, or decode `tokens`"
            )
        return self.texts[0]

    def __str__(self) -> str:
        return "\n".join(self.texts) if self.texts else repr(self)

    @property
    def tokens(self) -> list[list[int]]:
        """The new tokens of each row."""
        new = self.sequences[:, self.prompt_length :].tolist()
        return [row[:length] for row, length in zip(new, self.lengths, strict=True)]
