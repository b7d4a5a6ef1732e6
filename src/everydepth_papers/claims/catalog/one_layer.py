"""Claims of One-Layer Transformer."""

from __future__ import annotations

import numpy as np

from everydepth_papers.claims.claim import Claim

THEOREM = "it is about a layer built for the purpose, not about a trained model"


CLAIMS = (
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
)
