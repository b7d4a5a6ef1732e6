"""Plain modules in styles no adapter has seen: odd skips, rows in other dimensions, stages."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from tests.zoo import ENTRIES
from tests.zoo.verbs import VERBS
from torch import Tensor, nn

import everydepth as ed
from everydepth.errors import UnsupportedModelError
from everydepth.growth import score
from everydepth.objectives.layer_dropout import observe_kept
from everydepth.stream import ResidualStream, record_branches, sites
from everydepth.stream.block import current

ROWS, CLASSES = 4, 5


class Activated(nn.Module):
    """Its skip reads the state behind an activation and a factor, as its branch does."""

    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        self.act, self.down = nn.SiLU(), nn.Conv2d(inside, outside, 1, 2)
        self.first, self.last = nn.Conv2d(inside, 8, 3, 2, 1), nn.Conv2d(8, outside, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.act(x) * 0.9
        return self.last(torch.relu(self.first(y))) * 0.2 + self.down(y)


class Widening(nn.Module):
    """Adds the state to the first of its new channels."""

    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        self.inside = inside
        self.first, self.last = nn.Conv2d(inside, 8, 3, 1, 1), nn.Conv2d(8, outside, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.last(torch.relu(self.first(x)))
        return torch.cat([y[:, : self.inside] + x, y[:, self.inside :]], dim=1)


class Net(nn.Module):
    def __init__(self, block: type[nn.Module]) -> None:
        super().__init__()
        self.stem, self.out = nn.Conv2d(3, 6, 2, 2), nn.Linear(14, CLASSES)
        self.stages = nn.Sequential(block(6, 10), block(10, 14))

    def forward(self, image: Tensor) -> Tensor:
        return self.out(self.stages(self.stem(image)).mean((2, 3)))


class Mix(nn.Module):
    """One residual connection on a state whose last dimension is the width."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(width),
            nn.Linear(width, 12),
            nn.Linear(12, width),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x + x.mean(1, keepdim=True)))))


class Fused(Mix):
    """The branch is scaled and added by one operation."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.scale = nn.Parameter(torch.full((width,), 0.3))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addcmul(x, self.down(torch.tanh(self.up(self.norm(x)))), self.scale, value=2.0)


class FusedInPlace(Fused):
    def forward(self, x: Tensor) -> Tensor:
        added = self.down(torch.tanh(self.up(self.norm(x))))
        return x.clone().addcmul_(added, self.scale, value=-0.5)


class Interpolated(Mix):
    """A part of the state and a part of the branch."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.lerp(x, self.down(torch.tanh(self.up(self.norm(x)))), 0.4)


class Chained(nn.Module):
    def __init__(self, block: type[Mix]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block(8) for _ in range(3))
        self.out = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.out(x.mean(1))


class Patched(nn.Module):
    """Rows and the four places within a patch share the first dimension of the state."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.out = nn.Conv2d(3, 8, 1), nn.Linear(8, CLASSES)
        self.blocks = nn.ModuleList(Mix(8) for _ in range(3))

    def forward(self, image: Tensor) -> Tensor:
        x = self.stem(image)
        rows, width, height, _ = x.shape
        x = x.reshape(rows, width, height // 2, 2, -1, 2).permute(0, 3, 5, 2, 4, 1)
        x = x.reshape(rows * 4, -1, width)
        for block in self.blocks:
            x = block(x)
        return self.out(x.reshape(rows, -1, width).mean(1))


class TimeFirst(nn.Module):
    """The second dimension of the state counts the rows."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.out = nn.Embedding(20, 8), nn.Linear(8, CLASSES)
        self.blocks = nn.ModuleList(Aside(8) for _ in range(3))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens).transpose(0, 1).contiguous()
        for block in self.blocks:
            x = block(x)
        return self.out(x.mean(0))


class Aside(Mix):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x + x.mean(0, keepdim=True)))))


