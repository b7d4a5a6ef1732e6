"""Every public name has an example, and the examples run. What they share is in docs/reference."""

from __future__ import annotations

import copy
import doctest
import inspect
import re
from collections.abc import Callable
from importlib import import_module
from inspect import isfunction, ismodule
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import pytest
import torch

import everydepth as ed
import everydepth.data
from everydepth.stream import registry
from everydepth.tracing import metric

PREAMBLE = Path(__file__).parents[2] / "docs" / "reference" / "index.md"
NAMES = [name for name in ed.__all__ if name != "__version__"]
NAMES += [
    f"growth.{n}" for n in ed.growth.__all__ if isfunction(getattr(ed.growth, n)) and n not in NAMES
]


def _public(package: str) -> list[str]:
    module = import_module(f"everydepth.{package}")
    own = [n for n, v in vars(module).items() if not n.startswith("_") and not ismodule(v)]
    return list(getattr(module, "__all__", own))


# Of the other packages, every public name that shows an example.
NAMES += [
    f"{package}.{n}"
    for package in ("ablations", "exits", "results", "stream", "tracing", "training")
    for n in _public(package)
    if n not in NAMES
    and ">>>" in (getattr(import_module(f"everydepth.{package}"), n).__doc__ or "")
]
# These two need a network and the files of a data set.
ABSENT = ("load_hub", "load_images")
NAMES += [
    f"data.{n}"
    for n in everydepth.data.__all__
    if isfunction(getattr(everydepth.data, n)) and n not in ABSENT
]
# Of the papers' package, all that the reference shows.
NAMES += re.findall(
    r"^::: (everydepth_papers\.\S+)", (PREAMBLE.parent / "papers.md").read_text(), re.MULTILINE
)


def documented(name: str) -> Any:
    home, _, own = name.rpartition(".")
    if home.startswith("everydepth_papers"):
        return getattr(import_module(home), own)
    found: Any = ed
    for part in name.split("."):
        found = getattr(found, part)
    return found


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], dict[str, Any]]:
    """The names of the preamble, copied for every example: one may train what another uses."""
    block = re.search(r"^```python\n(.*?)^```", PREAMBLE.read_text(), re.MULTILINE | re.DOTALL)
    assert block is not None
    names: dict[str, Any] = {}
    exec(compile(block[1], str(PREAMBLE), "exec"), names)
    names.pop("__builtins__")
    values = {n: v for n, v in names.items() if not isinstance(v, ModuleType | FunctionType | type)}
    others = {n: v for n, v in names.items() if n not in values}
    return lambda: copy.deepcopy(values) | others


@pytest.mark.parametrize("name", NAMES)
def test_a_public_name_has_an_example_that_runs(
    name: str,
    shared: Callable[[], dict[str, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(registry, "_by_class", {})  # examples may register classes and metrics
    monkeypatch.setattr(metric, "_registry", dict(metric._registry))
    text = inspect.getdoc(documented(name)) or ""
    test = doctest.DocTestParser().get_doctest(text, shared(), name, None, None)
    assert test.examples, f"{name} has no example"
    assert not any(doctest.SKIP in example.options for example in test.examples)
    said: list[str] = []
    torch.manual_seed(0)
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    result = doctest.DocTestRunner(verbose=False, optionflags=flags).run(test, out=said.append)
    assert result.failed == 0, "".join(said)
