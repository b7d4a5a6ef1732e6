"""The names of a model and its depths for clients: `name`, `name@12`."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from everydepth.errors import DepthError, SettingError
from everydepth.exits.policies import Policy
from everydepth.exits.profile import Profile


class UnknownModel(SettingError):
    """A model that this server does not have."""


@dataclass(frozen=True, kw_only=True)
class Menu:
    """The depths and policies of one model, and what is known of them.

    rungs: the depths that are served, if not all.
    """

    name: str
    depth: int
    rungs: tuple[int, ...] | None = None
    policies: Mapping[str, Policy] = field(default_factory=dict[str, Policy])
    profile: Profile | None = None
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        if self.profile is not None and self.profile.depth != self.depth:
            raise SettingError(
                f"the profile has {self.profile.depth} depths, but {self.name} has {self.depth}; "
                "profile this model: everydepth profile"
            )

    def depth_of(self, model: str, depth: int | None) -> int | None:
        """The depth given by `model` and `depth` of a request; None if neither sets one."""
        name, at, rung = model.partition("@")
        if name != self.name:
            raise UnknownModel(f"no model {model!r} here; this server has {self.name!r}")
        if not at:
            return depth
        if rung not in map(str, self.depths):
            known = f"1 to @{self.depth}"
            if self.rungs is not None:
                known = ", @".join(map(str, self.rungs))
            raise DepthError(f"{model!r}: depth {rung!r}; use {self.name}@{known}")
        if depth not in (None, int(rung)):
            raise DepthError(f"{model!r} and depth {depth}: they disagree; send one of them")
        return int(rung)

    def policy_of(self, name: str | None) -> Policy | None:
        if name is None:
            return None
        if name not in self.policies:
            known = ", ".join(sorted(self.policies)) or "none; start the server with --policy"
            raise SettingError(f"no policy {name!r} here; there is {known}")
        return self.policies[name]

    def listed(self) -> list[dict[str, Any]]:
        """For /v1/models: the whole model first, then every depth."""
        whole: dict[str, Any] = {
            "id": self.name,
            "object": "model",
            "created": self.created,
            "owned_by": "everydepth",
        }
        return [
            whole | {"depths": self.depth, "policies": sorted(self.policies)},
            *(whole | {"id": f"{self.name}@{d}", "depth": d} | self._known(d) for d in self.depths),
        ]

    def one(self, name: str) -> dict[str, Any]:
        """The entry of `listed` with this name."""
        found = {entry["id"]: entry for entry in self.listed()}
        if name not in found:
            raise UnknownModel(f"no model {name!r} here; /v1/models lists them")
        return found[name]

    @property
    def quality(self) -> dict[int, float]:
        """By depth, as far as it was measured."""
        measured = () if self.profile is None else self.profile.depths
        return {found.depth: found.quality for found in measured}

    @property
    def depths(self) -> Sequence[int]:
        return range(1, self.depth + 1) if self.rungs is None else self.rungs

    def above(self, floor: float, depths: Sequence[int]) -> list[int]:
        """The depths whose quality is at least the floor."""
        if self.profile is None:
            raise SettingError(
                f"a floor of {floor} needs --profile, which says what each depth is worth; "
                "make one: everydepth profile MODEL --data ... --run profile"
            )
        sign = 1 if self.profile.more_is_better else -1
        known = {depth: found for depth, found in self.quality.items() if depth in depths}
        good = [depth for depth, found in known.items() if sign * found >= sign * floor]
        if not good:
            best = max((sign * found for found in known.values()), default=float("nan"))
            raise SettingError(
                f"a floor of {floor}, but the best {self.profile.metric} of a depth is "
                f"{sign * best:.4g}; lower it"
            )
        return good

    def _known(self, depth: int) -> dict[str, Any]:
        if self.profile is None or depth not in self.quality:
            return {}
        found = self.profile.at(depth)
        cost = {"milliseconds": found.latency.median}
        if "decode" in self.profile:
            each = dict(zip(self.quality, self.profile["decode"], strict=True))
            cost = {"milliseconds_per_token": 1000 / float(each[depth])}
        return {self.profile.metric: found.quality, **cost, "bytes": found.checkpoint_bytes}
