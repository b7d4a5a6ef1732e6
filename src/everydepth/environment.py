"""Information about this machine: versions, devices, threads, memory, and installed extras.

Read-only: no thread count or other global setting is changed.
"""

from __future__ import annotations

import datetime as dt
import json
import os
import platform
import shlex
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib import metadata, util
from pathlib import Path
from typing import Any
from urllib.parse import urlparse
from urllib.request import url2pathname

from packaging.requirements import Requirement
from rich.table import Table
from rich.text import Text

from everydepth.errors import SettingError

DISTRIBUTION = "everydepth"
DATA_VARIABLE = "EVERYDEPTH_DATA"
"""The environment variable with the folder of named datasets."""
REPORTED_PACKAGES = (DISTRIBUTION, "torch", "transformers", "accelerate", "numpy")


@dataclass(frozen=True, kw_only=True)
class Device:
    """A device for tensors; `name` is for `torch.device`."""

    name: str
    description: str
    memory_bytes: int | None


@dataclass(frozen=True, kw_only=True)
class Extra:
    """An optional set of packages; `missing` lists those that are not installed."""

    name: str
    missing: tuple[str, ...]
    install: str

    @property
    def present(self) -> bool:
        return not self.missing


@dataclass(frozen=True, kw_only=True)
class Environment:
    """A snapshot taken by `current()`. The version of a package that is not installed is None."""

    python: str
    platform: str
    cpus: int
    cpus_usable: int
    memory_total_bytes: int
    memory_available_bytes: int
    versions: dict[str, str | None]
    torch_threads: int
    torch_interop_threads: int
    devices: tuple[Device, ...]
    extras: tuple[Extra, ...]

    @classmethod
    def current(cls) -> Environment:
        # Imported here: torch takes seconds, and most users of this module do not need it.
        import psutil
        import torch

        memory = psutil.virtual_memory()
        return cls(
            python=platform.python_version(),
            platform=platform.platform(),
            cpus=os.cpu_count() or 1,
            cpus_usable=_usable_cpus(),
            memory_total_bytes=memory.total,
            memory_available_bytes=memory.available,
            versions={name: installed_version(name) for name in REPORTED_PACKAGES},
            torch_threads=torch.get_num_threads(),
            torch_interop_threads=torch.get_num_interop_threads(),
            devices=tuple(_devices()),
            extras=tuple(_extras()),
        )

    def to_json(self) -> str:
        content = asdict(self)
        content["extras"] = [asdict(extra) | {"present": extra.present} for extra in self.extras]
        return json.dumps(content, indent=2)

    def table(self) -> Table:
        table = Table(show_header=False, box=None, pad_edge=False, padding=(0, 2, 0, 0))
        table.add_column(style="bold", no_wrap=True)
        table.add_column(overflow="fold")
        table.add_row("python", self.python)
        table.add_row("platform", self.platform)
        for name, version in self.versions.items():
            table.add_row(name, version or Text("not installed", style="red"))
        table.add_section()
        table.add_row("cpus", f"{self.cpus_usable} usable of {self.cpus}")
        table.add_row(
            "torch threads", f"{self.torch_threads} ({self.torch_interop_threads} interop)"
        )
        table.add_row(
            "memory",
            f"{_gib(self.memory_available_bytes)} available of {_gib(self.memory_total_bytes)}",
        )
        for device in self.devices:
            size = "" if device.memory_bytes is None else f", {_gib(device.memory_bytes)}"
            table.add_row(f"device {device.name}", f"{device.description}{size}")
        table.add_section()
        for extra in self.extras:
            table.add_row(f"extra {extra.name}", _extra_line(extra))
        return table


def require(what: str, *packages: str, extra: str) -> None:
    """Raise an error if packages that `what` needs are not installed."""
    missing = [name for name in packages if util.find_spec(name) is None]
    if missing:
        raise SettingError(
            f"{what} needs {', '.join(missing)}, which is not installed; "
            f"pip install 'everydepth[{extra}]'"
        )


def machine() -> dict[str, Any]:
    """The properties of this machine that measurements depend on, without private details."""
    now = Environment.current()
    return {
        "date": dt.date.today().isoformat(),
        "platform": now.platform,
        "cpus": now.cpus_usable,
        "memory_gib": round(now.memory_total_bytes / 2**30, 1),
        "devices": [device.description for device in now.devices],
        "python": now.python,
        "versions": now.versions,
    }


