"""Callbacks of the training loop."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar


class Callback:
    """Override what you need. `training` gives `net`, `model`, `step`, `epoch`, `log`, `stop`.

    Every process calls every method, so a method may run the network; `training.log` writes once.

    kept: names of attributes with JSON values that a resumed run needs.
    """

    kept: ClassVar[tuple[str, ...]] = ()

    def on_start(self, training: Any) -> None:
        """Before the first step, also of a resumed run."""

    def on_step(self, training: Any) -> None:
        """After each optimizer step; `training.losses` are this step's."""

    def on_gradients(self, training: Any) -> None:
        """Before each optimizer step; gradients are complete and not yet clipped."""

    def on_validation(self, training: Any) -> None:
        """After each validation; `training.valid` is its outcome."""

    def on_epoch(self, training: Any) -> None:
        """After each epoch."""

    def on_end(self, training: Any) -> None:
        """After the last step."""

    def results(self) -> Mapping[str, Any]:
        """The entry in `FitResult.callbacks`, as JSON values."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """The state a resumed run needs, as JSON values."""
        return {name: getattr(self, name) for name in self.kept}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        for name in self.kept:
            setattr(self, name, state.get(name, getattr(self, name)))
