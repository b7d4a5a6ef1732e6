"""Attention with a mask, in which several heads read the same keys and values."""

from __future__ import annotations

import sys
from collections.abc import Generator
from contextlib import contextmanager
from threading import Lock
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from everydepth.exits.generation.parts import attending, current

_NAME = "sdpa"
_OTHER = ("position_bias", "softcap", "cache")  # what only transformers' own function knows

_lock = Lock()
_inside = 0


@contextmanager
def shared_keys() -> Generator[None, None, None]:
    """Inside the context, heads that share keys and values read them where they are.

    With a mask, as rows of different lengths need one, transformers' `sdpa` copies all keys and
    values of every layer for each head that reads them, at every step. On a CPU that is needless,
    and the result without the copies is the same bit for bit. Elsewhere nothing changes.
    """
    global _inside
    if "transformers.modeling_utils" not in sys.modules:  # then no model is one of transformers
        yield
        return
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    with _lock:
        # A function of the user's own stays.
        if ALL_ATTENTION_FUNCTIONS[_NAME] is sdpa_attention_forward:
            ALL_ATTENTION_FUNCTIONS[_NAME] = attend
        _inside += 1
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if not _inside and ALL_ATTENTION_FUNCTIONS[_NAME] is attend:
                del ALL_ATTENTION_FUNCTIONS[_NAME]


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """`sdpa_attention_forward`, without copies of keys and values where they are needless."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    settings: dict[str, Any] = more | {"dropout": dropout, "scaling": scaling}
    if (parts := current()) is not None:
        with attending(None):
            return parts.attend(attend, module, query, attention_mask, **settings)
    copied = (
        attention_mask is not None
        and query.device.type == "cpu"
        and query.shape[1] == key.shape[1] * getattr(module, "num_key_value_groups", 1)
        and query.shape[1] > key.shape[1]
    )
    if not copied or any(more.get(name) is not None for name in _OTHER):
        return sdpa_attention_forward(module, query, key, value, attention_mask, **settings)
    out = scaled_dot_product_attention(
        *(query, key, value, attention_mask), dropout_p=dropout, scale=scaling, enable_gqa=True
    )
    return out.transpose(1, 2).contiguous(), None
