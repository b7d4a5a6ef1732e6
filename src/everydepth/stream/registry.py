"""`as_stream`: from a model to its stream, by built-in family, registration or discovery."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from importlib import import_module
from operator import eq
from typing import Any, cast

from torch import Tensor, nn

from everydepth.config import brief, checked
from everydepth.errors import DepthError, OptionError, SettingError, UnsupportedModelError
from everydepth.stream.contract import ResidualStream, StreamFactory, Task
from everydepth.stream.discovery import DiscoveredStream
from everydepth.stream.embedding import EmbeddingStream
from everydepth.stream.generic import GenericStream
from everydepth.stream.text import check_tokenizer
from everydepth.stream.wrapping import check_parts_seen, check_seen, unwrapped

# The list of built-in families, by name: the stream imports nothing above it.
_TABLE = "everydepth.architectures.registry"


@dataclass(frozen=True)
class Family:
    """Model classes that share one factory.

    factory: `"module:name"`, imported on first use and called as `factory(model, **options)`.
    classes: `"package.ClassName"`, with the top-level package.
    """

    name: str
    factory: str
    classes: tuple[str, ...]


_by_class: dict[type[nn.Module], StreamFactory] = {}


@checked
def register(model_class: type[nn.Module], factory: StreamFactory) -> None:
    """Make `as_stream` use `factory` for a model class and its subclasses.

    `factory(model, **options)` returns a `ResidualStream`. The latest registration wins.

    >>> class Mine(ViTForImageClassification): ...  # or any model of your own
    >>> def stream(model, **options):
    ...     readout = ("vit.layernorm", "classifier")
    ...     return ed.as_stream(model, blocks="vit.layers", readout=readout, token="first")
    >>> ed.register(Mine, stream)
    >>> ed.as_stream(Mine(model.config)).depth
    3
    """
    _by_class[model_class] = factory


def families() -> dict[str, list[str]]:
    """The families with an architecture file, and their classes; all others are discovered.

    >>> from everydepth.stream import families
    >>> families()["clip"][0]
    'CLIPModel'
    """
    known = {f.name: [name.rpartition(".")[2] for name in f.classes] for f in _table()}
    outside = [cls.__name__ for cls in _by_class]
    return {**known, **({"registered by you": outside} if outside else {})}


def model_class(name: str) -> type[nn.Module]:
    """The supported model class of this name, as in a checkpoint's config."""
    for cls in _by_class:
        if cls.__name__ == name:
            return cls
    for family in _table():
        for path in family.classes:
            package, _, known = path.rpartition(".")
            if known == name:
                # Our own classes are defined next to their stream.
                home = family.factory.partition(":")[0] if package == "everydepth" else package
                return getattr(import_module(home), name)
    known = ", ".join(cls for names in families().values() for cls in names)
    raise UnsupportedModelError(
        f"{name!r} is not a model class everydepth knows; use one of {known}"
    )


def _table() -> tuple[Family, ...]:
    return import_module(_TABLE).FAMILIES


