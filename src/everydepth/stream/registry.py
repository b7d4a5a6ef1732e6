"""From a model to its stream: one table, filled from `everydepth.architectures` and by users."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, cast

from torch import Tensor, nn

from everydepth.errors import DepthError, UnsupportedModelError
from everydepth.stream.contract import ResidualStream, StreamFactory, Task, unwrapped
from everydepth.stream.generic import GenericStream

_by_class: dict[type[nn.Module], StreamFactory] = {}
_by_name: dict[str, str] = {}
_families: dict[str, list[str]] = {}


def register(model_class: type[nn.Module], factory: StreamFactory) -> None:
    """Teach `as_stream` a model class (and its subclasses) from outside.

    `factory(model, **options)` returns a `ResidualStream`. A later registration wins.
    """
    if not (isinstance(model_class, type) and issubclass(model_class, nn.Module)):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise UnsupportedModelError(
            f"register needs a subclass of torch.nn.Module, got {model_class!r}; "
            "pass the class, not an instance"
        )
    _by_class[model_class] = factory


def register_family(family: str, factory: str, class_names: Sequence[str]) -> None:
    """Register a family by name, so that neither it nor its library is imported before use.

    factory: `"module:function"`. class_names: `"package.ClassName"`, package being the top one.
    """
    _families[family] = [name.rpartition(".")[2] for name in class_names]
    _by_name.update(dict.fromkeys(class_names, factory))


def families() -> dict[str, list[str]]:
    """The supported families and their classes."""
    outside = [cls.__name__ for cls in _by_class]
    return {**_families, **({"registered by you": outside} if outside else {})}


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
    """
    if isinstance(model, ResidualStream):
        return model
    if not isinstance(model, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise UnsupportedModelError(
            f"as_stream needs a torch.nn.Module, got {type(model).__name__}; pass the model itself"
        )
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
    for cls in type(model).__mro__:
        if cls in _by_class:
            return _by_class[cast(type[nn.Module], cls)]
        path = _by_name.get(f"{cls.__module__.partition('.')[0]}.{cls.__name__}")
        if path is not None:
            module, _, function = path.partition(":")
            return getattr(import_module(module), function)
    known = "\n".join(f"  {family}: {', '.join(names)}" for family, names in families().items())
    raise UnsupportedModelError(
        f"{type(model).__name__} is not a model class everydepth knows. Known families:\n{known}\n"
        "Say where its blocks are: "
        'as_stream(model, blocks="path.to.blocks", readout=("path.to.norm", "path.to.head"), '
        'token="last"), or teach it for good: register(ModelClass, factory) '
        "(docs/add-an-architecture.md)"
    )
