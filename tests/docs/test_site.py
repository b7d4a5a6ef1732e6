"""The site builds strictly: no warning, no dead link or anchor, nothing loaded from elsewhere."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import everydepth as ed

ROOT = Path(__file__).parents[2]
LOADED = re.compile(
    r'<(?:script|img|iframe)[^>]*\ssrc="https?:|<link[^>]*rel="stylesheet"[^>]*href="https?:'
)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stderr[-4000:]
    return folder


def test_the_pages_load_nothing_from_elsewhere(site: Path) -> None:
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > 20
    found = {page.name: LOADED.search(page.read_text()) for page in pages}
    assert {name: match[0] for name, match in found.items() if match} == {}


def test_the_reference_documents_every_public_name(site: Path) -> None:
    text = "".join(page.read_text() for page in (site / "reference").glob("*.html"))
    documented = set(re.findall(r'<h[3-6] id="everydepth\.(?:\w+\.)*(\w+)"', text))
    assert set(ed.__all__) - {"__version__", "data", "growth"} - documented == set()


def test_the_first_page_shows_a_result_before_theory(site: Path) -> None:
    text = (site / "index.html").read_text()
    assert text.index("smollm2-paper.png") < text.index("The residual stream</a>, <a")


def test_every_link_out_of_the_readme_leads_to_a_file() -> None:
    targets = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", (ROOT / "README.md").read_text())
    local = [target for target in targets if "://" not in target]
    assert local
    assert [target for target in local if not (ROOT / target).exists()] == []
