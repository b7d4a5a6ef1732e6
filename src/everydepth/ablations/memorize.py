"""How much label noise a network has memorized."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from everydepth.ablations.result import Floats
from everydepth.config import checked
from everydepth.data import NoisyLabels
from everydepth.errors import DataError, SettingError
from everydepth.results import (
    Fact,
    Number,
    OptionalNumber,
    Result,
    Results,
    curve,
    named,
    provenance,
    scalars,
)
from everydepth.stream import (
    ResidualStream,
    Targets,
    as_stream,
    evaluating,
    no_labels,
)
from everydepth.stream.feed import Feed, Source
from everydepth.stream.rows import as_rows, numbers_in, whole_numbers
from everydepth.stream.states import are_finite

Flipped = NoisyLabels | Tensor | NDArray[Any] | Sequence[int]
"""What `flip_labels` returned, row numbers, or one boolean per row."""


class Memorization(Results, kind="memorization"):
    """Shares of samples, with 95 % Wilson intervals.

    memorization: the share of flipped training samples predicted as their wrong label.
    recovered: the share of them predicted as their true label; None if it is unknown.
    train_accuracy: over all training samples, with the labels used for training.
    reached: whether train_accuracy is 100 %. If not, the noise was not fully fitted, and
        `memorization` is no measure of the network's capacity for it.
    test_accuracy: on clean data; None without clean data.

    `found["by_depth"]` is memorization at depths 0..L through the shared readout, and
    `found["test_by_depth"]` the accuracy on clean data.

    >>> found = ed.memorization(model, noisy, test, flipped=noise, progress=False)
    >>> found["by_depth"].shape  # the share of wrong labels memorized, at depths 0..3
    (4,)
    """

    memorization = Number("shares")
    recovered = OptionalNumber("shares")
    train_accuracy = Number("shares")
    test_accuracy = OptionalNumber("shares")
    reached = Fact(bool)
    """Whether every training label is predicted."""
    flipped = Fact(int)
    """The number of training samples with a wrong label."""
    interval = Fact[tuple[float, float]](tuple)
    """The interval of `memorization`."""

    @property
    def test_interval(self) -> tuple[float, float] | None:
        """The interval of `test_accuracy`."""
        found = self.about["test_interval"]
        return None if found is None else tuple(found)

    def __str__(self) -> str:
        low, high = self.interval
        text = (
            f"memorization {self.memorization:.1%} of {self.flipped} flipped samples "
            f"({low:.1%} to {high:.1%}); training accuracy {self.train_accuracy:.2%}"
        )
        text += "" if self.reached else " (100 % not reached)"
        if self.test_accuracy is not None:
            text += f"; test accuracy {self.test_accuracy:.2%}"
        return text


@checked
def memorization(
    model: nn.Module | ResidualStream,
    noisy: Source,
    clean: Source | None = None,
    *,
    flipped: Flipped | None = None,
    batch_size: int | None = None,
    progress: bool = True,
    **options: Any,
) -> Memorization:
    """The share of wrong training labels that a model predicts, and its accuracy on clean data.

    noisy: the training data in a fixed order, with the labels the model was trained on.
    flipped: its rows with a wrong label: what `flip_labels` returned, row numbers, or one boolean
        per row.
    clean: test data.

    A causal language model predicts a sample's label if greedy decoding would produce every token
    that has a label (`everydepth.ablations.label_prompts` makes such data). This takes one forward
    pass, no decoding.

    >>> print(ed.memorization(model, noisy, test, flipped=noise, progress=False))
    memorization ...
    """
    stream = as_stream(model, **options)
    if stream.task in ("regression", "embedding", "detection"):
        raise SettingError(
            f"memorization needs a class or a token to predict, but {stream.name} does "
            f"{stream.task}; use a classifier or a language model"
        )
    rows = flipped_rows(flipped)
    truth = flipped.original if isinstance(flipped, NoisyLabels) else None
    hits, known, true_hits = _hits(
        stream,
        Feed(noisy, stream, batch_size=batch_size, again=True, ordered=True),
        "training data",
        progress,
        truth,
    )
    noise = torch.zeros(hits.shape[1], dtype=torch.bool)  # flipped rows that have a label
    noise[numbers_in(rows, len(noise))] = True
    noise &= known
    flips = int(noise.sum())
    if flips == 0:
        raise no_labels()
    clean_hits = None
    if clean is not None:
        feed = Feed(clean, stream, batch_size=batch_size, again=True)
        clean_hits, labeled, _ = _hits(stream, feed, "test data", progress, None)
        clean_hits = clean_hits[:, labeled]
    last = hits[-1, known]
    memorized = int(hits[-1, noise].sum())
    tested = None if clean_hits is None else clean_hits.double().mean(1).numpy()
    shares = scalars(
        "shares",
        {
            "memorization": memorized / flips,
            "recovered": None if true_hits is None else float(true_hits[noise].double().mean()),
            "train_accuracy": float(last.double().mean()),
            "test_accuracy": None if tested is None else float(tested[-1]),
        },
        labels=_LABELS,
        title="Learned and memorized",
        about="Shares of samples, as predicted by the full network.",
        section="prediction",
    )
    curves = [_by_depth("by_depth", "Memorization", hits[:, noise].double().mean(1).numpy())]
    if tested is not None:
        curves.append(_by_depth("test_by_depth", "Accuracy on clean data", tested))
    about = provenance(
        model=stream.name,
        task=stream.task,
        depth=stream.depth,
        samples=len(last),
        flipped=flips,
        reached=bool(last.all()),
        interval=wilson(memorized, flips),
        test_interval=None
        if clean_hits is None
        else wilson(int(clean_hits[-1].sum()), clean_hits.shape[1]),
    )
    return Memorization(results=named(*curves, shares), about=about)


_LABELS = {
    "memorization": "wrong labels predicted",
    "recovered": "true labels predicted instead",
    "train_accuracy": "accuracy on the training labels",
    "test_accuracy": "accuracy on clean data",
}


def _by_depth(name: str, title: str, values: Floats) -> Result:
    return curve(
        name,
        range(len(values)),
        values,
        title=title,
        about=f"{title}, read out at each depth.",
        unit="share",
        better="higher" if name == "test_by_depth" else None,
        section="prediction",
    )


def flipped_rows(flipped: Flipped | None) -> Tensor:
    """Row numbers or a boolean mask, or an error that says where to get them."""
    if flipped is None:
        raise SettingError(
            "it is unknown which samples have a wrong label; pass flipped=, the outcome of "
            "everydepth.data.flip_labels, row numbers, or a boolean mask"
        )
    given = flipped.flipped if isinstance(flipped, NoisyLabels) else flipped
    rows = whole_numbers(given, "flipped")
    numbers = as_rows(rows)
    if len(numbers) == 0 or int(numbers.min()) < 0:
        raise SettingError(
            f"flipped has {len(numbers)} rows{', some negative' if len(numbers) else ''}; pass the "
            "numbers of the rows with a wrong label, at least one"
        )
    return rows if rows.dtype == torch.bool else rows.unique()


@torch.no_grad()
def _hits(
    stream: ResidualStream, feed: Feed, what: str, progress: bool, truth: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Whether each label is predicted (depths 0..L, samples); which samples have a label; whether
    the last depth predicts the true label."""
    found: list[Tensor] = []
    known: list[Tensor] = []
    true: list[Tensor] = []
    with evaluating(stream):
        for numbers, batch in feed.numbered(what, progress):
            targets = Targets.of(stream, batch, weighted=False)
            states = stream.observe(batch)
            logits = [targets.predicted(states, depth) for depth in range(stream.depth + 1)]
            if not all(bool(are_finite(z).all()) for z in logits):
                states.check_predictions(lowest=0)
            found.append(torch.stack([targets.sample_hits(z) for z in logits]).cpu())
            known.append(targets.known.cpu())
            if truth is not None and len(targets.shape) == 1:
                best = states.logits(stream.depth).argmax(-1)
                true.append(best.cpu() == truth[numbers])
    if not found:
        raise DataError(f"the {what} has no batches; pass at least one sample")
    return torch.cat(found, 1), torch.cat(known), torch.cat(true) if true else None


def wilson(hits: int, total: int) -> tuple[float, float]:
    """The 95 % Wilson interval of a share."""
    from scipy.stats import binomtest

    found = binomtest(hits, total).proportion_ci(method="wilson")
    return float(found.low), float(found.high)
