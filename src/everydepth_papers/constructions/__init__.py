"""Theory made checkable: layers as matrices, and one layer that reaches any continuous map of
sequences.

| file | what |
|---|---|
| `matrices` | explicit matrices of linear, convolution and attention layers |
| `construction`, `fitting`, `maps` | universal approximation by one transformer layer |
"""

from everydepth_papers.constructions.construction import (
    Constructed,
    construct,
    sup_error,
    verification_points,
)
from everydepth_papers.constructions.fitting import Fitted, fit_single_layer
from everydepth_papers.constructions.maps import MAPS, Domain, SequenceMap
from everydepth_papers.constructions.matrices import (
    Affine,
    attention_matrix,
    convolution_matrix,
    linear_matrix,
    two_sided_matrix,
    unvec,
    vec,
)
from everydepth_papers.constructions.single_layer import SingleLayer

__all__ = [
    "MAPS",
    "Affine",
    "Constructed",
    "Domain",
    "Fitted",
    "SequenceMap",
    "SingleLayer",
    "attention_matrix",
    "construct",
    "convolution_matrix",
    "fit_single_layer",
    "linear_matrix",
    "sup_error",
    "two_sided_matrix",
    "unvec",
    "vec",
    "verification_points",
]
