"""What a parameter may be given: something right by its name, something odd by chance."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from decimal import Decimal
from enum import Enum
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import numpy as np
import torch
import transformers as hf
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

import everydepth as ed
from everydepth.config import Config, alternatives, hints_of, parameter_hints, settings_of
from everydepth.growth import scaling
from everydepth.objectives.shapes import LPA
from everydepth.serving import Arrival, Price, Served
from everydepth.tracing import BatchMetric
from everydepth_papers.claims import CLAIMS
from everydepth_papers.evidence import Preset, Recipe, Row

QUIET = {"progress": False}


class Odd:
    """A value made anew for each call, since some are used up; shown by its words."""

    def __init__(self, words: str, make: Callable[[], Any]) -> None:
        self.words, self.make = words, make

    def __repr__(self) -> str:
        return self.words


def _exhausted() -> Iterator[int]:
    used = iter([1, 2])
    list(used)
    return used


_PLAIN: tuple[Any, ...] = (
    None, True, False, 0, 1, 2, 3, -1, -7, 10**30, -(10**30), 0.0, 0.5, 1.5, -0.5, 1e-300, 1e300,
    math.nan, math.inf, -math.inf, "", "x", "all", "x" * 300, "a\0b", "ünï", "../..", "1", b"x",
    (), (1, 2), (1, 1), (-1,), (0.5,), ("a",), (None,), range(0), range(1, 3), 1 + 2j, int,
    Decimal("0.5"), Exception,
)  # fmt: skip
ODD: tuple[Odd, ...] = (
    *(Odd(repr(value), lambda value=value: value) for value in _PLAIN),
    Odd("[]", list),
    Odd("{}", dict),
    Odd("set()", set),
    Odd("[nan]", lambda: [math.nan]),
    Odd("[1, [2, 3]]", lambda: [1, [2, 3]]),
    Odd("['a', 'b']", lambda: ["a", "b"]),
    Odd("{'a': 1}", lambda: {"a": 1}),
    Odd("{1: None}", lambda: {1: None}),
    Odd("object()", object),
    Odd("len", lambda: len),
    Odd("lambda: None", lambda: lambda: None),
    Odd("iter(())", lambda: iter(())),
    Odd("an exhausted generator", _exhausted),
    Odd("(x for x in [1])", lambda: (x for x in [1])),
    Odd("Path('.')", lambda: Path()),
    Odd("Path('nowhere/deep')", lambda: Path("nowhere/deep")),
    Odd("np.array(3)", lambda: np.array(3)),
    Odd("np.int64(2)", lambda: np.int64(2)),
    Odd("np.float32(nan)", lambda: np.float32("nan")),
    Odd("np.zeros((2, 3))", lambda: np.zeros((2, 3))),
    Odd("np.array(['a'])", lambda: np.array(["a"])),
    Odd("tensor(1)", lambda: torch.tensor(1)),
    Odd("zeros(0)", lambda: torch.zeros(0)),
    Odd("zeros(2, 3, 4)", lambda: torch.zeros(2, 3, 4)),
    Odd("ones(4, bool)", lambda: torch.ones(4, dtype=torch.bool)),
    Odd("ones(4, bfloat16)", lambda: torch.ones(4, dtype=torch.bfloat16)),
    Odd("ones(3, complex64)", lambda: torch.ones(3, dtype=torch.complex64)),
    Odd("zeros(3, meta)", lambda: torch.zeros(3, device="meta")),
    Odd("nn.Linear(2, 2)", lambda: nn.Linear(2, 2)),
    Odd("nn.Module()", nn.Module),
    Odd("nn.Sequential()", nn.Sequential),
    Odd("torch.float16", lambda: torch.float16),
)


# -- what is right ------------------------------------------------------------------------------


class Largest(BatchMetric):
    """A metric that can be registered."""

    name = "largest"

    def update(self, observation: Any) -> None:
        raise NotImplementedError

    def compute(self) -> Any:
        raise NotImplementedError


class Letters:
    """A tokenizer of single letters."""

    def encode(self, text: str, /) -> list[int]:
        return [3 + ord(letter) % 20 for letter in text]

    def decode(self, ids: Any, /) -> str:
        return "x" * len(np.atleast_1d(ids))

    def __call__(self, texts: Any, **_: Any) -> dict[str, Any]:
        return {"input_ids": [self.encode(text) for text in texts]}


class World:
    """A model, rows that fit it, and how to spoil them."""

    def __init__(self, model: nn.Module, rows: Callable[[], dict[str, Tensor]]) -> None:
        self.model, self.rows = model.eval(), rows

    def __repr__(self) -> str:
        return type(self.model).__name__

    def _cut(self, to: Any) -> dict[str, Tensor]:
        return {key: value[to] for key, value in self.rows().items()}

    def seen_as(self) -> tuple[Odd, ...]:
        """The model in the other forms that every function takes."""
        return (
            Odd("as_stream(model)", lambda: ed.as_stream(self.model)),
            Odd("EveryDepth(model)", lambda: ed.EveryDepth(self.model, ed.lpa())),
            Odd("DataParallel(model)", lambda: nn.DataParallel(self.model)),
        )

    def _each(self) -> list[dict[str, Tensor]]:
        rows = self.rows()
        return [{key: value[n] for key, value in rows.items()} for n in range(len(rows["labels"]))]

    def spoilt(self) -> tuple[Odd, ...]:
        main, *_ = self.rows()

        def changed(words: str, **to: Callable[[Tensor], Any]) -> Odd:
            def make() -> dict[str, Any]:
                rows: dict[str, Any] = self.rows()
                return {
                    key: to[name](value)
                    if (name := "main" if key == main else key) in to
                    else value
                    for key, value in rows.items()
                }

            return Odd(f"rows with {words}", make)

        return (
            Odd("rows", self.rows),
            Odd("[rows, rows]", lambda: [self.rows(), self.rows()]),
            Odd("a list of rows", self._each),
            Odd("DataLoader(rows)", lambda: _loader(self._each())),
            Odd("iter([rows])", lambda: iter([self.rows()])),
            Odd("tuple(rows)", lambda: tuple(self.rows().values())),
            Odd("DataLoader([])", lambda: _loader([])),
            Odd("an endless stream of None", _Nothing),
            Odd("rows, no labels", lambda: {main: self.rows()[main]}),
            Odd("[rows, no labels]", lambda: [self.rows(), {main: self.rows()[main]}]),
            Odd("[rows, no row]", lambda: [self.rows(), self._cut(slice(0))]),
            Odd("[rows, smaller ones]", lambda: [self.rows(), self._cut((..., slice(3)))]),
            changed("nothing to look at", attention_mask=lambda v: v * 0),
            changed("a mask of few rows", attention_mask=lambda v: v[:1]),
            changed("a float mask", attention_mask=lambda v: v.float()),
            changed("bfloats", main=lambda v: v.bfloat16()),
            changed("one-hot labels", labels=lambda v: torch.eye(3)[v % 3]),
            Odd("labels alone", lambda: {"labels": torch.tensor([0, 1])}),
            changed("one row", main=lambda v: v[:1], labels=lambda v: v[:1]),
            changed("no row", main=lambda v: v[:0], labels=lambda v: v[:0]),
            changed("numpy", main=lambda v: v.numpy(), labels=lambda v: v.numpy()),
            changed("lists", main=lambda v: v.tolist(), labels=lambda v: v.tolist()),
            changed("None", main=lambda v: None),
            changed("one axis more", main=lambda v: v[None]),
            changed("one axis less", main=lambda v: v[0]),
            changed("half floats", main=lambda v: v.half()),
            changed("doubles", main=lambda v: v.double()),
            changed("booleans", main=lambda v: v.bool()),
            changed("huge values", main=lambda v: v * 10**6 + 99),
            changed("negative values", main=lambda v: -v - 1),
            changed("NaN", main=lambda v: v * torch.nan),
            changed("meta", main=lambda v: v.to("meta")),
            changed("float labels", labels=lambda v: v.float()),
            changed("NaN labels", labels=lambda v: v * torch.nan),
            changed("(N, 1) labels", labels=lambda v: v[:, None]),
            changed("few labels", labels=lambda v: v[:1]),
            changed("boolean labels", labels=lambda v: v > 0),
            changed("labels of -1", labels=lambda v: v * 0 - 1),
            changed("ignored labels", labels=lambda v: v * 0 - 100),
            changed("large labels", labels=lambda v: v + 1000),
            changed("text labels", labels=lambda v: [str(x) for x in v.tolist()]),
            changed("None labels", labels=lambda v: None),
        )  # fmt: skip


def _loader(rows: list[dict[str, Tensor]]) -> DataLoader[dict[str, Tensor]]:
    return DataLoader(rows, 5, generator=torch.Generator())  # pyright: ignore[reportArgumentType]


class _Nothing(IterableDataset[None]):
    def __iter__(self) -> Iterator[None]:
        yield from [None] * 3


def seeing() -> World:
    torch.manual_seed(0)
    config = hf.ViTConfig(
        image_size=8, patch_size=4, num_channels=1, num_labels=3, hidden_size=8,
        num_hidden_layers=2, num_attention_heads=2, intermediate_size=8,
    )  # fmt: skip
    pixels = torch.randn(12, 1, 8, 8)
    rows = {"pixel_values": pixels, "labels": torch.arange(12) % 3}
    return World(
        hf.ViTForImageClassification(config), lambda: {k: v.clone() for k, v in rows.items()}
    )


def reading() -> World:
    torch.manual_seed(0)
    config = hf.BertConfig(
        vocab_size=24, hidden_size=8, num_hidden_layers=2, num_attention_heads=2, num_labels=3,
        intermediate_size=8, max_position_embeddings=8, pad_token_id=0,
    )  # fmt: skip
    ids = torch.randint(3, 24, (6, 5))
    mask = torch.ones_like(ids)
    mask[0, 3:] = 0
    rows = {"input_ids": ids, "attention_mask": mask, "labels": torch.arange(6) % 3}
    model = hf.BertForSequenceClassification(config)
    return World(model, lambda: {k: v.clone() for k, v in rows.items()})


def writing() -> World:
    torch.manual_seed(0)
    config = hf.LlamaConfig(
        vocab_size=24, hidden_size=8, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=8, max_position_embeddings=16, pad_token_id=0, bos_token_id=1,
        eos_token_id=2,
    )  # fmt: skip
    ids = torch.randint(3, 24, (6, 5))
    rows = {"input_ids": ids, "labels": ids}
    return World(hf.LlamaForCausalLM(config), lambda: {k: v.clone() for k, v in rows.items()})


RECIPE = Recipe(
    name="short",
    title="A short one",
    item="Another Paper, Table 1",
    cell=lambda cell, seed, folder: {"value": cell["a"] + seed},
    rows=lambda done: [Row("value", 1.5, sum(d.values["value"] for d in done), 0, 9, "")],
    about="Nothing is trained.",
    presets={"smoke": Preset(cells=({"a": 1}, {"a": 2}), seeds=2, cost="1 s")},
)
_LANGUAGE = ("prompts", "prompt", "input_ids", "tokenizer")


SLOW = ("ray", "processes")  # choices that take many seconds, and have tests of their own


def right(world: World, folder: Path) -> dict[str, Callable[[], Any]]:
    """By the name of a parameter, whatever function it is of; made when it is needed."""
    model, rows = world.model, world.rows
    return {
        **dict.fromkeys(("model", "net", "old", "new"), lambda: model),
        **dict.fromkeys(("data", "train", "valid", "test", "batch", "clean", "noisy"), rows),
        **dict.fromkeys(("run", "directory", "out", "path"), lambda: folder / "new"),
        "policy": lambda: ed.Confidence(threshold=0.9),
        "depth": lambda: 1,
        "keep": lambda: 1,
        "risk": lambda: 0.3,
        "after": lambda: 1,
        "layer": lambda: 1,
        "c": lambda: 0.5,
        "beta": lambda: 0.1,
        "fraction": lambda: 0.5,
        "weights": lambda: [0.5, 1.0],
        "threshold": lambda: 1,
        "name": lambda: "x",
        "kind": lambda: "curve",
        "config": dict,
        "series": lambda: ("value",),
        "arrays": lambda: {"depth": np.arange(3), "value": np.arange(3.0)},
        "results": dict,
        "source": lambda: folder / "model",
        "folder": lambda: folder / "model",
        "runs": lambda: ed.trace(model, rows(), ["loss"], **QUIET),
        "grid": lambda: {"a": [1, 2]},
        "function": lambda: lambda a, folder=None: {"b": a},
        "tokenizer": Letters,
        "prompts": lambda: ["ab"],
        "prompt": lambda: "ab",
        "model_class": lambda: nn.GRUCell,
        "factory": lambda: lambda m: ed.as_stream(m),
        "metric": lambda: Largest,
        "labels": lambda: torch.tensor([0, 1, 2, 0]),
        "batch_size": lambda: 4,
        "length": lambda: 4,
        "max_length": lambda: 4,
        "ids": lambda: torch.arange(3, 20),
        "text": lambda: "text",
        "target": lambda: folder / "new",
        "recipe": lambda: RECIPE,
        "served": lambda: Served(name="x", model=model, tokenizer=Letters()),
        "key": lambda: "lpa",
        "low": lambda: 0.0,
        "high": lambda: 1.0,
        "most": lambda: 0.5,
        "optimizer": lambda: torch.optim.SGD(model.parameters(), 0.1),
        **dict.fromkeys(("a", "b", "bound", "x", "y", "accuracy"), lambda: np.arange(4.0)),
        **dict.fromkeys(("parameters", "tokens"), lambda: [1e6, 2e6, 4e6, 8e6, 16e6]),
        **dict.fromkeys(("values", "loss"), lambda: [4.0, 3.0, 2.5, 2.2, 2.1]),
        **dict.fromkeys(("stream", "for_stream"), lambda: ed.as_stream(model)),
        **dict.fromkeys(("depths", "numbers", "layers"), lambda: (1, 2)),
        **dict.fromkeys(("texts", "headings"), lambda: ("one", "two")),
        "classes": lambda: ("one", "two", "three"),
        "columns": lambda: {"x": np.arange(3)},
        "pixel_values": lambda: torch.zeros(4, 1, 8, 8),
        "inputs": lambda: torch.zeros(4, 2),
        "input_ids": lambda: torch.ones(4, 5, dtype=torch.int64),
        "flipped": lambda: torch.tensor([0]),
        "original": lambda: torch.tensor([1, 1, 2, 0]),
        "rows": lambda: [("1", "2"), ("3", "4")],
        "before": lambda: {"a": 1},
        "file": lambda: folder / "model" / "config.json",
        "epsilon": lambda: 0.1,
        "rank": lambda: 2,
        "k": lambda: 1,
        "value": lambda: 0.5,
        "price": lambda: Price(call=1e-3, token=1e-4, readout=1e-4),
        "load": lambda: [Arrival(at=0.1, prompt=3, tokens=2)],
        **dict.fromkeys(("at", "call", "token", "readout", "seconds"), lambda: 0.1),
        **dict.fromkeys(("reason", "description", "formula", "heading", "title"), lambda: "words"),
        "study": lambda: ed.gradient_study(model, rows(), rows(), flipped=[0], **QUIET),
        "ablation": lambda: ed.ablate(model, rows(), **QUIET),
        "f": lambda: lambda x: x[..., :1],
        "verdicts": lambda: ["holds"],
        "item": lambda: RECIPE.item,
        "presets": lambda: RECIPE.presets,
        "cell": lambda: RECIPE.cell,
        "law": lambda: scaling.EPOCH,
        "found": lambda: scaling.plan(parameters=1e6),
        "indices": lambda: [0, 1],
        "count": lambda: 2,
        "fractions": lambda: [0.5, 0.5],
        "cases": lambda: [True],
        **dict.fromkeys(("step", "number"), lambda: 1),
        "total_steps": lambda: 10,
        "purpose": lambda: "this",
        "share": lambda: False,
        "states": lambda: ed.as_stream(model).observe(rows()),
        "cursor": lambda: ed.as_stream(model).start(rows()),
        **dict.fromkeys(("mean", "std"), lambda: [0.5]),
        "entry": lambda: {"a": 1},
        "whole": dict,
        "parts": lambda: {"model": {"weight": torch.zeros(2)}},
        "state": lambda: {"step": 1},
    }


OWN: dict[str, dict[str, Any]] = {
    "check_claims": {"model": ..., "data": ...},  # without them, networks are trained
    "Arrival": {"prompt": 3, "tokens": 2},
    "Deadline": {"target": 1.0},
    "Request": {"prompt": (3, 4)},
    "Speed": {"target": 1.0},
    "numbers": {"name": "x"},
    "as_results": {"points": None},
    "lines": {"series": {"a": {"x": [1, 2], "y": [3.0, 2.0]}}, "axis": "step", "of": "loss"},
    "result": {"name": "loss"},
    "table": {"name": "loss"},
    "plot": {"name": "loss"},
    "scalars": {"values": {"a": 1.0}},
    "shape": {"parameters": 1e6},
    "label_prompts": {"labels": [0, 1], "texts": ("one", "two"), "max_length": 60},
    "folds": {"labels": [0] * 8 + [1] * 8, "count": 2},
    "diversity": {"tokens": [1, 2, 3, 4, 5]},
    "rows": {"columns": {"x": [1, 2, 3]}},
    "at": {"metric": "loss", "c": 0.0},
    "ratios": {"name": "loss"},
    "get": {"kind": LPA},
    "entry": {"name": next(iter(CLAIMS))},
    "select": {"rows": torch.tensor([0, 1])},
    "column": {"heading": "loss"},
    "log": {"entry": {"step": 1, "loss": 0.5}},
    "from_json": {
        "content": {"format": 1, "kind": "trace", "about": {}, "results": []},
        "values": ed.lpa(early=0.3).annealed().to_json(),
        "text": ed.Confidence(threshold=0.9).to_json(),
    },
    "of_json": {"content": {"results": {}, "about": {}}},
}
"""What a function calls by a name that others use for something else; ...: is given anyway."""


# Given wherever there is such a parameter or setting, so that an example takes a moment.
SMALL: dict[str, Any] = {
    "progress": False, "repeats": 1, "steps": 2, "rounds": 1, "batch_size": 4, "max_new_tokens": 2,
    "new_tokens": 2, "batches": 1, "resamples": 8, "seeds": 1, "n_train": 8, "n_test": 8,
    "evaluations": 2, "points": 50, "bootstrap": 0, "starts": 2,
}  # fmt: skip


RIGHT_ALWAYS = ("progress", "states", "cursor", "lowest")
"""Never odd: noise on the terminal, and what only the library makes."""


# -- calls --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Parameter:
    name: str
    hint: Any
    required: bool
    choices: tuple[str, ...] = ()


class State(Enum):
    """What a model is in when a function is called, and must be in afterwards."""

    usual = "in eval mode"
    training = "in train mode"
    mixed = "with one block in train mode"
    frozen = "with frozen weights, but those of the last"
    stepped = "with gradients"

    def put(self, model: nn.Module) -> None:
        model.train(self is State.training)
        if self is State.mixed:
            list(model.modules())[-3].train()
        *others, _ = parameters = list(model.parameters())
        for parameter in parameters:
            parameter.requires_grad_(True)
            parameter.grad = torch.ones_like(parameter) if self is State.stepped else None
        for parameter in others if self is State.frozen else ():
            parameter.requires_grad_(False)


@dataclass(frozen=True)
class Call:
    """Odd arguments for a function; the rest is right."""

    world: World
    odd: dict[str, Any]
    state: State = State.usual

    def arguments(
        self, function: Callable[..., Any], parameters: list[Parameter], folder: Path
    ) -> dict[str, Any]:
        known, given = right(self.world, folder), {}
        own = OWN.get(function.__name__, {})
        for parameter in parameters:
            name = parameter.name
            if name in self.odd:
                value = self.odd[name]
                given[name] = value.make() if isinstance(value, Odd) else value
            elif name in own:
                given[name] = known[name]() if own[name] is ... else own[name]
            elif name in SMALL:
                given[name] = SMALL[name]
            elif parameter.required:
                if name not in known:
                    raise LookupError(
                        f"say in `right` what a {name!r} is, to fuzz all that take it"
                    )
                given[name] = known[name]()
        more = {name: value for name, value in self.odd.items() if name not in given}
        return given | {k: v.make() if isinstance(v, Odd) else v for k, v in more.items()}


def parameters_of(function: Callable[..., Any]) -> list[Parameter]:
    """Its parameters, and the fields of the configs it takes, as settings by name."""
    try:
        hints = parameter_hints(function.__init__ if isinstance(function, type) else function)
    except NameError:  # written for type checkers only
        hints = {}
    found: list[Parameter] = []
    parameters = inspect.signature(function).parameters
    by_name = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    for name, p in parameters.items():
        if p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL):
            continue
        hint = hints.get(name, Any)
        for kind in alternatives(hint):
            if by_name and isinstance(kind, type) and issubclass(kind, Config):
                said = settings_of(kind)
                found += [
                    Parameter(n, h, False, said[n].choices) for n, h in hints_of(kind).items()
                ]
        found.append(Parameter(name, hint, p.default is p.empty))
    seen: dict[str, Parameter] = {}
    for parameter in found:
        seen.setdefault(parameter.name, parameter)
    return list(seen.values())


def fitting(hint: Any) -> st.SearchStrategy[Any] | None:
    """Values of the type that is asked for, near its limits."""
    found: list[st.SearchStrategy[Any]] = []
    for kind in alternatives(hint):
        origin = get_origin(kind)
        if kind is int:
            found.append(st.integers(-3, 6))
        elif kind is float:
            found.append(st.floats(-2, 3, width=16) | st.floats(0, 1, width=16))
        elif kind is bool:
            found.append(st.booleans())
        elif origin is Literal:
            found.append(st.sampled_from(get_args(kind)))
        elif origin is tuple or getattr(origin, "__name__", "") == "Sequence":
            inner = fitting(get_args(kind)[0]) if get_args(kind) else None
            found += [] if inner is None else [st.lists(inner, max_size=3)]
    return st.one_of(found) if found else None


def calls(function: Callable[..., Any], worlds: list[World]) -> st.SearchStrategy[Call]:
    parameters = parameters_of(function)
    if any(p.name in _LANGUAGE for p in parameters):
        worlds = [w for w in worlds if isinstance(w.model, hf.LlamaForCausalLM)]

    def values(world: World, parameter: Parameter) -> st.SearchStrategy[Any]:
        # What a function of the user's raises is the user's: give none that is called.
        called = parameter.name in ("readout", "token") or "Callable" in str(parameter.hint)
        odd = [value for value in ODD if not (called and callable(value.make()))]
        found = [st.sampled_from(odd)]
        inside = fitting(parameter.hint)
        choices = [choice for choice in parameter.choices if choice not in SLOW]
        if choices:
            found += [st.sampled_from(choices)] * 2
        if inside is not None:
            found += [inside, inside]
        if parameter.name in ("model", "net", "old", "new"):
            found += [st.sampled_from(world.seen_as())] * 2
        if parameter.name in ("data", "train", "valid", "test", "batch", "clean", "noisy"):
            found += [st.sampled_from(world.spoilt())] * 2
        return st.one_of(found)

    @st.composite
    def drawn(draw: st.DrawFn) -> Call:
        world = draw(st.sampled_from(worlds))
        chosen = draw(st.lists(st.sampled_from(parameters), max_size=3, unique=True))
        odd = {p.name: draw(values(world, p)) for p in chosen if p.name not in RIGHT_ALWAYS}
        return Call(world, odd, draw(st.sampled_from(State)))

    return (
        drawn()
        if parameters
        else st.builds(Call, st.just(worlds[0]), st.just({}), st.sampled_from(State))
    )
