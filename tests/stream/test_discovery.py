"""Streams that no file describes: found on a running model, and held to the same contract."""

from __future__ import annotations

import gc
import random
import re
import weakref
from copy import deepcopy
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers as hf
from tests.zoo import ENTRIES
from tests.zoo.stock import stock
from tests.zoo.table import Verdicts, entries, measured, read, rendered
from tests.zoo.verbs import CLASSES, VERBS, applies, labeled
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 (its usual name)

import everydepth as ed
from everydepth.errors import BatchError, SettingError, UnsupportedModelError
from everydepth.stream.discovery import DiscoveredStream

WIDTH, WORDS = 16, 40


def mix(width: int = WIDTH) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))


class Mixer(nn.Module):
    """Mixes tokens by a running mean, so that blocks are not only pointwise."""

    def __init__(self) -> None:
        super().__init__()
        self.give, self.take = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        steps = torch.arange(1, x.shape[1] + 1, device=x.device)[:, None]
        return self.take(torch.tanh(self.give(x)).cumsum(1) / steps)


class Parallel(nn.Module):
    """Two branches of one norm, each times a constant, added to a skip times another."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.tokens, self.channels = nn.LayerNorm(WIDTH), Mixer(), mix()

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return 0.9 * x + 0.3 * (self.tokens(y) + self.channels(y))


class Sandwich(nn.Module):
    """A norm before and after each branch; the state comes as a keyword, the output in a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.ahead, self.behind = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.tokens, self.channels = Mixer(), mix()

    def forward(self, *, value: Tensor) -> tuple[Tensor, None]:
        value = value + self.after(self.tokens(self.before(value)))
        more = self.behind(self.channels(self.ahead(value)))
        return value + F.dropout(more, 0.1, self.training), None


class Bump(nn.Module):
    """A residual block of convolutions whose skip may change the shape."""

    def __init__(self, width: int, then: int) -> None:
        super().__init__()
        stride = 1 if width == then else 2
        self.one = nn.Conv2d(width, then, 3, stride, 1, bias=False)
        self.norm_one, self.norm_two = nn.BatchNorm2d(then), nn.BatchNorm2d(then)
        self.two = nn.Conv2d(then, then, 3, 1, 1, bias=False)
        self.way = None if width == then else nn.Conv2d(width, then, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm_two(self.two(torch.relu(self.norm_one(self.one(x)))))
        y += x if self.way is None else self.way(x)
        return torch.relu(y)


class Words(nn.Module):
    """Tokens in, the class of a text out; its logits are scaled and capped."""

    def __init__(self, block: type[nn.Module], *, named: bool = False) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.stack = nn.ModuleList(block() for _ in range(3))
        self.final, self.out, self.named = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 5), named

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.words(tokens)
        for block in self.stack:
            h = block(value=h)[0] if self.named else block(h)
        z = self.out(self.final(h).mean(1))
        return 3.0 * torch.tanh(z / 3.0)


class Pictures(nn.Module):
    """Two stages of convolutions, then one of another shape; pooled and read out."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, 1, 1)
        self.stage1 = nn.Sequential(Bump(8, 8), Bump(8, 8))
        self.stage2 = nn.Sequential(Bump(8, 16), Bump(16, 16))
        self.out = nn.Linear(16, 5)

    def forward(self, image: Tensor) -> Tensor:
        return self.out(self.stage2(self.stage1(self.stem(image))).mean((2, 3)))


class Stretch(nn.Module):
    """In the place of a norm: multiplies and adds, each channel by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.by, self.plus = nn.Parameter(torch.ones(WIDTH) / 2), nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.by + self.plus


class Waves(nn.Module):
    """What a Fourier transform gives, which no weight can make zero."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.fft(torch.fft.fft(x, dim=-1), dim=1).real / 10


class Transforms(nn.Module):
    """Tokens are mixed without a weight; what follows each sum adds a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.channels, self.one, self.two = Waves(), mix(), Stretch(), Stretch()

    def forward(self, x: Tensor) -> Tensor:
        x = self.one(x + self.tokens(x))
        return self.two(x + self.channels(x))


