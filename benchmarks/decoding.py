"""Decoding: transformers' greedy and early-exit-assisted decoding, and ours, side by side.

    python benchmarks/decoding.py [--model stories15M] [--tuned runs/stories15M-lpa]

`--model` is the folder of a small Llama, as published (by default stories15M of EVERYDEPTH_DATA).
`--tuned` is made of it when it is not there: stories the model draws itself, then the LPA objective
(the last depth's loss plus a tenth of every other's) on them, once. Greedy text, one
row and a batch of eight, one compute thread; ways alternate. A text's rounds are compared pair by
pair, and the median of their ratios counts. CPU seconds are less disturbed by other programs than
the clock, and what drafts read while they learn their costs is CPU time, too. Passes of a block are
counted in a run of their own.
"""

from __future__ import annotations

import argparse
import math
import os
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from record import RESULTS, SMOKE, by_cpu_time, record_times, sized, typical
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor
from torch.nn.functional import cross_entropy, linear
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
)

import everydepth as ed
from everydepth.app.tales import tales
from everydepth.data.byte_tokens import byte_tokenizer
from everydepth.environment import DATA_VARIABLE
from everydepth.exits.generation import Generation
from everydepth.exits.policies import Confidence

PROMPTS = (
    "Once upon a time",
    "One day, a little girl named Lily found a needle in her room.",
    "Tom and his dog went to the big park.",
    "The old man had a red boat. He",
)
NAME = "stories15M"
NEW, ROUNDS, BATCH = sized((160, 9, 8), (6, 1, 2))
WANTED = {
    "prefix passes over plain decoding": 1.02,
    "speed over assistant_early_exit": 1.5,
    "speed over plain greedy, LPA-trained": 1.0,
    "plain greedy over transformers": 1.0,
    "drafting over plain decoding": 0.98,
}


def tiny_model(folder: Path) -> Path:
    """A random model in the place of the published one."""
    folder.mkdir(exist_ok=True)
    words = byte_tokenizer(tales(40))
    words.save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=len(words), hidden_size=16, intermediate_size=16,
        num_hidden_layers=5, num_attention_heads=2, max_position_embeddings=64, bos_token_id=0,
        eos_token_id=0,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


# -- making a model whose shallow depths draft well ---------------------------------------------


def own_stories(model: Any, count: int, length: int, *, first_seed: int = 0) -> Tensor:
    """Texts drawn from the model itself, 64 at a time."""
    start = torch.full((64, 1), model.config.bos_token_id)
    drawn = [
        ed.generate(
            model,
            start,
            max_new_tokens=length - 1,
            do_sample=True,
            temperature=0.9,
            seed=seed,
            eos_token_id=(),
        ).sequences
        for seed in track(
            range(first_seed, first_seed + math.ceil(count / 64)), description="stories"
        )
    ]
    return torch.cat(drawn)[:count]


def tune(model: Any, stories: Tensor, *, steps: int, rows: int = 4, lr: float = 5e-4) -> None:
    """Fine-tune with LPA.

    The softmax runs over the tokens of the stories and a sample of the others, weighted as all of
    them: the head of a large vocabulary at every depth would be most of the work.
    """
    stream, used = ed.as_stream(model), stories.unique()
    unused = torch.ones(stream.classes, dtype=torch.bool).index_fill(0, used, False).nonzero()[:, 0]
    negatives, order = min(512, len(unused)), torch.arange(len(stories))
    place = torch.zeros(stream.classes, dtype=torch.long)
    place[used] = torch.arange(len(used))
    shift = torch.zeros(len(used) + negatives)
    shift[len(used) :] = math.log(max(1, len(unused)) / max(1, negatives))
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.98), weight_decay=0)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda s: min((s + 1) / 20, 0.5 + 0.5 * math.cos(math.pi * s / steps) + 0.01)
    )
    for step in track(range(steps), description="LPA"):
        if step * rows % len(stories) < rows:
            order = torch.randperm(len(stories))
        batch = stories[order[torch.arange(step * rows, (step + 1) * rows) % len(stories)]]
        states = stream.observe({"input_ids": batch})
        ids = torch.cat([used, unused[torch.randperm(len(unused))[:negatives]]])
        weight, labels = cast(Tensor, stream.head.weight)[ids], place[batch[:, 1:]].flatten()
        losses = [
            cross_entropy(linear(feature[:, :-1].flatten(0, 1), weight) + shift, labels)
            for feature in (
                stream.normed(states.feature(depth), depth) for depth in range(1, stream.depth + 1)
            )
        ]
        optimizer.zero_grad()
        (losses[-1] + 0.1 * sum(losses[:-1])).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    model.eval()


