"""A wide head may be kept in another order; it stays the same map."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import everydepth as ed
from everydepth.exits.generation.packing import PACKED_FROM, packed_head


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(1, 8), (5, 1, 8), (2, 3, 8), (200, 8)])
def test_a_packed_head_gives_what_the_plain_one_gives(bias: bool, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    head, x = nn.Linear(8, 5000, bias=bias), torch.randn(shape)
    with torch.inference_mode():
        plain = head(x)
        with packed_head(head) as done:
            assert done
            found = head(x)
    torch.testing.assert_close(found, plain)
    assert found.shape == plain.shape


def test_the_head_is_itself_again_after_an_error() -> None:
    head = nn.Linear(8, 5000)
    with pytest.raises(RuntimeError, match="inner product"), packed_head(head):
        head(torch.ones(2, 9))
    assert "forward" not in vars(head)


class Doubled(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


@pytest.mark.parametrize(
    "head",
    [
        nn.Linear(8, 100),
        nn.Linear(8, 5000).double(),
        Doubled(8, 5000),
        nn.Linear(8, 5000, device="meta"),
    ],
)
def test_what_is_no_plain_wide_map_is_left_as_it_is(head: nn.Module) -> None:
    with packed_head(head) as done:
        assert not done
        assert "forward" not in vars(head)


def test_text_of_a_wide_head_is_that_of_the_model_itself() -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=5000,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=128,
    )
    model = LlamaForCausalLM(config).eval()
    packed: list[bool] = []
    ed.as_stream(model)  # is looked at once, by its own forward
    model.lm_head.register_forward_pre_hook(lambda head, _: packed.append("forward" in vars(head)))
    told = {"max_new_tokens": PACKED_FROM, "eos_token_id": ()}
    said = ed.generate(model, [[3, 4, 5]], **told)
    assert all(packed)
    ids = said.sequences
    with torch.no_grad():
        wanted = model(input_ids=ids).logits[0, 2:-1].argmax(-1)
    assert said.tokens[0] == wanted.tolist()
    assert not packed[-1]  # itself again
