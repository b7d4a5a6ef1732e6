"""Texts and pretrained models that several recipes use, and what a language model must beat."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from everydepth_papers.evidence.networks import Task
from everydepth_papers.evidence.recipe import Cell
from everydepth_papers.evidence.running import data_folder
from everydepth_papers.premise import Premise

if TYPE_CHECKING:
    from everydepth.data import Texts, Tokens

GLUE = "nyu-mll/glue"
COLUMNS = {
    "cola": ("sentence", None),
    "sst2": ("sentence", None),
    "mrpc": ("sentence1", "sentence2"),
    "mnli": ("premise", "hypothesis"),
    "qnli": ("question", "sentence"),
    "qqp": ("question1", "question2"),
    "rte": ("sentence1", "sentence2"),
}
# Which local split has labels and was not trained on.
HELD_OUT = {"sst2": "test", "cola": "valid", "mrpc": "test", "rte": "dev"}


def glue(settings: Cell) -> tuple[Texts, Texts]:
    """Labeled texts of a task to train on, and others to test on; `rows` and `look` of them.

    They are spread evenly over files that may be sorted.
    """
    from everydepth.data import Texts, load

    task = settings["task"]
    if settings.get("data") == GLUE:
        text, pair = COLUMNS[task]
        other = "validation_matched" if task == "mnli" else "validation"
        how: dict[str, Any] = {"task": task, "text": text, "pair": pair, "label": "label"}
        parts = [load(GLUE, kind=Texts, split=split, **how) for split in ("train", other)]
    else:
        parts = [load(task, kind=Texts, split=split) for split in ("train", HELD_OUT[task])]
    counts = (settings.get("rows"), settings.get("look"))
    train, test = (
        part if count is None else part.subset(_spread(len(part), count))
        for part, count in zip(parts, counts, strict=True)
    )
    return train, test


def _spread(length: int, count: int) -> list[int]:
    return [i * length // min(count, length) for i in range(min(count, length))]


def majority(labels: Any) -> float:
    """The share of the most frequent label."""
    counts = np.bincount(np.asarray(labels))
    return round(float(counts.max() / counts.sum()), 4)


def words_accuracy(train: Texts, test: Texts) -> float:
    """Test accuracy of a logistic regression on words and pairs of words (TF-IDF)."""
    from scipy.sparse import hstack
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression

    seen: list[Any] = []
    for name in ("texts", "pairs"):
        if getattr(train, name) is not None:
            count = TfidfVectorizer(ngram_range=(1, 2), sublinear_tf=True).fit(getattr(train, name))
            seen.append([count.transform(getattr(part, name)) for part in (train, test)])
    x, x_test = (hstack(columns) for columns in zip(*seen, strict=True))
    model = LogisticRegression(C=10.0, max_iter=1000).fit(x, np.asarray(train.labels))
    return round(float(model.score(x_test, np.asarray(test.labels))), 4)


def by_length(rows: Tokens, size: int, seed: int | None = None) -> list[dict[str, Any]]:
    """Batches of rows of about the same length, since padding costs as much as words.

    seed: shuffles equally long rows, and the batches; None keeps the order of lengths.
    """
    from everydepth.data import batches, trim_padding

    assert rows.attention_mask is not None
    lengths = rows.attention_mask.sum(1).numpy()
    random = None if seed is None else np.random.default_rng(seed)
    ties = np.arange(len(lengths)) if random is None else random.permutation(len(lengths))
    ordered = rows.subset(np.lexsort((ties, lengths)).tolist())
    made = list(batches(ordered, size, transform=trim_padding))
    return made if random is None else [made[i] for i in random.permutation(len(made))]


def pretrained(name: str, task: Task = "CausalLM", **options: Any) -> tuple[Any, Any]:
    """A model and its tokenizer: `owner/name` of the hub, else a folder under EVERYDEPTH_DATA."""
    import transformers

    from everydepth.progress import quiet_transformers

    place = name if "/" in name else str(data_folder(name))
    kind: Any = getattr(transformers, f"AutoModelFor{task}")
    with quiet_transformers():  # which reports that a head is new
        model = kind.from_pretrained(place, dtype="float32", **options)
        tokenizer = transformers.AutoTokenizer.from_pretrained(place)
    return model, tokenizer


def frequency_perplexity(train: Tokens, test: Tokens) -> float:
    """Perplexity of the test tokens under the frequencies of the training tokens (plus one)."""
    ids = [np.asarray(part.input_ids).ravel() for part in (train, test)]
    counts = np.bincount(ids[0], minlength=max(int(part.max()) for part in ids) + 1) + 1
    return float(np.exp(-np.log(counts[ids[1]] / counts.sum()).mean()))


KNOWS_WORDS = Premise(
    test="perplexity of token frequencies over that of the last depth",
    value=lambda *case: min(r["frequencies"] / r["perplexity"][-1] for r in case),
    least=1.0,
    failing="inconclusive",
)
"""A language model that learned anything does better than the frequencies of tokens."""
