"""Things to do during training: measure, log, stop."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from everydepth.errors import SettingError
from everydepth.runs.callback import Callback
from everydepth.training.scoring import Evaluator

if TYPE_CHECKING:
    from everydepth.training.loop import Training


class UntilAccuracy(Callback):
    """Stop once the accuracy on `data` (the training data, say) reaches `target` at an epoch's end.

    Where it never does, the result says so: `result.callbacks["UntilAccuracy"]["reached"]`.
    """

    def __init__(self, data: Any, target: float = 1.0, *, depth: int | None = None) -> None:
        if not 0 < target <= 1:
            raise SettingError(f"target={target}; use a share above 0, up to 1")
        self.data, self.target, self.depth = data, target, depth
        self.accuracy: list[float] = []

    def on_epoch(self, training: Training) -> None:
        depth = training.net.stream.depth if self.depth is None else self.depth
        found = training.evaluate(Evaluator(self.data, depths=(depth,)))
        if "accuracy" not in found:
            raise SettingError(
                f"UntilAccuracy on {training.net.stream.task}, which has no accuracy; "
                "use it with classes"
            )
        self.accuracy.append(found["accuracy"][0])
        training.log({"train_accuracy": self.accuracy[-1]})
        if self.reached:
            training.stop(f"accuracy {self.accuracy[-1]:.4f} reached the target {self.target}")

    @property
    def reached(self) -> bool:
        return bool(self.accuracy) and self.accuracy[-1] >= self.target

    def results(self) -> Mapping[str, Any]:
        return {"reached": self.reached, "target": self.target, "accuracy": self.accuracy}

    def state_dict(self) -> dict[str, Any]:
        return {"accuracy": self.accuracy}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.accuracy = list(state["accuracy"])
