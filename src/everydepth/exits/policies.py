"""Exit policies: a measure of certainty, and the threshold to reach at each depth."""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from everydepth.config import brief, checked
from everydepth.errors import PolicyError, SettingError, UnsupportedModelError
from everydepth.exits.identity import Identity, identity
from everydepth.files import explained, write_text
from everydepth.stream import ResidualStream

FORMAT = 1

NEVER = math.inf
"""The threshold of a depth at which no sample exits."""

Memory = tuple[Tensor, ...]
"""A policy's memory of earlier depths, one row per sample; empty at the first depth."""

Number = float | int

Against = Literal["full", "labels", "loss"]


@dataclass(frozen=True, kw_only=True)
class Certificate:
    """The outcome of calibration.

    certified: whether, with probability 1 - delta over the draw of the calibration samples, the
        risk is at most `risk`.
    against: what the risk is: the probability of a prediction that differs from the full model's
        ("full"), the loss of accuracy ("labels"), or the increase of a custom loss ("loss").
    observed: the risk on the calibration samples.
    p_value: of the chosen thresholds.
    speedup: on the calibration samples, counted in blocks.
    block_speedup: the same, each block weighted by its time, if measured.
    clock: the predicted wall-clock speedup, if measured.

    >>> policy = ed.calibrate(model, valid, risk=0.2, progress=False)
    >>> policy.certificate.certified, policy.certificate.observed <= 0.2
    (True, True)
    """

    certified: bool
    risk: float
    delta: float
    against: Against
    samples: int
    observed: float
    p_value: float
    speedup: float
    note: str
    clock: float | None = None
    block_speedup: float | None = None

    @property
    def saved(self) -> str:
        """The speedup in words, by time if blocks were timed."""
        words = f"{self.speedup:.2f}x fewer blocks"
        if self.block_speedup is None:
            return words
        return f"{words}, which take {self.block_speedup:.2f}x less time"


