"""Networks with wrong labels: what they are compared with, and what their loss is on."""

from __future__ import annotations

import pytest
import torch

from everydepth.data import Images
from everydepth_papers.evidence.baselines import linear_accuracy
from everydepth_papers.evidence.label_noise import TASKS, Task, baseline


def images(rows: int, *, right: bool, seed: int = 0) -> Images:
    """One bright pixel of two says which class it is; or nothing does."""
    draw = torch.Generator().manual_seed(seed)
    labels = torch.randint(2, (rows,), generator=draw)
    shown = labels if right else torch.randint(2, (rows,), generator=draw)
    pixels = torch.eye(2)[shown].reshape(rows, 1, 1, 2)
    return Images(pixels, labels, ("a", "b"))


def test_the_baseline_is_fitted_to_every_row_not_to_the_first_ones() -> None:
    first, rest, test = (
        images(5000, right=False),
        images(4000, right=True, seed=1),
        images(100, right=True, seed=2),
    )
    train = Images(
        torch.cat([first.pixel_values, rest.pixel_values]),
        torch.cat([first.labels, rest.labels]),
        first.classes,
    )
    assert linear_accuracy(train, test) == 1.0
    assert linear_accuracy(first, test) < 1.0


def test_a_network_that_started_from_clean_rows_is_compared_with_a_fit_to_them_too() -> None:
    noisy, clean = images(40, right=False), images(200, right=True, seed=1)
    test = images(100, right=True, seed=2)

    def found(before: Images | None) -> float:
        task = Task(
            labels=noisy.labels,
            answers=test.labels,
            train=lambda labels: noisy,
            test=test,
            classes=2,
            model=torch.nn.Identity,
            before=before,
        )
        return baseline(task, noisy)["linear"]

    assert found(clean) == 1.0
    assert found(None) < 1.0


@pytest.mark.parametrize(("setting", "more"), [({}, False), ({"loss_on": "all"}, True)])
def test_a_label_written_as_text_is_learned_alone_or_with_its_text(
    setting: dict[str, str], more: bool
) -> None:
    sizes = {"vocabulary": 64, "tokens": 13, "width": 16, "depth": 2, "rows": 8, "test": 4}
    task = TASKS["prompts"]({"data": "synthetic", **sizes, "before": 4, **setting}, 0)
    assert task.learned is not None
    counted = [int((rows.labels >= 0).sum()) for rows in (task.train(task.labels), task.before)]
    assert counted[0] >= 8
    assert (int((task.learned(task.labels).labels >= 0).sum()) > counted[0]) is more
    assert (counted[1] > counted[0] / 2) is more