class Turned(nn.Module):
    """Convolves with channels first, maps them last, and turns and scales before the sum."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.map = nn.Conv2d(8, 8, 3, padding=1, groups=8), mix(8)
        self.gamma = nn.Parameter(torch.full((8,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        y = self.map(self.conv(x).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return x + y.mul(self.gamma.reshape(1, -1, 1, 1))


class ManyTurned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.stage = nn.Conv2d(3, 8, 4, 4), nn.Sequential(*(Turned() for _ in range(3)))
        self.out = nn.Linear(8, 5)

    def forward(self, image: Tensor) -> Tensor:
        return self.out(self.stage(self.stem(image)).mean((2, 3)))


class NamedStage(nn.Module):
    """Blocks under names of their own, as some libraries keep them."""

    def __init__(self, width: int, then: int) -> None:
        super().__init__()
        self.b1, self.b2 = Bump(width, then), Bump(then, then)

    def forward(self, x: Tensor) -> Tensor:
        return self.b2(self.b1(x))


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.s1, self.s2 = nn.Conv2d(3, 8, 4, 4), NamedStage(8, 8), NamedStage(8, 16)
        self.out = nn.Linear(16, 5)

    def forward(self, image: Tensor) -> Tensor:
        return self.out(self.s2(self.s1(self.stem(image))).mean((2, 3)))


class Sized(nn.Module):
    """Mixes tokens, then convolves them as a picture, whose size goes in and out."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.map = nn.LayerNorm(8), mix(8)
        self.conv = nn.Conv2d(8, 8, 3, padding=1, groups=8)

    def forward(self, x: Tensor, size: tuple[int, int]) -> tuple[Tensor, tuple[int, int]]:
        x = x + self.map(self.norm(x))
        y = self.conv(x.transpose(1, 2).unflatten(2, size)).flatten(2).transpose(1, 2)
        return x + y, (size[0], size[1])


class Positioned(nn.Module):
    """Two stages; after the first block of each, positions are added by a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.out = nn.Conv2d(3, 8, 4, 4), nn.Linear(8, 5)
        self.stages = nn.ModuleList(nn.ModuleList(Sized() for _ in range(3)) for _ in range(2))
        self.places = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.between = nn.Conv2d(8, 8, 2, 2)

    def forward(self, image: Tensor) -> Tensor:
        x = self.stem(image)
        for number, (stage, place) in enumerate(zip(self.stages, self.places, strict=True)):
            x = self.between(x) if number else x
            size = (x.shape[2], x.shape[3])
            x = x.flatten(2).transpose(1, 2)
            for index, block in enumerate(stage):
                x, size = block(x, size)
                x = place(x) if index == 0 else x
            x = x.transpose(1, 2).unflatten(2, size)
        return self.out(x.mean((2, 3)))


class Ghost(nn.Module):
    """What it adds is put together from two maps, one of which reads the other."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.cheap = nn.Linear(WIDTH, WIDTH // 2), nn.Linear(WIDTH // 2, WIDTH // 2)
        self.last = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(torch.tanh(x))
        return x + self.last(torch.cat([y, self.cheap(y)], -1))


def tokens() -> dict[str, Tensor]:
    return {"tokens": torch.randint(0, WORDS, (3, 6))}


OWN: dict[str, tuple[Any, Any, int]] = {
    "parallel with multipliers": (lambda: Words(Parallel), tokens, 3),
    "sandwich norms": (lambda: Words(Sandwich, named=True), tokens, 3),
    "convolutional stages": (Pictures, lambda: {"image": torch.randn(3, 3, 12, 12)}, 4),
    "a branch without weights": (lambda: Words(Transforms), tokens, 3),
    "axes turned in a block": (ManyTurned, lambda: {"image": torch.randn(3, 3, 20, 20)}, 3),
    "blocks under names": (Named, lambda: {"image": torch.randn(3, 3, 32, 32)}, 4),
    "something after a first block": (Positioned, lambda: {"image": torch.randn(3, 3, 32, 24)}, 6),
    "a branch put together": (lambda: Words(Ghost), tokens, 3),
}


