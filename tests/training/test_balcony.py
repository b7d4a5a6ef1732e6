"""Balconies: exits beside a frozen model, which stays what it was, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers.training import digits, same, vit, weights
from tests.zoo import ENTRIES
from torch import Tensor, nn
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from typer.testing import CliRunner

import everydepth as ed
from everydepth.cli.main import build_app
from everydepth.errors import (
    BatchError,
    DepthError,
    EveryDepthError,
    SettingError,
    UnsupportedModelError,
)
from everydepth.exits.generation.tape import Tape

KINDS = ["ViT", "Llama-tied-CausalLM-left", "GPT2-CausalLM-right", "CifarResNet-pre-pad"]
LLAMA, POST_NORM = KINDS[1], "Bert-SequenceClassification"
STAGED = [KINDS[3], "CifarResNet-post-projection", "ResNetForImageClassification-basic"]


def make(
    kind: str, depths: list[int], blocks: int = 1
) -> tuple[nn.Module, ed.EveryDepth, dict[str, Tensor]]:
    """The model, its balconies with weights of their own, and a batch."""
    model, batch = ENTRIES[kind].make()
    net = ed.balcony(model.eval(), depths, blocks=blocks)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in net.model.blocks.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model, net, batch


@pytest.mark.parametrize("kind", KINDS)
def test_silent_balconies_change_no_depth_before_training(kind: str) -> None:
    model, batch = ENTRIES[kind].make()
    plain = ed.as_stream(model.eval()).observe(batch)
    net = ed.balcony(model, [1, 2], init="copy")
    states = net.stream.observe(batch)
    for depth in range(len(plain)):
        assert torch.equal(states.logits(depth), plain.logits(depth))
    assert not any(p.requires_grad for p in model.parameters())
    assert all(p.requires_grad for p in net.model.blocks.parameters())


@pytest.mark.parametrize("kind", [*KINDS[:3], POST_NORM])
def test_balconies_start_as_the_last_blocks(kind: str) -> None:
    model, batch = ENTRIES[kind].make()
    stream = ed.as_stream(model.eval())
    net = ed.balcony(model, [1], blocks=2)
    cut = ed.at_depth(model, keep=[1, stream.depth - 1, stream.depth])
    expected = ed.as_stream(cut).observe(batch).logits(3)
    assert torch.allclose(net.stream.observe(batch).logits(1), expected, atol=1e-5)
    assert torch.equal(
        net.stream.observe(batch).logits(stream.depth), stream.observe(batch).logits(stream.depth)
    )


@pytest.mark.parametrize("kind", [LLAMA, POST_NORM])
def test_with_two_blocks_depth_k_is_a_plain_model_of_k_and_two_more(
    kind: str, tmp_path: Path
) -> None:
    model, net, batch = make(kind, [1, 2], blocks=2)
    said = net.stream.observe(batch)
    for depth in (1, 2):
        folder = ed.export(net, tmp_path / str(depth), depth=depth)
        found = type(model).from_pretrained(folder).eval()
        assert found.config.num_hidden_layers == depth + 2
        assert torch.allclose(found(**batch).logits, said.logits(depth), atol=1e-5)
    net.save_pretrained(tmp_path / "all")
    again = ed.as_stream(ed.load(tmp_path / "all")).observe(batch)
    assert torch.equal(again.logits(2), said.logits(2))


@pytest.mark.parametrize("kind", KINDS[:3])
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


@pytest.mark.parametrize("kind", STAGED)
def test_where_stages_follow_a_balcony_leads_to_the_last_one(kind: str, tmp_path: Path) -> None:
    model, net, batch = make(kind, [1, 2])
    stream, states = ed.as_stream(model), net.stream.observe(batch)
    for depth in (1, 2):
        changing = [
            number
            for number, block in enumerate(stream.blocks, start=1)
            if number > depth and block.branches[0].skip is not None
        ]
        likes = dict.fromkeys([*changing, stream.depth])
        assert net.model.likes[depth] == tuple(likes)
        cut = ed.at_depth(net, depth)
        assert type(cut) is type(model)
        assert ed.as_stream(cut).depth == depth + len(likes)
        assert torch.allclose(cut(**batch).logits, states.logits(depth), atol=1e-5)
        cut.save_pretrained(tmp_path / str(depth))
        again = type(model).from_pretrained(tmp_path / str(depth)).eval()
        assert torch.allclose(again(**batch).logits, states.logits(depth), atol=1e-5)
    assert torch.equal(states.logits(stream.depth), stream.observe(batch).logits(stream.depth))
    alone = ed.at_depth(net, 2).requires_grad_(False)
    for parameter in alone.parameters():
        parameter.zero_()
    assert torch.equal(net.stream.observe(batch).logits(2), states.logits(2))


class Stage(nn.Module):
    """A residual block of the CIFAR ResNets, whose shortcut pads channels without parameters."""

    def __init__(self, width: int, new: int) -> None:
        super().__init__()
        self.more = new - width
        self.conv1 = nn.Conv2d(width, new, 3, 1 + (self.more > 0), 1)
        self.conv2 = nn.Conv2d(new, new, 3, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        f = self.conv2(self.conv1(x).relu())
        if self.more:
            half = self.more // 2
            x = nn.functional.pad(x[..., ::2, ::2], (0, 0, 0, 0, half, self.more - half))
        return (x + f).relu()


class Padded(nn.Module):
    """Three stages of such blocks; those that start the later ones are no blocks of the stream."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 4, 1), nn.Linear(16, 5)
        self.layer1 = nn.Sequential(Stage(4, 4), Stage(4, 4))
        self.layer2 = nn.Sequential(Stage(4, 8), Stage(8, 8))
        self.layer3 = nn.Sequential(Stage(8, 16), Stage(16, 16))

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer3(self.layer2(self.layer1(self.stem(x).relu())))
        return self.head(x.mean((2, 3)))


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_balcony_stands_where_the_model_changes_the_state_between_blocks(depth: int) -> None:
    torch.manual_seed(0)
    model, x = Padded().eval(), torch.randn(2, 3, 8, 8)
    stream = ed.as_stream(model)
    stream.observe(x)
    assert (stream.depth, stream.gaps) == (4, {2, 3})
    net = ed.balcony(stream, [depth])
    net(x=x, labels=torch.tensor([0, 1])).loss.backward()
    assert all(p.grad is not None for p in net.model.blocks.parameters())


