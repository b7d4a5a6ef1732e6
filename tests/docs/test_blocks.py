"""Every Python block of the README and the documentation runs, in order, file by file."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from everydepth.stream import registry

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_the_blocks_of_a_page_run(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(registry, "_by_class", {})  # pages may register classes
    names: dict[str, object] = {"__name__": "__page__"}
    text = page.read_text()
    for found in BLOCK.finditer(text):
        line = text[: found.start(1)].count("\n")
        # Blank lines in front give errors the line numbers of the page.
        exec(compile("\n" * line + found[1], str(page), "exec"), names)
