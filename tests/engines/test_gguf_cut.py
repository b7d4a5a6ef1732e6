"""GGUF files with some of their blocks, run in llama.cpp."""

from __future__ import annotations

import doctest
import importlib.util
import os
import signal
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from tests.helpers.gguf_files import BLOCKS, write_tiny
from typer.testing import CliRunner

import everydepth as ed
from everydepth.cli.main import build_app
from everydepth.engines import gguf_cut, llama_cpp
from everydepth.engines.gguf_cut import cut_gguf, ranges, spelled
from everydepth.engines.gguf_file import GGUF
from everydepth.errors import (
    DataError,
    DepthError,
    ExportError,
    SettingError,
    UnsupportedModelError,
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("gguf") / "model.gguf")


def test_blocks_go_over_byte_for_byte_and_what_counts_them_is_corrected(
    model: Path, tmp_path: Path
) -> None:
    cut = cut_gguf(model, tmp_path / "small.gguf", keep="1,3")
    assert (cut.kept, cut.of, cut.gap) == ((1, 3), 3, 0.0)
    # The reference reader is the gguf package's.
    whole, small = gguf.GGUFReader(model), gguf.GGUFReader(cut.path)
    old = {tensor.name: tensor for tensor in whole.tensors}
    assert len(small.tensors) == len(old) - 9
    for tensor in small.tensors:
        source = old[tensor.name.replace("blk.1.", "blk.2.")]
        assert tensor.tensor_type == source.tensor_type
        assert np.array_equal(tensor.data, source.data)

    def value(reader: Any, key: str) -> Any:
        return reader.fields[key].contents()

    assert value(small, "llama.block_count") == 2
    assert value(small, "llama.feed_forward_length") == [64, 64]
    assert value(small, "everydepth.blocks") == "1,3 of 3"
    changed = {"llama.block_count", "llama.feed_forward_length", "general.size_label"}
    for key in whole.fields.keys() - changed:
        if not key.startswith("GGUF."):
            assert value(small, key) == value(whole, key), key
    assert "general.size_label" not in small.fields


def test_all_blocks_are_the_same_file(model: Path, tmp_path: Path) -> None:
    cut = cut_gguf(model, tmp_path / "all.gguf", depth=BLOCKS)
    assert cut.path.read_bytes() == model.read_bytes()


