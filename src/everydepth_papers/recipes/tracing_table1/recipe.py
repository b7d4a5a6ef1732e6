"""Table 1: parameters of one head per layer against one shared head, from configs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from everydepth_papers.evidence import Cell, Finished, Preset, Recipe, Row, published
from everydepth_papers.evidence.rows import holds_in

if TYPE_CHECKING:
    from torch import nn

PUBLISHED = published(__file__)
UNITS = {"M": 1e6, "B": 1e9}
# The size in the model's name; the printed figures of the three language models start from it.
NOMINAL = {"GPT-2": 117e6, "GPT-3": 175e9, "LLaMA-2": 70e9}


def build(name: str) -> nn.Module:
    """The model of a row, from its config alone."""
    from transformers import (
        GPT2Config,
        GPT2LMHeadModel,
        LlamaConfig,
        LlamaForCausalLM,
        ViTConfig,
        ViTForImageClassification,
    )

    if name == "DeiT-S":
        small = {"hidden_size": 384, "num_attention_heads": 6, "intermediate_size": 1536}
        return ViTForImageClassification(ViTConfig(num_labels=1000, **small))
    if name == "DeiT-B":
        return ViTForImageClassification(ViTConfig(num_labels=1000))
    if name == "GPT-2":
        return GPT2LMHeadModel(GPT2Config())
    if name == "GPT-3":
        return GPT2LMHeadModel(GPT2Config(n_embd=12288, n_layer=96, n_head=96, n_positions=2048))
    seventy = {"hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64}
    rest = {"num_key_value_heads": 8, "intermediate_size": 28672, "vocab_size": 32000}
    return LlamaForCausalLM(LlamaConfig(**seventy, **rest))


def cell(settings: Cell, seed: int, folder: Path) -> Mapping[str, Any]:
    """Counts of one row; nothing is random and no weight exists."""
    import torch

    import everydepth as ed

    with torch.device("meta"):
        model = build(settings["model"])
    stream = ed.as_stream(model)
    weight: Any = stream.head.weight
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "layers": stream.depth,
        "width": weight.shape[1],
        "classes": weight.shape[0],
    }


def rows(results: Sequence[Finished]) -> list[Row]:
    return [
        holds_in(
            "Table 1: one shared head saves the printed share of parameters",
            "16.07 % (DeiT-S) to 78.39 % (GPT-2)",
            results,
            lambda r: _saved(r.cell["model"], r) == PUBLISHED[r.cell["model"]]["saving"],
            "to the printed digits; of language models at the size in their name",
            unit="models",
        ),
        *(row for result in results for row in _rows(result)),
    ]


def _saved(name: str, result: Finished) -> float:
    """In %, with two digits that are cut off or rounded, as the print has them."""
    sizes = PUBLISHED[name] if name in NOMINAL else result.values
    one = NOMINAL.get(name, result["parameters"])
    value = _three(name, "", one, sizes["layers"], _head(sizes))[-1][-1]
    low = int(value * 100) / 100
    return low if low == PUBLISHED[name]["saving"] else round(value, 2)


def _rows(result: Finished) -> list[Row]:
    name = result.cell["model"]
    printed = PUBLISHED[name]
    own = _three(name, "config", result["parameters"], result["layers"], _head(result.values))
    if name not in NOMINAL:
        return [_compared(*row, printed) for row in own]
    # The printed width and layers with the size in the model's name.
    nominal = _three(name, "nominal size", NOMINAL[name], printed["layers"], _head(printed))
    reason = (
        f"the config has {result['layers']} layers of width {result['width']:,} and "
        f"{result['parameters'] / UNITS[printed['unit']]:.2f}{printed['unit']} parameters; the "
        f"print uses {printed['layers']} of {printed['width']:,} and the size in the name"
    )
    return [
        *(_compared(*row, printed) for row in nominal),
        *(Row(quantity, None, round(value, 2), note=reason) for quantity, _, value in own),
    ]


def _head(sizes: Mapping[str, Any]) -> int:
    # Weights only: with biases DeiT-S would be 26.29M, not the printed 26.27M.
    return sizes["width"] * sizes["classes"]


def _three(
    name: str, source: str, one: float, layers: int, head: int
) -> list[tuple[str, str, float]]:
    unit = PUBLISHED[name]["unit"]
    many = one + (layers - 1) * head
    return [
        (f"{name}, one head per layer, {unit} ({source})", "many", many / UNITS[unit]),
        (f"{name}, one head, {unit} ({source})", "one", one / UNITS[unit]),
        (f"{name}, saved, % ({source})", "saving", 100 * (1 - one / many)),
    ]


def _compared(quantity: str, key: str, value: float, printed: Mapping[str, Any]) -> Row:
    low, rounded = int(value * 100) / 100, round(value, 2)
    if printed[key] == rounded:
        note = "equal to the printed digits"
    elif printed[key] == low:
        note = f"equal to the printed digits, which are cut off, not rounded ({value:.4f})"
    else:
        implied = printed["many"] * (1 - printed["saving"] / 100)
        note = (
            f"differs: the print contradicts itself, its other two columns give {implied:.2f} = "
            f"{printed['many']} x (1 - {printed['saving']} %)"
        )
    return Row(quantity, printed[key], low if printed[key] == low else rounded, note=note)


CELLS = tuple({"model": name} for name in PUBLISHED if name != "source")
MODELS = {cell["model"]: (lambda name=cell["model"]: build(name)) for cell in CELLS}
COST = "2 s, no weights"

RECIPE = Recipe(
    name="tracing_table1",
    title="Parameters that one shared head saves",
    paper="tracing",
    item="Table 1",
    presets={
        "smoke": Preset(cells=CELLS, cost=COST, models=MODELS),
        "small": Preset(cells=CELLS, cost=COST, models=MODELS),
        "paper": Preset(cells=CELLS, cost=COST, models=MODELS),
    },
    cell=cell,
    rows=rows,
    about=(
        "All five rows, from configs on the meta device; the three presets are the same. DeiT is "
        "counted as the ViT that it is without its distillation token. A head counts its weights "
        "and not its bias, as in the print."
    ),
)
