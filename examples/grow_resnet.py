"""Should this ResNet be deeper, and where? Score every site, then grow as long as it helps."""

from __future__ import annotations

import torch
from rich.console import Console

import everydepth as ed
from everydepth.architectures.cifar_resnet import CifarResNet, CifarResNetConfig
from everydepth.data import load_digits
from everydepth.growth.losses import mean_loss


def main() -> None:
    torch.manual_seed(0)
    train, valid = load_digits("train").split((0.7, 0.3))
    test, console = load_digits("test"), Console()
    sizes = {"blocks_per_stage": (1, 1), "widths": (8, 16), "num_channels": 1, "num_labels": 10}
    model = CifarResNet(CifarResNetConfig(**sizes))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    net = ed.EveryDepth(model, ed.end_to_end())
    how = {"optimizer": optimizer, "schedule": "constant", "batch_size": 64}
    ed.fit(net, train, steps=60, progress=False, **how)

    console.print(ed.growth.score(model, train, valid).table())

    # `valid` decides and is used for nothing else, `test` judges the outcome; the optimizer goes on
    # where it was.
    how = {"optimizer": optimizer, "batch_size": 64}
    grown = ed.grow(model, train, valid, test, steps=40, rounds=3, **how)
    console.print(str(grown))
    console.print(f"test loss {mean_loss(model, test):.3f} -> {mean_loss(grown.model, test):.3f}")


if __name__ == "__main__":
    main()
