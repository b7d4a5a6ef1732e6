"""`everydepth grow`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from everydepth.cli.options import BatchSize, Data, DataRoot, MaxLength, Model
from everydepth.errors import SettingError


def grow(
    model: Model,
    data: Data,
    run: Annotated[Path | None, typer.Option("--run", "-o", help="The run directory.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run.")] = False,
    score_only: Annotated[
        bool, typer.Option("--score", help="Only say where a block would help; change nothing.")
    ] = False,
    rounds: Annotated[int | None, typer.Option(min=1, help="Blocks to try at most.")] = None,
    max_depth: Annotated[int | None, typer.Option(min=1, help="Blocks of the result.")] = None,
    steps: Annotated[int, typer.Option(min=0, help="Training steps after each block.")] = 200,
    lr: Annotated[float, typer.Option(help="Learning rate.")] = 1e-3,
    trains: Annotated[
        str, typer.Option(help="all parameters, or the new block only: all, new.")
    ] = "all",
    alpha: Annotated[float, typer.Option(help="Chance of a false 'deepen here'.")] = 0.05,
    split: Annotated[str, typer.Option(help="The part of the data to train on.")] = "train",
    valid_split: Annotated[
        str | None,
        typer.Option(help="The part to choose by; by default 30 % of the first, set aside."),
    ] = None,
    test_split: Annotated[
        str | None, typer.Option(help="A part used for nothing else, to certify the outcome.")
    ] = None,
    data_root: DataRoot = None,
    max_samples: Annotated[int | None, typer.Option(min=10, help="Use so many rows.")] = None,
    batch_size: BatchSize = 32,
    max_length: MaxLength = 128,
    seed: Annotated[int, typer.Option(min=0)] = 0,
) -> None:
    """Say whether a model should be deepened, and where; then do it, as long as it helps.

    everydepth grow runs/lpa --data digits -o runs/deeper

    Every block is kept only if held-out rows, used for nothing else, say that the loss is lower.
    """
    from rich.console import Console

    from everydepth.cli.loading import load_batches
    from everydepth.exits.load import load as load_model
    from everydepth.growth import grow as grow_model
    from everydepth.growth import score
    from everydepth.runs import Run

    network = load_model(model)
    console = Console()

    def batches(part: str) -> list[object]:
        loaded = load_batches(
            model,
            network,
            data,
            split=part,
            root=data_root,
            batch_size=batch_size,
            max_length=max_length,
            max_samples=max_samples,
        )
        return list(loaded)

    train = batches(split)
    if score_only:
        found = score(network, train, seed=seed, alpha=alpha)
        console.print(found.table())
        console.print(found.verdict)
        if run is not None:
            asked = {"model": model, "data": data, "split": split, "seed": seed, "alpha": alpha}
            found.save(Run.create(run, asked, kind="score").path / "growth_score")
        return
    if valid_split is not None:
        valid = batches(valid_split)
    else:
        # Every third batch or so: rows of named data sets are in no special order.
        valid = train[1::3]
        train = [batch for i, batch in enumerate(train) if i % 3 != 1]
    if not train or not valid:
        raise SettingError(
            f"{split} has too few rows for batches of {batch_size} in two parts; use a smaller "
            "--batch-size, or --valid-split"
        )
    result = grow_model(
        network,
        train,
        valid,
        None if test_split is None else batches(test_split),
        steps=steps,
        rounds=rounds,
        max_depth=max_depth,
        lr=lr,
        trains=trains,
        alpha=alpha,
        batch_size=batch_size,
        seed=seed,
        run=Path("runs") / f"grow-{Path(model).name}" if run is None else run,
        resume=resume,
    )
    if result.score is not None:
        console.print(result.score.table())
    console.print(str(result), markup=False)
    console.print(f"wrote {result.path}; the model is in {result.path}/model", markup=False)
