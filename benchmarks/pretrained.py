"""Pretrained language models made usable at every depth: objectives at equal CPU seconds.

    python benchmarks/pretrained.py [--model stories15M] [--seconds 20] [--run runs/pretrained]
    python benchmarks/pretrained.py --collect --page

stories15M (a Llama of 6 blocks), tuned on stories it drew itself, three seeds; `smollm2` (30
blocks) on WikiText-2, in bfloat16 if the CPU has instructions for it, one seed; both are folders of
EVERYDEPTH_DATA. Every arm has the same CPU seconds: the cost of a step is measured first, how many
there are follows from it. The rate is one of three, chosen as somebody who tunes a model would, on
validation text (`rate_for`), for stories15M: once with LPA for all that tune the model, once with
balconies for new parameters. Losses are compared by the number of blocks that run: a balcony adds
one for every ten of the model, so it stands that much lower. One process, one thread. What is done
is not repeated: call it again after a crash. Figures go to benchmarks/results/pretrained.json;
`--collect` writes those of arms that are done, without running any; `--page` writes
docs/objectives.md from the figures and those of quality.py, `--runs FOLDER` what `everydepth app
FOLDER` shows. `--smoke`: a tiny random model, two steps, nothing written.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from record import RESULTS, SMOKE, record
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import everydepth as ed
from everydepth.data import Corpus, load, token_blocks
from everydepth.environment import DATA_VARIABLE, fast_precision
from everydepth.exits.load import load_tokenizer
from everydepth.training.lora import with_lora
from everydepth_papers.statistics import interval

PAGE = Path(__file__).parents[1] / "docs" / "objectives.md"
TEMPLATE = Path(__file__).parent / "pretrained.md"
ROWS, LENGTH, VALID, HELD_OUT, NEW, PROMPTS = 4, 128, 8, 32, 32, 2
RATES, NEW_RATES = (3e-5, 1e-4, 3e-4), (3e-4, 1e-3, 3e-3)  # of the model, of new parameters
LORA_RANK, TOLERATED = 16, 0.01
CHOSEN, PUBLISHED, BOTH = "blocks chosen", "published", "end_to_end, then balcony"

Make = Callable[[Any], ed.EveryDepth]


def _tuned(objective: Callable[[], ed.Objective]) -> Make:
    return lambda model: ed.EveryDepth(model, objective())


def _balcony(init: str) -> Make:
    def made(model: Any) -> ed.EveryDepth:
        blocks = max(1, ed.as_stream(model).depth // 10)  # as by default
        lower = [rung - blocks for rung in rungs_of(model)]
        return ed.balcony(model, lower, blocks=blocks, init=init)

    return made


def _lora(model: Any) -> ed.EveryDepth:
    return ed.EveryDepth(with_lora(model, LORA_RANK), ed.ladder().distilled())


ARMS: dict[str, Make | None] = {
    PUBLISHED: None,
    "lpa": _tuned(ed.lpa),
    "balcony": _balcony("last"),
    "end_to_end": _tuned(ed.end_to_end),
    "ladder+distilled": _tuned(lambda: ed.ladder().distilled()),
    "balcony, silent start": _balcony("copy"),
    "lora": _lora,
    CHOSEN: None,
    BOTH: None,
    "ladder": _tuned(ed.ladder),
    "lpa, distilled": _tuned(lambda: ed.lpa().distilled()),
    "lpa, sampled": _tuned(lambda: ed.lpa().sampled(2)),
    "lpa, annealed": _tuned(lambda: ed.lpa().annealed()),
    "layerskip": _tuned(ed.layerskip),
    "aligned": _tuned(ed.aligned),
}
NEW_PARAMETERS = ("balcony", "balcony, silent start", "lora")
CHOOSERS = ("lpa", "balcony")  # whose rate all others of their kind take over


@dataclass(frozen=True)
class Plan:
    """What is compared on one model. rates_of: the model whose rates are taken over, if any."""

    seconds: float
    seeds: int
    train: int
    arms: Sequence[str]
    rates_of: str | None = None
    precision: str = "fp32"


FEW = (PUBLISHED, "balcony", "end_to_end", "ladder+distilled", "lpa", BOTH, CHOSEN)
PLANS = {
    "stories15M": Plan(seconds=20.0, seeds=3, train=256, arms=tuple(ARMS)),
    "smollm2": Plan(
        seconds=60.0,
        seeds=1,
        train=1024,
        arms=FEW,
        rates_of="stories15M",
        precision=fast_precision(),
    ),
}


def rungs_of(model: Any) -> tuple[int, ...]:
    """The numbers of blocks at which all arms are compared, below the last depth."""
    shape: Any = ed.ladder().shape
    depth = ed.as_stream(model).depth
    return tuple(rung for rung in shape.rungs(depth) if rung > 1)


def tiny() -> LlamaForCausalLM:
    """A random model that takes no time."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 6}
    config = LlamaConfig(
        vocab_size=60, num_attention_heads=2, num_key_value_heads=2, bos_token_id=1, **sizes
    )
    return LlamaForCausalLM(config).eval()


