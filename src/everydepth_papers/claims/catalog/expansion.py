"""Claims of Depth Expansion."""

from __future__ import annotations

import numpy as np

from everydepth_papers.claims.catalog.common import CLASSIFIERS, LEARNED
from everydepth_papers.claims.claim import Claim
from everydepth_papers.claims.facts import Facts
from everydepth_papers.premise import Premise

SWEEP = "it compares networks of several sizes; see `everydepth sweep`"
ALIGNED = Premise(
    test="cosine of mean training and test gradients at the site",
    value=lambda f: f["alignment"],
)
RESOLVED = Premise(
    test="share that noise alone leaves within 10 %",
    value=lambda f: float(np.nanmean(f["within_10_noise"])),
    least=0.9,
    failing="inconclusive",
)
BOUNDED = Premise(
    test="depths at which the bound is below 1",
    value=lambda f: float((f["disagree_bound"] < 1).sum()),
    least=1.0,
)


def _beyond_bound(facts: Facts) -> float:
    """How far a frequency of disagreement exceeds Theorem 5's bound, where that is below 1."""
    frequency, bound = facts["disagree"], facts["disagree_bound"]
    says = bound < 1
    return float((frequency - bound)[says].max()) if says.any() else float("nan")


CLAIMS = (
    Claim(
        name="covariance-diagonal",
        paper="expansion",
        source="Figure 1, Assumption 3",
        statement="Coordinates of activation gradients are nearly uncorrelated.",
        test="share of off-diagonal covariances of raw coordinates within 10 % of the mean "
        "variance, all depths, rows not trained on",
        relation=">=",
        threshold=0.9,
        cells=CLASSIFIERS,
        value=lambda f: float(np.nanmean(f["within_10"])),
        premises=(
            LEARNED,
            RESOLVED,
        ),
        needs=("trace", "covariance"),
    ),
    Claim(
        name="alignment-bound-holds",
        paper="expansion",
        source="Theorem 5",
        statement="Mean gradients of disjoint rows disagree no more often than the bound allows.",
        test="frequency of a product <= 0 of two disjoint quarters of unseen rows, 200 draws, "
        "minus the bound, worst of the depths where that is below 1",
        relation="<=",
        threshold=0.0,
        cells=CLASSIFIERS,
        value=_beyond_bound,
        premises=(BOUNDED,),
        worst=True,
        needs=("covariance",),
    ),
    Claim(
        name="covariance-controlled",
        paper="expansion",
        source="Assumption 3",
        statement="The covariance of activation gradients is governed by its variances.",
        test="largest eigenvalue over the largest variance of a coordinate, mean over depths",
        relation="<=",
        threshold=10.0,
        cells=CLASSIFIERS,
        value=lambda f: float(np.nanmean(f["norm_over_variance"])),
        premises=(LEARNED,),
        needs=("trace", "covariance"),
    ),
    Claim(
        name="signal-decays",
        paper="expansion",
        source="Figure 2",
        statement="The deeper the network, the weaker its remaining first-order signal.",
        test="norm of the mean gradient before the readout, ResNet-20 over ResNet-8 (log10)",
        relation="<=",
        threshold=0.0,
        cells={
            "narrow": ("sweep:deep-narrow", "sweep:shallow-narrow"),
            "wide": ("sweep:deep-wide", "sweep:shallow-wide"),
        },
        value=lambda a, b: float(np.log10(a["signal"] / b["signal"])),
        own=SWEEP,
        premises=(LEARNED,),
    ),
    Claim(
        name="depth-helps-wide",
        paper="expansion",
        source="Figure 3",
        statement="At sufficient width, depth expansion lowers the test loss.",
        test="test loss, ResNet-20 minus ResNet-8, wide (nat)",
        relation="<=",
        threshold=0.0,
        cells={"wide": ("sweep:deep-wide", "sweep:shallow-wide")},
        value=lambda a, b: a["test_loss"] - b["test_loss"],
        own=SWEEP,
        premises=(LEARNED,),
    ),
    Claim(
        name="alignment-grows-with-width",
        paper="expansion",
        source="Theorem 5, section 6",
        statement="Width makes training and test gradients agree.",
        test="cosine of mean training and test gradients, wide minus narrow, ResNet-20",
        relation=">=",
        threshold=0.0,
        cells={"ResNet": ("sweep:deep-wide", "sweep:deep-narrow")},
        value=lambda a, b: a["alignment"] - b["alignment"],
        own=SWEEP,
        premises=(LEARNED,),
    ),
    Claim(
        name="insertion-keeps-function",
        paper="expansion",
        source="section 3: zero initialization recovers the old model",
        statement="A new block with a zero last map leaves the function as it is.",
        test="largest change of an output, block inserted first, in the middle and last",
        relation="<=",
        threshold=0.0,
        cells=CLASSIFIERS,
        value=lambda f: f["insertion_change"],
        needs=("insertion",),
        worst=True,
    ),
    Claim(
        name="jumpboard-exists",
        paper="expansion",
        source="Condition 1, Theorem 4",
        statement="An inserted block offers a step that lowers the training loss.",
        test="training loss that the best jumpboard takes off, relative",
        relation=">=",
        threshold=0.001,
        cells=CLASSIFIERS,
        value=lambda f: f["jump_gain"],
        needs=("trace", "jump"),
        premises=(LEARNED,),
    ),
    Claim(
        name="jumpboard-generalizes",
        paper="expansion",
        source="Theorem 3, Corollary 3",
        statement="The jumpboard's gain carries over to the test set.",
        test="held-out loss that the same jumpboard takes off (nat)",
        relation=">=",
        threshold=0.0,
        cells=CLASSIFIERS,
        value=lambda f: f["jump_gain_held_out"],
        needs=("trace", "jump"),
        premises=(
            LEARNED,
            ALIGNED,
        ),
    ),
)
