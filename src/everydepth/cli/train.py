"""`everydepth train`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from everydepth import objectives
from everydepth.cli.configs import Defaults
from everydepth.cli.loading import load_to_run, preprocessor_file
from everydepth.cli.presets import PRESETS, Facts
from everydepth.cli.showing import show
from everydepth.cli.source import Source
from everydepth.errors import SettingError
from everydepth.training.config import FitConfig, RunConfig

if TYPE_CHECKING:
    from rich.console import Console
    from transformers import PreTrainedModel

    from everydepth.data import Batches
    from everydepth.objectives import Objective
    from everydepth.training import EveryDepth, FitResult

_MODEL = f"A folder, a run, a Hugging Face name, or a preset: {', '.join(PRESETS)}."
_OBJECTIVES = ", ".join(name for name in dir(objectives) if name.islower())
_PARTS = "lpa:early=0.2+sampled:k=2"
MOST_BLOCKS = 1000  # a typing error would otherwise fill the memory with blocks
_OBJECTIVE = f"{_OBJECTIVES}; with settings and parts: {_PARTS}. By default lpa."


def train(
    model: Annotated[str, typer.Option("--model", "-m", help=_MODEL)],
    source: Source,
    fitting: Annotated[FitConfig, Defaults({"epochs": 10})],
    where: RunConfig,
    objective: Annotated[str | None, typer.Option(help=_OBJECTIVE)] = None,
    label_smoothing: Annotated[
        float,
        typer.Option(min=0, help="Probability given to the other classes, below 1."),
    ] = 0.0,
    valid_split: Annotated[
        str, typer.Option(help="The split to validate on; auto (valid, else test), or none.")
    ] = "auto",
    blocks: Annotated[
        int | None, typer.Option(min=1, max=MOST_BLOCKS, help="Number of blocks of a preset.")
    ] = None,
    lora: Annotated[
        int | None,
        typer.Option(min=1, help="Train LoRA adapters of this rank, not the model (needs peft)."),
    ] = None,
    balcony: Annotated[
        str | None,
        typer.Option(
            help="Freeze the model and train extra blocks at these depths to predict what the last "
            "depth predicts: 8,15,23, or auto (L/4, L/2, 3L/4)."
        ),
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Only show the settings, and the cost in time and memory."),
    ] = False,
) -> None:
    """Train a network at every depth.

    $ everydepth train -m vit-tiny -d digits --epochs 10 -o runs/lpa

    Everything is saved in a run directory; the same command with --resume continues exactly where
    it stopped. On several GPUs or machines: accelerate launch -m everydepth train ...
    """
    import torch
    from accelerate import PartialState
    from rich.console import Console

    from everydepth.objectives.text import objective_of
    from everydepth.training import fit
    from everydepth.training.snapshot import kept_random_state

    console = Console()
    if balcony is not None and lora is not None:
        raise SettingError(
            f"--lora {lora} and --balcony {balcony}: adapters change the model, but balconies keep "
            "it frozen; use one of them"
        )
    goal = None if objective is None else objective_of(objective)
    with TemporaryDirectory() as scratch, kept_random_state():
        torch.manual_seed(fitting.seed)
        network, beside = _model(model, blocks, source, Path(scratch))
        trained: Any = network
        if lora is not None:
            from everydepth.training.lora import with_lora

            trained = with_lora(network, lora).train()
        rows, valid = _data(beside, network, source, fitting, valid_split)
        fitting = replace(fitting, batch_size=rows.batch_size)
        net = _net(trained, source, goal, balcony, label_smoothing)
        goal = net.objective
        names = (Path(model).name, Path(source.data).name.replace(":", "-"), goal.name)
        run = where.run or Path("runs") / "-".join(names)
        # Settings that affect the outcome but are unknown to `fit`.
        about = {"model": model, "blocks": blocks, "valid_split": valid_split, **source.asked()}
        about |= {} if lora is None else {"lora": lora}
        about |= {} if balcony is None else {"balcony": balcony}
        if dry_run:
            shown = {**about, **fitting.to_json(), "objective": goal.to_json(), "run": str(run)}
            _dry_run(shown, net, rows, fitting, console)
            return
        result = fit(net, rows, valid, fitting, where=replace(where, run=run), about=about)
        state = PartialState()
        if state.is_main_process:
            _copy_preprocessing(beside, Path(run) / "model", network)
            _show(result, console)
        if state.num_processes > 1:
            state.destroy_process_group()


def _model(
    name: str, blocks: int | None, source: Source, scratch: Path
) -> tuple[PreTrainedModel, str]:
    """The network in training mode, and the location of its tokenizer or preprocessor."""
    from everydepth.data.byte_tokens import byte_tokenizer

    if name not in PRESETS:
        if blocks is not None:
            raise SettingError(f"--blocks is for presets ({', '.join(PRESETS)}), not for {name!r}")
        return load_to_run(name, learns=True).train(), name
    facts = Facts.of(source.read("train"))
    network = PRESETS[name](name, facts, blocks)
    if facts.text:
        byte_tokenizer().save_pretrained(scratch)
    return network.train(), str(scratch)


def _net(
    trained: Any,
    source: Source,
    goal: Objective | None,
    balcony: str | None,
    label_smoothing: float,
) -> EveryDepth:
    """The network to train: the whole model, or its balconies."""
    from everydepth import training

    if balcony is None:
        return training.EveryDepth(source.stream(trained), goal, label_smoothing=label_smoothing)
    if label_smoothing:
        raise SettingError(
            f"--label-smoothing {label_smoothing:g} and --balcony {balcony}, which does not learn "
            "from labels; leave one of them out"
        )
    frozen = source.stream(trained.eval())
    return training.balcony(frozen, _depths(balcony), objective=goal).train()


def _depths(text: str) -> list[int] | None:
    if text == "auto":
        return None
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise SettingError(
            f"--balcony {text!r}; use depths separated by commas (8,15,23), or auto"
        ) from error


def _data(
    beside: str, network: PreTrainedModel, source: Source, fitting: FitConfig, wanted: str
) -> tuple[Batches, Batches | None]:
    from everydepth.data.reading import Absent

    def batches(split: str, size: int) -> Batches:
        return source.batches(beside, network, split=split, batch_size=size)

    rows = batches("train", fitting.batch_size)
    size = min(fitting.batch_size, len(rows.data))
    # The last, incomplete batch of an epoch is dropped.
    order = {"shuffle": fitting.shuffle, "seed": fitting.seed}
    rows = replace(rows, batch_size=size, drop_last=True, **order)
    if wanted == "none" or (wanted == "auto" and source.one_file):
        return rows, None
    source.check_part("--valid-split", wanted)
    for split in ("valid", "test") if wanted == "auto" else (wanted,):
        try:
            return rows, batches(split, max(fitting.batch_size, 128))
        except Absent:  # but a split that exists and cannot be read is an error
            if wanted != "auto":
                raise
    return rows, None


def _copy_preprocessing(source: str, target: Path, network: PreTrainedModel) -> None:
    """Save the tokenizer or the image preprocessing with the trained model."""
    from everydepth.exits.load import load_tokenizer

    if not target.is_dir():
        return
    file = preprocessor_file(source)
    if file is not None:
        (target / "preprocessor_config.json").write_bytes(file.read_bytes())
    if network.main_input_name == "input_ids":
        load_tokenizer(source).save_pretrained(target)


def _show(result: FitResult, console: Console) -> None:
    seconds = f"{result.seconds:.0f} s"
    console.print(f"{result.stopped} after {result.steps} steps ({seconds})", markup=False)
    if result.valid:
        show(result, console)
    else:
        console.print(
            "no metrics by depth, since there was no validation data; measure them with: "
            f"everydepth trace {result.path} --data DATA",
            markup=False,
        )
    console.print(f"wrote {result.path}; see it with: everydepth report {result.path}")


def _dry_run(
    shown: dict[str, Any], net: EveryDepth, rows: Batches, fitting: FitConfig, console: Console
) -> None:
    import yaml

    from everydepth.results.layout import table_of
    from everydepth.tracing.parameters import parameters_by_depth
    from everydepth.training.cost import cost_of

    console.print(yaml.safe_dump(shown, sort_keys=False).rstrip(), markup=False, highlight=False)
    console.print(replace(table_of(parameters_by_depth(net.stream)), title="", units=()))
    steps = fitting.steps or cast(int, fitting.epochs) * len(rows)
    cost = cost_of(
        net, next(iter(rows)), optimizer=fitting.optimizer, pieces=fitting.grad_accumulation
    )
    console.print(
        f"memory: about {cost.memory / 2**20:,.0f} MiB ({cost.activations / 2**20:,.0f} of it "
        f"activations); time: about {cost.seconds * steps:,.0f} s for {steps:,} steps of "
        f"{1000 * cost.seconds:,.0f} ms on this machine, one process",
        markup=False,
        highlight=False,
    )
