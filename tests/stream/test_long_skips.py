"""Networks that use a state again later, loop one block, or carry several streams.

Each is either followed with every clause that applies, or refused in words that say why.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import everydepth as ed
from everydepth.errors import UnsupportedModelError

WIDTH, CLASSES = 16, 5


class Mlp(nn.Sequential):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__(nn.LayerNorm(width), nn.Linear(width, 32), nn.ReLU(), nn.Linear(32, width))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = Mlp()

    def forward(self, x: Tensor, beside: Tensor | None = None) -> Tensor:
        return x + self.mlp(x if beside is None else x + beside)


class Net(nn.Module):
    """Embedding, blocks and head; how the blocks are called is for the subclasses."""

    def __init__(self, block: type[nn.Module] = Block, count: int = 4) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(8, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.blocks = nn.ModuleList(block() for _ in range(count))
        self.steps = nn.Parameter(torch.randn(count, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.run(self.embed(x)).mean(1))

    def run(self, x: Tensor) -> Tensor:
        raise NotImplementedError


class LongSkips(Net):
    """Adds early states to the stream before late blocks, as a U-Net of one width."""

    def run(self, x: Tensor) -> Tensor:
        kept: list[Tensor] = []
        for number, block in enumerate(self.blocks):
            if number < 2:
                kept.append(x)
            else:
                x = x + kept.pop()
            x = block(x)
        return x


class GivenSkips(Net):
    """Gives early states to late blocks as a second argument."""

    def run(self, x: Tensor) -> Tensor:
        kept: list[Tensor] = []
        for number, block in enumerate(self.blocks):
            if number < 2:
                kept.append(x)
            x = block(x) if number < 2 else block(x, kept.pop())
        return x


class Averages(Net):
    """Gives each block a learned average of all states so far."""

    def run(self, x: Tensor) -> Tensor:
        states = [x]
        for number, block in enumerate(self.blocks):
            mean = sum(self.steps[number, k] * h for k, h in enumerate(states))
            states.append(block(mean))
        return states[-1]


class Gathers(Net):
    """Reads a learned sum of all states out."""

    def run(self, x: Tensor) -> Tensor:
        states = [x]
        for block in self.blocks:
            states.append(block(states[-1]))
        return sum((self.steps[0, k] * h for k, h in enumerate(states)), torch.zeros(()))


class TwoLists(Net):
    """Goes down and up again in two lists; a map joins what the way down kept."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.ModuleList(Block() for _ in range(3))
        self.join = nn.ModuleList(nn.Linear(2 * WIDTH, WIDTH) for _ in range(3))

    def run(self, x: Tensor) -> Tensor:
        kept: list[Tensor] = []
        for block in self.blocks:
            kept.append(x)
            x = block(x)
        for block, join in zip(self.up, self.join, strict=True):
            x = block(join(torch.cat([x, kept.pop()], -1)))
        return x


class Unseen(Net):
    """Runs its blocks without calling them."""

    def run(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block.forward(x)
        return x


class Looped(Net):
    """One block in a loop, with an embedding of the step added to its input."""

    def __init__(self) -> None:
        super().__init__(count=1)
        self.steps = nn.Parameter(torch.randn(4, WIDTH))

    def run(self, x: Tensor) -> Tensor:
        for step in self.steps:
            x = self.blocks[0](x + step)
        return x


class Injected(Looped):
    """One block in a loop that gets the embedding again at every step."""

    def run(self, x: Tensor) -> Tensor:
        first = x
        for _ in range(4):
            x = self.blocks[0](x, first)
        return x


class Written(nn.Module):
    """A hyper-connection without mixing: three streams, one branch that reads and writes all."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = Mlp()
        self.read, self.write = (nn.Parameter(torch.randn(3)) for _ in range(2))

    def forward(self, h: Tensor) -> Tensor:
        y = self.mlp(torch.einsum("btnd,n->btd", h, self.read))
        return self.mixed(h) + y[:, :, None] * self.write[:, None]

    def mixed(self, h: Tensor) -> Tensor:
        return h


class Mixed(Written):
    """A hyper-connection: a learned matrix also mixes the streams."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Parameter(torch.eye(3) + 0.1)

    def mixed(self, h: Tensor) -> Tensor:
        return torch.einsum("btnd,nm->btmd", h, self.mix)


class Streams(Net):
    def run(self, x: Tensor) -> Tensor:
        h = x[:, :, None].expand(-1, -1, 3, -1)
        for block in self.blocks:
            h = block(h)
        return h.sum(2)


@pytest.fixture
def batch() -> Tensor:
    torch.manual_seed(0)
    return torch.randn(4, 6, 8)


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (LongSkips, "between blocks 2 and 3 an earlier state is used again"),
        (GivenSkips, "argument 1 of block 3 changes if earlier blocks are silent"),
        (Averages, "between blocks 2 and 3 an earlier state is used again"),
        (Gathers, "does not come from the end of blocks alone"),
        (Unseen, "runs the modules in blocks by `layer.forward\\(...\\)`, which hooks do not see"),
        (lambda: Streams(Mixed), "has no chain of residual blocks: it adds in 4 modules"),
    ],
)
def test_a_network_that_needs_more_than_the_previous_state_is_refused(
    model: type[nn.Module], said: str, batch: Tensor
) -> None:
    with pytest.raises(UnsupportedModelError, match=said):
        ed.as_stream(model().eval(), example=batch)


@pytest.mark.parametrize("model", [TwoLists, lambda: Streams(Written)])
def test_what_comes_before_the_stream_may_enter_it_again(
    model: type[nn.Module], batch: Tensor
) -> None:
    net = model().eval()
    ed.check_stream(net, batch, example=batch).raise_if_failed()


@pytest.mark.parametrize("model", [Looped, Injected])
def test_a_loop_is_followed_step_by_step_and_says_that_it_cannot_be_cut(
    model: type[nn.Module], batch: Tensor
) -> None:
    net = model().eval()
    report = ed.check_stream(net, batch, example=batch)
    assert [c.name for c in report.checks if c.passed is False] == ["truncation gives the same"]
    with pytest.raises(UnsupportedModelError, match="calls one module 4 times, but no field"):
        ed.at_depth(net, 2, example=batch)