class Staged(nn.Module):
    """Between its stages the model itself halves the image and widens the channels."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.between = nn.Conv2d(3, 8, 2, 2), nn.Conv2d(8, 16, 2, 2)
        self.stages = nn.ModuleList(
            nn.ModuleList(Conv(width) for _ in range(2)) for width in (8, 16)
        )
        self.out = nn.Linear(16, CLASSES)

    def forward(self, image: Tensor) -> Tensor:
        x = self.stem(image)
        for number, stage in enumerate(self.stages):
            x = self.between(x) if number else x
            for block in stage:
                x = block(x)
        return self.out(x.mean((2, 3)))

    def _init_weights(self, module: nn.Module, name: str) -> None:
        raise AssertionError(f"called for {name} as if it took a module alone")


class Conv(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(width, 8, 3, 1, 1), nn.Conv2d(8, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.last(torch.relu(self.first(x)))


class Expanded(nn.Module):
    """Gives a block an expanded parameter, which has a gradient even where none is kept."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.out = nn.Linear(6, 8), nn.Linear(8, CLASSES)
        self.token = nn.Parameter(torch.randn(1, 1, 8))
        self.blocks = nn.ModuleList(Mix(8) for _ in range(2))
        self.last = Mix(8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.words(x)
        for block in self.blocks:
            x = block(x)
        token = self.token.expand(len(x), -1, -1)
        return self.out(x.mean(1) + self.last(token)[:, 0])


class Stopping(nn.Module):
    """Stops as soon as its state is large."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.out = nn.ModuleList(Mix(8) for _ in range(3)), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
            if float(x.detach().mean()) > 1:
                break
        return self.out(x.mean(1))


def images(size: int = 8) -> Tensor:
    return torch.randn(ROWS, 3, size, size, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("block", [Activated, Widening])
def test_a_skip_that_is_no_module_is_found_and_every_clause_holds(block: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model = Net(block).eval()
    stream = ed.as_stream(model, example=images())
    report = ed.check_stream(stream, images())
    assert report.ok, str(report)
    assert [len(each.branches) for each in stream.blocks] == [1, 1]
    x = stream.observe(images())[0]
    branch = stream.blocks[0].branches[0]
    with torch.no_grad():
        out = branch.added(x, torch.zeros_like(model.stages[0](x)))
    want = model.stages[0].down(0.9 * model.stages[0].act(x)) if block is Activated else x
    torch.testing.assert_close(out[:, : want.shape[1]], want)
    assert not bool(out[:, want.shape[1] :].any())


@pytest.mark.parametrize("block", [Activated, Widening])
def test_a_skip_that_is_no_module_can_be_scaled_and_cut(
    block: type[nn.Module], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    stream = ed.as_stream(Net(block).eval(), example=images())
    for verb in ("scaled_skip", "at_depth", "ablate", "train"):
        given = {"image": images(), "labels": torch.arange(ROWS)}
        VERBS[verb](stream, given, tmp_path)


def test_the_tree_shows_what_is_done_to_the_state_on_a_skip() -> None:
    text = str(ed.as_stream(Net(Activated).eval(), example=images()))
    assert "conv: down(0.9 * act(x)) + 0.2 * [act ... last]" in text
    text = str(ed.as_stream(Net(Widening).eval(), example=images()))
    assert "conv: Padded(x) + [first ... last]" in text


@pytest.mark.parametrize(
    ("build", "batch"),
    [(Patched, images()), (TimeFirst, torch.arange(ROWS * 4).view(ROWS, 4))],
)
def test_rows_are_selected_where_another_dimension_holds_them(
    build: type[nn.Module], batch: Tensor
) -> None:
    torch.manual_seed(0)
    model = build().eval()
    stream = ed.as_stream(model, example=batch)
    report = ed.check_stream(stream, batch)
    assert report.ok, str(report)
    with torch.no_grad():
        states = stream.observe(batch)
        sure = states.logits(1).softmax(-1).amax(-1)
    half = float(sure.median())  # half of the rows leave after the first block
    found = ed.predict(stream, batch, policy=ed.exits.Confidence(threshold=half))
    assert len(set(found.depths.tolist())) > 1
    for row, depth in enumerate(found.depths.tolist()):
        torch.testing.assert_close(found.logits[row], states.logits(depth)[row])


@pytest.mark.parametrize(
    ("build", "batch"),
    [(Patched, images()), (TimeFirst, torch.arange(ROWS * 4).view(ROWS, 4))],
)
def test_a_row_skips_its_own_blocks_where_another_dimension_holds_the_rows(
    build: type[nn.Module], batch: Tensor
) -> None:
    torch.manual_seed(0)
    stream = ed.as_stream(build().eval(), example=batch)
    kept = torch.tensor([[1, 0, 1, 0], [0, 1, 1, 0], [1, 1, 0, 0]]).bool()
    with torch.no_grad():
        together = observe_kept(stream, stream.check_batch(batch), kept).logits(3)
        for row in range(ROWS):
            one = stream.check_batch(batch[row : row + 1])
            alone = observe_kept(stream, one, kept[:, row : row + 1]).logits(3)
            torch.testing.assert_close(together[row : row + 1], alone)


def test_a_block_at_the_border_of_two_stages_gets_the_state_of_the_second() -> None:
    torch.manual_seed(0)
    model = Staged().eval()
    stream = ed.as_stream(model, example=images())
    assert stream.gaps == {2}
    assert sites(stream) == (0, 1, 2, 3, 4)
    data = {"image": images().repeat(4, 1, 1, 1), "labels": torch.arange(16) % CLASSES}
    assert [site.after for site in score(stream, data, progress=False).sites] == [0, 1, 2, 3, 4]
    big = ed.insert(stream, after=2)
    assert [len(stage) for stage in big.stages] == [2, 3]
    assert torch.equal(big(images()), model(images()))


def test_an_expanded_parameter_does_not_keep_operations_from_being_counted() -> None:
    torch.manual_seed(0)
    batch = torch.randn(ROWS, 3, 6)
    data = [{"x": batch, "labels": torch.arange(ROWS)}]
    stream = ed.as_stream(Expanded().eval(), example=batch)
    assert ed.profile(stream, data, repeats=1, progress=False)["flops"].min() > 0


def test_a_model_that_stops_early_on_the_first_batch_is_refused_on_one_that_runs_longer() -> None:
    torch.manual_seed(0)
    batch = torch.randn(ROWS, 3, 8)
    stream = ed.as_stream(Stopping().eval(), example=batch + 5)
    assert len(stream.observe(batch + 5)) == 2
    for run in (stream.observe, stream.start):
        with pytest.raises(UnsupportedModelError, match=r"ran a block that did not .* its 1 block"):
            run(batch - 5)
    assert not any(module._forward_pre_hooks for module in stream.model.modules())


def test_a_model_that_stops_early_says_how_many_blocks_ran() -> None:
    torch.manual_seed(0)
    batch = torch.randn(ROWS, 3, 8)
    stream = ed.as_stream(Stopping().eval(), example=batch - 5)
    with pytest.raises(UnsupportedModelError, match=r"ran 1 of its 3 blocks.*stop early"):
        stream.observe(batch + 5)


def test_a_model_of_sums_without_a_chain_is_told_where_it_adds() -> None:
    class Pair(nn.Module):
        """A cell of two states, as in searched networks: no block adds to what it is given."""

        def __init__(self) -> None:
            super().__init__()
            self.left, self.right, self.out = (nn.Linear(8, 8) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.left(x) + torch.tanh(self.right(x)) ** 2)

    model = nn.Sequential(Pair(), Pair())
    with pytest.raises(UnsupportedModelError) as caught:
        ed.as_stream(model.eval(), example=torch.randn(ROWS, 3, 8))
    said = str(caught.value)
    assert "adds in 2 modules (0, 1), but none of them adds to the one state" in said
    assert "as_stream(model.part, example=...)" in said


def test_the_tree_counts_one_block_and_one_module_called_repeatedly() -> None:
    torch.manual_seed(0)

    class Again(Stopping):
        def forward(self, x: Tensor) -> Tensor:
            for _ in range(3):
                x = self.blocks[0](x)
            return self.out(x.mean(1))

    batch = torch.randn(ROWS, 3, 8)
    text = str(ed.as_stream(Again().eval(), example=batch))
    assert "Again: 3 blocks (Mix, one module called repeatedly)" in text
    assert ": 1 block (Mix)" in str(ed.as_stream(Stopping().eval(), example=batch + 5))


def test_a_model_of_pictures_and_text_is_followed_by_its_text() -> None:
    """Its picture's tokens must stay where they are whenever a batch is changed to look at it."""
    picture = 98
    vision = hf.CLIPVisionConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=3, num_attention_heads=2,
        image_size=16, patch_size=8,
    )  # fmt: skip
    text = hf.LlamaConfig(
        vocab_size=99, hidden_size=32, intermediate_size=48, num_hidden_layers=3,
        num_attention_heads=4,
    )  # fmt: skip
    torch.manual_seed(0)
    model = hf.LlavaForConditionalGeneration(
        hf.LlavaConfig(text_config=text, vision_config=vision, image_token_index=picture)
    ).eval()
    ids = torch.randint(0, 90, (2, 8))
    ids[:, :4] = picture
    batch = {"input_ids": ids, "pixel_values": torch.randn(2, 3, 16, 16)}
    stream = ed.as_stream(model, example=batch)
    assert (stream.depth, stream.task) == (3, "causal_lm")
    report = ed.check_stream(stream, batch)
    assert report.ok, report
    assert "the batch has pixel_values beside its text" in str(report)
    labeled = {**batch, "labels": ids.masked_fill(ids == picture, -100)}
    traced = ed.trace(stream, labeled, ["loss"], progress=False)
    assert traced["loss"][3] == pytest.approx(model(**labeled).loss.item(), abs=1e-5)
    words = torch.randint(0, 90, (2, 5))
    greedy = model.generate(words, max_new_tokens=4, do_sample=False, pad_token_id=0)
    found = ed.generate(stream, words, max_new_tokens=4)
    assert found.tokens == greedy[:, 5:].tolist()


