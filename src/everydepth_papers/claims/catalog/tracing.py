"""Claims of Tracing Representations."""

from __future__ import annotations

import numpy as np

from everydepth.tracing import effective_depth
from everydepth_papers.claims.catalog.common import (
    CLASSIFIERS,
    LEARNED,
    PAIR,
    TRANSFORMER,
    by_layer,
    mean_accuracy,
    pairs,
)
from everydepth_papers.claims.claim import Claim
from everydepth_papers.claims.facts import TAU, Facts
from everydepth_papers.premise import Premise
from everydepth_papers.statistics import spearman

FITTED = Premise(
    test="training accuracy",
    value=lambda *facts: min(f["train_accuracy"][-1] for f in facts),
    least=0.95,
)
LEAVES = Premise(
    test="share that leaves before the last layer",
    value=lambda f, *_: f["exit_early"],
    least=0.05,
)
GAIN = Premise(
    test="gain of aligned training in mean accuracy",
    value=lambda _, aligned, plain: mean_accuracy(aligned) - mean_accuracy(plain),
    least=0.01,
)


def _to_last(facts: Facts) -> np.ndarray:
    """COS with the last depth, of depths 1..L-1."""
    return facts["cos"][1:-1, -1]


def _closeness(facts: Facts) -> float:
    """Share of triples l < m < n of depths from 1 on for which the inner pairs are more alike."""
    cos = facts["cos"][1:, 1:]
    depth = len(cos)
    won = [
        float(cos[a, b] >= cos[a, c]) + float(cos[b, c] >= cos[a, c])
        for a in range(depth)
        for b in range(a + 1, depth)
        for c in range(b + 1, depth)
    ]
    return float(np.mean(won)) / 2 if won else float("nan")


def _cos_cka(facts: Facts) -> float:
    return spearman(facts["cos"][1:-1, -1], facts["cka"][1:-1, -1])


def _accuracy_similarity(facts: Facts) -> float:
    return spearman(facts["accuracy"][1:], facts["cos"][1:, -1])


def _accuracy_drop(facts: Facts) -> float:
    """The largest fall of accuracy from a depth to the next, depths from 1 on."""
    return float(np.max(-np.diff(facts["accuracy"][1:])))


def _depth_needed(facts: Facts) -> float:
    """Definition 1: the depth at which training accuracy reaches 95 %, over the depth."""
    curve = facts["train_accuracy"]
    return effective_depth(curve, 0.05)[0] / (len(curve) - 1)


def _cosine_share(cosine: Facts, aligned: Facts, plain: Facts) -> float:
    """How much of aligned training's gain in mean accuracy the regularizer gives."""
    means = [mean_accuracy(f) for f in (cosine, aligned, plain)]
    gain = means[1] - means[2]
    return (means[0] - means[2]) / gain if gain > 0 else float("nan")


def _one_head(aligned: Facts, several: Facts) -> float:
    return float(aligned["accuracy"][1:].mean() - several["accuracy"].mean())


