"""Run llama.cpp in a separate process.

A damaged file may crash that process, and the memory it maps is not counted as ours.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

from everydepth.engines.gguf_file import GGUF
from everydepth.environment import require
from everydepth.errors import ExportError

_PATIENCE = 600  # seconds for loading and a few tokens
_TOP = 64  # number of most probable tokens compared at each step


@dataclass(frozen=True, kw_only=True)
class Step:
    """One token of a continuation, and the log-probabilities of the most probable tokens."""

    token: int
    top: dict[int, float]


def check_installed() -> None:
    """Raise an error if llama.cpp or the package gguf is not installed."""
    require("a GGUF file, which is checked in llama.cpp,", "gguf", "xllamacpp", extra="gguf")


def continued(
    paths: Sequence[Path], prompts: Sequence[Sequence[int]], *, tokens: int = 8, top: int = _TOP
) -> list[list[list[Step]]]:
    """The greedy continuation of each prompt by each file.

    Uses float32 keys and values on one thread, so that equal files give equal numbers.
    """
    asked = {
        "paths": [str(path) for path in paths],
        "prompts": [list(prompt) for prompt in prompts],
        "tokens": tokens,
        "top": top,
        "stop": _stop(GGUF.read(paths[0])),
    }
    return [[[_step(step) for step in row] for row in rows] for rows in _asked(asked)]


def tokenized(path: Path, texts: Sequence[str]) -> list[list[int]]:
    """The tokens of texts, including the special tokens the file adds."""
    return _asked({"paths": [str(path)], "texts": list(texts)})


def _stop(file: GGUF) -> int:
    """A token that is not text."""
    for name in ("eos", "bos", "padding", "unknown"):
        found = file.values.get(f"tokenizer.ggml.{name}_token_id")
        if found is not None:
            return int(found.scalar())
    return 0


def _asked(question: dict[str, Any]) -> Any:
    check_installed()
    try:
        done = subprocess.run(
            [sys.executable, "-m", "everydepth.engines.llama_worker"],
            input=json.dumps(question),
            capture_output=True,
            text=True,
            timeout=_PATIENCE,
        )
    except subprocess.TimeoutExpired as error:
        raise ExportError(f"llama.cpp did not answer within {_PATIENCE} s") from error
    if done.returncode != 0:
        raise ExportError(f"llama.cpp cannot run the file: {_reason(done.stderr)}")
    return json.loads(done.stdout)


def difference(found: list[list[Step]], expected: list[list[Step]]) -> str | None:
    """A description of the first token that differs, or None."""
    for row, (mine, theirs) in enumerate(zip(found, expected, strict=True), start=1):
        a, b = ([step.token for step in steps] for steps in (mine, theirs))
        if a != b:
            return f"prompt {row} continues with tokens {a} instead of {b}"
    return None


def gap(found: list[list[Step]], expected: list[list[Step]]) -> float:
    """The largest difference of a log-probability. A token missing from one list is taken to be as
    probable as the last one in it."""
    worst = 0.0
    for mine, theirs in zip(found, expected, strict=True):
        for a, b in zip(mine, theirs, strict=True):
            for token in {*a.top, *b.top}:
                if token in a.top and token in b.top:
                    worst = max(worst, abs(a.top[token] - b.top[token]))
                else:
                    (one, other) = (a.top, b.top) if token in a.top else (b.top, a.top)
                    worst = max(worst, one[token] - min(other.values()))
    return worst


def _step(found: dict[str, Any]) -> Step:
    # JSON has no NaN: it arrives as None.
    top = {int(t): float("nan" if logprob is None else logprob) for t, logprob in found["top"]}
    if not all(map(isfinite, top.values())):
        raise ExportError("llama.cpp computes probabilities that are not finite")
    return Step(token=int(found["token"]), top=top)


def _reason(log: str) -> str:
    """The first error in llama.cpp's log, whose lines consist of a time, a letter and a text."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [line.split(" E ", 1)[1] for line in lines if " E " in line]
    return "; ".join(errors[:1] or lines[-1:]) or "it ended without a message"
