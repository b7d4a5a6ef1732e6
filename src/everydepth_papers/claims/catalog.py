"""The claims, paper by paper: each a statement, a number, and the threshold that decides it.

Thresholds were set before anything was measured, from what the papers print or say. Words such as
"matches" and "negligible" became numbers by our choice: one point of accuracy, 2 % of a perplexity,
10 % of time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from functools import partial
from types import MappingProxyType

import numpy as np

from everydepth.ablations import spearman
from everydepth.errors import SettingError
from everydepth.tracing import effective_depth
from everydepth_papers.claims.claim import Claim
from everydepth_papers.claims.facts import TAU, Facts
from everydepth_papers.premise import Premise

PAIR = "it compares two trainings of the same network; train both and compare their reports"
NOISE = "it needs to know which training labels are wrong; see `everydepth ablate` and `audit`"
SWEEP = "it compares networks of several sizes; see `everydepth sweep`"
THEOREM = "it is about a layer built for the purpose, not about a trained model"

CLASSIFIERS = {"ViT": ("vit:end_to_end",), "ResNet": ("resnet:end_to_end",)}
TRANSFORMER = {"ViT": ("vit:end_to_end",)}


def _pairs(training: str, *kinds: str) -> dict[str, tuple[str, ...]]:
    names = {"vit": "ViT", "resnet": "ResNet", "lm": "LM", "mlp": "MLP"}
    return {names[kind]: (f"{kind}:{training}", f"{kind}:end_to_end") for kind in kinds}


# -- premises --------------------------------------------------------------------------------------

LEARNED = Premise(
    test="skill",
    value=lambda *facts: min(f["skill"] for f in facts),
    failing="inconclusive",
)
"""Accuracy minus a linear classifier's, of every network compared; see `standard`."""
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
GAIN = Premise(
    test="gain of aligned training in mean accuracy",
    value=lambda _, aligned, plain: _mean_accuracy(aligned) - _mean_accuracy(plain),
    least=0.01,
)


def _memorized(*arms: str) -> Premise:
    """Networks that did not fit their labels say nothing about memorization."""
    return Premise(
        test="training accuracy, wrong labels included",
        value=lambda f: min(f[f"{arm}_train_accuracy"] for arm in arms),
        least=0.99,
    )


# -- numbers ---------------------------------------------------------------------------------------