@pytest.mark.parametrize("init", ["last", "copy"])
def test_balconies_of_stages_are_saved_as_they_were_made(init: str, tmp_path: Path) -> None:
    model, batch = ENTRIES[STAGED[0]].make()
    net = ed.balcony(model.eval(), [1, 2], init=init)
    net.save_pretrained(tmp_path)
    found = ed.as_stream(ed.load(tmp_path)).observe(batch)
    for depth in (1, 2):
        assert torch.equal(found.logits(depth), net.stream.observe(batch).logits(depth))


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


def test_a_labeled_batch_trains_them_by_divergence_alone() -> None:
    net = ed.balcony(vit(dropout=0.0), [1])
    batch = digits(8).batch(range(8))
    trained = net.train()(**batch)
    assert trained.losses == {1: trained.loss}
    out = net.eval()(**batch)
    assert set(out.losses) == {1, 3}
    assert torch.allclose(out.loss, out.losses[3] + out.regularizer)
    assert torch.allclose(trained.loss, out.regularizer)
    # Whoever unfreezes the model wants it to learn from them.
    net.model.model.requires_grad_(True)
    assert set(net.train()(**batch).losses) == {1, 3}
    assert "largest relative difference" in str(ed.check_objective(net, digits(8).batch(range(8))))


@pytest.mark.parametrize("kind", [LLAMA, "Bert-MaskedLM"])
def test_accumulating_pieces_changes_nothing_whichever_tokens_are_labeled(kind: str) -> None:
    def moved(pieces: int) -> dict[str, Tensor]:
        torch.manual_seed(0)
        net = ed.balcony(ENTRIES[kind].make()[0], [1])
        with torch.no_grad():
            for parameter in net.model.blocks.parameters():
                parameter.mul_(1.5)
        for module in net.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        ids = torch.randint(5, 20, (4, 7))
        labels = ids.clone()
        labels[0, 2:] = -100
        labels[1, 1:5] = -100
        mask = torch.ones_like(ids)
        mask[3, 4:] = 0
        data = [{"input_ids": ids, "attention_mask": mask, "labels": labels}]
        how: dict[str, Any] = {"optimizer": "sgd", "schedule": "constant", "progress": False}
        ed.fit(net, data, steps=1, lr=10.0, grad_accumulation=pieces, **how)
        return weights(net.model.blocks)

    whole, pieces = moved(1), moved(4)
    for key, value in whole.items():
        torch.testing.assert_close(pieces[key], value, atol=1e-6, rtol=1e-5)


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


