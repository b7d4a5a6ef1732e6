"""A vision transformer trained by one of six objectives, and every depth examined."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.functional import interpolate
from torch.utils.data import DataLoader, Subset

import everydepth as ed
from everydepth.data import Images, load
from everydepth_papers.evidence.baselines import linear_accuracy
from everydepth_papers.evidence.every_depth import images
from everydepth_papers.evidence.hub_images import MEAN, STD, HubImages
from everydepth_papers.evidence.networks import vit
from everydepth_papers.evidence.recipe import Cell
from everydepth_papers.evidence.rows import numbers
from everydepth_papers.evidence.running import data_folder

METRICS = (
    "accuracy", "cos", "cka", "saturation", "neural_collapse", "norm_ratio", "adjacent_cos",
    "straightness", "probability_rises",
)  # fmt: skip
TAU = 0.9  # confidence at which a sample leaves; the paper does not give its own
SWEPT = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99)  # accuracy against speed-up


def build(settings: Cell) -> nn.Module:
    if "pretrained" in settings:
        from transformers import ViTForImageClassification

        return ViTForImageClassification.from_pretrained(
            settings["pretrained"], num_labels=settings["classes"], ignore_mismatched_sizes=True
        )
    names = ("size", "patch", "channels", "classes", "depth", "width", "heads", "inner")
    return vit(**{name: settings[name] for name in names})


def objective(name: str) -> ed.Objective:
    return {
        "standard": ed.end_to_end(),
        "aligned": ed.aligned(),
        "uniform": ed.aligned("uniform"),
        "cosine": ed.cosine_regularized(1.0),
        # The same turns as aligned training takes, without and with a divergence to the last head.
        "multi": ed.multi_classifier(alternate=True),
        "multi_kl": ed.multi_classifier(1.0, alternate=True),
    }[name]


def cell(settings: Cell, seed: int, folder: Path) -> Mapping[str, Any]:
    """Train one network, then look at every depth of it."""
    torch.manual_seed(seed)
    train, test = images({**settings, "test_rows": settings["look"]})
    net = ed.EveryDepth(build(settings), objective(settings["objective"]))
    long = settings["epochs"] > 20
    done = ed.fit(
        net,
        train,
        test,
        epochs=settings["epochs"],
        batch_size=settings["batch"],
        lr=settings["lr"],
        weight_decay=settings["decay"],
        schedule=settings["schedule"],
        warmup=settings["warmup"],
        seed=seed,
        run=folder / "training" if long else None,
        resume=long,
        progress=False,
    )
    net.eval()
    look: dict[str, Any] = {"batch_size": 250, "max_samples": settings["look"], "progress": False}
    seen = ed.trace(net.model, test, METRICS, **look)
    fitted = ed.trace(net.model, train, "accuracy", **look)
    collapse = seen.results["neural_collapse"].arrays
    values = {
        "accuracy": numbers(seen["accuracy"]),
        "train_accuracy": numbers(fitted["accuracy"]),
        # Through the classifier of each layer, where a network has several.
        "own_accuracy": [None, *numbers(done.valid["accuracy"])],
        "by_epoch": [e["valid"]["accuracy"][-1] for e in done.history if "valid" in e],
        "cos": numbers(seen["cos"]),
        "cos_q05": numbers(seen.results["cos"].arrays["q05"][:, -1]),
        "cka": numbers(seen["cka"][:, -1]),
        "saturated": numbers(seen.results["saturation"].arrays["cumulative"]),
        "nc1": numbers(collapse["nc1"]),
        "separation": numbers(collapse["separation"]),
        "adjacent": numbers(seen["adjacent_cos"]),
        "norm_ratio": numbers(seen.results["norm_ratio"].arrays["q50"]),
        "straight": float(seen["straightness"]),
        "closer_is_surer": seen.results["probability_rises"].meta.get("share"),
        "exit": exits(net, test, settings["look"]),
        "linear": linear_accuracy(train, test),
    }
    if settings["objective"] in ("standard", "aligned") and "transfer" in settings:
        values |= elsewhere(net.model, test, settings)
    return values


def exits(net: ed.EveryDepth, test: Any, rows: int) -> dict[str, Any]:
    """Samples leaving at each depth above the confidence TAU, and what that costs and saves."""
    part = Subset(test, range(min(rows, len(test))))
    if not net.heads:
        found = ed.evaluate(
            net.model, part, ed.Confidence(threshold=TAU), batch_size=250, repeats=3, progress=False
        )
        facts = {"accuracy": found.accuracy, "layers": found.layer_speedup}
        swept: list[dict[str, Any]] = []
        for tau in SWEPT:
            one = ed.evaluate(
                net.model, part, ed.Confidence(threshold=tau), batch_size=250, progress=False
            )
            swept.append(
                {
                    "tau": tau,
                    "accuracy": one.accuracy,
                    "layers": one.layer_speedup,
                    "measured": one.measured_speedup,
                }
            )
        facts |= {"measured": found.measured_speedup, "swept": swept}
        return {**facts, "leaving": list(found.exits)}
    last = net.stream.depth
    leaving, right = np.zeros(last, dtype=int), 0
    for batch in DataLoader(part, batch_size=250):
        with torch.no_grad():
            logits = net(depths=range(1, last + 1), **batch).logits_at
        chance = torch.stack([logits[depth].softmax(-1) for depth in range(1, last + 1)])
        sure, label = chance.max(-1)
        sure[-1] = 1.0
        first = (sure > TAU).int().argmax(0)
        leaving += np.bincount(first.numpy(), minlength=last)
        right += int((label.gather(0, first[None])[0] == batch["labels"]).sum())
    speedup = last * leaving.sum() / (leaving @ np.arange(1, last + 1))
    count = {"accuracy": right / len(part), "layers": float(speedup)}
    return {**count, "measured": None, "leaving": leaving.tolist()}


def elsewhere(model: nn.Module, test: Any, settings: Cell) -> dict[str, Any]:
    """A linear probe of every depth on another data set, and accuracy on a shifted test set."""
    if "/" in settings["data"]:
        size, other = settings["size"], settings["transfer"]
        parts: list[Any] = [HubImages(other, split, size=size) for split in ("train", "test")]
        name = settings["data"]
        split = "validation" if "imagenet" in name else "test"
        shifted: Any = (
            drawn_again(settings["shift"], size)
            if isinstance(settings["shift"], str)
            else HubImages(name, split, size=size, noise=settings["shift"])
        )
    else:
        parts = []
        for split in ("train", "test"):
            rows = load(settings["transfer"], kind=Images, split=split)
            pixels = interpolate(rows.as_float().pixel_values, settings["size"])
            labels = rows.labels % 2 if settings["transfer"] == settings["data"] else rows.labels
            parts.append(replace(rows, pixel_values=pixels, labels=labels))
        noise = torch.randn(test.pixel_values.shape, generator=torch.Generator().manual_seed(0))
        pixels = torch.roll(test.pixel_values, (1, 1), (2, 3)) + settings["shift"] * noise
        shifted = replace(test, pixel_values=pixels)
    look: dict[str, Any] = {"batch_size": 250, "max_samples": settings["look"], "progress": False}
    probe = ed.linear_probe(model, *parts, **look)
    return {
        "probe": numbers(probe.value),
        "shifted": numbers(ed.trace(model, shifted, "accuracy", **look)["accuracy"]),
    }


def drawn_again(name: str, size: int) -> Any:
    """CIFAR-10.2, the test set drawn again: `cifar102_test.npz` (images, labels) in its folder."""
    with np.load(data_folder(name) / "cifar102_test.npz", allow_pickle=False) as stored:
        pixels, labels = torch.from_numpy(stored["images"]), torch.from_numpy(stored["labels"])
    scaled = interpolate(pixels.permute(0, 3, 1, 2).float() / 255, size, mode="bilinear")
    return Images(scaled, labels.long(), tuple(map(str, range(10)))).normalized(MEAN, STD)
