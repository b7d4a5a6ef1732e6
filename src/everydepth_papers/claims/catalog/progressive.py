"""Claims of Progressive Approximation."""

from __future__ import annotations

import numpy as np

from everydepth_papers.claims.catalog.common import LEARNED, PAIR, at_half, pairs
from everydepth_papers.claims.claim import Claim
from everydepth_papers.claims.facts import Facts


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


CLAIMS = (
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
        cells=pairs("lpa", "vit", "resnet"),
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
        cells=pairs("lpa", "vit", "resnet"),
        value=lambda a, b: at_half(a["accuracy"]) - at_half(b["accuracy"]),
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
        value=lambda f: at_half(f["accuracy"]) / f["accuracy"][-1],
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
        cells=pairs("lpa", "mlp"),
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
        cells=pairs("lpa", "lm"),
        value=lambda a, b: at_half(a["loss"]) - at_half(b["loss"]),
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
        cells=pairs("lpa", "lm"),
        value=lambda a, b: a["loss"][-1] - b["loss"][-1],
        own=PAIR,
        premises=(LEARNED,),
    ),
    Claim(
        name="lpa-cost",
        paper="progressive",
        source="App. I: 28 s and 28 s an epoch",
        statement="LPA's overhead in training is negligible.",
        test="CPU time of a training step, LPA over end to end, 300 steps in turn, medians",
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
)
