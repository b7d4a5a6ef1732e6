"""Evaluate a depth in lm-evaluation-harness.

    python -m everydepth.exits.harness run --model everydepth \\
        --model_args pretrained=runs/balcony,depth=12 --tasks gsm8k,wikitext

The arguments are those of `lm_eval`; importing this module registers the model "everydepth".
"""

# The base class in lm-evaluation-harness is untyped.
# pyright: reportUntypedBaseClass=false, reportUnknownMemberType=false, reportCallIssue=false

from __future__ import annotations

from typing import Any

import torch

try:
    from lm_eval.__main__ import cli_evaluate
    from lm_eval.api.registry import register_model
    from lm_eval.models.huggingface import HFLM
except ImportError as error:
    from everydepth.errors import SettingError

    raise SettingError(
        f"lm-evaluation-harness needs the package lm_eval ({error}); "
        "pip install 'everydepth[harness]'"
    ) from error

from everydepth.exits.load import load, load_tokenizer
from everydepth.stream import as_stream, at_depth, unwrapped


@register_model("everydepth")
class DepthLM(HFLM):
    """The first `depth` blocks of a causal language model (all if None), with its own head.

    pretrained: a folder, a run directory, or a Hugging Face name. A balcony at this depth is used.
    device: the CPU if this machine has no such device, because the harness asks for a GPU by
        default. kwargs: passed to the harness's own `hf` model.

    >>> from everydepth.exits.harness import DepthLM
    >>> _ = llama.save_pretrained("llama"), tokenizer.save_pretrained("llama")
    >>> DepthLM("llama", depth=2).model.config.num_hidden_layers
    2
    """

    def __init__(
        self, pretrained: str, depth: int | None = None, device: str = "cpu", **kwargs: Any
    ) -> None:
        stream = as_stream(load(pretrained))
        # The last depth is the model itself, without its balconies.
        cut = at_depth(stream, stream.depth if depth is None else depth, share=True)
        plain: Any = unwrapped(cut)
        super().__init__(
            pretrained=plain.to(_usable(device)), tokenizer=load_tokenizer(pretrained), **kwargs
        )


def _usable(device: str) -> str:
    found = torch.accelerator.current_accelerator(check_available=True)
    return device if found is not None and torch.device(device).type == found.type else "cpu"


if __name__ == "__main__":
    cli_evaluate()
