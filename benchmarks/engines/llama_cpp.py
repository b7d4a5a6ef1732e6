"""A GGUF file cut at every depth, and a depth of it as the draft of the whole, in llama.cpp.

    python benchmarks/engines/llama_cpp.py SmolLM2-135M-Instruct.Q4_1.gguf [--drafts 6,12,18]
        [--parts memory,decoding,depths]

Needs `pip install "everydepth[gguf]"` (34 MB). Each depth is cut by `cut_gguf`, which runs it
beside the whole file with the other blocks silent; the same prompt goes through the dequantized
model in transformers, whose depths are all read off one forward pass. llama.cpp rounds activations
to eight bits before it multiplies them with quantized weights, transformers does not: tokens may
differ where two are about as probable. One thread; ways of decoding alternate, each has its best of
several rounds.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import xllamacpp
from record import RESULTS, record
from rich.console import Console
from rich.table import Table

import everydepth as ed
from everydepth.engines.gguf_cut import cut_gguf
from everydepth.engines.gguf_file import GGUF
from everydepth.engines.llama_cpp import continued, tokenized
from everydepth.engines.llama_worker import parameters

PROMPT = "Once upon a time"
NEW, ROUNDS = 96, 3


def server(path: Path, draft: Path | None = None, most: int = 4) -> Any:
    library: Any = xllamacpp  # its compiled part has no types
    settings = parameters(str(path), context=512)
    settings.no_extra_bufts = False  # weights in the order that is fastest here
    if draft is not None:
        wanted = library.common_speculative_type.COMMON_SPECULATIVE_TYPE_DRAFT_SIMPLE
        settings.speculative.types = [wanted]
        settings.speculative.draft.mparams.path = str(draft)
        settings.speculative.draft.n_max = most
        settings.speculative.draft.cpuparams.n_threads = 1
        settings.speculative.draft.cpuparams_batch.n_threads = 1
    return library.Server(settings)


def decoded(engine: Any) -> tuple[str, float, dict[str, Any]]:
    """Greedy text of one prompt, and tokens a second."""
    request = {"prompt": PROMPT, "n_predict": NEW, "temperature": 0, "cache_prompt": False}
    began = time.perf_counter()
    found = engine.handle_completions(request | {"ignore_eos": True, "timings_per_token": True})
    seconds = time.perf_counter() - began
    return found["choices"][0]["text"], NEW / seconds, found.get("timings", {})


def own_memory(path: Path, depth: int, folder: Path) -> float:
    """MB that a process of its own needs at most for a cut, Python included."""
    # Its own high-water mark: what getrusage says includes the process that started it.
    script = (
        "from pathlib import Path; from everydepth.engines.gguf_cut import cut_gguf;"
        f"cut_gguf({str(path)!r}, {str(folder / 'memory.gguf')!r}, depth={depth});"
        "print(Path('/proc/self/status').read_text().split('VmHWM:')[1].split()[0])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    return int(done.stdout) / 1024


@torch.no_grad()
def every_depth(path: Path, folder: Path, console: Console) -> dict[str, Any]:
    """Each depth cut, run, and compared with the dequantized model."""
    from transformers import AutoModelForCausalLM

    whole = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    )
    stream = ed.as_stream(whole.eval())
    (prompt,) = tokenized(path, [PROMPT])
    rows: list[dict[str, Any]] = []
    for depth in range(1, GGUF.read(path).depth + 1):
        began = time.perf_counter()
        cut = cut_gguf(path, folder / f"{depth}.gguf", depth=depth)
        seconds = time.perf_counter() - began
        ((steps,),) = continued([cut.path], [prompt])
        ids = torch.tensor([[*prompt, *(step.token for step in steps)]])
        logits = stream.observe({"input_ids": ids}).logits(depth)[0, len(prompt) - 1 : -1]
        rows.append(
            {
                "depth": depth,
                "bytes": cut.bytes,
                "seconds, with the check": round(seconds, 2),
                "difference to the whole file with silent blocks": cut.gap,
                "greedy tokens as dequantized": sum(
                    int(row.argmax()) == step.token for row, step in zip(logits, steps, strict=True)
                ),
                "of": len(steps),
            }
        )
        console.print(rows[-1])
    return {"depths": rows}


def drafting(path: Path, drafts: list[int], folder: Path, console: Console) -> dict[str, Any]:
    """Plain decoding of the whole, of each draft, and of the whole with each draft."""
    engines: dict[str, Any] = {"whole": server(path)}
    for depth in drafts:
        small = folder / f"{depth}.gguf"
        if not small.exists():
            cut_gguf(path, small, depth=depth)
        engines[f"depth {depth} alone"] = server(small)
        engines[f"whole, drafted by depth {depth}"] = server(path, small)
    best: dict[str, float] = dict.fromkeys(engines, 0.0)
    texts: dict[str, str] = {}
    accepted: dict[str, float] = {}
    for _ in range(ROUNDS):
        for name, engine in engines.items():
            texts[name], speed, timings = decoded(engine)
            best[name] = max(best[name], speed)
            if timings.get("draft_n"):
                accepted[name] = timings["draft_n_accepted"] / timings["draft_n"]
    table = Table("way", "tokens a second", "same text as the whole", "drafted tokens accepted")
    found: dict[str, Any] = {}
    for name, speed in best.items():
        same = texts[name] == texts["whole"]
        found[name] = {
            "tokens a second": round(speed, 1),
            "same text": same,
            "accepted": round(accepted[name], 3) if name in accepted else None,
        }
        share = f"{accepted[name]:.0%}" if name in accepted else ""
        table.add_row(name, f"{speed:.1f}", str(same), share)
    console.print(table)
    return {"decoding": found}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--drafts", default="6,12,18")
    parser.add_argument(
        "--parts", default="memory,decoding,depths", help="measure these, keep the rest as recorded"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    console = Console()
    drafts = [int(part) for part in arguments.drafts.split(",")]
    parts = arguments.parts.split(",")
    before = RESULTS / "llama_cpp.json"
    figures: dict[str, Any] = json.loads(before.read_text()) if before.exists() else {}
    figures |= {
        "date": date.today().isoformat(),
        "file": arguments.file.name,
        "xllamacpp": version("xllamacpp"),
        "gguf": version("gguf"),
    }
    figures.pop("machine", None)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if "memory" in parts:
            peak = round(own_memory(arguments.file, drafts[-1], folder))
            figures["MB of memory for a cut"] = peak
        if "decoding" in parts:
            figures |= drafting(arguments.file, drafts, folder, console)
        if "depths" in parts:
            for leftover in folder.iterdir():
                leftover.unlink()
            figures |= every_depth(arguments.file, folder, console)
    console.print(record("llama_cpp", figures))


if __name__ == "__main__":
    main()