# -- the ways to decode ---------------------------------------------------------------------------


def ways(model: Any, depths: list[int], assisted: list[int]) -> dict[str, Callable[[Any], Any]]:
    """Each takes a batch (ids and mask) and gives a tensor of sequences or a `Generation`."""

    def theirs(**options: Any) -> Callable[[Any], Tensor]:
        def run(batch: Any) -> Tensor:
            return model.generate(
                **batch, max_new_tokens=NEW, do_sample=False, pad_token_id=0, **options
            )

        return run

    def ours(**options: Any) -> Callable[[Any], Generation]:
        return lambda batch: ed.generate(
            model, batch, max_new_tokens=NEW, pad_token_id=0, **options
        )

    found: dict[str, Callable[[Any], Any]] = {
        "transformers greedy": theirs(),
        "everydepth greedy": ours(),
    }
    for depth in assisted:
        name = f"transformers assistant_early_exit={depth}"
        found[name] = theirs(assistant_early_exit=depth)
    for depth in depths:
        found[f"everydepth draft_depth={depth}"] = ours(draft_depth=depth)
    return found


@contextmanager
def counted(model: Any) -> Generator[list[int]]:
    """Token-passes of every block while the context lasts."""
    passes = [0] * ed.as_stream(model).depth

    def count(block: int) -> Callable[..., None]:
        def hook(_: Any, args: tuple[Tensor, ...]) -> None:
            passes[block] += args[0].shape[0] * args[0].shape[1]

        return hook

    handles = [
        block.branches[0].proj.register_forward_pre_hook(count(i))
        for i, block in enumerate(ed.as_stream(model).blocks)
    ]
    yield passes
    for handle in handles:
        handle.remove()


def compared(
    model: Any, batches: list[Any], found: dict[str, Callable[[Any], Any]], title: str
) -> dict[str, Any]:
    """Tokens, passes and the typical speed of every way, over all batches."""
    rows: dict[str, dict[str, Any]] = {}
    expected: list[Tensor] = []
    for name, way in found.items():
        with counted(model) as passes:
            results = [way(batch) for batch in batches]
        sequences = [r.sequences if isinstance(r, Generation) else r for r in results]
        expected = expected or sequences
        rows[name] = {
            "same tokens": all(map(torch.equal, sequences, expected)),
            "passes of block 1": passes[0],
            "passes of the last block": passes[-1],
        }
        stats = [r.stats for r in results if isinstance(r, Generation) and r.stats.drafted]
        if stats:
            drafted = sum(s.drafted for s in stats)
            rounds = sum(len(s.draft_lengths) for s in stats)
            rows[name]["acceptance"] = sum(s.accepted for s in stats) / drafted
            rows[name]["drafts a round"] = sum(sum(s.draft_lengths) for s in stats) / rounds
    tokens = sum(
        s.shape[0] * (s.shape[1] - b["input_ids"].shape[1])
        for s, b in zip(expected, batches, strict=True)
    )
    cpu: dict[str, list[float]] = {name: [] for name in found}
    wall: dict[str, list[float]] = {name: [] for name in found}
    with by_cpu_time():
        for _ in track(range(ROUNDS), description=title):
            for batch in batches:
                for name, way in found.items():
                    begin = time.monotonic(), time.process_time()
                    way(batch)
                    wall[name].append(time.monotonic() - begin[0])
                    cpu[name].append(time.process_time() - begin[1])
    plain, own = "transformers greedy", "everydepth greedy"
    for name, row in rows.items():
        row["tokens a second"] = tokens * ROUNDS / sum(wall[name])
        row["speed over transformers greedy"] = typical(wall[plain], wall[name])
        row["speed in CPU seconds"] = typical(cpu[plain], cpu[name])
        row["CPU speed over everydepth greedy"] = typical(cpu[own], cpu[name])
        row["passes over plain decoding"] = (
            row["passes of block 1"] / rows[plain]["passes of block 1"]
        )
        row["passes of block 1 over last"] = (
            row["passes of block 1"] / row["passes of the last block"]
        )
    return rows


