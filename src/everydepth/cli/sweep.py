"""`everydepth sweep`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from everydepth.errors import SettingError


def sweep(
    data: Annotated[str, typer.Option(help="Image data by name (digits, cifar10, ...) or path.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The directory of the sweep.")],
    depths: Annotated[str, typer.Option(help="Layers 6n+2, separated by commas.")] = "8,14,20",
    widths: Annotated[str, typer.Option(help="Channels of the first stage.")] = "8,16",
    seeds: Annotated[str, typer.Option(help="Random seeds.")] = "0,1,2",
    epochs: Annotated[int, typer.Option(min=1)] = 10,
    lr: Annotated[float, typer.Option(help="Learning rate.")] = 0.1,
    batch_size: Annotated[int, typer.Option(min=1)] = 32,
    data_root: Annotated[
        str | None, typer.Option(help="The folder that holds named data sets.")
    ] = None,
    max_samples: Annotated[int | None, typer.Option(min=10, help="Training rows.")] = None,
    engine: Annotated[str, typer.Option(help="local, or ray.")] = "local",
    address: Annotated[str | None, typer.Option(help="Of a Ray cluster.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List the cells, run none.")] = False,
) -> None:
    """Train CIFAR-style ResNets of several depths and widths; draw loss against both.

    SGD with momentum .9 and weight decay 1e-4. Stop it at any time, also with kill -9, and give the
    same command again: it does the cells that are missing.
    """
    from everydepth.growth import sweep as sweep_cells

    grid = {
        "layers": _numbers(depths, "depths"),
        "width": _numbers(widths, "widths"),
        "seed": _numbers(seeds, "seeds"),
        "epochs": [epochs],
        "lr": [lr],
        "data": [data],
        "batch_size": [batch_size],
        "max_samples": [max_samples],
        "data_root": [data_root],
    }
    if engine not in ("local", "ray"):
        raise SettingError(f"engine {engine!r}; use local or ray")
    found = sweep_cells(grid, resnet_cell, out=out, engine=engine, address=address, dry_run=dry_run)
    typer.echo(str(found))
    if dry_run:
        return
    for y, x, by in (
        ("test_loss", "layers", "width"),
        ("test_loss", "width", "layers"),
        ("signal", "layers", "width"),
    ):
        found.plot(y, x, by).savefig(out / f"{y}-{x}.png", dpi=150)
    found.plot("signal", "layers", "width", relative=True).savefig(
        out / "signal-relative.png", dpi=150
    )
    typer.echo(f"wrote {out}: one file a cell, and figures of loss and signal")


def resnet_cell(
    layers: int,
    width: int,
    seed: int,
    epochs: int,
    lr: float,
    data: str,
    batch_size: int,
    max_samples: int | None,
    data_root: str | None,
) -> dict[str, Any]:
    """One ResNet of depth 6n+2 (SPEC 4.10): losses, and the signal before the classifier."""
    import torch

    from everydepth.architectures.cifar_resnet import CifarResNet, CifarResNetConfig
    from everydepth.data import Images, load
    from everydepth.errors import DataError
    from everydepth.growth import score
    from everydepth.growth.fitting import fit_plainly
    from everydepth.growth.losses import mean_loss
    from everydepth.stream import as_stream

    parts = [load(data, split=part, root=data_root) for part in ("train", "test")]
    if not all(isinstance(part, Images) for part in parts):
        raise DataError(f"{data!r} does not hold images; a sweep of ResNets needs some")
    train, test = (_floats(part, batch_size, max_samples) for part in parts)
    torch.manual_seed(seed)
    first = train[0]["pixel_values"]
    labels = max(int(b["labels"].max()) for b in (*train, *test)) + 1
    config = CifarResNetConfig.of_depth(
        layers, width=width, num_channels=first.shape[1], num_labels=labels
    )
    model = CifarResNet(config)
    stream = as_stream(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, weight_decay=1e-4)
    fit_plainly(stream, train, optimizer, epochs * len(train), seed=seed)
    model.eval()
    signal = score(model, train, at=[stream.depth], progress=False)[stream.depth].signal
    return {
        "train_loss": mean_loss(model, train),
        "test_loss": mean_loss(model, test),
        "signal": signal,
        "parameters": sum(p.numel() for p in model.parameters()),
    }


def _floats(images: Any, batch_size: int, most: int | None) -> list[dict[str, Any]]:
    """Batches of images between 0 and 1, shuffled once."""
    from everydepth.data import batches

    rows = images if most is None else images.subset(range(min(most, len(images))))
    found: list[dict[str, Any]] = []
    for batch in batches(rows, batch_size, shuffle=True):
        pixels = batch["pixel_values"]
        scale = 1 if pixels.is_floating_point() else 255
        found.append({**batch, "pixel_values": pixels.float() / scale})
    return found


def _numbers(text: str, name: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise SettingError(f"--{name} {text!r}; give whole numbers, separated by commas") from error