@pytest.mark.parametrize("name", OWN)
def test_a_model_written_here_in_a_style_nobody_described_keeps_every_clause(name: str) -> None:
    build, feed, depth = OWN[name]
    model, batch = build().eval(), feed()
    stream = ed.as_stream(model)
    assert stream.depth == depth
    assert all(block.branches for block in stream.blocks)
    report = ed.check_stream(model, batch)
    assert report.ok, str(report)


@pytest.mark.parametrize("name", OWN)
@pytest.mark.parametrize("verb", ["train", "trace", "at_depth", "predict", "scaled_skip"])
def test_verbs_work_on_a_model_nobody_described(name: str, verb: str, tmp_path: Path) -> None:
    build, feed, _ = OWN[name]
    stream = ed.as_stream(build().eval())
    VERBS[verb](stream, labeled(stream, feed()), tmp_path)


class Fused(nn.Module):
    """Reads the end of every stage for its prediction."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, 1, 1)
        self.stages = nn.ModuleList(
            [nn.Sequential(Bump(8, 8), Bump(8, 8)), nn.Sequential(Bump(8, 16), Bump(16, 16))]
        )
        self.out = nn.Linear(24, 5)

    def forward(self, image: Tensor) -> Tensor:
        x, ends = self.stem(image), []
        for stage in self.stages:
            x = stage(x)
            ends.append(x.mean((2, 3)))
        return self.out(torch.cat(ends, 1))


class Queried(nn.Module):
    """Gives all blocks of a stage what was read off the state before it."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.out = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, 5)
        self.stages = nn.ModuleList(nn.ModuleList(Asked() for _ in range(2)) for _ in range(2))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        for stage in self.stages:
            query = x.mean(1, keepdim=True)
            for block in stage:
                x = block(x, query)
        return self.out(x.mean(1))


class Asked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.map = mix()

    def forward(self, x: Tensor, query: Tensor) -> Tensor:
        return x + self.map(x * query)


@pytest.mark.parametrize(
    ("build", "feed"),
    [(Fused, lambda: {"image": torch.randn(3, 3, 12, 12)}), (Queried, tokens)],
)
def test_of_a_model_that_reads_its_early_stages_the_last_is_followed_and_said_so(
    build: Any, feed: Any
) -> None:
    model = build().eval()
    stream = ed.as_stream(model, example=feed())
    assert stream.depth == 2
    assert "before the stream: stages.0: the model reads more" in str(stream)
    report = ed.check_stream(stream, feed())
    assert report.ok, str(report)


def test_a_block_under_a_name_of_its_own_cannot_be_inserted() -> None:
    with pytest.raises(UnsupportedModelError, match="blocks as attributes rather than in a list"):
        ed.insert(Named().eval(), after=4)


def test_a_cut_model_has_something_silent_only_where_a_block_would_be_missed() -> None:
    cut = ed.at_depth(Positioned().eval(), 1)
    assert [len(stage) for stage in cut.stages] == [2, 2]
    assert isinstance(cut.stages[0][0], Sized)
    assert not list(cut.stages[0][1].parameters())
    assert not list(cut.stages[1].parameters())
    named = ed.at_depth(Named().eval(), 1)
    assert isinstance(named.s1.b2, nn.Identity)
    assert isinstance(named.s2.b1, nn.Conv2d)


def test_a_branch_without_weights_is_known_but_cannot_be_silent_in_a_new_block() -> None:
    stream = ed.as_stream(Words(Transforms).eval())
    assert [branch.kind for branch in stream.blocks[0].branches] == ["mixer", "mlp"]
    assert all(isinstance(branch.post, Stretch) for branch in stream.blocks[0].branches)
    with pytest.raises(UnsupportedModelError, match="mixer branch ends in Waves, which has no wei"):
        ed.insert(stream, after=3)


def test_the_skip_of_a_block_that_turns_its_axes_is_scaled_as_written() -> None:
    model = ManyTurned().eval()
    with torch.no_grad(), ed.scaled_skip(model, layer=3, c=0.25):
        image = torch.randn(2, 3, 20, 20)
        *rest, last = model.stage
        x = nn.Sequential(*rest)(model.stem(image))
        scaled = model.stage(model.stem(image))
    with torch.no_grad():
        y = last(x) - x
    torch.testing.assert_close(scaled, 0.25 * x + y)


