"""Load the model named on a command line, and how it prepares images."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from everydepth.environment import usable_device
from everydepth.errors import DataError
from everydepth.files import read_json

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def load_to_run(source: str, device: str | None = None, *, learns: bool = False) -> PreTrainedModel:
    """A model in the arithmetic it can run in: float16 becomes float32 to learn, and on a CPU,
    which takes several times as long with it."""
    import torch

    from everydepth.exits.load import load
    from everydepth.progress import say

    network = load(source)
    slow = usable_device(device or "cpu").type == "cpu"
    if (learns or slow) and any(p.dtype == torch.float16 for p in network.parameters()):
        say(f"{source} is in float16; it {'learns' if learns else 'runs'} in float32 here")
        network = network.float()
    return network


def preprocessing_of(name: str) -> dict[str, Any]:
    """The preprocessor_config.json of a model; empty if it has none."""
    file = preprocessor_file(name)
    return {} if file is None else read_json(file, DataError)


def preprocessor_file(name: str) -> Path | None:
    """The path of a model's preprocessor_config.json, local or from the Hub, or None."""
    from transformers.utils.hub import cached_file

    file = cached_file(
        name,
        "preprocessor_config.json",
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    return None if file is None else Path(file)
