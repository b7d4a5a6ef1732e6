"""Table 1 of Tracing Representations: what is printed, against counts from configs alone."""

from __future__ import annotations

import pytest

from everydepth_papers.evidence import Reproduction, Row, find_recipe, reproduce


@pytest.fixture(scope="module")
def found() -> Reproduction:
    return reproduce(find_recipe("tracing_table1")[0], "small", progress=False)


def row(found: Reproduction, quantity: str) -> Row:
    return next(r for r in found.rows if r.quantity == quantity)


@pytest.mark.parametrize("model", ["DeiT-S", "DeiT-B"])
def test_rows_of_vision_models_equal_the_printed_digits(found: Reproduction, model: str) -> None:
    mine = [r for r in found.rows if r.quantity.startswith(model)]
    assert [r.measured for r in mine] == [r.published for r in mine]
    assert len(mine) == 3


@pytest.mark.parametrize(("model", "unit"), [("GPT-2", "M"), ("GPT-3", "B"), ("LLaMA-2", "B")])
def test_rows_of_language_models_follow_from_the_size_in_the_name(
    found: Reproduction, model: str, unit: str
) -> None:
    many = row(found, f"{model}, one head per layer, {unit} (nominal size)")
    saved = row(found, f"{model}, saved, % (nominal size)")
    assert many.measured == many.published
    assert saved.measured == saved.published
    # The printed single-head size contradicts the two others, which is said and not hidden.
    one = row(found, f"{model}, one head, {unit} (nominal size)")
    assert one.measured != one.published
    assert "contradicts itself" in one.note


def test_the_real_configs_are_counted_too(found: Reproduction) -> None:
    assert row(found, "GPT-2, one head, M (config)").measured == 124.44
    assert row(found, "LLaMA-2, one head, B (config)").measured == 68.98
    assert "80 layers of width 8,192" in row(found, "LLaMA-2, one head, B (config)").note
