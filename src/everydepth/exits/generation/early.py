"""Per-token early exit: each token is read out at the first depth a policy trusts."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from everydepth.errors import SettingError
from everydepth.exits.generation.output import Output
from everydepth.exits.generation.request import Prompt
from everydepth.exits.generation.sampling import Sampling
from everydepth.exits.generation.tape import Tape
from everydepth.stream import ResidualStream


@runtime_checkable
class TokenPolicy(Protocol):
    """Decides which rows leave at a depth. Asked at depths 1 to L - 1, in order, for every token.

    A policy may have an attribute `depths`: the only depths at which it is asked. Each question
    costs a readout, so a few are better than all.
    """

    def exits(self, logits: Float[Tensor, "rows v"], depth: int) -> Bool[Tensor, "rows"]: ...


def decode_with_exits(
    tape: Tape,
    out: Output,
    policy: TokenPolicy,
    sampling: Sampling,
    generator: torch.Generator | None,
) -> list[list[int]]:
    """Decode, and tell the exit depth of each token of each row.

    A batch goes as deep as its deepest row; the others keep the token of their own exit. Blocks
    that were skipped see the tokens they missed when they are next needed, all at once.
    """
    depths = [*_asked(policy, tape.top), tape.top]
    exits: list[list[int]] = [[] for _ in out.tokens]
    while True:
        tokens = left = None
        for depth in depths:
            logits = tape.last_logits(depth)
            drawn = sampling.draw(logits, generator)
            if tokens is None or left is None:
                tokens, left = drawn, torch.zeros_like(drawn)
            here = left == 0
            if depth < tape.top:
                here &= policy.exits(logits, depth)
            tokens = torch.where(here, drawn, tokens)
            left = left.masked_fill(here, depth)
            if bool((left > 0).all()):
                break
        assert tokens is not None
        assert left is not None
        for row, depth in zip(out.active, left.tolist(), strict=True):
            exits[row].append(depth)
        going = out.emit([[token] for token in tokens.tolist()])
        if not out.active:
            return exits
        if going is not None:
            rows = torch.tensor(going, device=tokens.device)
            tape.select(rows)
            tokens = tokens[rows]
        tape.feed(tokens)


def agreement(
    stream: ResidualStream, prompt: Prompt, new: Tensor, lengths: tuple[int, ...], top: int
) -> float:
    """The share of new tokens that depth `top` would have chosen after the same text."""
    length = prompt.ids.shape[1]
    text = torch.cat([prompt.ids, new], 1)[:, :-1]
    real = torch.cat([prompt.real, torch.ones_like(new, dtype=torch.bool)], 1)[:, :-1]
    tape = Tape(stream, text, real, top=top, room=text.shape[1])
    h = tape.advance(top)[:, length - 1 :]
    chosen = torch.stack([stream.readout(h[:, i : i + 1], top, {}).argmax(-1)[:, 0] for i in range(h.shape[1])], 1)
    counted = torch.arange(new.shape[1], device=new.device) < torch.tensor(lengths, device=new.device)[:, None]
    return float((chosen == new)[counted].double().mean())


def _asked(policy: TokenPolicy, top: int) -> list[int]:
    depths = getattr(policy, "depths", None)
    asked = list(range(1, top)) if depths is None else sorted({int(d) for d in depths} - {top})
    wrong = [depth for depth in asked if not 1 <= depth < top]
    if wrong:
        raise SettingError(
            f"the policy asks at depth {wrong[0]}, but the text comes from depth {top}; "
            f"use depths 1 to {top - 1}"
        )
    return asked