def published(name: str) -> Any:
    if name == "tiny":
        return tiny()
    folder = Path(os.environ.get(DATA_VARIABLE, "")) / name
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@dataclass(frozen=True)
class Text:
    """Rows of tokens: to train on, to choose a rate by, and held out."""

    train: Tensor
    valid: Tensor
    held_out: Tensor


def text_for(name: str, model: Any, folder: Path | None) -> Text:
    """The same for all arms; drawn or read once."""
    from safetensors.torch import load_file, save_file

    file = None if folder is None else folder / f"{name}.safetensors"
    if file is not None and file.is_file():
        return Text(**load_file(file))
    if name == "tiny":
        found = Text(*drawn(model, 24, 12, 0).split(8))
    elif name == "stories15M":
        parts = (PLANS[name].train, VALID, HELD_OUT)
        found = Text(*drawn(model, sum(parts), LENGTH, 0).split(parts))
    else:
        tokenizer: Any = load_tokenizer(Path(os.environ[DATA_VARIABLE]) / name)
        counts = {"train": PLANS[name].train, "valid": VALID, "test": HELD_OUT}
        found = Text(*(read(tokenizer, split, count) for split, count in counts.items()))
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        save_file({key: value.contiguous() for key, value in vars(found).items()}, file)
    return found


def drawn(model: Any, rows: int, length: int, seed: int) -> Tensor:
    """Texts of the model's own."""
    words: dict[str, Any] = {"do_sample": True, "temperature": 0.9, "eos_token_id": ()}
    found = []
    for part, count in enumerate([min(64, rows - at) for at in range(0, rows, 64)]):
        start = torch.full((count, 1), model.config.bos_token_id)
        more: dict[str, Any] = {"max_new_tokens": length - 1, "seed": seed + part, **words}
        found.append(ed.generate(model, start, **more).sequences)
    return torch.cat(found)


def read(tokenizer: Any, split: str, rows: int) -> Tensor:
    text = load("wikitext-2", kind=Corpus, split=split).text[: rows * LENGTH * 8]
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return token_blocks(ids, LENGTH).input_ids[:rows]


@torch.no_grad()
def nll(net: Any, texts: Tensor, depths: Sequence[int]) -> list[float]:
    """Per token."""
    stream = ed.as_stream(net)
    sums, count = dict.fromkeys(depths, 0.0), 0
    for rows in texts.split(4):
        states, expected = stream.observe({"input_ids": rows}), rows[:, 1:].flatten()
        count += len(expected)
        for depth in depths:
            z = states.logits(depth)[:, :-1].flatten(0, 1)
            sums[depth] += cross_entropy(z, expected, reduction="sum").item()
    return [total / count for total in sums.values()]


def read_at(net: Any, rungs: Sequence[int]) -> list[int]:
    """The depths that run so many blocks: with a balcony, lower ones."""
    stream = ed.as_stream(net)
    lower = {depth + len(blocks): depth for depth, blocks in stream.exits.items()}
    return [lower.get(rung, rung) for rung in rungs] + [stream.depth]


def drafting(net: Any, prompts: Tensor, new: int, rungs: Sequence[int]) -> dict[str, Any]:
    """Acceptance by the blocks a draft runs, one row at a time."""
    words: dict[str, Any] = {"max_new_tokens": new, "eos_token_id": ()}
    plain = [ed.generate(net, row[None], **words) for row in prompts]
    shown: dict[str, Any] = {}
    for rung, depth in zip(rungs, read_at(net, rungs), strict=False):
        more: dict[str, Any] = {"draft_depth": depth, "draft_always": True, **words}
        found = [ed.generate(net, row[None], **more) for row in prompts]
        right = sum(g.stats.accepted for g in found)
        shown[str(rung)] = {
            "acceptance": right / max(1, sum(g.stats.drafted for g in found)),
            "same_tokens": all(a.tokens == b.tokens for a, b in zip(found, plain, strict=True)),
        }
    return shown