@pytest.mark.parametrize(
    ("block", "weight", "scale"),
    [(Fused, 1.0, 0.6), (FusedInPlace, 1.0, -0.15), (Interpolated, 0.6, 0.4)],
)
def test_a_sum_that_one_fused_operation_computes_is_found(
    block: type[Mix], weight: float, scale: float
) -> None:
    torch.manual_seed(0)
    x, model = torch.randn(ROWS, 5, 8), Chained(block).eval()
    stream = ed.as_stream(model, example=x)
    report = ed.check_stream(stream, x)
    assert report.ok, str(report)
    (branch,) = stream.blocks[0].branches
    torch.testing.assert_close(torch.as_tensor(branch.weight), torch.tensor(weight))
    torch.testing.assert_close(torch.as_tensor(current(branch.scale)).mean(), torch.tensor(scale))


def test_a_block_that_shrinks_its_state_cannot_be_inserted_silently() -> None:
    model = Chained(Interpolated).eval()
    said = "it multiplies the skip of its mlp branch by 0.6"
    with pytest.raises(UnsupportedModelError, match=said):
        ed.insert(model, after=1, example=torch.randn(ROWS, 5, 8))


class InPlace(Mix):
    """Adds to the memory of its state, which then holds the next one."""

    def forward(self, x: Tensor) -> Tensor:
        x += self.down(torch.tanh(self.up(self.norm(x))))
        return x


