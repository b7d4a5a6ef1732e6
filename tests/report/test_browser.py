"""The page in a real browser: it loads, the dial moves everything, and nothing from data runs."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page
from tests.helpers.browser import browser_path, launched
from tests.helpers.results import HOSTILE, curve, every_kind, trace_of

from everydepth.reports import report
from everydepth.runs import Run
from everydepth.tracing.parameters import kept_parameters

SIZES = ((1280, 900), (390, 844))


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with launched() as browser:
        yield browser


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs with every kind of result, and harmful texts wherever text can come from data."""
    folder = tmp_path_factory.mktemp("report")
    for place, name in enumerate(("E2E", "LPA")):
        made = Run.create(folder / name, {"command": f"everydepth train {HOSTILE}"})
        for step in range(5):
            made.log({"step": step, HOSTILE: 1.0 / (step + 1), "loss": 2.0 / (step + 1)})
        own = curve("own", [1, 2, 3, 4, 5], HOSTILE)
        results = [*every_kind(seed=place).values(), own]
        sizes = [20, 40, 60, 80, 100]
        trace_of(*results, kept_parameters(sizes)).save(made.path / "trace")
    runs = {"E2E": folder / "E2E", f"LPA {HOSTILE}": folder / "LPA"}
    return report(runs, folder / "page.html", title=f"Title {HOSTILE}", command=HOSTILE)


@dataclass
class Opened:
    page: Page
    complaints: list[str] = field(default_factory=list[str])


@pytest.fixture(scope="module", params=SIZES, ids=lambda size: f"{size[0]}px")
def loaded(browser: Browser, written: Path, request: pytest.FixtureRequest) -> Iterator[Opened]:
    """The page, once a size: unpacking Plotly takes most of the time of these tests."""
    width, height = request.param
    shown = Opened(browser.new_page(viewport={"width": width, "height": height}))
    note = shown.complaints.append
    shown.page.on("console", lambda message: note(f"{message.type}: {message.text}"))
    shown.page.on("pageerror", lambda error: note(str(error)))
    shown.page.on("request", lambda request: _note_request(request, note))
    shown.page.goto(written.as_uri())
    shown.page.wait_for_selector(".chart .main-svg")
    assert shown.complaints == []
    look_at_everything(shown.page)
    yield shown
    shown.page.close()


@pytest.fixture
def opened(loaded: Opened) -> Iterator[Opened]:
    yield loaded
    loaded.complaints.clear()
    loaded.page.evaluate("window.scrollTo(0, 0)")


def _note_request(request: Any, note: Any) -> None:
    if not request.url.startswith(("file:", "data:")):
        note(f"request: {request.url[:100]}")


def look_at_everything(page: Page) -> int:
    """Scroll to every chart, so that each is drawn; how many there are."""
    charts = page.locator(".chart")
    for place in range(charts.count()):
        charts.nth(place).scroll_into_view_if_needed()
        charts.nth(place).locator(".main-svg").first.wait_for()
    return charts.count()


def test_every_chart_is_drawn_without_a_complaint_and_nothing_is_fetched(opened: Opened) -> None:
    assert opened.page.locator(".chart .main-svg").count() > 10
    assert look_at_everything(opened.page) > 10
    assert opened.complaints == []


def test_the_page_never_scrolls_sideways(opened: Opened) -> None:
    width = opened.page.evaluate("document.documentElement.scrollWidth")
    assert width == opened.page.viewport_size["width"]  # pyright: ignore[reportOptionalSubscript]


def test_text_from_data_is_seen_and_does_not_run(opened: Opened) -> None:
    assert opened.page.evaluate("window.harmed") is None
    assert opened.page.locator("img[src='x']").count() == 0
    assert HOSTILE in opened.page.locator("h1").inner_text()
    cells = opened.page.locator(".tokens td")
    assert cells.filter(has_text="<script>").first.inner_text() == "<script>"
    # Plotly's texts too: the axis of the metric whose label is harmful shows the first words.
    axes = opened.page.locator(".ytitle").all_text_contents()
    assert any("</script><script>" in words for words in axes)


def test_a_script_that_got_into_the_page_would_not_be_allowed_to_run(opened: Opened) -> None:
    opened.page.evaluate(
        """() => {
          const script = document.createElement("script");
          script.textContent = "window.harmed = true";
          document.body.append(script);
        }"""
    )
    assert opened.page.evaluate("window.harmed") is None
    assert any("Content Security Policy" in text for text in opened.complaints)


def test_the_dial_moves_words_charts_and_tables_together(opened: Opened) -> None:
    page = opened.page
    dial, words = page.locator("#depth"), page.locator(".words li").first
    line = "document.querySelector('.chart').layout.shapes[0].x0"
    for depth, said in ((1, "60.0 points worse than full depth"), (4, "at full depth")):
        dial.fill(str(depth))
        assert said in words.inner_text()
        for _ in range(100):  # drawn in the next frame; `wait_for_function` would need eval
            if page.evaluate(line) == depth:
                break
            page.wait_for_timeout(50)
        assert page.evaluate(line) == depth
        assert page.locator("#depth-now").inner_text().startswith(f"Depth {depth} of 4")
        rows = page.locator("tr.at")
        assert rows.count() == 4  # two grids of tokens, two tables of numbers
        assert {row.get_attribute("data-depth") for row in rows.all()} == {str(depth)}
    assert opened.complaints == []


def test_the_dial_can_be_turned_by_buttons_and_keys_and_stops_at_the_ends(opened: Opened) -> None:
    page, now = opened.page, opened.page.locator("#depth-now")
    page.locator("#depth").fill("3")
    page.locator("#depth-more").click()
    assert now.inner_text() == "Depth 4 of 4 · the whole network"
    page.locator("#depth-more").click()
    assert now.inner_text() == "Depth 4 of 4 · the whole network"
    page.locator("#depth").press("ArrowLeft")
    assert now.inner_text() == "Depth 3 of 4"
    for _ in range(5):
        page.locator("#depth-less").click()
    assert now.inner_text() == "Depth 0 of 4 · the embedding alone"


def test_the_dial_stays_in_view(opened: Opened) -> None:
    opened.page.locator("footer").scroll_into_view_if_needed()
    box = opened.page.locator(".dial").bounding_box()
    assert box is not None
    assert box["y"] == pytest.approx(0, abs=1)
    assert box["height"] < 0.35 * opened.page.viewport_size["height"]  # pyright: ignore[reportOptionalSubscript]


def test_without_a_browser_the_tests_say_how_to_get_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: None)
    monkeypatch.delenv("EVERYDEPTH_CHROME", raising=False)
    with pytest.raises(pytest.fail.Exception, match="apt-get install chromium"):
        browser_path()
