"""Targets: which rows of a prediction count, and their labels, weights, losses and hits."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 (its usual name)

from everydepth.errors import LabelError, SettingError
from everydepth.stream.contract import (
    IGNORE_INDEX,
    LABELED_TOKEN_TASKS,
    TOKEN_TASKS,
    WORD_TASKS,
    ResidualStream,
)
from everydepth.stream.given import warn_of_padding
from everydepth.stream.rows import pick_rows
from everydepth.stream.states import States
from everydepth.stream.wrapping import unwrapped

Criterion = Callable[[Tensor, Any, Mapping[str, Any]], Tensor]
"""Your own loss: `f(prediction, labels, context)` returns one number per row of the batch.

prediction: the whole prediction, in at least float32. labels: as in the batch. context: the rest of
the batch, and the model's other predictions (`context["pred_boxes"]` of a detector)."""


# Soft labels may have been rounded to half precision.
_SHARE_ERROR = 1e-2


@dataclass(frozen=True, kw_only=True, eq=False)
class Targets:
    """The targets of one batch. Every verb reads labels through this class.

    A *row* is one prediction that counts: a sample, or a token if every token predicts.

    - Padding (0 in the attention mask) never counts in any task, even if it has a label: it neither
      predicts nor is predicted, so it does not matter on which side it is.
    - A label of -100 is ignored in every task with classes. In a regression, -100 is a number.
    - Causal language models: labels are not shifted, and position t predicts token t + 1, so the
      last position predicts nothing. Text without labels predicts its own tokens.
    - Masked language models and token classifiers: one label per token, at its own position.
    - Encoder-decoders: one label per token of the decoder, not shifted; its inputs are made of the
      labels if the batch has none. Padding is where `decoder_attention_mask` is 0.
    - Classifiers: one integer per sample, or a probability for each class (soft labels). A head
      with one output is a regression, as in Hugging Face.
    - Regressions: `(samples,)` or `(samples, outputs)` numbers, with squared error.
    - Detectors and embeddings have no built-in loss: pass a `Criterion`. With one, every sample is
      a row, and the criterion decides what counts.
    - "loss_weights" in a batch, one number per label, weight the losses. Verbs that count all rows
      equally (`weighted=False`) refuse them.

    shape: of a whole prediction, without its last dimension. rows: the flat indices of those that
    count; None for all. labels: `(n,)` classes, `(n, classes)` probabilities or `(n, outputs)`
    numbers; None if the batch has none. weights: `(n,)`. items: replaces the sum of weights in the
    mean (for gradient accumulation); `of` takes the number of labels, as Trainer counts them.

    >>> from everydepth.stream import Targets
    >>> stream, batch = ed.as_stream(model), test.batch(range(8))
    >>> targets = Targets.of(stream, batch)
    >>> z = targets.pick(model(pixel_values=batch["pixel_values"]).logits)
    >>> targets.losses(z).shape, targets.hits(z).shape  # one per row
    (torch.Size([8]), torch.Size([8]))
    """

    shape: tuple[int, ...]
    labels: Any
    weights: Tensor
    rows: Tensor | None = None
    numbers: bool = False
    before_norm: bool = False
    items: Tensor | int | None = None
    class_weights: Tensor | None = None
    label_smoothing: float = 0.0
    criterion: Criterion | None = None
    context: Mapping[str, Any] = field(default_factory=dict[str, Any])

    # -- from a batch -----------------------------------------------------------------------------

    @classmethod
    def of(
        cls,
        stream: ResidualStream,
        batch: Mapping[str, Any],
        *,
        weighted: bool = True,
        items: Tensor | int | None = None,
        class_weights: Tensor | None = None,
        label_smoothing: float = 0.0,
        criterion: Criterion | None = None,
        check: bool = True,
    ) -> Targets:
        """The rows of a batch that have a label.

        check: verify that the head has these classes, which waits for the device.
        """
        batch = stream.check_batch(batch)
        labels = with_labels(stream, batch)["labels"]
        weights = _weights(batch, weighted)
        if criterion is not None:
            return cls(
                shape=(stream.rows(batch),),
                labels=labels,
                weights=_ones_or(weights, (stream.rows(batch),), stream, stream.device),
                items=_of_rows(items, labels),
                criterion=criterion,
                context={key: value for key, value in batch.items() if key != "labels"},
            )
        _check_task(stream)
        labels, numbers = _checked(stream, batch, labels)
        items = _of_rows(items, labels)
        if numbers:
            shape = labels.shape[:1]
            weights = _ones_or(weights, shape, stream, labels.device)
            return cls(shape=shape, labels=labels, weights=weights, items=items, numbers=True)
        labels, weights = _aligned(stream, batch, labels, weights)
        real = _real(stream, batch, labels)
        rows = _indices(real)
        picked = _taken(labels.flatten(0, real.ndim - 1), rows)
        if check and picked.ndim == 1 and len(picked):
            _check_classes(stream, picked)
        elif check and picked.ndim == 2 and stream.outputs in (None, picked.shape[1]):
            _check_shares(picked)
        return cls(
            shape=tuple(real.shape),
            labels=picked,
            weights=_taken(_ones_or(weights, real.shape, stream, real.device).flatten(), rows),
            rows=rows,
            before_norm=stream.task in TOKEN_TASKS,
            items=items,
            class_weights=class_weights,
            label_smoothing=label_smoothing,
        )

    @classmethod
    def every(cls, stream: ResidualStream, batch: Mapping[str, Any], prediction: Tensor) -> Targets:
        """Every row that is not padding, with or without a label (-100 stands for none).

        With labels, a masked language model has only the labeled rows, as it can see all other
        tokens; so have a token classifier, and an encoder-decoder, whose labels tell its padding.
        """
        batch, shape = stream.check_batch(batch), tuple(prediction.shape[:-1])
        _weights(batch, False)
        labels = numbers = None
        real = _real_predictions(stream, batch, shape, prediction.device, batch.get("labels"))
        losses = stream.task not in ("detection", "embedding") and not is_multi_label(stream)
        if has_labels(stream, batch) and losses:
            labels, numbers = _checked(stream, batch, with_labels(stream, batch)["labels"])
            if not numbers:
                labels, _ = _aligned(stream, batch, labels, None)
                known = _real(stream, batch, labels)
                if tuple(known.shape) != shape:
                    raise _mismatch(tuple(known.shape), prediction)
                if stream.task in LABELED_TOKEN_TASKS:
                    real = known
                if labels.ndim == known.ndim:
                    labels = labels.masked_fill(~known, IGNORE_INDEX)
                labels = labels.flatten(0, known.ndim - 1)
        rows = None if real is None else _indices(real)
        labels = None if labels is None else _taken(labels, rows)
        if labels is not None and labels.ndim == 2:
            _check_numbers(labels, prediction)
            if not numbers:
                _check_shares(labels)
        elif labels is not None:
            _check_classes(stream, labels[labels != IGNORE_INDEX])
        count = math.prod(shape) if rows is None else len(rows)
        return cls(
            shape=shape,
            labels=labels,
            weights=_ones_or(None, (count,), stream, prediction.device),
            rows=rows,
            numbers=bool(numbers),
            before_norm=stream.task in TOKEN_TASKS,
        )

    # -- rows -------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return math.prod(self.shape) if self.rows is None else len(self.rows)

    @property
    def samples(self) -> int:
        return self.shape[0]

    @cached_property
    def sample(self) -> Tensor:
        """`(n,)`: the sample that each row belongs to."""
        each = math.prod(self.shape[1:])
        rows = self.rows
        if rows is None:
            rows = torch.arange(math.prod(self.shape), device=self.weights.device)
        return rows // each

    @cached_property
    def labeled(self) -> Tensor:
        """`(n,)`: which rows have a label."""
        none = self.labels is None
        if none or self.numbers or self.labels.ndim > 1:
            return torch.full((len(self),), not none, device=self.weights.device)
        return self.labels != IGNORE_INDEX

    @property
    def classes(self) -> Tensor | None:
        """`(n,)`: the class of each row, or the most likely one of soft labels; None without."""
        if not self.has_classes:
            return None
        return self.labels.argmax(-1) if self.labels.ndim == 2 else self.labels

    def pick(self, x: Tensor) -> Tensor:
        """The rows of a feature or a prediction: `(n, dim)`. With a criterion, `x` unchanged."""
        if self.criterion is not None:
            return x
        if x.shape[: len(self.shape)] != self.shape or x.ndim <= len(self.shape):
            raise _mismatch(self.shape, x)
        x = x.flatten(0, len(self.shape) - 1)
        return _taken(x, self.rows)

    def some(self, which: Tensor) -> Targets:
        """A subset of the rows, by their positions among these."""
        which = which.to(self.weights.device)
        return replace(
            self,
            rows=which if self.rows is None else self.rows[which],
            labels=None if self.labels is None else self.labels[which],
            weights=self.weights[which],
        )

    def predicted(self, states: States, depth: int, head: nn.Module | None = None) -> Tensor:
        """The predictions of the rows at a depth; at the last, without `head`, the model's own."""
        stream = states.stream
        if self.criterion is not None and head is None:
            return states.logits(depth)
        if head is None and depth == states.depth and states.output is not None:
            return self.pick(states.logits(depth))
        head = stream.head if head is None else head
        if self.before_norm:
            return head(self.head_inputs(states, depth))
        return self.pick(head(stream.normed(states.feature(depth), depth)))

    def head_inputs(self, states: States, depth: int) -> Tensor:
        """The inputs of the head's linear map for these rows."""
        feature, normed = states.feature(depth), states.stream.normed
        if self.before_norm:
            # So that the norm is applied to these rows only, not to every token.
            return normed(self.pick(feature), depth)
        return self.pick(normed(feature, depth))

    def extras(self, states: States, depth: int) -> Mapping[str, Any]:
        """The model's other predictions at a depth, for a criterion."""
        if self.criterion is None:
            return {}
        return states.stream.extras(states.h[depth], depth, states.batch)

    # -- losses and hits --------------------------------------------------------------------------

    @property
    def has_classes(self) -> bool:
        """Whether labels are classes."""
        return self.criterion is None and self.labels is not None and not self.numbers

    @property
    def can_be_chunked(self) -> bool:
        """Whether the loss is a weighted sum of cross-entropies of single classes."""
        if not self.has_classes or self.labels.ndim > 1:
            return False
        return self.class_weights is None or self.label_smoothing == 0

    @cached_property
    def row_weights(self) -> Tensor:
        """`(n,)`: the weights, times those of the classes."""
        if self.class_weights is None or self.numbers or self.labels.is_floating_point():
            return self.weights
        return self.weights * self.class_weights[self.labels]

    @property
    def amount(self) -> Tensor:
        """The divisor that turns the sum of weighted losses into their mean."""
        return self.row_weights.sum()

    @cached_property
    def scale(self) -> Tensor:
        """`(n,)`: `loss = sum(scale * losses)`."""
        return self.weights / self._divisor

    @cached_property
    def class_scale(self) -> Tensor:
        """`scale` times the class weights, for a loss that does not apply them."""
        return self.row_weights / self._divisor

    @cached_property
    def _divisor(self) -> Tensor | int:
        if self.items is not None:
            return self.items
        # Without any label, a loss of 0 rather than 0/0.
        total = self.amount
        return torch.where(total > 0, total, torch.ones_like(total))

    def losses(self, z: Tensor, extras: Mapping[str, Any] | None = None) -> Tensor:
        """`(n,)`: the loss of every row's prediction, including class weights.

        extras: the model's other predictions, for a criterion.
        """
        z = at_least_float32(z)
        if self.criterion is not None:
            found = self.criterion(z, self.labels, {**self.context, **(extras or {})})
            if not isinstance(found, Tensor) or found.shape != self.shape:  # pyright: ignore[reportUnnecessaryIsInstance]
                shape = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__  # pyright: ignore[reportUnnecessaryIsInstance]
                raise SettingError(
                    f"criterion returned shape {shape}, but there are {self.samples} rows; "
                    "return one number per row"
                )
            return found
        if self.labels.ndim == 2:
            _check_numbers(self.labels, z)
        if self.numbers:
            return (z.reshape(self.labels.shape) - self.labels.to(z.dtype)).square().mean(1)
        if z.ndim != 2:
            raise _mismatch(self.shape, z)
        return F.cross_entropy(
            z,
            self.labels.to(z.dtype) if self.labels.ndim == 2 else self.labels,
            weight=None if self.class_weights is None else self.class_weights.to(z.dtype),
            reduction="none",
            label_smoothing=self.label_smoothing,
        )

    def loss(self, z: Tensor, extras: Mapping[str, Any] | None = None) -> Tensor:
        """The weighted mean of the losses."""
        losses = self.losses(z, extras)
        return (losses * self.scale.to(losses)).sum()

    def hits(self, z: Tensor) -> Tensor:
        """`(n,)`: whether the predicted class is the label (for soft labels, the most likely)."""
        classes = self.classes
        if classes is None:
            raise SettingError("hits need class labels; pass integer labels")
        return z.argmax(-1) == classes

    # -- samples ----------------------------------------------------------------------------------

    def sample_sums(self, values: Tensor) -> Tensor:
        """`(samples,)`: the sum of one value per row over the rows of each sample."""
        if self.rows is not None:
            # Each index occurs once, so this is deterministic on every device, unlike index_add.
            empty = values.new_zeros(math.prod(self.shape))
            values = empty.index_copy(0, self.rows, values)
        return values.reshape(self.samples, -1).sum(1)

    @cached_property
    def sample_weights(self) -> Tensor:
        """`(samples,)`: the sum of the weights of each sample's rows; without weights, a count."""
        return self.sample_sums(self.row_weights)

    def sample_losses(self, z: Tensor, extras: Mapping[str, Any] | None = None) -> Tensor:
        """`(samples,)`: the mean over the rows of each sample; 0 if it has none."""
        losses = self.losses(z, extras)
        total = self.sample_weights.to(losses)
        sums = self.sample_sums(losses * self.weights.to(losses))
        return sums / torch.where(total > 0, total, torch.ones_like(total))

    @cached_property
    def known(self) -> Tensor:
        """`(samples,)`: which samples have a label."""
        return self.sample_sums(self.labeled.to(torch.int64)) > 0

    def sample_hits(self, z: Tensor) -> Tensor:
        """`(samples,)`: whether *all* labels of a sample are predicted; False without a label.

        For a causal language model, this is whether greedy decoding would produce them.
        """
        missed = (~self.hits(z) & self.labeled).to(torch.int64)
        return (self.sample_sums(missed) == 0) & self.known