def tuned(
    net: Any, texts: Tensor, steps: int, lr: float, seed: int, precision: str = "fp32"
) -> float:
    """CPU seconds of these steps."""
    size = min(ROWS, len(texts))
    per_epoch = len(texts) // size
    rows: list[dict[str, Tensor]] = []
    for step in range(steps):
        epoch, place = divmod(step, per_epoch)
        order = torch.randperm(len(texts), generator=_seeded(1000 * seed + epoch))
        rows.append({"input_ids": texts[order[place * size : (place + 1) * size]]})
    begin = time.process_time()
    how: dict[str, Any] = {"warmup": 0.1, "clip": 1.0, "shuffle": False, "progress": False}
    ed.fit(net, rows, steps=steps, lr=lr, seed=seed, precision=precision, **how)
    net.eval()
    return time.process_time() - begin


def steps_for(
    make: Callable[[], ed.EveryDepth],
    texts: Tensor,
    seconds: float,
    precision: str = "fp32",
) -> int:
    """How many steps the budget pays for, by the CPU seconds of four on another model."""
    net = make()
    tuned(net, texts, 1, 1e-6, 0, precision)
    return max(2, int(seconds / (tuned(net, texts, 4, 1e-6, 0, precision) / 4)))


def rate_for(
    make: Callable[[], ed.EveryDepth],
    rates: Sequence[float],
    text: Text,
    steps: int,
    rungs: Sequence[int],
) -> float:
    """The rate to tune with, by runs of a quarter of the steps, on validation text.

    Of those that leave the last depth's loss within `TOLERATED` of what it was, the one with the
    lowest mean loss of the rungs; if none does, the smallest.
    """
    found: dict[float, list[float]] = {}
    before = nll(make(), text.valid, [ed.as_stream(make()).depth])[0]
    for rate in rates:
        net = make()
        tuned(net, text.train, max(2, steps // 4), rate, 0)
        found[rate] = nll(net, text.valid, read_at(net, rungs))
    fit = {r: losses for r, losses in found.items() if losses[-1] <= before + TOLERATED}
    return min(fit, key=lambda r: sum(fit[r][:-1])) if fit else min(rates)


def arm(
    model: str,
    name: str,
    seconds: float,
    seed: int,
    lr: float | None,
    run: str | None,
    precision: str = "fp32",
    new_lr: float | None = None,
) -> dict[str, Any]:
    """One way of tuning, and what became of the model. lr: None, to be chosen."""
    plain = published(model)
    text = text_for(model, plain, None if run is None else Path(run))
    rungs = rungs_of(plain)
    how = Tuning(text, rungs, seconds, seed, precision)
    if name == CHOSEN:
        return chosen(plain, how, min(RATES) if lr is None else lr)
    steps, spent, net = 0, 0.0, plain
    if name == BOTH:
        lr, new_lr = lr or min(RATES), new_lr or min(NEW_RATES)
        steps, spent, net = one_after_the_other(plain, how, lr, new_lr)
    elif name != PUBLISHED:
        make: Any = ARMS[name]

        def made() -> ed.EveryDepth:
            torch.manual_seed(seed)
            return make(published(model))

        rates = NEW_RATES if name in NEW_PARAMETERS else RATES
        steps = how.steps(made)
        lr = rate_for(made, rates, text, steps, rungs) if lr is None else lr
        net = made()
        spent = how.tuned(net, steps, lr)
    drafts: dict[str, Any] = {}
    if seed == 0 and model != "smollm2":
        prompts = text.held_out[:PROMPTS, : text.held_out.shape[1] // 8]
        drafts = drafting(net, prompts, 6 if model == "tiny" else NEW, rungs)
    losses = nll(net, text.held_out, read_at(net, rungs))
    found = {"steps": steps, "lr": lr, "cpu_seconds": spent, "nll": losses, "drafting": drafts}
    found |= {} if new_lr is None else {"new_lr": new_lr}
    return {**found, "blocks": [*rungs, ed.as_stream(plain).depth]}


@dataclass(frozen=True)
class Tuning:
    """What all ways have in common."""

    text: Text
    rungs: Sequence[int]
    seconds: float
    seed: int
    precision: str

    def steps(self, make: Callable[[], ed.EveryDepth], share: float = 1.0) -> int:
        """How many a share of the seconds pays for; of the tiny model's always two."""
        small = len(self.text.train) < 16
        texts, seconds = self.text.train, share * self.seconds
        return 2 if small else steps_for(make, texts, seconds, self.precision)

    def tuned(self, net: Any, steps: int, lr: float) -> float:
        return tuned(net, self.text.train, steps, lr, self.seed, self.precision)


def one_after_the_other(
    model: Any, how: Tuning, lr: float, new_lr: float
) -> tuple[int, float, ed.EveryDepth]:
    """Half of the seconds end to end, half for balconies on what came out: steps, seconds, net."""

    def whole() -> ed.EveryDepth:
        return ed.EveryDepth(copy.deepcopy(model).requires_grad_(True), ed.end_to_end())

    def exits(on: Any = model) -> ed.EveryDepth:
        torch.manual_seed(how.seed)
        return _balcony("last")(on)

    first, second = how.steps(whole, 0.5), how.steps(lambda: exits(copy.deepcopy(model)), 0.5)
    net = whole()
    spent = how.tuned(net, first, lr)
    net = exits(net.model)
    return first + second, spent + how.tuned(net, second, new_lr), net


def chosen(model: Any, how: Tuning, lr: float) -> dict[str, Any]:
    """For each rung another model: its blocks chosen by similarity, and tuned with a share of the
    seconds. It has no other depths, and nothing to draft for."""
    rows = [{"input_ids": rows} for rows in how.text.train[:16].split(ROWS)]
    found: list[float | None] = []
    steps, spent = 0, 0.0
    for rung in how.rungs:
        keep = ed.choose_blocks(model, rows, keep=rung, progress=False).keep

        def made(keep: Any = keep) -> ed.EveryDepth:
            cut: Any = ed.at_depth(model, keep=keep)
            return ed.EveryDepth(cut.requires_grad_(True), ed.end_to_end())

        count = how.steps(made, 1 / len(how.rungs))
        net = made()
        spent += how.tuned(net, count, lr)
        steps += count
        found += nll(net, how.text.held_out, [rung])
    found.append(None)
    return {
        "steps": steps,
        "lr": lr,
        "cpu_seconds": spent,
        "nll": found,
        "drafting": {},
        "blocks": [*how.rungs, ed.as_stream(model).depth],
    }


def _seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# -- all of them ----------------------------------------------------------------------------------


def measured(
    model: str,
    plan: Plan,
    run: str,
    seconds: float,
    *,
    only: Sequence[str],
    rates: dict[str, float],
) -> dict[str, Any]:
    """The arms of one model, those in `only` run, if they are not done.

    rates: by kind of parameters; those that are missing are chosen.
    """
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in plan.arms}
    for seed in range(plan.seeds):
        for name in plan.arms if seed == 0 else [n for n in plan.arms if n != PUBLISHED]:
            cell: dict[str, Any] = {
                "model": model,
                "name": name,
                "seconds": seconds,
                "seed": seed,
                "run": run,
                "precision": plan.precision,
            }
            cell["lr"] = None if name == PUBLISHED else rates.get(_kind(name))
            if name == BOTH:
                cell["new_lr"] = rates["new"]
            place = Path(run) / "arms" / model / f"{name.replace(', ', '-')}-{seed}"
            how: dict[str, Any] = {"dry_run": name not in only, "progress": False}
            done = ed.sweep([cell], arm, run=place, **how).rows()
            if not done:
                continue
            keys = ("steps", "lr", "new_lr", "cpu_seconds", "nll", "drafting", "blocks")
            found[name].append({key: done[0][key] for key in keys if key in done[0]})
            if name in CHOOSERS:
                rates.setdefault(_kind(name), done[0]["lr"])
            print(model, name, seed, found[name][-1], flush=True)
    return {"seconds": seconds, "arms": {name: rows for name, rows in found.items() if rows}}


def memory() -> dict[str, float]:
    """Peak MiB of one step of SmolLM2, each way in a process of its own."""
    import subprocess
    import sys

    code = (
        "import resource, sys, torch; sys.argv = sys.argv[:1]; torch.set_num_threads(1); "
        "import pretrained as p, everydepth as ed; "
        "net = p.ARMS[{name!r}](p.published('smollm2').requires_grad_(True)); "
        "rows = torch.randint(9, 999, (8, p.LENGTH)); p.tuned(net, rows, 2, 1e-6, 0); "
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)"
    )
    here: dict[str, Any] = {
        "cwd": Path(__file__).parent,
        "capture_output": True,
        "text": True,
        "check": True,
    }
    found: dict[str, float] = {}
    for name in ("end_to_end", "ladder+distilled", "lpa", "balcony"):
        words = [sys.executable, "-c", code.format(name=name)]
        found[name] = float(subprocess.run(words, **here).stdout.split()[-1])
    return found


def as_runs(figures: dict[str, Any], folder: Path) -> None:
    """The recorded figures as a run for each model, to look at with `everydepth app FOLDER`."""
    for model, found in figures["models"].items():
        means = {
            (name, blocks): sum(seen) / len(seen)
            for name, rows in found["arms"].items()
            for place, blocks in enumerate(rows[0]["blocks"])
            if None not in (seen := [row["nll"][place] for row in rows])
        }

        def looked_up(objective: str, blocks: int, means: Any = means) -> dict[str, float]:
            return {"nll": means[objective, blocks]}

        cells = [{"objective": name, "blocks": blocks} for name, blocks in means]
        ed.sweep(cells, looked_up, run=folder / model, progress=False)


# -- the page -------------------------------------------------------------------------------------


def page(figures: dict[str, Any]) -> str:
    """docs/objectives.md: words of the template, tables of the figures."""
    tables = {model: _losses(found) for model, found in figures["models"].items()}
    stories = figures["models"]["stories15M"]["arms"]
    before = stories[PUBLISHED][0]["nll"][-1]
    rungs = list(stories[PUBLISHED][0]["drafting"])
    draft = [["objective", *(f"{d} blocks" for d in rungs), "last depth before → after"]]
    for name, rows in stories.items():
        seen = rows[0]["drafting"]
        if seen:
            said = [f"{100 * seen[d]['acceptance']:.0f} %" for d in rungs]
            draft.append([name, *said, f"{before:.3f} → {rows[0]['nll'][-1]:.3f}"])
    peaks = figures.get("memory", {})
    least = peaks.get("end_to_end", 1.0)
    shown = [["objective", "peak MiB", "of end to end"]]
    shown += [[name, f"{mib:,.0f}", f"{mib / least:.2f}"] for name, mib in peaks.items()]
    plan = PLANS["smollm2"]
    machine = figures["machine"]
    return TEMPLATE.read_text("utf-8").format(
        stories=tables["stories15M"],
        smollm2=tables.get("smollm2", "Not measured yet."),
        story_seconds=f"{figures['models']['stories15M']['seconds']:.0f}",
        smollm2_seconds=f"{figures['models'].get('smollm2', vars(plan))['seconds']:.0f}",
        drafting=_markdown(draft),
        memory=_markdown(shown) if peaks else "Not measured yet.",
        scratch=_from_scratch(json.loads((RESULTS / "quality.json").read_text())["cells"]),
        tokens=f"{ROWS * LENGTH}",
        machine=f"{machine['devices'][0]}, torch {machine['versions']['torch']}, {machine['date']}",
    )


def _losses(found: dict[str, Any]) -> str:
    arms: dict[str, Any] = found["arms"]
    blocks = arms[PUBLISHED][0]["blocks"]
    before = arms[PUBLISHED][0]["nll"][-1]
    title = ["objective", "steps", "rate", *(f"{count} blocks" for count in blocks), "last, change"]
    rows = [title]
    for name, seeds in arms.items():
        values = [_spread([row["nll"][i] for row in seeds]) for i in range(len(blocks))]
        after = [row["nll"][-1] for row in seeds if row["nll"][-1] is not None]
        change = f"{sum(after) / len(after) - before:+.3f}" if after else "-"
        rates = (seeds[0]["lr"], seeds[0].get("new_lr"))
        rate = ", ".join(f"{rate:.0e}" for rate in rates if rate is not None) or "-"
        rows.append([name, str(seeds[0]["steps"]), rate, *values, change])
    return _markdown(rows)


def _from_scratch(cells: list[dict[str, Any]]) -> str:
    """Accuracy at half depth and at the last; the last against end-to-end, paired by seed."""
    models = ("vit", "resnet")
    words = ("half", "last", "last, change")
    rows = [["objective", *(f"{model}, {word}" for model in models for word in words)]]
    found = {(c["model"], c["objective"], c["seed"]): 100 * np.array(c["accuracy"]) for c in cells}
    for name in dict.fromkeys(c["objective"] for c in cells):
        row = [name]
        for model in models:
            seeds = [s for m, o, s in found if (m, o) == (model, name)]
            if len(seeds) < 3:
                row += ["-"] * len(words)
                continue
            mean = np.mean([found[model, name, s] for s in seeds], 0)
            base = [found[model, "end_to_end", s][-1] for s in seeds]
            change = np.array([found[model, name, s][-1] for s in seeds]) - base
            half = interval(change)[1] - change.mean()
            ours = "-" if name == "end_to_end" else f"{change.mean():+.2f} ± {half:.2f}"
            row += [f"{mean[len(mean) // 2 - 1]:.2f}", f"{mean[-1]:.2f}", ours]
        if set(row[1:]) != {"-"}:
            rows.append(row)
    return _markdown(rows)


def _spread(values: Sequence[float | None]) -> str:
    """The mean, and half of what lies between the smallest and the largest."""
    known = [value for value in values if value is not None]
    if not known:
        return "-"
    middle = f"{sum(known) / len(known):.2f}"
    return middle if len(known) == 1 else f"{middle} ± {(max(known) - min(known)) / 2:.2f}"


def _markdown(rows: list[list[str]]) -> str:
    ruled = [rows[0], ["---", *("---:" for _ in rows[0][1:])], *rows[1:]]
    return "\n".join(f"| {' | '.join(row)} |" for row in ruled)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=tuple(PLANS), action="append")
    parser.add_argument("--arm", choices=tuple(ARMS), action="append", help="Run these only.")
    parser.add_argument("--seconds", type=float)
    parser.add_argument("--run", default="runs/pretrained")
    parser.add_argument("--collect", action="store_true")
    parser.add_argument("--memory", action="store_true", help="Measure that of a step instead.")
    parser.add_argument("--page", action="store_true")
    parser.add_argument("--runs", help="Write the figures as runs, for `everydepth app`.")
    given = parser.parse_args()
    torch.set_num_threads(1)
    if SMOKE:
        found = {name: arm("tiny", name, 1.0, 0, None, None) for name in ARMS}
        print(json.dumps(found, indent=2))
        return
    if given.collect or given.memory or not (given.page or given.runs):
        measure(given)
    figures = json.loads((RESULTS / "pretrained.json").read_text())
    if given.page:
        PAGE.write_text(page(figures), "utf-8")
    if given.runs:
        as_runs(figures, Path(given.runs))


