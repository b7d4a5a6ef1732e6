"""A cursor started for the first blocks only."""

from __future__ import annotations

import pytest
import torch
from tests.zoo import ENTRIES

from everydepth.errors import DepthError
from everydepth.stream import as_stream


@pytest.mark.parametrize("name", ["Llama-tied-CausalLM-left", "GPT2-CausalLM-left", "ViT"])
def test_it_goes_as_deep_as_it_was_started_for_with_the_same_states(name: str) -> None:
    model, batch = ENTRIES[name].make()
    stream = as_stream(model)
    with torch.no_grad():
        whole, part = stream.start(batch), stream.start(batch, to=2)
        assert torch.equal(stream.advance(part, 2).h, stream.advance(whole, 2).h)
    with pytest.raises(DepthError, match=r"the last it was started for of .*start again"):
        stream.advance(part)


def test_at_least_one_block_is_needed() -> None:
    model, batch = ENTRIES["ViT"].make()
    with pytest.raises(DepthError, match=r"depth 0, but .* use 1 to 4"):
        as_stream(model).start(batch, to=0)


def test_windows_and_positions_are_what_the_model_says() -> None:
    def windows(name: str) -> list[int | None]:
        stream = as_stream(ENTRIES[f"{name}-CausalLM-left"].make()[0])
        assert stream.positions == 32
        return [stream.window(depth) for depth in range(1, 5)]

    assert windows("GPT2") == windows("Llama-tied") == [None] * 4
    assert windows("Mistral-window") == [4] * 4
    assert windows("Qwen2-window") == windows("Qwen3-window") == [None, None, 4, 4]
    assert as_stream(ENTRIES["ViT"].make()[0]).positions is None
