"""Requests of any kind in one batch get the tokens that they get alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import transformers as hf
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.helpers.generation import DECODERS, decoder, talkative
from tests.zoo import VOCABULARY

import everydepth as ed
from everydepth.errors import BatchError, UnsupportedModelError
from everydepth.exits.generation.parts import Parts
from everydepth.exits.generation.sampling import Sampling
from everydepth.serving import (
    DepthTeam,
    Drafting,
    Exiting,
    Plain,
    Request,
    Row,
    Scheduler,
    Served,
    SharedBatch,
    TextTeam,
    application,
)
from everydepth.serving.cache import RowCache
from everydepth.serving.shared import joined
from everydepth.stream import ResidualStream, as_stream

KINDS = (
    *("greedy", "drawn", "drafted", "quoted", "exiting", "drawn exiting"),
    *("drawn drafted", "drawn quoted"),
)
POLICY = ed.Confidence(threshold=0.2)
Teams = dict[int, DepthTeam | TextTeam]
Load = list[tuple[str, int, list[int], int]]


def course(
    stream: ResidualStream,
    kind: str,
    depth: int,
    seed: int,
    prompt: list[int],
    limit: int,
    teams: Teams,
) -> Any:
    """How a row climbs, and what `generate` is told to do the same."""
    sampling, told, generator = Sampling(), {}, None
    if kind.startswith("drawn"):
        sampling = Sampling(do_sample=True, temperature=0.8, top_k=20)
        told = {"do_sample": True, "temperature": 0.8, "top_k": 20, "seed": seed}
        generator = torch.Generator().manual_seed(seed)
    if kind.endswith("exiting"):
        way = Exiting(stream, POLICY, stream.depth, sampling, generator)
        return way, told | {"policy": POLICY}
    draft = min(depth, stream.depth - 1) if kind.endswith("drafted") else 0
    if kind in ("drawn drafted", "drawn quoted"):
        # A seed means the text without drafts.
        of = DepthTeam if draft else TextTeam
        own = of(stream, draft, stream.depth, sampling, generator, always=True)
        return Drafting(own, prompt=prompt, tokens=limit), told
    if kind in ("drafted", "quoted"):
        if draft not in teams:
            team = DepthTeam if draft else TextTeam
            teams[draft] = team(stream, draft, stream.depth, always=True)
        return Drafting(teams[draft], prompt=prompt, tokens=limit), {"draft_depth": draft}
    return Plain(depth, sampling, generator), told | {"depth": depth}


def check(name: str, load: Load, pause: int, chunk: int) -> None:
    check_model(talkative(decoder(name)), load, pause, chunk)


def check_model(model: torch.nn.Module, load: Load, pause: int, chunk: int) -> None:
    """Rows join one after the other, `pause` rounds apart."""
    stream = as_stream(model)
    batch, teams = SharedBatch(stream, chunk=chunk), Teams()
    waiting, rows, rounds = list(enumerate(load)), [], 0
    while waiting or batch.rows:
        if waiting and rounds % pause == 0:
            seed, (kind, depth, prompt, limit) = waiting.pop(0)
            way, told = course(stream, kind, min(depth, stream.depth), seed, prompt, limit, teams)
            row = Row(way, prompt, limit, stream.end_tokens)
            rows.append((row, prompt, limit, told))
            batch.join(row)
        batch.round()
        rounds += 1
    for row, prompt, limit, told in rows:
        alone = ed.generate(model, prompt, max_new_tokens=limit, **told)
        assert row.said == alone.tokens[0], told
    assert batch.cache.bytes == 0  # nobody is left, and nothing is held


requests = st.tuples(
    st.sampled_from(KINDS),
    st.integers(1, 3),
    st.lists(st.integers(3, VOCABULARY - 1), min_size=1, max_size=9),
    st.integers(1, 8),
)


@settings(max_examples=8, deadline=None, derandomize=True)
@given(load=st.lists(requests, min_size=1, max_size=6), pause=st.integers(1, 3))
def test_every_mix_of_requests_gives_each_the_tokens_it_gets_alone(load: Load, pause: int) -> None:
    check(DECODERS[0], load, pause, chunk=4)


@settings(max_examples=8, deadline=None, derandomize=True)
@given(load=st.lists(requests, min_size=1, max_size=6), pause=st.integers(1, 3))
def test_every_mix_looks_from_the_balconies_of_a_model(load: Load, pause: int) -> None:
    check_model(with_balconies(), load, pause, chunk=4)


def with_balconies() -> torch.nn.Module:
    """Balconies at two of three depths, of two blocks each, that say something of their own."""
    torch.manual_seed(0)
    net = ed.balcony(talkative(decoder(DECODERS[0])), [1, 2], blocks=2).eval()
    for parameter in net.parameters():
        if parameter.requires_grad:
            parameter.data += 0.1 * torch.randn_like(parameter)
    return net


@pytest.mark.parametrize("name", DECODERS[1::2])
def test_all_kinds_share_a_batch_on_every_decoder(name: str) -> None:
    load = [
        (kind, depth, [3 + (7 * i + depth) % (VOCABULARY - 3) for i in range(length)], 6)
        for kind, depth, length in zip(
            KINDS * 2, (1, 2, 1, 3, 3, 1, 2, 1) * 2, range(1, 17), strict=True
        )
    ]
    check(name, load, pause=2, chunk=5)


def test_many_shallow_rows_and_few_deep_ones_leave_in_any_order() -> None:
    model = talkative(decoder(DECODERS[0]))
    stream = as_stream(model)
    batch = SharedBatch(stream)
    # The deep row comes first: what is deep has room for few rows, what is shallow for many.
    depths = (stream.depth, *(1,) * 9, stream.depth)
    rows = [
        Row(Plain(depth, Sampling()), [3 + i, 4], limit=2 + 5 * i % 7)
        for i, depth in enumerate(depths)
    ]
    for row in rows:
        batch.join(row)
        batch.round()
    while batch.rows:
        batch.round()
    for i, (row, depth) in enumerate(zip(rows, depths, strict=True)):
        told = {"max_new_tokens": 2 + 5 * i % 7, "depth": depth, "eos_token_id": ()}
        assert row.said == ed.generate(model, [3 + i, 4], **told).tokens[0]


def test_a_block_runs_once_for_all_rows_that_need_it() -> None:
    stream = as_stream(talkative(decoder(DECODERS[0])))
    batch = SharedBatch(stream)
    for depth in (1, 2, stream.depth, stream.depth):
        batch.join(Row(Plain(depth, Sampling()), [5, 6, 7], limit=4))
    # A part of each block: the block itself is also called to learn how it is called.
    calls = {next(block.module.children()): 0 for block in stream.blocks}
    batch.round()
    hooks = [
        module.register_forward_hook(lambda module, *_: calls.update({module: calls[module] + 1}))
        for module in calls
    ]
    batch.round()
    for hook in hooks:
        hook.remove()
    assert set(calls.values()) == {1}
    assert batch.work.calls == stream.depth
    assert batch.work.passes == 1 + 2 + 2 * stream.depth
    assert batch.work.readouts == 4


def test_a_block_runs_once_though_rows_read_different_numbers_of_tokens() -> None:
    model = talkative(decoder(DECODERS[0]))
    stream = as_stream(model)
    prompts = [[3 + i] * length for i, length in enumerate((4, 1, 7, 4))]
    for joins, calls in ((True, 1), (False, 3)):
        batch = SharedBatch(stream, joins=joins)
        rows = [Row(Plain(stream.depth, Sampling()), prompt, limit=5) for prompt in prompts]
        batch.join(rows[0])
        batch.round()
        for row in rows[1:]:
            batch.join(row)
        batch.round()  # one writes, three read their prompts
        assert batch.work.calls == calls * stream.depth
        assert batch.work.passes == (1 + 1 + 7 + 4) * stream.depth
        while batch.rows:
            batch.round()
        for row, prompt in zip(rows, prompts, strict=True):
            alone = ed.generate(model, prompt, max_new_tokens=5, eos_token_id=())
            assert row.said == alone.tokens[0]


def test_prompts_share_a_chunk_so_that_many_of_them_block_nobody() -> None:
    model = talkative(decoder(DECODERS[0]))
    stream = as_stream(model)
    batch = SharedBatch(stream, chunk=4)
    first = Row(Plain(stream.depth, Sampling()), [3, 4], limit=12)
    rows = [Row(Plain(stream.depth, Sampling()), [5 + i] * 9, limit=2) for i in range(3)]
    batch.join(first)
    batch.round()
    for row in rows:
        batch.join(row)
    while not all(row.said for row in rows):
        before = len(first.said)
        batch.round()
        assert len(first.said) == before + 1
        assert batch.work.passes <= (4 + len(batch.rows)) * stream.depth
    while batch.rows:
        batch.round()
    for row in rows:
        alone = ed.generate(model, row.tokens[:9], max_new_tokens=2, eos_token_id=())
        assert row.said == alone.tokens[0]


def test_rows_whose_attention_does_not_tell_them_apart_get_calls_of_their_own() -> None:
    assert joined(as_stream(talkative(decoder(DECODERS[0]))))
    other = talkative(decoder(DECODERS[0]))
    other.config._attn_implementation = "eager"
    assert not SharedBatch(as_stream(other)).joins
    check_model(other, [("greedy", 2, [3] * n, 6) for n in (5, 2, 1, 5)], pause=1, chunk=4)


@pytest.mark.parametrize("wrong", ["keys are changed", "masks are copied"])
def test_attention_that_does_something_of_its_own_is_found_out(wrong: str) -> None:
    model = talkative(decoder("Llama-untied"))
    attended = Parts.attend

    def other(self: Parts, attention: Any, module: Any, query: Any, mask: Any, **more: Any) -> Any:
        if wrong == "masks are copied":
            return attended(self, attention, module, query, mask.clone(), **more)
        assert self.found is not None
        self.found = [(2 * keys, values) for keys, values in self.found]
        return attended(self, attention, module, query, mask, **more)

    with patch.object(Parts, "attend", other):
        assert not joined(as_stream(model))


def test_a_row_that_leaves_early_leaves_the_others_as_they_were() -> None:
    model = talkative(decoder(DECODERS[0]))
    batch = SharedBatch(as_stream(model))
    rows = [Row(Plain(2, Sampling()), [3, 4, 5 + i], limit=6) for i in range(3)]
    for row in rows:
        batch.join(row)
    batch.round()
    batch.leave(rows[0])
    while batch.rows:
        batch.round()
    for i, row in enumerate(rows[1:], start=1):
        alone = ed.generate(model, [3, 4, 5 + i], max_new_tokens=6, depth=2)
        assert row.said == alone.tokens[0]


def test_what_a_long_row_took_is_free_again_while_short_ones_run() -> None:
    model = talkative(decoder("Llama-untied"))
    stream = as_stream(model)
    batch = SharedBatch(stream, chunk=4)
    batch.cache = RowCache(stream.depth, slots=2)
    long = Row(Plain(stream.depth, Sampling()), [1 + i % 9 for i in range(28)], limit=1)
    rows, teams = list[tuple[Row, dict[str, Any]]](), Teams()
    for i, kind in enumerate(("greedy", "drafted", "exiting")):
        way, told = course(stream, kind, stream.depth, i, [3, 4 + i], 6, teams)
        rows.append((Row(way, [3, 4 + i], 6), told))
    batch.join(long)
    while not long.said:
        held = batch.cache.bytes
        batch.round()
        if long.unread == 4:
            for row, _ in rows:
                batch.join(row)
    assert len(batch.rows) == 3
    assert batch.cache.bytes < held / 2
    while batch.rows:
        batch.round()
    for i, (row, told) in enumerate(rows):
        alone = ed.generate(model, [3, 4 + i], max_new_tokens=6, eos_token_id=(), **told)
        assert row.said == alone.tokens[0]


STATE = {"vocab_size": 50, "hidden_size": 16, "eos_token_id": None}
HEADS = {"intermediate_size": 32, "num_attention_heads": 2}


@pytest.mark.parametrize(
    "model",
    [
        lambda: hf.RecurrentGemmaForCausalLM(
            hf.RecurrentGemmaConfig(**STATE, **HEADS, num_hidden_layers=3, lru_width=16)
        ),
        lambda: hf.MambaForCausalLM(hf.MambaConfig(**STATE, num_hidden_layers=2, state_size=4)),
        lambda: hf.OpenAIGPTLMHeadModel(
            hf.OpenAIGPTConfig(vocab_size=50, n_positions=32, n_embd=16, n_layer=2, n_head=2)
        ),
    ],
    ids=["recurrent blocks", "state space", "no cache"],
)
def test_a_model_without_a_slot_for_each_token_is_refused_at_the_start(
    model: Callable[[], torch.nn.Module],
) -> None:
    torch.manual_seed(0)
    net = model().eval()
    served = Served(name="tiny", model=net, tokenizer=object())
    for start in (SharedBatch, Scheduler, lambda _: application(served)):
        with pytest.raises(UnsupportedModelError, match="state; serve it with --engine vllm"):
            start(as_stream(net))


def test_rows_stay_where_positions_are_rotated_in_the_same_way_for_all() -> None:
    torch.manual_seed(0)
    rope = {"rope_type": "longrope", "rope_theta": 100.0}
    config = hf.Phi3Config(
        **STATE,
        **HEADS,
        num_hidden_layers=2,
        max_position_embeddings=128,
        original_max_position_embeddings=32,
        pad_token_id=0,
        rope_parameters=rope | {"short_factor": [1.0] * 4, "long_factor": [9.0] * 4},
    )
    model = hf.Phi3ForCausalLM(config).double().eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data.mul_(4)
    stream = as_stream(model)
    batch, prompts = SharedBatch(stream), [[1 + 7 * i % 47 for i in range(n)] for n in (3, 26)]
    rows = [Row(Plain(stream.depth, Sampling()), prompt, limit=6) for prompt in prompts]
    for row in rows:
        batch.join(row)
    over = Row(Plain(stream.depth, Sampling()), [3] * 26, limit=7)
    with pytest.raises(BatchError, match="= 33, but beyond 32 tokens Phi3ForCausalLM rotates"):
        batch.join(over)
    with pytest.raises(BatchError, match="lower max_tokens, or serve the model with --engine vllm"):
        Scheduler(stream).submit(Request(prompt=(3,) * 26, max_tokens=7))
    while batch.rows:
        batch.round()
    for row, prompt in zip(rows, prompts, strict=True):
        alone = ed.generate(model, prompt, max_new_tokens=6, eos_token_id=())
        assert row.said == alone.tokens[0]
