"""Per-token early exit: each token is read out at the first depth a policy trusts."""

from __future__ import annotations

import torch
from torch import Tensor

from everydepth.exits.generation.output import Output
from everydepth.exits.generation.request import Prompt
from everydepth.exits.generation.rerun import tape_for
from everydepth.exits.generation.sampling import Sampling
from everydepth.exits.generation.tape import Tape
from everydepth.exits.policies import NEVER, Memory, Policy
from everydepth.stream import ResidualStream


def decode_with_exits(
    tape: Tape,
    out: Output,
    policy: Policy,
    sampling: Sampling,
    generator: torch.Generator | None,
) -> list[list[int]]:
    """Decode; returns the exit depth of each token of each row.

    A batch goes as deep as its deepest row; the others keep the token of their own exit. Skipped
    blocks catch up on all tokens they missed when they are next needed.
    """
    thresholds = (*policy.thresholds(tape.stream)[: tape.top - 1], -NEVER)
    exits: list[list[int]] = [[] for _ in out.tokens]
    while True:
        tokens = left = None
        memory: Memory = ()
        for depth, threshold in enumerate(thresholds, start=1):
            if threshold == NEVER and not policy.remembers:
                continue
            logits = tape.last_logits(depth)
            drawn = sampling.draw(logits, generator)
            if tokens is None or left is None:
                tokens, left = drawn, torch.zeros_like(drawn)
            certainty, memory = policy.certainty(logits, memory)
            here = (left == 0) & (certainty >= threshold)
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
        tape.feed(tape.continued(going, tokens))


def agreement(
    stream: ResidualStream, prompt: Prompt, new: Tensor, lengths: tuple[int, ...], top: int
) -> float:
    """The share of new tokens that depth `top` would have chosen for the same text."""
    length = prompt.ids.shape[1]
    text = torch.cat([prompt.ids, new], 1)[:, :-1]
    real = torch.cat([prompt.real, torch.ones_like(new, dtype=torch.bool)], 1)[:, :-1]
    tape = tape_for(stream, text, real, top=top, room=text.shape[1])
    chosen = tape.best(top, length - 1)
    counted = (
        torch.arange(new.shape[1], device=new.device)
        < torch.tensor(lengths, device=new.device)[:, None]
    )
    return float((chosen == new)[counted].double().mean())
