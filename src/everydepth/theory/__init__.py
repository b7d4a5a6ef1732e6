"""Theory made checkable: layers as matrices, bounds from real networks, one layer that reaches any
continuous map of sequences.

| file | what |
|---|---|
| `matrices` | explicit matrices of linear, convolution and attention layers (SPEC 1.7) |
| `lipschitz`, `generalisation` | constants and bounds of depth expansion (SPEC 4.7, 4.8) |
| `construction`, `fitting`, `maps` | universal approximation by one transformer layer (SPEC 5) |
"""

from everydepth.theory.construction import Constructed, construct, sup_error, verification_points
from everydepth.theory.fitting import Fitted, fit_single_layer
from everydepth.theory.maps import MAPS, Domain, SequenceMap
from everydepth.theory.matrices import (
    Affine,
    attention_matrix,
    convolution_matrix,
    linear_matrix,
    two_sided_matrix,
    unvec,
    vec,
)
from everydepth.theory.single_layer import SingleLayer

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
