"""`everydepth sweep`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer

from everydepth.config import Config, plain, setting
from everydepth.errors import SettingError
from everydepth.runs.engine import EngineConfig

if TYPE_CHECKING:
    from everydepth.data import Batches
    from everydepth.stream import ResidualStream

FIGURES = ("test_loss_by_layers", "test_loss_by_width", "signal_by_layers")


@dataclass(frozen=True, kw_only=True)
class ResNets(Config):
    """The networks of a sweep and their training."""

    title: ClassVar[str] = "ResNets"

    data: str = setting(
        flags=("--data", "-d"), help="Image data by name (digits, cifar10, ...) or path."
    )
    data_root: str | None = setting(None, help="The folder with named datasets.")
    max_samples: int | None = setting(None, least=10, help="Use only the first N training rows.")
    depths: tuple[int, ...] = setting((8, 14, 20), least=8, help="Numbers of layers, 6n+2 each.")
    widths: tuple[int, ...] = setting((8, 16), least=1, help="Channels of the first stage.")
    seeds: tuple[int, ...] = setting((0, 1, 2), help="Random seeds.")
    epochs: int = setting(10, least=1, help="Maximum number of epochs.")
    stop_below: float = setting(0.0, help="Stop if an epoch lowers the training loss by less.")
    at_least: int = setting(1, least=1, help="Minimum number of epochs.")
    augment: bool = setting(True, help="Random crops and flips.")
    pool: int = setting(1, least=1, help="Shrink images to the means of N x N pixels.")
    lr: float = setting(0.1, above=0, most=1e30, help="Learning rate.")
    batch_size: int = setting(32, least=1, help="Rows per step.")

    def __post_init__(self) -> None:
        super().__post_init__()
        wrong = [depth for depth in self.depths if (depth - 2) % 6]
        if wrong:
            below = wrong[0] - (wrong[0] - 2) % 6
            raise SettingError(
                f"depths={','.join(map(str, self.depths))}: {wrong[0]} is not 6n+2; use {below} or "
                f"{below + 6}"
            )

    def grid(self) -> dict[str, Sequence[Any]]:
        """The grid of `resnet_cell` arguments."""
        several = {"layers": self.depths, "width": self.widths, "seed": self.seeds}
        one = {k: [v] for k, v in plain(self).items() if k not in ("depths", "widths", "seeds")}
        return {**several, **one}


def sweep(
    networks: ResNets,
    where: EngineConfig,
    run: Annotated[Path, typer.Option("--run", "-o", help="The directory of the sweep.")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List the cells, run none.")] = False,
) -> None:
    """Train CIFAR-style ResNets of several depths and widths, and plot the loss against both.

    $ everydepth sweep --data digits --depths 8,14 --widths 8,16 -o runs/sweep

    Uses SGD with momentum 0.9 and weight decay 1e-4. It can be stopped at any time, even with
    kill -9; the same command then continues.
    """
    from everydepth.runs.sweep import sweep as sweep_cells

    found = sweep_cells(networks.grid(), resnet_cell, run=run, where=where, dry_run=dry_run)
    typer.echo(str(found))
    if dry_run:
        return
    for name in FIGURES:
        if name in found:
            found.plot(name).savefig(run / f"{name}.png", dpi=150)
    typer.echo(f"wrote {run}; see it with: everydepth report {run}")


def resnet_cell(
    *,
    layers: int,
    width: int,
    seed: int,
    epochs: int,
    lr: float,
    data: str,
    batch_size: int,
    max_samples: int | None,
    data_root: str | None = None,
    stop_below: float = 0.0,
    at_least: int = 1,
    augment: bool = True,
    pool: int = 1,
    folder: Path | None = None,
) -> dict[str, Any]:
    """Train one ResNet of depth 6n+2; returns losses and the signal before the classifier.

    folder: where to save every epoch, and to resume from.
    """
    import torch

    from everydepth.architectures.cifar_resnet import CifarResNet, CifarResNetConfig
    from everydepth.data import batches, crop_and_flip
    from everydepth.growth import score
    from everydepth.growth.losses import mean_loss
    from everydepth.stream import as_stream
    from everydepth.training.snapshot import kept_random_state

    train, test = prepared(data, max_samples, pool, data_root)
    config = CifarResNetConfig.of_depth(
        layers,
        width=width,
        num_channels=train.pixel_values.shape[1],
        num_labels=len(train.classes),
    )
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with kept_random_state(), device:
        torch.manual_seed(seed)
        model = CifarResNet(config)
    stream = as_stream(model)
    transform = crop_and_flip(4 // pool) if augment else None
    order = batches(train, batch_size, shuffle=True, seed=seed, transform=transform)
    history = _trained(
        stream, order, epochs, lr, seed, stop_below=stop_below, at_least=at_least, folder=folder
    )
    model.eval()
    middle = stream.depth // 2
    found = score(model, train, test, at=[middle, stream.depth], batch_size=256, progress=False)
    last = found.at(stream.depth)
    covariances = {
        "before the classifier": last.covariance,
        "middle block": found.at(middle).covariance,
    }
    return {
        "train_loss": found.loss,
        "test_loss": mean_loss(model, test, batch_size=256),
        "signal": last.signal,
        "alignment": None if last.alignment is None else last.alignment.cosine,
        "epochs_done": len(history),
        "history": history,
        "parameters": sum(p.numel() for p in model.parameters()),
        "covariance": {
            name: {
                "within_1": c.within_1,
                "within_10": c.within_10,
                "top_share": c.top / c.trace if c.trace else 0.0,
                "matrix": [[round(v, 4) for v in row[:16]] for row in c.matrix[:16]],
            }
            for name, c in covariances.items()
        },
    }


def _trained(
    stream: ResidualStream,
    train: Batches,
    epochs: int,
    lr: float,
    seed: int,
    *,
    stop_below: float,
    at_least: int,
    folder: Path | None,
) -> list[float]:
    """SGD as in Depth Expansion, App. N; returns the training loss of every epoch."""
    from torch.optim import SGD

    from everydepth.objectives import end_to_end
    from everydepth.runs.callback import Callback
    from everydepth.training import EveryDepth, fit

    class EpochLosses(Callback):
        """The mean loss of every epoch; stops training once it barely falls."""

        kept = ("steps", "epochs")

        def __init__(self) -> None:
            self.steps: list[float] = []
            self.epochs: list[float] = []

        def on_step(self, training: Any) -> None:
            self.steps.append(training.loss)

        def on_epoch(self, training: Any) -> None:
            self.epochs.append(sum(self.steps) / len(self.steps))
            self.steps = []
            last = self.epochs[-2:]
            if len(self.epochs) >= max(at_least, 2) and last[0] - last[1] < stop_below:
                training.stop(f"an epoch lowers the loss by less than {stop_below}")

    losses = EpochLosses()
    fit(
        EveryDepth(stream, end_to_end()),
        train,
        epochs=epochs,
        optimizer=SGD(stream.model.parameters(), lr=lr, momentum=0.9, weight_decay=1e-4),
        schedule="constant",
        seed=seed,
        run=folder,
        resume=folder is not None,
        keep=1,
        callbacks=[losses],
        progress=False,
    )
    return losses.epochs


def prepared(
    data: str, max_samples: int | None = None, pool: int = 1, data_root: str | None = None
) -> tuple[Any, Any]:
    """The training and test images of a cell, normalized."""
    train, test = (_images(data, part, data_root, max_samples, pool) for part in ("train", "test"))
    pixels = train.pixel_values
    mean, std = pixels.mean((0, 2, 3)).tolist(), pixels.std((0, 2, 3)).tolist()
    return train.normalized(mean, std), test.normalized(mean, std)


@lru_cache(maxsize=4)
def _images(data: str, split: str, root: str | None, most: int | None, pool: int) -> Any:
    """The first `most` images, in 0..1 and pooled; cached for the next cell."""
    from dataclasses import replace

    from torch.nn import functional as F  # noqa: N812 (its usual name)

    from everydepth.data import Images, load
    from everydepth.errors import DataError

    found = load(data, split=split, root=root)
    if not isinstance(found, Images):
        raise DataError(f"{data!r} has no images; give image data to a sweep of ResNets")
    images = found.first(most).as_float()
    if pool == 1:
        return images
    return replace(images, pixel_values=F.avg_pool2d(images.pixel_values, pool))
