"""Every public function that takes a model takes a ready stream, and as_stream's options."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from inspect import Parameter, isfunction, signature
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from tests.zoo import ENTRIES, SIZES, TEXT
from torch import Tensor, nn

import everydepth as ed
from everydepth.errors import OptionError, SettingError, UnsupportedModelError
from everydepth.exits import certify, generation
from everydepth.exits.certify import certify_depth
from everydepth.exits.generation import stream_text
from everydepth.stream import ResidualStream, registry, sites
from everydepth.stream.discovery import DiscoveredStream


class Seeing(hf.ViTForImageClassification):
    """A class whose stream cannot be made without its option."""


class Telling(hf.LlamaForCausalLM):
    """The same, of a language model."""


def seeing(model: nn.Module, *, flavor: str) -> ResidualStream:
    return DiscoveredStream(model)


def telling(model: nn.Module, *, flavor: str) -> ResidualStream:
    return DiscoveredStream(model)


class Letters:
    """A tokenizer of single letters."""

    def encode(self, text: str, /) -> list[int]:
        return [3 + ord(letter) % 50 for letter in text]

    def decode(self, ids: Any, /, skip_special_tokens: bool = False) -> str:
        return "x" * len(np.atleast_1d(ids))


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(registry, "_by_class", {Seeing: seeing, Telling: telling})
    monkeypatch.chdir(tmp_path)


def classifier() -> nn.Module:
    sizes = {**SIZES, "num_hidden_layers": 2, "image_size": 16, "patch_size": 8, "num_labels": 3}
    return Seeing(hf.ViTConfig(**sizes)).eval()


def writer() -> nn.Module:
    return Telling(hf.LlamaConfig(**{**TEXT, "num_hidden_layers": 2})).eval()


def rows(count: int = 24) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(count, 3, 16, 16), "labels": torch.arange(count) % 3}


IDS = torch.arange(3, 9)[None]
QUIET = {"progress": False}
# Called with the model (or its stream) and the options.
VISION: dict[str, Callable[..., Any]] = {
    "as_stream": lambda m, **o: ed.as_stream(m, **o),
    "check_stream": lambda m, **o: ed.check_stream(m, rows(2), **o).raise_if_failed(),
    "at_depth": lambda m, **o: ed.at_depth(m, 1, **o),
    "insert": lambda m, **o: ed.insert(m, 1, **o),
    "sites": lambda m, **o: sites(m, **o),
    "EveryDepth": lambda m, **o: ed.EveryDepth(m, **o)(**rows(2)),
    "trace": lambda m, **o: ed.trace(m, rows(), **QUIET, **o),
    "linear_probe": lambda m, **o: ed.linear_probe(m, rows(), rows(), **QUIET, **o),
    "profile": lambda m, **o: ed.profile(m, rows(), batch_size=4, repeats=1, **QUIET, **o),
    "predict": lambda m, **o: ed.predict(m, rows(2), policy=ed.Confidence(threshold=0.5), **o),
    "calibrate": lambda m, **o: ed.calibrate(m, rows(99), risk=0.9, delta=0.5, **QUIET, **o),
    "evaluate": lambda m, **o: ed.evaluate(m, rows(), ed.Confidence(threshold=0.5), **o),
    "choose_blocks": lambda m, **o: ed.choose_blocks(m, rows(), keep=1, **QUIET, **o),
    "certify_depth": lambda m, **o: certify_depth(m, rows(), risk=0.9, delta=0.5, **QUIET, **o),
    "balcony": lambda m, **o: ed.balcony(m, [1], **o),
    "export": lambda m, **o: ed.export(m, "out", depth=1, overwrite=True, **o),
    "scaled_skip": lambda m, **o: ed.scaled_skip(m, layer=1, c=0.5, **o).remove(),
    "ablate": lambda m, **o: ed.ablate(m, rows(), c=(0.0, 1.0), **QUIET, **o),
    "memorization": lambda m, **o: ed.memorization(m, rows(), flipped=[1, 2], **QUIET, **o),
    "gradient_study": lambda m, **o: ed.gradient_study(
        m, rows(), rows(), flipped=[1, 2], **QUIET, **o
    ),
    "audit": lambda m, **o: ed.audit(m, rows(), **QUIET, **o),
    "growth.score": lambda m, **o: ed.growth.score(m, rows(), **QUIET, **o),
    "growth.jumpboard": lambda m, **o: ed.growth.jumpboard(m, rows(), after=1, **QUIET, **o),
    "growth.paired": lambda m, **o: ed.growth.paired(m, m, rows(), **o),
    "growth.compare": lambda m, **o: ed.growth.compare(
        m,
        rows(),
        rows(),
        steps=1,
        evaluations=1,
        seeds=(0,),
        arms=("longer", "stacked"),
        **QUIET,
        **o,
    ),
    "grow": lambda m, **o: ed.grow(m, rows(), rows(), rows(), steps=1, rounds=1, **QUIET, **o),
}
LANGUAGE: dict[str, Callable[..., Any]] = {
    "stream_text": lambda m, **o: list(
        stream_text(m, "one", tokenizer=Letters(), max_new_tokens=2, **o)
    ),
    "generate": lambda m, **o: ed.generate(m, IDS, max_new_tokens=2, **o),
    "token_grid": lambda m, **o: ed.token_grid(m, Letters(), "one", new_tokens=1, **o),
    "text_at_depth": lambda m, **o: ed.text_at_depth(m, Letters(), ["one"], new_tokens=1, **o),
}
ALL = {name: (classifier, call) for name, call in VISION.items()} | {
    name: (writer, call) for name, call in LANGUAGE.items()
}


@pytest.mark.parametrize("name", ALL)
def test_every_function_takes_a_model_with_options_or_its_stream(name: str) -> None:
    build, call = ALL[name]
    call(build(), flavor="plain")
    stream = ed.as_stream(build(), flavor="plain")
    call(stream)
    call(stream, flavor="plain")
    with pytest.raises(SettingError, match=r"flavor='odd', but this stream of .* flavor='plain'"):
        call(stream, flavor="odd")


def test_no_public_function_of_a_model_is_left_out() -> None:
    public = {name: getattr(ed, name) for name in ed.__all__}
    public |= {f"growth.{name}": getattr(ed.growth, name) for name in ed.growth.__all__}
    # Those of the packages that have as_stream's options, under whatever name.
    packages = (ed.exits, generation, certify, ed.tracing, ed.training, ed.ablations, ed.stream)
    public |= {name: f for package in packages for name, f in vars(package).items()}
    functions = {name: f for name, f in public.items() if isfunction(f) or f is ed.EveryDepth}
    plain = {name: list(signature(f).parameters.values()) for name, f in functions.items()}
    takes = {
        name
        for name, given in plain.items()
        if given and given[0].name in ("model", "old") and given[-1].kind is Parameter.VAR_KEYWORD
    }
    takes -= {"growth.grow"}
    takes = {name for name in takes if not name.startswith("_")}
    assert len(takes) > 25
    assert takes <= set(ALL)


def test_fit_takes_a_stream() -> None:
    """Its other arguments are settings, so options go into the stream."""
    stream = ed.as_stream(classifier(), flavor="plain")
    assert ed.fit(stream, [rows(4)], steps=1, **QUIET).stopped == "finished"


def test_a_net_that_is_trained_has_the_stream_of_its_model() -> None:
    net = ed.EveryDepth(classifier(), flavor="plain")
    assert ed.as_stream(net) is net.stream
    assert type(ed.at_depth(net, 1)) is Seeing


# -- options that would be ignored ----------------------------------------------------------------

PATHS = {"blocks": "vit.layers", "readout": ("vit.layernorm", "classifier"), "token": "first"}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"token": "mean"},
            r"token='mean', but the discovered stream of ViTForImageClassification takes only "
            r"stream, output, example; leave it out, or name all parts: as_stream\(model, blocks=",
        ),
        (
            {"task": "regression"},
            "task='regression', but the discovered stream of ViTFor.* takes only stream",
        ),
        (
            {"readout": "classifier"},
            "readout='classifier', but the discovered stream of ViTFor.* leave it",
        ),
        (
            {"tower": "text"},
            "tower='text', but the .* of ViT.* takes only stream, output, example; leave it out$",
        ),
        (
            {**PATHS, "tower": "text"},
            "tower='text', but with blocks= as_stream takes only blocks, readout, token, task",
        ),
        (
            {**PATHS, "task": "drawing"},
            r"as_stream\(task='drawing'\); use one of classification, r",
        ),
    ],
    ids=["token", "task", "readout", "unknown", "unknown-with-blocks", "unknown-task"],
)
@pytest.mark.filterwarnings("ignore")
def test_an_option_that_would_be_ignored_is_refused(
    options: dict[str, Any], words: str, untyped: None
) -> None:
    model, _ = ENTRIES["ViT"].make()
    with pytest.raises(SettingError, match=words):
        ed.as_stream(model, **options)


def test_an_unknown_option_of_a_family_lists_its_own() -> None:
    model, _ = ENTRIES["CLIPModel-text"].make()
    with pytest.raises(SettingError, match="adapter of CLIPModel takes only tower; leave it out"):
        ed.as_stream(model, towers="text")


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda m, x: ed.trace(m, x, metric="loss"), "trace has no .* did you mean 'metrics'"),
        (lambda m, x: ed.profile(m, x, repeat=1), "profile has no .* did you mean 'repeats'"),
        (lambda m, x: ed.ablate(m, x, qqq=1), "ablate has no argument 'qqq' .* it has model, "),
    ],
)
def test_a_misspelled_argument_is_told_by_the_function_it_was_given_to(
    call: Any, words: str, untyped: None
) -> None:
    model, batch = ENTRIES["ViT"].make()
    with pytest.raises(SettingError, match=words):
        call(model, [batch])


def test_an_unknown_option_survives_the_way_between_processes() -> None:
    model, _ = ENTRIES["ViT"].make()
    with pytest.raises(OptionError) as raised:
        ed.as_stream(model, qqq=1)
    again = copy(raised.value)  # reduces and rebuilds it, as pickling does
    assert (str(again), again.option) == (str(raised.value), "qqq")


def test_a_stream_followed_by_paths_knows_its_own_options() -> None:
    model, _ = ENTRIES["ViT"].make()
    stream = ed.as_stream(model, **PATHS)
    again = {**PATHS, "readout": list(PATHS["readout"]), "task": "classification"}
    assert ed.as_stream(stream, **again) is stream
    with pytest.raises(SettingError, match=r"token='last', .* was made with token='first'; leave"):
        ed.as_stream(stream, token="last")
    with pytest.raises(SettingError, match=r"tower='text', .* was made without tower="):
        ed.as_stream(stream, tower="text")


@pytest.fixture
def untyped(monkeypatch: pytest.MonkeyPatch) -> None:
    """As outside of the tests, where no type is checked before the function is called."""
    monkeypatch.setattr("jaxtyping.config.jaxtyping_disable", True)


def test_what_is_no_model_is_refused(untyped: None) -> None:
    folder: Any = "runs/lpa"
    words = r"'runs/lpa' is a str, not a model; pass a torch.nn.Module.* \(everydepth.load opens"
    with pytest.raises(UnsupportedModelError, match=words):
        ed.at_depth(folder, 1)


def test_only_classes_of_models_can_be_registered(untyped: None) -> None:
    wrong: Any = "x"
    number: Any = 3
    with pytest.raises(SettingError, match=r"register\(model_class='x'\); use a class of Module"):
        ed.register(wrong, ed.as_stream)
    with pytest.raises(SettingError, match=r"register\(factory=3\); use a function"):
        ed.register(Seeing, number)


# -- readouts by paths and by functions -----------------------------------------------------------


class Tiny(nn.Module):
    """A classifier of nobody's family, with one head that is its own and others that are not."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, 8, 8, stride=8)
        self.blocks = nn.ModuleList(Step() for _ in range(3))
        self.norm = nn.LayerNorm(8)
        self.head, self.narrow, self.other = nn.Linear(8, 3), nn.Linear(6, 3), nn.Linear(8, 5)

    def forward(self, pixel_values: Tensor) -> Tensor:
        h = self.embed(pixel_values).flatten(2).mT
        for block in self.blocks:
            h = block(h)
        return self.head(self.norm(h.mean(1)))