@pytest.mark.parametrize(("rows", "blocks"), [(1, 1), (3, 1), (3, 2)])
def test_drafting_from_a_balcony_writes_the_models_own_text(rows: int, blocks: int) -> None:
    model, net, _ = make(LLAMA, [1, 2], blocks)
    ids = torch.randint(2, 60, (rows, 5), generator=torch.Generator().manual_seed(0))
    words: dict[str, Any] = {"max_new_tokens": 12, "eos_token_id": ()}
    plain = ed.generate(model, ids, **words)
    for depths in (2, [1, 2]):
        drafted = ed.generate(net, ids, draft_depth=depths, draft_always=True, **words)
        assert torch.equal(drafted.sequences, plain.sequences)


def test_a_balcony_sees_the_tokens_of_plain_steps_when_it_is_asked_to_draft() -> None:
    _, net, _ = make(LLAMA, [1, 2])
    ids = torch.randint(2, 60, (2, 5), generator=torch.Generator().manual_seed(0))
    tape = Tape(net.stream, ids, torch.ones_like(ids, dtype=torch.bool), top=4, room=16, read=[1])
    seen: list[int] = []
    block: Any = net.model.blocks["1"]
    block[0].register_forward_hook(lambda _, given, out: seen.append(given[0].shape[1]))
    fed = torch.tensor([[7, 8, 9], [9, 8, 7]])
    with torch.no_grad():
        tape.last_logits(4)
        for token in fed.unbind(1)[:2]:
            tape.feed(token)
            tape.last_logits(4)
        assert seen == []
        tape.feed(fed[:, 2])
        found = tape.last_logits(1)
        assert seen == [8]
        whole = {"input_ids": torch.cat([ids, fed], 1)}
        expected = net.stream.observe(whole).logits(1)[:, -1]
    assert torch.allclose(found, expected, atol=1e-5)


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


def test_behind_a_first_block_of_its_own_kind_a_balcony_is_like_the_others(tmp_path: Path) -> None:
    torch.manual_seed(0)
    sizes = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8}
    experts: dict[str, Any] = {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 8,
    }
    experts["mlp_only_layers"] = [0]
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **heads, **experts)).eval()
    net, ids = ed.balcony(model, [1]), torch.randint(2, 50, (2, 5))
    assert net.model.likes[1] == (2,)
    folder = ed.export(net, tmp_path / "two", depth=1)
    cut = Qwen3MoeForCausalLM.from_pretrained(folder).eval()
    words: dict[str, Any] = {"max_new_tokens": 8, "eos_token_id": ()}
    expected = ed.generate(cut, ids, **words).sequences
    assert torch.equal(ed.generate(net, ids, depth=1, **words).sequences, expected)
    drafted = ed.generate(net, ids, draft_depth=1, draft_always=True, **words)
    assert torch.equal(drafted.sequences, ed.generate(model, ids, **words).sequences)


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
        ([], r"depths=\[\] has no balcony; use at least one of 1 to 2"),
        ([3], "has 3 blocks and its last depth stays unchanged; use 1 to 2"),
        ([0], "a balcony at depth 0"),
        ([1, 1], r"depths=\[1, 1\] has 1 twice; give it once"),
    ],
)
def test_depths_without_a_place_for_a_balcony_are_refused(depths: Any, message: str) -> None:
    with pytest.raises(DepthError, match=message):
        ed.balcony(vit(), depths)


def test_a_block_is_not_inserted_under_balconies() -> None:
    with pytest.raises(UnsupportedModelError, match=r"has balconies, .*insert the block first"):
        ed.insert(ed.balcony(vit(), [1]), after=1)


def test_a_post_norm_model_has_no_silent_balconies() -> None:
    model, _ = ENTRIES[POST_NORM].make()
    words = r"LayerNorm to the sum \(post-norm\), .* cannot start silent; use init='last'"
    with pytest.raises(UnsupportedModelError, match=words):
        ed.balcony(model, [1], init="copy")


