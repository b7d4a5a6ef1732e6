"""The settings of `ablate`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

from everydepth.config import Config, setting
from everydepth.errors import SettingError

SCALES = (0.0, 0.25, 0.5, 0.75, 1.0)
Which = Literal["both", "attention", "cross_attention", "mlp", "conv"]


@dataclass(frozen=True, kw_only=True)
class AblateConfig(Config):
    """The settings of `ablate`.

    >>> from everydepth.ablations import AblateConfig
    >>> AblateConfig(c=0.0).c
    (0.0,)
    """

    title: ClassVar[str] = "Ablating"

    layers: int | tuple[int, ...] | None = setting(
        None, option=tuple[int, ...], help="Layers, from 1; by default all, one at a time."
    )
    c: float | tuple[float, ...] = setting(
        SCALES, option=tuple[float, ...], help="Factors on the skip; 0 removes it, 1 keeps it."
    )
    which: Which = setting(
        "both", choices=get_args(Which), option=str, help="Which residual connections."
    )
    batch_size: int | None = setting(None, least=1, help="Rows per batch.")
    max_samples: int | None = setting(None, least=1, hidden=True, help="Stop after N rows.")
    seeds: tuple[int, ...] = setting((0,), hidden=True, help="With train=: one run per seed.")

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("layers", "c"):
            value = getattr(self, name)
            if isinstance(value, int | float):
                object.__setattr__(self, name, (value,))
        for name, what in (("c", "scale"), ("seeds", "seed")):
            values = list(getattr(self, name))
            if not values or len(set(values)) < len(values):
                raise SettingError(f"{name}={values}; give each {what} once, at least one")

    @property
    def scales(self) -> tuple[float, ...]:
        return self.c if isinstance(self.c, tuple) else (self.c,)

    def layers_of(self, depth: int) -> tuple[int, ...]:
        """The layers to change in a model with `depth` blocks."""
        layers = self.layers
        if layers is None:
            return tuple(range(1, depth + 1))
        return layers if isinstance(layers, tuple) else (layers,)
