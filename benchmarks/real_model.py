"""What profiling, drafting and training cost on a language model as published.

    python benchmarks/real_model.py FOLDER [FOLDER...]
        [--part profile drafting training quoting tuned] [--rows 1 8] [--tokens 64 128 256]

Each FOLDER holds a causal language model of Hugging Face, never trained for early depths: the worst
case for drafts, whose depth is given. Part `quoting` writes on after the first 32 tokens of rows of
WikiText-2's test text, with drafts from the text itself, by default settings; every text is written
once, the first of all included, which knows nothing of what drafts cost here. Part `tuned` wants a
model with balconies (`everydepth reproduce smollm2` saves such), and lets them draft, too. One
thread, CPU seconds; other parts take turns: drafts have the median of nine rounds' ratios, the rest
has its best of three rounds. The clock that profiles and drafts read is CPU time here, too, as
cores may be shared. Parts are recorded one by one in benchmarks/results/real_model.json.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from record import (
    SMOKE,
    by_cpu_time,
    machine,
    record_times,
    recorded_times,
    sized,
    typical,
)
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

import everydepth as ed
from everydepth.data import Corpus
from everydepth.data import load as load_data
from everydepth.environment import DATA_VARIABLE
from everydepth.exits.generation import Generation
from everydepth.exits.load import load as load_folder
from everydepth.stream.balcony import Balcony, has_balconies

TINY: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 8}
ROUNDS = sized(3, 1)
NEW = sized(128, 8)
LENGTHS = sized((64, 128, 256), (8,))
TEXTS = sized(6, 1)
PAIRS = sized(9, 1)
LOOKED_UP = 10  # drafts of transformers' prompt lookup, as its documentation has it
ROWS, LENGTH = sized((8, 128), (2, 8))
STEP_TOKENS = sized(256, 8)
WANTED = {
    "profile, forwards of the full model": 6,
    "profile, largest error at three depths": 0.1,
    "drafting over plain decoding": 0.98,
    "plain decoding over transformers' greedy, stories15M": 1.1,
    "drafting over plain decoding, tuned": 1.3,
    "drafting over transformers' greedy, tuned": 1.5,
    "training step over its floor": 1.1,
}


def load(folder: Path | None) -> Any:
    if folder is None:
        return LlamaForCausalLM(LlamaConfig(vocab_size=99, num_attention_heads=2, **TINY)).eval()
    if has_balconies(folder):
        return load_folder(folder)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def tokens(model: Any, rows: int, length: int) -> Tensor:
    random = torch.Generator().manual_seed(0)
    return torch.randint(3, model.config.vocab_size, (rows, length), generator=random)


def seconds(run: Callable[[], object]) -> float:
    start = time.process_time()
    run()
    return time.process_time() - start


def turns(ways: dict[str, Callable[[], object]], rounds: int = ROUNDS) -> dict[str, list[float]]:
    """Seconds by round; in each round, every way has its turn."""
    taken = [{name: seconds(run) for name, run in ways.items()} for _ in range(rounds)]
    return {name: [max(turn[name], 1e-9) for turn in taken] for name in ways}


def best(ways: dict[str, Callable[[], object]]) -> dict[str, float]:
    return {name: min(times) for name, times in turns(ways).items()}


def profiled(model: Any) -> dict[str, Any]:
    """What a profile costs, and how far its sums are from models that are really cut."""
    batch = {"input_ids": tokens(model, ROWS, LENGTH)}
    depth = ed.as_stream(model).depth
    # Others than those to which the profile compares itself.
    checked = sorted({max(1, round(share * depth)) for share in (0.15, 0.4, 0.9)})
    with torch.no_grad():
        ways = {str(k): ed.at_depth(model, k) for k in (*checked, depth)}
        runs = {k: lambda cut=cut: cut(**batch, use_cache=False) for k, cut in ways.items()}
        forward = best(runs)
    found: list[ed.Profile] = []
    with by_cpu_time():
        took = seconds(lambda: found.append(ed.profile(model, [batch], progress=False)))
    added = {k: found[0].at(k).batch_latency.median / 1000 for k in checked}
    return {
        "rows x tokens": [ROWS, LENGTH],
        "forward_seconds": forward[str(depth)],
        "profile_seconds": took,
        "forwards": took / forward[str(depth)],
        "standard errors of the perplexity": {k: error(found[0].at(k)) for k in (*checked, depth)},
        "added over timed": {k: added[k] / forward[str(k)] for k in checked},
    }


def error(depth: Any) -> float:
    """What drawing tokens adds to the quality, as a share of it."""
    low, high = depth.quality_band or (depth.quality,) * 2
    return (high - low) / 2 / depth.quality


def drafted(model: Any) -> dict[str, Any]:
    """Drafts of a depth that was never trained to draft, against plain decoding."""
    depth = ed.as_stream(model).depth
    depths = sorted({0, max(1, depth // 4), depth // 2, depth - 1})
    found: dict[str, Any] = {}
    told: dict[str, Any] = {"max_new_tokens": NEW, "eos_token_id": ()}
    for rows in (1, ROWS):
        ids = tokens(model, rows, 8)
        made: dict[str, Generation] = {}

        def ours(name: str, ids: Tensor = ids, made: Any = made, **more: Any) -> Any:
            made[name] = ed.generate(model, ids, **told, **more)

        ways: dict[str, Callable[[], object]] = {
            "transformers": lambda ids=ids: model.generate(
                ids, max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False, pad_token_id=0
            ),
            "plain": lambda ours=ours: ours("plain"),
        }
        for k in depths:
            ways[f"draft_depth={k}"] = lambda k=k, ours=ours: ours(
                f"draft_depth={k}", draft_depth=k
            )
        with by_cpu_time():
            taken = turns(ways, PAIRS)
        found[f"{rows} rows"] = {
            "seconds": taken,
            "plain over transformers": typical(taken["transformers"], taken["plain"]),
            "drafting over plain": {
                name: typical(taken["plain"], took) for name, took in taken.items() if "=" in name
            },
            "rounds that drafted": {
                name: len(said.stats.draft_lengths) for name, said in made.items() if "=" in name
            },
            "acceptance": {n: said.stats.acceptance for n, said in made.items() if "=" in n},
            "same tokens": all(said.tokens == made["plain"].tokens for said in made.values()),
        }
    return found


def written(
    model: Any, tokenizer: Any, sizes: tuple[int, ...], lengths: tuple[int, ...]
) -> dict[str, Any]:
    """Drafts from the text, and from the first two balconies of a model that has some, for batches
    of these sizes and texts of these lengths."""
    found: dict[str, Any] = {}
    for rows in sizes:
        batches = wikitext(tokenizer, TEXTS if rows == 1 else 1, rows)
        for new in lengths:
            if batches[0].shape[1] + new > (ed.as_stream(model).positions or math.inf):
                continue  # stories15M has 256
            found[f"{rows} rows, {new} tokens"] = _decoded(model, batches, new)
    return found


def _decoded(model: Any, batches: list[Tensor], new: int) -> dict[str, Any]:
    plain: Any = model.model if isinstance(model, Balcony) else model
    # No token ends a text, here and there: `min_new_tokens` would forbid that token instead.
    theirs: dict[str, Any] = {"eos_token_id": -1, "do_sample": False, "pad_token_id": 0}
    theirs |= {"max_new_tokens": new}
    ways: dict[str, Callable[[Tensor], Any]] = {
        "transformers": lambda ids: plain.generate(
            ids, attention_mask=torch.ones_like(ids), **theirs
        ),
        "plain": lambda ids: ed.generate(model, ids, max_new_tokens=new, eos_token_id=()),
    }
    if len(batches[0]) == 1:  # it takes no more rows
        ways["transformers, prompt lookup"] = lambda ids: plain.generate(
            ids, attention_mask=torch.ones_like(ids), prompt_lookup_num_tokens=LOOKED_UP, **theirs
        )
    balconies = sorted(ed.as_stream(model).exits)[:2]
    for k in (0, *balconies, *((0, k) for k in balconies)):
        ways[f"draft_depth={k}"] = lambda ids, k=k: ed.generate(
            model, ids, max_new_tokens=new, eos_token_id=(), draft_depth=k
        )
    taken = {name: [0.0] * len(batches) for name in ways}
    said: dict[str, list[Any]] = {name: [] for name in ways}
    with by_cpu_time():
        for i, ids in enumerate(batches):
            for name, way in ways.items():
                begin = time.process_time()
                said[name].append(way(ids))
                taken[name][i] = time.process_time() - begin
    total = {name: max(sum(times), 1e-9) for name, times in taken.items()}
    drafts = [name for name in ways if "=" in name]
    quicker = [name for name in ways if name != "transformers"]
    return {
        "seconds of each text": taken,
        "over transformers": {n: total["transformers"] / total[n] for n in quicker},
        "drafting over plain": {n: total["plain"] / total[n] for n in drafts},
        "acceptance": {n: [s.stats.acceptance for s in said[n]] for n in drafts},
        "rounds that drafted": {n: [len(s.stats.draft_lengths) for s in said[n]] for n in drafts},
        "same tokens": all(
            torch.equal(a, getattr(b, "sequences", b))
            for name in quicker
            for a, b in zip(said["transformers"], said[name], strict=True)
        ),
    }


def tokenizer_of(folder: Path | None) -> Any:
    """Balconies have that of the model they stand beside; a tiny model has none."""
    if folder is None:
        return None
    if has_balconies(folder):
        folder = Path(os.environ.get(DATA_VARIABLE, "."), "smollm2")
    return AutoTokenizer.from_pretrained(folder)


def wikitext(tokenizer: Any, count: int, rows: int) -> list[Tensor]:
    """Some batches of the first 32 tokens of every 128 of WikiText-2's test text."""
    if tokenizer is None:
        return list(torch.randint(3, 99, (count, rows, 8)))
    text = load_data("wikitext-2", "test", kind=Corpus).text
    ids = torch.tensor(tokenizer.encode(text[: count * rows * 1024])[: count * rows * 128])
    return list(ids.view(count, rows, 128)[:, :, :32])


