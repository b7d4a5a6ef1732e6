"""A pretrained language model made usable at every depth: objectives at equal CPU seconds.

    python benchmarks/pretrained.py [--seconds 100] [--run runs/pretrained] [--smoke]
    python benchmarks/pretrained.py --collect --page

stories15M of EVERYDEPTH_DATA (a Llama of 6 blocks), tuned on stories it drew itself; other stories
of its own are held out. Every arm has the same CPU seconds: the cost of a step is measured first,
the number of steps follows from it. One process, one thread. An arm that is done is not repeated:
call it again after a crash. Figures go to benchmarks/results/pretrained.json; `--collect`
writes those of the arms that are done, without running any; `--page` writes docs/objectives.md from
the figures. `--smoke`: a tiny random model, two steps, nothing written.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from record import RESULTS, SMOKE, record
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import everydepth as ed
from everydepth.environment import DATA_VARIABLE
from everydepth.stream import Targets

PAGE = Path(__file__).parents[1] / "docs" / "objectives.md"
TEMPLATE = Path(__file__).parent / "pretrained.md"
NAME = "stories15M"
ROWS, LENGTH, TRAIN, HELD_OUT, NEW, PROMPTS = 2, 128, 192, 32, 48, 3
TUNED_LR, BALCONY_LR = 3e-4, 1e-3

Make = Callable[[Any], ed.EveryDepth]
ARMS: dict[str, Make | None] = {
    "published": None,
    "end_to_end": lambda model: ed.EveryDepth(model, ed.end_to_end()),
    "lpa": lambda model: ed.EveryDepth(model, ed.lpa()),
    "ladder+distilled": lambda model: ed.EveryDepth(model, ed.ladder().distilled()),
    "balcony": ed.balcony,
}


def tiny() -> LlamaForCausalLM:
    """A random model that takes no time."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 4}
    config = LlamaConfig(
        vocab_size=60, num_attention_heads=2, num_key_value_heads=2, bos_token_id=1, **sizes
    )
    return LlamaForCausalLM(config).eval()


def published(smoke: bool) -> Any:
    if smoke:
        return tiny()
    folder = Path(os.environ.get(DATA_VARIABLE, "")) / NAME
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def drawn(model: Any, rows: int, length: int, seed: int) -> Tensor:
    """Texts of the model's own."""
    start = torch.full((rows, 1), model.config.bos_token_id)
    words: dict[str, Any] = {"do_sample": True, "temperature": 0.9, "eos_token_id": ()}
    found = ed.generate(model, start, max_new_tokens=length - 1, seed=seed, **words)
    return found.sequences


def stories(model: Any, folder: Path | None, smoke: bool) -> tuple[Tensor, Tensor]:
    """To train on, and held out; drawn once."""
    from safetensors.torch import load_file, save_file

    file = None if folder is None else folder / "stories.safetensors"
    if file is not None and file.is_file():
        kept = load_file(file)
        return kept["train"], kept["held_out"]
    counts = (4, 4) if smoke else (TRAIN, HELD_OUT)
    length = 12 if smoke else LENGTH
    found = [drawn(model, count, length, seed) for seed, count in enumerate(counts)]
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        save_file({"train": found[0], "held_out": found[1]}, file)
    return found[0], found[1]


@torch.no_grad()
def nll(net: Any, texts: Tensor) -> list[float]:
    """By depth 1..L, per token."""
    stream = ed.as_stream(net)
    sums, count = torch.zeros(stream.depth, dtype=torch.float64), 0
    for rows in texts.split(4):
        batch = {"input_ids": rows}
        targets, states = Targets.of(stream, batch), stream.observe(batch)
        count += len(targets)
        for depth in range(1, stream.depth + 1):
            sums[depth - 1] += targets.losses(targets.predicted(states, depth)).double().sum()
    return (sums / count).tolist()


def drafting(net: Any, prompts: Tensor, new: int, depths: tuple[int, ...]) -> dict[str, Any]:
    """Acceptance by draft depth, one row at a time, and CPU seconds against plain decoding."""
    words: dict[str, Any] = {"max_new_tokens": new, "eos_token_id": ()}

    def decoded(**more: Any) -> tuple[list[Any], float]:
        begin = time.process_time()
        found = [ed.generate(net, row[None], **words, **more) for row in prompts]
        return found, time.process_time() - begin

    decoded()  # warm
    plain, seconds = decoded()
    shown: dict[str, Any] = {}
    for depth in depths:
        found, spent = decoded(draft_depth=depth, draft_always=True)
        shown[str(depth)] = {
            "acceptance": sum(g.stats.accepted for g in found)
            / max(1, sum(g.stats.drafted for g in found)),
            "speed_over_plain": seconds / spent,
            "same_tokens": all(a.tokens == b.tokens for a, b in zip(found, plain, strict=True)),
        }
    return shown


