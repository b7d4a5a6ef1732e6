"""From a model to its stream: the table of built-in families, and what users register."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, cast

from torch import Tensor, nn

from everydepth.errors import DepthError, UnsupportedModelError
from everydepth.stream.contract import ResidualStream, StreamFactory, Task, unwrapped
from everydepth.stream.generic import GenericStream

# Where the built-in families are listed. A name, so that the waist imports nothing above it.
_TABLE = "everydepth.architectures.registry"


@dataclass(frozen=True)
class Family:
    """A family of model classes that one factory can adapt.

    factory: `"module:name"`, imported at first use, and called as `factory(model, **options)`.
    classes: `"package.ClassName"`, package being the top-level one.
    """

    name: str
    factory: str
    classes: tuple[str, ...]


_by_class: dict[type[nn.Module], StreamFactory] = {}


def register(model_class: type[nn.Module], factory: StreamFactory) -> None:
    """Teach `as_stream` a model class (and its subclasses) from outside.

    `factory(model, **options)` returns a `ResidualStream`. A later registration wins.

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
    """The supported families and their classes.

    >>> ed.families()["vit"][0]
    'ViTForImageClassification'
    """
    known = {f.name: [name.rpartition(".")[2] for name in f.classes] for f in _table()}
    outside = [cls.__name__ for cls in _by_class]
    return {**known, **({"registered by you": outside} if outside else {})}


def model_class(name: str) -> type[nn.Module]:
    """The supported class of this name, as a checkpoint's config names it."""
    for cls in _by_class:
        if cls.__name__ == name:
            return cls
    for family in _table():
        for path in family.classes:
            package, _, known = path.rpartition(".")
            if known == name:
                # Our own classes live beside their adapter.
                home = family.factory.partition(":")[0] if package == "everydepth" else package
                return getattr(import_module(home), name)
    known = ", ".join(cls for names in families().values() for cls in names)
    raise UnsupportedModelError(
        f"{name!r} is not a model class everydepth knows; use one of {known}"
    )


def _table() -> tuple[Family, ...]:
    return import_module(_TABLE).FAMILIES


def as_stream(
    model: nn.Module | ResidualStream,
    *,
    blocks: str | None = None,
    readout: str | Sequence[str] | Callable[[Tensor], Tensor] | None = None,
    token: str | int | Callable[..., Tensor] = "all",
    task: Task = "classification",
    **options: Any,
) -> ResidualStream:
    """See a model as a residual stream.

    A known model needs no arguments. For any other, say where its blocks are and how a state is
    read out: `as_stream(model, blocks="encoder.layers", readout=("norm", "head"), token="mean")`.

    blocks: path of the module list that holds the blocks.
    readout: paths of modules applied in order, the last being the head; or a function.
    token: "all", "first", "last", "mean", a position, or `f(h, batch)`: what predicts.
    options: passed to the architecture, e.g. `tower="text"` for a model with two streams.

    >>> stream = ed.as_stream(llama)
    >>> stream.depth, stream.task
    (3, 'causal_lm')
    """
    if isinstance(model, ResidualStream):
        return model
    # Compiled code does not see hooks that come later: the module itself is what we follow.
    model = cast(nn.Module, getattr(model, "_orig_mod", model))
    if blocks is not None:
        options = {"blocks": blocks, "readout": readout, "token": token, "task": task}
        stream = GenericStream(model, **options)
    else:
        stream = _factory(unwrapped(model))(model, **options)
    stream.options = options
    if stream.depth == 0:
        raise DepthError(
            f"{stream.name} has 0 blocks, so there is no stream to follow; "
            "build it with at least one (num_hidden_layers >= 1)"
        )
    return stream


def _factory(model: nn.Module) -> StreamFactory:
    by_name = {name: family.factory for family in _table() for name in family.classes}
    for cls in type(model).__mro__:
        if cls in _by_class:
            return _by_class[cast(type[nn.Module], cls)]
        path = by_name.get(f"{cls.__module__.partition('.')[0]}.{cls.__name__}")
        if path is not None:
            module, _, name = path.partition(":")
            return getattr(import_module(module), name)
    known = "\n".join(f"  {family}: {', '.join(names)}" for family, names in families().items())
    raise UnsupportedModelError(
        f"{type(model).__name__} is not a model class everydepth knows. Known families:\n{known}\n"
        "Say where its blocks are: "
        'as_stream(model, blocks="path.to.blocks", readout=("path.to.norm", "path.to.head"), '
        'token="last"), or teach it for good: register(ModelClass, factory) '
        "(docs/add-an-architecture.md)"
    )
