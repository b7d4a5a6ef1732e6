"""What a model cut to a depth keeps."""

from __future__ import annotations

from tests.helpers import tracing as samples

from everydepth.stream import as_stream, at_depth
from everydepth.tracing.parameters import parameters_by_depth


def test_parameters_by_depth_are_those_of_the_cut_model() -> None:
    model = samples.vit(layers=3)
    found = parameters_by_depth(as_stream(model))
    for depth in (1, 2, 3):
        cut = at_depth(model, depth)
        assert found.value[depth] == sum(p.numel() for p in cut.parameters())
