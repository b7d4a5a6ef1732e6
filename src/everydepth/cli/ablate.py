"""`everydepth ablate`."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

from everydepth.ablations.config import AblateConfig
from everydepth.cli.configs import Defaults
from everydepth.cli.loading import load_to_run
from everydepth.cli.options import Model, NewRun, Split
from everydepth.cli.showing import check_new, keep, show
from everydepth.cli.source import Source
from everydepth.config import plain


def ablate(
    model: Model,
    source: Source,
    asked: Annotated[AblateConfig, Defaults({"batch_size": 32})],
    run: NewRun = None,
    split: Split = "test",
) -> None:
    """Scale or remove the skip connections of each layer, and measure what is lost.

    $ everydepth ablate runs/lpa --data digits -o runs/ablation
    """
    from rich.console import Console

    from everydepth.ablations import ablate as measure

    check_new(run)
    console = Console()
    network = load_to_run(model)
    rows = source.batches(model, network, split=split, batch_size=asked.batch_size or 32)
    # The rows are batches already.
    found = measure(source.stream(network), rows, config=replace(asked, batch_size=None))
    show(found, console)
    how = {"model": model, **source.asked(), "split": split, **plain(asked)}
    keep(found, run, how, console)
