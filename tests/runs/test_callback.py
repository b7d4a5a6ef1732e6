"""Callbacks keep what they name."""

from __future__ import annotations

from everydepth.runs.callback import Callback


class Counts(Callback):
    kept = ("steps", "seen")

    def __init__(self) -> None:
        self.steps, self.seen, self.other = 0, [1], 0


def test_a_callback_keeps_the_attributes_it_names() -> None:
    before, after = Counts(), Counts()
    before.steps, before.seen, before.other = 7, [2, 3], 9
    after.load_state_dict(before.state_dict())
    assert (after.steps, after.seen, after.other) == (7, [2, 3], 0)
    after.load_state_dict({"steps": 8})  # of a run from before `seen` was kept
    assert (after.steps, after.seen) == (8, [2, 3])
    assert Callback().state_dict() == {}
