"""Choose the next token, and judge drafts without changing any token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from everydepth.errors import NonFiniteError, SettingError

COLDEST = 1e-6
"""Lower temperatures count as this one: in float32, 1 over the lowest of them is infinite."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Greedy decoding (`do_sample=False`), or sampling.

    top_k: sample only from the k most likely tokens.
    top_p: sample only from the most likely tokens whose total probability reaches this.
    Applied in this order, after the temperature.
    """

    do_sample: bool = False
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        if not self.temperature > 0:
            raise SettingError(
                f"temperature={self.temperature}; use a number above 0, or do_sample=False for the "
                "most likely token"
            )
        if self.top_k is not None and self.top_k < 1:
            raise SettingError(f"top_k={self.top_k}; use 1 or more, or None for all tokens")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise SettingError(f"top_p={self.top_p}; use a number above 0 and at most 1, or None")
        changed = (self.temperature, self.top_k, self.top_p) != (1.0, None, None)
        if not self.do_sample and changed:
            raise SettingError(
                "temperature, top_k and top_p have no effect with do_sample=False; "
                "pass do_sample=True, or leave them out"
            )

    def probabilities(self, logits: Float[Tensor, "... v"]) -> Float[Tensor, "... v"]:
        """The distribution to sample from."""
        most = logits.amax(-1, keepdim=True)
        check_finite(most)
        logits = logits.float() if logits.dtype != torch.float64 else logits
        # Relative to the largest, which then stays finite at any temperature.
        logits = (logits - most) / max(self.temperature, COLDEST)
        if self.top_k is not None and self.top_k < logits.shape[-1]:
            least = logits.topk(self.top_k).values[..., -1:]
            logits = logits.masked_fill(logits < least, -torch.inf)
        p = logits.softmax(-1)
        if self.top_p is not None and self.top_p < 1:
            ordered, order = p.sort(-1, descending=True)
            # A token stays if those before it do not reach top_p.
            out = ordered.cumsum(-1) - ordered >= self.top_p
            out[..., 0] = False  # in float32, a tiny top_p is 0
            p = p.masked_fill(torch.zeros_like(out).scatter(-1, order, out), 0)
            p = p / p.sum(-1, keepdim=True)
        return p

    def draw(
        self, logits: Float[Tensor, "rows v"], generator: torch.Generator | None
    ) -> Int[Tensor, " rows"]:
        if not self.do_sample:
            most, best = logits.max(-1)
            check_finite(most)
            return best
        return torch.multinomial(self.probabilities(logits), 1, generator=generator)[:, 0]

    def draw_apart(
        self, logits: Float[Tensor, "rows v"], dice: Dice | None
    ) -> Int[Tensor, " rows"]:
        """`draw`, in which each row has its own random numbers; without any, it is greedy."""
        if dice is None:
            return self.draw(logits, None)
        return dice.draw_all(self.probabilities(logits))


def check_finite(most: Tensor) -> None:
    """Raise an error if one of the largest logits is not finite; NaN counts as the largest."""
    if not bool(torch.isfinite(most).all()):
        raise NoToken("the predictions of the next token are NaN or infinite", -1)


class NoToken(NonFiniteError):
    """Raised where the depth of the first NaN is unknown; `generate` then finds it."""


class Dice:
    """The random numbers of each row, from a generator of its own.

    So what a row draws depends neither on other rows nor on how many tokens are drawn at once.
    """

    def __init__(self, generators: Sequence[torch.Generator]) -> None:
        self._of = list(generators)
        self._after: list[list[Tensor]] = []

    @classmethod
    def of(cls, rows: int, generator: torch.Generator | None, device: torch.device) -> Dice:
        """One row draws from the generator itself, several from generators that it seeds.

        generator: None: torch's own.
        """
        if rows == 1 and generator is not None:
            return cls([generator])
        seeds = torch.randint(2**62, (rows,), generator=generator, device=device)
        return cls([torch.Generator(device).manual_seed(seed) for seed in seeds.tolist()])

    def copied(self) -> Dice:
        """The same numbers once more, so that looking ahead does not use them up."""
        return Dice([_copied(generator) for generator in self._of])

    def select(self, rows: Sequence[int]) -> None:
        """Keep only these rows."""
        self._of = [self._of[row] for row in rows]

    def begin(self) -> None:
        """Begin a round, of which `keep` may undo the last draws."""
        self._after = [[] for _ in self._of]

    def keep(self, counts: Sequence[int]) -> None:
        """Undo all but the first `counts[row]` draws of the round."""
        for generator, after, count in zip(self._of, self._after, counts, strict=True):
            generator.set_state(after[count - 1])

    def draw(self, row: int, logits: Float[Tensor, " v"], sampling: Sampling) -> int:
        """The next token of a row, as part of a round."""
        drawn = int(sampling.draw(logits[None], self._of[row]))
        self._after[row].append(self._of[row].get_state())
        return drawn

    def draw_all(self, p: Float[Tensor, "rows v"]) -> Int[Tensor, " rows"]:
        """A token for every row, of these probabilities."""
        each = zip(p, self._of, strict=True)
        return torch.cat([torch.multinomial(row, 1, generator=own) for row, own in each])


def _copied(generator: torch.Generator) -> torch.Generator:
    copy = torch.Generator(generator.device)
    copy.set_state(generator.get_state())
    return copy


@dataclass(frozen=True)
class Draft:
    """One drafted token per row. confidence: the draft's highest probability."""

    tokens: Int[Tensor, " rows"]
    confidence: Float[Tensor, " rows"]


@dataclass(frozen=True)
class Verdict:
    """accepted: the number of drafted tokens each row keeps.
    following: the token after them."""

    accepted: Int[Tensor, " rows"]
    following: Int[Tensor, " rows"]


def judge_greedy(logits: Float[Tensor, "rows n v"], drafts: list[Draft]) -> Verdict:
    """Accept the tokens that full depth would have chosen.

    logits: before each draft, and after the last one.
    """
    most, wanted = logits.max(-1)
    check_finite(most)
    right = wanted[:, :-1] == _tokens_of(drafts, wanted)
    accepted = right.long().cumprod(1).sum(1)
    return Verdict(accepted, _at(wanted, accepted))


def judge_drawn(
    logits: Float[Tensor, "rows n v"], drafts: list[Draft], sampling: Sampling, dice: Dice
) -> Verdict:
    """Accept the tokens that are drawn without drafts.

    So a seed has the same text, however many drafts the rounds have.

    logits: before each draft, and after the last one.
    """
    accepted: list[int] = []
    following: list[int] = []
    dice.begin()
    for row, tokens in enumerate(_tokens_of(drafts, logits[:, 0, 0]).tolist()):
        drawn = dice.draw(row, logits[row, 0], sampling)
        count = 0
        while count < len(tokens) and drawn == tokens[count]:
            count += 1
            drawn = dice.draw(row, logits[row, count], sampling)
        accepted.append(count)
        following.append(drawn)
    return Verdict(*(torch.tensor(each, device=logits.device) for each in (accepted, following)))


def _tokens_of(drafts: list[Draft], rows: Tensor) -> Int[Tensor, "rows drafts"]:
    if not drafts:
        return rows.new_zeros(len(rows), 0, dtype=torch.long)
    return torch.stack([draft.tokens for draft in drafts], 1)


def _at(values: Tensor, index: Tensor) -> Tensor:
    return values[torch.arange(values.shape[0], device=values.device), index]
