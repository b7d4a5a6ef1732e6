"""Linear CKA of all pairs of depths, exact if memory allows."""

from __future__ import annotations

import numpy as np

from everydepth.results.result import Result
from everydepth.tracing.crossproducts import CrossProducts, MinibatchCKA
from everydepth.tracing.metric import FeatureMetric, register_metric
from everydepth.tracing.observation import FeatureRows
from everydepth.tracing.sums import DEPTH


@register_metric
class Cka(FeatureMetric):
    """`value` is biased linear CKA, `unbiased` uses HSIC_1; both over all samples at once.

    If this would exceed the memory budget, `value` is the HSIC_1 estimate averaged over chunks of
    rows, and a note says so.
    """

    name = "cka"
    title = "Linear CKA"
    about = "Similarity of the features of every two depths, regardless of rotation."
    section = "similarity"
    kind = "matrix"
    group = "similarity"
    some_depths = True
    between = False

    def __init__(self) -> None:
        super().__init__()
        self.exact: CrossProducts | None = None
        self.chunks: MinibatchCKA | None = None
        self.needed = 0

    def update(self, rows: FeatureRows) -> None:
        x, y = rows.features, rows.other if self.between else None
        if self.exact is None and self.chunks is None:
            sizes = [x.shape[-1]] * len(x), () if y is None else [y.shape[-1]] * len(y)
            self.needed = CrossProducts.bytes_needed(*sizes)
            if self.needed <= self.memory:
                self.exact = CrossProducts(*sizes)
            else:
                self.chunks = MinibatchCKA()
        self.rows += x.shape[1]
        (self.exact or self.chunks).add(x, y)  # pyright: ignore[reportOptionalMemberAccess]

    def compute(self) -> Result:
        if self.rows < 2:
            return self.gap("CKA needs 2 samples or more")
        series: dict[str, np.ndarray] = {}
        notes: list[str] = []
        if self.exact is not None:
            found = self.exact.similarity()
            series["value"] = found.biased
            if self.rows >= 4:
                series["unbiased"] = found.unbiased
            else:
                notes.append(f"the unbiased estimate needs 4 samples; there are {self.rows}")
            how = "exact, from products of features summed over all samples"
        else:
            assert self.chunks is not None
            if self.rows < 4:
                return self.gap(f"HSIC_1 needs 4 samples; there are {self.rows}")
            series["value"] = self.chunks.similarity()
            how = "HSIC_1 averaged over chunks of rows"
            notes.append(
                f"estimated from chunks: exact CKA needs {self.needed / 2**20:,.0f} MiB, more than "
                f"the memory budget of {self.memory / 2**20:,.0f} MiB"
            )
        if np.isnan(series["value"]).any():
            notes.append("undefined if a feature is the same for all samples")
        return self.over_depths(
            series,
            beside={"columns": self.depths(series["value"].shape[1] - 1)},
            labels={
                "columns": f"{DEPTH} of the second model" if self.between else DEPTH,
                "value": "linear CKA",
                "unbiased": "linear CKA, unbiased",
            },
            meta={"rows": self.rows, "estimator": how, "product_bytes": self.needed},
            note="; ".join(notes) or None,
        )


@register_metric
class CkaBetween(Cka):
    """Depths of the model (rows) against depths of the second model (columns)."""

    name = "cka_between"
    title = "CKA with the other model"
    about = "Linear CKA of each depth with each depth of the other model."
    needs = frozenset({"against"})
    some_depths = False
    between = True


@register_metric
class TokenCka(Cka):
    """CKA with every real token as a sample, for models in which one token predicts."""

    name = "token_cka"
    title = "Linear CKA of tokens"
    about = "Linear CKA with every token as a sample."
    needs = frozenset({"tokens"})
    some_depths = False
    level = "token"
    default = False
