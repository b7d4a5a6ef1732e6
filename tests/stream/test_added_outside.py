"""Networks whose own forward adds what its modules return: `x = attention(x) + x` in a loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.zoo.verbs import VERBS, labeled
from torch import Tensor, nn

import everydepth as ed
from everydepth.errors import UnsupportedModelError
from everydepth.stream import record_branches

WIDTH, WORDS, ROWS = 8, 20, 4


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        scores = q @ k.transpose(-1, -2)
        scores = scores if mask is None else scores.masked_fill(~mask[:, None], -1e9)
        return self.out(scores.softmax(-1) @ v)


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 12), nn.GELU(), nn.Linear(12, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


class Paired(nn.Module):
    """A list of pairs in a module of its own, which norms the last state."""

    def __init__(self) -> None:
        super().__init__()
        pairs = (nn.ModuleList([Attention(), FeedForward()]) for _ in range(3))
        self.layers, self.norm = nn.ModuleList(pairs), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        for attention, mlp in self.layers:
            x = attention(x, mask=mask) + x
            x = mlp(x) + x
        return self.norm(x)


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.body, self.head = nn.Embedding(WORDS, WIDTH), Paired(), nn.Linear(WIDTH, 5)

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.head(self.body(self.words(tokens), mask)[:, 0])


class Flat(nn.Module):
    """One list."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, 5)
        self.parts = nn.ModuleList([Attention(), FeedForward(), Attention(), FeedForward()])

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        for part in self.parts:
            x = x + part(x)
        return self.head(x.mean(1))


class Normed(Flat):
    """Post-norm: a norm of the model's own after every sum."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in self.parts)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        for part, norm in zip(self.parts, self.norms, strict=False):
            x = norm(x + part(x))
        return self.head(x.mean(1))


class NormedLists(nn.Module):
    """The same in lists of four."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, 5)
        four = (
            [Attention(), nn.LayerNorm(WIDTH), FeedForward(), nn.LayerNorm(WIDTH)] for _ in range(2)
        )
        self.layers = nn.ModuleList(map(nn.ModuleList, four))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        for attention, first, mlp, second in self.layers:
            x = first(x + attention(x))
            x = second(x + mlp(x))
        return self.head(x.mean(1))


MODELS = {cls.__name__: cls for cls in (Words, Flat, Normed, NormedLists)}


