"""Balconies: exits beside a frozen model, which stays what it was, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers.training import digits, same, vit, weights
from tests.zoo import ENTRIES
from torch import Tensor, nn

import everydepth as ed
from everydepth.errors import DepthError, EveryDepthError, SettingError, UnsupportedModelError

KINDS = ["ViT", "Llama-tied-CausalLM-left", "GPT2-CausalLM-right", "CifarResNet-pre-pad"]
LLAMA = KINDS[1]


def make(kind: str, depths: list[int]) -> tuple[nn.Module, ed.EveryDepth, dict[str, Tensor]]:
    """The model, its balconies with weights that do something, and a batch."""
    model, batch = ENTRIES[kind].make()
    net = ed.balcony(model.eval(), depths)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in net.model.blocks.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model, net, batch


@pytest.mark.parametrize("kind", KINDS)
def test_before_training_every_depth_says_what_it_said(kind: str) -> None:
    model, batch = ENTRIES[kind].make()
    plain = ed.as_stream(model.eval()).observe(batch)
    net = ed.balcony(model, [1, 2])
    states = net.stream.observe(batch)
    for depth in range(len(plain)):
        assert torch.equal(states.logits(depth), plain.logits(depth))
    assert not any(p.requires_grad for p in model.parameters())
    assert all(p.requires_grad for p in net.model.blocks.parameters())


@pytest.mark.parametrize("kind", KINDS)
def test_depth_k_is_a_plain_model_of_k_and_one_more_block(kind: str) -> None:
    model, net, batch = make(kind, [1, 2])
    states = net.stream.observe(batch)
    for depth in (1, 2):
        cut = ed.at_depth(net, depth)
        assert type(cut) is type(model)
        own = ed.as_stream(cut)
        assert own.depth == depth + 1
        found = own.observe(batch).logits(depth + 1)
        assert torch.allclose(found, states.logits(depth), atol=1e-5)
        bare = ed.as_stream(model).observe(batch).logits(depth)
        assert not torch.allclose(found, bare, atol=1e-3)


@pytest.mark.parametrize("kind", KINDS[:2])
def test_it_keeps_the_contract_of_streams(kind: str) -> None:
    _, net, batch = make(kind, [1, 3])
    report = ed.check_stream(net.stream, batch)
    assert report.ok, str(report)
    cursor = net.stream.advance(net.stream.start(batch), to=3)
    expected = net.stream.observe(batch).logits(3)
    assert torch.allclose(net.stream.logits(cursor), expected, atol=1e-6)


def test_training_moves_the_balconies_and_nothing_else() -> None:
    model = vit(dropout=0.1).eval()
    before, images = weights(model), digits(8).batch(range(8))["pixel_values"]
    said = model(images).logits
    net = ed.balcony(model, [1, 2])
    blocks = weights(net.model.blocks)
    rows = [{"pixel_values": digits(64).batch(range(64))["pixel_values"]}]
    done = ed.fit(net, rows, steps=30, lr=1e-2, progress=False)
    assert same(weights(model), before)
    assert not same(weights(net.model.blocks), blocks)
    first, last = done.history[0]["losses"], done.history[-1]["losses"]
    assert all(last[depth] < first[depth] for depth in ("1", "2"))
    assert torch.equal(net.model(images).logits, said)
    assert torch.equal(net.eval()(pixel_values=images).logits, said)


def test_a_labelled_batch_trains_them_by_divergence_alone() -> None:
    net = ed.balcony(vit(dropout=0.0), [1])
    out = net(**digits(8).batch(range(8)))
    assert set(out.losses) == {1, 3}
    assert torch.allclose(out.loss, out.losses[3] + out.regularizer)
    assert "largest relative difference" in str(ed.check_objective(net, digits(8).batch(range(8))))


def test_it_is_saved_beside_the_plain_model_and_comes_back(tmp_path: Path) -> None:
    model = vit(dropout=0.0).eval()
    net = ed.balcony(model, [1])
    done = ed.fit(net, digits(32), steps=2, lr=1e-2, run=tmp_path / "run", progress=False)
    assert done.path is not None
    again = ed.load(done.path)
    images = digits(4).batch(range(4))
    for depth in (1, 3):
        found = ed.as_stream(again).observe(images).logits(depth)
        assert torch.equal(found, net.stream.observe(images).logits(depth))
    plain = type(model).from_pretrained(done.path / "model")
    assert same(weights(plain), weights(model))
    assert ed.load(done.path, depth=1).config.num_hidden_layers == 2
    more = ed.fit(
        ed.balcony(vit(dropout=0.0).eval(), [1]),
        digits(32),
        steps=2,
        lr=1e-2,
        run=tmp_path / "run",
        resume=True,
        progress=False,
    )
    assert more.steps == 2


def test_a_depth_is_exported_as_a_stock_checkpoint(tmp_path: Path) -> None:
    model, net, batch = make(LLAMA, [2])
    folder = ed.export(net, tmp_path / "two", depth=2)
    found = type(model).from_pretrained(folder).eval()
    assert found.config.num_hidden_layers == 3
    assert torch.allclose(found(**batch).logits, net.stream.observe(batch).logits(2), atol=1e-5)


@pytest.mark.parametrize("rows", [1, 3])
def test_drafting_from_a_balcony_writes_the_models_own_text(rows: int) -> None:
    model, net, _ = make(LLAMA, [1, 2])
    ids = torch.randint(2, 60, (rows, 5), generator=torch.Generator().manual_seed(0))
    words: dict[str, Any] = {"max_new_tokens": 12, "eos_token_id": ()}
    plain = ed.generate(model, ids, **words)
    drafted = ed.generate(net, ids, draft_depth=2, **words)
    assert torch.equal(drafted.sequences, plain.sequences)


def test_a_balconys_drafts_are_what_its_depth_would_write() -> None:
    _, net, _ = make(LLAMA, [1, 2])
    ids = torch.randint(2, 60, (2, 5), generator=torch.Generator().manual_seed(0))
    words: dict[str, Any] = {"max_new_tokens": 12, "eos_token_id": ()}
    for depth in (1, 2):
        cut = ed.generate(ed.at_depth(net, depth), ids, **words)
        assert torch.equal(ed.generate(net, ids, depth=depth, **words).sequences, cut.sequences)
    # With a second depth to read, both have seen every token.
    policy = ed.Confidence(threshold=0.0)
    left = ed.generate(net, ids, policy=policy, **words)
    first = ed.generate(ed.at_depth(net, 1), ids, **words)
    assert torch.equal(left.sequences, first.sequences)


def test_profile_calibrate_and_predict_use_balconies_as_depths() -> None:
    model = vit(dropout=0.0).eval()
    net = ed.balcony(model, [1])
    ed.fit(net, digits(64), steps=20, lr=1e-2, progress=False)
    data = digits(40, "test")
    found = ed.profile(net, data, repeats=1, progress=False)
    bare = ed.profile(model, data, repeats=1, progress=False)
    assert found["parameters"][0] == bare["parameters"][1]
    assert found["quality"][2] == bare["quality"][2]
    policy = ed.calibrate(net, data, risk=0.9, progress=False)
    said = ed.predict(net, data.batch(range(8)), policy=policy)
    states = net.stream.observe(data.batch(range(8)))
    for row, depth in enumerate(said.depths.tolist()):
        assert torch.allclose(said.logits[row], states.logits(depth)[row], atol=1e-5)
    with pytest.raises(EveryDepthError, match="calibrated on Balcony with 3 depths"):
        ed.predict(model, data.batch(range(8)), policy=policy)


@pytest.mark.parametrize(
    ("depths", "message"),
    [
        ([], r"depths \[\] name no balcony; use at least one of 1 to 2"),
        ([3], "has 3 blocks and its last depth stays as it is; use 1 to 2"),
        ([0], "a balcony at depth 0"),
        ([1, 1], r"depths \[1, 1\] have 1 twice; name it once"),
    ],
)
def test_depths_without_a_place_for_a_balcony_are_refused(depths: Any, message: str) -> None:
    with pytest.raises(DepthError, match=message):
        ed.balcony(vit(), depths)


def test_a_post_norm_model_says_why_it_has_no_balconies() -> None:
    model, _ = ENTRIES["Bert-SequenceClassification"].make()
    with pytest.raises(UnsupportedModelError, match=r"LayerNorm to the sum \(post-norm\)"):
        ed.balcony(model, [1])


def test_a_policy_is_not_exported_with_balconies(tmp_path: Path) -> None:
    net = ed.balcony(vit(dropout=0.0).eval(), [1])
    with pytest.raises(SettingError, match="no single stock model holds"):
        ed.export(net, tmp_path / "out", exits=ed.Confidence(threshold=0.9))
