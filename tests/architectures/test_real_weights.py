"""Real, published weights: the readout at each depth gives what is known of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import everydepth as ed
from everydepth.architectures.cifar_resnet import CifarResNet, CifarResNetConfig
from everydepth.data import Images, batches, load

pytestmark = pytest.mark.slow
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


@pytest.mark.parametrize(("layers", "published"), [(32, 0.9263), (56, 0.9339)])
def test_a_pretrained_cifar_resnet_scores_as_published(
    data_folder: Path, layers: int, published: float
) -> None:
    model = CifarResNet(CifarResNetConfig.of_depth(layers, shortcut="pad", num_labels=10))
    model.load_state_dict(load_file(data_folder / "resnet-cifar10" / f"resnet{layers}.safetensors"))
    model.eval()
    test = load("cifar10", kind=Images, split="test", root=data_folder).subset(range(2000))
    test = test.normalized(*IMAGENET)
    right = 0
    with torch.no_grad():
        for batch in batches(test, 250):
            right += int((model(**batch).logits.argmax(-1) == batch["labels"]).sum())
        assert ed.check_stream(model, test.batch(range(4))).ok
    # 2,000 of the 10,000 test images: a standard error of 0.6 points.
    assert right / len(test) == pytest.approx(published, abs=0.015)


@pytest.mark.parametrize(("name", "embedding_loss"), [("stories260K", 23), ("stories15M", 44)])
def test_each_block_of_a_pretrained_language_model_lowers_the_loss(
    data_folder: Path, name: str, embedding_loss: float
) -> None:
    model = AutoModelForCausalLM.from_pretrained(data_folder / name, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(data_folder / name)
    story = (
        "Once upon a time, there was a little girl named Lily. She loved to play outside in the "
        "park with her friends. One day, she saw a big dog near the tree. The dog was very happy "
        "and wanted to play with her."
    )
    batch = dict(tokenizer(story, return_tensors="pt"))
    labels = batch["input_ids"][:, 1:]
    with torch.no_grad():
        states = ed.as_stream(model).observe(batch)
        found = [
            float(torch.nn.functional.cross_entropy(states.logits(d)[0, :-1], labels[0]))
            for d in range(len(states))
        ]
        assert ed.check_stream(model, batch).ok
        own = float(model(**batch, labels=batch["input_ids"]).loss)
    assert found[-1] == pytest.approx(own, rel=1e-5)
    assert found[0] == pytest.approx(embedding_loss, rel=0.1)
    assert found == sorted(found, reverse=True)
    assert found[-1] < 1.5
