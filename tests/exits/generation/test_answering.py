"""Encoder-decoders answer with the first blocks of their decoder."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as hf

import everydepth as ed
from everydepth.errors import SettingError, UnsupportedModelError

IDS = torch.randint(3, 60, (2, 7), generator=torch.Generator().manual_seed(0))


def made(name: str) -> Any:
    torch.manual_seed(0)
    if name == "t5":
        sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 3, "num_heads": 2}
        return hf.T5ForConditionalGeneration(
            hf.T5Config(vocab_size=60, decoder_start_token_id=0, **sizes)
        ).eval()
    sides = {
        f"{side}_{name}": value
        for side in ("encoder", "decoder")
        for name, value in (("layers", 3), ("attention_heads", 2), ("ffn_dim", 32))
    }
    return hf.BartForConditionalGeneration(hf.BartConfig(vocab_size=60, d_model=16, **sides)).eval()


def own(model: Any, ids: torch.Tensor, **settings: Any) -> torch.Tensor:
    return model.generate(ids, max_new_tokens=6, num_beams=1, do_sample=False, **settings)


@pytest.mark.parametrize("name", ["t5", "bart"])
@pytest.mark.parametrize("depth", [1, 3])
def test_the_answer_is_that_of_the_plain_cut_model(name: str, depth: int) -> None:
    model = made(name)
    found = ed.generate(model, IDS, depth=depth, max_new_tokens=6)
    expected = own(ed.at_depth(model, depth), IDS)
    assert torch.equal(found.sequences, expected)
    assert found.stats.passes == (sum(found.lengths),) * depth


def test_prompts_of_different_lengths_are_answered_as_if_alone() -> None:
    model = made("bart")
    together = ed.generate(model, [IDS[0, :3].tolist(), IDS[1].tolist()], max_new_tokens=6)
    for row, ids in enumerate((IDS[:1, :3], IDS[1:])):
        alone = ed.generate(model, ids, max_new_tokens=6)
        assert together.tokens[row] == alone.tokens[0]


def test_samples_follow_the_seed_and_leave_the_global_state_alone() -> None:
    model, before = made("t5"), torch.get_rng_state()
    settings: dict[str, Any] = {"max_new_tokens": 6, "do_sample": True, "temperature": 2.0}
    a, b, c = (ed.generate(model, IDS, seed=seed, **settings).tokens for seed in (1, 1, 2))
    assert a == b != c
    assert torch.equal(torch.get_rng_state(), before)


def test_what_only_a_decoder_alone_can_do_is_refused() -> None:
    with pytest.raises(
        UnsupportedModelError, match=r"draft_depth was given, but .* is an encoder-decoder"
    ):
        ed.generate(made("t5"), IDS, draft_depth=1)


@pytest.mark.parametrize(
    "asked",
    [
        {"forced_eos_token_id": 7},
        {"forced_bos_token_id": 9},
        {"decoder_start_token_id": 4},
        {"repetition_penalty": 1.5, "no_repeat_ngram_size": 1},
        {"min_new_tokens": 5},
        {"suppress_tokens": [5, 6]},
    ],
    ids=lambda asked: next(iter(asked)),
)
@pytest.mark.parametrize("name", ["t5", "bart"])
def test_what_a_generation_config_asks_of_an_answer_is_done(
    name: str, asked: dict[str, Any]
) -> None:
    model: Any = made(name)
    config = hf.GenerationConfig(max_new_tokens=6, **asked)
    found = ed.generate(model, IDS, generation_config=config, depth=2)
    assert torch.equal(found.sequences, own(ed.at_depth(model, 2), IDS, **asked))
    # Beams would be several answers to one prompt.
    with pytest.raises(SettingError, match="generation_config has num_beams, which generate does"):
        ed.generate(model, IDS, generation_config=hf.GenerationConfig(num_beams=2, **asked))


def test_settings_that_contradict_the_models_own_are_refused() -> None:
    config = hf.GenerationConfig(suppress_tokens=[2])
    words = "generation_config does not fit that of Bart.* Every token in `forced_eos_token_id`"
    with pytest.raises(SettingError, match=words):
        ed.generate(made("bart"), IDS, generation_config=config)


def test_the_most_tokens_of_an_answer_count_its_start_token() -> None:
    config = hf.GenerationConfig(max_length=5)
    said = ed.generate(made("bart"), IDS, generation_config=config, eos_token_id=())
    assert said.sequences.shape[1] == 5


def test_an_answer_that_nothing_may_end_goes_on_to_its_limit() -> None:
    model: Any = made("bart")
    before = model.generation_config.to_dict()
    likely = ed.generate(model, IDS[:1], max_new_tokens=6, eos_token_id=()).tokens[0][0]
    model.generation_config.eos_token_id = likely
    assert ed.generate(model, IDS[:1], max_new_tokens=6).lengths == (1,)
    assert ed.generate(model, IDS[:1], max_new_tokens=6, eos_token_id=()).lengths == (6,)
    assert model.generation_config.to_dict() == before | {"eos_token_id": likely}
