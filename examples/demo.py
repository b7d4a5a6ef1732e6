"""The first hour in a few minutes: one small ViT on real digits, used at every depth.

It is trained twice: end-to-end, which makes a good model of the last depth only, and by layer-wise
progressive approximation (LPA), which gives every depth a small part of the loss. Then it is
traced, profiled, made to exit early with a guarantee, and cut. All of it ends up in one page. At
last a small language model drafts its own text with its first block.
"""

from __future__ import annotations

import time
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedTokenizerFast, ViTConfig, ViTForImageClassification

import everydepth as ed
from everydepth.app import prepare
from everydepth.app.tales import PROMPT
from everydepth.data import load_digits
from everydepth.exits.generation import Generation

RUNS, EPOCHS = Path("runs/demo"), 30
CONFIG = ViTConfig(
    image_size=8,
    patch_size=2,
    num_channels=1,
    num_labels=10,
    hidden_size=64,
    num_hidden_layers=8,
    num_attention_heads=4,
    intermediate_size=128,
)


def train(
    objective: ed.Objective, *, run: Path | None = None, seed: int = 0
) -> ViTForImageClassification:
    torch.manual_seed(seed)
    model = ViTForImageClassification(CONFIG)
    ed.fit(
        ed.EveryDepth(model, objective=objective),
        load_digits("train"),
        epochs=EPOCHS,
        batch_size=64,
        lr=2e-3,
        weight_decay=0.05,
        schedule="one_cycle",
        seed=seed,
        run=run,
        resume=run is not None,
    )
    return model.eval()


def write() -> tuple[str, Generation]:
    """The end of a tale, drafted by the first block of a language model and checked by all."""
    prepare(RUNS, say=lambda what: None)
    folder = RUNS / "tales" / "model"
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    model, prompt = ed.load(folder), tokenizer.encode(PROMPT)
    drafted = ed.generate(model, prompt, max_new_tokens=40, draft_depth=1, draft_always=True)
    assert drafted.tokens == ed.generate(model, prompt, max_new_tokens=40).tokens
    return str(tokenizer.decode(drafted.tokens[0])), drafted


def main() -> None:
    console, begin = Console(), time.perf_counter()
    # The tensors are small: more threads only wait for one another.
    torch.set_num_threads(1)
    test = load_digits("test")
    models: dict[str, ViTForImageClassification] = {}
    traces: dict[str, ed.Trace] = {}
    for name, objective in {"end-to-end": ed.end_to_end(), "LPA": ed.lpa()}.items():
        console.rule(f"training {name}")
        models[name] = train(objective, run=RUNS / name.lower())
        traces[name] = ed.trace(models[name], test)
        traces[name].save(RUNS / name.lower() / "trace")

    console.rule("using it")
    model = models["LPA"]
    profile = ed.profile(model, test, repeats=5)
    profile.save(RUNS / "lpa" / "profile")
    # `evaluate` reads the clock: not to be predicted as well.
    policy = ed.calibrate(model, load_digits("valid"), risk=0.05, clock=False)
    exits = ed.evaluate(model, test, policy)
    exits.save(RUNS / "lpa" / "exits")
    depth = profile.choose(max_drop=0.01)
    ed.export(model, RUNS / "small", depth=depth, profile=profile, overwrite=True)
    page = ed.report({name: RUNS / name.lower() for name in traces}, RUNS / "report.html")
    console.rule("writing")
    text, drafted = write()
    console.print(f"{PROMPT}[bold]{text}[/bold] ...", highlight=False)

    accuracy = {name: trace["accuracy"] for name, trace in traces.items()}
    table = Table(title=f"Accuracy on {len(test)} held-out digits, read out at each depth")
    for column in ("depth", "parameters", *accuracy):
        table.add_column(column, justify="right")
    for d in range(1, CONFIG.num_hidden_layers + 1):
        shares = (f"{values[d]:.1%}" for values in accuracy.values())
        table.add_row(str(d), f"{profile.at(d).parameters:,}", *shares)
    console.print(table)
    half, last = CONFIG.num_hidden_layers // 2, CONFIG.num_hidden_layers
    e2e, lpa = accuracy["end-to-end"], accuracy["LPA"]
    accepted, checks = drafted.stats.acceptance or 0.0, len(drafted.stats.draft_lengths)
    console.print(
        f"1. One block gives {lpa[1]:.1%} with LPA, {e2e[1]:.1%} end-to-end; half of them "
        f"{lpa[half]:.1%} and {e2e[half]:.1%}; all {lpa[last]:.1%} and {e2e[last]:.1%}.\n"
        f"2. {depth} of {last} blocks lose at most a point: {RUNS / 'small'} is a plain ViT of "
        "them, which stock transformers loads.\n"
        f"3. Leaving early, samples need {exits.layer_speedup:.1f}x fewer blocks (by the clock "
        f"{exits.measured_speedup:.1f}x); {exits.agreement:.1%} get the same answer.\n"
        f"4. The first block of a language model guessed {accepted:.0%} of its own text right: "
        f"{checks} checks instead of {len(drafted.tokens[0])} passes, the same text.\n"
        f"5. It took {time.perf_counter() - begin:.0f} s. Open {page} in a browser.",
        highlight=False,
        soft_wrap=True,
    )


if __name__ == "__main__":
    main()
