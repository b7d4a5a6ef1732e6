"""What tracing a language model costs, against a loop over depths of readout and cross-entropy.

    python benchmarks/language_trace.py FOLDER [--part time memory] [--tokens 1024] [--many 16384]

FOLDER holds a causal language model of Hugging Face. One thread, CPU seconds, taken in turn, the
best of several rounds; memory is the peak above the loaded model, each in a process of its own.
Each part is recorded beside the other.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from peak import peak_mb
from record import SMOKE, record_times, recorded_times, sized
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 (its usual name)
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import everydepth as ed

LENGTH = sized(128, 8)
TINY: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2}


def prepared(folder: str | None, tokens: int) -> tuple[Any, list[dict[str, Tensor]]]:
    """A model, and random tokens in batches of 1,024."""
    if folder is None:
        model: Any = LlamaForCausalLM(LlamaConfig(vocab_size=2048, num_attention_heads=2, **TINY))
    else:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.eval()
    random = torch.Generator().manual_seed(0)
    ids = torch.randint(0, model.config.vocab_size, (tokens // LENGTH, LENGTH), generator=random)
    return model, [{"input_ids": part} for part in ids.split(1024 // LENGTH)]


@torch.no_grad()
def plain_loop(model: Any, batches: list[dict[str, Tensor]]) -> np.ndarray:
    """The mean loss of every depth, as one would write it."""
    sums, count = torch.zeros(model.config.num_hidden_layers + 1, dtype=torch.float64), 0
    for batch in batches:
        labels = batch["input_ids"][:, 1:].flatten()
        found = model.model(**batch, output_hidden_states=True, use_cache=False).hidden_states
        count += len(labels)
        for depth, h in enumerate(found):
            # The last of these is normed already.
            h = h if depth == len(found) - 1 else model.model.norm(h)
            logits = model.lm_head(h[:, :-1])
            sums[depth] += F.cross_entropy(logits.flatten(0, 1), labels, reduction="sum").double()
    return (sums / count).numpy()


@torch.no_grad()
def forward(model: Any, batches: list[dict[str, Tensor]]) -> None:
    for batch in batches:
        model(**batch, use_cache=False)


RUNS: dict[str, Callable[..., Any]] = {
    "forward": forward,
    "plain_loop": plain_loop,
    "loss": lambda model, data: ed.trace(model, data, ["loss"], progress=False)["loss"],
    "default_metrics": lambda model, data: ed.trace(model, data, progress=False)["loss"],
    "every_second_depth": lambda model, data: ed.trace(
        model, data, ["loss"], depths="::2", progress=False
    )["loss"],
}


def ready(name: str, folder: str | None, tokens: int) -> Callable[[], object]:
    """For a process of its own."""
    model, data = prepared(folder, tokens)
    for weight in model.parameters():
        weight.sum()  # read from its file, or it would count as memory of the first who needs it
    return partial(RUNS[name], model, data)


def ratio(found: Mapping[str, float], a: str, b: str) -> float:
    return round(found[a] / max(found[b], 1e-9), 4)  # a smoke run may take no time at all


def timed(folder: str | None, tokens: int, rounds: int) -> dict[str, Any]:
    model, data = prepared(folder, tokens)
    found: dict[str, Any] = {}
    seconds: dict[str, float] = {}
    forward(model, data[:1])  # warm
    for _ in range(rounds):
        for name, run in RUNS.items():
            gc.collect()
            start = time.process_time()
            found[name] = run(model, data)
            took = round(time.process_time() - start, 4)
            seconds[name] = min(took, seconds.get(name, took))
            print(f"{name:20s} {took:8.2f} s CPU", flush=True)
    return {
        "rounds": rounds,
        "tokens": tokens,
        "cpu_seconds": seconds,
        "loss / plain loop (goal 0.8)": ratio(seconds, "loss", "plain_loop"),
        "default metrics / plain loop (goal 1.3)": ratio(seconds, "default_metrics", "plain_loop"),
        "largest difference of the losses (goal 1e-5)": float(
            np.abs(found["loss"] - found["plain_loop"]).max()
        ),
        "the same, relative": float(np.abs(found["loss"] / found["plain_loop"] - 1).max()),
    }


def held(folder: str | None, tokens: int, many: int) -> dict[str, Any]:
    memory = {name: round(peak_mb(ready, name, folder, tokens)) for name in ("plain_loop", "loss")}
    memory["loss_many"] = round(peak_mb(ready, "loss", folder, many))
    return {
        "tokens": tokens,
        "many": many,
        "peak_mb_above_the_model": memory,
        "loss / plain loop (goal 1.0)": ratio(memory, "loss", "plain_loop"),
        "loss, many tokens / few (goal 1.1)": ratio(memory, "loss_many", "loss"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", help="With --smoke it may be left out.")
    parser.add_argument("--tokens", type=int, default=sized(1024, 16))
    parser.add_argument("--many", type=int, default=sized(16_384, 32))
    parser.add_argument("--rounds", type=int, default=sized(2, 1))
    parser.add_argument("--part", nargs="+", choices=["time", "memory"], default=["time", "memory"])
    options = parser.parse_args()
    if options.folder is None and not SMOKE:
        parser.error("the folder of a causal language model is needed")
    torch.set_num_threads(1)
    parts: dict[str, Callable[[], dict[str, Any]]] = {
        "time": lambda: timed(options.folder, options.tokens, options.rounds),
        "memory": lambda: held(options.folder, options.tokens, options.many),
    }
    for part in options.part:
        known = recorded_times("language_trace")
        found = {"model": "SmolLM2-135M-Instruct", part: parts[part]()}
        print(json.dumps(found, indent=1))
        record_times("language_trace", {**{k: known[k] for k in parts if k in known}, **found})


if __name__ == "__main__":
    main()
