"""The jumpboard, the paper's selection rule against a held-out one, and the certificate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from everydepth_papers.evidence import Cell, Finished, Preset, Recipe, Row, over_seeds, published
from everydepth_papers.evidence.networks import vit
from everydepth_papers.evidence.rows import holds_in
from everydepth_papers.premise import Premise

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from torch import nn

    from everydepth.data import Images

PUBLISHED = published(__file__)
SIGNAL = Premise(
    test="z of the signal at the site",
    value=lambda site: site["z"],
    least=2.0,
)


def build(kind: str, side: int, channels: int = 1, labels: int = 10) -> nn.Module:
    from everydepth.architectures.cifar_resnet import CifarResNet, CifarResNetConfig

    if kind == "resnet":
        stages: dict[str, Any] = {"blocks_per_stage": (1, 1), "widths": (8, 16)}
        return CifarResNet(CifarResNetConfig(**stages, num_channels=channels, num_labels=labels))
    sizes = {"depth": 3, "width": 32, "heads": 4, "inner": 64}
    return vit(size=side, patch=2, channels=channels, classes=labels, **sizes)


def images(name: str, split: str, most: int | None, pool: int) -> Images:
    from torch.nn import functional as F  # noqa: N812 (its usual name)

    from everydepth.data import load

    found = cast("Images", load(name, split=split))
    found = found.first(most).as_float()
    return replace(found, pixel_values=F.avg_pool2d(found.pixel_values, pool))


def cell(settings: Cell, seed: int, folder: Path) -> Mapping[str, Any]:
    """Train a network, make a jumpboard at every site, then grow by one block."""
    import torch

    from everydepth.growth import grow, jumpboard, score
    from everydepth.growth.losses import mean_loss
    from everydepth.objectives import end_to_end
    from everydepth.training import EveryDepth, fit
    from everydepth_papers.guarantees import guarantee

    rows = images(settings["data"], "train", settings["rows"], settings["pool"])
    third = images(settings["data"], "test", settings["test_rows"], settings["pool"])
    train, valid = rows.split((0.7, 0.3), seed=seed)
    torch.manual_seed(seed)
    _, channels, side, _ = rows.pixel_values.shape
    model = build(settings["kind"], side, channels, len(rows.classes))
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings["lr"])
    fit(
        EveryDepth(model, end_to_end()), train, steps=settings["steps"], batch_size=64, seed=seed,
        optimizer=optimizer, schedule="constant", progress=False,
    )  # fmt: skip
    model.eval()
    found = score(model, train, batch_size=128, progress=False)
    sites: list[dict[str, Any]] = []
    for site in found.sites:
        how: dict[str, Any] = {"after": site.after, "scored": found, "batch_size": 128}
        jump = jumpboard(model, train, third, **how)
        better = jumpboard(model, train, third, precondition=True, **how)
        sites.append(
            {
                "after": site.after,
                "z": site.z,
                "verdict": site.verdict,
                "found": jump.found,
                "margin": jump.margin,
                "margin_test": jump.margin_valid,
                "preconditioned_margin": better.margin,
                "preconditioned_margin_test": better.margin_valid,
                "evaluations": len(jump.tried),
            }
        )
    grown = grow(
        model, train, valid, steps=settings["after_steps"], rounds=1, batch_size=64, alpha=0.5,
        optimizer=optimizer, seed=seed, progress=False,
    )  # fmt: skip
    before, after = mean_loss(model, third), mean_loss(grown.model, third)
    proof = guarantee(model, grown.model, train, third)
    round_ = grown.rounds[0] if grown.rounds else None
    return {
        "loss": before,
        "sites": sites,
        "rounds": [] if round_ is None else [asdict(replace(round_, sites=()))],
        "third": {"old": before, "safe": after},
        "paper_gain": 0.0 if round_ is None else round_.valid["old"] - round_.valid[round_.paper],
        "vacuous": proof.vacuous,
        "gamma_n": proof.gamma_n,
        "bound": proof.bound,
    }


def rows(results: Sequence[Finished]) -> Sequence[Row]:
    sites = [site for r in results for site in r["sites"]]
    found = [site for site in sites if site["found"]]
    grew = [r for r in results if r["rounds"] and r["rounds"][0]["safe"] != "old"]
    tried = [r for r in results if r["rounds"]]
    worse = [r for r in results if r["third"]["safe"] > r["third"]["old"]]
    ratio = [s["preconditioned_margin"] / s["margin"] for s in found if s["margin"] > 0]
    median = float(np.median(ratio)) if ratio else None
    return [
        holds_in(
            "Condition 1: a site with a signal has a jumpboard",
            PUBLISHED["jumpboard"],
            sites,
            lambda site: site["found"],
            unit="sites",
            premises=[SIGNAL],
        ),
        holds_in(
            "Theorem 3: a jumpboard lowers the test loss, too",
            PUBLISHED["test"],
            found,
            lambda site: site["margin_test"] > 0,
            "no training, step chosen on training rows",
            unit="sites",
            premises=[SIGNAL],
        ),
        holds_in(
            "Condition 2: growth that the paper's rule keeps is no worse on held-out rows",
            PUBLISHED["selection"],
            tried,
            lambda r: r["paper_gain"] >= 0,
            unit="growths",
        ),
        holds_in(
            "Theorems 1 to 3: the certificate says something",
            PUBLISHED["certificate"],
            results,
            lambda r: not r["vacuous"],
            f"Gamma_n {min(r['gamma_n'] for r in results):.3g} at least, "
            f"loss {max(r['bound'] for r in results):.3g} at most",
            unit="networks",
        ),
        over_seeds("largest number of evaluations", None, [max(s["evaluations"] for s in sites)]),
        Row(
            "margin with the features' covariance over that without, median",
            None,
            None if median is None else round(median, 2),
        ),
        Row(
            "growths kept by the safe rule",
            None,
            f"{len(grew)} of {len(results)}",
            note="the paired interval of the held-out gain lies above zero",
        ),
        Row(
            "results of the safe rule that are worse on a third split",
            None,
            f"{len(worse)} of {len(results)}",
        ),
    ]


def figure(results: Sequence[Finished]) -> Figure:
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(10, 4), layout="constrained")
    axes = drawn.subplots(1, 2)
    for kind in dict.fromkeys(r.cell["kind"] for r in results):
        sites = [s for r in results if r.cell["kind"] == kind for s in r["sites"] if s["found"]]
        axes[0].scatter([s["margin"] for s in sites], [s["margin_test"] for s in sites], label=kind)
        mine = [r for r in results if r.cell["kind"] == kind]
        gains = [r["third"]["old"] - r["third"]["safe"] for r in mine]
        axes[1].scatter([r["loss"] for r in mine], gains, label=kind)
    axes[0].axhline(0, color="black", linewidth=0.5)
    axes[0].set(xlabel="margin on training rows", ylabel="margin on test rows", title="Jumpboards")
    axes[1].axhline(0, color="black", linewidth=0.5)
    axes[1].set(xlabel="test loss before", ylabel="fall by growing", title="Safe selection")
    for axis in axes:
        axis.legend()
    return drawn


def cells(steps: Sequence[int], **fixed: Any) -> list[Cell]:
    rates = {"resnet": 3e-3, "vit": 1e-3}
    return [
        {"kind": kind, "lr": lr, "steps": count, **fixed}
        for kind, lr in rates.items()
        for count in steps
    ]


RECIPE = Recipe(
    name="expansion_jumpboard",
    title="Jumpboards, and which grown networks are kept",
    paper="expansion",
    item="Sections 4 to 6 (Conditions 1 and 2, Theorems 1 to 3)",
    presets={
        "smoke": Preset(
            cells=cells((20,), data="digits", rows=80, test_rows=60, pool=1, after_steps=3),
            cost="3 s, 1 core",
        ),
        "small": Preset(
            cells=cells(
                (50, 400), data="fashion-mnist", rows=1000, test_rows=600, pool=2,
                after_steps=40,
            ),
            seeds=3,
            cost="2 min, 1 core",
            needs=("fashion-mnist",),
        ),
        "paper": Preset(
            cells=cells(
                (2_000, 20_000, 80_000), data="uoft-cs/cifar10", rows=None, test_rows=None, pool=1,
                after_steps=4_000,
            ),
            seeds=5,
            cost="30 runs, a few GPU hours",
            needs=("uoft-cs/cifar10",),
            models={
                "resnet": lambda: build("resnet", 32, 3),
                "vit": lambda: build("vit", 32, 3),
            },
        ),
    },
    cell=cell,
    rows=rows,
    figure=figure,
    about=(
        "The paper proves these statements and prints no experiment on them; the networks and the "
        "numbers are ours. Networks from hardly trained to nearly saturated."
    ),
)  # fmt: skip
