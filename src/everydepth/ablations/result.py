"""What an ablation found: one number a layer and a scale, for every metric."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from everydepth.errors import DataError, SettingError
from everydepth.files import write_json

Floats = NDArray[np.float64]

FORMAT = 1


@dataclass(frozen=True, kw_only=True, eq=False)
class Ablation:
    """Metrics after the skips of one layer were scaled by `c`, for every layer and c.

    mode: "after" (a trained model, changed afterwards) or "training" (one model trained for each).
    runs: by metric, `(seed, layer, c)`. untouched: by metric, `(seed,)`, the model with its skips.
    `ablation["accuracy"]` is the mean over seeds, `(layer, c)`. Metrics: loss, and where classes or
    tokens are predicted accuracy, margin (top-1 minus top-2 logit), agreement (share of the
    untouched model's decisions kept), perplexity of language models; of trained models also
    memorization, train_accuracy, reached (1 where all training labels were fitted) and, of language
    models, sample_accuracy (share of samples all of whose targets are predicted).

    >>> ablation = ed.ablate(model, valid, c=(0.0, 1.0), progress=False)
    >>> ablation["accuracy"].shape  # layers, scales
    (3, 2)
    >>> ablation.at("accuracy", 0.0).shape  # one number a layer, its skips removed
    (3,)
    """

    model: str
    task: str
    mode: Literal["after", "training"]
    which: str
    layers: tuple[int, ...]
    c: tuple[float, ...]
    seeds: tuple[int, ...]
    samples: int
    runs: Mapping[str, Floats]
    untouched: Mapping[str, Floats]

    def __getitem__(self, metric: str) -> Floats:
        return _checked(self.runs, metric).mean(0)

    @property
    def metrics(self) -> tuple[str, ...]:
        return tuple(self.runs)

    def at(self, metric: str, c: float) -> Floats:
        """One number a layer, at one scale."""
        if c not in self.c:
            raise SettingError(f"c={c}, but this ablation has {', '.join(map(str, self.c))}")
        return self[metric][:, self.c.index(c)]

    def table(self, metric: str | None = None) -> str:
        """Layers down, scales across."""
        name = metric or next(m for m in ("accuracy", "perplexity", "loss") if m in self.runs)
        values = self[name]
        lines = [f"{name:<12}" + "".join(f"c={c:<10g}" for c in self.c)]
        for layer, row in zip(self.layers, values, strict=True):
            lines.append(f"layer {layer:<6}" + "".join(f"{v:<12.4f}" for v in row))
        lines.append(f"untouched   {float(_checked(self.untouched, name).mean()):.4f}")
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        content = asdict(self)
        for name in ("runs", "untouched"):
            content[name] = {key: as_lists(value) for key, value in content[name].items()}
        return {"format": FORMAT, **content}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Ablation:
        values = dict(content)
        if values.pop("format", None) != FORMAT:
            raise DataError(
                f"format {content.get('format')!r}, but this version reads {FORMAT}; "
                "install a newer everydepth"
            )
        for name in ("layers", "c", "seeds"):
            values[name] = tuple(values[name])
        for name in ("runs", "untouched"):
            values[name] = {key: as_floats(value) for key, value in values[name].items()}
        return cls(**values)

    def save(self, path: str | Path) -> None:
        """One JSON file, whole or not at all."""
        write_json(Path(path), self.to_json())

    @classmethod
    def load(cls, path: str | Path) -> Ablation:
        return cls.from_json(json.loads(Path(path).read_text(encoding="utf-8")))


def as_lists(values: Any) -> Any:
    """Numbers as JSON: NaN, which JSON has no word for, becomes null."""
    if isinstance(values, np.ndarray):
        values = values.tolist()
    if isinstance(values, list | tuple):
        return [as_lists(value) for value in values]
    return None if isinstance(values, float) and not np.isfinite(values) else values


def as_floats(values: Any) -> Floats:
    return np.array(values, dtype=np.float64)


def _checked(values: Mapping[str, Floats], metric: str) -> Floats:
    if metric not in values:
        raise SettingError(
            f"metric {metric!r}, but there are {', '.join(values)}; use one of these"
        )
    return values[metric]


def interval(values: Sequence[float] | Floats, confidence: float = 0.95) -> tuple[float, float]:
    """Student's interval of the mean of a few runs; NaN for fewer than two."""
    from scipy.stats import t

    found = np.asarray(values, dtype=np.float64)
    found = found[np.isfinite(found)]
    if len(found) < 2:
        return float("nan"), float("nan")
    half = t.ppf(0.5 + confidence / 2, len(found) - 1) * found.std(ddof=1) / len(found) ** 0.5
    return float(found.mean() - half), float(found.mean() + half)
