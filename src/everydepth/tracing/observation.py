"""What metrics see of a batch, computed once for all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from everydepth.errors import UnsupportedModelError
from everydepth.stream import (
    LABELED_TOKEN_TASKS,
    Block,
    BranchRecord,
    ResidualStream,
    States,
    TapGradients,
    Targets,
    at_least_float32,
    has_labels,
    real_tokens,
)
from everydepth.stream.words import predicts_words
from everydepth.tracing.predictions import LOGIT_BYTES, Predictions


@dataclass(frozen=True, eq=False)
class FeatureRows:
    """A chunk of rows.

    features: (depths 0..L, rows, dim). targets: for metrics that need labels; -100 for a row
    without. other: the second model's features. second: whether this is the second look.
    """

    stream: ResidualStream
    features: Tensor
    targets: Tensor | None
    other: Tensor | None = None
    second: bool = False

    @cached_property
    def normed(self) -> Tensor:
        """The inputs of the head's linear map: the features after the final norm or pooler."""
        stream = self.stream
        inputs = self.features.to(next(stream.head.parameters(), self.features).dtype)
        found = [stream.normed(feature, depth) for depth, feature in enumerate(inputs)]
        return torch.stack(found).to(self.features.dtype)


@dataclass(frozen=True, eq=False)
class BlockRecords:
    """The records of the branches of block `depth`, for one batch."""

    stream: ResidualStream
    depth: int
    branches: Sequence[BranchRecord]
    batch: Mapping[str, Any]

    @property
    def block(self) -> Block:
        return self.stream.blocks[self.depth - 1]


