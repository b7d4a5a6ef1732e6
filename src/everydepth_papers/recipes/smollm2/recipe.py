"""SmolLM2-135M from its published weights to a checkpoint that is usable at every rung."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from everydepth_papers.evidence import Cell, Finished, Preset, Recipe, Row, in_stages, later
from everydepth_papers.evidence.networks import unloaded
from everydepth_papers.evidence.rows import steps_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def rows(results: Sequence[Finished]) -> list[Row]:
    first, found = results[0], []
    for result in results:
        after = f"after {result['cpu_seconds'] / 60:.1f} min"
        steps = f"{steps_of(result)}, {result['tokens']} held-out tokens"
        for blocks, nll, agree in zip(
            result["blocks"], result["nll"], result["agreement"], strict=True
        ):
            note = f"{steps}; says what the last depth says: {100 * agree:.1f} %"
            found.append(Row(f"NLL, {blocks} blocks, {after}", None, round(nll, 3), note=note))
        if "blocks dropped" in result.values:
            kept = result["blocks dropped"]
            found += [
                Row(f"NLL, {count} blocks chosen by similarity, untrained", None, round(nll, 3))
                for count, nll in zip(kept["kept"], kept["nll"], strict=True)
            ]
    same = sum(result["logits"] == first["logits"] for result in results)
    found.append(
        Row(
            "the last depth is the published model, bit for bit",
            None,
            "holds" if same == len(results) else "does not hold",
            note=f"{same} of {len(results)} cells",
        )
    )
    for result in results:
        minutes = f"after {result['cpu_seconds'] / 60:.1f} min"
        for name, ways in result.values.get("decoding", {}).items():
            found += _speeds(ways, f"{name} row{'s' * (name != '1')}, {minutes}")
    return found


def _speeds(ways: Mapping[str, Any], what: str) -> list[Row]:
    theirs, ours = ways["transformers"]["cpu_seconds"], ways["plain"]["cpu_seconds"]
    found: list[Row] = []
    for way, seen in ways.items():
        if way == "transformers":
            continue
        same_tokens = "same tokens" if seen["same_tokens"] else "other tokens"
        note = f"{same_tokens}; {ours / seen['cpu_seconds']:.2f}x our plain decoding"
        if way != "plain":
            note += f"; {100 * seen['acceptance']:.0f} % of the drafts accepted"
        speed = round(theirs / seen["cpu_seconds"], 3)
        found.append(Row(f"{way}, {what}, speed over transformers' greedy", None, speed, note=note))
    return found


def figure(results: Sequence[Finished]) -> Figure:
    """Loss by the number of blocks that run, before and after; and against minutes of tuning."""
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(9.0, 3.6), layout="constrained")
    left, right = drawn.subplots(1, 2)
    before, tuned = results[0], results[1:]
    blocks, last = before["blocks"], before["nll"][-1]
    left.plot(blocks, before["nll"], "o:", color="#888888", label="published, its first blocks")
    if "blocks dropped" in before.values:
        kept = before["blocks dropped"]
        shown = "published, as many chosen by similarity"
        left.plot(kept["kept"], kept["nll"], "s--", color="#c77700", label=shown)
    for result, color in [*zip(tuned[:1], ["#7fb0e6"], strict=False), (results[-1], "#0b5cad")]:
        label = f"balconies, {_minutes(result)} on one core"
        left.plot(blocks, result["nll"], "o-", color=color, label=label)
    left.set(xlabel=f"blocks that run, of {blocks[-1]}", ylabel="NLL per token, held-out text")
    left.legend(fontsize=8)
    minutes = [result["cpu_seconds"] / 60 for result in tuned]
    for place, count in enumerate(blocks[:-1]):
        values = [result["nll"][place] for result in tuned]
        right.plot(minutes, values, "o-", label=f"{count} blocks")
    right.axhline(last, color="black", linestyle="--", label=f"{blocks[-1]} blocks, untouched")
    right.set(xlabel="CPU minutes of tuning, one thread")
    right.legend(fontsize=8)
    left.set_ylim(bottom=0)
    return drawn


def _minutes(result: Finished) -> str:
    seconds = result["cpu_seconds"]
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


DECODE: Cell = {"decode": True}
SMALL: Cell = {
    "model": "smollm2", "data": "wikitext-2", "rungs": [2, 5, 12, 20], "rows": 4,
    "length": 128, "lr": 1e-3, "precision": "fast", "held_out": 32, "new": 64, "save_every": 30,
}  # fmt: skip
SMOKE: Cell = {
    "model": "tiny", "data": "nonsense", "rungs": [1, 4], "rows": 2, "length": 16,
    "lr": 1e-3, "precision": "fp32", "held_out": 8, "new": 4, "save_every": 1,
}  # fmt: skip

FIRST = (0, 30, 90, 240)
OWN: Cell = {**SMALL, "own": {"after": FIRST[-1], "rows": 512}}
MINUTES = [
    *in_stages(FIRST, DECODE, **SMALL),
    *in_stages((*FIRST, 450, 900), DECODE, **OWN)[len(FIRST) :],
]
HOUR = in_stages((*FIRST, 450, 900, 1500, 2400), DECODE, **OWN)[len(MINUTES) :]

RECIPE = Recipe(
    name="smollm2",
    title="SmolLM2-135M, usable at every rung",
    item="A pretrained model",
    presets={
        "smoke": Preset(
            cells=in_stages((0, 1, 2), DECODE, own={"after": 1, "rows": 4}, **SMOKE), cost="2 s"
        ),
        "small": Preset(
            cells=MINUTES,
            cost="35 min of one core",
            needs=("smollm2", "wikitext-2"),
            memory_gib=4.0,
        ),
        "paper": Preset(
            cells=[*MINUTES, *HOUR],
            cost="90 min of one core",
            needs=("smollm2", "wikitext-2"),
            models={"smollm2": partial(unloaded, "HuggingFaceTB/SmolLM2-135M", "CausalLM")},
            memory_gib=4.0,
        ),
    },
    cell=later("balconies:cell"),
    rows=rows,
    figure=figure,
    about=(
        "The model is frozen; at depths 2, 5, 12 and 20 of its 30 blocks copies of the last three "
        "learn to say what the last depth says (`ed.balcony`), on WikiText-2, 512 tokens per step, "
        "in bfloat16 if the CPU has instructions for it; "
        "after 240 steps half of the text is the model's own: 512 rows that it wrote greedily "
        "after 32 tokens of WikiText-2, whose cost is part of the CPU minutes. "
        "So 5, 8, 15 and 23 blocks run; before tuning, that many of the published model. NLL is "
        "that of the first 4,096 tokens of the test text, in rows of 128. `smollm2` under "
        "EVERYDEPTH_DATA is SmolLM2-135M-Instruct as `save_pretrained` writes it; the figures here "
        "are of its 4-bit GGUF file, read back as float32. The run directory has a checkpoint and "
        "a model card of every rung. small: 900 steps of tuning; paper: 2,400, about an hour; with "
        "the same --run the one goes on where the other stopped."
    ),
)
