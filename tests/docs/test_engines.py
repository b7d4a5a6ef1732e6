"""The page on engines says what was recorded."""

from __future__ import annotations

from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def test_the_table_of_engines_is_what_was_recorded() -> None:
    script = ROOT / "benchmarks" / "engines" / "matrix.py"
    spec = spec_from_file_location("matrix", script)
    assert spec is not None
    assert spec.loader is not None
    matrix: Any = module_from_spec(spec)
    spec.loader.exec_module(matrix)
    text = (ROOT / "docs" / "engines.md").read_text()
    assert matrix.page(text) == text
    assert all(len(rows()) > 1 for rows in matrix.TABLES.values())
