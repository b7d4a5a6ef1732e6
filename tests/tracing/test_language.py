"""The token grid and text at a depth, against the model's own generation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from tests.helpers import tracing as samples
from tokenizers import Tokenizer as Words
from tokenizers import models, pre_tokenizers
from torch import Tensor

import everydepth as ed
from everydepth.errors import SettingError
from everydepth.tracing import diversity, sentence_encoder
from everydepth.tracing.language import _nucleus

VOCABULARY = ["<unk>", "<script>", *(f"w{i}" for i in range(38))]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    words = Words(models.WordLevel({w: i for i, w in enumerate(VOCABULARY)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return hf.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", pad_token="<unk>")


def test_the_grid_holds_each_depths_top_predictions_for_prompt_and_continuation(
    tokenizer: Any,
) -> None:
    model = samples.gpt2()
    grid = ed.token_grid(model, tokenizer, "w3 w5 <script>", new_tokens=4, top=3)
    ids = torch.tensor([tokenizer.encode("w3 w5 <script>")])
    written = model.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert grid.arrays["tokens"].tolist() == [VOCABULARY[i] for i in written[0]]
    z = torch.from_numpy(samples.logits(model, {"input_ids": written}))[:, 0]
    chance, token = z.softmax(-1).topk(3, -1)
    np.testing.assert_allclose(grid.arrays["top_probability"], chance.numpy(), rtol=1e-5)
    assert grid.arrays["text"].tolist() == [
        [VOCABULARY[i] for i in row] for row in token[..., 0].tolist()
    ]
    assert grid.arrays["text"].shape == (4, 7)
    assert grid.meta["prompt_tokens"] == 3
    final = grid.arrays["text"]
    for column, depth in enumerate(grid.arrays["saturated_at"]):
        assert (final[depth:, column] == final[-1, column]).all()
        assert depth == 0 or final[depth - 1, column] != final[-1, column]


def test_the_grids_last_row_writes_the_continuation(tokenizer: Any) -> None:
    grid = ed.token_grid(samples.gpt2(), tokenizer, "w3 w5", new_tokens=5)
    assert grid.arrays["text"][-1, 1:-1].tolist() == grid.arrays["tokens"][2:].tolist()


def test_text_at_the_last_depth_with_a_tiny_nucleus_is_greedy(tokenizer: Any) -> None:
    model = samples.gpt2()
    found = ed.text_at_depth(
        model, tokenizer, ["w3 w5", "w7"], new_tokens=6, nucleus=1e-300, depths_wanted=[2, 3]
    )
    for text, prompt in zip(found.arrays["text"][1], ("w3 w5", "w7"), strict=True):
        ids = torch.tensor([tokenizer.encode(prompt)])
        full = model.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0)
        assert text == tokenizer.decode(full[0, ids.shape[1] :])
    # Depth 2 runs two blocks: a model cut to two blocks writes the same.
    short = ed.at_depth(model, 2)
    ids = torch.tensor([tokenizer.encode("w7")])
    full = short.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0)
    assert found.arrays["text"][0][1] == tokenizer.decode(full[0, 1:])


def test_sampling_is_repeatable_and_follows_the_seed(tokenizer: Any) -> None:
    model = samples.gpt2()
    a, b, c = (
        ed.text_at_depth(model, tokenizer, ["w3"], new_tokens=12, seed=s).arrays["text"]
        for s in (0, 0, 1)
    )
    assert (a == b).all()
    assert (a != c).any()


def test_a_nucleus_is_the_smallest_set_of_that_probability() -> None:
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05]])).expand(4000, 4)
    random = torch.Generator().manual_seed(0)

    def shares(p: float) -> Tensor:
        return torch.bincount(_nucleus(p, random)(logits), minlength=4) / 4000

    assert shares(0.5).tolist() == [1, 0, 0, 0]
    two = shares(0.7)
    assert two[2:].sum() == 0
    assert float(two[0]) == pytest.approx(0.625, abs=0.03)
    assert shares(0.95)[3] == 0
    assert shares(1.0)[3] > 0


def test_diversity_is_the_product_of_unique_shares() -> None:
    assert diversity([1, 2, 3, 4, 5]) == 1
    assert diversity([1, 2, 1, 2, 1, 2]) == pytest.approx(2 / 5 * 2 / 4 * 2 / 3)
    assert np.isnan(diversity([1, 2, 3]))


def test_coherence_is_the_cosine_of_prompt_and_continuation(tokenizer: Any) -> None:
    def encode(texts: Any) -> np.ndarray:
        table = np.zeros((len(texts), len(VOCABULARY)))
        for row, text in zip(table, texts, strict=True):
            for word in text.split():
                row[VOCABULARY.index(word)] += 1
        return table

    prompts = ["w3 w5", "w7 w8 w9"]
    found = ed.text_at_depth(samples.gpt2(), tokenizer, prompts, new_tokens=8, encoder=encode)
    for depth, texts in enumerate(found.arrays["text"]):
        a, b = encode(prompts), encode(list(texts))
        cosine = (a * b).sum(1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1)
        assert found.arrays["coherence"][depth] == pytest.approx(cosine.mean())
    assert found.series == ("coherence", "diversity")


def test_any_local_encoder_serves_for_coherence(tokenizer: Any, tmp_path: Path) -> None:
    config = hf.BertConfig(
        vocab_size=40,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=32,
    )
    encoder = hf.BertModel(config).eval()
    encoder.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    encode = sentence_encoder(tmp_path)
    alone, padded = encode(["w3 w5"])[0], encode(["w3 w5", "w1 w2 w4 w6"])[0]
    np.testing.assert_allclose(alone, padded, atol=1e-5)
    ids = torch.tensor([tokenizer.encode("w3 w5")])
    with torch.no_grad():
        expected = encoder(input_ids=ids).last_hidden_state[0].mean(0)
    np.testing.assert_allclose(alone, expected.numpy(), atol=1e-5)
    first = sentence_encoder(tmp_path, pool="first")(["w3 w5", "w1 w2 w4 w6"])[0]
    with torch.no_grad():
        expected = encoder(input_ids=ids).last_hidden_state[0, 0]
    np.testing.assert_allclose(first, expected.numpy(), atol=1e-5)
    found = ed.text_at_depth(
        samples.gpt2(), tokenizer, ["w3"], new_tokens=5, depths_wanted=[3], encoder=tmp_path
    )
    assert -1 <= found.value[0] <= 1
    with pytest.raises(SettingError, match=r"no encoder in .*config\.json is missing"):
        sentence_encoder(tmp_path / "nothing")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompts": []}, "no prompts; pass at least one text"),
        ({"nucleus": 0.0}, r"nucleus=0.0\); use a number above 0, up to 1"),
        ({"new_tokens": 0}, r"new_tokens=0\); use a whole number of 1 or more"),
        ({"new_tokens": 32}, "1 prompt tokens .* has 32 positions; lower new_tokens to 31"),
        (
            {"prompts": ["w37"], "model": samples.gpt2(vocabulary=9)},
            "token 39, .* of another model",
        ),
        ({"prompts": [""]}, "the text '' has no tokens"),
        ({"depths_wanted": [9]}, "depth 9, but GPT2LMHeadModel has 3 blocks"),
    ],
)
def test_bad_settings_are_refused(options: dict[str, Any], message: str, tokenizer: Any) -> None:
    with pytest.raises(ValueError, match=message):
        ed.text_at_depth(
            **{"model": samples.gpt2(), "tokenizer": tokenizer, "prompts": ["w3"], **options}
        )


def test_text_ends_where_the_context_does(tokenizer: Any) -> None:
    found = ed.text_at_depth(samples.gpt2(), tokenizer, ["w3 w5"], depths_wanted=[1])
    assert found.meta["new_tokens"] == 30
    grid = ed.token_grid(samples.gpt2(), tokenizer, "w3 " * 30)
    assert grid.meta["new_tokens"] == 2


def test_a_model_without_text_is_refused(tokenizer: Any) -> None:
    with pytest.raises(SettingError, match="text needs a causal language model"):
        ed.token_grid(samples.vit(), tokenizer, "w3")