@dataclass(frozen=True, kw_only=True)
class Policy(ABC):
    """Exit at the first depth whose certainty reaches the threshold, or at the last depth.

    threshold: one number for all depths, or one for each of the depths 1..L-1; infinity (`NEVER`)
        where no sample exits.
    model: the model it was calibrated on; others are then refused.

    >>> policy = ed.calibrate(model, valid, risk=0.2, progress=False)
    >>> policy.save("policy.json")
    >>> ed.Policy.load("policy.json") == policy
    True
    """

    kind: ClassVar[str]
    remembers: ClassVar[bool] = False
    """Whether the certainty depends on earlier depths, which must then all be read out."""

    threshold: Number | tuple[Number, ...]
    model: Identity | None = None
    certificate: Certificate | None = None

    def __post_init__(self) -> None:
        values = self.threshold if isinstance(self.threshold, tuple) else (self.threshold,)
        for value in values:
            number = isinstance(value, int | float) and not isinstance(value, bool)  # pyright: ignore[reportUnnecessaryIsInstance]
            if not number or (value != NEVER and not self._allows(value)):
                raise SettingError(
                    f"{type(self).__name__} with threshold {brief(value)}; use {self._allowed}, or "
                    "math.inf for a depth at which no sample exits"
                )
        for name, kind in (("model", Identity), ("certificate", Certificate)):
            given = getattr(self, name)
            if not isinstance(given, kind | None):
                raise SettingError(
                    f"{type(self).__name__}({name}={brief(given)}); use {kind.__name__} or None"
                )

    # -- for subclasses ---------------------------------------------------------------------------

    @abstractmethod
    def certainty(
        self, logits: Float[Tensor, "rows classes"], memory: Memory
    ) -> tuple[Float[Tensor, " rows"], Memory]:
        """The certainty of each row at this depth, and the memory for the next."""

    @classmethod
    def path(cls, classes: int, depths: int) -> list[float]:
        """Candidate thresholds from the most to the least careful, independent of data."""
        near_one = torch.logspace(-6, -1, 40, dtype=torch.float64)
        doubt = torch.cat([near_one, torch.linspace(0.11, 1, 90, dtype=torch.float64)])
        return (1 - doubt).tolist()

    @classmethod
    def least(cls, certainty: Number) -> Number:
        """The lowest valid threshold that lets the same rows exit as `certainty` would."""
        return certainty

    _allowed: ClassVar[str] = "0 to 1"

    def _allows(self, value: Number) -> bool:
        return 0 <= value <= 1

    # -- for users --------------------------------------------------------------------------------

    @final
    @checked
    def for_stream(self, stream: ResidualStream) -> tuple[Number, ...]:
        """The thresholds of depths 1..L-1; an error if the policy does not fit the model."""
        check_classifier(stream)
        return self.thresholds(stream)

    @final
    @checked
    def thresholds(self, stream: ResidualStream) -> tuple[Number, ...]:
        """Like `for_stream`, but for any task: language models exit token by token."""
        given, places = self.threshold, stream.depth - 1
        if isinstance(given, tuple) and len(given) != places:
            raise PolicyError(
                f"this policy has thresholds for {len(given) + 1} depths, but {stream.name} has "
                f"{stream.depth}; calibrate one for this model: everydepth.calibrate(model, data)"
            )
        if self.model is not None and self.model != identity(stream):
            raise PolicyError(
                f"this policy was calibrated on {self.model}, but this is {identity(stream)}; its "
                "guarantee holds for that model only, so calibrate again"
            )
        return given if isinstance(given, tuple) else (given,) * places

    @final
    def to_json(self) -> str:
        values = self.threshold if isinstance(self.threshold, tuple) else (self.threshold,)
        finite = [None if value == NEVER else value for value in values]
        content = {
            "format": FORMAT,
            "policy": self.kind,
            "threshold": finite if isinstance(self.threshold, tuple) else finite[0],
            "model": None if self.model is None else asdict(self.model),
            "certificate": None if self.certificate is None else asdict(self.certificate),
        }
        return json.dumps(content, indent=2)

    @staticmethod
    @checked
    def from_json(text: str) -> Policy:
        """The inverse of `to_json`, for every kind of policy."""
        try:
            content: dict[str, Any] = json.loads(text)
            version, name = content["format"], content["policy"]
            if version != FORMAT:
                raise PolicyError(
                    f"policy format {version}, but this version reads {FORMAT}; calibrate again"
                )
            given = content["threshold"]
            values = tuple(
                NEVER if v is None else float(v)
                for v in (given if isinstance(given, list) else [given])
            )
            model, certificate = content["model"], content["certificate"]
            return policy_class(name)(
                threshold=values if isinstance(given, list) else values[0],
                model=None if model is None else Identity(**model),
                certificate=None if certificate is None else Certificate(**certificate),
            )
        except (KeyError, RecursionError, TypeError, ValueError) as error:
            if isinstance(error, PolicyError | SettingError):
                raise
            raise PolicyError(
                f"this is not a policy written by to_json ({error}); calibrate again"
            ) from error

    @final
    @checked
    def save(self, path: str | Path) -> None:
        with explained("the policy cannot be saved", PolicyError):
            write_text(Path(path), self.to_json() + "\n")

    @staticmethod
    @checked
    def load(path: str | Path) -> Policy:
        with explained("the policy cannot be read", PolicyError):
            return Policy.from_json(Path(path).read_text(encoding="utf-8"))


@final
@dataclass(frozen=True, kw_only=True)
class Confidence(Policy):
    """The largest softmax probability.

    >>> policy = ed.Confidence(threshold=0.9)
    >>> ed.predict(model, test.batch(range(8)), policy=policy).depths.shape
    torch.Size([8])
    """

    kind: ClassVar[str] = "confidence"

    def certainty(
        self, logits: Float[Tensor, "rows classes"], memory: Memory
    ) -> tuple[Float[Tensor, " rows"], Memory]:
        return _softmax(logits).amax(-1), ()


@final
@dataclass(frozen=True, kw_only=True)
class Entropy(Policy):
    """One minus the entropy of the softmax, relative to its maximum (the log of the classes).

    >>> from everydepth.exits import Entropy
    >>> policy = Entropy(threshold=0.8)
    >>> ed.predict(model, test.batch(range(8)), policy=policy).depths.shape
    torch.Size([8])
    """

    kind: ClassVar[str] = "entropy"

    def certainty(
        self, logits: Float[Tensor, "rows classes"], memory: Memory
    ) -> tuple[Float[Tensor, " rows"], Memory]:
        entropy = torch.special.entr(_softmax(logits)).sum(-1)
        return 1 - entropy / math.log(logits.shape[-1]), ()


