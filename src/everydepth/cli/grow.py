"""`everydepth grow`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from everydepth.cli.loading import load_to_run
from everydepth.cli.options import Model
from everydepth.cli.showing import check_new, keep, show
from everydepth.cli.source import Source
from everydepth.errors import SettingError
from everydepth.growth.config import GrowConfig


def grow(
    model: Model,
    source: Source,
    asked: GrowConfig,
    run: Annotated[Path | None, typer.Option("--run", "-o", help="The run directory.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run.")] = False,
    score_only: Annotated[
        bool, typer.Option("--score", help="Only report where a block would help.")
    ] = False,
    split: Annotated[str, typer.Option(help="The split to train on.")] = "train",
    valid_split: Annotated[
        str | None,
        typer.Option(help="The split that decides (default: a third of the training split)."),
    ] = None,
    test_split: Annotated[
        str | None, typer.Option(help="A split used only to judge the result.")
    ] = None,
) -> None:
    """Find out whether and where a deeper model would help, and grow it as long as it does.

    $ everydepth grow runs/lpa --data digits -o runs/deeper

    A block is kept only if it lowers the loss on held-out rows that are used for nothing else.
    """
    from rich.console import Console

    from everydepth.growth import grow as grow_model
    from everydepth.growth import score

    if score_only:
        check_new(run)
    network = load_to_run(model, learns=not score_only)
    console = Console()

    def batches(part: str) -> list[object]:
        return list(source.batches(model, network, split=part, batch_size=asked.batch_size))

    for option, part in (("--valid-split", valid_split), ("--test-split", test_split)):
        if part is not None:
            source.check_part(option, part)
    train = batches(split)
    if score_only:
        found = score(source.stream(network), train, seed=asked.seed, alpha=asked.alpha)
        show(found, console)
        console.print(str(found), markup=False)
        how = {"split": split, "seed": asked.seed, "alpha": asked.alpha}
        keep(found, run, {"model": model, **source.asked(), **how}, console)
        return
    if valid_split is not None:
        valid = batches(valid_split)
    else:
        # Every third batch: the rows of named datasets are in no particular order.
        valid = train[1::3]
        train = [batch for i, batch in enumerate(train) if i % 3 != 1]
    if not train or not valid:
        raise SettingError(
            f"{split} has too few rows for two parts with batches of {asked.batch_size}; use a "
            "smaller --batch-size, or --valid-split"
        )
    result = grow_model(
        source.stream(network),
        train,
        valid,
        None if test_split is None else batches(test_split),
        config=asked,
        run=Path("runs") / f"grow-{Path(model).name}" if run is None else run,
        resume=resume,
    )
    if result.score is not None:
        show(result.score, console)
    console.print(str(result), markup=False)
    console.print(f"wrote {result.path}; the model is in {result.path}/model", markup=False)
