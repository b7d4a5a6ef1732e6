"""App. I: what LPA adds to the time of a training step."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from everydepth_papers.evidence import Cell, Finished, Preset, Recipe, Row, over_seeds, published
from everydepth_papers.evidence.networks import vit
from everydepth_papers.evidence.rows import holds_in

PUBLISHED = published(__file__)


def build(depth: int, width: int) -> Any:
    """The paper's ViT on images of 32 x 32: heads of size 64, an MLP of four times the width."""
    return vit(size=32, patch=4, depth=depth, width=width, heads=max(1, width // 64))


def cell(settings: Cell, seed: int, folder: Path) -> dict[str, Any]:
    """Steps of both objectives and of the plain model in turns; the best of each."""
    import time

    import torch

    from everydepth.objectives import end_to_end, lpa
    from everydepth.training import EveryDepth

    torch.manual_seed(seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = build(settings["depth"], settings["width"]).to(device)
    batch = {
        "pixel_values": torch.randn(settings["batch"], 3, 32, 32, device=device),
        "labels": torch.randint(0, 10, (settings["batch"],), device=device),
    }
    nets: dict[str, Any] = {
        "plain": model,
        "E2E": EveryDepth(model, end_to_end()),
        "LPA": EveryDepth(model, lpa()),
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    best = dict.fromkeys(nets, float("inf"))
    for round_ in range(settings["rounds"] + 1):
        for name, net in nets.items():
            start = time.perf_counter()
            optimizer.zero_grad()
            net(**batch).loss.backward()
            optimizer.step()
            if device == "cuda":
                torch.cuda.synchronize()
            if round_:  # the first round only warms up
                best[name] = min(best[name], time.perf_counter() - start)
    return {"milliseconds": {name: round(1000 * value, 3) for name, value in best.items()}}


def rows(results: Sequence[Finished]) -> list[Row]:
    def ratio(name: str, base: str) -> list[float]:
        return [r["milliseconds"][name] / r["milliseconds"][base] for r in results]

    note = "ratio of the fastest steps, in turns in one process"
    return [
        holds_in(
            "App. I: LPA adds at most 10 % to a training step",
            "28 s an epoch with LPA and without",
            ratio("LPA", "E2E"),
            lambda found: found <= 1.1,
            note,
        ),
        over_seeds(
            "LPA / E2E, time", PUBLISHED["LPA"] / PUBLISHED["E2E"], ratio("LPA", "E2E"), note
        ),
        over_seeds("E2E / the plain model, time", None, ratio("E2E", "plain"), note),
        over_seeds("LPA / the plain model, time", None, ratio("LPA", "plain"), note),
        *(
            over_seeds(f"{name}, ms per step", None, [r["milliseconds"][name] for r in results])
            for name in ("plain", "E2E", "LPA")
        ),
    ]


PAPER = {"depth": 12, "width": 192}
RECIPE = Recipe(
    name="progressive_overhead",
    title="What LPA adds to the time of a training step",
    paper="progressive",
    item="App. I (28 s an epoch with and without LPA)",
    about=(
        "Forward, backward and AdamW of the paper's ViT-12 (12 blocks, width 192, 65 tokens), in "
        "turns in one process. Ratios mean something on a busy machine; milliseconds do not."
    ),
    presets={
        "smoke": Preset(
            cells=({"depth": 3, "width": 64, "batch": 4, "rounds": 2},), cost="2 s", seeds=1
        ),
        "small": Preset(
            cells=({**PAPER, "batch": 16, "rounds": 6},),
            seeds=3,
            cost="1 min, 1 core",
            memory_gib=2.0,
        ),
        "paper": Preset(
            cells=({**PAPER, "batch": 128, "rounds": 400},),
            seeds=3,
            cost="10 min on one GPU",
            models={"ViT-12": lambda: build(**PAPER)},
            memory_gib=8.0,
        ),
    },
    cell=cell,
    rows=rows,
)