@final
@dataclass(frozen=True, kw_only=True)
class Margin(Policy):
    """The largest softmax probability minus the second largest.

    >>> from everydepth.exits import Margin
    >>> policy = Margin(threshold=0.8)
    >>> ed.predict(model, test.batch(range(8)), policy=policy).depths.shape
    torch.Size([8])
    """

    kind: ClassVar[str] = "margin"

    def certainty(
        self, logits: Float[Tensor, "rows classes"], memory: Memory
    ) -> tuple[Float[Tensor, " rows"], Memory]:
        best = _softmax(logits).topk(2, dim=-1).values
        return best[:, 0] - best[:, 1], ()


@final
@dataclass(frozen=True, kw_only=True)
class Patience(Policy):
    """The number of consecutive earlier depths that predicted the same class.

    >>> policy = ed.Patience(threshold=1.0)  # two depths in a row agree
    >>> int(ed.predict(model, test.batch(range(8)), policy=policy).depths.min()) >= 2
    True
    """

    kind: ClassVar[str] = "patience"
    remembers: ClassVar[bool] = True
    _allowed: ClassVar[str] = "a whole number of 1 or more"

    def _allows(self, value: Number) -> bool:
        return 1 <= value < 2**63 and value % 1 == 0

    def certainty(
        self, logits: Float[Tensor, "rows classes"], memory: Memory
    ) -> tuple[Float[Tensor, " rows"], Memory]:
        found = logits.argmax(-1)
        if not memory:
            count = torch.zeros_like(logits[:, 0])
        else:
            before, count = memory
            count = torch.where(found == before, count + 1, torch.zeros_like(count))
        return count, (found, count)

    @classmethod
    def path(cls, classes: int, depths: int) -> list[float]:
        return [float(count) for count in range(depths - 2, 0, -1)]

    @classmethod
    def least(cls, certainty: Number) -> Number:
        return certainty if certainty == NEVER else max(1.0, float(math.ceil(certainty)))


@final
@dataclass(frozen=True, kw_only=True)
class Agreement(Policy):
    """The overlap of the softmax with that of the previous depth; 0 if their classes differ.

    >>> from everydepth.exits import Agreement
    >>> policy = Agreement(threshold=0.9)
    >>> ed.predict(model, test.batch(range(8)), policy=policy).depths.shape
    torch.Size([8])
    """

    kind: ClassVar[str] = "agreement"
    remembers: ClassVar[bool] = True

    def certainty(
        self, logits: Float[Tensor, "rows classes"], memory: Memory
    ) -> tuple[Float[Tensor, " rows"], Memory]:
        now = _softmax(logits)
        if not memory:
            return torch.zeros_like(now[:, 0]), (now,)
        (before,) = memory
        same = now.argmax(-1) == before.argmax(-1)
        return torch.minimum(now, before).sum(-1) * same, (now,)


POLICIES: dict[str, type[Policy]] = {
    policy.kind: policy for policy in (Confidence, Entropy, Margin, Patience, Agreement)
}


def policy_class(name: str) -> type[Policy]:
    if name not in POLICIES:
        raise SettingError(f"policy {name!r}; use one of {', '.join(map(repr, POLICIES))}")
    return POLICIES[name]


def check_classifier(stream: ResidualStream) -> None:
    """Raise an error unless the model predicts one of two or more classes per sample."""
    if stream.task != "classification" or stream.outputs == 1:
        raise UnsupportedModelError(
            "early exit needs a model that predicts a class per sample, but the task of "
            f"{stream.name} is {stream.task} (outputs: {stream.outputs}); use everydepth.generate "
            "for a causal language model, or one fixed depth: everydepth.at_depth(model, k)"
        )


def exit_depths(
    certainty: Float[Tensor, "rows places"], thresholds: Float[Tensor, " places"]
) -> Int[Tensor, " rows"]:
    """The first depth (from 1) whose certainty reaches its threshold, or the last, `places` + 1."""
    last = torch.ones_like(certainty[:, :1], dtype=torch.bool)
    leaves = torch.cat([certainty >= thresholds, last], dim=1)
    return leaves.to(torch.uint8).argmax(1) + 1


def layer_speedup(depths: Int[Tensor, " rows"], last: int) -> float:
    """`sum_i L m_i / sum_i i m_i`: blocks without exits over blocks with them."""
    return last * depths.numel() / int(depths.sum())


def _softmax(logits: Tensor) -> Tensor:
    # Half precision would round certainties near 1, where thresholds are.
    return logits.softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))
