"""Per-token early exit: exact where it goes deep, honest about what it gives away."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from everydepth.errors import SettingError
from everydepth.exits.generation import generate
from tests.exits.generation.helpers import prompts, reference, references, talkative
from tests.exits.generation.test_generate import DECODERS, decoder

NEW = 14


@dataclass(frozen=True)
class Whim:
    """Leave where the likeliest token and the depth happen to fit: at all depths, unrelated to
    confidence, which in a random model is low everywhere."""

    one_in: int
    depths: Sequence[int] | None = None

    def exits(self, logits: Tensor, depth: int) -> Tensor:
        return (logits.argmax(-1) + depth) % self.one_in == 0

    def leaves(self, logits: Tensor, depth: int) -> bool:
        asked = self.depths is None or depth in self.depths
        return asked and bool(self.exits(logits[None], depth)[0])


@pytest.mark.parametrize("name", DECODERS)
def test_every_decoder_exits_as_it_would_without_a_cache(name: str) -> None:
    model, rows = talkative(decoder(name), quiet_after=1, scale=0.5), prompts(3)
    policy = Whim(3)
    said = generate(model, rows, max_new_tokens=NEW, policy=policy, eos_token_id=())
    expected = [reference(model, row, NEW, leaves=policy.leaves) for row in rows]
    assert said.tokens == [tokens for tokens, _ in expected]
    assert said.stats.exit_depths == tuple(tuple(exits) for _, exits in expected)
    depths = {depth for row in said.stats.exit_depths for depth in row}
    assert len(depths) > 1  # tokens left at different depths, so blocks had to catch up


def test_blocks_above_every_exit_never_run() -> None:
    model, rows = talkative("Llama-tied-CausalLM-left"), prompts(3)
    said = generate(model, rows, max_new_tokens=NEW, policy=Whim(1, [2]), eos_token_id=())
    assert said.tokens == references(model, rows, NEW, depth=2)
    assert said.stats.passes[2:] == (0, 0)
    assert said.stats.mean_exit_depth == 2


def test_a_policy_that_never_leaves_says_what_the_full_depth_says() -> None:
    model, rows = talkative("GPT2-CausalLM-left"), prompts(3)
    said = generate(model, rows, max_new_tokens=NEW, policy=Whim(10**6), eos_token_id=())
    assert said.tokens == references(model, rows, NEW)
    assert said.stats.agreement == 1
    assert said.stats.mean_exit_depth == 4


def test_agreement_is_the_share_of_tokens_the_full_depth_would_choose() -> None:
    model, rows = talkative("Llama-tied-CausalLM-left", quiet_after=1, scale=0.6), prompts(3)
    said = generate(model, rows, max_new_tokens=NEW, policy=Whim(3), eos_token_id=())
    same = [
        reference(model, row + tokens[:i], 1)[0][0] == token
        for row, tokens in zip(rows, said.tokens, strict=True)
        for i, token in enumerate(tokens)
    ]
    assert said.stats.agreement == pytest.approx(sum(same) / len(same))
    assert 0 < said.stats.agreement < 1


def test_rows_that_stop_leave_the_batch() -> None:
    model, rows = talkative("Llama-tied-CausalLM-left", quiet_after=1, scale=0.5), prompts(4)
    policy = Whim(3)
    free = reference(model, rows[0], NEW, leaves=policy.leaves)[0]
    said = generate(model, rows, max_new_tokens=NEW, policy=policy, eos_token_id=free[3])
    expected = [reference(model, r, NEW, leaves=policy.leaves, stop=free[3])[0] for r in rows]
    assert said.tokens == expected
    assert min(said.lengths) < max(said.lengths)
    assert tuple(map(len, said.stats.exit_depths)) == said.lengths


def test_a_policy_that_asks_beyond_the_depth_is_refused() -> None:
    model = talkative("Llama-tied-CausalLM-left")
    with pytest.raises(SettingError, match="asks at depth 7, but the text comes from depth 4; use"):
        generate(model, prompts(1), policy=Whim(1, [2, 7]))


def test_sampling_with_a_policy_reports_no_agreement() -> None:
    model = talkative("Llama-tied-CausalLM-left")
    said = generate(model, prompts(2), policy=Whim(3), do_sample=True, seed=0)
    assert said.stats.agreement is None
    assert torch.is_tensor(said.sequences)
