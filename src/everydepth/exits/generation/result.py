"""The result of `generate`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from jaxtyping import Int
from torch import Tensor

from everydepth.errors import SettingError


@dataclass(frozen=True, kw_only=True)
class GenerationStats:
    """Statistics of a generation.

    seconds: wall-clock time, including the prompt.
    tokens: the number of new tokens, over all rows.
    passes: tokens processed by each block, from block 1 on, including the prompt but not padding.
    draft_lengths: tokens drafted in each round; empty without drafting.
    drafted, accepted: draft tokens up to and including the first wrong one of each round, and those
        of them that were right.
    draft_depths: the number of rounds in which each depth drafted; 0 is the text itself.
    from_draft: for each row, whether each token was an accepted draft; empty without drafting.
    exit_depths: for each row, the depth at which each token was read out.
    agreement: the share of tokens that full depth would have chosen for the same text; only for
        greedy decoding with a policy.
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
    """Prompts and their continuations.

    sequences: the prompts, left-padded, and the new tokens, right-padded.
    prompt_length: the position at which new tokens begin.
    lengths: the number of new tokens of each row, including the stop token.
    texts: the new text of each row, up to a stop string; empty without a tokenizer.

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
        """The new text, if there is one row."""
        if len(self.texts) != 1:
            raise SettingError(
                f"there are {len(self.texts)} texts; use `texts`"
                if self.texts
                else "there is no text without a tokenizer; pass tokenizer=, or decode `tokens`"
            )
        return self.texts[0]

    def __str__(self) -> str:
        return "\n".join(self.texts) if self.texts else repr(self)

    @property
    def tokens(self) -> list[list[int]]:
        """The new tokens of each row."""
        new = self.sequences[:, self.prompt_length :].tolist()
        return [row[:length] for row, length in zip(new, self.lengths, strict=True)]
