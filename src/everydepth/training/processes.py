"""The accelerator and its trackers, for one process or many."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from accelerate import (
    Accelerator,
    DistributedDataParallelKwargs,
    FullyShardedDataParallelPlugin,
    PartialState,
)
from accelerate.tracking import (
    LOGGER_TYPE_TO_CLASS,
    GeneralTracker,
    get_available_trackers,
)
from accelerate.utils import DistributedType, gather_object

from everydepth.config import brief
from everydepth.errors import SettingError
from everydepth.runs.together import on_cpus
from everydepth.training.module import EveryDepth


def accelerator_for(net: EveryDepth, trackers: object, run: str | Path | None) -> Accelerator:
    """An accelerator for DDP or FSDP2, as `accelerate launch` configured it."""
    if not isinstance(trackers, str | Sequence | None):
        raise SettingError(
            f"trackers={brief(trackers)}; use a name such as 'tensorboard', or a list of names and "
            "accelerate trackers"
        )
    trackers = [trackers] if isinstance(trackers, str) else list(trackers or ())
    _check_trackers(trackers)
    # A step may not use every separate head, which DDP must know in advance.
    partial = bool(net.heads)
    accelerator = Accelerator(
        cpu=on_cpus(),
        log_with=cast(Any, trackers or None),
        project_dir=None if run is None else str(run),
        kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=partial)],
    )
    if os.environ.get("ACCELERATE_USE_FSDP") == "true":
        _also_on_cpu(accelerator)
    kind = accelerator.distributed_type
    if kind in (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM, DistributedType.XLA):
        raise SettingError(f"{kind.value} is not supported; use DDP or FSDP")
    if kind == DistributedType.FSDP:
        plugin: Any = accelerator.state.fsdp_plugin
        if plugin.fsdp_version != 2:
            raise SettingError("FSDP version 1 is not supported; launch with --fsdp_version 2")
        # Weights are loaded before they are sharded, and every block is a unit.
        plugin.cpu_ram_efficient_loading = False
        if not plugin.transformer_cls_names_to_wrap:
            names = {type(block.module).__name__ for block in net.stream.blocks}
            plugin.transformer_cls_names_to_wrap = sorted(names)
    return accelerator


def _check_trackers(trackers: Sequence[Any]) -> None:
    """Raise an error for missing trackers; accelerate would silently train without them."""
    known = [str(name) for name in LOGGER_TYPE_TO_CLASS]
    installed = [str(name) for name in get_available_trackers()]
    for name in trackers:
        if isinstance(name, GeneralTracker) or name in (*installed, "all"):
            continue
        if name in known:
            raise SettingError(
                f"tracker {name!r} is not installed; `pip install {name}`, "
                f"or use one that is: {', '.join(installed) or 'none'}"
            )
        raise SettingError(f"there is no tracker {name!r}; choose from {', '.join(known)}")


def start_trackers(accelerator: Accelerator, config: dict[str, Any]) -> None:
    """Start the trackers; turns any error of theirs into a `SettingError`."""
    try:
        accelerator.init_trackers("everydepth", config=config)
    except Exception as error:
        raise SettingError(
            f"a tracker did not start: {error}. Set it up as its documentation says, or leave it "
            "out: the run's metrics.jsonl has all metrics"
        ) from error


def _also_on_cpu(accelerator: Accelerator) -> None:
    """Use FSDP on CPUs, which accelerate restricts to accelerators; for tests."""
    if accelerator.distributed_type == DistributedType.MULTI_CPU:
        state: Any = accelerator.state
        state.fsdp_plugin = FullyShardedDataParallelPlugin()
        state.distributed_type = DistributedType.FSDP
        PartialState._shared_state["distributed_type"] = DistributedType.FSDP  # pyright: ignore[reportPrivateUsage]


def of_every_process(value: Any, accelerator: Accelerator) -> list[Any]:
    """One value from each process, on all of them."""
    return gather_object([value]) if accelerator.num_processes > 1 else [value]
