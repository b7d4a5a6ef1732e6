"""Train a small ViT on digits with 5 % wrong labels; which skips does it need, what did it learn by
heart, and which labels look wrong?"""

from __future__ import annotations

from dataclasses import replace

import torch
from transformers import ViTConfig, ViTForImageClassification

import everydepth as ed
from everydepth.data import flip_labels, load_digits


def main() -> None:
    torch.set_num_threads(1)  # the tensors are small
    torch.manual_seed(0)
    train, test = load_digits("train"), load_digits("test")
    noise = flip_labels(train.labels, 0.05)
    noisy = replace(train, labels=noise.labels)
    sizes = {"hidden_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4}
    model = ViTForImageClassification(
        ViTConfig(
            image_size=8, patch_size=4, num_channels=1, num_labels=10, intermediate_size=96, **sizes
        )
    )
    ed.fit(ed.EveryDepth(model), noisy, epochs=8, batch_size=50, lr=2e-3)

    print(ed.memorization(model, noisy, test, flipped=noise))

    # Scale the skips of one layer at a time; layers below it are run once and shared.
    print(ed.ablate(model, test, c=(0.0, 0.5, 1.0)).table("accuracy"))

    # Or for as long as you like, with any code of your own inside:
    with ed.scaled_skip(model, layer=1, c=0.0, which="mlp"), torch.no_grad():
        logits = model(pixel_values=test.pixel_values).logits
    right = float((logits.argmax(-1) == test.labels).float().mean())
    print(f"without the MLP skip of layer 1: {right:.1%}")

    # Gradients of clean test samples against those of wrong training labels.
    print(ed.gradient_study(model, test, noisy, flipped=noise).table())

    first = ed.audit(model, noisy).order[:60]
    found = len(set(first.tolist()) & set(noise.flipped.tolist()))
    print(f"of the 60 most suspicious labels, {found} were flipped ({len(noise.flipped)} in all)")


if __name__ == "__main__":
    main()
