"""Embeddings of bare encoders: the pooled output of the model cut to each depth."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tokenizers
import torch
import transformers as hf
from sentence_transformers import SentenceTransformer
from torch import Tensor, nn

import everydepth as ed
from everydepth.errors import LabelError, SettingError
from everydepth.stream import ResidualStream
from everydepth.stream.around import StreamAround
from everydepth.stream.embedding import EmbeddingStream
from everydepth.training import contrastive

SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "vocab_size": 60,
}


def encoder(name: str) -> nn.Module:
    torch.manual_seed(0)
    if name == "bert":
        return hf.BertModel(hf.BertConfig(**SIZES), add_pooling_layer=False).eval()
    return hf.LlamaModel(hf.LlamaConfig(**SIZES, num_key_value_heads=1)).eval()


def batch(side: str = "right") -> dict[str, Tensor]:
    ids = torch.randint(3, 60, (4, 7), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, slice(4, None) if side == "right" else slice(0, 3)] = 0
    return {"input_ids": ids, "attention_mask": mask}


def pooled(tokens: Tensor, mask: Tensor, how: str) -> Tensor:
    rows = [row[real.bool()] for row, real in zip(tokens, mask, strict=True)]
    pick = {"mean": lambda r: r.mean(0), "first": lambda r: r[0], "last": lambda r: r[-1]}[how]
    return torch.stack([pick(row) for row in rows])


def test_a_stream_around_another_has_everything_of_it() -> None:
    bert = ed.as_stream(encoder("bert"))
    around = EmbeddingStream(bert)
    for name in ("positions", "heads", "row_axis", "slotted", "attention", "pad_token", "outputs"):
        assert getattr(around, name) == getattr(bert, name), name
    assert around.trial().keys() == bert.trial().keys()
    assert str(around).endswith("readout: the mean of the real tokens")
    # A new member of the contract is passed on, or final.
    for name, member in vars(ResidualStream).items():
        function = member.fget if isinstance(member, property) else member
        own = name.startswith("_") or not callable(function)
        assert own or getattr(function, "__final__", False) or name in vars(StreamAround), name


@pytest.mark.parametrize("how", ["mean", "first", "last"])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", ["bert", "llama"])
def test_every_depth_gives_the_pooled_output_of_the_cut_encoder(
    name: str, side: str, how: str
) -> None:
    model, given = encoder(name), batch(side)
    stream = ed.as_stream(model, task="embedding", token=how)
    with torch.no_grad():
        states = stream.observe(given)
        for depth in (1, 2, 3):
            cut = ed.at_depth(model, depth, task="embedding", token=how)
            tokens = cut(**given).last_hidden_state
            expected = pooled(tokens, given["attention_mask"], how)
            torch.testing.assert_close(states.logits(depth), expected, rtol=1e-5, atol=1e-6)
        driven = stream.advance(stream.start(given))
        torch.testing.assert_close(stream.logits(driven), states.logits(3), rtol=1e-5, atol=1e-6)


def test_trace_and_profile_measure_embeddings() -> None:
    model, given = encoder("bert"), batch()
    found = ed.trace(model, given, ["embedding_cos"], task="embedding", progress=False)
    assert found["embedding_cos"].shape == (4, 4)
    np.testing.assert_allclose(np.diag(found["embedding_cos"]), 1, atol=1e-5)
    profile = ed.profile(model, given, task="embedding", repeats=1, progress=False)
    assert (profile.metric, profile.at(3).quality) == ("error", 0)
    assert profile.at(1).quality > 0


def test_what_cannot_be_pooled_is_refused() -> None:
    with pytest.raises(SettingError, match="embeddings use one of mean, first, last"):
        ed.as_stream(encoder("bert"), task="embedding", token="all")


def pairs() -> dict[str, Tensor]:
    """Eight sentences of two words each; a pair shares its first word."""
    draw = torch.Generator().manual_seed(2)
    first = torch.arange(3, 7).repeat_interleave(2)
    ids = torch.stack([first, torch.randint(10, 60, (8,), generator=draw)], 1)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": first}


def test_the_contrastive_loss_is_the_share_of_the_group_in_the_softmax_over_all_others() -> None:
    draw = torch.Generator().manual_seed(0)
    z, labels = torch.randn(5, 4, generator=draw), torch.tensor([0, 0, 1, 1, 2])
    found = contrastive(scale=3.0)(z, labels, {})
    expected = []
    for row in range(5):
        cos = [float(torch.cosine_similarity(z[row], z[o], dim=0)) for o in range(5)]
        near = {o: np.exp(3 * cos[o]) for o in range(5) if o != row}
        group = [near[o] for o in near if labels[o] == labels[row]] or list(near.values())
        expected.append(-np.log(sum(group) / sum(near.values())))
    np.testing.assert_allclose(found, expected, atol=1e-6)
    assert found[4] == 0  # alone in its group


def test_a_group_is_needed_for_each_sentence() -> None:
    with pytest.raises(LabelError, match="group number for each of the 4 rows"):
        contrastive()(torch.ones(4, 2), torch.zeros(2), {})
    with pytest.raises(SettingError, match=r"scale=-1\.0\); use a number above 0"):
        contrastive(-1.0)


@pytest.mark.parametrize("objective", [ed.lpa(), ed.lpa().distilled()])
def test_every_depth_learns_which_sentences_belong_together(objective: ed.Objective) -> None:
    model, given = encoder("bert"), pairs()
    net = ed.EveryDepth(model, objective, criterion=contrastive(), task="embedding").eval()
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3)
    before = net(**given).losses
    for _ in range(30):
        optimizer.zero_grad()
        net(**given).loss.backward()
        optimizer.step()
    after = net(**given).losses
    assert all(after[depth] < 0.2 * before[depth] for depth in (1, 2, 3))


def test_unlabeled_sentences_pull_every_depth_to_the_direction_of_the_last() -> None:
    model, given = encoder("bert"), batch()
    net = ed.EveryDepth(model, ed.lpa().distilled(), task="embedding").eval()
    out = net(**given)
    states = net.stream.observe(given)
    for depth in (1, 2):
        cos = torch.cosine_similarity(states.logits(depth), states.logits(3), dim=-1)
        torch.testing.assert_close(out.losses[depth], 1 - cos.mean(), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("how", ["mean", "first", "last"])
def test_sentence_transformers_opens_an_exported_depth(tmp_path: Path, how: str) -> None:
    model = encoder("bert")
    names = {"[PAD]": 0, "[UNK]": 1, "[CLS]": 2} | {f"w{i}": i for i in range(3, 60)}
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(names, unk_token="[UNK]"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = hf.PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="[UNK]", pad_token="[PAD]"
    )
    options = {"task": "embedding", "token": how}
    folder = ed.export(model, tmp_path / "small", depth=2, tokenizer=tokenizer, **options)
    texts = ["w5 w9 w20", "w7", "w30 w31 w8 w9 w10"]
    found = SentenceTransformer(str(folder), device="cpu").encode(texts, convert_to_tensor=True)
    given = dict(tokenizer(texts, return_tensors="pt", padding=True))
    with torch.no_grad():
        expected = ed.as_stream(model, **options).observe(given).logits(2)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)


def test_the_last_of_many_tokens_is_found_in_half_precision() -> None:
    """Half precision counts to 256 at most."""
    config = hf.LlamaConfig(**SIZES, num_key_value_heads=1)
    model = hf.LlamaModel(config).to(torch.bfloat16).eval()
    ids = torch.randint(3, 60, (2, 300), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, 290:] = 0
    given = {"input_ids": ids, "attention_mask": mask}
    for how, places in (("first", (0, 0)), ("last", (299, 289))):
        with torch.no_grad():
            tokens = model(**given).last_hidden_state
            states = ed.as_stream(model, task="embedding", token=how).observe(given)
        expected = torch.stack([row[place] for row, place in zip(tokens, places, strict=True)])
        assert torch.equal(states.logits(3), expected)