def usable_device(name: Any) -> Any:
    """The torch device of a name; an error if this machine does not have it.

    >>> from everydepth.environment import usable_device
    >>> usable_device("cpu")
    device(type='cpu')
    """
    import torch

    try:
        found = torch.device(name)
        torch.empty(1, device=found).item()  # fails on the device "meta"
    except (AssertionError, NotImplementedError, RuntimeError, TypeError) as error:
        known = ", ".join(device.name for device in _devices())
        reason = str(error).splitlines()[0][:100]
        raise SettingError(
            f"device {str(name)!r} cannot be used here ({reason}); use one of {known}"
        ) from error
    return found


def fast_precision() -> str:
    """The faster `precision` of training on this CPU: "bf16" if it has instructions for it.

    Without them, bfloat16 is emulated, and a step takes two to three times as long.
    """
    import torch

    known = torch.cpu.get_capabilities()
    # x86: avx512_bf16, amx_bf16; ARM: bf16, sve_bf16.
    native = any(has for name, has in known.items() if name.endswith("bf16"))
    return "bf16" if native else "fp32"


def command_line() -> str:
    """The command that started this process, as one would type it."""
    program = Path(sys.argv[0] if sys.argv else "")
    if program.name == "__main__.py":  # python -m everydepth
        program = program.parent
    first = [] if program.stem in ("", "-c") else [program.name]
    if program.suffix == ".py":
        first.insert(0, "python")
    return shlex.join([*first, *sys.argv[1:]])


def installed_version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _usable_cpus() -> int:
    # A container or job scheduler may allow fewer than the machine has; not all systems tell.
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity is not None else os.cpu_count() or 1


def _devices() -> Iterator[Device]:
    import torch

    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        yield Device(
            name=f"cuda:{index}",
            description=properties.name,
            memory_bytes=properties.total_memory,
        )
    if torch.backends.mps.is_available():
        yield Device(name="mps", description="Apple GPU, shares the memory", memory_bytes=None)
    yield Device(
        name="cpu",
        description=platform.processor() or platform.machine(),
        memory_bytes=None,
    )


def _extras() -> Iterator[Extra]:
    try:
        distribution = metadata.distribution(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        # In a source tree that was never installed, the extras are unknown.
        return
    requirements = [Requirement(line) for line in distribution.requires or ()]
    folder = _source_folder(distribution)
    for name in distribution.metadata.get_all("Provides-Extra") or ():
        missing = [str(r) for r in _required_by(name, requirements) if not _is_met(r)]
        # Quoted, because some shells expand brackets.
        install = f'-e "{folder}[{name}]"' if folder else f'"{DISTRIBUTION}[{name}]"'
        yield Extra(name=name, missing=tuple(missing), install=f"pip install {install}")


def _required_by(extra: str, requirements: list[Requirement]) -> Iterator[Requirement]:
    """The requirements of one extra, with `everydepth[other]` replaced by those of `other`."""
    for requirement in requirements:
        if not _only_for(extra, requirement):
            continue
        if requirement.name == DISTRIBUTION:
            for other in sorted(requirement.extras):
                yield from _required_by(other, requirements)
        else:
            bare = Requirement(str(requirement))
            bare.marker = None
            yield bare


def _only_for(extra: str, requirement: Requirement) -> bool:
    marker = requirement.marker
    return (
        marker is not None
        and marker.evaluate({"extra": extra})
        and not marker.evaluate({"extra": ""})
    )


def _is_met(requirement: Requirement) -> bool:
    version = installed_version(requirement.name)
    return version is not None and requirement.specifier.contains(version, prereleases=True)


def _source_folder(distribution: metadata.Distribution) -> str | None:
    """The folder the package was installed from; None if it came from an index."""
    origin = json.loads(distribution.read_text("direct_url.json") or "{}")
    return url2pathname(urlparse(origin["url"]).path) if "dir_info" in origin else None


def _extra_line(extra: Extra) -> Text:
    if extra.present:
        return Text("present", style="green")
    # Text, not markup, which would take the brackets in everydepth[onnx] for a style.
    return Text.assemble(
        ("missing", "yellow"), f" {', '.join(extra.missing)}\n", (extra.install, "bold")
    )


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"
