"""What README says of models is what the generated table says."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "models.md").read_text()
README = " ".join((ROOT / "README.md").read_text().split())
COUNTS = r"## {}\n\n.*? (\d+) with residual connections build and run\. (\d+) of them"


def counted(library: str) -> tuple[str, str]:
    """How many models of a library there are in the table, and how many keep every clause."""
    found = re.search(COUNTS.format(library), PAGE)
    assert found is not None
    return found[1], found[2]


def test_readme_counts_the_classes_of_transformers_as_the_table_does() -> None:
    ran, whole = counted("transformers")
    assert f"Of the {ran} classes of transformers' auto mappings" in README
    assert f"built small and run, {whole} satisfy every clause" in README


def test_readme_counts_the_models_of_torchvision_and_timm_as_the_table_does() -> None:
    ran, whole = counted("torchvision")
    assert ran == whole
    assert f"so do all of torchvision's {ran} residual classifiers" in README
    ran, whole = counted("timm")
    assert f"{whole} of timm's {ran} modules with residual connections" in README
