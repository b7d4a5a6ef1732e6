"""A stream around another one: whatever a subclass does not define is the inner stream's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from everydepth.stream.block import Block
from everydepth.stream.contract import ResidualStream


class StreamAround(ResidualStream):
    """Base of streams that change some of another stream; `inner` is that one."""

    inner: ResidualStream

    @property
    def blocks(self) -> Sequence[Block]:
        return self.inner.blocks

    @property
    def head(self) -> nn.Module:
        return self.inner.head

    def feature(self, h: Tensor, depth: int, batch: Mapping[str, Any]) -> Tensor:
        return self.inner.feature(h, depth, batch)

    def normed(self, feature: Tensor, depth: int) -> Tensor:
        return self.inner.normed(feature, depth)


def _inner_property(name: str) -> property:
    return property(lambda self: getattr(self.inner, name))


def _inner_method(name: str) -> Any:
    return lambda self, *args, **kwargs: getattr(self.inner, name)(*args, **kwargs)


# Every other member of the contract that may be overridden: none can be forgotten.
for _name, _member in vars(ResidualStream).items():
    _function = _member.fget if isinstance(_member, property) else _member
    _open = callable(_function) and not getattr(_function, "__final__", False)
    if _open and not _name.startswith("_") and _name not in vars(StreamAround):
        _make = _inner_property if isinstance(_member, property) else _inner_method
        setattr(StreamAround, _name, _make(_name))
