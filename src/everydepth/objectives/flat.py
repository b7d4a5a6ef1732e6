"""Objectives as runs of everydepth 0.1 saved them: one flat list of settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from everydepth.config import check_names

# Settings of a part by the name they had, and the value at which there was no such part.
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


def from_flat(values: Mapping[str, Any]) -> dict[str, Any]:
    """The same objective as `Objective.to_json` gives it now."""
    check_names(values, _DEFAULTS, "an objective without parts")
    old: dict[str, Any] = {**_DEFAULTS, **values}
    parts: list[dict[str, Any]] = [_shape(old, old["shape"])]
    if old["alternate"]:
        parts.append({"part": "alternating"})
    if old["curriculum"] is not None:
        every = {"every": old["every"]} if old["curriculum"] == "rotational" else {}
        parts.append({"part": old["curriculum"], **every})
    if old["warmup"]:
        parts.append({"part": "warmed_up", "over": old["warmup"], "start": old["warmup_from"]})
    if old["anneal_by"] is not None:
        parts.append({"part": "annealed", "by": old["anneal_by"], "to": old["anneal_to"]})
    if old["normalised"]:
        parts.append({"part": "normalized"})
    if old["sample"] is not None:
        parts.append({"part": "sampled", "k": old["sample"]})
    if old["cosine"]:
        shape = _shape(old, old["cosine_shape"])
        parts.append({"part": "cosine", "beta": old["cosine"], "shape": shape})
    elif old["kl"]:
        softness = {"temperature": old["temperature"]}
        parts.append({"part": "distilled", "weight": old["kl"], **softness})
    if old["layer_dropout"]:
        chance = {"most": old["layer_dropout"], "rises": old["layer_dropout_rises"]}
        parts.append({"part": "layer_dropout", **chance})
    if old["heads"]:
        parts.append({"part": "own_heads"})
    if old["equilibrium"]:
        parts.append({"part": "equilibrated"})
    name = _RENAMED.get(old["name"], old["name"])
    return {"name": name, "parts": parts, "seed": old["seed"]}


def _shape(old: Mapping[str, Any], shape: str) -> dict[str, Any]:
    settings: dict[str, dict[str, Any]] = {
        "lpa": {name: old[name] for name in ("early", "final", "top")},
        "layerskip": {"scale": old["early"]},
        "given": {"values": old["given"]},
    }
    return {"part": shape, **settings.get(shape, {})}
