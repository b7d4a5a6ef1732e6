"""Saturation of a LLaMA's next token, layer by layer: Figures 19 and 20."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from everydepth_papers.evidence import Cell, Finished, Preset, Recipe, Row, published
from everydepth_papers.evidence.rows import holds_in, numbers
from everydepth_papers.evidence.texts import pretrained

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from torch import nn

PUBLISHED = published(__file__)
STEPS = PUBLISHED["steps"]
# The small models know stories only.
STORIES = (
    "Once upon a time, there was a little girl named Lily",
    "One day, Tom found a big red ball in the park",
    "The sun was hot and the dog wanted",
    "Mia and Ben were playing with their toys when",
    "In the forest there lived an old bear who",
    "Sara was sad because she lost",
    "The boat sailed across the blue sea and",
    "Every morning, the farmer went to",
)


def tiny() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=257, num_hidden_layers=4, **sizes))


def large(width: int, layers: int, heads: int, inner: int, tied: bool) -> nn.Module:
    """The sizes of LLaMA 3, to be counted."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=128_256,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        intermediate_size=inner,
        tie_word_embeddings=tied,
    )
    return LlamaForCausalLM(config)


def model_and_tokenizer(name: str) -> tuple[Any, Any]:
    if name == "tiny":
        from everydepth.data.byte_tokens import byte_tokenizer

        return tiny(), byte_tokenizer()
    return pretrained(name)


def cell(settings: Cell, seed: int, folder: Path) -> Mapping[str, Any]:
    """The grid of every prompt's greedy continuation; nothing is random but the tiny model."""
    import torch

    import everydepth as ed

    torch.manual_seed(seed)
    model, tokenizer = model_and_tokenizer(settings["model"])
    grids = [
        ed.token_grid(model, tokenizer, prompt, new_tokens=settings["steps"], top=1)
        for prompt in settings["prompts"]
    ]
    # Column t is what follows token t, so the last column continues beyond the text.
    written = [grid.meta["prompt_tokens"] - 1 for grid in grids]
    final = np.concatenate(
        [g.arrays["saturated_at"][w:-1] for g, w in zip(grids, written, strict=True)]
    )
    first, start = grids[0].arrays, written[0]
    depth = len(first["depth"]) - 1
    return {
        "depth": depth,
        "tokens": len(final),
        "saturated": np.bincount(final, minlength=depth + 1).tolist(),
        "text": first["text"][:, start:-1].tolist(),
        "probability": numbers(first["probability"][:, start:-1], 3),
        "saturated_at": first["saturated_at"][start:-1].tolist(),
    }


def early(result: Finished) -> float:
    """The share of tokens that are final before the last layer."""
    return sum(result["saturated"][:-1]) / result["tokens"]


def rows(results: Sequence[Finished]) -> list[Row]:
    found: list[Row] = []
    for result in results:
        name, depth = result.cell["model"], result["depth"]
        counts = np.array(result["saturated"])
        where = f"greedy tokens of {len(result.cell['prompts'])} prompts"
        note = f"{result['tokens']} {where}, {depth} layers"
        mean = float(counts @ np.arange(depth + 1) / counts.sum())
        half = float(counts[: depth // 2 + 1].sum() / counts.sum())
        found += [
            Row(
                f"{name}: share final before the last layer",
                None,
                round(early(result), 4),
                note=note,
            ),
            Row(f"{name}: mean saturation depth", None, round(mean, 3), note=note),
            Row(f"{name}: share final by half depth", None, round(half, 4), note=note),
        ]
    return [
        *found,
        holds_in(
            "Fig. 19: saturation before the last layer occurs",
            PUBLISHED["events"],
            list(results),
            lambda r: early(r) >= 0.05,
            "of at least 5 % of the tokens",
            unit="models",
        ),
        holds_in(
            "Fig. 20: most tokens are final before the last layer",
            PUBLISHED["grid"],
            list(results),
            lambda r: early(r) > 0.5,
            "the paper gives no share",
            unit="models",
        ),
    ]


def figure(results: Sequence[Finished]) -> Figure:
    """The grid of the first prompt, one panel per model: text, and its probability as color."""
    from matplotlib.figure import Figure

    page = Figure(figsize=(16, 3.4 * len(results)), layout="constrained")
    panels = np.atleast_1d(page.subplots(len(results), 1))
    for axis, result in zip(panels, results, strict=True):
        chance = np.array(result["probability"])
        drawn = axis.imshow(chance, aspect="auto", origin="lower", cmap="RdBu", vmin=0, vmax=1)
        for layer, line in enumerate(result["text"]):
            for step, word in enumerate(line):
                shown = "".join(c if c.isprintable() and ord(c) < 0x2000 else "·" for c in word)
                final = layer >= result["saturated_at"][step]
                axis.text(
                    step,
                    layer,
                    shown[:9].replace("$", r"\$"),
                    ha="center",
                    va="center",
                    fontsize=7,
                    fontweight="bold" if final else "normal",
                    color="white" if abs(chance[layer, step] - 0.5) > 0.35 else "black",
                )
        axis.set(title=f"{result.cell['model']} (bold: saturated)", ylabel="depth", xlabel="step")
        page.colorbar(drawn, ax=axis, label="probability")
    return page


def cells(prompts: Sequence[str], steps: int, *models: str) -> list[Cell]:
    return [{"model": name, "prompts": list(prompts), "steps": steps} for name in models]


RECIPE = Recipe(
    name="tracing_llama",
    title="Saturation of next-token predictions",
    paper="tracing",
    item="Figures 19 and 20",
    presets={
        "smoke": Preset(cells=cells(STORIES[:1], 4, "tiny"), cost="1 s"),
        "small": Preset(
            cells=cells(STORIES, STEPS, "stories260K", "stories15M"),
            cost="10 s, 1 core",
            needs=("stories260K", "stories15M"),
        ),
        "paper": Preset(
            cells=cells(
                (PUBLISHED["prompt"],), STEPS, "meta-llama/Llama-3.2-3B", "meta-llama/Llama-3.1-8B"
            ),
            cost="2 min on a GPU of 40 GB, or a machine with 64 GB",
            models={
                "meta-llama/Llama-3.2-3B": lambda: large(3072, 28, 24, 8192, True),
                "meta-llama/Llama-3.1-8B": lambda: large(4096, 32, 32, 14336, False),
            },
            memory_gib=34.0,
        ),
    },
    cell=cell,
    rows=rows,
    figure=figure,
    about=(
        "Small: two real LLaMAs trained on TinyStories, of 5 and 6 layers, on story prompts, "
        f"greedy, {STEPS} steps as in Figure 20. The paper calls LLaMA3.2 3B a 24-layer model in "
        "Figure 19 and a 28-layer one in Figure 20; it has 28. Greedy decoding is not random, so "
        "there is one seed."
    ),
)