def test_constants_of_a_sum_are_read_off_it() -> None:
    block = ed.as_stream(Words(Parallel).eval()).blocks[0]
    assert block.parallel
    assert [branch.scale for branch in block.branches] == pytest.approx([0.3, 0.3])
    assert [branch.weight for branch in block.branches] == pytest.approx([0.9, 1.0])


def test_dropout_by_a_function_is_seen_in_eval_mode() -> None:
    first, second = ed.as_stream(Words(Sandwich, named=True).eval()).blocks[0].branches
    assert (first.dropout, second.dropout) == (0.0, 0.1)


def test_a_readout_that_caps_its_logits_is_exact_at_every_depth() -> None:
    model, batch = Words(Parallel).eval(), tokens()
    states = ed.as_stream(model).observe(batch)
    h = model.final(states[1]).mean(1)
    expected = 3.0 * torch.tanh(model.out(h) / 3.0)
    torch.testing.assert_close(states.logits(1), expected)
    assert torch.equal(states.logits(3), model(**batch))


FIXED = (
    "causal:Gemma2ForCausalLM", "causal:FalconForCausalLM", "causal:MixtralForCausalLM",
    "causal:BloomForCausalLM", "causal:GPTJForCausalLM", "masked:AlbertForMaskedLM",
    "masked:ModernBertForMaskedLM", "seq2seq:T5ForConditionalGeneration",
    "image:ConvNextForImageClassification", "image:Dinov2ForImageClassification",
    "masked:IBertForMaskedLM", "token:LiltForTokenClassification",
    "sequence:FunnelForSequenceClassification", "causal:GlmMoeDsaForCausalLM",
    "causal:Gemma4ForCausalLM",
)  # fmt: skip
KNOWN = {entry.name: entry for entry in stock()}
PAGE = (Path(__file__).parents[2] / "docs" / "models.md").read_text()
FOLLOWED = {
    name
    for name, rest in re.findall(r"^\| (\w+:\w+) \| (\d.*)$", PAGE, re.MULTILINE)
    if "**no**" not in rest
}
# Drawn once for all, so that a run can be repeated; `slow` has them all.
DRAWN = random.Random(0).sample(sorted((FOLLOWED & set(KNOWN)) - set(FIXED)), 4)


@pytest.mark.parametrize("name", FIXED)
def test_stock_classes_without_a_file_keep_every_clause_with_all_branches(name: str) -> None:
    model, batch = KNOWN[name].make()
    stream = DiscoveredStream(model)
    assert all(block.branches for block in stream.blocks)
    report = ed.check_stream(stream, batch)
    assert report.ok, str(report)


# DeBERTa compiles functions when it is imported.
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
@pytest.mark.parametrize("name", DRAWN)
def test_classes_drawn_from_the_auto_mappings_predict_bit_for_bit(name: str) -> None:
    model, batch = KNOWN[name].make()
    stream = DiscoveredStream(model)
    with torch.no_grad():
        states = stream.observe(batch)
        read = stream.readout(states.h[-1], stream.depth, batch)
        assert torch.equal(read, stream.prediction(states.output))
        middle = stream.readout(states.h[1], 1, batch)
    assert middle.shape == read.shape


# -- one stream, whatever comes -------------------------------------------------------------------


def test_a_batch_of_another_shape_and_padding_gives_the_same_stream() -> None:
    model, batch = KNOWN["sequence:Gemma2ForSequenceClassification"].make()
    first, second = DiscoveredStream(model, example=batch), DiscoveredStream(model)
    longer = {k: torch.cat([v, v[:, :3]], 1) for k, v in batch.items()}
    longer["attention_mask"][0, :4] = 0
    longer["input_ids"][0, :4] = model.config.pad_token_id
    for stream in (first, second):
        states = stream.observe(longer)
        z = stream.readout(states[stream.depth], stream.depth, longer)
        assert torch.equal(z, model(**longer).logits)
        half = stream.readout(states[1], 1, longer)
        cut = stream.truncated(1, share=True)(**longer).logits
        torch.testing.assert_close(half, cut)


