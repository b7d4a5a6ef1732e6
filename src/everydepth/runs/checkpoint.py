"""One checkpoint: a folder of safetensors files and `state.json`."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from everydepth.errors import EveryDepthError, RunError
from everydepth.files import explained, read_json, write_folder
from everydepth.runs.tree import flatten, unflatten

FORMAT = 1
STATE = "state.json"


@contextmanager
def whole(path: Path) -> Generator[None, None, None]:
    """Turn errors from reading this file into one that says the file is incomplete."""
    try:
        yield
    except EveryDepthError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise RunError(
            f"{path} is incomplete ({type(error).__name__}: {error}); restore it from a copy"
        ) from error


def check_format(found: Any, path: Path) -> None:
    """An error if a file was written by a later version."""
    if not isinstance(found, int):
        raise RunError(f"{path} has no format number, so it is not part of a run; check the path")
    if found > FORMAT:
        raise RunError(
            f"{path} has format {found}, but this version of everydepth reads up to {FORMAT}; "
            "install a newer everydepth (pip install -U everydepth)"
        )


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on disk. `state` is small; `load(part)` reads the tensors of a part."""

    path: Path
    step: int
    state: Mapping[str, Any]
    skeletons: Mapping[str, Any]
    sizes: Mapping[str, int]
    checksums: Mapping[str, str]

    @staticmethod
    def write(path: Path, step: int, parts: Mapping[str, Any], state: Mapping[str, Any]) -> None:
        """Write `parts` (trees with tensors) and `state` (a tree without), atomically."""
        bare, leftover = flatten(state)
        if leftover:
            raise RunError(
                f"state holds tensors ({', '.join(leftover)}), but it goes to {STATE}; "
                "make them a part"
            )

        def fill(folder: Path) -> None:
            skeletons: dict[str, Any] = {}
            sizes: dict[str, int] = {}
            sums: dict[str, str] = {}
            for name, tree in parts.items():
                skeletons[name], tensors = flatten(tree)
                file = folder / f"{name}.safetensors"
                # "pt" tells other tools which library the tensors belong to.
                save_file(_plain(tensors), file, metadata={"format": "pt"})
                sizes[name], sums[name] = file.stat().st_size, _checksum(file)
            content = {
                "format": FORMAT,
                "step": step,
                "sizes": sizes,
                "checksums": sums,
                "parts": skeletons,
                "state": bare,
            }
            checksum = _text_sum(json.dumps(content))
            text = json.dumps({"checksum": checksum, **content})
            (folder / STATE).write_text(text, encoding="utf-8")

        write_folder(path, fill)

    @classmethod
    def read(cls, path: Path) -> Checkpoint:
        """Open a checkpoint and check that it is complete."""
        if not path.is_dir():
            raise RunError(f"there is no checkpoint {path}; check the step, or start a new run")
        with whole(path / STATE), explained(f"{path} cannot be read"):
            return cls._read(path)

    @classmethod
    def _read(cls, path: Path) -> Checkpoint:
        content = read_json(path / STATE)
        check_format(content.get("format"), path / STATE)
        if content.pop("checksum") != _text_sum(json.dumps(content)):
            raise RunError(_damaged(path / STATE, path))
        for part, size in content["sizes"].items():
            file = path / f"{part}.safetensors"
            found = file.stat().st_size if file.exists() else 0
            if found != size:
                raise RunError(
                    f"{file} is truncated: it has {found} bytes and should have {size}; restore it "
                    f"from a copy, or delete {path} and write an earlier step into "
                    f"{path.parent / 'latest'}"
                )
        return cls(
            path,
            content["step"],
            unflatten(content["state"], {}),
            content["parts"],
            content["sizes"],
            content["checksums"],
        )

    def load(self, part: str) -> Any:
        """The tree of one part, with its tensors on the CPU."""
        if part not in self.skeletons:
            raise RunError(f"{self.path} has no part {part!r}; it has {', '.join(self.skeletons)}")
        with whole(self.path / STATE):
            return unflatten(self.skeletons[part], self._tensors(part))

    def _tensors(self, part: str) -> dict[str, Tensor]:
        file = self.path / f"{part}.safetensors"
        try:
            if _checksum(file) != self.checksums[part]:
                raise RunError(_damaged(file, self.path))
            return load_file(file)
        except (SafetensorError, OSError) as error:
            raise RunError(f"{file} cannot be read ({error}); restore it from a copy") from error


def _checksum(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def _text_sum(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _damaged(file: Path, checkpoint: Path) -> str:
    return (
        f"{file} is damaged: its checksum differs; restore it from a copy, or delete "
        f"{checkpoint} and write an earlier step into {checkpoint.parent / 'latest'}"
    )


def _plain(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors as safetensors requires: contiguous, and none a view of another."""
    seen: set[int] = set()
    plain: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        storage = tensor.untyped_storage().data_ptr()
        shared = storage in seen or tensor.untyped_storage().nbytes() != tensor.nbytes
        seen.add(storage)
        plain[name] = tensor.contiguous().clone() if shared else tensor.contiguous()
    return plain
