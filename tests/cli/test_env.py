"""`everydepth env`: what it reports, and that it reports what is missing."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner, Result

from everydepth import environment
from everydepth.cli.main import build_app
from everydepth.environment import Environment, Extra


def run(*arguments: str) -> Result:
    # Wide enough that no line is folded and a search finds its text.
    return CliRunner().invoke(build_app(), list(arguments), env={"COLUMNS": "300"})


def env_as_json() -> dict[str, object]:
    result = run("env", "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def shown(snapshot: Environment) -> str:
    console = Console(width=300)
    with console.capture() as capture:
        console.print(snapshot.table())
    return capture.get()


@pytest.fixture
def pretend_versions(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """`pretend_versions(onnx=None, ray="1.0")`: onnx is not installed, ray is at 1.0."""
    real = environment.installed_version

    def pretend(**versions: str | None) -> None:
        monkeypatch.setattr(
            environment, "installed_version", lambda name: versions.get(name, real(name))
        )

    return pretend


def extras_by_name() -> dict[str, Extra]:
    return {extra.name: extra for extra in Environment.current().extras}


def test_the_json_has_the_installed_versions() -> None:
    versions = env_as_json()["versions"]
    assert versions == {
        name: metadata.version(name)
        for name in ("everydepth", "torch", "transformers", "accelerate", "numpy")
    }


def test_the_json_counts_threads_cpus_and_memory() -> None:
    content = env_as_json()
    assert content["torch_threads"] == torch.get_num_threads()
    assert 1 <= content["cpus_usable"] <= content["cpus"]
    assert 0 < content["memory_available_bytes"] <= content["memory_total_bytes"]


def test_the_last_device_is_the_cpu() -> None:
    assert env_as_json()["devices"][-1]["name"] == "cpu"


def test_a_gpu_is_listed_before_the_cpu_with_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = SimpleNamespace(name="Imaginary 9000", total_memory=24 * 2**30)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: gpu)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    snapshot = Environment.current()
    assert [device.name for device in snapshot.devices] == ["cuda:0", "cpu"]
    assert "Imaginary 9000, 24.0 GiB" in shown(snapshot)


def test_every_extra_that_users_can_ask_for_is_listed() -> None:
    wanted = {"onnx", "ray", "app", "lightning", "data", "docs", "dev", "gguf", "serve", "harness"}
    assert set(extras_by_name()) == wanted


def test_an_installed_extra_is_present() -> None:
    assert extras_by_name()["onnx"].present


def test_a_missing_extra_is_shown_with_its_install_command(
    pretend_versions: Callable[..., None],
) -> None:
    pretend_versions(onnxruntime=None)
    result = run("env")
    assert result.exit_code == 0, result.output
    onnx = extras_by_name()["onnx"]
    assert [text.split(">")[0] for text in onnx.missing] == ["onnxruntime"]
    assert onnx.install.startswith("pip install ")
    assert onnx.install.endswith('[onnx]"')
    assert "missing onnxruntime" in result.output
    assert onnx.install in result.output


def test_brackets_of_a_requirement_survive_in_the_table(
    pretend_versions: Callable[..., None],
) -> None:
    pretend_versions(ray=None)
    assert "ray[default,serve]" in shown(Environment.current())


def test_a_package_that_is_too_old_counts_as_missing(
    pretend_versions: Callable[..., None],
) -> None:
    pretend_versions(gradio="0.1")
    assert [text.split(">")[0] for text in extras_by_name()["app"].missing] == ["gradio"]


def test_an_extra_made_of_other_extras_is_missing_what_they_miss(
    pretend_versions: Callable[..., None],
) -> None:
    pretend_versions(gradio=None)
    assert any(text.startswith("gradio") for text in extras_by_name()["dev"].missing)


def test_a_package_from_an_index_is_extended_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "_source_folder", lambda distribution: None)
    assert extras_by_name()["onnx"].install == 'pip install "everydepth[onnx]"'


def test_a_source_tree_that_was_never_installed_still_reports(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(environment, "DISTRIBUTION", "everydepth-never-installed")
    assert Environment.current().extras == ()


def test_asking_changes_no_thread_setting() -> None:
    before = torch.get_num_threads(), torch.get_num_interop_threads()
    Environment.current()
    assert (torch.get_num_threads(), torch.get_num_interop_threads()) == before


def test_a_snapshot_cannot_be_changed() -> None:
    with pytest.raises(AttributeError, match="cannot assign to field"):
        Environment.current().python = "2.7"  # pyright: ignore[reportAttributeAccessIssue]


def test_python_dash_m_is_the_same_command() -> None:
    command = [sys.executable, "-m", "everydepth", "env", "--json"]
    finished = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert json.loads(finished.stdout)["python"] == env_as_json()["python"]


@pytest.mark.parametrize(
    ("known", "expected"),
    [
        ({"avx2": True, "avx512_bf16": False, "amx_bf16": False, "avx512_vnni": True}, "fp32"),
        ({"avx512_bf16": True, "amx_bf16": False}, "bf16"),
        ({"neon": True, "bf16": True}, "bf16"),
        ({"neon": True, "bf16": False, "sve_bf16": False, "sve_max_length": 16}, "fp32"),
    ],
)
def test_bfloat16_is_fast_only_where_the_cpu_has_instructions_for_it(
    known: dict[str, object], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: known)
    assert environment.fast_precision() == expected
