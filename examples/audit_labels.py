"""Which labels are wrong? Models that have not seen a label judge it, at every depth."""

from __future__ import annotations

from dataclasses import replace

import torch
from transformers import ViTConfig, ViTForImageClassification

import everydepth as ed
from everydepth.ablations import folds
from everydepth.data import Images, flip_labels, load_digits


def trained(rows: Images) -> ViTForImageClassification:
    config = ViTConfig(
        image_size=8,
        patch_size=4,
        num_channels=1,
        num_labels=10,
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=64,
        initializer_range=0.1,  # a network this small learns faster from larger weights
    )
    model = ViTForImageClassification(config)
    ed.fit(ed.EveryDepth(model, ed.lpa()), rows, epochs=8, batch_size=64, lr=5e-3)
    return model.eval()


def main() -> None:
    torch.set_num_threads(1)  # the tensors are small
    torch.manual_seed(0)
    clean = load_digits("train")
    noise = flip_labels(clean.labels, 0.08)  # your data has such labels already
    data = replace(clean, labels=noise.labels)

    fold = folds(data.labels, 3)  # model k is trained without fold k, and judges it
    models = [trained(data.subset((fold != k).nonzero().flatten().tolist())) for k in range(3)]
    found = ed.audit(models, data, folds=fold)

    print(f"about {found.noise:.1%} of {len(data)} labels are wrong (we made it 8 %)")
    print(found.table(top=8))
    suspects = found.suspects(0.5)
    right = len(set(suspects.tolist()) & set(noise.flipped.tolist()))
    print(f"{len(suspects)} suspects, {right} of them among the {len(noise.flipped)} we flipped")


if __name__ == "__main__":
    main()
