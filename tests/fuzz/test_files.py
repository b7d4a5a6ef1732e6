"""A file that is damaged is refused in our words, or read as what it was."""

from __future__ import annotations

import contextlib
import json
import shutil
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from hypothesis import strategies as st
from tests.fuzz.budget import fuzzed
from tests.fuzz.values import seeing
from tests.fuzz.watching import unchanged
from tests.helpers.gguf_files import write_tiny
from tests.helpers.training import net, points, same, weights

import everydepth as ed
import everydepth.data
from everydepth.engines.gguf_file import GGUF
from everydepth.errors import EveryDepthError
from everydepth.training import Callback, Training

QUIET: dict[str, Any] = {"progress": False}
FIT: dict[str, Any] = {"steps": 4, "batch_size": 16, "save_every": 2, **QUIET}


class Crash(Callback):
    """Leaves after the third step, without a word."""

    class Left(Exception):
        pass

    def on_step(self, training: Training) -> None:
        if training.step == 3:
            raise self.Left


def _interrupted(folder: Path) -> None:
    with pytest.raises(Crash.Left):
        ed.fit(net(), points(32), run=folder, callbacks=[Crash()], **FIT)


def _finished(folder: Path) -> None:
    ed.fit(net(), points(32), points(16, 1), run=folder, **FIT)


def _read_run(folder: Path) -> Any:
    run = ed.Run.open(folder)
    saved = run.checkpoint()
    return run.metrics(), run.results(), run.best(), saved.load("model"), saved.load("optimizer")


_whole: list[Any] = []


def _resume(folder: Path) -> None:
    """A damaged run that is resumed ends with the weights it would have had, if at all."""
    if not _whole:
        with torch.random.fork_rng(devices=[]):
            again = net()
        ed.fit(again, points(32), callbacks=[Callback()], **FIT)
        _whole.append(weights(again))
    with torch.random.fork_rng(devices=[]):  # it seeds
        resumed = net()
    ed.fit(resumed, points(32), run=folder, resume=True, callbacks=[Callback()], **FIT)
    assert same(weights(resumed), _whole[0]), "resumed to other weights"


def _save_model(folder: Path) -> None:
    model: Any = seeing().model
    model.save_pretrained(folder)


def _save_results(folder: Path) -> None:
    world = seeing()
    ed.trace(world.model, world.rows(), ["loss", "accuracy"], **QUIET).save(folder)


def _table(name: str) -> Callable[[Path], None]:
    frame = pd.DataFrame({"text": ["one", "two", "three"], "label": [0, 1, 0]})

    def write(folder: Path) -> None:
        folder.mkdir()
        if name.endswith("parquet"):
            frame.to_parquet(folder / name)
        elif name.endswith("jsonl"):
            frame.to_json(folder / name, orient="records", lines=True)
        else:
            frame.to_csv(folder / name, index=False)

    return write


def _policy(folder: Path) -> None:
    folder.mkdir()
    world = seeing()
    found = ed.calibrate(world.model, world.rows(), risk=0.5, **QUIET)
    found.save(folder / "policy.json")


def _balconies(folder: Path) -> None:
    ed.balcony(seeing().model, [1]).save_pretrained(folder)


def _gguf(folder: Path) -> None:
    folder.mkdir()
    write_tiny(folder / "model.gguf")


KINDS: dict[str, tuple[Callable[[Path], None], Callable[[Path], Any]]] = {
    "a run": (_finished, _read_run),
    "a run to resume": (_interrupted, _resume),
    "a run to report": (_finished, lambda folder: ed.report(folder, folder / "page.html")),
    "a model": (_save_model, ed.load),
    "a model of a depth": (_save_model, lambda folder: ed.load(folder, depth=1)),
    "an untrusted model": (_save_model, lambda folder: ed.load(folder, trusted=False)),
    "the model of a run": (_finished, ed.load),
    "a model with balconies": (_balconies, ed.load),
    "results": (_save_results, lambda folder: ed.Results.load(folder).table()),
    "results to report": (_save_results, lambda f: ed.report(f, f / "page.html")),
    "a policy": (_policy, lambda folder: ed.Policy.load(folder / "policy.json")),
    "a CSV table": (_table("a.csv"), lambda folder: ed.data.load(folder / "a.csv")),
    "a JSON table": (_table("a.jsonl"), lambda folder: ed.data.load(folder / "a.jsonl")),
    "a parquet table": (_table("a.parquet"), lambda folder: ed.data.load(folder / "a.parquet")),
    "a GGUF file": (_gguf, lambda folder: GGUF.read(folder / "model.gguf")),
    "a GGUF file to cut": (
        _gguf,
        lambda folder: ed.export(folder / "model.gguf", folder / "cut.gguf", depth=1),
    ),
}

# -- damage -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Damage:
    """What happens to one file; places are shares of its size, so that they fit any."""

    file: float
    how: str
    place: float
    value: Any = None

    def do(self, folder: Path) -> None:
        files = [file for file in sorted(folder.rglob("*")) if file.is_file()]
        if not files:
            return
        file = files[int(self.file * len(files))]
        content = bytearray(file.read_bytes())
        place = int(self.place * len(content))
        if self.how == "deleted":
            file.unlink()
        elif self.how == "truncated":
            file.write_bytes(content[:place])
        elif self.how == "grown":
            file.write_bytes(content + b"\0\xff{" * 5)
        elif self.how == "a folder":
            file.unlink()
            file.mkdir()
        elif self.how == "flipped" and content:
            content[place] ^= 1 << (self.value or 0) % 8
            file.write_bytes(content)
        elif self.how == "other JSON" and file.suffix == ".json":
            with contextlib.suppress(ValueError):  # damaged already
                file.write_text(json.dumps(self._changed(json.loads(content))))

    def _changed(self, tree: Any) -> Any:
        """One value of a tree replaced, or left out."""
        holders: list[tuple[Any, Any]] = []

        def look(node: Any) -> None:
            items = node.items() if isinstance(node, dict) else enumerate(node)
            for key, value in list(items):
                holders.append((node, key))
                if isinstance(value, dict | list):
                    look(value)

        look(tree if isinstance(tree, dict | list) else [tree])
        if holders:
            node, key = holders[int(self.place * len(holders))]
            if self.value == 7 and isinstance(node, dict):
                del node[key]
            else:
                node[key] = _VALUES[(self.value or 0) % len(_VALUES)]
        return tree


_VALUES: tuple[Any, ...] = (None, -1, 10**30, 1e308, "", "../x", [], {}, True, ["a"], [[1]])
SHARE = st.floats(0, 1, exclude_max=True)
HOW = (
    "truncated",
    "flipped",
    "flipped",
    "other JSON",
    "other JSON",
    "deleted",
    "grown",
    "a folder",
)
DAMAGE = st.builds(
    Damage,
    SHARE,
    st.sampled_from(HOW),
    SHARE,
    st.integers(0, 30),
)


@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_file_is_refused_or_read_as_it_was(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jaxtyping.config.jaxtyping_disable", True)
    make, read = KINDS[kind]
    whole, used = tmp_path / "whole", tmp_path / "used"
    make(whole)
    model = torch.nn.Module()  # only the random numbers are of interest

    def check(damages: list[Damage]) -> None:
        shutil.rmtree(used, ignore_errors=True)
        shutil.copytree(whole, used)
        for damage in damages:
            damage.do(used)
        with unchanged(model, folder=whole), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with contextlib.suppress(EveryDepthError):
                read(used)

    fuzzed(st.lists(DAMAGE, min_size=1, max_size=2), check, examples=6)
