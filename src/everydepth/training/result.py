"""The result of training."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from torch import Tensor

from everydepth.progress import quiet_transformers
from everydepth.results import Fact, Result, Results, curve, named, provenance
from everydepth.results.result import readable
from everydepth.runs import Run
from everydepth.runs.history import history as logged_curves
from everydepth.stream import adapter, merged, unwrapped
from everydepth.training.module import EveryDepth
from everydepth.training.scoring import Scores

FINISHED = "finished"


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class FitResult(Results, kind="fit"):
    """The result of training: the last validation at every depth, and the logged metrics.

    history: the metrics in the order they were logged.
    path: the run directory, or None; the model is in its folder `model`.
    Neither is restored by `load`.

    >>> net = ed.EveryDepth(model, ed.lpa())
    >>> done = ed.fit(net, train, valid, steps=3, progress=False)
    >>> done.steps, done.stopped, len(done.valid["accuracy"])  # one accuracy per depth
    (3, 'finished', 3)
    """

    history: Sequence[Mapping[str, Any]] = ()
    path: Path | None = None
    steps = Fact(int)
    """Completed optimizer steps."""
    epochs = Fact(int)
    """Completed epochs."""
    stopped = Fact(str)
    """ "finished", or why training ended early."""
    seconds = Fact(float)
    """Time of training and validation, including the time before a resume."""
    best_step = Fact[int | None]()
    """The step with the best early-stopping metric (by default the last depth's loss)."""
    best_value = Fact[float | None]()
    """The value of that metric at `best_step`."""
    callbacks = Fact[Mapping[str, Any]]()
    """The results of each callback, by class name."""

    @classmethod
    def of(
        cls,
        *,
        valid: Scores,
        history: Sequence[Mapping[str, Any]],
        path: Path | None,
        **facts: Any,
    ) -> FitResult:
        """facts: those of `provenance`, and the values of the properties below."""
        measured = [_validated(name, values) for name, values in valid.items()]
        logged = logged_curves(history).results
        return cls(
            results={**named(*measured), **logged},
            about=provenance(**facts),
            history=history,
            path=path,
        )

    @property
    def valid(self) -> Scores:
        """The last validation: by metric, values at depths 1..L; empty without validation."""
        names = (name for name in self.results if name.startswith(_VALID))
        return {name.removeprefix(_VALID): tuple(self[name].tolist()) for name in names}


_VALID = "valid_"


def _validated(name: str, values: Sequence[float]) -> Result:
    return curve(
        f"{_VALID}{name}",
        range(1, len(values) + 1),
        list(values),
        title=f"{readable(name)} on validation data",
        about="Every depth through the shared readout, at the end of the run.",
        unit="share" if name == "accuracy" else "",
        better="higher" if name == "accuracy" else "lower",
        section="prediction",
    )


def write_result(run: Run, result: FitResult, net: EveryDepth, state: dict[str, Tensor]) -> None:
    """Write the plain model and the result to the run directory."""
    around = adapter(net.model)
    if (run.path / "model").exists():
        pass
    elif around is not None:
        whole: Any = merged(copy.deepcopy(around))
        with quiet_transformers():
            run.write_folder("adapter", lambda folder: around.save_pretrained(str(folder)))
            run.write_folder("model", lambda folder: whole.save_pretrained(folder))
    elif hasattr(unwrapped(net.model), "save_pretrained"):
        own = {k: v for k, v in state.items() if not (net.heads and k.startswith("heads."))}
        with quiet_transformers():
            run.write_folder("model", lambda folder: net.save_pretrained(folder, state_dict=own))
    names = ("steps", "epochs", "stopped", "seconds", "best_step", "best_value", "callbacks")
    run.write_results({"valid": result.valid, **{name: result.about[name] for name in names}})


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested values to names such as `valid/accuracy/3`, for trackers."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            found |= flat(cast(Mapping[str, Any], value), f"{name}/")
        elif isinstance(value, (list, tuple)):
            items = enumerate(cast(Sequence[Any], value), start=1)
            found |= flat({str(i): item for i, item in items}, f"{name}/")
        elif value is not None:
            found[name] = value
    return found