class ActivatedInPlace(Mix):
    """Writes over its state before it reads it."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.act = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.act(x))))


class Entered(nn.Module):
    """Linear maps around blocks; what follows them writes over the last state, too."""

    def __init__(self, block: type[Mix]) -> None:
        super().__init__()
        self.inp, self.out = nn.Linear(6, 8), nn.Linear(8, CLASSES)
        self.blocks = nn.ModuleList(block(8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = block(x)
        return self.out(x.relu_().mean(1))


NAMED: dict[str, Any] = {
    "blocks": "blocks",
    "readout": "out",
    "token": lambda h, _: h.relu().mean(1),
}


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("block", [InPlace, ActivatedInPlace])
@torch.no_grad()
def test_a_model_that_writes_over_its_states_predicts_what_its_cut_models_do(
    block: type[Mix], named: bool, inference: bool
) -> None:
    torch.manual_seed(0)
    with torch.inference_mode(inference):
        x, model = torch.randn(ROWS, 5, 6), Entered(block).eval()
        stream = ed.as_stream(model, **NAMED) if named else ed.as_stream(model, example=x)
        _predicts_what_cut_models_do(stream, model, x)


def _predicts_what_cut_models_do(stream: ResidualStream, model: Entered, x: Tensor) -> None:
    states, cursor = stream.observe(x), stream.start(x)
    assert torch.equal(states[0], model.inp(x))
    assert torch.equal(states.output, model(x))
    for depth in (1, 2, 3):
        want = ed.at_depth(stream, depth)(x)
        for _ in range(2):  # reading out leaves the state as it is
            torch.testing.assert_close(states.logits(depth), want)
            torch.testing.assert_close(stream.logits(stream.advance(cursor, depth)), want)


class Dropped(Mix):
    """Writes over its state in training mode only, where eval mode shows nothing."""

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.dropout(x, 0.5, self.training, inplace=True)
        return x + self.down(torch.tanh(self.up(self.norm(x))))


@pytest.mark.parametrize("named", [False, True])
def test_a_model_that_writes_over_its_states_in_training_mode_only_is_refused_there(
    named: bool,
) -> None:
    x, model = torch.randn(ROWS, 5, 8), Chained(Dropped).eval()
    options: dict[str, Any] = {**NAMED, "token": "mean"} if named else {"example": x}
    stream = ed.as_stream(model, **options)
    wrong = r"Chained writes over its state at depth 0 \(in training mode\).*inplace=False"
    with torch.no_grad():
        cursor = stream.start(x)
        model.train()
        with pytest.raises(UnsupportedModelError, match=wrong):
            stream.observe(x)
        with pytest.raises(UnsupportedModelError, match=wrong):
            stream.step(cursor)


@torch.no_grad()
def test_branches_of_a_block_that_adds_in_place_are_recorded_as_they_were() -> None:
    torch.manual_seed(0)
    x, model = torch.randn(ROWS, 5, 6), Entered(InPlace).eval()
    stream = ed.as_stream(model, example=x)
    with record_branches(stream.blocks) as records:
        states = stream.observe(x)
    for number, (record,) in enumerate(records, start=1):
        torch.testing.assert_close(record.x, states[number - 1])
        torch.testing.assert_close(record.x + record.out, states[number])


def test_growing_a_model_that_writes_over_its_states_is_refused() -> None:
    x = torch.randn(ROWS, 5, 6)
    stream = ed.as_stream(Entered(InPlace).eval(), example=x)
    with pytest.raises(UnsupportedModelError, match="write over the state they are given"):
        score(stream, (x, torch.arange(ROWS) % CLASSES), progress=False)


def test_the_profile_of_a_model_that_adds_in_place_tells_its_depths_apart() -> None:
    torch.manual_seed(0)
    x, model = torch.randn(300, 2, 6), Entered(InPlace).eval()
    with torch.no_grad():
        labels = model(x).argmax(-1)
        found = [
            float((ed.at_depth(model, d)(x).argmax(-1) == labels).float().mean()) for d in (1, 2)
        ]
    profile = ed.profile(model, (x, labels), repeats=1, progress=False)
    assert [profile.at(depth).quality for depth in (1, 2)] == pytest.approx(found)
    assert max(found) < 1 == profile.at(3).quality


class Normed(nn.Module):
    """Batch norms before, in and after its blocks, and an instance norm that keeps statistics."""

    def __init__(self, *, gap: bool = False) -> None:
        super().__init__()
        instance = nn.InstanceNorm2d(8, track_running_stats=True)
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 2, 2), nn.BatchNorm2d(8), instance)
        self.blocks = nn.ModuleList(NormedConv(8) for _ in range(3))
        self.gap = nn.BatchNorm2d(8) if gap else nn.Identity()
        self.norm = nn.BatchNorm2d(8, momentum=None)
        self.out = nn.Linear(8, CLASSES)

    def forward(self, image: Tensor) -> Tensor:
        x = self.stem(image)
        for number, block in enumerate(self.blocks):
            x = block(self.gap(x) if number == 1 else x)
        return self.out(torch.relu(self.norm(x)).mean((2, 3)))


class NormedConv(Conv):
    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.norm = nn.BatchNorm2d(8)

    def forward(self, x: Tensor) -> Tensor:
        return x + 3 * self.last(torch.relu(self.norm(self.first(x))))


@pytest.mark.parametrize("gap", [False, True])
def test_reading_out_in_training_mode_leaves_running_statistics_alone(gap: bool) -> None:
    torch.manual_seed(0)
    model = Normed(gap=gap).train()
    stream = ed.as_stream(model, example=images())
    plain = deepcopy(model)
    with torch.no_grad():
        plain(images())
        states = stream.observe(images())
        for depth in range(4):
            states.logits(depth)
            whole = stream.normed(states.feature(depth), depth)
            # The batch's own statistics normalize it, so another row changes a prediction.
            part = stream.feature(states[depth][:2], depth, {"image": images()[:2]})
            alike = torch.allclose(stream.normed(part, depth), whole[:2], atol=1e-3)
            assert alike is (depth == 0)  # which the instance norm has just normalized
            if depth in stream.gaps:
                stream.between(states[depth], depth, states.batch)
    for (name, found), (_, want) in zip(model.named_buffers(), plain.named_buffers(), strict=True):
        torch.testing.assert_close(found, want, msg=name)


@pytest.mark.parametrize("named", [False, True])
def test_a_driven_pass_in_training_mode_updates_each_running_statistic_once(named: bool) -> None:
    torch.manual_seed(0)
    model = Normed().train()
    pool = nn.Sequential(nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    model.read = nn.Sequential(model.norm, pool, model.out)
    options: dict[str, Any] = {"blocks": "blocks", "readout": "read"}
    stream = ed.as_stream(model, **(options if named else {"example": images()}))
    plain = deepcopy(model)
    with torch.no_grad():
        plain(images())
        states = observe_kept(stream, {"image": images()}, torch.ones(3, ROWS, dtype=torch.bool))
        for depth in range(4):
            for _ in range(2):
                states.logits(depth)
                states.stream.normed(states.feature(depth), depth)
    for (name, found), (_, want) in zip(model.named_buffers(), plain.named_buffers(), strict=True):
        torch.testing.assert_close(found, want, msg=name)


def test_an_error_in_a_readout_leaves_norms_as_they_were() -> None:
    torch.manual_seed(0)
    model = Normed().train()
    stream = ed.as_stream(model, example=images())
    with pytest.raises(RuntimeError, match="7 elements"):
        stream.readout(torch.zeros(ROWS, 7, 4, 4), 1, {"image": images()})
    norms = [module for module in model.modules() if hasattr(module, "momentum")]
    assert all(norm.track_running_stats for norm in norms)
    assert [norm.momentum for norm in norms] == [0.1, 0.1, 0.1, 0.1, 0.1, None]


class Pooled(nn.Module):
    """Averages all tokens, or the real ones if it is told which these are."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.norm = nn.Embedding(20, 8), nn.LayerNorm(8)
        self.blocks = nn.ModuleList(Adding(8) for _ in range(3))
        self.out, self.calls = nn.Linear(8, CLASSES), []

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        self.calls.append(len(tokens))
        x = self.words(tokens)
        for block in self.blocks:
            x = block(x)
        if mask is None:
            return self.out(self.norm(x.mean(1)))
        return self.out(self.norm((x * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)))