@checked
def as_stream(
    model: nn.Module | ResidualStream,
    *,
    blocks: str | None = None,
    readout: str | Sequence[str] | Callable[[Tensor], Tensor] | None = None,
    token: str | int | Callable[..., Tensor] | None = None,
    task: Task | None = None,
    tokenizer: Any = None,
    **options: Any,
) -> ResidualStream:
    """View a model as a residual stream. All functions that take a model accept these options.

    Almost every model needs no options: its blocks and readout are discovered from one forward
    pass. For others, name them:
    `as_stream(model, blocks="encoder.layers", readout=("norm", "head"), token="mean")`.
    A stream is returned unchanged. An option that would have no effect is an error.

    blocks: path of the module list that holds the blocks.
    readout: paths of modules applied in order, the last being the head; or a function.
    token: what predicts: "all" (the default), "first", "last", "mean", a position, or a function
        `f(h, batch)`.
    task: what the readout predicts; "classification" by default. task="embedding" without blocks=
        turns an encoder without a head into one that predicts a vector per sample: the mean of its
        real tokens, or with token="first" or "last" that token.
    tokenizer: allows data to be text: a string or a list of strings.
    options: passed to the architecture, e.g. `tower="text"` for a model with two streams. For a
        discovered model: `stream`, part of the path of one of several chains (by default the one
        that predicts: the decoder of an encoder-decoder), `output`, the name or number of one of
        several outputs that may be its prediction, and `example`, a batch to run.

    >>> stream = ed.as_stream(llama)
    >>> stream.depth, stream.task
    (3, 'causal_lm')
    """
    said = {"blocks": blocks, "readout": readout, "token": token, "task": task}
    options = {name: value for name, value in said.items() if value is not None} | options
    # `EveryDepth` and `Balcony` have streams of their own.
    own = getattr(unwrapped(model), "stream", None) if isinstance(model, nn.Module) else model
    if isinstance(own, ResidualStream):
        _check_own(own, options)
        if tokenizer is None or tokenizer is own.tokenizer:
            return own
        return _with_text(copy(own), own.options, tokenizer)
    if not isinstance(model, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise UnsupportedModelError(
            f"{brief(model)} is a {type(model).__name__}, not a model; pass a torch.nn.Module or a "
            "stream (everydepth.load opens a folder, a run or a hub name)"
        )
    # Compiled code ignores hooks added later, so use the original module.
    model = cast(nn.Module, getattr(model, "_orig_mod", model))
    check_seen(model)
    if task == "embedding" and blocks is None:
        pooled = {name: options.pop(name) for name in ("task", "token") if name in options}
        stream = EmbeddingStream(as_stream(model, **options), pooled.get("token", "mean"))
        return _with_text(stream, options | pooled, tokenizer)
    factory = _factory(unwrapped(model)) if blocks is None else GenericStream
    _check_options(unwrapped(model), factory, options)
    if factory is GenericStream:
        options = {"token": "all", "task": "classification"} | options
    stream = _made(factory, model, options)
    _with_text(stream, options, tokenizer)
    check_parts_seen(model, (block.module for block in stream.blocks))
    if stream.depth == 0:
        raise DepthError(
            f"{stream.name} has 0 blocks, so it has no stream; build it with at least one "
            "(num_hidden_layers >= 1)"
        )
    return stream


def _made(factory: StreamFactory, model: nn.Module, options: Mapping[str, Any]) -> ResidualStream:
    """The stream of a model; discovered if its parts are not those that its family's file knows.

    They were replaced, as a skip that changes the shape stands for a removed block.
    """
    try:
        return factory(model, **options)
    except (AttributeError, IndexError, TypeError) as error:
        if factory in (*_by_class.values(), GenericStream, DiscoveredStream):
            raise
        if options:
            raise UnsupportedModelError(
                f"parts of this {type(unwrapped(model)).__name__} were replaced, and its adapter "
                f"does not fit them ({error}); leave out {', '.join(options)}, so that it is "
                "discovered"
            ) from error
    return DiscoveredStream(model)


def _with_text(
    stream: ResidualStream, options: Mapping[str, Any], tokenizer: Any
) -> ResidualStream:
    """Remember what a stream was made with; another made so takes text as well."""
    if tokenizer is not None:
        check_tokenizer(tokenizer)
    more = {} if tokenizer is None else {"tokenizer": tokenizer}
    stream.options, stream.tokenizer = {**options, **more}, tokenizer
    return stream


def _check_own(stream: ResidualStream, options: Mapping[str, Any]) -> None:
    """Raise if an option differs from those the stream was made with."""
    for name, value in options.items():
        own = stream.options.get(name)
        both = (tuple(v) if isinstance(v, list) else v for v in (own, value))
        if not eq(*both):
            made = f"with {name}={own!r}" if name in stream.options else f"without {name}="
            raise SettingError(
                f"{name}={value!r}, but this stream of {stream.name} was made {made}; leave it "
                f"out, or make a new stream: as_stream(model, {name}={value!r})"
            )


def _check_options(model: nn.Module, factory: StreamFactory, options: Mapping[str, Any]) -> None:
    """Raise if the factory would not use an option."""
    parameters = list(inspect.signature(factory).parameters.values())[1:]
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return
    known = [parameter.name for parameter in parameters]
    for name, value in options.items():
        if name in known:
            continue
        kind = "discovered stream" if factory is DiscoveredStream else "adapter"
        who = f"the {kind} of {type(model).__name__}"
        who = "with blocks= as_stream" if factory is GenericStream else who
        whole = ""
        if factory is not GenericStream and name in ("readout", "token", "task"):
            whole = ", or name all parts: as_stream(model, blocks=..., readout=..., token=...)"
        raise OptionError(
            f"{name}={value!r}, but {who} takes {_listed(known)}; leave it out{whole}",
            option=name,
            owner=as_stream.__name__,
        )


def _listed(names: Sequence[str]) -> str:
    return f"only {', '.join(names)}" if names else "no options"


def _factory(model: nn.Module) -> StreamFactory:
    by_name = {name: family.factory for family in _table() for name in family.classes}
    for cls in type(model).__mro__:
        if cls in _by_class:
            return _by_class[cast(type[nn.Module], cls)]
        path = by_name.get(f"{cls.__module__.partition('.')[0]}.{cls.__name__}")
        if path is not None:
            module, _, name = path.partition(":")
            return getattr(import_module(module), name)
    return DiscoveredStream
