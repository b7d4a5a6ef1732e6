"""The runtime of a web page: files from npm packages."""

from __future__ import annotations

import shutil
import subprocess
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path

from everydepth.errors import ExportError, SettingError, UnsupportedModelError


@dataclass(frozen=True, kw_only=True)
class Package:
    """The files we need from an npm package."""

    name: str
    version: str
    files: tuple[str, ...]


NETWORKS = Package(
    name="onnxruntime-web",
    version="1.30.0",
    files=("ort.wasm.bundle.min.mjs", "ort-wasm-simd-threaded.wasm"),
)
TOKENS = Package(name="@huggingface/tokenizers", version="0.2.0", files=("tokenizers.min.mjs",))


def runtime_files(given: str | Path | None, packages: tuple[Package, ...]) -> list[Path]:
    """The files of the packages, from the given folder or downloaded by npm.

    given: a folder with the files, or a node_modules folder with the packages.
    """
    return [file for package in packages for file in _files(given, package)]


def _files(given: str | Path | None, package: Package) -> list[Path]:
    if given is None:
        flat = package.name.removeprefix("@").replace("/", "-")
        kept = Path.home() / ".cache" / "everydepth" / f"{flat}-{package.version}"
        if not all((kept / name).is_file() for name in package.files):
            _fetch(kept, package)
        return [kept / name for name in package.files]
    around = Path(given)
    for folder in (around, around / "dist", around / package.name / "dist"):
        files = [folder / name for name in package.files]
        if all(file.is_file() for file in files):
            return files
    raise SettingError(
        f"runtime={str(given)!r} lacks {' or '.join(package.files)}; give the folder of the npm "
        f"package {package.name} ({package.version}), or leave it out to let npm download it"
    )


def _fetch(kept: Path, package: Package) -> None:
    """Download the package with npm, and keep the files we need."""
    if shutil.which("npm") is None:
        raise UnsupportedModelError(
            f"format='web' needs {package.name} {package.version}, but there is no npm to download "
            f"it; install Node.js, or give runtime= a folder with {' and '.join(package.files)}"
        )
    with tempfile.TemporaryDirectory() as folder:
        command = ["npm", "pack", f"{package.name}@{package.version}", "--silent"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        archives = list(Path(folder).glob("*.tgz"))
        if done.returncode != 0 or len(archives) != 1:
            raise ExportError(
                f"npm could not download {package.name} {package.version} "
                f"({done.stderr.strip()[-300:]}); check the network, or give runtime= a folder "
                "that holds it"
            )
        kept.mkdir(parents=True, exist_ok=True)
        with tarfile.open(archives[0]) as archive:
            for name in package.files:
                member = archive.extractfile(f"package/dist/{name}")
                if member is None:
                    raise ExportError(f"{package.name} {package.version} has no dist/{name}")
                (kept / name).write_bytes(member.read())