def trained(model: Any) -> dict[str, Any]:
    """A step of `lpa(top=5).sampled(2)` against an end-to-end step and the arithmetic floor."""
    ids = tokens(model, 1, STEP_TOKENS)
    batch = {"input_ids": ids, "labels": ids}
    net = ed.EveryDepth(model, ed.lpa(top=min(5, ed.as_stream(model).depth)).sampled(2)).train()

    def plain() -> None:
        model(**batch, use_cache=False).loss.backward()

    with FlopCounterMode(display=False) as counter:
        plain()
    head = 3 * 2 * ids.numel() * model.config.hidden_size * model.config.vocab_size
    whole = counter.get_total_flops()
    taken = best({"plain": plain, "sampled": lambda: net(**batch).loss.backward()})
    floor = (whole + 2 * head) / whole
    ratio = taken["sampled"] / taken["plain"]
    return {"seconds": taken, "time": ratio, "floor": floor, "time_over_floor": ratio / floor}


PARTS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "profile": profiled,
    "drafting": drafted,
    "training": trained,
}
WRITTEN = ["quoting", "tuned"]


UNTUNED = [*PARTS, "quoting"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", nargs="*", type=Path, help="With --smoke they may be left out.")
    parser.add_argument("--part", nargs="+", choices=[*PARTS, *WRITTEN], default=UNTUNED)
    parser.add_argument(
        "--rows", nargs="+", type=int, default=[1, ROWS], help="Of parts quoting and tuned."
    )
    parser.add_argument("--tokens", nargs="+", type=int, default=LENGTHS, help="Of both.")
    options = parser.parse_args()
    if not options.folders and not SMOKE:
        parser.error("the folder of a causal language model is needed")
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    for folder in options.folders or [None]:
        model = load(folder)
        for part in options.part:
            if part == "tuned" and not (folder is None or has_balconies(folder)):
                parser.error(f"{folder} has no balconies for the part tuned; leave it out")
            if part == "tuned" and folder is None:
                model = Balcony(model, [2, 4])
            if part in WRITTEN:
                sizes = tuple(options.rows), tuple(options.tokens)
                found = written(model, tokenizer_of(folder), *sizes)
            else:
                rounds = PAIRS if part == "drafting" else ROUNDS
                found = {"rounds": rounds, "new tokens": NEW, **PARTS[part](model)}
            print(folder, part, json.dumps(found, indent=1), flush=True)
            _add("tiny" if folder is None else folder.name, part, found)


def _add(model: str, part: str, found: dict[str, Any]) -> None:
    """Beside what was recorded of other parts and models."""
    models: dict[str, Any] = recorded_times("real_model").get("models", {})
    here = machine()  # parts recorded earlier may be of another one with the same name
    found["recorded"] = {"date": here["date"], "processor": here["processor"]}
    models.setdefault(model, {})[part] = found
    record_times("real_model", {"wanted": WANTED, "models": models})


if __name__ == "__main__":
    main()