def test_looking_at_a_model_leaves_nothing_behind_and_costs_one_batch_once() -> None:
    model, batch = KNOWN["causal:GPTJForCausalLM"].make()
    model.train()
    calls: list[int] = []
    handle = model.transformer.h[0].mlp.register_forward_hook(lambda *_: calls.append(1))
    stream = DiscoveredStream(model, example=batch)
    seen = len(calls)
    stream.observe(batch)
    stream.observe(batch)
    handle.remove()
    assert len(calls) == seen + 2
    assert model.training
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert not any("forward" in vars(m) for m in model.modules())


@pytest.mark.parametrize(
    ("name", "task"),
    [
        ("causal:GPTJForCausalLM", "causal_lm"),
        ("causal:BertLMHeadModel", "masked_lm"),
        ("token:LiltForTokenClassification", "token_classification"),
    ],
)
def test_blocks_run_once_to_be_discovered(name: str, task: str) -> None:
    model, _ = KNOWN[name].make()
    calls: list[int] = []
    inside = next(m for path, m in model.named_modules() if path.endswith(("q_proj", "query")))
    inside.register_forward_hook(lambda *_: calls.append(1))
    assert DiscoveredStream(model).task == task
    assert len(calls) == 1


def test_a_model_is_looked_at_once_until_it_changes() -> None:
    model, _ = KNOWN["causal:GPTJForCausalLM"].make()
    first = DiscoveredStream(model).structure
    assert DiscoveredStream(model).structure is first
    copied = deepcopy(model)
    assert DiscoveredStream(copied).structure.blocks[0].module is copied.transformer.h[0]
    model.transformer.h[0].attn.scale_attn = 3.0
    assert DiscoveredStream(model).structure is not first
    model.transformer.h.pop(2)
    assert DiscoveredStream(model).depth == 2
    ref = weakref.ref(model)
    del model, first
    gc.collect()
    assert ref() is None


def test_a_batch_of_another_dtype_gives_the_same_stream() -> None:
    model, batch = Pictures().eval(), {"image": torch.randn(3, 3, 12, 12)}
    stream = ed.as_stream(model, example=batch)
    single = stream.observe(batch).logits(2)
    model.double()
    wide = {"image": torch.cat([batch["image"], batch["image"]]).double()}
    states = stream.observe(wide)
    assert states.logits(2).dtype == torch.float64
    torch.testing.assert_close(states.logits(2)[:3].float(), single, rtol=1e-4, atol=1e-5)
    assert torch.equal(states.logits(4), model(**wide))


class Aside(nn.Module):
    """Keeps a second state beside the first; each reads the other."""

    def __init__(self) -> None:
        super().__init__()
        self.main, self.side = mix(), mix()

    def forward(self, h: Tensor, note: Tensor) -> tuple[Tensor, Tensor]:
        return h + self.main(h + note), note + self.side(note * h)


class Noted(Words):
    def forward(self, tokens: Tensor) -> Tensor:
        h = self.words(tokens)
        note = torch.ones_like(h)
        for block in self.stack:
            h, note = block(h, note)
        return self.out(self.final(h).mean(1))


def test_a_second_state_goes_from_block_to_block_with_the_first() -> None:
    report = ed.check_stream(Noted(Aside).eval(), tokens())
    assert report.ok, str(report)