def _half(curve: np.ndarray) -> float:
    """At half the depth."""
    return float(curve[len(curve) // 2])


def _largest_rise(facts: Facts) -> float:
    """Of the loss from a depth to the next, over the loss at depth 1; embeddings are left out."""
    loss = np.atleast_2d(facts["loss"])[:, 1:]
    return float((np.diff(loss).max(1) / loss[:, 0]).mean())


def _rises(facts: Facts) -> float:
    """Share of steps from a depth to the next at which the loss rises by more than 0.1 %."""
    loss = np.atleast_2d(facts["loss"])
    return float((np.diff(loss) > 1e-3 * loss[:, :-1]).mean())


def _sup_rise(facts: Facts) -> float:
    worst = np.atleast_2d(facts["sup_error"])[:, 1:]
    return float((np.diff(worst).max(1) / worst[:, 0]).mean())


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


def _thirds(values: np.ndarray) -> tuple[float, float]:
    """Mean over the first and over the last third of the layers."""
    third = max(1, len(values) // 3)
    return float(values[:third].mean()), float(values[-third:].mean())


def _early_against_late(values: np.ndarray) -> float:
    first, last = _thirds(values)
    return first - last


def _by_layer(values: np.ndarray) -> float:
    """Rank correlation with the layer."""
    return spearman(values, np.arange(len(values), dtype=float))


def _cosine_share(cosine: Facts, aligned: Facts, plain: Facts) -> float:
    """How much of aligned training's gain in mean accuracy the regularizer gives."""
    means = [_mean_accuracy(f) for f in (cosine, aligned, plain)]
    gain = means[1] - means[2]
    return (means[0] - means[2]) / gain if gain > 0 else float("nan")


def _mean_accuracy(facts: Facts) -> float:
    return float(facts["accuracy"][1:].mean())


def _beyond_bound(facts: Facts) -> float:
    """How far a frequency of disagreement exceeds Theorem 5's bound, where that is below 1."""
    frequency, bound = facts["disagree"], facts["disagree_bound"]
    says = bound < 1
    return float((frequency - bound)[says].max()) if says.any() else float("nan")


def _one_head(aligned: Facts, several: Facts) -> float:
    return float(aligned["accuracy"][1:].mean() - several["accuracy"].mean())


# -- the list --------------------------------------------------------------------------------------

_ALL = (
    Claim(
        name="lpa-monotone",
        paper="progressive",
        source="Theorem 3.3, section 5",
        statement="Trained by LPA, a network's error decreases with every block.",
        test="largest rise of the loss from a depth to the next (1..L), over the loss at depth 1",
        relation="<=",
        threshold=0.01,
        cells={
            "ViT": ("vit:lpa",),
            "ResNet": ("resnet:lpa",),
            "MLP": ("mlp:lpa",),
            "LM": ("lm:lpa",),
        },
        value=_largest_rise,
        premises=(LEARNED,),
        worst=True,
    ),
    Claim(
        name="e2e-not-monotone",
        paper="progressive",
        source="section 3.1, App. B",
        statement="Trained end to end, the error trajectory is generally not monotone.",
        test="share of depths 1..L at which the loss rises by more than 0.1 % of itself",
        relation=">=",
        threshold=0.1,
        cells={
            "ViT": ("vit:end_to_end",),
            "ResNet": ("resnet:end_to_end",),
            "MLP": ("mlp:end_to_end",),
            "LM": ("lm:end_to_end",),
        },
        value=_rises,
        own="it is about end-to-end training; lpa-monotone says whether this model's loss rises",
        premises=(LEARNED,),
    ),
    Claim(
        name="lpa-final-accuracy",
        paper="progressive",
        source="Tables 2 to 4",
        statement="LPA matches the final accuracy of end-to-end training.",
        test="final accuracy, LPA minus end to end",
        relation=">=",
        threshold=-0.01,
        cells=_pairs("lpa", "vit", "resnet"),
        value=lambda a, b: a["accuracy"][-1] - b["accuracy"][-1],
        own=PAIR,
        premises=(LEARNED,),
    ),
    Claim(
        name="lpa-early-accuracy",
        paper="progressive",
        source="Figures 4 and 5, Table 4",
        statement="LPA delivers much higher accuracy in the early layers.",
        test="accuracy at half depth, LPA minus end to end",
        relation=">=",
        threshold=0.1,
        cells=_pairs("lpa", "vit", "resnet"),
        value=lambda a, b: _half(a["accuracy"]) - _half(b["accuracy"]),
        own=PAIR,
        premises=(LEARNED,),
    ),
    Claim(
        name="early-depths-usable",
        paper="progressive",
        source="abstract: train once, use N models",
        statement="A network trained by LPA yields useful predictions at shallow depths.",
        test="accuracy at half depth over final accuracy",
        relation=">=",
        threshold=0.9,
        cells={"ViT": ("vit:lpa",), "ResNet": ("resnet:lpa",), "LM": ("lm:lpa",)},
        value=lambda f: _half(f["accuracy"]) / f["accuracy"][-1],
        premises=(LEARNED,),
    ),
    Claim(
        name="lpa-surfaces",
        paper="progressive",
        source="Table 1",
        statement="LPA fits surfaces better than end-to-end training.",
        test="log10 of final MSE, LPA over end to end, mean of eight surfaces",
        relation="<=",
        threshold=0.0,
        cells=_pairs("lpa", "mlp"),
        value=lambda a, b: float(np.log10(a["loss"][:, -1] / b["loss"][:, -1]).mean()),
        own=PAIR,
        premises=(LEARNED,),
    ),
    Claim(
        name="lpa-worst-error",
        paper="progressive",
        source="Theorem 3.3",
        statement="Along a progressive trajectory the worst-case error does not increase.",
        test="largest rise of the sup error from a depth to the next, over that at depth 1",
        relation="<=",
        threshold=0.01,
        cells={"MLP": ("mlp:lpa",)},
        value=_sup_rise,
        premises=(LEARNED,),
        worst=True,
    ),
    Claim(
        name="lpa-early-perplexity",
        paper="progressive",
        source="Figure 7",
        statement="LPA achieves substantially lower perplexity at shallow depths.",
        test="negative log-likelihood at half depth (nat), LPA minus end to end",
        relation="<=",
        threshold=-0.1,
        cells=_pairs("lpa", "lm"),
        value=lambda a, b: _half(a["loss"]) - _half(b["loss"]),
        own=PAIR,
        premises=(LEARNED,),
    ),
    Claim(
        name="lpa-final-perplexity",
        paper="progressive",
        source="Figure 7",
        statement="LPA does not cost perplexity at full depth.",
        test="final negative log-likelihood (nat), LPA minus end to end",
        relation="<=",
        threshold=0.02,
        cells=_pairs("lpa", "lm"),
        value=lambda a, b: a["loss"][-1] - b["loss"][-1],
        own=PAIR,
        premises=(LEARNED,),
    ),
    Claim(
        name="lpa-cost",
        paper="progressive",
        source="App. I: 28 s and 28 s an epoch",
        statement="LPA's overhead in training is negligible.",
        test="time of a training step, LPA over end to end, steps in turn, best of 30",
        relation="<=",
        threshold=1.1,
        cells={"ViT": ("cost:lpa",)},
        value=lambda f: f["step_ratio"],
        own=PAIR,
    ),
    Claim(
        name="targets-kept-apart",
        paper="progressive",
        source="App. G",
        statement="Inputs with different targets are not merged on the way through the network.",
        test="share of other labels among 5 nearest neighbors, last depth minus depth 1",
        relation="<=",
        threshold=0.01,
        cells={"ViT": ("vit:lpa",), "ResNet": ("resnet:lpa",)},
        value=lambda f: f["different"][-1] - f["different"][1],
        premises=(LEARNED,),
    ),
    Claim(
        name="blocks-meet-residual",
        paper="progressive",
        source="Proposition 3.2, Eqs. 7 and 8",
        statement="Trained by LPA, every block adds toward what is still missing.",
        test="cosine of what a block adds with target minus prediction before it, smallest of the "
        "blocks, mean of the surfaces",
        relation=">=",
        threshold=0.0,
        cells={"MLP": ("mlp:lpa",)},
        value=lambda f: float(f["toward_residual"].min(1).mean()),
        premises=(LEARNED,),
        own="it is measured on surfaces",
    ),
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
        cells=_pairs("aligned", "vit", "lm"),
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
        cells=_pairs("aligned", "vit", "lm"),
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
        cells=_pairs("aligned", "vit"),
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
        cells=_pairs("aligned", "vit"),
        value=lambda a, b: a["accuracy"][-1] - b["accuracy"][-1],
        own=PAIR,
        premises=(LEARNED,),
    ),
    Claim(
        name="one-head-suffices",
        paper="tracing",
        source="abstract (3), Table 1",
        statement="One common classifier is on par with one classifier a layer.",
        test="accuracy averaged over depths, one head minus a head a depth",
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
        cells=_pairs("aligned", "vit"),
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
        value=lambda f: _by_layer(f["separation"][1:]),
        premises=(LEARNED,),
    ),
    Claim(
        name="one-layer-reaches",
        paper="one_layer",
        source="main theorem",
        statement="One attention and one ReLU layer reach any continuous map to any precision.",
        test="error over the precision asked for (0.1, 0.05), worst of the maps, points not used",
        relation="<=",
        threshold=1.0,
        cells={"one layer": ("layer:constructed",)},
        value=lambda f: float(f["ratios"].max()),
        own=THEOREM,
        worst=True,
    ),
    Claim(
        name="one-layer-width",
        paper="one_layer",
        source="main theorem",
        statement="A wider single layer approximates better, also when it is trained.",
        test="sup error, 128 units over 8 (log10)",
        relation="<=",
        threshold=0.0,
        cells={"one layer": ("layer:trained",)},
        value=lambda f: float(np.log10(f["errors"][1] / f["errors"][0])),
        own=THEOREM,
    ),
    Claim(
        name="memorization-survives-removal",
        paper="residual",
        source="Figure 1a",
        statement="Residual connections have no impact on memorization.",
        test="memorized share, skips of the first or last layer removed in training (the smaller), "
        "minus untouched",
        relation=">=",
        threshold=-0.05,
        cells={
            "ViT": ("noisy:arms",),
        },
        value=lambda f: (
            min(f["first_memorization"], f["last_memorization"]) - f["whole_memorization"]
        ),
        premises=(_memorized("whole", "first", "last"),),
        own=NOISE,
    ),
    Claim(
        name="removal-impairs-learning",
        paper="residual",
        source="Figure 1b",
        statement="Removing residual connections impairs generalization.",
        test="test accuracy, skips of the first layer removed in training, minus untouched",
        relation="<=",
        threshold=-0.01,
        cells={"ViT": ("noisy:arms",)},
        value=lambda f: f["first_test_accuracy"] - f["whole_test_accuracy"],
        premises=(LEARNED, _memorized("whole", "first")),
        own=NOISE,
    ),
    Claim(
        name="early-removal-worse",
        paper="residual",
        source="abstract, section 5.1, Figure 2",
        statement="Training without the first layer's skips costs more than without the last's.",
        test="test accuracy, skips of the first layer removed minus of the last",
        relation="<=",
        threshold=-0.01,
        cells={"ViT": ("noisy:arms",)},
        value=lambda f: f["first_test_accuracy"] - f["last_test_accuracy"],
        premises=(LEARNED, _memorized("first", "last")),
        own=NOISE,
    ),
    Claim(
        name="memorization-gradient-smaller",
        paper="residual",
        source="section 4.5, Figures 5 and 15",
        statement="Memorization gradients are much smaller than learning gradients in all layers.",
        test="gradient norm of memorized over that of clean test samples, largest of the layers",
        relation="<=",
        threshold=1.0,
        cells={"ViT": ("noisy:arms",)},
        value=lambda f: float(f["gradient_ratio"].max()),
        own=NOISE,
        premises=(_memorized("whole"),),
        worst=True,
    ),
    Claim(
        name="statistics-consistent",
        paper="residual",
        source="section 4.6, Figures 6 and 16 to 22",
        statement="Activations vary alike on learning and on memorized samples.",
        test="largest relative difference over layers of the activations' standard deviation",
        relation="<=",
        threshold=0.1,
        cells={"ViT": ("noisy:arms",)},
        value=lambda f: f["std_apart"],
        own=NOISE,
        premises=(_memorized("whole"),),
        worst=True,
    ),
    Claim(
        name="early-residuals-matter-most",
        paper="residual",
        source="abstract, section 5.1, Figure 2",
        statement="Residual connections of early layers matter most.",
        test="accuracy after removing one layer's skips of the trained network (the paper removes "
        "them in training), first third minus last third of layers",
        relation="<=",
        threshold=-0.01,
        cells=CLASSIFIERS,
        value=lambda f: _early_against_late(f["removed_accuracy"]),
        needs=("trace", "ablate"),
        premises=(LEARNED,),
    ),
    Claim(
        name="early-margins-fall-most",
        paper="residual",
        source="section 5.2, Figures 8 and 23",
        statement="Removing early residual connections reduces the output margin most.",
        test="margin after removal from the trained network over the whole margin, first third "
        "minus last third of layers",
        relation="<=",
        threshold=-0.01,
        cells=CLASSIFIERS,
        value=lambda f: _early_against_late(f["removed_margin"] / f["whole_margin"]),
        needs=("trace", "ablate"),
        premises=(LEARNED,),
    ),
    Claim(
        name="early-gradients-larger",
        paper="residual",
        source="section 5.2, Figures 5 and 25",
        statement="Early layers have the larger gradient norms.",
        test="rank correlation of the per-sample gradient norm with the depth (0..L-1)",
        relation="<=",
        threshold=-0.8,
        cells=TRANSFORMER,
        value=lambda f: _by_layer(f["gradient_norm"][:-1]),
        premises=(LEARNED,),
    ),
    Claim(
        name="gradients-tell-importance",
        paper="residual",
        source="section 5.2, Figures 9 and 24",
        statement="Layers with larger gradients lose more accuracy when their skips go.",
        test="rank correlation over layers of gradient norm and accuracy after removal from the "
        "trained network",
        relation="<=",
        threshold=-0.5,
        cells=TRANSFORMER,
        value=lambda f: spearman(f["gradient_norm"][:-1], f["removed_accuracy"]),
        needs=("trace", "ablate"),
        premises=(LEARNED,),
    ),
    Claim(
        name="bound-ordered",
        paper="residual",
        source="Theorem 2",
        statement="The upper bound on the gradient never rises from a layer to the next.",
        test="share of batches in which it holds for every sample",
        relation=">=",
        threshold=1.0,
        cells=TRANSFORMER,
        value=lambda f: f["bound_ordered"],
        needs=("bound",),
        worst=True,
    ),
    *(
        Claim(
            name=f"bound-holds-{form.replace('_', '-')}",
            paper="residual",
            source=f"Theorem 1, {words}",
            statement=f"The gradient norm stays below the upper bound, {words}.",
            test="share of samples and layers, at x and at x~, whose gradient norm exceeds it",
            relation="<=",
            threshold=0.0,
            cells=TRANSFORMER,
            value=partial(lambda form, f: f[f"bound_broken_{form}"], form),
            worst=True,
            needs=("bound",),
        )
        for form, words in (
            ("as_printed", "Eq. 17 as printed"),
            ("corrected", "its factors in the order of the paper's definitions"),
        )
    ),
)

CLAIMS: Mapping[str, Claim] = MappingProxyType({claim.name: claim for claim in _ALL})
"""All claims by name, in the order of the papers."""


def checked_names(names: Iterable[str]) -> list[str]:
    """The names, if all are claims."""
    found = list(names)
    for name in found:
        if name not in CLAIMS:
            close = get_close_matches(name, CLAIMS, 1, cutoff=0.3)
            hint = f"did you mean {close[0]!r}? " if close else ""
            raise SettingError(
                f"claim {name!r} is not in the ledger; {hint}`everydepth claims --list` shows all "
                f"{len(CLAIMS)}"
            )
    return found
