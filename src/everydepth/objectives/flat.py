"""Objectives saved by everydepth 0.1, as one flat list of settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from everydepth.config import check_names

_RENAMED = {"cosine_regularised": "cosine_regularized"}
_DEFAULTS: Mapping[str, Any] = {
    "name": "",
    "shape": "last",
    "early": 0.0,
    "final": 1.0,
    "top": None,
    "given": None,
    "alternate": False,
    "curriculum": None,
    "every": 1,
    "normalised": False,
    "warmup": 0.0,
    "warmup_from": 0.0,
    "anneal_by": None,
    "anneal_to": 0.0,
    "equilibrium": False,
    "sample": None,
    "cosine": 0.0,
    "cosine_shape": "linear",
    "heads": False,
    "kl": 0.0,
    "temperature": 1.0,
    "layer_dropout": 0.0,
    "layer_dropout_rises": False,
    "seed": 0,
}


# The setting that switched a part on, the part, and its other settings with their old names.
_PARTS: tuple[tuple[str, str, Mapping[str, str]], ...] = (
    ("alternate", "alternating", {}),
    ("warmup", "warmed_up", {"over": "warmup", "start": "warmup_from"}),
    ("anneal_by", "annealed", {"by": "anneal_by", "to": "anneal_to"}),
    ("normalised", "normalized", {}),
    ("sample", "sampled", {"k": "sample"}),
    ("kl", "distilled", {"weight": "kl", "temperature": "temperature"}),
    ("layer_dropout", "layer_dropout", {"most": "layer_dropout", "rises": "layer_dropout_rises"}),
    ("heads", "own_heads", {}),
    ("equilibrium", "equilibrated", {}),
)


def from_flat(values: Mapping[str, Any]) -> dict[str, Any]:
    """The same objective in today's format of `Objective.to_json`."""
    check_names(values, _DEFAULTS, "an objective without parts")
    old: dict[str, Any] = {**_DEFAULTS, **values}
    parts: list[dict[str, Any]] = [_shape(old, old["shape"])]
    if old["curriculum"]:
        every = {"every": old["every"]} if old["curriculum"] == "rotational" else {}
        parts.append({"part": old["curriculum"], **every})
    if old["cosine"]:
        shape = _shape(old, old["cosine_shape"])
        parts.append({"part": "cosine", "beta": old["cosine"], "shape": shape})
    for switch, part, settings in _PARTS:
        if old[switch] and not (part == "distilled" and old["cosine"]):  # cosine ignored kl
            parts.append({"part": part, **{new: old[name] for new, name in settings.items()}})
    name = _RENAMED.get(old["name"], old["name"])
    return {"name": name, "parts": parts, "seed": old["seed"]}


def _shape(old: Mapping[str, Any], shape: str) -> dict[str, Any]:
    settings: dict[str, dict[str, Any]] = {
        "lpa": {name: old[name] for name in ("early", "final", "top")},
        "layerskip": {"scale": old["early"]},
        "given": {"values": old["given"]},
    }
    return {"part": shape, **settings.get(shape, {})}