def exits(model: Any, batches: list[Any], depths: list[int]) -> dict[str, Any]:
    """Per-token early exit: what it gives away, and what it gains."""
    last = ed.as_stream(model).depth
    found: dict[str, Any] = {}
    for confidence in (0.8, 0.9, 0.95):
        asked = tuple(confidence if d in depths else math.inf for d in range(1, last))
        said = [
            ed.generate(model, batch, max_new_tokens=NEW, policy=Confidence(threshold=asked))
            for batch in batches
        ]
        plain = [ed.generate(model, batch, max_new_tokens=NEW) for batch in batches]
        share = [s.stats.agreement or 0.0 for s in said]
        depth = [s.stats.mean_exit_depth or 0.0 for s in said]
        found[f"confidence {confidence} at depths {depths}"] = {
            "agreement with the full depth": sum(share) / len(share),
            "mean exit depth": sum(depth) / len(depth),
            "tokens a second": sum(s.stats.tokens for s in said)
            / sum(s.stats.seconds for s in said),
            "tokens a second, full depth": sum(p.stats.tokens for p in plain)
            / sum(p.stats.seconds for p in plain),
        }
    return found


def shown(title: str, rows: dict[str, dict[str, Any]]) -> Table:
    table = Table(title=title)
    table.add_column("")
    columns = list({column: None for row in rows.values() for column in row})
    for column in columns:
        table.add_column(column, justify="right")
    for name, row in rows.items():
        cells = [row.get(column, "") for column in columns]
        table.add_row(name, *(f"{c:.2f}" if isinstance(c, float) else str(c) for c in cells))
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--model", type=Path, default=Path(os.environ.get(DATA_VARIABLE, "."), NAME)
    )
    parser.add_argument("--tuned", type=Path, default=Path("runs", f"{NAME}-lpa"))
    parser.add_argument("--stories", type=int, default=sized(640, 8))
    parser.add_argument("--steps", type=int, default=sized(400, 2))
    options = parser.parse_args()
    if SMOKE:
        options.model, options.tuned = tiny_model(RESULTS / NAME), RESULTS / "tuned"
    if not options.model.is_dir():
        parser.error(f"there is no model in {options.model}; name its folder with --model")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    transformers.logging.set_verbosity_error()
    tokenizer = AutoTokenizer.from_pretrained(options.model)

    def load(path: Path) -> Any:
        return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()

    if not options.tuned.is_dir():
        model = load(options.model)
        length = ed.as_stream(model).positions
        assert length is not None
        tune(model, own_stories(model, options.stories, length), steps=options.steps)
        tokenizer.save_pretrained(options.tuned)
        model.save_pretrained(options.tuned)

    tokenizer.padding_side, tokenizer.pad_token_id = "left", 0
    single = [
        dict(tokenizer(p, return_tensors="pt", return_token_type_ids=False)) for p in PROMPTS[:2]
    ]
    texts = [f"{p}{end}" for p in PROMPTS for end in ("", " and")][:BATCH]
    batch = dict(tokenizer(texts, return_tensors="pt", padding=True, return_token_type_ids=False))
    figures: dict[str, Any] = {"wanted": WANTED, "new tokens": NEW, "rounds": ROUNDS, "threads": 1}
    console = Console(width=200)
    for label, path in (("published", options.model), ("LPA-trained", options.tuned)):
        model = load(path)
        depths = [1, 2, 3] if label == "LPA-trained" else [ed.as_stream(model).depth - 1]
        one = compared(model, single, ways(model, depths, depths), f"{label}, one row")
        many = compared(model, [batch], ways(model, depths, []), f"{label}, batch {BATCH}")
        figures[label] = {"one row": one, f"batch of {BATCH}": many}
        for title, rows in figures[label].items():
            console.print(shown(f"{options.model.name}, {label}, {title}", rows))
    figures["early exit, LPA-trained"] = exits(model, single, [2, 4])
    console.print(shown("per-token early exit, LPA-trained", figures["early exit, LPA-trained"]))
    record_times("decoding", figures)


if __name__ == "__main__":
    main()
