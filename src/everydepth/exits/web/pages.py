"""Write the folder of a web page: graphs, runtime, description, and the page itself."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from everydepth.errors import UnsupportedModelError
from everydepth.exits.onnx import runtime
from everydepth.exits.policies import NEVER, Policy
from everydepth.exits.profile import Profile
from everydepth.exits.web import pictures, text
from everydepth.exits.web.runtime import NETWORKS, TOKENS, runtime_files
from everydepth.stream import ResidualStream

_PAGE = Path(__file__).parent / "page"
_SHARES = ("accuracy", "agreement")  # metrics that are shares, shown in percent


@torch.no_grad()
def write(
    stream: ResidualStream,
    example: Mapping[str, Tensor],
    folder: Path,
    *,
    tokenizer: Any,
    exits: Policy | None,
    profile: Profile | None,
    runtime_from: str | Path | None,
) -> None:
    """Write graphs, page and description; every depth is compared with the model first."""
    runtime()
    described: dict[str, Any] = {
        "model": stream.name,
        "depth": stream.depth,
        "thresholds": _thresholds(stream, exits),
        "metric": None if profile is None else profile.metric,
        "share": profile is not None and profile.metric in _SHARES,
        "quality": None if profile is None else [d.quality for d in profile.depths],
    }
    if stream.task == "causal_lm":
        files = runtime_files(runtime_from, (NETWORKS, TOKENS))
        described |= text.write(stream, example, tokenizer, folder)
    else:
        files = runtime_files(runtime_from, (NETWORKS,))
        described |= pictures.write(stream, example, folder)
    (folder / "model.json").write_text(json.dumps(described), "utf-8")
    (folder / "runtime").mkdir()
    for file in files:
        shutil.copy(file, folder / "runtime" / file.name)
    for file in _PAGE.iterdir():
        shutil.copy(file, folder / file.name)


def _thresholds(stream: ResidualStream, exits: Policy | None) -> list[float | None] | None:
    if exits is None:
        return None
    if exits.kind != "confidence":
        raise UnsupportedModelError(
            f"a web page can only exit by confidence, but this policy uses {exits.kind}; calibrate "
            "with policy='confidence'"
        )
    return [None if value == NEVER else float(value) for value in exits.thresholds(stream)]