CLAIMS = (
    Claim(
        name="cos-agrees-with-cka",
        paper="tracing",
        source="Observation 1, Figure 2",
        statement="Sample-wise cosine similarity reflects CKA.",
        test="rank correlation over depths of COS and CKA with the last depth",
        relation=">=",
        threshold=0.8,
        cells=CLASSIFIERS,
        value=_cos_cka,
        premises=(LEARNED,),
    ),
    Claim(
        name="skips-fix-rotation",
        paper="tracing",
        source="App. B.2, Figure 12",
        statement="Without skips COS no longer follows CKA; with skips it does.",
        test="mean |CKA - COS| with the last depth, without skips minus with skips",
        relation=">=",
        threshold=0.05,
        cells={"MLP": ("perceptron:plain", "perceptron:skips")},
        value=lambda a, b: float(
            np.abs(a["cka"][1:-1, -1] - a["cos"][1:-1, -1]).mean()
            - np.abs(b["cka"][1:-1, -1] - b["cos"][1:-1, -1]).mean()
        ),
        own=PAIR,
        premises=(LEARNED,),
    ),
    Claim(
        name="similarity-grows-with-closeness",
        paper="tracing",
        source="abstract, Observation 2, Theorem 1",
        statement="Representations become more similar as layers get closer.",
        test="share of triples of depths whose closer pairs have the higher COS",
        relation=">=",
        threshold=0.95,
        cells=CLASSIFIERS,
        value=_closeness,
        premises=(LEARNED,),
    ),
    Claim(
        name="layers-positively-correlated",
        paper="tracing",
        source="abstract, Figure 2",
        statement="Representations of all layers are positively correlated.",
        test="smallest COS between two depths from 1 on",
        relation=">=",
        threshold=0.0,
        cells=CLASSIFIERS,
        value=lambda f: float(f["cos"][1:, 1:].min()),
        premises=(LEARNED,),
        worst=True,
    ),
    Claim(
        name="accuracy-follows-similarity",
        paper="tracing",
        source="section 2.2, Figure 2",
        statement="Layer-wise accuracy rises with the similarity to the last layer.",
        test="rank correlation over depths of accuracy and COS with the last depth",
        relation=">=",
        threshold=0.9,
        cells=CLASSIFIERS,
        value=_accuracy_similarity,
        premises=(LEARNED,),
    ),
    Claim(
        name="skip-dominates",
        paper="tracing",
        source="App. B.1, Figure 11",
        statement="The skip carries more of the representation than the block adds.",
        test="mean over blocks of |stream| / |what the block adds|",
        relation=">=",
        threshold=1.0,
        cells=CLASSIFIERS,
        value=lambda f: float(np.nanmean(f["norm_ratio"])),
        premises=(LEARNED,),
    ),
    Claim(
        name="trajectory-straight",
        paper="tracing",
        source="Assumption 1, Eq. 6",
        statement="Features travel along a straight line (the geodesic) from layer to layer.",
        test="distance of depths 1 and L over the length of the path between them, mean of samples",
        relation=">=",
        threshold=0.9,
        cells=TRANSFORMER,
        value=lambda f: f["straight"],
        premises=(LEARNED,),
        needs=("trace", "path"),
    ),
    Claim(
        name="probability-rises",
        paper="tracing",
        source="Theorem 2",
        statement="The probability of the label rises where similarity to the last layer does.",
        test="share of steps from a depth to the next with a rising COS at which it rises",
        relation=">=",
        threshold=0.9,
        cells=TRANSFORMER,
        value=lambda f: f["probability_rises"],
        premises=(LEARNED,),
        needs=("trace", "path"),
    ),
    Claim(
        name="decisions-saturate",
        paper="tracing",
        source="section 2.2, Figure 3",
        statement="Many predictions are final before the last layer.",
        test="share of predictions that are final one block before the last",
        relation=">=",
        threshold=0.5,
        cells={**CLASSIFIERS, "LM": ("lm:end_to_end",)},
        value=lambda f: f["saturation"][-2],
        premises=(LEARNED,),
    ),
    Claim(
        name="aligned-saturates-earlier",
        paper="tracing",
        source="Figure 1c",
        statement="Aligned training gives more early saturation events.",
        test="mean depth at which a prediction is final, aligned minus standard, over the depth",
        relation="<=",
        threshold=-0.05,
        cells=pairs("aligned", "vit", "lm"),
        value=lambda a, b: (a["saturation_depth"] - b["saturation_depth"]) / a["depth"],
        own=PAIR,
        premises=(LEARNED,),
    ),
    Claim(
        name="aligned-more-similar",
        paper="tracing",
        source="Figures 1a and 4a",
        statement="Aligned training raises the similarity of the layers.",
        test="mean COS with the last depth, aligned minus standard",
        relation=">=",
        threshold=0.05,
        cells=pairs("aligned", "vit", "lm"),
        value=lambda a, b: float(_to_last(a).mean() - _to_last(b).mean()),
        own=PAIR,
        premises=(LEARNED,),
    ),
    Claim(
        name="aligned-monotone-accuracy",
        paper="tracing",
        source="abstract (2)",
        statement="Under aligned training layer-wise accuracy increases monotonically.",
        test="largest fall of accuracy from a depth to the next",
        relation="<=",
        threshold=0.005,
        cells={"ViT": ("vit:aligned",), "LM": ("lm:aligned",)},
        value=_accuracy_drop,
        premises=(LEARNED,),
        worst=True,
    ),
    Claim(
        name="aligned-effective-depth",
        paper="tracing",
        source="Definition 1, section 3, Figure 5",
        statement="Aligned training has a much smaller effective depth.",
        test="depth at which training accuracy reaches 95 %, over L, aligned minus standard",
        relation="<=",
        threshold=-0.1,
        cells=pairs("aligned", "vit"),
        value=lambda a, b: _depth_needed(a) - _depth_needed(b),
        own=PAIR,
        premises=(
            LEARNED,
            FITTED,
        ),
    ),
    Claim(
        name="aligned-final-accuracy",
        paper="tracing",
        source="Figures 1b and 4b",
        statement="Aligned training keeps the accuracy of the last layer.",
        test="final accuracy, aligned minus standard",
        relation=">=",
        threshold=-0.01,
        cells=pairs("aligned", "vit"),
        value=lambda a, b: a["accuracy"][-1] - b["accuracy"][-1],
        own=PAIR,
        premises=(LEARNED,),
    ),
    Claim(
        name="one-head-suffices",
        paper="tracing",
        source="abstract (3), Table 1",
        statement="One shared classifier is on par with one classifier per layer.",
        test="accuracy averaged over depths, one head minus one head per depth",
        relation=">=",
        threshold=-0.01,
        cells={"ViT": ("vit:aligned", "vit:multi_classifier")},
        value=_one_head,
        own=PAIR,
        premises=(LEARNED,),
    ),
    Claim(
        name="cosine-regularizer-helps-little",
        paper="tracing",
        source="App. B.3, Figure 14",
        statement="A cosine regularizer improves layer-wise accuracy only slightly.",
        test="its gain in accuracy averaged over depths, over that of aligned training",
        relation="<=",
        threshold=0.5,
        cells={"ViT": ("vit:cosine", "vit:aligned", "vit:end_to_end")},
        value=_cosine_share,
        own=PAIR,
        premises=(
            LEARNED,
            GAIN,
        ),
    ),
    Claim(
        name="exits-keep-accuracy",
        paper="tracing",
        source="section 3, Figures 6 and 7",
        statement="An aligned network that exits by confidence keeps its accuracy.",
        test=f"accuracy with exits at confidence {TAU:g} minus that of the full network",
        relation=">=",
        threshold=-0.01,
        cells={"ViT": ("vit:aligned",)},
        value=lambda f: f["exit_gain"],
        needs=("trace", "exit"),
        premises=(
            LEARNED,
            LEAVES,
        ),
    ),
    Claim(
        name="aligned-exits-earlier",
        paper="tracing",
        source="Figure 7",
        statement="Most samples leave early under aligned, late under standard training.",
        test=f"layer speed-up at confidence {TAU:g}, aligned over standard",
        relation=">=",
        threshold=1.2,
        cells=pairs("aligned", "vit"),
        value=lambda a, b: a["exit_speedup"] / b["exit_speedup"],
        needs=("trace", "exit"),
        own=PAIR,
        premises=(
            LEARNED,
            LEAVES,
        ),
    ),
    Claim(
        name="progressive-separation",
        paper="tracing",
        source="App. B.3",
        statement="Classes separate progressively from shallow to deep layers.",
        test="rank correlation of log tr(Sigma_W Sigma_B^+) with the depth",
        relation="<=",
        threshold=-0.9,
        cells={"ViT": ("vit:aligned",)},
        value=lambda f: by_layer(f["separation"][1:]),
        premises=(LEARNED,),
    ),
)
