"""A language model that writes in a browser while it downloads: bytes, tokens and speed by depth.

    python benchmarks/engines/browser.py FOLDER [--texts 8]

FOLDER: a causal language model with its tokenizer. The page is written by `format="web"`, with
texts the model draws itself as the example (they say which words come first), and opened in
headless Chromium (on the path, or EVERYDEPTH_CHROME); npm fetches onnxruntime-web once. Each file
waits until the depth before it has written, so bytes are those that a depth needs. Then the page is
opened once more and may stop: at the first depth that is so sure of each token (`SURE`). Both
windows are kept as pictures of docs/assets. One thread.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import threading
from datetime import date
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from playwright.sync_api import sync_playwright
from record import record
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer

import everydepth as ed
from everydepth.exits.web.runtime import NETWORKS

PROMPT, LENGTH = "Once upon a time", 64
SURE = 0.5  # the least probability of a token for which a depth is enough
ASSETS = Path(__file__).parents[2] / "docs" / "assets"
WAIT = 300_000  # milliseconds; others may use the machine


class Line(SimpleHTTPRequestHandler):
    """Lets a block through once it may pass."""

    passing: dict[str, threading.Event]

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - its name there
        """The table is all that is printed."""

    def do_GET(self) -> None:
        name = self.path.rpartition("/")[2]
        if name in self.passing:
            self.passing[name].wait()
        super().do_GET()


def written(page: Any, described: dict[str, Any]) -> list[dict[str, Any]]:
    """What the page logs, one depth after the other."""
    files = [entry["file"] for entry in described["files"]]
    last = max(n for n, entry in enumerate(described["files"]) if entry["part"] == "block")
    depth = 0
    for name in files[: last + 1]:
        Line.passing[name].set()
        if name.startswith("block"):
            depth += 1
            page.wait_for_function(f"window.everydepth.log.length == {depth}", timeout=WAIT)
    for name in files[last + 1 :]:
        Line.passing[name].set()
    if files[last + 1 :]:
        page.wait_for_function(f"window.everydepth.log.length == {depth + 1}", timeout=WAIT)
    return page.evaluate("window.everydepth.log")


def stopped(page: Any, address: str) -> dict[str, Any]:
    """Where a page ends that may stop; files wait only until it is told so."""
    for event in Line.passing.values():
        event.clear()
    page.goto(address)
    page.check("#stop")
    for event in Line.passing.values():
        event.set()
    shown = "document.querySelector('#status').textContent"
    page.wait_for_function(f"/stopped|All/.test({shown})", timeout=WAIT)
    entry = page.evaluate("window.everydepth.log.at(-1)")
    said = page.inner_text("#status")
    return {"sure": SURE, "depth": entry["depth"], "bytes": entry["loaded"], "says": said}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--texts", type=int, default=8)
    given = parser.parse_args()
    torch.set_num_threads(1)
    model: Any = AutoModelForCausalLM.from_pretrained(given.folder, dtype=torch.float32).eval()
    tokenizer: Any = AutoTokenizer.from_pretrained(given.folder)
    begin = torch.tensor([tokenizer.encode(PROMPT)] * given.texts)
    words: dict[str, Any] = {"do_sample": True, "seed": 0, "eos_token_id": ()}
    texts = ed.generate(model, begin, max_new_tokens=LENGTH, **words).sequences
    names = ("chromium", "chromium-browser", "google-chrome", "chrome")
    path = os.environ.get("EVERYDEPTH_CHROME") or next(filter(None, map(shutil.which, names)))
    with tempfile.TemporaryDirectory() as name:
        batch = {"input_ids": texts}
        policy = ed.Confidence(threshold=SURE)
        more: dict[str, Any] = {"tokenizer": tokenizer, "example": batch, "exits": policy}
        out = ed.export(model, f"{name}/page", format="web", **more)
        described = json.loads((out / "model.json").read_text())
        Line.passing = {entry["file"]: threading.Event() for entry in described["files"]}
        server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Line, directory=str(out)))
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with sync_playwright() as play:
            browser = play.chromium.launch(executable_path=path, args=["--no-sandbox"])
            page = browser.new_page(viewport={"width": 1280, "height": 800})
            address = f"http://127.0.0.1:{server.server_port}/index.html"
            page.goto(address)
            log, chromium = written(page, described), browser.version
            page.screenshot(path=str(ASSETS / "web-text-1280.png"))
            page.set_viewport_size({"width": 390, "height": 844})
            page.screenshot(path=str(ASSETS / "web-text-390.png"), full_page=True)
            end = stopped(browser.new_page(), address)
            browser.close()
        server.shutdown()
    expected = described["examples"][0]["tokens"]
    counts = [sum(count for _, count in ranges) for ranges in described["words"]]
    rows = [
        {
            "depth": entry["depth"],
            "bytes": entry["loaded"],
            "words": sum(counts[: entry["ends"]]),
            "same tokens": sum(
                a == b for a, b in zip(entry["tokens"], expected[entry["depth"] - 1], strict=False)
            ),
            "tokens": len(expected[entry["depth"] - 1]),
            "tokens a second": round(1000 / entry["ms"], 1),
        }
        for entry in log
    ]
    console = Console()
    console.print(*rows, end, sep="\n")
    figures: dict[str, Any] = {"date": date.today().isoformat(), "model": given.folder.name}
    figures |= {"chromium": chromium, NETWORKS.name: NETWORKS.version, "rows": rows}
    figures["with a policy"] = end
    figures["bytes"] = sum(entry["bytes"] for entry in described["files"])
    single = given.folder / "model.safetensors"
    figures["bytes of the single file"] = single.stat().st_size if single.is_file() else None
    console.print(record("browser", figures))


if __name__ == "__main__":
    main()
