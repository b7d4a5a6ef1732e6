"""Find labels that are likely wrong, as judged by every depth of a network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import numpy as np
import torch
from jaxtyping import Int
from numpy.typing import NDArray
from torch import Tensor, nn

from everydepth.ablations.result import Floats
from everydepth.ablations.signals import Trajectories, columns, trajectories
from everydepth.config import Seed, Setting, checked
from everydepth.errors import BatchError, DataError, SettingError
from everydepth.results import Fact, Result, Results, Table, curve, named, provenance, rows
from everydepth.stream import ResidualStream, as_stream
from everydepth.stream.feed import Feed, Source
from everydepth.stream.rows import whole_numbers

FEWEST = 2  # samples per class needed for folds
ROUNDS = 3  # of the classifier that separates wrong labels from given ones
MOST_SHOWN = 100  # rows in the list to review
TAIL = 0.2  # smallest share of wrong labels used to estimate the noise; fewer would be chance


class Audit(Results, kind="audit"):
    """One row per sample, in the order of the data.

    score: how likely the label is wrong. If `calibrated`, it is an estimated probability and
        `noise` the estimated share of wrong labels; otherwise only the order is meaningful.
    labels, guess: the given label, and the joint prediction of all depths.
    signals: by name, what the score is based on (see docs/memorization.md).

    >>> found = ed.audit(model, noisy, progress=False)
    >>> found.order[:60].shape  # the 60 rows to look at first
    (60,)
    >>> found.table(top=1).headings
    ('row', 'score', 'label', 'guess', 'prediction_depth', 'saturation', 'margin')
    """

    calibrated = Fact(bool)
    """Whether the score is a probability."""
    noise = Fact[float | None]()
    """The estimated share of wrong labels; None if the score is not calibrated."""

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
        """The joint prediction of all depths."""
        return self.result("score").arrays["guess"]

    @property
    def signals(self) -> Mapping[str, Floats]:
        """By name, what the score is based on."""
        return self.result("signals").arrays

    @property
    def note(self) -> str:
        """How the score was computed."""
        return str(self.result("score").note)

    @property
    def order(self) -> NDArray[np.int64]:
        """Row numbers, the most suspicious first."""
        return np.argsort(-self.score, kind="stable")

    @checked
    def suspects(self, threshold: float = 0.5) -> NDArray[np.int64]:
        """Rows with a score above the threshold, the most suspicious first."""
        if not self.calibrated:
            raise SettingError(
                "this audit is not calibrated, so a threshold on its score is meaningless; "
                "take the first rows of `order`, or audit with held-out predictions (folds=)"
            )
        return self.order[self.score[self.order] > threshold]

    @checked
    def table(self, name: str | None = None, *, top: int = 20) -> Table:
        """The rows to review first, or the table of one measurement."""
        if name is not None:
            return super().table(name)
        rows = tuple(
            (
                int(row),
                float(self.score[row]),
                int(self.labels[row]),
                int(self.guess[row]),
                int(self.signals["prediction_depth"][row]),
                int(self.signals["saturation"][row]),
                float(self.signals["last_margin"][row]),
            )
            for row in self.order[:top]
        )
        notes = (self.note,)
        if self.noise is not None:
            notes = (f"estimated share of wrong labels: {self.noise:.1%}", *notes)
        heads = ("row", "score", "label", "guess", "prediction_depth", "saturation", "margin")
        return Table(headings=heads, rows=rows, title="Labels to review first", notes=notes)


@checked
def folds(
    labels: Tensor | Sequence[int],
    count: Annotated[int, Setting(least=2)] = 5,
    seed: Seed = 0,
) -> Int[Tensor, " rows"]:
    """The fold of every row, 0 to count - 1, with each class spread evenly. Train model k on all
    rows outside fold k."""
    found = whole_numbers(labels, "labels").long()
    if found.numel() and int(found.min()) < 0:
        raise DataError(f"label {int(found.min())}; use 0 or more, one label for each row")
    classes, sizes = found.unique(return_counts=True)
    small = (sizes < max(count, FEWEST)).nonzero().flatten()
    if len(small):
        k = int(small[0])
        raise DataError(
            f"class {int(classes[k])} has {int(sizes[k])} sample(s), too few for {count} folds; "
            "use fewer folds or more samples"
        )
    generator = torch.Generator().manual_seed(seed)
    where = torch.empty_like(found)
    start = 0
    for label in classes.tolist():
        rows = (found == label).nonzero().flatten()
        order = rows[torch.randperm(len(rows), generator=generator)]
        where[order] = (torch.arange(len(rows)) + start) % count
        start += len(rows)  # keeps the folds equally large
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

    Every depth judges each label: its probability and margin, the depth from which it is predicted
    and the depth from which the prediction is final, the share of early depths that disagree, and
    the gradient at the last one.

    model, folds: for best results, one model per fold and the fold of every row (see `folds`):
        model k was trained without fold k and judges it. The score is then a calibrated
        probability.
    held_out: set to True for one model that was not trained on `data`; also calibrated.
        Without either, the model is assumed to be trained on this data. It no longer finds labels
        unlikely at the last depth that it has memorized, so early depths count as much as the last,
        and the score is a ranking, not a probability.

    Calibration needs no clean data. The predictions of a held-out model do not depend on a sample's
    own label, so the signals of *random other labels* show what wrong labels look like. The given
    labels are a mixture of wrong and correct ones; the noise level and the probability of each
    label are fitted to it. This assumes that wrong labels are uniform over the other classes.

    >>> found = ed.audit(model, noisy, progress=False)
    >>> wrong = set(found.order[:60].tolist()) & set(noise.flipped.tolist())
    >>> len(wrong) > 15  # of the first 60 rows; by chance it would be 3
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
            "not calibrated: the model is assumed to be trained on these labels; the score is the "
            "mean surprise over depths 1 to L. Pass folds= or held_out=True for probabilities"
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
            about="Samples whose label is least likely according to the network's depths.",
            section="decisions",
            note=note,
        ),
        curve(
            "prediction_depth",
            range(last + 2),
            {"count": np.bincount(learned, minlength=last + 2)},
            kind="bars",
            title="When labels are predicted",
            about="Depth from which the given label is predicted; the last bar means never.",
            section="decisions",
        ),
        Result(
            name="score",
            kind="table",
            series=("score",),
            arrays={"score": score, "label": labels, "guess": guess},
            about="How likely each sample's label is wrong, in the order of the data.",
            section="decisions",
            note=note,
        ),
        Result(
            name="signals",
            kind="table",
            series=tuple(signals),
            arrays=dict(signals),
            about="What the score is based on, in the order of the data.",
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
            "a list of models needs folds= (the fold of every row), and folds= needs one model per "
            "fold; give both or neither"
        )
    if held_out and several:
        raise SettingError("held_out=True is for one model; leave it out with folds=")
    if isinstance(model, nn.Module | ResidualStream):
        stream = _classifier(as_stream(model, **options))
        feed = Feed(data, stream, batch_size=batch_size, again=True, ordered=True)
        return trajectories(stream, feed, progress)
    where = whole_numbers(folds, "folds").long()
    if not len(where):
        raise SettingError("folds= is empty; give the fold of every row, and one model per fold")
    if sorted(where.unique().tolist()) != list(range(len(model))):
        raise SettingError(
            f"{len(model)} models, but folds are {where.unique().tolist()}; "
            f"number them 0 to {len(model) - 1}, one model each"
        )
    parts: list[Trajectories] = []
    for k, one in enumerate(model):
        stream = _classifier(as_stream(one, **options))
        rows = (where == k).nonzero().flatten()
        feed = Feed(data, stream, batch_size=batch_size, only=rows, again=True)
        parts.append(trajectories(stream, feed, progress))
        if feed.rows != len(where):
            raise BatchError(
                f"{len(where)} fold numbers, but the data has {feed.rows} rows; give one per row"
            )
    numbers = torch.cat([part.numbers for part in parts])
    order = numbers.argsort()
    return Trajectories(
        logits=torch.cat([part.logits for part in parts])[order],
        labels=torch.cat([part.labels for part in parts])[order],
        numbers=numbers[order],
        gram=torch.stack([part.gram for part in parts]).mean(0),
    )


def _classifier(stream: ResidualStream) -> ResidualStream:
    if stream.task != "classification":
        raise SettingError(
            f"{stream.name} does {stream.task}, but an audit needs class labels; use a classifier"
        )
    return stream


def _calibrated(
    found: Trajectories, signals: dict[str, Floats], seed: int
) -> tuple[Floats, float, str]:
    """P(wrong | signals), the estimated noise, and a note.

    The given labels are a mixture `p_given = (1 - noise) p_right + noise p_wrong`, and we have
    samples from p_wrong. A classifier separates wrong from given labels. Where correct labels are
    rarest, `p_given / p_wrong` approaches the noise, and `noise * p_wrong / p_given` is the
    probability we want. In later rounds, given labels are weighted by how likely they are correct.
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
    # Each half is judged by a classifier trained on the other.
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
    # Break ties in the isotonic fit by the order of the classifier.
    order = np.argsort(np.argsort(odds[:count])) / count
    score = np.clip(score * (1 - 1e-6) + 1e-6 * order, 0, 1)
    return score, noise, "calibrated against random other labels, in two halves"


def _noise(given: Floats, wrong: Floats) -> float:
    """The smallest ratio between the shares of given and wrong labels above any threshold."""
    thresholds = np.quantile(wrong, np.linspace(0, 1 - TAIL, 50))
    ratios = [(given >= t).mean() / (wrong >= t).mean() for t in thresholds]
    return float(np.clip(min(ratios), 1 / len(given), 0.5))