@dataclass(frozen=True, eq=False)
class Observation:
    """One batch after the model ran.

    A row is one prediction: a sample, or a real token if every token predicts.

    states: of the model. other: of the second model. first_sample: the number of samples before
    this batch. depths: those read out; all if empty. drawn: the rows to use; None for all.
    reads: the fields of `predictions` that metrics use.
    """

    stream: ResidualStream
    states: States
    first_sample: int
    other: States | None = None
    gradients: TapGradients | None = None
    depths: tuple[int, ...] = ()
    drawn: Tensor | None = None
    reads: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        if not self.depths:
            object.__setattr__(self, "depths", tuple(range(len(self.states))))

    @property
    def depth(self) -> int:
        """The index of the last depth in `depths`."""
        return len(self.depths) - 1

    @property
    def samples(self) -> int:
        return self.states.h[0].shape[0]

    @cached_property
    def per_token(self) -> bool:
        """Whether every token (or query) predicts, so that a sample has several rows."""
        return self._shape.ndim == 3

    @cached_property
    def asked(self) -> Targets:
        """The rows with their labels."""
        return self._drawn(Targets.every(self.stream, self.states.batch, self._shape))

    @cached_property
    def rows(self) -> Targets:
        """The rows without labels, which may be of another task if no metric needs them."""
        if self.stream.task in LABELED_TOKEN_TASKS:
            return self.asked  # labels select the tokens that count
        batch = {key: value for key, value in self.states.batch.items() if key != "labels"}
        return self._drawn(Targets.every(self.stream, batch, self._shape))

    def _drawn(self, targets: Targets) -> Targets:
        return targets if self.drawn is None else targets.some(self.drawn)

    @property
    def row_sample(self) -> Tensor:
        """The number of the sample that each row belongs to, counted over all batches."""
        return self.rows.sample.cpu() + self.first_sample

    @cached_property
    def features(self) -> Tensor:
        """(depths, rows, dim), float32 (float64 for a float64 model)."""
        found: list[Tensor] = []
        for depth in self.depths:
            feature = self.rows.pick(self.states.feature(depth).detach())
            # If the readout uses all tokens of a sample, take their mean.
            feature = feature if feature.ndim == 2 else feature.flatten(1, -2).mean(1)
            found.append(at_least_float32(feature))
        return torch.stack(found)

    @property
    def outputs(self) -> int:
        """Numbers per prediction."""
        return self._shape.shape[-1]

    @property
    def has_few_outputs(self) -> bool:
        """Whether the predictions of all depths fit in memory together, as `readouts`."""
        return 4 * len(self.depths) * len(self.rows) * self.outputs <= LOGIT_BYTES

    @property
    def by_words(self) -> bool:
        """Whether the vocabulary can be processed in blocks of words."""
        return predicts_words(self.stream) and self.per_token

    @cached_property
    def readouts(self) -> Tensor:
        """(depths, rows, outputs): `z_l` of every row; see `has_few_outputs`."""
        found = [self._readout(index, slice(None)).detach() for index in range(len(self.depths))]
        return torch.stack([at_least_float32(z) for z in found])

    @property
    def targets(self) -> Tensor | None:
        """A class per row (-100 if it has none) or numbers per row; None without labels."""
        return self.asked.labels if self.asked.numbers else self.asked.classes

    @cached_property
    def is_labeled(self) -> bool:
        """Whether a row has a label, or for a detector a sample."""
        given = has_labels(self.stream, self.states.batch)
        return given and (self.stream.task == "detection" or bool(self.asked.labeled.any()))

    @cached_property
    def predictions(self) -> Predictions:
        """Loss, predicted class, margin, confidence, ... of every row at every depth."""
        return Predictions(self, self.reads)

    def logits(self, depth: int, rows: slice | Tensor) -> Tensor:
        """`z_l` of some rows. depth: an index into `depths`; at L, the model's own output."""
        return self.readouts[depth, rows] if self.has_few_outputs else self._readout(depth, rows)

    def head_inputs(self, rows: slice) -> Tensor:
        """(depths, rows, dim): the inputs of the head's linear map."""
        found = [
            self.stream.normed(self._picked(depth)[rows], depth).detach() for depth in self.depths
        ]
        return torch.stack(found)

    def _readout(self, index: int, rows: slice | Tensor) -> Tensor:
        depth = self.depths[index]
        if depth == self.states.depth and self.states.output is not None:
            return self._own_rows[rows]
        if self.per_token:
            return self.stream.head(self.stream.normed(self._picked(depth)[rows], depth))
        if self._per_sample_features:
            return self.stream.head(self.stream.normed(self.states.feature(depth)[rows], depth))
        return self.states.logits(depth)[rows]

    def _picked(self, depth: int) -> Tensor:
        """The features of the rows at one depth, in the model's own dtype."""
        return self.rows.pick(self.states.feature(depth).detach())

    @cached_property
    def _shape(self) -> Tensor:
        """A prediction, or a tensor of the same shape if the model's own head was skipped."""
        if self.states.output is None and predicts_words(self.stream):
            return placeholder_prediction(self.stream, self.states.batch)
        return self.states.logits(self.states.depth)

    @cached_property
    def _own_rows(self) -> Tensor:
        # Without padding this is a view, so nothing as large as the vocabulary is copied.
        return self.rows.pick(self._shape)

    @cached_property
    def _per_sample_features(self) -> bool:
        return self.states.feature(self.states.depth).ndim == 2


def placeholder_prediction(stream: ResidualStream, batch: Mapping[str, Any]) -> Tensor:
    """A tensor with the shape of a language model's prediction that takes no memory."""
    first = stream.first_input(batch)
    return torch.empty(1, device=first.device).expand(*first.shape[:2], stream.outputs or 1)


def token_features(states: States) -> Tensor:
    """(depths, tokens, dim): every real token of every state."""
    if any(h.ndim != 3 or h.shape != states.h[0].shape for h in states.h):
        shapes = sorted({tuple(h.shape[1:]) for h in states.h})
        raise UnsupportedModelError(
            f"token-level metrics need states of one shape (token, dim), but {states.stream.name} "
            f"has {shapes}; use the metrics of pooled features instead"
        )
    first = states.h[0]
    mask = real_tokens(states.stream, states.batch, tuple(first.shape[:2]), first.device)
    everything = mask is None or bool(mask.all())
    rows = [h.detach().flatten(0, 1) if everything else h.detach()[mask] for h in states.h]
    return torch.stack([at_least_float32(row) for row in rows])
