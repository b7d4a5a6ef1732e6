"""The layout of the page: Gradio components, and the functions that answer their events.

Everything shown comes from `vision`, `language`, `surfaces` or `compare`, which escape whatever
comes from data. All events share one queue: a model answers one question at a time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import gradio as gr
import torch
from gradio import themes

from everydepth.app import compare, language, live, measured, surfaces, vision
from everydepth.app.content import SURFACE, is_learned, learn_surface
from everydepth.app.shelf import Item, Shelf
from everydepth.app.tales import PROMPT
from everydepth.app.told import for_browser
from everydepth.data import SURFACES
from everydepth.data.pictures import from_data_url
from everydepth.errors import EveryDepthError
from everydepth.results import Results
from everydepth.results.result import readable

RISKS = (0.01, 0.02, 0.05, 0.1, 0.2)
RISK = 0.05
LIVE = 4  # most figures of a server
NEW_TOKENS = 12  # new tokens in the grid
WRITTEN = 60  # tokens of the texts shown side by side
FONT = ("system-ui", "-apple-system", "Segoe UI", "Roboto", "DejaVu Sans", "sans-serif")
MONO = ("ui-monospace", "Consolas", "DejaVu Sans Mono", "monospace")


def appearance() -> dict[str, Any]:
    """The theme of the page; uses only fonts installed on the machine."""
    return {
        "theme": themes.Default(
            primary_hue=themes.colors.blue,
            secondary_hue=themes.colors.blue,
            neutral_hue=themes.colors.slate,
            font=FONT,
            font_mono=MONO,
        ),
        "css": _asset("app.css"),
    }


def build(
    shelf: Shelf,
    *,
    folder: Path | None = None,
    data: str | None = None,
    first: str | None = None,
    server: str | None = None,
) -> gr.Blocks:
    """The playground for the items of a shelf.

    folder: where surfaces are trained and saved; None shows only those on the shelf.
    data: the dataset to try classifiers on.
    first: the initial tab.
    server: the address of a server whose current Results are shown.
    """
    with gr.Blocks(title="everydepth", analytics_enabled=False, fill_width=True) as blocks:
        gr.HTML(_asset("header.html"), elem_id="ed-header")
        with gr.Tabs(selected=first or "vision", overflow_behavior="wrap", elem_id="ed-tabs"):
            with gr.Tab("Vision", id="vision"):
                _vision(blocks, shelf, data)
            with gr.Tab("Language", id="language"):
                _language(blocks, shelf)
            with gr.Tab("Surfaces", id="surface"):
                _surfaces(blocks, shelf, folder)
            with gr.Tab("Results", id="results"):
                _results(shelf)
            with gr.Tab("Compare", id="compare"):
                _compare(shelf)
            if server is not None:
                with gr.Tab("Server", id="server"):
                    _server(blocks, server)
    return blocks


# -- Vision ----------------------------------------------------------------------------------------


def _vision(blocks: gr.Blocks, shelf: Shelf, data: str | None) -> None:
    names = shelf.of("vision")
    if not names:
        _nothing("a classifier of pictures")
        return
    desks = {name: vision.Desk(shelf[name], data) for name in names}
    desk = desks[_preferred(names)]
    state = gr.State({"model": desk.item.name})
    with gr.Row():
        with gr.Column(scale=2, min_width=300):
            model = _chooser(names, "ed-vision-model")
            with gr.Tabs():
                with gr.Tab("Pick"):
                    pictures = gr.HTML(elem_id="ed-pick", js_on_load=_asset("pick.js"))
                with gr.Tab("Draw"):
                    canvas = gr.HTML(
                        html_template=_asset("draw.html"),
                        js_on_load=_asset("draw.js"),
                        elem_id="ed-draw",
                    )
                with gr.Tab("Upload"):
                    upload = gr.HTML(
                        html_template=_asset("upload.html"),
                        js_on_load=_asset("upload.js"),
                        elem_id="ed-upload",
                    )
            seen = gr.HTML(elem_id="ed-seen")
        with gr.Column(scale=3, min_width=300):
            with gr.Row():
                depth = _dial(desk.stream.depth, 0, "ed-vision-depth")
                risk = gr.Dropdown(
                    [(f"{share:.0%}", share) for share in RISKS],
                    value=RISK,
                    label="risk of the exit policy",
                    min_width=140,
                    elem_id="ed-risk",
                )
            said = gr.HTML(elem_id="ed-said")
            tower = gr.HTML(elem_id="ed-tower")
            promise = gr.HTML(elem_id="ed-promise")
            tiles = gr.HTML(elem_id="ed-tiles")
    shown = [state, seen, said, tower, promise, tiles]

    def show(now: dict[str, Any], level: int, share: float) -> list[Any]:
        """Run the image again with a policy of this risk."""
        desk = desks[now["model"]]
        policy, note = desk.policy(share)
        rise = desk.rise(now["pixels"], policy, now["label"])
        now = now | {"rise": rise, "note": note}
        return [now, vision.preview(now["pixels"]), *turn(now, level)]

    def turn(now: dict[str, Any], level: int) -> list[str]:
        """Show the same result at another depth."""
        desk, rise = desks[now["model"]], now["rise"]
        level = min(int(level), rise.depth)
        return [
            vision.sentence(rise, level),
            vision.tower(rise, level),
            vision.promise(now["note"]),
            vision.tiles(desk.profile, level, judged=desk.test is not None),
        ]

    def begin(name: str, share: float) -> list[Any]:
        desk = desks[name]
        row = desk.offered[2 * len(desk.offered) // 3] if desk.offered else None
        blank = torch.zeros(desk.lens.channels, *desk.lens.size)
        now: dict[str, Any] = {
            "model": name,
            "pixels": blank if row is None else desk.pixels(row),
            "label": None if row is None else desk.label(row),
        }
        last = desk.stream.depth
        level = max(1, last // 2)
        dial = gr.Slider(maximum=last, value=level)
        return [dial, vision.gallery(desk, row), *show(now, level, share)]

    def pick(now: dict[str, Any], level: int, share: float, event: gr.EventData) -> list[Any]:
        desk, row = desks[now["model"]], _row(event)
        if row not in desk.offered:
            raise gr.Error("There is no such picture.", print_exception=False)
        now = now | {"pixels": desk.pixels(row), "label": desk.label(row)}
        return [vision.gallery(desk, row), *show(now, level, share)]

    def look(now: dict[str, Any], level: int, share: float, event: gr.EventData) -> list[Any]:
        picture = from_data_url(str(_sent(event, "picture")))
        pixels = desks[now["model"]].lens.look(picture)
        return show(now | {"pixels": pixels, "label": None}, level, share)

    asked = [state, depth, risk]
    gr.on(
        [model.change, blocks.load],
        _told(begin),
        [model, risk],
        [depth, pictures, *shown],
        **_QUEUE,
    )
    pictures.click(_told(pick), asked, [pictures, *shown], **_QUEUE)
    gr.on([canvas.submit, upload.submit], _told(look), asked, shown, **_QUEUE)
    risk.change(_told(show), asked, shown, **_QUEUE)
    depth.change(_told(turn), [state, depth], shown[2:], **_QUEUE)


# -- Language --------------------------------------------------------------------------------------


def _language(blocks: gr.Blocks, shelf: Shelf) -> None:
    names = shelf.of("language")
    if not names:
        _nothing("a causal language model")
        return
    last = shelf[names[0]].stream.depth
    state = gr.State()
    with gr.Row():
        with gr.Column(scale=3, min_width=300):
            prompt = gr.Textbox(
                PROMPT,
                label="prompt",
                lines=2,
                max_length=language.LONGEST_PROMPT,
                submit_btn=True,
                elem_id="ed-prompt",
            )
        with gr.Column(scale=2, min_width=300):
            model = _chooser(names, "ed-language-model")
            depth = _dial(last, max(1, last // 3), "ed-language-depth", lowest=1)
    words, table = gr.HTML(), gr.HTML(elem_id="ed-grid", js_on_load=_asset("tip.js"))
    written = gr.HTML(elem_id="ed-written")

    def look(name: str, typed: str, level: int) -> list[Any]:
        item = shelf[name]
        found = language.grid(item, typed, NEW_TOKENS)
        level = min(int(level), item.stream.depth)
        return [
            gr.Slider(maximum=item.stream.depth, value=level),
            found,
            language.grid_words(found),
            language.grid_table(found, level),
            language.writings(language.write(item, typed, level, WRITTEN)),
        ]

    def turn(name: str, typed: str, level: int, found: Any) -> list[str]:
        texts = language.write(shelf[name], typed, int(level), WRITTEN)
        return [language.grid_table(found, int(level)), language.writings(texts)]

    gr.on(
        [model.change, prompt.submit, blocks.load],
        _told(look),
        [model, prompt, depth],
        [depth, state, words, table, written],
        **_QUEUE,
    )
    depth.change(_told(turn), [model, prompt, depth, state], [table, written], **_QUEUE)


# -- Surfaces --------------------------------------------------------------------------------------


def _surfaces(blocks: gr.Blocks, shelf: Shelf, folder: Path | None) -> None:
    own = [name for name in shelf.of("surface") if not _is_ours(shelf[name], folder)]
    ours = [] if folder is None else list(SURFACES)
    if not own and not ours:
        _nothing("a network of two numbers (a surface)")
        return
    choices = [(f"your model: {name}", f"own {name}") for name in own]
    choices += [(name.replace("_", " "), name) for name in ours]

    @functools.cache
    def study(name: str) -> surfaces.Study:
        if name.startswith("own "):
            return surfaces.study_of_item(shelf[name.removeprefix("own ")])
        assert folder is not None
        return surfaces.study_of(folder, name)

    start = choices[0][1] if own else SURFACE
    if not own and not is_learned(folder, SURFACE):
        start = None  # training takes a while, so it waits until a surface is chosen
    with gr.Row():
        surface = gr.Dropdown(
            choices,
            value=start,
            label="surface (learned in seconds when you choose it)",
            min_width=260,
            elem_id="ed-surface",
        )
        depth = _dial(6, 1, "ed-surface-depth")
    words = gr.HTML(elem_id="ed-surface-words")
    with gr.Row():
        # Hidden until they show something: an empty plot looks broken.
        plots = [
            gr.Plot(show_label=False, elem_classes="ed-plot", min_width=300, visible=False)
            for _ in range(3)
        ]
    error = gr.Plot(show_label=False, elem_id="ed-error", visible=False)

    def begin(name: str | None, progress: gr.Progress = gr.Progress()) -> list[Any]:  # noqa: B008
        if name is None:
            return [gr.skip()] * (len(shown) + 1)
        if not name.startswith("own ") and name in SURFACES and folder is not None:
            progress(0, desc="learning it, end-to-end and with LPA")
            learn_surface(folder, name, progress=progress)
        level = max(1, study(name).depth // 3)
        dial = gr.Slider(maximum=study(name).depth, value=level)
        return [dial, *turn(name, level)]

    def turn(name: str | None, level: int) -> list[Any]:
        if name is None:
            return [gr.skip()] * len(shown)
        found, level = study(name), int(level)
        drawn: list[Any] = [gr.Plot(f, visible=True) for f in surfaces.figures(found, level)]
        drawn += _hidden(len(plots) - len(drawn))
        line = surfaces.error_figure(found, level)
        return [surfaces.words(found, level), *drawn, gr.Plot(line, visible=line is not None)]

    shown = [words, *plots, error]
    gr.on([surface.change, blocks.load], _told(begin), [surface], [depth, *shown], **_QUEUE)
    depth.change(_told(turn), [surface, depth], shown, **_QUEUE)


def _is_ours(item: Item, folder: Path | None) -> bool:
    return folder is not None and item.path.is_relative_to(folder / "surfaces")


# -- Results ---------------------------------------------------------------------------------------


def _results(shelf: Shelf) -> None:
    runs = shelf.runs()
    if not runs:
        _nothing("a run directory")
        return
    chosen = gr.Dropdown(runs, value=_preferred(runs), label="run", elem_id="ed-results-run")

    @gr.render(inputs=[chosen])
    def show(run: str) -> None:  # pyright: ignore[reportUnusedFunction]  # the decorator uses it
        try:
            found = measured.answers(shelf, run)
        except EveryDepthError as error:
            gr.HTML(f'<p class="ed-words">{for_browser(error)}</p>')
            return
        with gr.Tabs(elem_id="ed-results"):
            for kind, results in found.items():
                with gr.Tab(readable(kind)):
                    _measured(results)
            if not found:
                _nothing("a run in which something was measured")


def _measured(results: Results) -> None:
    """A page for one Results: choose a measurement, see it as a figure and a table."""
    start = measured.first(results)
    titles = [(result.title, name) for name, result in results.results.items()]
    name = gr.Dropdown(
        titles, value=start, label="measurement", interactive=True, elem_classes="ed-measurement"
    )
    drawn = measured.figure(results, start)
    plot = gr.Plot(drawn, show_label=False, visible=drawn is not None)
    words = gr.HTML(measured.words(results, start), elem_classes="ed-measured")

    def turn(chosen: str) -> list[Any]:
        drawn = measured.figure(results, chosen)
        return [gr.Plot(drawn, visible=drawn is not None), measured.words(results, chosen)]

    name.change(_told(turn), [name], [plot, words], **_QUEUE)


# -- Compare ---------------------------------------------------------------------------------------


def _compare(shelf: Shelf) -> None:
    runs = shelf.runs()
    if not runs:
        _nothing("a run directory")
        return
    first, second = compare.start(shelf)
    with gr.Row():
        left = gr.Dropdown(runs, value=first, label="run", min_width=260, elem_id="ed-left")
        right = gr.Dropdown(runs, value=second, label="against", min_width=260, elem_id="ed-right")
    frame = gr.HTML(_frame(first, second), elem_id="ed-compare")
    gr.on([left.change, right.change], _frame, [left, right], frame, **_QUEUE)


def _frame(first: str | None, second: str | None) -> str:
    """The report in a sandboxed frame."""
    page = "compare?" + urlencode({"a": first or "", "b": second or ""})
    address = page.replace("&", "&amp;")
    return (
        f'<iframe class="ed-frame" sandbox="allow-scripts" src="{address}" '
        f'title="two runs compared"></iframe><p class="ed-words"><a href="{address}" '
        'target="_blank" rel="noopener">open in a new tab</a></p>'
    )


# -- Server ----------------------------------------------------------------------------------------


def _server(blocks: gr.Blocks, address: str) -> None:
    """All Results that the server publishes, refreshed every few seconds."""
    state = gr.HTML(elem_id="ed-live")
    plots = [gr.Plot(show_label=False, visible=False, min_width=300) for _ in range(LIVE)]

    def look() -> list[Any]:
        try:
            found = live.published(address)
        except EveryDepthError as error:
            gone = f'<p class="ed-words">{for_browser(error)}</p>'
            return [gone, *_hidden(LIVE)]
        # Single numbers have different units, so they are listed rather than plotted as bars.
        numbers = [name for name, result in found.results.items() if result.kind == "scalar"]
        others = [name for name in found.results if name not in numbers]
        drawn = [f for name in others if (f := measured.figure(found, name)) is not None]
        shown = [gr.Plot(figure, visible=True) for figure in drawn[:LIVE]]
        told = "".join(measured.words(found, name) for name in numbers)
        return [told or measured.words(found, None), *shown, *_hidden(LIVE - len(shown))]

    clock = gr.Timer(live.EVERY)
    gr.on([clock.tick, blocks.load], look, None, [state, *plots], **_QUEUE | _QUIET)


def _hidden(count: int) -> list[Any]:
    return [gr.Plot(None, visible=False) for _ in range(count)]


# -- shared ----------------------------------------------------------------------------------------

_QUEUE: dict[str, Any] = {
    "concurrency_id": "model",
    "concurrency_limit": 1,
    "trigger_mode": "always_last",
    "show_progress": "minimal",
    "api_visibility": "private",
}


_QUIET: dict[str, Any] = {"concurrency_id": "server", "show_progress": "hidden"}


def _told(answer: Callable[..., Any]) -> Callable[..., Any]:
    """Show our own errors as a message on the page."""

    @functools.wraps(answer)
    def told(*args: Any, **kwargs: Any) -> Any:
        try:
            return answer(*args, **kwargs)
        except EveryDepthError as error:
            raise gr.Error(for_browser(error), print_exception=False) from error

    return told


def _chooser(names: list[str], elem_id: str) -> gr.Dropdown:
    return gr.Dropdown(
        names,
        value=_preferred(names),
        label="model",
        visible=len(names) > 1,
        elem_id=elem_id,
    )


def _preferred(names: list[str]) -> str:
    """A network trained at every depth if there is one, since it shows more."""
    return next((name for name in names if "lpa" in name.lower()), names[0])


def _dial(last: int, value: int, elem_id: str, *, lowest: int = 0) -> gr.Slider:
    return gr.Slider(
        lowest, last, value=value, step=1, label="depth", min_width=260, elem_id=elem_id
    )


def _nothing(what: str) -> None:
    gr.HTML(
        f'<p class="ed-words">Nothing to show here yet. Give {what} on the command line, or start '
        "<code>everydepth app</code> without arguments to see small examples.</p>"
    )


def _sent(event: gr.EventData, name: str) -> Any:
    data = event._data  # pyright: ignore[reportPrivateUsage]  # what `trigger` was given
    return data.get(name) if isinstance(data, dict) else None


def _row(event: gr.EventData) -> int:
    row = _sent(event, "row")
    return row if isinstance(row, int) else -1


def _asset(name: str) -> str:
    return resources.files("everydepth.app").joinpath("assets", name).read_text(encoding="utf-8")
