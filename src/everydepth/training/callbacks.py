"""Callbacks that come with the training loop."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

from everydepth.config import Setting, checked
from everydepth.errors import SettingError
from everydepth.runs.callback import Callback
from everydepth.training.scoring import Evaluator

if TYPE_CHECKING:
    from everydepth.training.loop import Training


@checked
class UntilAccuracy(Callback):
    """Stop once the accuracy on `data` (such as the training data) reaches `target` after an epoch.

    `result.callbacks["UntilAccuracy"]["reached"]` says whether it did.

    stop: False only measures.
    also: other data, whose accuracy is recorded when the target is first reached. `first` in the
        results holds the epoch and this accuracy.
    """

    kept = ("accuracy", "first")

    def __init__(
        self,
        data: Any,
        target: Annotated[float, Setting(above=0, most=1)] = 1.0,
        *,
        depth: int | None = None,
        stop: bool = True,
        also: Any = None,
    ) -> None:
        self.data, self.target, self.depth = data, target, depth
        self.stop, self.also = stop, also
        self.accuracy: list[float] = []
        self.first: dict[str, Any] | None = None

    def on_epoch(self, training: Training) -> None:
        depth = training.net.stream.depth if self.depth is None else self.depth
        found = training.evaluate(Evaluator(self.data, depths=(depth,)))
        if "accuracy" not in found:
            raise SettingError(
                f"UntilAccuracy with a {training.net.stream.task} model, which has no accuracy; "
                "use it with classes"
            )
        self.accuracy.append(found["accuracy"][0])
        training.log({"train_accuracy": self.accuracy[-1]})
        if not self.reached:
            return
        if self.first is None:
            other = None
            if self.also is not None:
                other = training.evaluate(Evaluator(self.also, depths=(depth,)))["accuracy"][0]
            self.first = {"epoch": len(self.accuracy), "also": other}
        if self.stop:
            training.stop(f"accuracy {self.accuracy[-1]:.4f} reached the target {self.target}")

    @property
    def reached(self) -> bool:
        return bool(self.accuracy) and self.accuracy[-1] >= self.target

    def results(self) -> Mapping[str, Any]:
        return {
            "reached": self.reached,
            "target": self.target,
            "accuracy": self.accuracy,
            "first": self.first,
        }