class Adding(Mix):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


@torch.no_grad()
def test_every_depth_uses_an_optional_mask_that_the_made_up_batch_lacked() -> None:
    torch.manual_seed(0)
    tokens, mask = torch.randint(0, 20, (ROWS, 6)), torch.ones(ROWS, 6)
    mask[1:, 3:] = 0
    model = Pooled().eval()
    stream = ed.as_stream(model)
    assert "the mean -> norm -> out" in str(stream)
    plain, masked = {"tokens": tokens}, {"tokens": tokens, "mask": mask}
    held = [(batch, stream.observe(batch)) for batch in (plain, masked, plain)]
    for batch, states in held:
        for depth in (1, 2, 3):
            want = ed.at_depth(stream, depth)(**batch)
            torch.testing.assert_close(states.logits(depth), want)
            feature = stream.normed(states.feature(depth), depth)
            torch.testing.assert_close(stream.head(feature), want)
    assert not torch.allclose(held[0][1].logits(1), held[1][1].logits(1), atol=1e-3)


def test_a_model_is_discovered_once_for_each_set_of_inputs() -> None:
    tokens = torch.arange(ROWS * 4).view(ROWS, 4)
    model = Pooled().eval()
    stream = ed.as_stream(model, example=tokens)
    masked = {"tokens": tokens, "mask": torch.ones(ROWS, 4)}
    for batch in (masked, {"tokens": tokens}, {**masked, "labels": tokens[:, 0], "more": 1}):
        stream.observe(batch)
    model.calls.clear()
    again = ed.as_stream(model)
    for batch in (masked, {"tokens": tokens}):
        stream.observe(batch)
        again.observe(batch)
    assert model.calls == [ROWS] * 4


class Gated(Mix):
    """Learns how much of its branch it adds: nothing at first."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.gate = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gate * self.down(torch.tanh(self.up(self.norm(x))))


def test_a_learned_scale_of_a_branch_is_followed_after_training() -> None:
    torch.manual_seed(0)
    x, model = torch.randn(ROWS, 5, 8), Chained(Gated).eval()
    stream = ed.as_stream(model, example=x)
    with pytest.raises(UnsupportedModelError, match="by a number that is 0 now"):
        ed.scaled_skip(stream, layer=1, c=0.0).attach()
    with torch.no_grad():
        for block in model.blocks:
            block.gate.fill_(0.5)
        h = model.blocks[0](x) - x
        for block in model.blocks[1:]:
            h = block(h)
        with ed.scaled_skip(stream, layer=1, c=0.0):
            torch.testing.assert_close(model(x), model.out(h.mean(1)))
    branch = stream.blocks[0].branches[0]
    assert branch.scale is model.blocks[0].gate
    names = ["down.bias", "down.weight", "gate", "norm.bias", "norm.weight", "up.bias", "up.weight"]
    assert sorted(dict(model.blocks[0].named_parameters())) == names


class Packing(nn.Module):
    """In eval mode, without gradients and with padding, its encoder packs rows of tokens."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.words, self.encoder = nn.Embedding(20, 16), nn.TransformerEncoder(layer, 3)
        self.out = nn.Linear(16, CLASSES)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        padding = None if attention_mask is None else attention_mask == 0
        return self.out(self.encoder(self.words(input_ids), src_key_padding_mask=padding)[:, 0])


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_rows_that_the_model_would_pack_are_observed_and_driven() -> None:
    torch.manual_seed(0)
    model = Packing().eval()
    mask = torch.ones(ROWS, 6, dtype=torch.long)
    mask[1:, 3:] = 0
    batch = {"input_ids": torch.randint(0, 20, (ROWS, 6)), "attention_mask": mask}
    stream = ed.as_stream(model)
    states, cursor = stream.observe(batch), stream.start(batch)
    torch.testing.assert_close(stream.prediction(states.output), model(**batch))
    assert {tuple(h.shape) for h in states} == {(ROWS, 6, 16)}
    for depth in (1, 2, 3):
        want = ed.at_depth(stream, depth)(**batch)
        torch.testing.assert_close(states.logits(depth), want)
        torch.testing.assert_close(stream.logits(stream.advance(cursor, depth)), want)
    part = stream.advance(cursor, 1).select(torch.tensor([0, 2]))
    torch.testing.assert_close(stream.logits(stream.advance(part)), model(**batch)[[0, 2]])
    assert model.encoder.use_nested_tensor
    with pytest.raises(AssertionError, match="4-D query"):
        stream.observe({"input_ids": torch.zeros(2, 3, 4, dtype=torch.long)})
    assert model.encoder.use_nested_tensor


