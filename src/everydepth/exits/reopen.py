"""Verify an export: load the written folder with the stock class, and compare predictions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn

from everydepth.errors import FOREIGN, BatchError, EveryDepthError, ExportError
from everydepth.progress import quiet_transformers
from everydepth.stream import Batch, ResidualStream, as_stream, unwrapped
from everydepth.stream.discovery.example import examples
from everydepth.stream.states import are_finite

_REFUSED = (StrictDataclassError, *FOREIGN)


def stock(model: nn.Module, folder: Path) -> nn.Module:
    """The model in a folder, loaded by the class of `model`."""
    cls: Any = type(model)
    with quiet_transformers():
        opened, info = cls.from_pretrained(folder, dtype="auto", output_loading_info=True)
    # A part that the model was built without, such as a pooler, is not missing.
    parts = {name for name, _ in model.named_modules()}
    missing = {key for key in info["missing_keys"] if str(key).rpartition(".")[0] in parts}
    lost = sorted({*missing, *info["mismatched_keys"], *info["unexpected_keys"]}, key=str)
    if lost:
        raise ExportError(_changed(cls.__name__, f"{', '.join(map(str, lost[:3]))} does not fit"))
    return opened.eval()


@torch.no_grad()
def check_reopened(
    written: ResidualStream,
    folder: Path,
    example: Batch | None,
    reopen: Callable[[nn.Module, Path], nn.Module] = stock,
) -> Tensor:
    """The prediction of both; an error if the folder holds a different model."""
    name = written.name
    try:
        opened = as_stream(reopen(unwrapped(written.model), folder), **written.options)
    except (EveryDepthError, *_REFUSED) as error:
        if isinstance(error, ExportError):
            raise
        raise ExportError(_changed(name, f"it cannot be opened: {error}")) from error
    if opened.depth != written.depth:
        raise ExportError(_changed(name, f"{opened.depth} blocks instead of {written.depth}"))
    batch, wanted = _predicted(written, example)
    if not bool(are_finite(wanted).all()):
        written.observe(batch).check_predictions()
    try:
        found = _prediction(opened, batch)
    except _REFUSED as error:
        raise ExportError(_changed(name, f"it does not run: {error}")) from error
    same = found.shape == wanted.shape
    if not same or not torch.allclose(found, wanted, rtol=1e-3, atol=1e-4, equal_nan=True):
        gap = f" by up to {float((found - wanted).abs().max()):.1e}" if same else ""
        raise ExportError(_changed(name, f"its predictions differ{gap}"))
    return found


def _predicted(stream: ResidualStream, example: Batch | None) -> tuple[Mapping[str, Any], Tensor]:
    """A batch that the model accepts, and its prediction."""
    given = examples(unwrapped(stream.model)) if example is None else [stream.check_batch(example)]
    refused: Exception | None = None
    for batch in given:
        try:
            return batch, _prediction(stream, batch)
        except _REFUSED as error:
            refused = error
    raise BatchError(
        f"{stream.name} accepts none of the batches generated to verify the export ({refused}); "
        "pass example=: a batch of model inputs"
    )


def _prediction(stream: ResidualStream, batch: Mapping[str, Any]) -> Tensor:
    on = {k: v.cpu() if isinstance(v, Tensor) else v for k, v in batch.items()}
    return stream.prediction(stream.call(stream.arguments(on, None))).float()


def _changed(name: str, what: str) -> str:
    return (
        f"nothing was written: {name}.from_pretrained would load a different model: {what}. Its "
        "config cannot describe this cut; use another depth, format='onnx', or save the state dict "
        "of everydepth.at_depth(model, k)"
    )