class TokensFirst(nn.Module):
    """A stack of torch's own layers, whose states are (token, row, channel)."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.place = nn.Embedding(WORDS, WIDTH), nn.Parameter(torch.randn(8, 1, WIDTH))
        self.stack = nn.ModuleList(Sums() for _ in range(3))
        self.out = nn.Linear(WIDTH, 5)

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.words(tokens).transpose(0, 1)
        for block in self.stack:
            h = block(h, self.place[: h.shape[0]])
        return self.out(h.mean(0))


class Sums(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attend, self.norm = nn.MultiheadAttention(WIDTH, 2), nn.LayerNorm(WIDTH)

    def forward(self, h: Tensor, place: Tensor) -> Tensor:
        x = self.norm(h) + place
        return h + self.attend(x, x, x, need_weights=False)[0]


def test_rows_are_selected_where_they_are_and_not_where_a_table_has_their_number() -> None:
    # Three rows of three tokens: by its shape a table of positions could be one entry per row.
    model, batch = TokensFirst().eval(), {"tokens": torch.randint(0, WORDS, (3, 3))}
    stream = ed.as_stream(model, example=batch)
    chosen = torch.tensor([2, 0])
    part = stream.advance(stream.advance(stream.start(batch), 1).select(chosen))
    assert part.h.shape == (3, 2, WIDTH)
    torch.testing.assert_close(stream.logits(part), model(batch["tokens"][chosen]))


def test_early_stopping_that_depends_on_the_data_is_refused_and_not_misread() -> None:
    class Stopping(Words):
        def forward(self, tokens: Tensor) -> Tensor:
            h = self.words(tokens)
            for block in self.stack:
                if bool((tokens == 0).all()):
                    break
                h = block(h)
            return self.out(self.final(h).mean(1))

    stream = ed.as_stream(Stopping(Parallel).eval())
    with pytest.raises(UnsupportedModelError, match="ran 0 of its 3 blocks"):
        stream.observe({"tokens": torch.zeros(2, 4, dtype=torch.long)})


def test_layer_drop_in_training_is_refused_and_not_misread() -> None:
    class Dropping(Words):
        def forward(self, tokens: Tensor) -> Tensor:
            h = self.words(tokens)
            for i, block in enumerate(self.stack):
                h = h if self.training and i == 1 else block(h)
            return self.out(self.final(h).mean(1))

    model = Dropping(Parallel)
    stream = ed.as_stream(model)
    assert stream.depth == 3
    model.train()
    with pytest.raises(UnsupportedModelError, match="ran 2 of its 3 blocks"):
        stream.observe(tokens())


def test_a_tail_that_is_random_is_refused() -> None:
    class Random(Words):
        def forward(self, tokens: Tensor) -> Tensor:
            return super().forward(tokens) + torch.rand(())

    with pytest.raises(UnsupportedModelError, match="the model may be random, keep a state"):
        ed.as_stream(Random(Parallel))


def test_a_tail_that_keeps_a_state_between_calls_is_refused() -> None:
    class Counting(Words):
        calls = 0

        def forward(self, tokens: Tensor) -> Tensor:
            self.calls += 1
            return super().forward(tokens) * self.calls

    with pytest.raises(UnsupportedModelError, match="keep a state between calls"):
        ed.as_stream(Counting(Parallel))


def test_a_network_without_skips_is_told_so() -> None:
    plain = nn.Sequential(nn.Linear(4, 4), nn.Sequential(mix(4), mix(4)), nn.Linear(4, 2))
    with pytest.raises(UnsupportedModelError, match="has no residual connection"):
        ed.as_stream(plain)


def test_a_batch_the_model_refuses_comes_with_the_models_own_words() -> None:
    with pytest.raises(BatchError, match=r"failed on the batch .*\(2, 7\)") as error:
        ed.as_stream(Pictures().eval(), example={"image": torch.randn(2, 7)})
    assert isinstance(error.value.__cause__, RuntimeError)
    assert str(error.value.__cause__) in str(error.value)


def test_a_config_that_asks_for_tuples_is_followed_or_told_what_to_set() -> None:
    model, batch = ENTRIES["Llama-tied-CausalLM-left"].make()
    model.config.return_dict = False
    with pytest.raises(UnsupportedModelError, match=r"set model\.config\.return_dict = True"):
        ed.check_stream(model, batch)
    model, batch = ENTRIES["Bert-SequenceClassification"].make()
    model.config.return_dict = False
    report = ed.check_stream(model, batch)
    assert report.ok, str(report)


def test_a_config_that_collects_what_routers_say_is_told_what_to_set() -> None:
    model, batch = KNOWN["causal:MixtralForCausalLM"].make()
    model.config.output_router_logits = True
    said = r"model\.config\.output_router_logits is True, .*: set it to False"
    with pytest.raises(UnsupportedModelError, match=said):
        ed.as_stream(model)
    model.config.output_router_logits = False
    assert ed.check_stream(model, batch).ok
    model, batch = KNOWN["causal:GemmaForCausalLM"].make()
    model.config.output_hidden_states = True
    assert ed.check_stream(model, batch).ok


def test_two_streams_of_equal_right_are_both_named() -> None:
    model, batch = ENTRIES["CLIPModel-vision"].make()
    with pytest.raises(SettingError) as error:
        DiscoveredStream(model, example=batch)
    assert "vision_model.encoder.layers" in str(error.value)
    assert "text_model.encoder.layers" in str(error.value)
    chosen = DiscoveredStream(model, stream="vision", example=batch)
    assert chosen.depth == 4
    with pytest.raises(SettingError, match="use a part of one of these paths"):
        DiscoveredStream(model, stream="audio", example=batch)


def test_two_towers_are_shown_a_text_and_a_picture() -> None:
    small = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2}
    text = {**small, "num_hidden_layers": 2, "vocab_size": 40, "projection_size": 16}
    vision = {**small, "num_hidden_layers": 3, "image_size": 16, "patch_size": 8}
    pair = hf.SiglipConfig(text_config=text, vision_config=vision)
    model = hf.SiglipModel(pair).eval()
    with pytest.raises(SettingError, match="2 streams that predict"):
        ed.as_stream(model)
    assert ed.as_stream(model, stream="vision").depth == 3
    assert ed.as_stream(model, stream="text").depth == 2


def test_an_encoder_decoder_is_followed_where_it_predicts_unless_told_otherwise() -> None:
    model, batch = KNOWN["seq2seq:T5ForConditionalGeneration"].make()
    decoder = DiscoveredStream(model)
    kinds = [branch.kind for branch in decoder.blocks[1].branches]
    assert kinds == ["attention", "cross_attention", "mlp"]
    encoder = ed.as_stream(model, stream="encoder", example=batch)
    assert [branch.kind for branch in encoder.blocks[1].branches] == ["attention", "mlp"]
    with torch.no_grad():
        states = encoder.observe(batch)
        assert torch.equal(encoder.readout(states[3], 3, batch), model(**batch).logits)


# -- wrapped models -------------------------------------------------------------------------------


def test_a_model_with_an_adapter_is_the_same_model() -> None:
    model, batch = KNOWN["causal:GemmaForCausalLM"].make()
    lora = peft.LoraConfig(target_modules=["q_proj", "o_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(model, lora).eval()
    report = ed.check_stream(adapted, batch)
    assert report.ok, str(report)
    assert all(block.branches for block in ed.as_stream(adapted).blocks)


def test_an_adapter_of_prompts_is_refused() -> None:
    model, _ = KNOWN["causal:GemmaForCausalLM"].make()
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    with pytest.raises(UnsupportedModelError, match="active prompt-tuning adapter"):
        ed.as_stream(peft.get_peft_model(model, config))


def test_a_stream_prints_as_a_tree() -> None:
    text = str(ed.as_stream(Words(Parallel).eval()))
    assert text.startswith("Words: 3 blocks (Parallel), task classification")
    assert "blocks 1-3: Parallel, parallel branches" in text
    assert "0.9 * x + 0.3 * [norm ... tokens]; last map tokens.take" in text
    assert "found in: stack" in text
    assert "readout: " in text


# -- all of them ----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_nineteen_of_twenty_stock_classes_keep_the_contract_nine_of_ten_with_branches() -> None:
    found = Verdicts.of(measured(entry, verbs=False) for entry in stock())
    assert found.ran >= 480
    assert found.whole >= 0.95 * found.ran, str(found)
    assert found.branched >= 0.90 * found.ran, str(found)


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_every_residual_classifier_of_torchvision_keeps_the_contract() -> None:
    found = Verdicts.of(measured(entry, verbs=False) for entry in entries("torchvision"))
    assert found.ran == 17
    assert found.whole == found.ran, str(found)


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_nine_of_ten_stock_classes_go_through_every_verb_that_applies() -> None:
    drawn = random.Random(0).sample(stock(), 100)
    found = Verdicts.of(measured(entry) for entry in drawn)
    assert found.used >= 0.90 * found.tried, str(found)


def test_a_verb_applies_unless_it_says_which_property_is_missing(tmp_path: Path) -> None:
    model, batch = KNOWN["causal:GPTJForCausalLM"].make()
    stream = ed.as_stream(model)
    with pytest.raises(UnsupportedModelError, match=CLASSES) as refusal:
        VERBS["predict"](stream, labeled(stream, batch), tmp_path)
    assert not applies("predict", refusal.value)
    assert applies("train", refusal.value)
    assert applies("predict", RuntimeError(CLASSES))


def test_a_class_that_scales_by_its_number_of_blocks_is_deepened_with_its_config() -> None:
    model, _ = KNOWN["causal:MiniCPM3ForCausalLM"].make()
    big = ed.insert(model, after=1)
    built = type(model)(big.config)
    scales = [layer.residual_scale for layer in built.model.layers]
    assert scales == pytest.approx([model.model.layers[0].residual_scale] * 4, rel=1e-12)
    assert [layer.residual_scale for layer in big.model.layers] == pytest.approx(scales)


def test_a_norm_that_was_left_out_does_not_hide_the_skip_from_growth(tmp_path: Path) -> None:
    model, batch = KNOWN["token:LiltForTokenClassification"].make()
    stream = ed.as_stream(model)
    VERBS["growth"](stream, labeled(stream, batch), tmp_path)


def test_a_model_that_would_not_call_a_new_block_says_so(tmp_path: Path) -> None:
    model, batch = KNOWN["causal:MllamaForCausalLM"].make()
    stream = ed.as_stream(model)
    with pytest.raises(UnsupportedModelError, match="does not call a new block after depth 3"):
        VERBS["growth"](stream, labeled(stream, batch), tmp_path)


def test_experts_under_names_of_their_own_cannot_be_scored(tmp_path: Path) -> None:
    model, batch = KNOWN["seq2seq:SwitchTransformersForConditionalGeneration"].make()
    stream = ed.as_stream(model)
    with pytest.raises(UnsupportedModelError, match=r"one of several Linear, .* can be scored"):
        VERBS["growth"](stream, labeled(stream, batch), tmp_path)


def test_a_depth_that_the_config_forbids_is_refused_in_its_words(tmp_path: Path) -> None:
    model, batch = KNOWN["masked:NeoMMEForMaskedLM"].make()
    stream = ed.as_stream(model)
    for verb in ("at_depth", "export"):
        with pytest.raises(UnsupportedModelError, match=r"cannot describe .* full_attention"):
            VERBS[verb](stream, labeled(stream, batch), tmp_path)


def test_the_table_of_models_says_what_was_found_and_what_was_not() -> None:
    row = measured(KNOWN["causal:GPTJForCausalLM"], verbs=False)
    broken = {"name": "token:Other", "error": "UnsupportedModelError: no chain; say"}
    bare = {"name": "image:Bare", "error": "UnsupportedModelError: Bare has no residual connection"}
    unbuilt = {"name": "masked:Large", "unbuilt": "ValueError: too large"}
    page = rendered([row, broken, bare, unbuilt])
    assert "2 with residual connections build and run. 1 of them (50.0%) keep" in page
    assert "1 have no residual connection and are told so. 1 do not build or run." in page
    assert "| image:Bare | - | no residual connection |" in page
    assert "| causal:GPTJForCausalLM | 3 | attention, mlp | modules | yes |" in page
    assert "not followed: no chain |" in page
    assert "- `masked:Large`: ValueError: too large" in page


def test_the_table_of_models_can_be_read_and_written_again() -> None:
    written = rendered(read(PAGE).values())
    assert written == PAGE
    assert read(PAGE)["causal:GPT2LMHeadModel"]["insert"] is True


def test_the_tree_says_where_something_runs_between_blocks() -> None:
    text = str(ed.as_stream(Positioned().eval(), example=torch.randn(3, 3, 32, 24)))
    assert "between blocks: the model changes the state after block 1, 3, 4" in text
    assert "between blocks" not in str(ed.as_stream(Words(Parallel).eval()))
