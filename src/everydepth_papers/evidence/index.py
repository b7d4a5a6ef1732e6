"""Every numbered table and figure of the five papers: which recipe covers it, or why none does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from everydepth_papers.evidence.discover import recipe_files
from everydepth_papers.evidence.reproduction import Reproduction
from everydepth_papers.paper import PAPERS
from everydepth_papers.verdict import VERDICTS

NUMBERED: Mapping[str, Mapping[str, int]] = {
    "progressive": {"Table": 5, "Figure": 8},
    "expansion": {"Table": 6, "Figure": 3},
    "tracing": {"Table": 1, "Figure": 23},
    "one_layer": {"Table": 0, "Figure": 0},
    "residual": {"Table": 2, "Figure": 26},
}
"""How many each paper has; the fourth prints a theorem and no experiment."""


@dataclass(frozen=True, kw_only=True)
class Item:
    """Some tables or figures of a paper. recipes: that cover them. why: there is none, or what is
    missing of it."""

    paper: str
    kind: str
    numbers: Sequence[int]
    shows: str
    recipes: Sequence[str] = ()
    why: str = ""


def _items(paper: str, *rows: tuple[str, Iterable[int], str, str, str]) -> list[Item]:
    return [
        Item(
            paper=paper,
            kind=kind,
            numbers=tuple(numbers),
            shows=shows,
            recipes=tuple(recipes.split()),
            why=why,
        )
        for kind, numbers, shows, recipes, why in rows
    ]


DRAWING = "a drawing of the method, nothing measured"
SMALL = "small networks in place of the paper's pretrained ones"
BOTH = "residual_removal_language residual_removal_vision"
INDEX: tuple[Item, ...] = (
    *_items(
        "progressive",
        ("Table", [1], "surfaces", "progressive_table1 progressive_table1_grid", ""),
        ("Table", [2, 3], "image classifiers, last layer", "progressive_tables2_3", SMALL),
        ("Table", [4], "deep ViTs, every second layer", "progressive_table4", SMALL),
        ("Table", [5], "a pretrained network fine-tuned", "progressive_table5", SMALL),
        ("Figure", [1, 8], "the trajectory; a transformer layer", "", DRAWING),
        ("Figure", [2, 3], "surfaces after each layer, and in training",
         "progressive_table1_grid", ""),
        ("Figure", [4, 5], "accuracy against depth", "progressive_tables2_3", SMALL),
        ("Figure", [6], "GLUE, accuracy against depth", "progressive_figure6", SMALL),
        ("Figure", [7], "perplexity against depth", "progressive_figure7", SMALL),
    ),
    *_items(
        "expansion",
        ("Table", [1], "related work", "", "a comparison in words, nothing measured"),
        ("Table", [2], "exponents by coupling of depth and width", "expansion_appendix_o",
         "its cells are lost; the formula against the recursion itself"),
        ("Table", [3, 4, 5], "sizes of published models", "expansion_appendix_o", ""),
        ("Table", [6], "LiGO beside the jumpboard", "", "a comparison in words, nothing measured"),
        ("Figure", [1, 2, 3], "covariance of activation gradients; signal and test loss against "
         "depth and width", "expansion_figures1_3",
         "3 depths and 2 widths; Figure 1 also in the claims covariance-diagonal and "
         "covariance-controlled; all 153 cells, 765 networks, are the paper preset"),
    ),
    *_items(
        "tracing",
        ("Table", [1], "parameters that one head saves", "tracing_table1", ""),
        ("Figure", [*range(1, 8), 10, 11, *range(14, 18)], "aligned vision transformers",
         "tracing_vision", SMALL),
        ("Figure", [8], "AlignedBERT on GLUE", "tracing_glue", SMALL),
        ("Figure", [9], "AlignedGPT", "tracing_gpt", SMALL),
        ("Figure", [12], "COS against CKA without skips", "tracing_skips", ""),
        ("Figure", [13], "aligned training and elastic inference", "", DRAWING),
        ("Figure", [18], "a detector's decoder", "tracing_detr", "made-up scenes, not COCO"),
        ("Figure", [19, 20], "saturation of a LLaMA's next token", "tracing_llama", SMALL),
        ("Figure", [21], "text written at each layer", "tracing_gpt",
         "coherence and diversity only; texts are not printed"),
        ("Figure", [22, 23], "the towers of CLIP", "tracing_clip",
         "a CLIP trained on Fashion-MNIST"),
    ),
    *_items(
        "residual",
        ("Table", [1], "an overview of eight models", "", "a list, nothing measured"),
        ("Table", [2], "spread of the query weights", "residual_table2",
         "weights of two of the eight models are at hand"),
        ("Figure", [1, 2, *range(5, 11), *range(14, 25)],
         "memorization, gradients, spreads, margins", BOTH, SMALL),
        ("Figure", [3, 11], "more wrong labels", "residual_noise", SMALL),
        ("Figure", [4, 12, 13], "labels that are written", "residual_generative", SMALL),
        ("Figure", [25, 26], "gradients and margins over epochs", "residual_removal_vision", SMALL),
    ),
)  # fmt: skip


def counted(found: Sequence[Reproduction]) -> str:
    """`small: 12 holds, 3 inconclusive`: the statements of the largest preset that was recorded."""
    if not found:
        return "not run"
    last = found[-1]
    seen = Counter(row.measured for row in last.rows)
    words = ", ".join(f"{seen[verdict]} {verdict}" for verdict in VERDICTS if seen[verdict])
    return f"{last.about['preset']}, {last.about['seeds']} seed(s): {words or 'figures only'}"


def index_page(results: Mapping[str, Sequence[Reproduction]]) -> str:
    """The page. results: what is recorded of each recipe."""
    lines = [
        "# Index of tables and figures",
        "",
        "Written by `everydepth reproduce --docs docs/results.md`; do not edit. Verdicts are those "
        "of the recipe's statements in words, as the [tables](tables.md) give them. The *paper* "
        "preset of every recipe executes at toy size in the tests; none was run in full.",
        "",
        "| paper | item | shows | recipe | run and verdicts | remark |",
        "|---|---|---|---|---|---|",
    ]
    for item in INDEX:
        plural = "s" if len(item.numbers) > 1 else ""
        name = f"{item.kind}{plural} {', '.join(map(str, item.numbers))}"
        recipes = "<br>".join(f"`{recipe}`" for recipe in item.recipes) or "-"
        runs = "<br>".join(counted(results.get(recipe, ())) for recipe in item.recipes) or "-"
        cells = (PAPERS[item.paper].name, name, item.shows, recipes, runs, item.why)
        lines.append("| " + " | ".join(cells) + " |")
    lines.append(
        f"| {PAPERS['one_layer'].name} | no numbered table or figure | the theorem | `one_layer` | "
        f"{counted(results.get('one_layer', ()))} | the construction is ours: no text of the "
        "paper's proof was at hand |"
    )
    return "\n".join([*lines, ""])


def unknown(recipes: Path | None = None) -> set[str]:
    """Recipes that the index names but that do not exist."""
    return {name for item in INDEX for name in item.recipes} - set(recipe_files(recipes))
