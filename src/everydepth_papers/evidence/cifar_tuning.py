"""A published ResNet on CIFAR-10, tuned at a few depths, and what leaving early is then worth."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

import everydepth as ed
from everydepth.architectures.cifar_resnet import CifarResNet, CifarResNetConfig
from everydepth.data import Images, batches, crop_and_flip, load
from everydepth.training import EveryDepth
from everydepth_papers.evidence.hub_images import MEAN, STD
from everydepth_papers.evidence.recipe import Cell
from everydepth_papers.evidence.rows import numbers
from everydepth_papers.evidence.running import data_folder
from everydepth_papers.evidence.stages import precision_of, tuned


def network(settings: Cell) -> CifarResNet:
    """The network with published weights; the tiny one has random weights."""
    torch.manual_seed(0)
    if settings["model"] == "tiny":
        sizes: dict[str, Any] = {
            "blocks_per_stage": (2, 2, 2),
            "widths": (4, 8, 16),
            "num_channels": 1,
        }
        return CifarResNet(CifarResNetConfig(**sizes, shortcut="pad", num_labels=10))
    model = CifarResNet(CifarResNetConfig.of_depth(56, shortcut="pad", num_labels=10))
    model.load_state_dict(load_file(data_folder("resnet-cifar10") / "resnet56.safetensors"))
    return model


def images(settings: Cell) -> tuple[Images, Images]:
    found = [load(settings["data"], kind=Images, split=split) for split in ("train", "test")]
    channels = found[0].pixel_values.shape[1]
    train, test = (part.normalized(MEAN[:channels], STD[:channels]) for part in found)
    return train, test.first(settings["test_rows"])


def cell(settings: Cell, seed: int, folder: Path) -> dict[str, Any]:
    """Tune until the last of `marks`, then the accuracy of every depth, and early exit.

    Stages lie beside the folders of the cells: the next cell goes on from them.
    """
    train, test = images(settings)
    model = network(settings)
    balcony = settings["arm"] == "balcony"
    net = ed.balcony(model) if balcony else EveryDepth(model, ed.ladder().distilled())
    rungs = ed.ladder().weights(0, None, net.stream.depth).nonzero().flatten().tolist()

    def augmented(begin: int, end: int) -> Any:
        # Another order in every stage.
        transform = crop_and_flip()
        size = settings["batch"]
        return batches(
            train, size, shuffle=True, seed=seed + begin, drop_last=True, transform=transform
        )

    place = folder.parent / settings["arm"]
    spent = tuned(net, augmented, settings, seed, place, optimizer="sgd")
    net.eval()
    half = len(test) // 2
    known, rest = test.subset(range(half)), test.subset(range(half, len(test)))
    found: dict[str, Any] = {
        "rungs": rungs,
        "blocks": [depth + len(net.stream.exits.get(depth, ())) for depth in rungs],
        "cpu_seconds": round(spent, 1),
        "precision": precision_of(settings),
        "accuracy": numbers(accuracies(net, test)),
    }
    if settings.get("exits"):
        found["exits"] = left_early(net, known, rest, rungs[:-1], settings["risk"])
        if not balcony:
            model.save_pretrained(folder / "model")
    return found


@torch.no_grad()
def accuracies(net: EveryDepth, test: Images) -> list[float]:
    """Accuracy at depths 1..L."""
    right = torch.zeros(net.stream.depth)
    for batch in batches(test, 250):
        states = net.stream.observe(batch)
        for depth in range(1, net.stream.depth + 1):
            right[depth - 1] += (states.logits(depth).argmax(-1) == batch["labels"]).sum()
    return (right / len(test)).tolist()


def left_early(
    net: EveryDepth, known: Images, rest: Images, rungs: list[int], risk: float
) -> dict[str, Any]:
    """Thresholds calibrated on one half of the test images, judged on the other."""
    with warnings.catch_warnings():
        # Where nothing can be promised, the note says so.
        warnings.simplefilter("ignore")
        policy = ed.calibrate(
            net,
            known,
            risk=risk,
            against="labels",
            depths=rungs,
            per_depth=True,
            batch_size=100,
            progress=False,
        )
    seen = ed.evaluate(net, rest, policy, batch_size=100, progress=False)
    certificate = policy.certificate
    return {
        "risk": risk,
        "note": "" if certificate is None else certificate.note,
        "samples": len(rest),
        **{
            name: round(float(getattr(seen, name)), 5)
            for name in (
                "accuracy",
                "accuracy_full",
                "agreement",
                "measured_speedup",
            )
        },
        "left": list(seen.exits),
    }
