"""Leave early with a guarantee: train a small ViT at every depth, calibrate, predict, compare.

    python examples/early_exit.py

Half a minute on one core; the digits come with scikit-learn.
"""

from __future__ import annotations

import torch
from rich.console import Console
from torch.nn.functional import cross_entropy
from transformers import ViTConfig, ViTForImageClassification

import everydepth as ed
from everydepth.data import batches, load_digits


def trained() -> ViTForImageClassification:
    """Six blocks, each read out by the shared head and trained to predict (`ed.fit` does more)."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64}
    images = {"image_size": 8, "patch_size": 4, "num_channels": 1, "num_labels": 10}
    config = ViTConfig(num_hidden_layers=6, **sizes, **images)
    model = ViTForImageClassification(config)
    stream = ed.as_stream(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    rows = batches(load_digits("train", fractions=(0.4, 0.3, 0.3)), 32, shuffle=True)
    for _ in range(15):
        for batch in rows:
            states = stream.observe(batch)
            losses = [cross_entropy(states.logits(k), batch["labels"]) for k in range(1, 7)]
            optimizer.zero_grad()
            torch.stack(losses).sum().backward()
            optimizer.step()
    return model.eval()


def main() -> None:
    console = Console()
    model = trained()
    calibration, test = (load_digits(part, fractions=(0.4, 0.3, 0.3)) for part in ("valid", "test"))
    policy = ed.calibrate(model, calibration, risk=0.05, delta=0.1)
    assert policy.certificate is not None
    console.print(policy.certificate.note, markup=False)
    prediction = ed.predict(model, test.batch(range(12)), policy=policy)
    console.print(f"twelve digits left at depths {prediction.depths.tolist()}", markup=False)
    result = ed.evaluate(model, test, policy, batch_size=64, repeats=3)
    console.print(result.table())


if __name__ == "__main__":
    main()