# -- the labels of a batch ------------------------------------------------------------------------


def has_labels(stream: ResidualStream, batch: Mapping[str, Any]) -> bool:
    """Whether a batch has labels or is text for a causal language model."""
    own = stream.task == "causal_lm" and isinstance(batch.get("input_ids"), Tensor)
    return batch.get("labels") is not None or own


def with_labels(stream: ResidualStream, batch: Mapping[str, Any]) -> Mapping[str, Any]:
    """The batch with labels: for a causal language model, by default its own tokens."""
    if batch.get("labels") is not None:
        return batch
    if not has_labels(stream, batch):
        raise LabelError(
            f"the batch has keys {sorted(batch)}, but measuring {stream.name} needs 'labels'; add "
            "them, or leave out what needs them"
        )
    return {**batch, "labels": batch["input_ids"]}


def labeled_samples(stream: ResidualStream, batch: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The samples of a batch that have a label; None if none does."""
    known = Targets.of(stream, batch, weighted=False).known
    if bool(known.all()):
        return batch
    rows = known.nonzero().flatten()
    return pick_rows(batch, rows, len(known)) if len(rows) else None


def real_tokens(
    stream: ResidualStream, batch: Mapping[str, Any], shape: tuple[int, ...], device: torch.device
) -> Tensor | None:
    """Which tokens of a state are real: a mask of `shape`; None if the batch has no such mask."""
    return _mask(batch, stream.padding, shape, device)


def _real_predictions(
    stream: ResidualStream,
    batch: Mapping[str, Any],
    shape: tuple[int, ...],
    device: torch.device,
    labels: Tensor | None = None,
) -> Tensor | None:
    """Which predictions are not of padding; of an encoder-decoder, those of the decoder.

    labels: as in the batch, to warn if some of padding count because there is no mask.
    """
    decodes = stream.task == "seq2seq_lm"
    if stream.task in TOKEN_TASKS and not decodes:
        warn_of_padding(stream, batch, None if labels is None else labels != IGNORE_INDEX)
    return _mask(batch, "decoder_attention_mask" if decodes else "attention_mask", shape, device)


def _mask(
    batch: Mapping[str, Any], key: str, shape: tuple[int, ...], device: torch.device
) -> Tensor | None:
    mask = batch.get(key)
    if not isinstance(mask, Tensor) or tuple(mask.shape) != shape:
        return None
    return mask.to(device) != 0


def no_labels() -> LabelError:
    """The error for data without any label."""
    return LabelError(
        f"the data has no labels: all are {IGNORE_INDEX} (ignored) or padding; pass at least one"
    )


def at_least_float32(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def _weights(batch: Mapping[str, Any], weighted: bool) -> Tensor | None:
    weights = batch.get("loss_weights")
    if weights is None or weighted:
        return weights
    raise LabelError(
        "the batch has 'loss_weights', but here all rows count equally; leave them out (training "
        "and growth use them)"
    )


def is_multi_label(stream: ResidualStream) -> bool:
    """Whether a row may have several classes, so that float labels are not probabilities."""
    config = getattr(unwrapped(stream.model), "config", None)
    return getattr(config, "problem_type", None) == "multi_label_classification"


def _check_task(stream: ResidualStream) -> None:
    several = is_multi_label(stream)
    if several or stream.task in ("detection", "embedding"):
        what = "multi-label classification" if several else stream.task
        raise SettingError(
            f"{stream.name} does {what}, for which there is no built-in loss; pass "
            "criterion=f(prediction, labels, context), which returns one number per row, if there "
            "is such an argument, or use a classifier, a regression or a language model"
        )


def _checked(stream: ResidualStream, batch: Mapping[str, Any], labels: Any) -> tuple[Tensor, bool]:
    """The labels, and whether they are regression targets; raise if they do not fit the task."""
    if not isinstance(labels, Tensor):
        raise LabelError(f"labels are {type(labels).__name__}; pass a tensor")
    if labels.is_meta and not stream.first_input(batch).is_meta:
        raise LabelError("labels are on the 'meta' device, where they have no values; load them")
    rows, shape = stream.rows(batch), tuple(labels.shape)
    tokens = stream.task in TOKEN_TASKS
    if tokens:
        first = stream.first_input(batch)
        if shape != tuple(first.shape[:2]) or labels.is_floating_point():
            kind = "are floats of" if labels.is_floating_point() else "have"
            raise LabelError(
                f"labels {kind} shape {shape}, but the batch has {tuple(first.shape[:2])} "
                f"rows and tokens; give one class per token ({IGNORE_INDEX} to ignore it), not "
                f"shifted{_headless(stream)}"
            )
        return labels.long(), False
    outputs = stream.outputs
    alone = labels.is_floating_point() and labels.ndim == 1
    if stream.task == "regression" or outputs == 1 or (outputs is None and alone):
        return labels.reshape(rows, -1), True
    if alone:
        raise LabelError(
            f"labels are {str(labels.dtype)[6:]}, one per row, but {stream.name} predicts one of "
            f"{outputs} classes; pass integers (labels.long()), or a probability for each class"
        )
    return (labels if labels.is_floating_point() else labels.long()), False


def _headless(stream: ResidualStream) -> str:
    """Advice for a model that may have no head, such as a bare encoder."""
    if any(True for _ in stream.head.parameters()):
        return ""
    return (
        f". If {stream.name} has no head, load a class that has one, or take its embeddings: "
        'as_stream(model, task="embedding")'
    )


def _aligned(
    stream: ResidualStream, batch: Mapping[str, Any], labels: Tensor, weights: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Labels and weights at the positions that predict them; -100 where nothing is predicted."""
    soft = labels.is_floating_point()
    if weights is not None and weights.shape != (labels.shape[:-1] if soft else labels.shape):
        raise LabelError(
            f"loss_weights have shape {tuple(weights.shape)}, labels {tuple(labels.shape)}; "
            "give one weight per label"
        )
    if soft:
        return labels, weights
    real = _real_predictions(stream, batch, tuple(labels.shape), labels.device, labels)
    if stream.task == "causal_lm":
        if labels.ndim != 2:
            raise LabelError(f"labels of text have shape {tuple(labels.shape)}; use (rows, length)")
        _check_unshifted(batch, labels)
        labels = F.pad(labels[:, 1:], (0, 1), value=IGNORE_INDEX)
        weights = None if weights is None else F.pad(weights[:, 1:], (0, 1))
        # A token predicts its successor if neither is padding.
        real = None if real is None else real & F.pad(real[:, 1:], (0, 1))
    if real is not None:
        labels = labels.masked_fill(~real, IGNORE_INDEX)
    return labels, weights


def _of_rows(items: Tensor | int | None, labels: Any) -> Tensor | int | None:
    """The items as rows: Trainer counts each probability of a soft label, and each output."""
    several = isinstance(labels, Tensor) and labels.is_floating_point() and labels.ndim > 1
    if items is None or not several:
        return items
    return torch.as_tensor(items) / math.prod(labels.shape[1:])


_ENOUGH = 8  # labels that agree with the next tokens by chance: never


def _check_unshifted(batch: Mapping[str, Any], labels: Tensor) -> None:
    """Raise if every label is the next token already: shifted again, it would be the one after."""
    ids = batch.get("input_ids")
    if not isinstance(ids, Tensor) or ids.shape != labels.shape or ids is labels:
        return
    same = labels == ids
    if bool(same.all()):
        return
    known = labels != IGNORE_INDEX
    ahead = (labels[:, :-1] == ids[:, 1:]) & known[:, :-1]
    if int(ahead.sum()) >= _ENOUGH and bool((ahead | ~known[:, :-1]).all()):
        if bool((same | ~known).all()):  # a text of one token, again and again
            return
        raise LabelError(
            "labels are input_ids shifted by one, but position t is compared with label t + 1; "
            "pass them as they are (labels = input_ids), or none at all"
        )


def _real(stream: ResidualStream, batch: Mapping[str, Any], labels: Tensor) -> Tensor:
    """Which of the aligned labels count."""
    if not labels.is_floating_point():
        return labels != IGNORE_INDEX
    shape = tuple(labels.shape[:-1])
    real = _real_predictions(stream, batch, shape, labels.device)
    return torch.ones(shape, dtype=torch.bool, device=labels.device) if real is None else real


def _indices(real: Tensor) -> Tensor | None:
    """The flat indices of the rows that count; None if all do."""
    rows = real.flatten().nonzero().flatten()
    return None if len(rows) == real.numel() else rows


def _check_numbers(labels: Tensor, z: Tensor) -> None:
    if labels.shape[1] != z.shape[-1]:
        raise LabelError(
            f"labels have {labels.shape[1]} numbers per row, predictions {z.shape[-1]}; give "
            "equally many, or one integer (a class) per row"
        )


def _check_shares(labels: Tensor) -> None:
    total = labels.sum(-1)
    if not bool(((labels >= 0).all(-1) & ((total - 1).abs() < _SHARE_ERROR)).all()):
        raise LabelError(
            f"labels of shape {tuple(labels.shape)} are taken as class probabilities, but one is "
            "negative, or a row does not sum to 1; normalize them. For a regression or several "
            'classes per row, set config.problem_type to "regression" or '
            '"multi_label_classification"'
        )


def check_labels(stream: ResidualStream, labels: Tensor) -> None:
    """Raise if a class label does not fit the head. Waits for the device once."""
    if stream.task in ("regression", "embedding", "detection") or labels.is_floating_point():
        return
    real = labels[labels != IGNORE_INDEX]
    if real.numel() == 0:
        raise LabelError(
            f"all {labels.numel()} labels are {IGNORE_INDEX} (ignored); "
            "pass at least one label to learn from"
        )
    low, high = int(real.min()), int(real.max())
    if low < 0 or (stream.outputs is not None and high >= stream.outputs):
        wrong, last = low if low < 0 else high, "the last class"
        if stream.outputs is not None:
            last = str(stream.outputs - 1)
        words = stream.task in WORD_TASKS
        raise LabelError(
            f"label {wrong}, but the head of {stream.name} has {stream.outputs} classes; use 0 to "
            f"{last}, or {IGNORE_INDEX} to ignore a position"
            f"{' (is this the tokenizer of another model?)' if words else ''}"
        )


def _check_classes(stream: ResidualStream, labels: Tensor) -> None:
    if len(labels) and stream.outputs is not None:
        check_labels(stream, labels)


def _ones_or(
    weights: Tensor | None, shape: tuple[int, ...], stream: ResidualStream, device: torch.device
) -> Tensor:
    head = next(stream.head.parameters(), None)
    wide = torch.float64 if head is not None and head.dtype == torch.float64 else torch.float32
    if weights is None:
        return torch.ones(shape, dtype=wide, device=device)
    if tuple(weights.shape) != tuple(shape):
        raise LabelError(
            f"loss_weights have shape {tuple(weights.shape)}, labels {tuple(shape)}; "
            "give one weight per label"
        )
    return weights.to(wide)


def _taken(x: Tensor, rows: Tensor | None) -> Tensor:
    return x if rows is None else x.index_select(0, rows)


def _mismatch(shape: tuple[int, ...], x: Tensor) -> LabelError:
    wanted = tuple(x.shape[:-1])
    hint = " (labels.flatten())" if math.prod(shape) == math.prod(wanted) else ""
    return LabelError(
        f"labels have shape {tuple(shape)}, but predictions have shape {tuple(x.shape)}; give one "
        f"class per prediction, so labels of shape {wanted}{hint}"
    )
