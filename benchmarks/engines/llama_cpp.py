"""A GGUF file cut at every depth, and a depth of it as the draft of the whole, in llama.cpp.

    python benchmarks/engines/llama_cpp.py SmolLM2-135M-Instruct.Q4_1.gguf [--drafts 6,12,18]
        [--parts memory,decoding,depths]
    python benchmarks/engines/llama_cpp.py --pair FOLDER

Needs `pip install "everydepth[gguf]"` (34 MB). Each depth is cut by `cut_gguf`, which runs it
beside the whole file with the other blocks silent; the same prompt goes through the dequantized
model in transformers, whose depths are all read off one forward pass. llama.cpp rounds activations
to eight bits before it multiplies them with quantized weights, transformers does not: tokens may
differ where two are about as probable. `--pair`: a model and its tuned draft, as pair.py writes
them, the rest kept as recorded; how to draft is chosen before anything is drafted, by what steps
and checks cost here and how sure the draft is of other texts. One thread; ways of decoding
alternate, each has its best of several rounds, in CPU seconds.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date
from importlib.metadata import version
from math import prod
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
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
NEW, ROUNDS = 64, 3
AT_ONCE = (1, 2, 3, 4, 5, 7, 9)


@dataclass(frozen=True)
class Drafted:
    """How llama.cpp drafts: so many tokens at most, each so likely, none if fewer than `least`."""

    most: int = 3
    least: int = 0
    likely: float = 0.0

    def __str__(self) -> str:
        sure = f", {self.likely:.0%} likely" if self.likely else ""
        few = f", {self.least} or more" if self.least > 1 else ""
        return f"up to {self.most}{few}{sure}"


DEFAULT = Drafted()
SETTINGS = [
    Drafted(most, least, likely)
    for most in range(1, 9)
    for least in (0, 2, 3)
    if least <= most
    for likely in (0.0, 0.3, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
]


def server(path: Path, draft: Path | None = None, how: Drafted = DEFAULT) -> Any:
    library: Any = xllamacpp  # its compiled part has no types
    settings = parameters(str(path), context=512)
    settings.no_extra_bufts = False  # weights in the order that is fastest here
    if draft is not None:
        wanted = library.common_speculative_type.COMMON_SPECULATIVE_TYPE_DRAFT_SIMPLE
        settings.speculative.types = [wanted]
        settings.speculative.draft.mparams.path = str(draft)
        settings.speculative.draft.n_max = how.most
        settings.speculative.draft.n_min = how.least
        settings.speculative.draft.p_min = how.likely
        settings.speculative.draft.cpuparams.n_threads = 1
        settings.speculative.draft.cpuparams_batch.n_threads = 1
    return library.Server(settings)


def decoded(engine: Any, prompt: str) -> tuple[str, float, Counter[str]]:
    """Greedy text and the CPU seconds it took: the engine has one thread."""
    request = {"n_predict": NEW, "temperature": 0, "cache_prompt": False, "ignore_eos": True}
    began = time.process_time()
    found = engine.handle_completions(request | {"prompt": prompt, "timings_per_token": True})
    spent = time.process_time() - began
    drafted = {k: v for k, v in found["timings"].items() if k.startswith("draft_n")}
    return found["choices"][0]["text"], spent, Counter(drafted)


def costs(engine: Any) -> dict[int, float]:
    """CPU milliseconds for some tokens at once, behind 64 others; the best of several rounds.

    Only the last of them is read out, all are when a draft is checked: that costs more.
    """
    best: dict[int, float] = {}
    for turn in range(ROUNDS):
        begin = [*range(1000, 1064), 2000 + turn]
        request = {"n_predict": 1, "temperature": 0, "cache_prompt": True}
        engine.handle_completions(request | {"prompt": begin})
        for count in AT_ONCE:
            first = 3000 + 100 * (turn + 1) * count  # none of them is in the cache
            asked = [*begin, *range(first, first + count)]
            began = time.process_time()
            engine.handle_completions(request | {"prompt": asked})
            spent = 1000 * (time.process_time() - began)
            best[count] = round(min(best.get(count, spent), spent), 1)
    return best


def checked(whole: dict[int, float], head: float) -> Callable[[int], float]:
    """CPU milliseconds to check so many tokens: `whole` reads out the last of them, a check all.

    head: the share of the weights that read out.
    """
    counts = sorted(whole)

    def cost(count: int) -> float:
        body = float(np.interp(count, counts, [whole[n] for n in counts])) - whole[1]
        return whole[1] + body / (1 - head)

    return cost


def head_share(path: Path) -> float:
    """How many of the weights read out, of a model whose words are embedded with the same ones."""
    sizes = {one.name: prod(one.shape) for one in GGUF.read(path).tensors}
    head = sizes.get("output.weight", sizes["token_embd.weight"])
    read = sum(sizes.values()) - ("output.weight" in sizes) * sizes["token_embd.weight"]
    return head / read


def foreseen(
    how: Drafted,
    sure: Sequence[Sequence[Sequence[Any]]],
    check: Callable[[int], float],
    draft: float,
) -> float:
    """How much faster than plain decoding drafting would be on texts, by what each step costs.

    sure: for each token of a text the draft's probability of its choice, and whether it was right.
    Behind a wrong token the draft is taken to be as sure as it is of the text.
    """
    spent, tokens = 0.0, 0
    for text in sure:
        at = 0
        while at < len(text):
            ahead = text[at : at + how.most]
            count = next((i for i, (p, _) in enumerate(ahead) if p < how.likely), len(ahead))
            looks = min(count + 1, how.most)
            count = count if count >= how.least else 0
            right = next((i for i, (_, r) in enumerate(ahead[:count]) if not r), count)
            spent += looks * draft + check(count + 1)
            at += right + 1
        tokens += at
    return tokens * check(1) / spent


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
    return {"decoding": raced(engines, console)}


def tuned_pair(folder: Path, console: Console, rounds: int) -> dict[str, Any]:
    """A model, in several types of weights, with the draft that was tuned for it.

    The settings are those that should be fastest by the costs measured first and by how sure the
    draft is of other texts; llama.cpp's own stand beside them.
    """
    about = json.loads((folder / "pair.json").read_text())
    sure = about.pop("sure")
    draft = folder / "draft.gguf"
    alone = server(draft)
    step = costs(alone)
    found: dict[str, Any] = {
        "about": about,
        "date": date.today().isoformat(),
        "rounds": rounds,
        "CPU ms for tokens at once, draft": step,
        "agreement on the model's own text": round(
            float(np.mean([right for text in sure for _, right in text])), 3
        ),
        "wholes": {},
    }
    for path in sorted(folder.glob("whole*.gguf")):
        plain = server(path)
        whole = costs(plain)
        check = checked(whole, head_share(path))
        rule = {how: foreseen(how, sure, check, step[1]) for how in SETTINGS}
        best = max(rule, key=lambda how: rule[how])
        engines = {"whole": plain, f"drafted, {best}": server(path, draft, best)}
        if best != DEFAULT:
            engines[f"drafted, {DEFAULT}, llama.cpp's own settings"] = server(path, draft)
        found["wholes"][path.stem.partition("-")[2] or "float32"] = {
            "CPU ms for tokens at once": whole,
            "foreseen": {f"drafted, {how}": round(rule[how], 3) for how in (best, DEFAULT)},
            "decoding": raced(engines, console, about["prompts"], rounds=rounds),
        }
        del engines, plain
    console.print(found)
    return found


def raced(
    engines: dict[str, Any],
    console: Console,
    prompts: Sequence[str] = (PROMPT,),
    *,
    rounds: int = ROUNDS,
) -> dict[str, Any]:
    """What each says, as fast as it says it in the best of several rounds."""
    best: dict[str, float] = dict.fromkeys(engines, 0.0)
    texts: dict[str, list[str]] = {}
    drafted: dict[str, Counter[str]] = {}
    for _ in range(rounds):
        texts = {name: [] for name in engines}
        drafted = {name: Counter() for name in engines}
        spent = dict.fromkeys(engines, 0.0)
        for prompt in prompts:  # prompt by prompt: what disturbs one way disturbs all
            for name, engine in engines.items():
                text, seconds, seen = decoded(engine, prompt)
                texts[name].append(text)
                spent[name] += seconds
                drafted[name] += seen
        for name, seconds in spent.items():
            best[name] = max(best[name], NEW * len(prompts) / seconds)
    table = Table(
        "way", "tokens per CPU second", "same text as the whole", "drafted tokens accepted"
    )
    found: dict[str, Any] = {}
    for name, speed in best.items():
        same, seen = texts[name] == texts["whole"], drafted[name]
        accepted = seen["draft_n_accepted"] / seen["draft_n"] if seen["draft_n"] else None
        found[name] = {
            "tokens a second": round(speed, 1),
            "same text": same,
            "accepted": None if accepted is None else round(accepted, 3),
            "tokens from drafts": seen["draft_n_accepted"] / (NEW * len(prompts)),
        }
        share = "" if accepted is None else f"{accepted:.0%}"
        table.add_row(name, f"{speed:.1f}", str(same), share)
    console.print(table)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("file", type=Path, nargs="?")
    parser.add_argument("--pair", type=Path)
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="of a pair; the best counts")
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
    figures |= {"xllamacpp": version("xllamacpp"), "gguf": version("gguf")}
    figures.pop("machine", None)
    if arguments.pair is not None:
        figures.setdefault("pairs", {})[arguments.pair.name] = tuned_pair(
            arguments.pair, console, arguments.rounds
        )
        console.print(record("llama_cpp", figures))
        return
    figures |= {"date": date.today().isoformat(), "file": arguments.file.name}
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
