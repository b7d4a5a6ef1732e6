"""Published weights, traced: what is known of them is what the trace shows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import everydepth as ed
from everydepth.architectures.cifar_resnet import CifarResNet, CifarResNetConfig
from everydepth.data import Images, load

pytestmark = pytest.mark.slow
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
STORY = (
    "Once upon a time, there was a little girl named Lily. She loved to play outside in the park. "
    "One day, she saw a big dog. The dog was sad because he had lost his ball. Lily helped him."
)


def test_a_pretrained_resnet_is_right_at_the_end_and_collapses_on_the_way(
    data_folder: Path,
) -> None:
    model = CifarResNet(CifarResNetConfig.of_depth(32, shortcut="pad", num_labels=10))
    model.load_state_dict(load_file(data_folder / "resnet-cifar10" / "resnet32.safetensors"))
    test = load("cifar10", kind=Images, split="test", root=data_folder).subset(range(1000))
    t = ed.trace(model, test.normalized(*IMAGENET), batch_size=100, progress=False)
    assert abs(t["accuracy"][-1] - 0.9263) < 0.02
    separation = t.result("neural_collapse").arrays["separation"]
    assert separation[-1] < separation[1] - 2
    different = t.result("distinguishability").arrays["different_10"]
    assert different[-1] < 0.25 < different[0]
    assert t["saturation"].sum() == 1000


@pytest.mark.parametrize("name", ["stories260K", "stories15M"])
def test_a_pretrained_language_model_gets_better_with_depth(data_folder: Path, name: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(data_folder / name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(data_folder / name)
    ids = torch.tensor([tokenizer.encode(STORY)])
    t = ed.trace(model, {"input_ids": ids}, progress=False)
    assert (np.diff(t["loss"]) < 0).all()
    assert t["loss"][-1] < 2
    with torch.no_grad():
        own = float(model(input_ids=ids, labels=ids).loss)
    assert t["loss"][-1] == pytest.approx(own, rel=1e-5)
    grid = ed.token_grid(model, tokenizer, "Once upon a time", new_tokens=6)
    assert "there" in "".join(grid.arrays["tokens"].tolist())
    texts = ed.text_at_depth(model, tokenizer, ["Once upon a time"], new_tokens=40)
    assert texts.arrays["diversity"][-1] > 0.5
