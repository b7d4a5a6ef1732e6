"""Finding the adapter of a model, and following a model no adapter knows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as hf
from tests.zoo import ENTRIES, SIZES
from torch import Tensor, nn

import everydepth as ed
from everydepth.errors import SettingError, UnsupportedModelError
from everydepth.stream import families, registry


class Tiny(nn.Module):
    """Somebody's own network: an unusual name for everything, blocks that return tuples."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 8)
        self.trunk = nn.ModuleDict({"steps": nn.ModuleList(Step() for _ in range(3))})
        self.last_norm = nn.LayerNorm(8)
        self.out = nn.Linear(8, 5)

    def forward(self, signal: Tensor) -> Tensor:
        h = self.stem(signal)
        for step in self.trunk["steps"]:
            (h, _) = step(hidden_states=h)
        return self.out(self.last_norm(h.mean(1)))


class Step(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.f = nn.Linear(8, 8)

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, None]:
        return hidden_states + self.f(hidden_states).tanh(), None


OWN = {"blocks": "trunk.steps", "readout": ("last_norm", "out"), "token": "mean"}


@pytest.mark.parametrize(
    "options",
    [
        OWN,
        {**OWN, "token": lambda h, batch: h.mean(1)},
        {**OWN, "readout": "own"},
    ],
    ids=["paths", "token-function", "readout-function"],
)
def test_a_model_no_adapter_knows_is_followed_by_paths(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = Tiny()
    if options["readout"] == "own":
        options = {**options, "readout": lambda x: model.out(model.last_norm(x))}
    batch = {"signal": torch.randn(3, 6, 4)}
    report = ed.check_stream(model, batch, **options)
    assert report.ok, str(report)
    assert ed.as_stream(model, **options).depth == 3


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"blocks": "trunk.stepz"}, r"has no module 'trunk.stepz'.*its children are \['stem'"),
        ({"blocks": "stem"}, "blocks='stem' is a Linear; name the ModuleList"),
        ({"readout": None}, "blocks= needs readout="),
    ],
)
def test_a_wrong_path_says_what_is_there(change: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedModelError, match=words):
        ed.as_stream(Tiny(), **{**OWN, **change})


def test_an_unknown_token_lists_the_known_ones() -> None:
    with pytest.raises(SettingError, match=r"'middle'; use one of \['all', 'first'"):
        ed.as_stream(Tiny(), **{**OWN, "token": "middle"})


def test_a_stock_model_can_be_followed_by_paths_too() -> None:
    """The same numbers as the adapter's."""
    model, batch = ENTRIES["ViT"].make()
    by_path = ed.as_stream(
        model, blocks="vit.layers", readout=("vit.layernorm", "classifier"), token="first"
    )
    with torch.no_grad():
        ours, theirs = by_path.observe(batch), ed.as_stream(model).observe(batch)
        for depth in range(5):
            assert torch.equal(ours.logits(depth), theirs.logits(depth))
        assert torch.equal(
            ed.at_depth(model, 2, **by_path.options)(**batch).logits, theirs.logits(2)
        )


def test_a_subclass_of_a_known_model_is_known() -> None:
    class Mine(hf.ViTForImageClassification):
        pass

    config = hf.ViTConfig(**SIZES, image_size=32, patch_size=8)
    assert ed.as_stream(Mine(config)).depth == 4


def test_a_registered_class_wins_over_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_by_class", {})
    model, _ = ENTRIES["ViT"].make()
    marker = ed.as_stream(model)
    ed.register(hf.ViTForImageClassification, lambda model: marker)
    assert ed.as_stream(model) is marker
    assert families()["registered by you"] == ["ViTForImageClassification"]


def test_a_stream_is_its_own_stream() -> None:
    stream = ed.as_stream(ENTRIES["ViT"].make()[0])
    assert ed.as_stream(stream) is stream


def test_every_class_of_the_table_exists_and_is_in_the_zoo() -> None:
    built = {type(entry.build()).__name__ for entry in ENTRIES.values()}
    assert {name for names in registry.families().values() for name in names} < built
