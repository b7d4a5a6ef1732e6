"""Encoder-decoder models: one stream reads the prompt, and another, the decoder's, answers."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from everydepth.errors import SettingError, UnsupportedModelError
from everydepth.exits.generation.request import Prompt
from everydepth.exits.generation.sampling import Sampling
from everydepth.stream import ResidualStream, evaluating, rewrapped, unwrapped


def answers(stream: ResidualStream) -> bool:
    """Whether the model is an encoder-decoder that generates text."""
    model: Any = unwrapped(stream.model)
    return bool(
        getattr(getattr(model, "config", None), "is_encoder_decoder", False)
        and getattr(model, "generation_config", None) is not None
        and "input_ids" in stream.inputs
    )


def answer(
    stream: ResidualStream,
    prompt: Prompt,
    depth: int,
    sampling: Sampling,
    *,
    limit: int,
    stops: list[int],
    pad: int,
    generator: torch.Generator | None,
    more: Mapping[str, Any] = MappingProxyType({}),
) -> Tensor:
    """The tokens of each row, beginning with the start token, from the model cut to `depth`.

    Uses the model's own `generate`, which handles its encoder and its cache.

    more: settings of a `GenerationConfig` in place of the model's own.
    """
    cut = rewrapped(stream.model, stream.truncated(depth, share=True))
    model: Any = unwrapped(cut)
    settings = deepcopy(model.generation_config)
    try:
        settings.update(**{"min_length": 0, **more})
    except ValueError as error:
        raise SettingError(
            f"generation_config does not fit that of {stream.name}: {error}; leave one of them out"
        ) from error
    starts = settings.decoder_start_token_id, settings.bos_token_id
    if starts == (None, None):
        raise UnsupportedModelError(
            f"{stream.name} has no start token: decoder_start_token_id and bos_token_id are None; "
            "set model.generation_config.decoder_start_token_id"
        )
    settings.update(
        max_new_tokens=limit,
        max_length=None,
        num_beams=1,
        do_sample=sampling.do_sample,
        # Without sampling, transformers warns of these.
        temperature=sampling.temperature if sampling.do_sample else None,
        top_k=(sampling.top_k or 0) if sampling.do_sample else None,
        top_p=(sampling.top_p or 1.0) if sampling.do_sample else None,
        eos_token_id=stops or None,
        pad_token_id=pad,
        return_dict_in_generate=False,
    )
    # What is None here would otherwise be taken from the cut model's own.
    model.generation_config = settings
    ids, real = _right_padded(prompt, pad)
    devices = [ids.device] if ids.device.type == "cuda" else []
    with evaluating(model), torch.random.fork_rng(devices, enabled=generator is not None):
        if generator is not None:
            # The model's `generate` uses only the global random state.
            seed = torch.randint(2**62, (1,), generator=generator, device=generator.device)
            torch.manual_seed(int(seed))
        try:
            return model.generate(ids, attention_mask=real.long(), generation_config=settings)
        except (IndexError, RuntimeError, TypeError, ValueError) as error:
            raise UnsupportedModelError(
                f"the model's own generate fails for {stream.name} at depth {depth} "
                f"({type(error).__name__}: {error}); see whether model.generate(ids) works"
            ) from error


def _right_padded(prompt: Prompt, pad: int) -> tuple[Tensor, Tensor]:
    """The prompt with padding on the right, since encoders count positions from the left."""
    order = (~prompt.real).long().argsort(dim=1, stable=True)
    real = prompt.real.gather(1, order)
    return prompt.ids.gather(1, order).masked_fill(~real, pad), real
