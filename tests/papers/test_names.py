"""Papers go by their names wherever somebody reads: no numbers of files, no numbers of notes."""

from __future__ import annotations

import re
from pathlib import Path

from everydepth_papers.evidence.discover import load_recipe, recipe_files
from everydepth_papers.paper import PAPERS

ROOT = Path(__file__).parents[2]
NUMBERED = re.compile(r"\bSPEC\b|\b[Pp]apers? 00\d|\b00[0-4]_[a-z]")
READ = (".py", ".md", ".json", ".toml", ".yml", ".ipynb", ".js", ".html")


def test_no_file_names_a_paper_by_a_number() -> None:
    folders = ("src", "docs", "examples", "benchmarks", "tests")
    files = [f for name in folders for f in (ROOT / name).rglob("*") if f.suffix in READ]
    files += [f for f in ROOT.iterdir() if f.suffix in READ]
    assert len(files) > 300
    found = {
        str(file.relative_to(ROOT)): match[0]
        for file in files
        if file != Path(__file__) and (match := NUMBERED.search(file.read_text(encoding="utf-8")))
    }
    assert found == {}


def test_a_recipe_begins_with_the_key_of_its_paper() -> None:
    recipes = {name: load_recipe(file) for name, file in recipe_files().items()}
    assert [n for n, r in recipes.items() if r.paper and not n.startswith(r.paper)] == []
    assert [n for n, r in recipes.items() if not r.paper] == ["resnet56", "smollm2"]


def test_a_key_a_name_and_a_title_belong_to_one_paper() -> None:
    assert len(PAPERS) == 5
    for words in ("key", "name", "title"):
        assert len({getattr(paper, words) for paper in PAPERS.values()}) == 5
    assert all(key == paper.key for key, paper in PAPERS.items())
