"""A config says what it takes once, and refuses the rest in a sentence."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch

from everydepth.config import Config, Whole, checked, filled, plain, setting
from everydepth.errors import SettingError
from everydepth_papers.verdict import of_interval


@dataclass(frozen=True, kw_only=True)
class Inner(Config):
    level: float = setting(0.5, above=0, most=1)


@dataclass(frozen=True, kw_only=True)
class Oven(Config):
    minutes: int = setting(20, least=1)
    heat: float | None = setting(None, least=0, below=300)
    kind: Literal["gas", "electric"] = setting("gas")
    trays: tuple[float, ...] = setting((), help="Heights.")
    name: Any = setting("ours", choices=("ours", "theirs"), also="an oven")
    place: str | Path | None = setting(None)
    inner: Inner = setting(Inner())
    fan: bool = setting(False)


@dataclass(frozen=True, kw_only=True)
class Cook(Config):
    cook: str = setting()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"minutes": 0}, "minutes=0; use a whole number of 1 or more"),
        ({"minutes": True}, "minutes=True; use a whole number of 1 or more"),
        ({"minutes": 1.0}, "minutes=1.0; use a whole number of 1 or more"),
        ({"heat": 300}, "heat=300.0; use a number from 0 to below 300"),
        ({"heat": float("nan")}, "heat=nan; use a number from 0 to below 300"),
        ({"kind": "coal"}, "kind='coal'; use one of gas, electric"),
        ({"trays": ["low"]}, r"trays=\('low',\); use"),
        ({"name": "mine"}, "name='mine'; use one of ours, theirs, or an oven"),
        ({"place": 3}, "place=3; use a string or a path"),
        ({"inner": 3}, "inner=3; use Inner"),
        ({"fan": 1}, "fan=1; use True or False"),
        ({"minuts": 3}, "the oven has no setting 'minuts'. Did you mean 'minutes'. It has min"),
    ],
)
def test_a_value_that_is_not_allowed_is_refused_with_what_is(values: Any, message: str) -> None:
    with pytest.raises(SettingError, match=message):
        Oven.of(values, "the oven")


def test_limits_are_checked_however_a_config_is_made() -> None:
    with pytest.raises(SettingError, match=r"level=0.0; use a number above 0, up to 1"):
        Inner(level=0.0)


def test_values_become_those_of_their_type() -> None:
    oven = Oven.of(
        {"minutes": np.int64(3), "heat": torch.tensor(2), "trays": [1, np.float32(2)]}, "it"
    )
    assert (oven.minutes, oven.heat, oven.trays) == (3, 2.0, (1.0, 2.0))
    assert (type(oven.minutes), type(oven.heat)) == (int, float)
    assert Oven.of({"name": object}, "it").name is object


def test_a_setting_without_a_default_is_asked_for() -> None:
    with pytest.raises(SettingError, match="the kitchen needs cook=; it takes cook"):
        Cook.of({}, "the kitchen")


def test_several_configs_share_settings_by_name() -> None:
    before = Oven(minutes=5, fan=True)
    oven, cook = filled({"cook": "Ada", "minutes": 7}, "the kitchen", before, Cook)
    assert (oven.minutes, oven.fan, cook.cook, before.minutes) == (7, True, "Ada", 5)
    with pytest.raises(SettingError, match=r"no setting 'cok'. Did you mean 'cook'"):
        filled({"cok": 1}, "the kitchen", Oven, Cook)


def test_a_config_is_plain_values() -> None:
    assert plain(Oven(trays=(1.0, 2.0), place=Path("here"))) == {
        "minutes": 20,
        "heat": None,
        "kind": "gas",
        "trays": [1.0, 2.0],
        "name": "ours",
        "place": "here",
        "inner": {"level": 0.5},
        "fan": False,
    }


def test_infinity_is_a_number_to_a_function_and_not_to_a_setting() -> None:
    @checked
    def halved(number: float) -> float:
        return number / 2

    assert halved(float("inf")) == float("inf")
    with pytest.raises(SettingError, match=r"halved\(number=nan\); use a number"):
        halved(float("nan"))
    assert of_interval(float("nan"), float("nan")) == "inconclusive"
    with pytest.raises(SettingError, match=r"of_interval\(low='x'\); use a number"):
        of_interval("x", 1.0)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "values",
    [torch.zeros(3, device="meta"), torch.ones(3, dtype=torch.complex64), np.ones((2, 2)), b"x"],
    ids=["meta", "complex", "table", "bytes"],
)
def test_an_array_that_is_no_row_of_numbers_is_named(values: object) -> None:
    @checked
    def largest(values: Iterable[float]) -> float:
        return max(value for value in values if 0 <= float(value) < 9)

    with pytest.raises(SettingError, match=r"(?s)largest\(values=.*; use (several|numbers)"):
        largest(values)  # type: ignore[arg-type]


def test_numbers_of_numpy_arrive_as_those_of_python() -> None:
    @checked
    def drawn(seed: int, *, share: float) -> tuple[type, type]:
        torch.Generator().manual_seed(seed)  # which refuses NumPy's
        return type(seed), type(share)

    assert drawn(np.int64(2), share=np.float32(0.5)) == (int, float)


@pytest.mark.parametrize("values", [{"a": 1}, {"a"}], ids=["mapping", "set"])
def test_the_keys_of_a_mapping_are_no_numbers(values: object) -> None:
    @checked
    def largest(values: Iterable[float]) -> float:
        return max(value for value in values if value >= 0)

    with pytest.raises(SettingError, match="use several, each a number"):
        largest(values)  # type: ignore[arg-type]


def _endless() -> dict[str, object]:
    found: dict[str, object] = {}
    found["itself"] = found
    return found


def _nested(depth: int = 5000) -> list[object]:
    found: list[object] = []
    for _ in range(depth):
        found = [found]
    return found


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (10**5000, "<int that cannot be printed>"),
        (_nested(), "<list that cannot be printed>"),
        (_endless(), r"\{'itself': \{...\}\}"),
        ([1] * 3000, r"\[1, 1, .*\.\.\."),
    ],
    ids=["huge", "deep", "endless", "long"],
)
def test_a_refused_value_is_shown_in_few_words(value: object, said: str) -> None:
    @checked
    def counted(number: int) -> int:
        return number

    with pytest.raises(SettingError, match=rf"counted\(number={said}\); use") as caught:
        counted(value)  # type: ignore[arg-type]
    assert len(str(caught.value)) < 200
    with pytest.raises(SettingError, match=rf"minutes={said}; use"):
        Oven(minutes=value)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "value",
    [
        _endless(),
        torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
        torch.eye(2).to_sparse(),
        torch.ones(2).to(torch.float8_e4m3fn),
        np.arange(3, dtype=">i8"),
    ],
    ids=["endless", "nested", "sparse", "float8", "other bytes"],
)
def test_what_torch_cannot_use_is_refused_once_it_has_failed(value: object) -> None:
    @checked
    def used(values: Any) -> int:
        raise RuntimeError("not implemented")

    with pytest.raises(SettingError, match=r"(?s)used\(values=.*use numbers, in memory"):
        used(value)


def test_what_is_too_large_or_too_deep_is_named_once_it_has_failed() -> None:
    @checked
    def made(size: Whole, of: Any = None) -> Any:
        if of == "zeros":
            return bytes(8) * size
        return np.zeros((size, 2)) if of is None else repr(of)

    with pytest.raises(SettingError, match=r"made\(size=9223372036854775807\): .*smaller number"):
        made(2**63 - 1)
    with pytest.raises(SettingError, match="made got something that holds itself, or is nested"):
        made(1, _nested())
    with pytest.raises(SettingError, match="made needs more memory than there is"):
        made(2**58, "zeros")
