"""Every numbered table and figure of the five papers: which recipe covers it, or why none does."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from everydepth_papers.evidence.discover import recipe_files
from everydepth_papers.evidence.recipe import Row
from everydepth_papers.evidence.reproduction import Reproduction
from everydepth_papers.paper import PAPERS
from everydepth_papers.verdict import VERDICTS, Verdict

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
WORDS = "a comparison in words, nothing measured"
FORMULAS = "its cells are lost; the formula against the recursion itself"
SURFACES = "progressive_table1 progressive_table1_grid"
BOTH = "residual_removal_language residual_removal_vision"
INDEX: tuple[Item, ...] = (
    *_items(
        "progressive",
        ("Table", [1], "surfaces", SURFACES, "surfaces are ours: the paper's formulas are lost"),
        ("Table", [2], "ViTs, last layer", "progressive_tables2_3", "a narrow ViT of 6 blocks"),
        ("Table", [3], "ResNets, last layer", "progressive_tables2_3", "a narrow ResNet-14"),
        ("Table", [4], "deep ViTs, every second layer", "progressive_table4",
         "12 narrow blocks, Fashion-MNIST in place of ImageNet"),
        ("Table", [5], "a pretrained network fine-tuned", "progressive_table5",
         "a ResNet-32 on CIFAR-10 in place of DeiT"),
        ("Figure", [1, 8], "the trajectory; a transformer layer", "", DRAWING),
        ("Figure", [2], "the surface after each layer", "progressive_table1", ""),
        ("Figure", [3], "error of each layer in training", SURFACES, ""),
        ("Figure", [4], "ViTs, accuracy against depth", "progressive_tables2_3", ""),
        ("Figure", [5], "ResNets, accuracy against depth", "progressive_tables2_3", ""),
        ("Figure", [6], "GLUE, accuracy against depth", "progressive_figure6",
         "a language model of 260,000 parameters learns one of four tasks"),
        ("Figure", [7], "perplexity against depth", "progressive_figure7",
         "260,000 parameters in place of Qwen2-0.5B"),
    ),
    *_items(
        "expansion",
        ("Table", [1], "related work", "", WORDS),
        ("Table", [2], "exponents by coupling of depth and width", "expansion_appendix_o",
         FORMULAS),
        ("Table", [3], "depths and widths of GPT-3's sizes", "expansion_appendix_o", ""),
        ("Table", [4], "tokens of large language models", "expansion_appendix_o", ""),
        ("Table", [5], "exponents of compute-optimal training", "expansion_appendix_o", ""),
        ("Table", [6], "LiGO beside the jumpboard", "", WORDS),
        ("Figure", [1], "covariance of activation gradients", "expansion_figures1_3",
         "also the claims covariance-diagonal and covariance-controlled"),
        ("Figure", [2], "signal against depth", "expansion_figures1_3",
         "3 depths, 2 widths; the paper preset has all 153, 765 networks"),
        ("Figure", [3], "test loss against depth and width", "expansion_figures1_3", "as Figure 2"),
    ),
    *_items(
        "tracing",
        ("Table", [1], "parameters that one head saves", "tracing_table1", ""),
        *(
            ("Figure", numbers, shows, "tracing_vision", "a ViT of 6 blocks, Fashion-MNIST")
            for numbers, shows in (
                ([1], "aligned training: similarity, accuracy, saturation"),
                ([2], "similarity of layers by COS and CKA"),
                ([3], "saturation events"),
                ([4], "aligned training, one head or several"),
                ([5], "effective depth, convergence"),
                ([6], "one head against a head per layer"),
                ([7], "samples that exit at each layer"),
                ([10], "COS by sample"),
                ([11], "adjacent layers, norm ratios"),
                ([14], "a cosine regularizer"),
                ([15], "uniform weights"),
                ([16], "separation of classes"),
                ([17], "transfer and shifted data"),
            )
        ),
        ("Figure", [8], "AlignedBERT on GLUE", "tracing_glue", "MiniLM in place of BERT-base"),
        ("Figure", [9], "AlignedGPT", "tracing_gpt", "260,000 parameters in place of GPT-2"),
        ("Figure", [12], "COS against CKA without skips", "tracing_skips", ""),
        ("Figure", [13], "aligned training and elastic inference", "", DRAWING),
        ("Figure", [18], "a detector's decoder", "tracing_detr", "synthetic scenes, not COCO"),
        ("Figure", [19], "saturation in LLaMA", "tracing_llama", "15 million parameters"),
        ("Figure", [20], "a LLaMA's next token at each layer", "tracing_llama", "as Figure 19"),
        ("Figure", [21], "text written at each layer", "tracing_gpt",
         "coherence and diversity only; texts are not printed"),
        ("Figure", [22, 23], "the towers of CLIP", "tracing_clip",
         "a CLIP trained on Fashion-MNIST"),
    ),
    *_items(
        "residual",
        ("Table", [1], "an overview of eight models", "", "a list, nothing measured"),
        ("Table", [2], "spread of the query weights", "residual_table2",
         "weights of one of the eight models, and of two others"),
        ("Figure", [1, 2, 10], "memorization and accuracy without a layer's skips", BOTH, ""),
        ("Figure", [3, 11], "more wrong labels", "residual_noise", "digits"),
        ("Figure", [4, 12], "labels written as text", "residual_generative",
         "260,000 parameters, which hardly learn the task"),
        ("Figure", [13], "skips scaled by c", "residual_removal_language",
         "of the classifier, not of the generative task"),
        ("Figure", [5, 15], "gradient norms by layer", BOTH, ""),
        ("Figure", [6, *range(16, 23)], "spread of activations and weights", BOTH, ""),
        ("Figure", [7, 14], "errors of learned and memorized samples", BOTH, ""),
        ("Figure", [8, 23], "output margins", BOTH, ""),
        ("Figure", [9, 24], "gradients, margins and accuracy together", BOTH, ""),
        ("Figure", [25], "gradients over epochs", "residual_removal_vision", ""),
        ("Figure", [26], "margins over epochs", "residual_removal_vision", ""),
    ),
)  # fmt: skip


MENTIONED = re.compile(r"\b(Fig\.|Table) ((?:(?:, |/)?\d+[a-z]?(?![\d%]))+)")


def mentioned(quantity: str) -> set[tuple[str, int]]:
    """What of its paper a row is about, as its first words say.

    >>> from everydepth_papers.evidence.index import mentioned
    >>> sorted(mentioned("Fig. 1b, 4b: accuracy")), mentioned("Table 2: 5 of Fig. 3")
    ([('Figure', 1), ('Figure', 4)], {('Table', 2)})
    """
    found = MENTIONED.search(quantity.split(":")[0])
    if found is None:
        return set()
    kind = "Table" if found[1] == "Table" else "Figure"
    return {(kind, int(number)) for number in re.findall(r"\d+", found[2])}


def about(item: Item, row: Row) -> bool:
    """Whether a row is about an item, and not about another one of its recipe."""
    return bool(mentioned(row.quantity) & {(item.kind, number) for number in item.numbers})


def counted(found: Sequence[Reproduction], item: Item | None = None) -> str:
    """`small, 3 seeds: 12 hold, 3 inconclusive`: the statements on the item (on all, if None) of
    the largest preset that was recorded."""
    if not found:
        return "not run"
    last = found[-1]
    seen = Counter(row.measured for row in last.rows if item is None or about(item, row))
    words = ", ".join(f"{seen[v]} {_plural(v, seen[v])}" for v in VERDICTS if seen[v])
    seeds = last.about["seeds"]
    size = f"{last.about['preset']}, {seeds} seed{'' if seeds == 1 else 's'}"
    if "planned" in last.about:
        size += f", {len(last.about['cells'])} of {last.about['planned']} cells"
    return f"{size}: {words or 'figures only'}"


def _plural(verdict: Verdict, count: int) -> str:
    several = {"holds": "hold", "does not hold": "do not hold"}
    return verdict if count == 1 else several.get(verdict, verdict)


def index_page(results: Mapping[str, Sequence[Reproduction]]) -> str:
    """The page. results: what is recorded of each recipe."""
    lines = [
        "# Index of tables and figures",
        "",
        "Written by `everydepth reproduce --docs docs/results.md`; do not edit. Every numbered "
        "table and figure of the five papers: the recipe that covers it, and the verdicts on what "
        "the paper says of it, one per statement, as the [tables](tables.md) give them with their "
        "premises. The *paper* preset of every recipe executes at toy size in the tests; none was "
        "run in full.",
        "",
    ]
    for key, paper in PAPERS.items():
        lines += [
            f"## {paper.name}",
            "",
            "| item | shows | verdicts | remark |",
            "|---|---|---|---|",
        ]
        lines += [_line(item, results) for item in INDEX if item.paper == key]
        if key == "one_layer":
            lines.append(
                "| no numbered table or figure | the theorem | `one_layer`: "
                f"{counted(results.get(key, ()))} | the construction is ours: the text of "
                "the paper's proof was not available |"
            )
        lines.append("")
    return "\n".join(lines)


def _line(item: Item, results: Mapping[str, Sequence[Reproduction]]) -> str:
    plural = "s" if len(item.numbers) > 1 else ""
    name = f"{item.kind}{plural} {', '.join(map(str, item.numbers))}"
    runs = [f"`{recipe}`: {counted(results.get(recipe, ()), item)}" for recipe in item.recipes]
    return f"| {name} | {item.shows} | {'<br>'.join(runs) or '-'} | {item.why} |"


def unknown(recipes: Path | None = None) -> set[str]:
    """Recipes that the index names but that do not exist."""
    return {name for item in INDEX for name in item.recipes} - set(recipe_files(recipes))