def test_a_cut_that_llama_cpp_answers_otherwise_is_not_written(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Block 2 in the place of block 1, as a wrong renaming would have it."""
    right = gguf_cut._cut_tensors

    def wrong(whole: GGUF, kept: tuple[int, ...]) -> Any:
        return right(whole, tuple(block + 1 for block in kept))

    monkeypatch.setattr(gguf_cut, "_cut_tensors", wrong)
    with pytest.raises(ExportError, match=r"predict something else than the whole.*Nothing was"):
        cut_gguf(model, tmp_path / "small.gguf", depth=1)
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_llama_cpp_does_not_load_is_not_written(tmp_path: Path) -> None:
    odd = write_tiny(tmp_path / "odd.gguf", architecture="strange")
    with pytest.raises(ExportError, match=r"unknown model architecture: 'strange'.*nothing was"):
        cut_gguf(odd, tmp_path / "small.gguf", depth=1)
    assert [path.name for path in tmp_path.iterdir()] == ["odd.gguf"]


def test_the_command_and_export_cut_a_file(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(build_app(), ["export", str(model), "--depth", "2"])
    assert result.exit_code == 0, result.output
    assert "wrote model-depth2.gguf" in result.output
    assert "2 of 3 blocks" in result.output
    small = Path("model-depth2.gguf")
    with pytest.raises(ExportError, match="already exists; pass overwrite=True"):
        ed.export(model, small, depth=1)
    assert GGUF.read(small).depth == 2
    assert ed.export(model, small, depth=1, overwrite=True) == small.absolute()
    assert GGUF.read(small).depth == 1


def test_the_example_of_cut_gguf_runs(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.gguf").write_bytes(model.read_bytes())
    names = {"cut_gguf": cut_gguf}
    (test,) = doctest.DocTestFinder().find(cut_gguf, "cut_gguf", globs=names)
    assert doctest.DocTestRunner().run(test) == (0, 2)


def ended(model: Path, folder: Path, signum: int) -> int:
    """Export in a process that is ended while llama.cpp runs the file; give its exit code."""
    script = f"""
import os, subprocess, sys
from everydepth.cli.main import main
subprocess.run = lambda *a, **k: os.kill(os.getpid(), {int(signum)})
sys.argv = ["everydepth", "export", {str(model)!r}, "small.gguf", "--depth", "1"]
main()
"""
    return subprocess.run(
        [sys.executable, "-c", script], cwd=folder, env=dict(os.environ)
    ).returncode


def test_an_export_that_is_ended_leaves_nothing(model: Path, tmp_path: Path) -> None:
    assert ended(model, tmp_path, signal.SIGTERM) == 128 + signal.SIGTERM
    assert list(tmp_path.iterdir()) == []


def test_the_next_export_removes_what_a_killed_one_left(model: Path, tmp_path: Path) -> None:
    assert ended(model, tmp_path, signal.SIGKILL) == -signal.SIGKILL
    assert len(list(tmp_path.iterdir())) == 2  # the cut, and the whole file with silent blocks
    (tmp_path / f".tmp-small.gguf-{os.getpid()}-other").touch()  # of a process that lives
    cut_gguf(model, tmp_path / "small.gguf", depth=1)
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"small.gguf", f".tmp-small.gguf-{os.getpid()}-other"}


def test_a_depth_outside_is_refused(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.gguf"
    for depth in (0, 4, -1):
        with pytest.raises(DepthError, match=f"depth {depth}, but model.gguf has 3 blocks; use 1"):
            cut_gguf(model, out, depth=depth)
    for keep in ("2-4", "3,1", "1,1", "0-2", []):
        with pytest.raises(
            DepthError, match=r"but model.gguf has 3 blocks; use numbers from 1 to 3"
        ):
            cut_gguf(model, out, keep=keep)
    with pytest.raises(SettingError, match=r"keep='1-x': '1-x' is neither a block nor a range"):
        cut_gguf(model, out, keep="1-x")
    with pytest.raises(SettingError, match=r"keep='1,3-2': '3-2' runs backwards; write 2-3"):
        cut_gguf(model, out, keep="1,3-2")
    with pytest.raises(SettingError, match="give one: how many blocks, or which"):
        cut_gguf(model, out)
    assert not out.exists()


def test_ranges_are_spelled_as_they_are_read() -> None:
    assert ranges("1-3, 7,9-10") == (1, 2, 3, 7, 9, 10)
    assert spelled(ranges("1-3,7,9-10")) == "1-3,7,9-10"


def test_a_truncated_file_is_refused_wherever_it_ends(model: Path, tmp_path: Path) -> None:
    content = model.read_bytes()
    data = GGUF.read(model).tensors[0].start
    short = tmp_path / "short.gguf"
    for end in (4, 20, 30, 500, data - 200, data + 10, len(content) - 40):
        short.write_bytes(content[:end])
        with pytest.raises(DataError, match="is damaged or truncated"):
            cut_gguf(short, tmp_path / "out.gguf", depth=1)


def test_a_foreign_file_is_refused(model: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.gguf"
    other.write_bytes(b"PK\x03\x04 a zip")
    with pytest.raises(DataError, match=r"^\S*other.gguf does not begin with GGUF"):
        cut_gguf(other, tmp_path / "out.gguf", depth=1)
    with pytest.raises(DataError, match="cannot be read"):
        cut_gguf(tmp_path / "absent.gguf", tmp_path / "out.gguf", depth=1)
    content = model.read_bytes()
    for version, words in ((1, "GGUF version 1;"), (3 << 24, "big-endian GGUF")):
        other.write_bytes(content[:4] + struct.pack("<I", version) + content[8:])
        with pytest.raises(DataError, match=words):
            cut_gguf(other, tmp_path / "out.gguf", depth=1)
    other.write_bytes(content[:16] + struct.pack("<Q", 1 << 60) + content[24:])
    with pytest.raises(DataError, match="is damaged"):
        cut_gguf(other, tmp_path / "out.gguf", depth=1)


_KEY = struct.pack("<Q", 1) + b"a"


@pytest.mark.parametrize(
    ("tensors", "values", "content", "words"),
    [
        (2**60, 0, b"", "its header is incomplete"),
        (0, 2**60, b"", "its header is incomplete"),
        (0, 1, struct.pack("<Q", 2**62), "its header is incomplete"),
        (0, 1, _KEY + struct.pack("<IIQ", 9, 4, 2**60), "its header is incomplete"),
        (
            0,
            1,
            _KEY + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 5000,
            "deeply nested arrays",
        ),
        (0, 2, 2 * (_KEY + struct.pack("<IB", 7, 1)), "has 'a' twice"),
        (1, 0, _KEY + struct.pack("<I", 2**31), "2147483648 dimensions"),
        (1, 0, _KEY + struct.pack("<IQIQ", 1, 4, 0, 2**63), "ends at byte"),
    ],
)
def test_a_header_made_to_fill_the_memory_is_refused(
    tensors: int, values: int, content: bytes, words: str, tmp_path: Path
) -> None:
    file = tmp_path / "hostile.gguf"
    file.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, tensors, values) + content)
    with pytest.raises(DataError, match=words):
        GGUF.read(file)


def test_a_damaged_count_of_blocks_does_not_fill_the_memory(model: Path, tmp_path: Path) -> None:
    count, key = model.read_bytes(), b"llama.block_count"
    at = count.index(key) + len(key) + 4  # the type of the value comes first
    file = tmp_path / "damaged.gguf"
    file.write_bytes(count[:at] + struct.pack("<I", 2**32 - 1) + count[at + 4 :])
    with pytest.raises(UnsupportedModelError, match="claims 4294967295 blocks"):
        cut_gguf(file, tmp_path / "out.gguf", depth=2**31)
    with pytest.raises(SettingError, match="no model has 99999999999 blocks"):
        cut_gguf(model, tmp_path / "out.gguf", keep="1-99999999999")
    with pytest.raises(DataError, match="cannot be read"):
        cut_gguf("a\0b", tmp_path / "out.gguf", depth=1)


def test_models_that_cannot_be_cut_say_why(tmp_path: Path) -> None:
    out = tmp_path / "out.gguf"
    split = write_tiny(tmp_path / "split.gguf", extra={"split.count": 2})
    with pytest.raises(DataError, match="one of 2 parts of a split model; join them"):
        cut_gguf(split, out, depth=1)
    behind = write_tiny(tmp_path / "mtp.gguf", extra={"llama.nextn_predict_layers": 1})
    with pytest.raises(UnsupportedModelError, match="1 additional blocks for multi-token"):
        cut_gguf(behind, out, depth=1)
    assert not out.exists()


def test_the_file_itself_and_folders_are_no_targets(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="is the file to cut"):
        cut_gguf(model, model, depth=1, overwrite=True)
    with pytest.raises(ExportError, match="is a directory; give a file name"):
        cut_gguf(model, tmp_path, depth=1)


def test_what_does_not_apply_is_refused(model: Path, tmp_path: Path) -> None:
    with pytest.raises(
        SettingError, match="leave out recalibrate, token, which does not apply to a GGUF"
    ):
        ed.export(model, tmp_path / "x", depth=1, recalibrate=[], token=0)
    result = CliRunner().invoke(build_app(), ["export", str(model), "--format", "onnx"])
    assert isinstance(result.exception, SettingError)
    assert "leave out --format, which does not apply to a GGUF file" in str(result.exception)


def test_a_missing_engine_says_how_to_install_it(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(SettingError, match=r"pip install 'everydepth\[gguf\]'"):
        cut_gguf(model, tmp_path / "out.gguf", depth=1)


def test_probabilities_that_are_not_finite_are_refused() -> None:
    with pytest.raises(ExportError, match="computes probabilities that are not finite"):
        llama_cpp._step({"token": 1, "top": [[1, None]]})  # pyright: ignore[reportPrivateUsage]