def steps_for(make: Make, model: Any, texts: Tensor, seconds: float, lr: float) -> int:
    """How many steps the budget pays for, by the CPU seconds of three on another model."""
    net = make(model)
    words: dict[str, Any] = {"batch_size": ROWS, "lr": lr, "progress": False}
    batches = [{"input_ids": rows} for rows in texts[: 4 * ROWS].split(ROWS)]
    ed.fit(net, batches, steps=1, **words)
    begin = time.process_time()
    ed.fit(net, batches, steps=3, **words)
    return max(2, int(seconds / ((time.process_time() - begin) / 3)))


def arm(name: str, seconds: float, run: str | None, smoke: bool) -> dict[str, Any]:
    """One way of tuning, and what became of the model."""
    folder = None if run is None else Path(run)
    model = published(smoke)
    texts, held_out = stories(model, folder, smoke)
    make, spent, steps = ARMS[name], 0.0, 0
    net: Any = model
    if make is not None:
        lr = BALCONY_LR if name == "balcony" else TUNED_LR
        steps = 2 if smoke else steps_for(make, published(smoke), texts, seconds, lr)
        net = make(model)
        rows = [
            {"input_ids": texts[torch.randperm(len(texts), generator=_seeded(step))[:ROWS]]}
            for step in range(steps)
        ]
        begin = time.process_time()
        ed.fit(net, rows, steps=steps, lr=lr, warmup=0.1, clip=1.0, shuffle=False, progress=False)
        spent = time.process_time() - begin
        net.eval()
    ladder: Any = ed.ladder().shape
    depths = tuple(ladder.rungs(ed.as_stream(net).depth))
    prompts = held_out[:PROMPTS, : 4 if smoke else 16]
    return {
        "steps": steps,
        "cpu_seconds": spent,
        "nll": nll(net, held_out),
        "drafting": drafting(net, prompts, 6 if smoke else NEW, depths),
    }


def _seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# -- the page -------------------------------------------------------------------------------------


def page(figures: dict[str, Any]) -> str:
    """docs/objectives.md: words of the template, tables of the figures."""
    arms: dict[str, Any] = figures["arms"]
    depth = len(next(iter(arms.values()))["nll"])
    rungs = list(next(iter(arms.values()))["drafting"])
    before = arms["published"]["nll"][-1]
    loss = [["objective", "steps", *(f"depth {d}" for d in range(1, depth + 1)), "last, change"]]
    draft = [["objective", *(f"depth {d}" for d in rungs), "last depth before → after"]]
    for name, found in arms.items():
        values = [f"{value:.2f}" for value in found["nll"]]
        loss.append([name, str(found["steps"]), *values, f"{found['nll'][-1] - before:+.3f}"])
        said = [
            f"{100 * d['acceptance']:.0f} %, {d['speed_over_plain']:.2f}x"
            for d in found["drafting"].values()
        ]
        draft.append([name, *said, f"{before:.3f} → {found['nll'][-1]:.3f}"])
    machine = figures["machine"]
    return TEMPLATE.read_text("utf-8").format(
        seconds=f"{figures['seconds']:.0f}",
        nll=_markdown(loss),
        drafting=_markdown(draft),
        tokens=f"{ROWS * LENGTH}",
        machine=f"{machine['devices'][0]}, torch {machine['versions']['torch']}, {machine['date']}",
    )


def _markdown(rows: list[list[str]]) -> str:
    ruled = [rows[0], ["---", *("---:" for _ in rows[0][1:])], *rows[1:]]
    return "\n".join(f"| {' | '.join(row)} |" for row in ruled)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=100.0)
    parser.add_argument("--run", default="runs/pretrained")
    parser.add_argument("--collect", action="store_true")
    parser.add_argument("--page", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    cells = [
        {"name": name, "seconds": given.seconds, "run": given.run, "smoke": False} for name in ARMS
    ]
    if SMOKE:
        found = {name: arm(name, 1.0, None, True) for name in ARMS}
        print(json.dumps(found, indent=2))
        return
    if given.collect or not given.page:
        measure(cells, given)
    if given.page:
        PAGE.write_text(page(json.loads((RESULTS / "pretrained.json").read_text())), "utf-8")


def measure(cells: list[dict[str, Any]], given: argparse.Namespace) -> None:
    folder = Path(given.run) / "arms"
    done = ed.sweep(cells, arm, run=folder, dry_run=given.collect, progress=False)
    keys = ("steps", "cpu_seconds", "nll", "drafting")
    arms = {row["name"]: {key: row[key] for key in keys} for row in done.rows()}
    record(
        "pretrained",
        {
            "model": NAME,
            "seconds": given.seconds,
            "rows": ROWS,
            "tokens_a_row": LENGTH,
            "lr": {"tuned": TUNED_LR, "balcony": BALCONY_LR},
            "arms": arms,
        },
    )


if __name__ == "__main__":
    main()
