"""Choose the next token, and judge drafts without changing the distribution of tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
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


def check_finite(most: Tensor) -> None:
    """Raise an error if one of the largest logits is not finite; NaN counts as the largest."""
    if not bool(torch.isfinite(most).all()):
        raise NoToken("the predictions of the next token are NaN or infinite", -1)


class NoToken(NonFiniteError):
    """Raised where the depth of the first NaN is unknown; `generate` then finds it."""


@dataclass(frozen=True)
class Draft:
    """One drafted token per row.

    confidence: the draft's highest probability.
    q: the distribution it was sampled from, over `ids` or the whole vocabulary; None if greedy.
    """

    tokens: Int[Tensor, " rows"]
    confidence: Float[Tensor, " rows"]
    q: Float[Tensor, "rows c"] | None = None
    ids: Int[Tensor, " c"] | None = None


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
    logits: Float[Tensor, "rows n v"],
    drafts: list[Draft],
    sampling: Sampling,
    generator: torch.Generator | None,
) -> Verdict:
    """Accept the tokens that are drawn without drafts, by the same generator.

    One row per generator gets the text of its seed, however many drafts a round has; for that,
    fewer drafts are accepted than by `judge_sampled`, unless they are drawn alike.

    logits: before each draft, and after the last one.
    """
    accepted: list[int] = []
    following: list[int] = []
    for row, tokens in zip(logits, _tokens_of(drafts, logits[:, 0, 0]).tolist(), strict=True):
        drawn = [int(sampling.draw(row[:1], generator))]
        for token, after in zip(tokens, row[1:], strict=True):
            if drawn[-1] != token:
                break
            drawn.append(int(sampling.draw(after[None], generator)))
        accepted.append(len(drawn) - 1)
        following.append(drawn[-1])
    return Verdict(*(torch.tensor(each, device=logits.device) for each in (accepted, following)))


def judge_sampled(
    p: Float[Tensor, "rows n v"], drafts: list[Draft], generator: torch.Generator | None
) -> Verdict:
    """Accept a token x with probability min(1, p(x)/q(x)), or else sample from max(p - q, 0).

    Each token then has the distribution p, whatever q is.

    p: before each draft, and after the last one.
    """
    rows = torch.arange(p.shape[0], device=p.device)
    tokens = _tokens_of(drafts, rows)
    q = torch.stack([p.new_ones(len(rows)), *(_probability_of(draft, rows) for draft in drafts)], 1)
    chance = p[:, :-1].gather(2, tokens[..., None])[..., 0] / q[:, 1:]
    u = torch.rand(chance.shape, dtype=q.dtype, device=q.device, generator=generator)
    right: Bool[Tensor, "rows drafts"] = u < chance
    accepted = right.long().cumprod(1).sum(1)
    rest = _at(p, accepted)
    for row, i in enumerate(accepted.tolist()):
        if i == len(drafts):
            continue  # nothing was rejected
        draft = drafts[i]
        assert draft.q is not None
        if draft.ids is None:
            rest[row] -= draft.q[row]
        else:
            rest[row].index_add_(0, draft.ids, -draft.q[row].to(rest.dtype))
    rest.clamp_(min=0)
    # If p = q up to rounding, nothing remains; such a row was also rejected by rounding.
    rest = torch.where(rest.sum(-1, keepdim=True) > 0, rest, _at(p, accepted))
    return Verdict(accepted, torch.multinomial(rest, 1, generator=generator)[:, 0])


def _tokens_of(drafts: list[Draft], rows: Tensor) -> Int[Tensor, "rows drafts"]:
    if not drafts:
        return rows.new_zeros(len(rows), 0, dtype=torch.long)
    return torch.stack([draft.tokens for draft in drafts], 1)


def _probability_of(draft: Draft, rows: Tensor) -> Tensor:
    assert draft.q is not None
    where = draft.tokens
    if draft.ids is not None:
        where = torch.searchsorted(draft.ids, where)
    return draft.q[rows, where]


def _at(values: Tensor, index: Tensor) -> Tensor:
    return values[torch.arange(values.shape[0], device=values.device), index]
