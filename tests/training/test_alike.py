"""A warning where a loss at every depth has little to learn from."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.helpers.training import digits, same, vit, weights

import everydepth as ed
from everydepth.training.alike import AlikeRowsWarning


def gathering_late() -> Any:
    """A ViT whose class token sees the image in the last block only."""
    model = vit(dropout=0.0)
    with torch.no_grad():
        for block in model.vit.layers[:-1]:
            block.attention.o_proj.weight.zero_()
    return model


def test_depths_at_which_all_rows_look_alike_are_named_with_the_way_out() -> None:
    words = (
        r"at depths 1, 2 the rows .* differ by at most 0\.0 % .* Instead, train the last depth, "
        r"then exits: ed\.fit\(ed\.EveryDepth\(model, ed\.end_to_end\(\)\), train, \.\.\.\); "
        r"ed\.fit\(ed\.balcony\(model, \[1, 2\]\), train, \.\.\.\)"
    )
    with pytest.warns(AlikeRowsWarning, match=words):
        ed.fit(ed.EveryDepth(gathering_late()), digits(32), steps=1, progress=False)


@pytest.mark.parametrize("objective", [ed.end_to_end(), ed.lpa(top=1), ed.multi_classifier()])
def test_objectives_without_a_shared_readout_below_the_last_depth_do_not_warn(
    objective: ed.Objective,
) -> None:
    ed.fit(ed.EveryDepth(gathering_late(), objective), digits(32), steps=1, progress=False)


def test_balconies_do_not_warn() -> None:
    ed.fit(ed.balcony(gathering_late()), digits(32), steps=1, progress=False)


def test_looking_at_the_first_batch_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[dict[str, torch.Tensor]] = []
    for look in (True, False):
        if not look:
            monkeypatch.setattr("everydepth.training.loop.warn_if_alike", lambda *_: None)
        net = ed.EveryDepth(vit(dropout=0.1))
        ed.fit(net, digits(32), steps=2, progress=False)
        found.append(weights(net))
    assert same(*found)
