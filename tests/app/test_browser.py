"""The playground in a real browser: every tab, every slider, no error, no request elsewhere.

With EVERYDEPTH_SCREENSHOTS set to a run of `make demo` (runs/demo), the pictures of the
documentation are made anew from it: docs/assets/app-*.png.
"""

from __future__ import annotations

import base64
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect
from tests.helpers.browser import launched
from tests.helpers.playground import HOSTILE, demo_folder

from everydepth.app.content import SURFACE
from everydepth.data import load_digits
from everydepth.data.pictures import to_data_url

SHOWN = os.environ.get("EVERYDEPTH_SCREENSHOTS")
ASSETS = Path(__file__).parents[2] / "docs" / "assets"
READY = {
    "Vision": "#ed-tiles .ed-tile",
    "Language": "#ed-written .ed-card",
    "Surfaces": "#ed-error .main-svg",
    "Results": ".ed-measured table",
    "Compare": "#ed-compare iframe",
}
WAIT = 90_000  # milliseconds; a busy machine draws three surfaces slowly


@pytest.fixture(scope="module")
def imported_late(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the command notes what it imports once it serves."""
    return tmp_path_factory.mktemp("notes") / "imported.txt"


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory, imported_late: Path) -> Iterator[str]:
    """The command itself, in a process of its own, with all the content that it would make."""
    folder = Path(SHOWN) if SHOWN else demo_folder(tmp_path_factory.mktemp("demo"))
    watched = [sys.executable, "-u", "-m", "tests.helpers.watched_app", str(imported_late)]
    command = [*watched, "app", "--no-browser", "--folder"]
    with subprocess.Popen([*command, str(folder)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        said = process.stdout.readline()
        found = re.search(r"http://localhost:(\d+)", said)
        assert found, said
        yield f"http://127.0.0.1:{found[1]}"
        process.terminate()


@dataclass
class Opened:
    page: Page
    address: str
    complaints: list[str] = field(default_factory=list[str])

    def visit(self) -> None:
        # Leaving cancels the requests of a page, and it may complain of that.
        before = len(self.complaints)
        self.page.goto("about:blank")
        del self.complaints[before:]
        self.page.goto(self.address)

    def tab(self, name: str) -> None:
        self.page.get_by_role("tab", name=name, exact=True).click()
        self.page.wait_for_selector(READY[name])

    def turn(self, dial: str, depth: int) -> None:
        number = self.page.locator(f"#{dial} input[type=number]")
        number.fill(str(depth))
        number.press("Enter")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    expect.set_options(timeout=WAIT)
    with launched(webgl=True) as browser:
        yield browser


@pytest.fixture(scope="module")
def opened(browser: Browser, address: str) -> Iterator[Opened]:
    shown = Opened(browser.new_page(), address)
    note = shown.complaints.append
    page = shown.page
    page.set_default_timeout(WAIT)
    page.on("console", lambda m: note(f"console: {m.text}") if m.type == "error" else None)
    page.on("pageerror", lambda error: note(str(error)))
    own = (address, "data:", "blob:")
    page.on("request", lambda r: None if r.url.startswith(own) else note(f"request: {r.url}"))
    page.on("response", lambda r: note(f"{r.status} {r.url}") if r.status >= 400 else None)
    shown.visit()
    yield shown
    page.close()


# A telephone first, so that the tests below find the wide page.
@pytest.mark.parametrize(("width", "height"), [(390, 844), (1280, 900)])
def test_every_tab_loads_without_an_error_or_a_request_elsewhere(
    opened: Opened, width: int, height: int
) -> None:
    page = opened.page
    page.set_viewport_size({"width": width, "height": height})
    opened.visit()
    for name in READY:
        opened.tab(name)
        if name == "Compare":
            frame = page.frame_locator("#ed-compare iframe")
            frame.locator(".chart").first.scroll_into_view_if_needed()  # drawn when it is seen
            frame.locator(".chart .main-svg").first.wait_for()
        assert page.evaluate("document.documentElement.scrollWidth") <= width, name
        if SHOWN:
            page.wait_for_timeout(3000)
            expect(page.locator(".pending:visible")).to_have_count(0)
            file = ASSETS / f"app-{name.lower()}-{width}.png"
            page.screenshot(path=str(file), full_page=True)
    assert opened.complaints == []


def test_the_depth_of_the_picture_follows_its_slider(opened: Opened) -> None:
    opened.tab("Vision")
    page = opened.page
    for depth in (1, 2):
        opened.turn("ed-vision-depth", depth)
        expect(page.locator(".ed-floor.ed-at")).to_have_attribute("data-depth", str(depth))
        expect(page.locator("#ed-said")).to_contain_text(f"Cut to depth {depth}")
        expect(page.locator("#ed-tiles")).to_contain_text("of full depth")
    assert opened.complaints == []


def test_a_picture_is_picked_drawn_and_uploaded(opened: Opened, tmp_path: Path) -> None:
    opened.tab("Vision")
    page = opened.page
    seen = page.locator("#ed-seen img")
    before = seen.get_attribute("src")
    page.locator("#ed-pick button").first.click()
    expect(page.locator("#ed-pick button").first).to_have_class("ed-chosen")
    expect(seen).not_to_have_attribute("src", before or "")
    expect(page.locator("#ed-said")).to_contain_text("but the label is")

    before = seen.get_attribute("src")
    page.get_by_role("tab", name="Draw").click()
    box = page.locator("#ed-draw canvas").bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + 140, box["y"] + 30)
    page.mouse.down()
    page.mouse.move(box["x"] + 140, box["y"] + 200, steps=4)
    page.mouse.up()
    expect(seen).not_to_have_attribute("src", before or "")

    before = seen.get_attribute("src")
    page.get_by_role("tab", name="Upload").click()
    picture = to_data_url(load_digits("test").pixel_values[3])
    file = tmp_path / "digit.png"
    file.write_bytes(base64.b64decode(picture.partition(",")[2]))
    page.locator("#ed-upload input[type=file]").first.set_input_files(file)
    expect(seen).not_to_have_attribute("src", before or "")
    page.get_by_role("tab", name="Pick").click()
    assert opened.complaints == []


def test_the_texts_follow_the_slider_and_cells_tell_their_top_five(opened: Opened) -> None:
    opened.tab("Language")
    page = opened.page
    for depth in (2, 1):
        opened.turn("ed-language-depth", depth)
        expect(page.locator("#ed-written")).to_contain_text(f"drafted at {depth}")
        expect(page.locator(".tokens tr.ed-at")).to_have_attribute("data-depth", str(depth))
    page.locator(".tokens td").first.hover()
    expect(page.locator(".ed-tip div")).to_have_count(5)
    assert opened.complaints == []


def test_a_prompt_is_shown_and_does_not_run(opened: Opened) -> None:
    opened.tab("Language")
    page = opened.page
    page.locator("#ed-prompt textarea").fill(HOSTILE)
    page.locator("#ed-prompt .submit-button").click()
    expect(page.locator(".tokens thead")).to_contain_text("harm")
    page.locator(".tokens td").first.hover()
    assert page.evaluate("window.harmed") is None
    assert page.locator("img[src='x']").count() == 0
    opened.complaints.clear()


def test_the_surfaces_follow_their_slider(opened: Opened) -> None:
    opened.tab("Surfaces")
    page = opened.page
    expect(page.locator(".ed-plot")).to_have_count(3)
    # One turn: without a graphics card three surfaces take seconds to draw.
    opened.turn("ed-surface-depth", 3)
    expect(page.locator("#ed-surface-words")).to_contain_text("at depth 3")
    titles = page.locator(".ed-plot .gtitle")
    expect(titles.nth(1)).to_contain_text("End-to-end, depth 3")
    expect(titles.nth(2)).to_contain_text("LPA, depth 3")
    assert opened.complaints == []


def test_another_measurement_of_a_run_is_chosen(opened: Opened) -> None:
    opened.tab("Results")
    page = opened.page
    expect(page.locator(".ed-measured").first).to_contain_text("Accuracy, if the network stopped")
    page.locator(".ed-measurement input").first.click()
    page.get_by_role("option", name="Loss", exact=True).click()
    expect(page.locator(".ed-measured").first).to_contain_text("Cross-entropy of the prediction")


def test_two_other_runs_are_compared(opened: Opened) -> None:
    opened.tab("Compare")
    page = opened.page
    page.locator("#ed-left input").click()
    page.get_by_role("option", name=f"surfaces/{SURFACE}/end-to-end").click()
    heading = page.frame_locator("#ed-compare iframe").locator("h1")
    expect(heading).to_contain_text(f"surfaces/{SURFACE}/end-to-end against")
    dial = page.frame_locator("#ed-compare iframe").locator("#depth")
    dial.fill("1")
    now = page.frame_locator("#ed-compare iframe").locator("#depth-now")
    expect(now).to_contain_text("Depth 1 of")
    assert opened.complaints == []


def test_what_answers_need_is_imported_before_their_threads_start(
    opened: Opened, imported_late: Path
) -> None:
    """After the tests above. Threads that import packages at once can wait for each other."""
    assert opened.page.url.startswith(opened.address)
    assert imported_late.read_text() == ""
