"""What metrics share about one batch, so that nothing is computed twice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from everydepth.errors import UnsupportedModelError
from everydepth.stream import (
    Block,
    BranchRecord,
    ResidualStream,
    States,
    TapGradients,
    Targets,
    real_tokens,
)
from everydepth.tracing.predictions import LOGIT_BYTES, Predictions, predictions


@dataclass(frozen=True, eq=False)
class FeatureRows:
    """A chunk of rows: features (depths 0..L, rows, dim), the second model's features, and targets
    for metrics that need labels.

    second: this is the second look at the same rows.
    """

    stream: ResidualStream
    features: Tensor
    targets: Tensor | None
    other: Tensor | None = None
    second: bool = False

    @cached_property
    def normed(self) -> Tensor:
        """The features as the head's linear map receives them, after the final norm or pooler."""
        stream = self.stream
        inputs = self.features.to(next(stream.head.parameters(), self.features).dtype)
        found = [stream.normed(feature, depth) for depth, feature in enumerate(inputs)]
        return torch.stack(found).to(self.features.dtype)


@dataclass(frozen=True, eq=False)
class BlockRecords:
    """What the branches of block `depth` read and wrote, for one batch, as the block ended."""

    stream: ResidualStream
    depth: int
    branches: Sequence[BranchRecord]
    batch: Mapping[str, Any]

    @property
    def block(self) -> Block:
        return self.stream.blocks[self.depth - 1]


@dataclass(frozen=True, eq=False)
class Observation:
    """One batch as the model ran it.

    A row is one prediction: a sample, or a real token (padding is left out) where every token
    predicts. `row_sample` is the number of the sample a row belongs to, counted over the whole run.
    """

    stream: ResidualStream
    states: States
    first_sample: int
    other: States | None = None
    gradients: TapGradients | None = None

    @property
    def depth(self) -> int:
        return self.states.depth

    @property
    def samples(self) -> int:
        return self.states.h[0].shape[0]

    @cached_property
    def per_token(self) -> bool:
        """Every token (or query) predicts, so a sample has several rows."""
        return self._last_logits.ndim == 3

    @cached_property
    def asked(self) -> Targets:
        """The rows, and what each should predict."""
        return Targets.every(self.stream, self.states.batch, self._last_logits)

    @cached_property
    def rows(self) -> Targets:
        """The rows alone: labels that nobody reads may be those of another task."""
        if self.stream.task == "masked_lm":
            return self.asked  # only what is masked is a row
        batch = {key: value for key, value in self.states.batch.items() if key != "labels"}
        return Targets.every(self.stream, batch, self._last_logits)

    @property
    def row_sample(self) -> Tensor:
        return self.rows.sample.cpu() + self.first_sample

    @cached_property
    def features(self) -> Tensor:
        """(depths 0..L, rows, dim), float32 (float64 for a float64 model)."""
        found: list[Tensor] = []
        for depth in range(len(self.states)):
            feature = self.rows.pick(self.states.feature(depth).detach())
            # A readout that sees all tokens of a sample is followed by their mean.
            feature = feature if feature.ndim == 2 else feature.flatten(1, -2).mean(1)
            found.append(feature if feature.dtype == torch.float64 else feature.float())
        return torch.stack(found)

    @property
    def outputs(self) -> int:
        """How many numbers one row's prediction has."""
        return self._last_logits.shape[-1]

    @property
    def has_few_outputs(self) -> bool:
        """The predictions of all depths together are small: `readouts` may hold them."""
        return 4 * len(self.states) * self.features.shape[1] * self.outputs <= LOGIT_BYTES

    @cached_property
    def readouts(self) -> Tensor:
        """(depths 0..L, rows, outputs): `z_l` of every row, where outputs are few."""
        found = [self._readout(depth, slice(None)).detach() for depth in range(self.depth + 1)]
        return torch.stack([z if z.dtype == torch.float64 else z.float() for z in found])

    @property
    def targets(self) -> Tensor | None:
        """A class per row (-100 where there is none), or numbers per row; None unlabelled."""
        return self.asked.labels if self.asked.numbers else self.asked.classes

    @cached_property
    def predictions(self) -> Predictions:
        """Loss, decision, margin and confidence of every row at every depth, in one sweep."""
        found = predictions(self)
        # What a block adds to a prediction is no number where the prediction is none.
        if not bool(torch.isfinite(found.step).all()):
            self.states.check_predictions(lowest=0)
        return found

    def logits(self, depth: int, rows: slice) -> Tensor:
        """`z_l` of some rows; at depth L the model's own output."""
        return self.readouts[depth, rows] if self.has_few_outputs else self._readout(depth, rows)

    def _readout(self, depth: int, rows: slice) -> Tensor:
        if depth == self.depth:
            return self._own_rows[rows]
        if self.per_token:
            return self.stream.head(self.stream.normed(self._head_inputs[depth][rows], depth))
        if self._per_sample_features:
            return self.stream.head(self.stream.normed(self.states.feature(depth)[rows], depth))
        return self.states.logits(depth)[rows]

    @cached_property
    def _last_logits(self) -> Tensor:
        return self.states.logits(self.depth)

    @cached_property
    def _own_rows(self) -> Tensor:
        # Without padding this is a view: nothing of the size of the vocabulary is copied.
        return self.rows.pick(self._last_logits)

    @cached_property
    def _head_inputs(self) -> Tensor:
        """The features in the model's own number format."""
        kept = self.features
        dtype = self.states.h[0].dtype
        return kept if kept.dtype == dtype else kept.to(dtype)

    @cached_property
    def _per_sample_features(self) -> bool:
        return self.states.feature(self.depth).ndim == 2


def token_features(states: States) -> Tensor:
    """Every real token of every state, in rows."""
    if any(h.ndim != 3 or h.shape != states.h[0].shape for h in states.h):
        shapes = sorted({tuple(h.shape[1:]) for h in states.h})
        raise UnsupportedModelError(
            f"token-level metrics need states of one shape (token, dim), but {states.stream.name} "
            f"has {shapes}; drop them and use the metrics on its pooled features"
        )
    mask = real_tokens(states.batch, tuple(states.h[0].shape[:2]), states.h[0].device)
    everything = mask is None or bool(mask.all())
    rows = [h.detach().flatten(0, 1) if everything else h.detach()[mask] for h in states.h]
    return torch.stack([r if r.dtype == torch.float64 else r.float() for r in rows])
