"""`everydepth train`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from everydepth.cli.options import DataRoot, MaxLength
from everydepth.cli.presets import PRESETS, Facts, byte_tokenizer
from everydepth.errors import DataError, SettingError

if TYPE_CHECKING:
    from rich.console import Console
    from transformers import PreTrainedModel

    from everydepth.data import Batches
    from everydepth.training import FitResult

    Context = typer.Context
else:
    # What typer hands over is not its own Context, but the class that one is derived from.
    Context = typer.Context.__base__

_MODEL = f"A folder, a run, a Hugging Face name, or a preset: {', '.join(PRESETS)}."


def train(
    context: Context,
    model: Annotated[str | None, typer.Option("--model", "-m", help=_MODEL)] = None,
    data: Annotated[
        str | None,
        typer.Option("--data", "-d", help="Data by name (digits, fashion-mnist, ...) or path."),
    ] = None,
    objective: Annotated[
        str,
        typer.Option(
            help="end_to_end, lpa, aligned, cosine_regularized, multi_classifier, layerskip; with "
            "settings: lpa:early=0.2+annealed:by=0.8+sampled:k=2."
        ),
    ] = "lpa",
    config: Annotated[
        Path | None,
        typer.Option(help="A YAML or JSON file with these options; flags override it."),
    ] = None,
    epochs: Annotated[int | None, typer.Option(min=1)] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Instead of epochs.")] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Rows of a step, all processes.")] = 32,
    optimizer: Annotated[str, typer.Option(help="adamw, adam or sgd.")] = "adamw",
    lr: Annotated[float | None, typer.Option(help="Learning rate.")] = None,
    weight_decay: Annotated[float | None, typer.Option()] = None,
    schedule: Annotated[
        str, typer.Option(help="constant, cosine, one_cycle or multi_step.")
    ] = "cosine",
    warmup: Annotated[float, typer.Option(help="Steps; below 1, a share of them.")] = 0.0,
    grad_accumulation: Annotated[int, typer.Option(min=1, help="Pieces of a batch.")] = 1,
    clip: Annotated[float | None, typer.Option(help="Largest norm of the gradient.")] = None,
    precision: Annotated[str | None, typer.Option(help="fp32 or bf16.")] = None,
    compile_blocks: Annotated[bool, typer.Option("--compile", help="torch.compile.")] = False,
    label_smoothing: Annotated[float, typer.Option()] = 0.0,
    valid_split: Annotated[
        str, typer.Option(help="Which part validates; auto: valid, else test; none.")
    ] = "auto",
    validate_every: Annotated[int | None, typer.Option(min=1, help="Steps.")] = None,
    early_stopping: Annotated[
        int | None, typer.Option(min=1, help="Validations without a gain.")
    ] = None,
    save_every: Annotated[int | None, typer.Option(min=1, help="Steps.")] = None,
    keep: Annotated[int, typer.Option(min=1, help="Checkpoints to keep.")] = 2,
    run: Annotated[Path | None, typer.Option("--run", "-o", help="The run directory.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run.")] = False,
    blocks: Annotated[int | None, typer.Option(min=1, help="Blocks of a preset.")] = None,
    data_root: DataRoot = None,
    max_samples: Annotated[int | None, typer.Option(min=1, help="Use so many rows.")] = None,
    max_length: MaxLength = 128,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    log_every: Annotated[int, typer.Option(min=1, help="Steps.")] = 10,
    tracker: Annotated[
        list[str] | None, typer.Option(help="tensorboard, wandb or mlflow; may be repeated.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would be done, and what it would cost.")
    ] = False,
) -> None:
    """Train a network at every depth.

    everydepth train -m vit-tiny -d digits --epochs 10 -o runs/lpa

    Everything goes to a run directory; the same command with --resume continues it exactly where
    it was stopped. On several GPUs or machines: accelerate launch -m everydepth train ...
    """
    given = _with_file(context, config)
    for name in ("model", "data"):
        if given[name] is None:
            raise SettingError(f"--{name} is missing; give it as an option or in the config file")
    if given["epochs"] is None and given["steps"] is None:
        given["epochs"] = 10
    _train(given)


# What decides the outcome and `fit` does not know.
_ABOUT = ("model", "data", "blocks", "max_samples", "max_length", "valid_split")


def _train(given: dict[str, Any]) -> None:
    import torch
    from accelerate import PartialState
    from rich.console import Console

    from everydepth.objectives import objective_of
    from everydepth.training import EveryDepth, fit

    console = Console()
    with TemporaryDirectory() as scratch:
        torch.manual_seed(given["seed"])
        network, source = _model(given, Path(scratch))
        rows, valid = _data(given, network, source)
        goal = objective_of(given["objective"])
        net = EveryDepth(network, goal, label_smoothing=given["label_smoothing"])
        if given["dry_run"]:
            _dry_run(given, net, rows, console)
            return
        run = given["run"] or _default_run(given)
        result = fit(
            net,
            rows,
            valid,
            run=run,
            trackers=given["tracker"] or (),
            compile=given["compile_blocks"],
            about={name: given[name] for name in _ABOUT},
            **{name: given[name] for name in _FIT},
        )
        state = PartialState()
        if state.is_main_process:
            _copy_preprocessing(source, Path(run) / "model", network, given["model"])
            _show(result, net.stream.depth, console)
        if state.num_processes > 1:
            state.destroy_process_group()


_FIT = (
    "epochs",
    "steps",
    "batch_size",
    "optimizer",
    "lr",
    "weight_decay",
    "schedule",
    "warmup",
    "grad_accumulation",
    "clip",
    "precision",
    "validate_every",
    "early_stopping",
    "save_every",
    "keep",
    "resume",
    "seed",
    "log_every",
)


# -- options ---------------------------------------------------------------------------------------


def _with_file(context: Context, file: Path | None) -> dict[str, Any]:
    """The options, those of the file in the place of defaults."""
    given = {k: v for k, v in context.params.items() if k != "context"}
    content = {} if file is None else _read(file)
    for key, value in content.items():
        name = key.replace("-", "_")
        name = "compile_blocks" if name == "compile" else name
        if name not in given or name == "config":
            known = ", ".join(sorted(k for k in given if k != "config"))
            raise SettingError(f"{file} has {key!r}, which is no option of train; known: {known}")
        if _source(context, name) != "COMMANDLINE":
            given[name] = value
    # Of epochs and steps the one on the command line wins over the other in the file.
    for name, other in (("epochs", "steps"), ("steps", "epochs")):
        if _source(context, name) == "COMMANDLINE" and other in content:
            given[other] = None
    given["run"] = None if given["run"] is None else str(given["run"])
    return given


def _source(context: Context, name: str) -> str | None:
    """Where an option comes from: COMMANDLINE, DEFAULT, ..."""
    return getattr(context.get_parameter_source(name), "name", None)


def _read(file: Path) -> dict[str, Any]:
    import yaml

    try:
        # Every JSON file is a YAML file.
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise SettingError(f"{file} cannot be read as YAML or JSON: {error}") from error
    if not isinstance(content, dict):
        raise SettingError(f"{file} holds {type(content).__name__}; it needs options by name")
    return cast(dict[str, Any], content)


def _default_run(given: Mapping[str, Any]) -> str:
    from everydepth.objectives import objective_of

    goal = objective_of(given["objective"]).name
    names = (Path(str(given["model"])).name, Path(str(given["data"])).name.replace(":", "-"), goal)
    return str(Path("runs") / "-".join(names))


# -- model and data --------------------------------------------------------------------------------


def _model(given: Mapping[str, Any], scratch: Path) -> tuple[PreTrainedModel, str]:
    """The network in training mode, and where its tokenizer or preprocessor is."""
    from everydepth.data import load
    from everydepth.exits.load import load as load_model

    name = str(given["model"])
    if name not in PRESETS:
        if given["blocks"] is not None:
            raise SettingError(f"--blocks is for presets ({', '.join(PRESETS)}), not for {name!r}")
        return load_model(name).train(), name
    facts = Facts.of(load(given["data"], root=given["data_root"]))
    network = PRESETS[name](name, facts, given["blocks"])
    if facts.text:
        byte_tokenizer().save_pretrained(scratch)
    return network.train(), str(scratch)


def _data(
    given: Mapping[str, Any], network: PreTrainedModel, source: str
) -> tuple[Batches, Batches | None]:
    from everydepth.cli.loading import load_batches

    def batches(split: str, size: int) -> Batches:
        return load_batches(
            source,
            network,
            given["data"],
            split=split,
            root=given["data_root"],
            batch_size=size,
            max_length=given["max_length"],
            max_samples=given["max_samples"],
        )

    rows = batches("train", given["batch_size"])
    size = min(given["batch_size"], len(rows.data))
    # Rows that do not fill a batch wait for the order of the next epoch.
    rows = replace(rows, batch_size=size, shuffle=True, drop_last=True, seed=given["seed"])
    wanted = given["valid_split"]
    if wanted == "none":
        return rows, None
    for split in ("valid", "test") if wanted == "auto" else (wanted,):
        try:
            return rows, batches(split, max(given["batch_size"], 128))
        except DataError:
            if wanted != "auto":
                raise
    return rows, None


def _copy_preprocessing(source: str, target: Path, network: PreTrainedModel, name: str) -> None:
    """Put tokenizer and image normalisation beside the trained model, so that it can be used."""
    from transformers import AutoTokenizer
    from transformers.utils.hub import cached_file

    if not target.is_dir():
        return
    file = cached_file(
        source,
        "preprocessor_config.json",
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    if file:
        (target / "preprocessor_config.json").write_bytes(Path(file).read_bytes())
    if network.main_input_name == "input_ids":
        AutoTokenizer.from_pretrained(source).save_pretrained(target)


# -- what is shown ---------------------------------------------------------------------------------


def _show(result: FitResult, depth: int, console: Console) -> None:
    from rich.table import Table

    seconds = f"{result.seconds:.0f} s"
    console.print(f"{result.stopped} after {result.steps} steps ({seconds})", markup=False)
    if result.valid:
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
        for name in ("depth", *result.valid):
            table.add_column(name, justify="right")
        for index in range(depth):
            values = (f"{column[index]:.4f}" for column in result.valid.values())
            table.add_row(str(index + 1), *values)
        console.print(table)
    else:
        console.print(
            "no figures by depth: the data has no part to validate on (valid or test), or "
            "--valid-split none was given; name a part, or trace the model",
            markup=False,
        )
    console.print(f"run: {result.path}; model: {cast(Path, result.path) / 'model'}", markup=False)


def _dry_run(given: Mapping[str, Any], net: Any, rows: Batches, console: Console) -> None:
    import yaml
    from rich.table import Table

    from everydepth.cli.trace import parameters_by_depth
    from everydepth.training.cost import cost_of

    shown = {k: v for k, v in given.items() if k not in ("config", "dry_run")}
    shown |= {"objective": net.objective.to_json(), "run": given["run"] or _default_run(given)}
    console.print(yaml.safe_dump(shown, sort_keys=False).rstrip(), markup=False, highlight=False)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("depth", justify="right")
    table.add_column("parameters", justify="right")
    for depth, count in enumerate(parameters_by_depth(net.stream)):
        table.add_row(str(depth), f"{count:,}")
    console.print(table)
    steps = given["steps"] or given["epochs"] * len(rows)
    cost = cost_of(
        net,
        next(iter(rows)),
        optimizer=given["optimizer"],
        pieces=given["grad_accumulation"],
    )
    console.print(
        f"memory: about {cost.memory / 2**20:,.0f} MiB ({cost.activations / 2**20:,.0f} of it "
        f"activations); time: about {cost.seconds * steps:,.0f} s for {steps:,} steps of "
        f"{1000 * cost.seconds:,.0f} ms on this machine, one process",
        markup=False,
        highlight=False,
    )
