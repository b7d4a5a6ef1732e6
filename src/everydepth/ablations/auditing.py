"""Which labels are likely wrong, judged by every depth of a network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from numpy.typing import NDArray
from torch import Tensor, nn

from everydepth.ablations.result import Floats
from everydepth.ablations.signals import Trajectories, columns, trajectories
from everydepth.config import Seed, checked
from everydepth.errors import BatchError, DataError, SettingError
from everydepth.results import Result, Results, Table, curve, named, provenance, rows
from everydepth.stream import ResidualStream, as_stream
from everydepth.stream.feed import Feed, Source
from everydepth.stream.rows import whole_numbers

FEWEST = 2  # samples a class needs to be cut into folds
ROUNDS = 3  # of telling wrong labels from given ones
MOST_SHOWN = 100  # rows of the list to review
TAIL = 0.2  # share of wrong labels from which the noise may be read off; fewer would be chance


class Audit(Results, kind="audit"):
    """One row per sample, in the order of the data.

    score: how likely the label is wrong. Where `calibrated`, it is an estimated probability, and
        `noise` the estimated share of wrong labels; else only its order has a meaning.
    labels, guess: the given label, and what the depths together would say.
    signals: by name, what the score was made of (see docs/memorization.md).

    >>> found = ed.audit(model, noisy, progress=False)
    >>> found.order[:60].shape  # the 60 rows to look at first
    (60,)
    >>> found.table(top=1).headings
    ('row', 'score', 'label', 'guess', 'prediction_depth', 'saturation', 'margin')
    """

    @property
    def score(self) -> Floats:
        """How likely each label is wrong."""
        return self["score"]

    @property
    def labels(self) -> NDArray[np.int64]:
        """The given labels."""
        return self.result("score").arrays["label"]

    @property
    def guess(self) -> NDArray[np.int64]:
        """What the depths together would say."""
        return self.result("score").arrays["guess"]

    @property
    def signals(self) -> Mapping[str, Floats]:
        """By name, what the score was made of."""
        return self.result("signals").arrays

    @property
    def calibrated(self) -> bool:
        """Whether the score is a probability."""
        return bool(self.about["calibrated"])

    @property
    def noise(self) -> float | None:
        """The estimated share of wrong labels; None where the score is not calibrated."""
        return self.about["noise"]

    @property
    def note(self) -> str:
        """How the score came about."""
        return str(self.result("score").note)

    @property
    def order(self) -> NDArray[np.int64]:
        """Row numbers, the most suspicious first."""
        return np.argsort(-self.score, kind="stable")

    def suspects(self, threshold: float = 0.5) -> NDArray[np.int64]:
        """Rows whose score is above a threshold, the most suspicious first."""
        if not self.calibrated:
            raise SettingError(
                "this audit is not calibrated, so a threshold on its score means nothing; "
                "take the first of `order`, or audit with held-out predictions (folds=)"
            )
        return self.order[self.score[self.order] > threshold]

    def table(
        self, name: str | None = None, *, top: int = 20, classes: Sequence[str] | None = None
    ) -> Table:
        """The rows to review first, or the table of one measurement."""
        if name is not None:
            return super().table(name)
        names = [str(k) for k in range(int(max(self.labels.max(), self.guess.max())) + 1)]
        names = names if classes is None else list(classes)
        rows = tuple(
            (
                int(row),
                float(self.score[row]),
                names[self.labels[row]],
                names[self.guess[row]],
                int(self.signals["prediction_depth"][row]),
                int(self.signals["saturation"][row]),
                float(self.signals["last_margin"][row]),
            )
            for row in self.order[:top]
        )
        wrong = (
            () if self.noise is None else (f"estimated share of wrong labels: {self.noise:.1%}",)
        )
        heads = ("row", "score", "label", "guess", "prediction_depth", "saturation", "margin")
        return Table(
            headings=heads, rows=rows, title="Labels to review first", notes=(*wrong, self.note)
        )


def folds(labels: Tensor | Sequence[int], count: int = 5, seed: int = 0) -> Int[Tensor, " rows"]:
    """The fold of every row, 0 to count - 1, each class spread evenly: train model k without
    fold k."""
    found = whole_numbers(labels, "labels").long()
    if count < 2:
        raise SettingError(f"{count} fold(s); use 2 or more")
    sizes = torch.bincount(found)
    small = ((sizes > 0) & (sizes < max(count, FEWEST))).nonzero().flatten()
    if len(small):
        k = int(small[0])
        raise DataError(
            f"class {k} has {int(sizes[k])} sample(s), too few for {count} folds; "
            "use fewer folds or more samples of it"
        )
    generator = torch.Generator().manual_seed(seed)
    where = torch.empty_like(found)
    start = 0
    for label in found.unique().tolist():
        rows = (found == label).nonzero().flatten()
        order = rows[torch.randperm(len(rows), generator=generator)]
        where[order] = (torch.arange(len(rows)) + start) % count
        start += len(rows)  # so that the folds stay equally large
    return where


@checked
def audit(
    model: nn.Module | ResidualStream | Sequence[nn.Module],
    data: Source,
    *,
    folds: Tensor | NDArray[Any] | Sequence[int] | None = None,
    held_out: bool = False,
    batch_size: int | None = None,
    seed: Seed = 0,
    progress: bool = True,
    **options: Any,
) -> Audit:
    """Rank the samples of `data` by how likely their label is wrong.

    The label of each sample is looked at by every depth: how likely each finds it, by which margin,
    from which depth on it is predicted and from which on the decision stands, how many early depths
    disagree, and how strongly the last one pulls.

    model, folds: best, one model a fold, and the fold of every row (see `folds`): model k was
        trained without fold k and judges it. The score is then a calibrated probability.
    held_out: one model that was not trained on `data`; calibrated likewise.
        Without either, the model is taken to be trained on this data. Labels that it memorized
        it no longer finds unlikely at the last depth, so early depths count as much as the last,
        and the score is an order, not a probability.

    Calibration needs no clean data. What a held-out model says does not depend on the sample's own
    label, so signals of *random other labels* show what wrong labels look like. The given labels
    are a mixture of such and right ones; the share of noise and the probability of each label are
    what fits best. It assumes that wrong labels are uniform among the others.

    >>> found = ed.audit(model, noisy, progress=False)
    >>> wrong = set(found.order[:60].tolist()) & set(noise.flipped.tolist())
    >>> len(wrong) > 15  # of 60 rows looked at; chance would find 3
    True
    """
    found = _collected(model, data, folds, held_out, batch_size, progress, options)
    signals = found.signals(found.labels)
    calibrated = folds is not None or held_out
    if calibrated:
        score, noise, note = _calibrated(found, signals, seed)
    else:
        score, noise = -signals["mean_log_p"], None
        note = (
            "not calibrated: the model is taken to be trained on these labels; the score is the "
            "mean surprise of depths 1 to L. Pass folds= or held_out=True for probabilities"
        )
    together = found.logits[:, 1:].log_softmax(-1).mean(1)
    last = found.logits.shape[1] - 1
    signals = {**signals, "last_margin": signals[f"margin_{last}"]}
    about = provenance(
        depth=last,
        samples=len(score),
        task="classification",
        calibrated=calibrated,
        noise=noise,
    )
    labels, guess = found.labels.numpy(), together.argmax(-1).numpy()
    return Audit(
        results=named(*_measurements(score, labels, guess, signals, last, note)), about=about
    )


def _measurements(
    score: Floats,
    labels: NDArray[np.int64],
    guess: NDArray[np.int64],
    signals: Mapping[str, Floats],
    last: int,
    note: str,
) -> tuple[Result, ...]:
    first = np.argsort(-score, kind="stable")[:MOST_SHOWN]
    learned = signals["prediction_depth"].astype(int)
    return (
        rows(
            "suspects",
            {
                "row": first.tolist(),
                "score": score[first].tolist(),
                "label": labels[first].tolist(),
                "guess": guess[first].tolist(),
            },
            title="Labels to review first",
            about="Samples whose label the depths of the network find least likely.",
            section="decisions",
            note=note,
        ),
        curve(
            "prediction_depth",
            range(last + 2),
            {"count": np.bincount(learned, minlength=last + 2)},
            kind="bars",
            title="When labels are predicted",
            about="From which depth on the given label is predicted; the last bar: never.",
            section="decisions",
        ),
        Result(
            name="score",
            kind="table",
            series=("score",),
            arrays={"score": score, "label": labels, "guess": guess},
            about="How likely the label of each sample is wrong, in the order of the data.",
            section="decisions",
            note=note,
        ),
        Result(
            name="signals",
            kind="table",
            series=tuple(signals),
            arrays=dict(signals),
            about="What the score was made of, in the order of the data.",
            section="decisions",
        ),
    )


def _collected(
    model: nn.Module | ResidualStream | Sequence[nn.Module],
    data: Source,
    folds: Tensor | NDArray[Any] | Sequence[int] | None,
    held_out: bool,
    batch_size: int | None,
    progress: bool,
    options: Mapping[str, Any],
) -> Trajectories:
    several = not isinstance(model, nn.Module | ResidualStream)
    if several != (folds is not None):
        raise SettingError(
            "one model a fold belongs with folds= (the fold of every row), and one model without; "
            "give both or neither"
        )
    if held_out and several:
        raise SettingError("held_out=True is for one model; models with folds= are held out anyway")
    parts: list[Trajectories] = []
    if isinstance(model, nn.Module | ResidualStream):
        stream = _classifier(as_stream(model, **options))
        feed = Feed(data, stream, batch_size=batch_size, again=True, ordered=True)
        return trajectories(stream, feed, progress)
    where = whole_numbers(folds, "folds").long()
    if sorted(where.unique().tolist()) != list(range(len(model))):
        raise SettingError(
            f"{len(model)} models, but folds are {where.unique().tolist()}; "
            f"number them 0 to {len(model) - 1}, one model each"
        )
    for k, one in enumerate(model):
        stream = _classifier(as_stream(one, **options))
        rows = (where == k).nonzero().flatten()
        feed = Feed(data, stream, batch_size=batch_size, only=rows, again=True)
        parts.append(trajectories(stream, feed, progress))
        if feed.rows != len(where):
            raise BatchError(
                f"{len(where)} fold numbers, but the data has {feed.rows} rows; give one a row"
            )
    numbers = torch.cat([part.numbers for part in parts])
    order = numbers.argsort()
    return Trajectories(
        logits=torch.cat([part.logits for part in parts])[order],
        labels=torch.cat([part.labels for part in parts])[order],
        numbers=numbers[order],
        pull=torch.stack([part.pull for part in parts]).mean(0),
    )


def _classifier(stream: ResidualStream) -> ResidualStream:
    if stream.task != "classification":
        raise SettingError(
            f"{stream.name} does {stream.task}, but an audit is of class labels; use a classifier"
        )
    return stream


def _calibrated(
    found: Trajectories, signals: dict[str, Floats], seed: int
) -> tuple[Floats, float, str]:
    """P(wrong | signals), the estimated noise, and a note.

    The given labels are a mixture, `p_given = (1 - noise) p_right + noise p_wrong`, of which
    p_wrong is known by example. A classifier tells wrong from given labels; where right labels are
    rarest, `p_given / p_wrong` comes down to the noise; and `noise * p_wrong / p_given` is the
    probability sought. In later rounds given labels count as far as they seem right.
    """
    from sklearn.isotonic import IsotonicRegression
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    labels, classes = found.labels, found.logits.shape[-1]
    count = len(labels)
    if count < 2 * FEWEST:
        raise DataError(f"{count} samples are too few to calibrate; use {2 * FEWEST} or more")
    generator = torch.Generator().manual_seed(seed)
    shift = torch.randint(1, classes, labels.shape, generator=generator)
    wrong = columns(found.signals((labels + shift) % classes))
    given = columns(signals)
    # Each half is judged by what the other half taught.
    half = torch.randperm(count, generator=generator).numpy() % 2 == 0
    sides = np.repeat([0, 1], count)
    score, noise, odds = np.zeros(count), 0.0, np.zeros(2 * count)
    for _ in range(ROUNDS):
        for judged in (half, ~half):
            taught = np.tile(~judged, 2)
            weight = np.concatenate([1 - score, np.ones(count)])[taught]
            model: Any = make_pipeline(StandardScaler(), LogisticRegression(max_iter=1000))
            both = np.concatenate([given, wrong])
            model.fit(both[taught], sides[taught], logisticregression__sample_weight=weight)
            odds[~taught] = model.decision_function(both[~taught])
        noise = _noise(odds[:count], odds[count:])
        rising: Any = IsotonicRegression(out_of_bounds="clip").fit(odds, sides)
        share = np.clip(rising.predict(odds[:count]), 0, 1 - 1e-9)
        score = np.clip(noise * share / (1 - share), 0, 1)
    # Steps of equal probability keep the order of the classifier.
    order = np.argsort(np.argsort(odds[:count])) / count
    score = np.clip(score * (1 - 1e-6) + 1e-6 * order, 0, 1)
    return score, noise, "calibrated against random other labels, in two halves"


def _noise(given: Floats, wrong: Floats) -> float:
    """The smallest ratio of the shares of given and of wrong labels beyond a threshold."""
    thresholds = np.quantile(wrong, np.linspace(0, 1 - TAIL, 50))
    ratios = [(given >= t).mean() / (wrong >= t).mean() for t in thresholds]
    return float(np.clip(min(ratios), 1 / len(given), 0.5))
