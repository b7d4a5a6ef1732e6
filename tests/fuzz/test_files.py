"""A file that is damaged is refused in our words, or read as what it was."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import lzma
import shutil
import tarfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import transformers as hf
from hypothesis import strategies as st
from PIL import Image
from tests.fuzz.budget import fuzzed
from tests.fuzz.values import RECIPE, seeing, writing
from tests.fuzz.watching import unchanged
from tests.helpers.gguf_files import write_tiny
from tests.helpers.tokenizing import byte_level
from tests.helpers.training import net, points, same, weights

import everydepth as ed
import everydepth.data
from everydepth.engines.gguf_file import GGUF
from everydepth.errors import EveryDepthError
from everydepth.exits.load import load_tokenizer
from everydepth.serving.simulation import read_load
from everydepth.training import Callback, Training
from everydepth.training.lora import with_lora
from everydepth_papers.evidence.running import reproduce

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


def _traced() -> ed.Results:
    world = seeing()
    return ed.trace(world.model, world.rows(), ["loss", "accuracy"], **QUIET)


def _save_results(folder: Path) -> None:
    _traced().save(folder)


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


def _tokens(folder: Path) -> None:
    byte_level().save_pretrained(folder)


def _profiled(folder: Path) -> None:
    world = seeing()
    ed.profile(world.model, world.rows(), repeats=1, **QUIET).save(folder)


def _swept(folder: Path) -> None:
    ed.sweep({"a": [1, 2]}, _cell, run=folder, **QUIET)


def _cell(a: int) -> dict[str, int]:
    return {"b": a}


def _grown(folder: Path, resume: bool = False) -> Any:
    with torch.random.fork_rng(devices=[]):  # it seeds
        world = seeing()
    rows = (world.rows(), world.rows())
    small: dict[str, Any] = {"rounds": 1, "steps": 1, "batch_size": 4}
    return ed.grow(world.model, *rows, run=folder, resume=resume, **small, **QUIET)


def _reproduced(folder: Path) -> Any:
    return reproduce(RECIPE, "smoke", run=folder, **QUIET)


def _adapter(folder: Path) -> None:
    world = writing()
    world.model.save_pretrained(folder / "base")  # pyright: ignore[reportCallIssue]
    model = hf.AutoModelForCausalLM.from_pretrained(folder / "base")
    with_lora(model, 1).save_pretrained(folder / "adapter")


def _json(content: Any) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        folder.mkdir()
        (folder / "a.json").write_text(json.dumps(content))

    return write


def _from_json(read: Callable[[Any], Any]) -> Callable[[Path], Any]:
    """Reads content that is JSON; parsing it is not ours."""

    def found(folder: Path) -> None:
        try:
            content = json.loads((folder / "a.json").read_text())
        except (ValueError, OSError):
            return
        read(content)

    return found


def _text(folder: Path) -> None:
    folder.mkdir()
    (folder / "a.txt.xz").write_bytes(lzma.compress(b"one two three\n" * 9))


def _idx(folder: Path) -> None:
    folder.mkdir()
    pixels, labels = bytes(range(64)) * 3, bytes([0, 1, 2])
    sizes = [n.to_bytes(4, "big") for n in (3, 8, 8)]
    images = folder / "train-images-idx3-ubyte.gz"
    images.write_bytes(gzip.compress(b"\0\0\x08\x03" + b"".join(sizes) + pixels))
    (folder / "train-labels-idx1-ubyte").write_bytes(b"\0\0\x08\x01" + sizes[0] + labels)


def _cifar(folder: Path) -> None:
    folder.mkdir()
    (folder / "data_batch_1.bin").write_bytes(b"".join(bytes([n]) + bytes(3072) for n in range(3)))
    (folder / "batches.meta.txt").write_text("\n".join(f"class{n}" for n in range(10)))


def _sheets(folder: Path) -> None:
    folder.mkdir()
    Image.new("RGB", (64, 64)).save(folder / "data_batch_1.webp", lossless=True)
    np.save(folder / "train_labels.npy", np.arange(4))


def _archive(name: str, file: str, members: dict[str, str]) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / name).mkdir(parents=True)
        with tarfile.open(folder / name / file, "w:xz") as archive:
            for member, text in members.items():
                info = tarfile.TarInfo(member)
                info.size = len(text)
                archive.addfile(info, io.BytesIO(text.encode()))

    return write


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
    "a profile": (_profiled, lambda folder: ed.Profile.load(folder).choose(max_drop=0.1)),
    "a sweep to continue": (
        _swept, lambda folder: ed.sweep({"a": [1, 2]}, _cell, run=folder, **QUIET).rows(),
    ),
    "growth to resume": (_grown, lambda folder: _grown(folder, resume=True)),
    "a reproduction to resume": (_reproduced, lambda folder: _reproduced(folder).table()),
    "an adapter": (_adapter, lambda folder: ed.load(folder / "adapter")),
    "a tokenizer": (_tokens, load_tokenizer),
    "an untrusted tokenizer": (_tokens, lambda folder: load_tokenizer(folder, trusted=False)),
    "an objective": (
        _json(ed.lpa(early=0.2).sampled(1).annealed().to_json()),
        _from_json(lambda content: ed.Objective.from_json(content).weights(0, 9, 3)),
    ),
    "results as JSON": (
        _json(_traced().to_json()), _from_json(lambda found: ed.Results.from_json(found).table()),
    ),
    "a load": (
        _json([{"at": 0.5, "prompt": 3, "tokens": 2, "depth": 1}] * 2),
        lambda folder: read_load(folder / "a.json"),
    ),
    "columns": (
        _table("a.csv"),
        lambda folder: everydepth.data.load_columns(folder / "a.csv")["label"],
    ),
    "a packed text": (_text, lambda folder: everydepth.data.load_text(folder / "a.txt.xz")),
    "IDX images": (_idx, everydepth.data.load_images),
    "CIFAR images": (_cifar, everydepth.data.load_images),
    "sheets of images": (_sheets, everydepth.data.load_images),
    "an archive of news": (
        _archive(
            "20newsgroups", "20news-bydate.tar.xz",
            {"x-train/a/1": "one", "x-train/b/2": "two"},
        ),
        lambda folder: everydepth.data.load("20newsgroups", root=folder),
    ),
    "an archive of tweets": (
        _archive(
            "tweeteval", "tweeteval_datasets.tar.xz",
            {"x/irony/train_text.txt": "a\nb", "x/irony/train_labels.txt": "0\n1",
             "x/irony/mapping.txt": "0\tno\n1\tyes"},
        ),
        lambda folder: everydepth.data.load("tweeteval", root=folder, task="irony"),
    ),
    "a CSV table": (_table("a.csv"), lambda folder: ed.data.load(folder / "a.csv")),
    "a JSON table": (_table("a.jsonl"), lambda folder: ed.data.load(folder / "a.jsonl")),
    "a parquet table": (_table("a.parquet"), lambda folder: ed.data.load(folder / "a.parquet")),
    "a GGUF file": (_gguf, lambda folder: GGUF.read(folder / "model.gguf")),
    "a GGUF file to cut": (
        _gguf,
        lambda folder: ed.export(folder / "model.gguf", folder / "cut.gguf", depth=1),
    ),
}  # fmt: skip

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