class Scaled(Gated):
    """Multiplies and divides by learned numbers, and by what it computes of them."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.gate = nn.Parameter(torch.rand(width) + 0.5)
        self.wide, self.by = nn.Parameter(torch.rand(width, 1) + 1), nn.Parameter(torch.rand(1) + 1)

    def added(self, x: Tensor) -> Tensor:
        y = self.down(torch.tanh(self.up(self.norm(x))))
        return self.gate * 0.5 * self.wide[:, 0].tanh() * y / self.by

    def forward(self, x: Tensor) -> Tensor:
        return x * self.by / self.gate + self.added(x)


def test_every_learned_factor_of_a_branch_and_a_skip_is_followed_after_training() -> None:
    torch.manual_seed(0)
    x, model = torch.randn(ROWS, 5, 8), Chained(Scaled).eval()
    stream = ed.as_stream(model, example=x)
    assert "scale * x + scale * [norm ... down]" in str(stream)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    first, *others = model.blocks
    h = 0.25 * x * first.by / first.gate + first.added(x)
    for block in others:
        h = block(h)
    learned = list(model.parameters())
    wanted = torch.autograd.grad(model.out(h.mean(1)).square().sum(), learned)
    with ed.scaled_skip(stream, layer=1, c=0.25):
        output = model(x)
        found = torch.autograd.grad(output.square().sum(), learned)
    torch.testing.assert_close(output, model.out(h.mean(1)))
    torch.testing.assert_close(found, wanted)
    assert ed.check_stream(stream, x).ok


def test_blocks_that_share_their_modules_are_recorded_and_scaled_apart() -> None:
    torch.manual_seed(0)
    x, model = torch.randn(ROWS, 5, 8), Chained(Adding).eval()
    first, *others = model.blocks
    for block in others:
        block.norm, block.up, block.down = first.norm, first.up, first.down
    stream = ed.as_stream(model, example=x)
    with torch.no_grad(), record_branches(stream.blocks) as records:
        states = stream.observe(x)
    for number, (record,) in enumerate(records, start=1):
        torch.testing.assert_close(record.x, states[number - 1])
        torch.testing.assert_close(record.x + record.out, states[number])
    with torch.no_grad(), ed.scaled_skip(stream, layer=2, c=0.0):
        h = states[2] - states[1]
        torch.testing.assert_close(model(x), model.out(others[1](h).mean(1)))


class Listing(nn.Module):
    """Its blocks read all earlier states from a list, and add theirs to it."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Listed(8) for _ in range(3))
        self.out = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        held = [x]
        for block in self.blocks:
            x = block(x, held)
        return self.out(x.mean(1))


class Listed(Adding):
    def forward(self, x: Tensor, held: list[Tensor]) -> Tensor:
        held.append(super().forward(x) + 0.1 * torch.stack(held).sum(0))
        return held[-1]


@torch.no_grad()
def test_blocks_that_leave_something_for_later_ones_in_a_list_are_driven_again_and_again() -> None:
    torch.manual_seed(0)
    x, model = torch.randn(ROWS, 5, 8), Listing().eval()
    stream = ed.as_stream(model, example=x)
    cursors = [stream.start(x)]
    for _ in range(3):
        cursors.append(stream.step(cursors[-1]))
    for cursor in cursors:
        torch.testing.assert_close(stream.logits(stream.advance(cursor)), model(x))
    report = ed.check_stream(stream, x)
    assert report.ok, str(report)


class Turning(Mix):
    """Adds the state to the memory of its branch, which has channels before tokens."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.near, self.last = nn.Conv1d(width, width, 3, padding=1), nn.Conv1d(width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.last(torch.tanh(self.near(x.transpose(1, 2)))).transpose(1, 2)
        y += x
        return y


@torch.no_grad()
def test_a_branch_with_other_axes_from_its_entry_to_its_end_is_scaled_in_them() -> None:
    torch.manual_seed(0)
    x, model = torch.randn(ROWS, 5, 8), Chained(Turning).eval()
    stream = ed.as_stream(model, example=x)
    report = ed.check_stream(stream, x)
    assert report.ok, str(report)
    h = model.blocks[2](model.blocks[1](model.blocks[0](x) - x))
    with ed.scaled_skip(stream, layer=1, c=0.0):
        torch.testing.assert_close(model(x), model.out(h.mean(1)))


# -- named blocks ---------------------------------------------------------------------------------


class Outside(Chained):
    """Adds the skips around its blocks."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.out(x.mean(1))