def test_balconies_on_a_model_with_balconies_are_refused() -> None:
    words = "Balcony has balconies already, at depths 1; build all of them at once, on the plain"
    with pytest.raises(UnsupportedModelError, match=words):
        ed.balcony(ed.balcony(vit(), [1]).model, [2])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"init": "first"}, "init='first'; use one of last, copy, fresh"),
        (
            {"blocks": 0},
            "blocks=0 per balcony, but ViTForImageClassification has 3 blocks; use 1 to 2",
        ),
        ({"blocks": 3}, "use 1 to 2"),
    ],
)
def test_settings_that_make_no_balcony_are_refused(settings: Any, message: str) -> None:
    with pytest.raises(SettingError, match=message):
        ed.balcony(vit(), [1], **settings)


def test_a_policy_is_not_exported_with_balconies(tmp_path: Path) -> None:
    net = ed.balcony(vit(dropout=0.0).eval(), [1])
    with pytest.raises(SettingError, match="which no stock model can hold"):
        ed.export(net, tmp_path / "out", exits=ed.Confidence(threshold=0.9))


def command(tmp_path: Path, *words: str) -> Any:
    small = ("--blocks", "4", "--steps", "2", "--max-samples", "40", "--batch-size", "20")
    given = ["train", "-m", "vit-tiny", "-d", "digits", *small, *words]
    return CliRunner().invoke(build_app(), [*given, "--run", str(tmp_path / "run")])


@pytest.mark.parametrize(("asked", "depths"), [("1,3", (1, 3)), ("auto", (1, 2, 3))])
def test_the_command_trains_balconies(tmp_path: Path, asked: str, depths: tuple[int, ...]) -> None:
    result = command(tmp_path, "--balcony", asked)
    assert result.exit_code == 0, result.output
    found: Any = ed.load(tmp_path / "run")
    assert found.depths == depths
    assert ed.load(tmp_path / "run", depth=1).config.num_hidden_layers == 2
    maps = [value for value in found.blocks["1"].parameters() if value.ndim == 2]
    assert all(bool(value.any()) for value in maps), "the last maps were zero at first"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--balcony", "one"), "use depths separated by commas"),
        (("--balcony", "4"), "has 4 blocks and its last depth stays unchanged; use 1 to 3"),
        (("--balcony", "1", "--lora", "2"), "use one of them"),
        (("--balcony", "1", "--label-smoothing", "0.1"), "leave one of them out"),
    ],
)
def test_a_command_that_asks_for_impossible_balconies_is_refused(
    tmp_path: Path, words: tuple[str, ...], message: str
) -> None:
    result = command(tmp_path, *words)
    assert isinstance(result.exception, EveryDepthError)
    assert message in str(result.exception)


def test_tokens_of_another_models_tokenizer_are_named() -> None:
    model, batch = ENTRIES[LLAMA].make()
    known = model.get_input_embeddings().num_embeddings
    foreign = {"input_ids": batch["input_ids"].index_fill(1, torch.tensor([2]), known + 5)}
    words = rf"{known + 5}, but .*use 0 to {known - 1}.*tokenizer of another model"
    for wrapped in (ed.EveryDepth, ed.balcony):
        with pytest.raises(EveryDepthError, match=words):
            ed.fit(wrapped(model), [foreign], steps=1, progress=False)
    with pytest.raises(BatchError, match=words):
        ed.as_stream(model).observe(foreign)


def test_without_a_weight_at_the_last_depth_it_still_teaches() -> None:
    model, batch = ENTRIES[LLAMA].make()
    model.eval()
    ids = {"input_ids": batch["input_ids"].clamp(min=2)}  # no padding
    goal = ed.ladder([1], early=1.0, final=0.0).distilled(labels=False)
    with pytest.warns(UserWarning, match=r"the last depth \(4\) has weight 0"):
        found = ed.EveryDepth(model, goal)(**ids)
    states = ed.as_stream(model).observe(ids)
    teacher, student = (states.logits(d).log_softmax(-1) for d in (ed.as_stream(model).depth, 1))
    expected = (teacher.exp() * (teacher - student)).sum(-1).mean()
    assert found.loss.item() == pytest.approx(expected.item(), rel=1e-5)
