"""One objective of every kind."""

from __future__ import annotations

import everydepth as ed

FACTORIES = {
    "end_to_end": ed.end_to_end(),
    "lpa": ed.lpa(),
    "lpa-top": ed.lpa(top=2),
    "lpa-annealed": ed.lpa().annealed(),
    "lpa-warmed-up": ed.lpa().warmed_up(),
    "lpa-sampled": ed.lpa().sampled(1, seed=7),
    "lpa-equilibrated": ed.lpa(early=1.0).equilibrated(),
    "lpa-distilled": ed.lpa().distilled(0.5, 2.0),
    "lpa-distilled-alone": ed.lpa().distilled(labels=False),
    "ladder": ed.ladder(),
    "ladder-distilled": ed.ladder([2]).distilled().sampled(1).layer_dropout(0.2),
    "aligned": ed.aligned(),
    "aligned-uniform": ed.aligned(weights="uniform", alternate=False),
    "cosine_regularized": ed.cosine_regularized(0.5),
    "multi_classifier": ed.multi_classifier(),
    "multi_classifier-kl": ed.multi_classifier(kl=0.5, temperature=2.0),
    "layerskip": ed.layerskip(every=2),
    "layerskip-gradual": ed.layerskip(curriculum="gradual", dropout_rises=True),
    "weighted": ed.weighted([0.0, 1.0, 2.0, 3.0, 4.0]),
}
