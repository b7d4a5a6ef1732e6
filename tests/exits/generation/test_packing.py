"""Large linear maps may be kept in another order; they stay the same maps."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import everydepth as ed
from everydepth.exits.generation import packing
from everydepth.exits.generation.packing import PACKED_FROM, packed_maps


@pytest.fixture(autouse=True)
def small_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "LARGE", 128)
    monkeypatch.setattr(packing, "COLD", 0)
    monkeypatch.setattr(packing, "fewest_rows", lambda shape, most: 1)


@pytest.mark.parametrize(("from_rows", "found"), [(1, 1), (4, 4), (5, 6), (1000, packing.MANY + 1)])
def test_the_fewest_rows_are_those_from_which_ordered_weights_are_faster(
    from_rows: int, found: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def seconds(x: torch.Tensor, weights: Any, product: Any) -> float:
        plain = product is torch.nn.functional.linear
        return len(x) * 1.0 if plain else 0.95 * (from_rows - 0.5)

    monkeypatch.setattr(packing, "_seconds", seconds)
    assert packing._fewest.__wrapped__(1024, 1024, packing.MANY, 1) == found
    assert packing._fewest.__wrapped__(1024, 1024, 4, 1) == min(found, 5)


def test_maps_of_each_shape_are_ordered_where_that_is_faster_for_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(packing, "fewest_rows", lambda shape, most: 1 if shape[0] == 500 else 3)
    wide, narrow = nn.Linear(8, 500), nn.Linear(500, 8)
    with packed_maps(nn.ModuleList([wide, narrow]), rows=2) as count:
        assert count == 1
        assert "forward" in vars(wide)
        assert "forward" not in vars(narrow)


def test_shapes_are_timed_with_weights_of_bounded_size(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []
    monkeypatch.undo()  # the function itself
    monkeypatch.setattr(packing, "_fewest", lambda *shape: asked.append(shape[:2]) or 1)
    assert packing.fewest_rows(torch.Size((128_000, 4096))) == 1
    assert packing.fewest_rows((1536, 576)) == 1
    assert asked == [(1024, 4096), (1536, 576)]


def test_fewer_rows_use_the_plain_product(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "fewest_rows", lambda shape, most: 4)
    used: list[int] = []
    product = packing.product

    def noted(x: torch.Tensor, ordered: torch.Tensor, bias: Any = None) -> torch.Tensor:
        used.append(len(x))
        return product(x, ordered, bias)

    monkeypatch.setattr(packing, "product", noted)
    head = nn.Linear(8, 500)
    with torch.inference_mode(), packed_maps(head):
        for rows in (1, 3, 4, 64, 65):
            x = torch.randn(rows, 8)
            torch.testing.assert_close(head(x), x @ head.weight.T + head.bias)
    assert used == [4, 64]
    with packed_maps(head, rows=3) as count:
        assert count == 0  # not worth the memory


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(1, 8), (5, 1, 8), (2, 3, 8), (200, 8)])
def test_a_packed_map_gives_what_the_plain_one_gives(bias: bool, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    head, x = nn.Linear(8, 500, bias=bias), torch.randn(shape)
    with torch.inference_mode():
        plain = head(x)
        with packed_maps(head) as count:
            assert count == 1
            found = head(x)
            turned = head(torch.randn(8, 6).T)  # another order of memory is another input
    torch.testing.assert_close(found, plain)
    assert found.shape == plain.shape
    assert turned.shape == (6, 500)


@pytest.mark.parametrize("change", ["in place", "through data", "a swap of columns", "replaced"])
def test_a_copy_is_kept_until_its_weights_change(change: str) -> None:
    torch.manual_seed(0)
    head, x = nn.Linear(8, 500), torch.randn(3, 8)
    with packed_maps(head):
        pass
    kept = packing._copies[head][1]
    with packed_maps(head):
        assert packing._copies[head][1] is kept
    with torch.no_grad():
        if change == "in place":
            head.weight[7, 3] += 1e-3
        elif change == "through data":
            head.weight.data[7, 3] += 1e-3
        elif change == "a swap of columns":
            head.weight.data[:, [2, 5]] = head.weight.data[:, [5, 2]].clone()
        else:
            head.weight = nn.Parameter(torch.randn(500, 8))
        plain = head(x)
        with packed_maps(head):
            torch.testing.assert_close(head(x), plain)
    assert packing._copies[head][1] is not kept


def test_copies_end_with_their_model_and_take_no_more_than_their_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    packing._copies.clear()
    first, second, third = (nn.Linear(8, 500) for _ in range(3))
    monkeypatch.setattr(packing, "KEPT", 2 * first.weight.nbytes)
    for head in (first, second, third):
        with packed_maps(head) as count:
            assert count == 1
    assert [m is third for m in packing._copies] == [True]  # the others were in its way
    del third, head
    assert not packing._copies
    with packed_maps(nn.ModuleList([first, second, nn.Linear(8, 500)])) as count:
        assert count == 3
    assert not packing._copies  # too many to keep


def test_a_map_is_itself_again_after_an_error() -> None:
    head = nn.Linear(8, 500)
    with pytest.raises(RuntimeError, match="inner product"), packed_maps(head):
        head(torch.ones(2, 9))
    assert "forward" not in vars(head)


class Doubled(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


@pytest.mark.parametrize(
    "head",
    [
        nn.Linear(8, 10),
        nn.Linear(8, 500).double(),
        Doubled(8, 500),
        nn.Linear(8, 500, device="meta"),
    ],
)
def test_what_is_no_plain_large_map_is_left_as_it_is(head: nn.Module) -> None:
    with packed_maps(head) as count:
        assert not count
        assert "forward" not in vars(head)


@pytest.mark.parametrize(("cold", "free"), [(2**20, 2**40), (0, 3 * 8 * 500 * 4)])
def test_nothing_is_copied_where_it_cannot_pay_or_memory_is_short(
    cold: int, free: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing, "COLD", cold)
    memory = SimpleNamespace(available=free)
    monkeypatch.setattr(packing.psutil, "virtual_memory", lambda: memory)
    with packed_maps(nn.Linear(8, 500)) as count:
        assert not count


def test_a_text_from_packed_maps_is_that_of_the_model_itself() -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=500,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=128,
    )
    model = LlamaForCausalLM(config).eval()
    packed: dict[str, list[bool]] = {"head": [], "block": []}
    ed.as_stream(model)  # is looked at once, by its own forward

    def note(name: str) -> Any:
        return lambda module, _: packed[name].append("forward" in vars(module))

    model.lm_head.register_forward_pre_hook(note("head"))
    model.model.layers[1].mlp.up_proj.register_forward_pre_hook(note("block"))
    told = {"max_new_tokens": PACKED_FROM, "eos_token_id": ()}
    said = ed.generate(model, [[3, 4, 5]], **told)
    assert all(packed["head"])
    assert all(packed["block"])
    ids = said.sequences
    with torch.no_grad():
        wanted = model(input_ids=ids).logits[0, 2:-1].argmax(-1)
    assert said.tokens[0] == wanted.tolist()
    assert not packed["head"][-1]  # itself again