def made(name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    return MODELS[name]().eval(), {"tokens": torch.randint(0, WORDS, (ROWS, 6))}


@torch.no_grad()
@pytest.mark.parametrize(("name", "depth"), [("Words", 6), ("Flat", 4), ("Normed", 4)])
def test_a_model_that_adds_by_itself_keeps_every_clause(name: str, depth: int) -> None:
    model, batch = made(name)
    stream = ed.as_stream(model)
    report = ed.check_stream(stream, batch)
    assert report.ok, str(report)
    assert stream.depth == depth
    assert all(len(block.branches) == 1 for block in stream.blocks)
    assert "Attention, added to the state by the model itself" in str(stream)
    states = stream.observe(batch)
    assert torch.equal(stream.advance(stream.start(batch)).h, states[depth])


@torch.no_grad()
@pytest.mark.parametrize("name", MODELS)
def test_it_is_cut_at_every_depth(name: str) -> None:
    model, batch = made(name)
    stream = ed.as_stream(model)
    states = stream.observe(batch)
    for depth in range(1, stream.depth + 1):
        small = ed.at_depth(model, depth)
        assert type(small) is type(model)
        assert torch.equal(small(**batch), states.logits(depth))
        assert ed.as_stream(small).depth == depth
        assert sum(p.numel() for p in small.parameters()) < sum(
            p.numel() for p in model.parameters()
        ) or (depth == stream.depth)
    if name == "Words":
        assert len(ed.at_depth(model, 4).body.layers) == 2


@pytest.mark.parametrize("verb", sorted(VERBS.keys() - {"export", "generate"}))
@pytest.mark.parametrize("name", ["Words", "Flat"])
def test_verbs_work_on_it(name: str, verb: str, tmp_path: Path) -> None:
    model, batch = made(name)
    stream = ed.as_stream(model)
    VERBS[verb](stream, labeled(stream, batch), tmp_path)


def test_its_branches_are_recorded_and_gradients_reach_the_last_state() -> None:
    model, batch = made("Words")
    stream = ed.as_stream(model)
    with record_branches(stream.blocks) as records:
        states = stream.observe(batch)
    for number, (record,) in enumerate(records, start=1):
        assert torch.equal(record.out + record.x, states[number])
    (slope,) = torch.autograd.grad(states.logits(6).sum(), [states.h[6]])
    assert bool(slope.any())


def test_it_is_exact_in_training_mode_and_with_a_mask() -> None:
    model, batch = made("Words")
    stream, mask = ed.as_stream(model), torch.rand(ROWS, 6) > 0.3
    mask[:, 0] = True
    model.train()
    for given in (batch, {**batch, "mask": mask}):
        torch.manual_seed(1)
        wanted = model(**given)
        torch.manual_seed(1)
        assert torch.equal(stream.observe(given).logits(6), wanted)


class Dropping(Flat):
    """A dropout of the model's own between a module and its sum."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.1)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        for part in self.parts:
            x = x + self.drop(part(x))
        return self.head(x.mean(1))


class Outer(Flat):
    """Norms of the model's own before every module."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in self.parts)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        for norm, part in zip(self.norms, self.parts, strict=True):
            x = x + part(norm(x))
        return self.head(x.mean(1))


class Step(nn.Module):
    """What the refusal advises."""

    def __init__(self, norm: nn.Module, f: nn.Module) -> None:
        super().__init__()
        self.norm, self.f = norm, f

    def forward(self, x: Tensor) -> Tensor:
        return x + self.f(self.norm(x))


class Advised(nn.Module):
    def __init__(self, of: Any) -> None:
        super().__init__()
        self.words, self.head = of.words, of.head
        self.steps = nn.ModuleList(map(Step, of.norms, of.parts))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        for step in self.steps:
            x = step(x)
        return self.head(x.mean(1))


@torch.no_grad()
@pytest.mark.parametrize("kind", [Dropping, Outer])
def test_other_sums_of_the_models_own_are_refused_with_advice(kind: type[Flat]) -> None:
    torch.manual_seed(0)
    with pytest.raises(UnsupportedModelError, match=r"`return x \+ self\.f\(self\.norm\(x\)\)`"):
        ed.as_stream(kind().eval()).depth  # noqa: B018 - discovered when first needed


@torch.no_grad()
def test_the_advice_works() -> None:
    torch.manual_seed(0)
    model, batch = Outer().eval(), {"tokens": torch.randint(0, WORDS, (ROWS, 6))}
    advised = Advised(model).eval()
    assert torch.equal(advised(**batch), model(**batch))
    report = ed.check_stream(advised, batch)
    assert report.ok, str(report)
    assert ed.as_stream(advised).depth == 4


class Sometimes(Flat):
    """Adds what one module returns only if the first word is even."""

    def __init__(self, place: int) -> None:
        super().__init__()
        self.place = place

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        for place, part in enumerate(self.parts):
            added = place != self.place or int(tokens[0, 0]) % 2 == 0
            x = x + part(x) if added else part(x)
        return self.head(x.mean(1))


@pytest.mark.parametrize("place", [0, 1, 3])
def test_a_sum_that_depends_on_the_data_is_refused_where_it_is_left_out(place: int) -> None:
    tokens = torch.zeros(2, 4, dtype=torch.long)
    stream = ed.as_stream(Sometimes(place).eval(), example={"tokens": tokens})
    assert stream.observe(tokens).logits(2).shape == (2, 5)
    with pytest.raises(UnsupportedModelError, match="otherwise than by adding it to"):
        stream.observe(tokens + 1)


class DropPath(Flat):
    """In training mode, drops what its modules return, by arithmetic of its own."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        for part in self.parts:
            out = part(x)
            x = x + (out * torch.bernoulli(torch.full_like(out, 0.5)) if self.training else out)
        return self.head(x.mean(1))


def test_a_drop_path_of_the_models_own_is_refused_in_training_mode() -> None:
    tokens = torch.zeros(2, 4, dtype=torch.long)
    model = DropPath().eval()
    stream = ed.as_stream(model, example={"tokens": tokens})
    assert torch.equal(stream.observe(tokens).logits(4), model(tokens))
    model.train()
    for run in (stream.observe, stream.start):
        with pytest.raises(UnsupportedModelError, match="otherwise than by adding it to"):
            run(tokens)