class Step(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.f = nn.Linear(8, 8)

    def forward(self, h: Tensor) -> Tensor:
        return h + self.f(h).tanh()


def test_a_head_of_another_width_is_refused_by_name() -> None:
    model = Tiny()
    told = {"blocks": "blocks", "token": "mean"}
    stream = ed.as_stream(model, readout=("norm", "narrow"), **told)
    words = r"Tiny does not fit: 'narrow' cannot take .* shape \(2, 8\).* takes 6 features; name"
    with pytest.raises(UnsupportedModelError, match=words):
        stream.observe(rows(2)).logits(1)
    stream = ed.as_stream(model, readout=("norm", "other"), **told)
    words = r"have two widths, 3 from the model itself and 5 from the readout; end readout= with"
    with pytest.raises(UnsupportedModelError, match=words):
        ed.trace(stream, rows(), progress=False)


NEEDS_BRANCHES = {
    "insert",
    "balcony",
    "choose_blocks",
    "scaled_skip",
    "ablate",
    "gradient_study",
    "grow",
    "sites",
}


@pytest.mark.parametrize(
    "name", [n for n in VISION if n not in NEEDS_BRANCHES and not n.startswith("growth")]
)
def test_a_function_as_readout_serves_every_verb_that_needs_no_branches(name: str) -> None:
    model = Tiny().eval()

    def readout(x: Tensor) -> Tensor:
        return model.head(model.norm(x))

    stream = ed.as_stream(model, blocks="blocks", readout=readout, token="mean")
    if name == "export":
        with pytest.raises(
            UnsupportedModelError,
            match="Tiny is not a Hugging Face model",
        ):
            VISION[name](stream)
    else:
        VISION[name](stream)


def test_what_needs_the_weight_of_a_head_says_so() -> None:
    model = Tiny()
    options: dict[str, Any] = {"blocks": "blocks", "token": "mean"}
    stream = ed.as_stream(model, readout=lambda x: model.head(model.norm(x)), **options)
    with pytest.raises(UnsupportedModelError, match=r"own heads needs the weight of a linear"):
        ed.EveryDepth(stream, ed.multi_classifier())
    with pytest.raises(UnsupportedModelError, match=r"known only after a prediction: call"):
        _ = stream.classes
    stream.observe(rows(2)).logits(0)
    assert stream.classes == 3