def measure(given: argparse.Namespace) -> None:
    """Run what is asked for; figures of other models and arms stay as they were recorded."""
    path = RESULTS / "pretrained.json"
    figures: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    figures |= {"rows": ROWS, "tokens_a_row": LENGTH}
    models: dict[str, Any] = figures.setdefault("models", {})
    for model in given.model or (() if given.memory else PLANS):
        plan = PLANS[model]
        source = plan.rates_of or (model if given.arm and model in models else None)
        rates = {} if source is None else rates_in(models[source])
        seconds = plan.seconds if given.seconds is None else given.seconds
        only = () if given.collect else given.arm or plan.arms
        found = measured(model, plan, given.run, seconds, only=only, rates=rates)
        known = models.get(model, {"seconds": None})
        before = known["arms"] if known["seconds"] == seconds else {}
        arms = {name: (before | found["arms"]).get(name) for name in plan.arms}
        found["arms"] = {name: rows for name, rows in arms.items() if rows}
        models |= {model: found} if found["arms"] else {}
    if given.memory:
        figures["memory"] = memory()
    record("pretrained", {key: found for key, found in figures.items() if key != "machine"})


def rates_in(found: dict[str, Any]) -> dict[str, float]:
    """The rates that were chosen on a model, by kind of parameters."""
    return {_kind(name): found["arms"][name][0]["lr"] for name in CHOOSERS}


def _kind(name: str) -> str:
    return "new" if name in NEW_PARAMETERS else "model"


if __name__ == "__main__":
    main()