@pytest.mark.parametrize(
    ("model", "token", "said"),
    [
        (Outside, "mean", "block 1 of Outside does not return the state that block 2 is given"),
        (Chained, "first", r"does not give its own prediction: .* \(now 'first'\) what predicts"),
        (Chained, "all", r"prediction: shape \(2, 5, 5\), and the model's \(2, 5\)"),
    ],
)
def test_named_blocks_or_readouts_that_are_not_the_models_are_refused(
    model: type[Chained], token: str, said: str
) -> None:
    torch.manual_seed(0)
    stream = ed.as_stream(model(Adding).eval(), blocks="blocks", readout="out", token=token)
    with pytest.raises(UnsupportedModelError, match=said):
        stream.observe(torch.randn(ROWS, 5, 8))


@torch.no_grad()
def test_named_blocks_find_the_dimension_of_the_rows() -> None:
    torch.manual_seed(0)
    model, tokens = TimeFirst().eval(), torch.randint(0, 20, (ROWS, 6))
    options: dict[str, Any] = {"blocks": "blocks", "readout": "out"}
    stream = ed.as_stream(model, token=lambda h, _: h.mean(0), **options)
    part = stream.advance(stream.start(tokens), 1).select(torch.tensor([2, 0]))
    torch.testing.assert_close(stream.logits(stream.advance(part)), model(tokens)[[2, 0]])


@torch.no_grad()
def test_named_blocks_of_a_language_model_are_driven_without_its_cache() -> None:
    model, batch = ENTRIES["Llama-tied-CausalLM-left"].make()
    readout = ("model.norm", "lm_head")
    stream = ed.as_stream(model, blocks="model.layers", readout=readout, task="causal_lm")
    states, cursor = ed.as_stream(model).observe(batch), stream.start(batch)
    for _ in range(2):
        torch.testing.assert_close(stream.advance(cursor).h, states[stream.depth])


class Encoding(nn.Module):
    """An encoder and decoder of torch's own layers, which fuse what nobody looks at."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.out = nn.Embedding(20, 16), nn.Linear(16, CLASSES)
        self.both = nn.Transformer(16, 2, 2, 3, 32, batch_first=True)

    def forward(self, tokens: Tensor, written: Tensor) -> Tensor:
        return self.out(self.both(self.words(tokens), self.words(written)))


class Attending(Chained):
    """Its tail has attention of its own, which torch fuses when nobody looks."""

    def __init__(self) -> None:
        super().__init__(Mix)
        self.pool = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.out(self.pool(x, x, x, need_weights=False)[0].mean(1))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_what_torch_computes_in_one_kernel_if_nobody_looks_is_no_difference() -> None:
    torch.manual_seed(0)
    tokens = torch.randint(0, 20, (ROWS, 6))
    pair = {"tokens": tokens, "written": tokens[:, :4]}
    mask = torch.ones(ROWS, 6, dtype=torch.long)
    mask[1:, 3:] = 0
    cases: list[tuple[nn.Module, dict[str, Tensor]]] = [
        (Encoding().eval(), pair),
        (Attending().eval(), {"x": torch.randn(ROWS, 6, 8)}),
        (Packing().eval(), {"input_ids": tokens, "attention_mask": mask}),
    ]
    for model, batch in cases:
        report = ed.check_stream(model, batch, example=batch)
        assert report.ok, str(report)
        assert ed.as_stream(model, example=batch).depth == 3


class Summed(Mix):
    """Python's `sum`, which begins with the number 0."""

    def forward(self, x: Tensor) -> Tensor:
        return sum([x, self.down(torch.tanh(self.up(self.norm(x))))], torch.zeros(()).item())


class Piled(Mix):
    def forward(self, x: Tensor) -> Tensor:
        added = self.down(torch.tanh(self.up(self.norm(x))))
        return torch.stack([x, added, x], dim=-1).sum(-1)


@pytest.mark.parametrize("block", [Summed, Piled])
def test_a_sum_that_begins_with_zero_or_is_over_a_stack_is_found(block: type[Mix]) -> None:
    torch.manual_seed(0)
    model, batch = Chained(block).eval(), {"x": torch.randn(ROWS, 6, 8)}
    stream = ed.as_stream(model, example=batch)
    report = ed.check_stream(stream, batch)
    assert report.ok, str(report)
    assert stream.depth == 3
    assert block is not Summed or all(len(each.branches) == 1 for each in stream.blocks)


class Answer:
    """What a forward may return: an object that is neither a tuple nor a mapping."""

    def __init__(self, **named: Any) -> None:
        vars(self).update(named)


class Answering(Chained):
    def __init__(self, answer: Any) -> None:
        super().__init__(Mix)
        self.answer = answer

    def forward(self, x: Tensor) -> Any:
        return self.answer(super().forward(x))


@pytest.mark.parametrize(
    "answer",
    [
        lambda z: Answer(places=z.argmax(-1), scores=z),
        lambda z: {"made": {"number": 3, "scores": z}},
        lambda z: (z.square().mean(), z),
    ],
    ids=["object", "nested", "loss-first"],
)
def test_the_prediction_is_found_in_whatever_the_model_returns(answer: Any) -> None:
    torch.manual_seed(0)
    model, batch = Answering(answer).eval(), {"x": torch.randn(ROWS, 6, 8)}
    stream = ed.as_stream(model, example=batch)
    report = ed.check_stream(stream, batch)
    assert report.ok, str(report)
    assert stream.outputs == CLASSES


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (lambda z: z.argmax(-1), r"the model returns \(2,\) int64, but a prediction is a float"),
        (lambda z: z[:, 0], r"one number per row as \(rows, 1\)"),
        (lambda z: Answer(loss=z.sum()), r"returns \(\) float32 in its Answer, but"),
        (lambda z: None, r"returns no tensors in its NoneType, but"),
    ],
    ids=["classes", "one-number", "loss-alone", "nothing"],
)
def test_a_model_that_returns_no_scores_is_told_what_to_return(answer: Any, said: str) -> None:
    with pytest.raises(UnsupportedModelError, match=said):
        ed.as_stream(Answering(answer).eval(), example={"x": torch.randn(2, 6, 8)})


