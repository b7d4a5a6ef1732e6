"""Per-token early exit: exact where it goes deep, honest about what it gives away."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from tests.helpers.generation import DECODERS, decoder, prompts, reference, references, talkative
from torch import Tensor

from everydepth.errors import PolicyError
from everydepth.exits.generation import generate
from everydepth.exits.identity import identity
from everydepth.exits.policies import Confidence, Memory, Patience, Policy
from everydepth.stream import as_stream

NEW = 14


@dataclass(frozen=True, kw_only=True)
class Whim(Policy):
    """Leave where the likeliest token is a multiple of a number: at all depths, unrelated to
    confidence, which in a random model is low everywhere."""

    kind: ClassVar[str] = "whim"
    threshold: float | tuple[float, ...] = 1.0
    one_in: int = 3

    def certainty(self, logits: Tensor, memory: Memory) -> tuple[Tensor, Memory]:
        return (logits.argmax(-1) % self.one_in == 0).double(), ()

    def leaves(self, logits: Tensor, depth: int) -> bool:
        return bool(self.certainty(logits[None], ())[0] > 0)


@pytest.mark.parametrize("name", DECODERS)
def test_every_decoder_exits_as_it_would_without_a_cache(name: str) -> None:
    model, rows = talkative(decoder(name), quiet_after=1, scale=0.5), prompts(3)
    policy = Whim()
    said = generate(model, rows, max_new_tokens=NEW, policy=policy, eos_token_id=())
    expected = [reference(model, row, NEW, leaves=policy.leaves) for row in rows]
    assert said.tokens == [tokens for tokens, _ in expected]
    assert said.stats.exit_depths == tuple(tuple(exits) for _, exits in expected)
    depths = {depth for row in said.stats.exit_depths for depth in row}
    assert len(depths) > 1  # tokens left at different depths, so blocks had to catch up


def test_blocks_above_every_exit_never_run() -> None:
    model, rows = talkative("Llama-tied-CausalLM-left"), prompts(3)
    only_at_two = (math.inf, 1.0, math.inf)
    said = generate(
        model,
        rows,
        max_new_tokens=NEW,
        policy=Whim(one_in=1, threshold=only_at_two),
        eos_token_id=(),
    )
    assert said.tokens == references(model, rows, NEW, depth=2)
    assert said.stats.passes[2:] == (0, 0)
    assert said.stats.mean_exit_depth == 2


def test_a_policy_that_never_leaves_says_what_the_full_depth_says() -> None:
    model, rows = talkative("GPT2-CausalLM-left"), prompts(3)
    said = generate(
        model, rows, max_new_tokens=NEW, policy=Confidence(threshold=1.0), eos_token_id=()
    )
    assert said.tokens == references(model, rows, NEW)
    assert said.stats.agreement == 1
    assert said.stats.mean_exit_depth == 4


def test_agreement_is_the_share_of_tokens_the_full_depth_would_choose() -> None:
    model, rows = talkative("Llama-tied-CausalLM-left", quiet_after=1, scale=0.6), prompts(3)
    said = generate(model, rows, max_new_tokens=NEW, policy=Whim(), eos_token_id=())
    same = [
        reference(model, row + tokens[:i], 1)[0][0] == token
        for row, tokens in zip(rows, said.tokens, strict=True)
        for i, token in enumerate(tokens)
    ]
    assert said.stats.agreement == pytest.approx(sum(same) / len(same))
    assert 0 < said.stats.agreement < 1


def test_rows_that_stop_leave_the_batch() -> None:
    model, rows = talkative("Llama-tied-CausalLM-left", quiet_after=1, scale=0.5), prompts(4)
    policy = Whim()
    free = reference(model, rows[0], NEW, leaves=policy.leaves)[0]
    said = generate(model, rows, max_new_tokens=NEW, policy=policy, eos_token_id=free[3])
    expected = [reference(model, r, NEW, leaves=policy.leaves, stop=free[3])[0] for r in rows]
    assert said.tokens == expected
    assert min(said.lengths) < max(said.lengths)
    assert tuple(map(len, said.stats.exit_depths)) == said.lengths


def test_patience_counts_the_depths_of_one_token_and_starts_again_at_the_next() -> None:
    model, rows = talkative("Llama-tied-CausalLM-left", quiet_after=1), prompts(3)
    said = generate(
        model, rows, max_new_tokens=NEW, policy=Patience(threshold=1.0), eos_token_id=()
    )

    def expected(row: list[int]) -> tuple[list[int], list[int]]:
        before: list[int] = []

        def leaves(logits: Tensor, depth: int) -> bool:
            before.append(int(logits.argmax()))
            return depth > 1 and before[-1] == before[-2]

        return reference(model, row, NEW, leaves=leaves)

    assert said.tokens == [expected(row)[0] for row in rows]
    assert said.stats.exit_depths == tuple(tuple(expected(row)[1]) for row in rows)


def test_a_policy_for_another_number_of_depths_is_refused() -> None:
    model = talkative("Llama-tied-CausalLM-left")
    with pytest.raises(PolicyError, match="thresholds for 3 depths, but LlamaForCausalLM has 4"):
        generate(model, prompts(1), policy=Confidence(threshold=(0.5, 0.5)))


def test_a_policy_of_another_model_is_refused() -> None:
    policy = Confidence(threshold=0.5, model=identity(as_stream(talkative("GPT2-CausalLM-left"))))
    with pytest.raises(PolicyError, match=r"calibrated on GPT2LMHeadModel.*this is Llama"):
        generate(talkative("Llama-tied-CausalLM-left"), prompts(1), policy=policy)


def test_sampling_with_a_policy_reports_no_agreement() -> None:
    model = talkative("Llama-tied-CausalLM-left")
    said = generate(model, prompts(2), policy=Whim(), do_sample=True, seed=0)
    assert said.stats.agreement is None
    assert torch.is_tensor(said.sequences)