class Pairs(nn.Module):
    """Takes its blocks in twos."""

    def __init__(self) -> None:
        super().__init__()
        pairs = (nn.ModuleList([Mix(8), Mix(8)]) for _ in range(2))
        self.pairs, self.out = nn.ModuleList(pairs), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for one, two in self.pairs:
            x = two(one(x))
        return self.out(x.mean(1))


def test_blocks_that_are_taken_in_twos_can_be_cut_anywhere() -> None:
    torch.manual_seed(0)
    model, batch = Pairs().eval(), {"x": torch.randn(ROWS, 6, 8)}
    stream = ed.as_stream(model)
    report = ed.check_stream(stream, batch)
    assert report.ok, str(report)
    for depth in (1, 2, 3):
        small = ed.at_depth(model, depth)
        assert ed.as_stream(small).depth == depth
        torch.testing.assert_close(small(**batch), stream.observe(batch).logits(depth))
    big = ed.insert(model, after=2)
    assert ed.as_stream(big).depth == 5
    assert torch.equal(big(**batch), model(**batch))
    with pytest.raises(UnsupportedModelError, match=r"more after depth 1: .* insert after=2"):
        ed.insert(model, after=1)


class Ending(nn.Module):
    """Predicts from the last token of each row that is not 0, without a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.out = nn.Embedding(20, 8), nn.Linear(8, CLASSES)
        self.blocks = nn.ModuleList(Mix(8) for _ in range(3))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        for block in self.order(tokens):
            x = block(x)
        return self.out(x[torch.arange(len(x)), (tokens != 0).sum(1) - 1])

    def order(self, tokens: Tensor) -> Any:
        return self.blocks


@torch.no_grad()
@pytest.mark.parametrize("given", [False, True])
def test_padding_without_a_mask_is_seen_though_the_first_batch_had_none(given: bool) -> None:
    torch.manual_seed(0)
    model, full = Ending().eval(), {"tokens": torch.randint(5, 20, (ROWS, 6))}
    stream = ed.as_stream(model, **({"example": full} if given else {}))
    padded = full["tokens"].clone()
    padded[1:, 3:] = 0
    for batch in (full, {"tokens": padded}):
        states = stream.observe(batch)
        assert torch.equal(stream.readout(states[3], 3, batch), model(**batch))
        torch.testing.assert_close(states.logits(1), ed.at_depth(model, 1)(**batch))


class Reversing(Ending):
    def order(self, tokens: Tensor) -> Any:
        return reversed(self.blocks) if bool((tokens == 0).any()) else self.blocks


class Repeating(Ending):
    def order(self, tokens: Tensor) -> Any:
        first, second, third = self.blocks
        return (first, first if bool((tokens == 0).any()) else second, third)


@pytest.mark.parametrize(
    ("kind", "said"), [(Reversing, "3 in place of block 1"), (Repeating, "1 in place of block 2")]
)
def test_an_order_of_blocks_that_depends_on_the_data_is_refused(
    kind: type[Ending], said: str
) -> None:
    torch.manual_seed(0)
    stream = ed.as_stream(kind().eval())
    assert stream.depth == 3
    padded = {"tokens": torch.tensor([[7, 8, 0, 0], [9, 7, 8, 6]])}
    for way in (stream.observe, stream.start):
        with pytest.raises(UnsupportedModelError, match=f"called block {said}"):
            way(padded)


class Again(nn.Module):
    """Calls one module several times: as many as an attribute says, or as its forward does."""

    def __init__(self, *, counted: bool) -> None:
        super().__init__()
        self.block, self.out = Mix(8), nn.Linear(8, CLASSES)
        if counted:
            self.times = 3

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(getattr(self, "times", 3)):
            x = self.block(x)
        return self.out(x.mean(1))


@torch.no_grad()
def test_a_module_called_repeatedly_is_cut_where_an_attribute_counts_the_calls() -> None:
    torch.manual_seed(0)
    model, batch = Again(counted=True).eval(), {"x": torch.randn(ROWS, 6, 8)}
    stream = ed.as_stream(model)
    report = ed.check_stream(stream, batch)
    assert report.ok, str(report)
    for depth in (1, 2, 3):
        small = ed.at_depth(model, depth)
        assert ed.as_stream(small).depth == small.times == depth
        torch.testing.assert_close(small(**batch), stream.observe(batch).logits(depth))
    assert model.times == 3
    with pytest.raises(UnsupportedModelError, match="3 times, but no field of its own"):
        ed.at_depth(Again(counted=False).eval(), 1)


class Dictionary(nn.Module):
    """Its blocks are in a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleDict({"one": Mix(8), "two": Mix(8)})
        self.out = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks.values():
            x = block(x)
        return self.out(x.mean(1))


def test_blocks_in_a_dictionary_cannot_be_inserted_and_it_says_so() -> None:
    model = Dictionary().eval()
    assert ed.as_stream(ed.at_depth(model, 1)).depth == 1
    with pytest.raises(UnsupportedModelError, match="rather than in a list, so no block can be"):
        ed.insert(model, after=2)
