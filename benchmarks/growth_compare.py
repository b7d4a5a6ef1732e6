"""Was growing worth it? One block more against five other uses of the same FLOPs.

    python benchmarks/growth_compare.py [--seeds 3] [--steps 200] [--runs FOLDER]

A small ResNet and a small ViT on digits and on 2,400 images of Fashion-MNIST at 14 x 14 pixels,
each trained for 100 steps first. FLOPs count scoring and the line search. With `--runs` a run that
is cut off continues. Written to benchmarks/results/growth_compare.json.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from record import record, sized

from everydepth.growth import compare
from growth import console, digits, fashion, trained

DATA = sized({"digits": digits, "fashion-mnist": fashion}, {"digits": digits})


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=sized(3, 1))
    parser.add_argument("--steps", type=int, default=sized(200, 10))
    parser.add_argument("--runs", type=Path)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, Any] = {"seeds": asked.seeds, "steps": asked.steps}
    for data, parts_of in DATA.items():
        parts = parts_of()
        for kind, lr in (("resnet", 3e-3), ("vit", 1e-3)):
            compared = compare(
                trained(parts, kind, sized(100, 1), 0, blocks=2),
                parts.train,
                parts.test,
                steps=asked.steps,
                seeds=tuple(range(asked.seeds)),
                lr=lr,
                batch_size=64,
                run=None if asked.runs is None else asked.runs / f"{data}-{kind}",
                progress=False,
            )
            console.print(f"{data}, {kind}")
            console.print(compared.table())
            found[f"{data}, {kind}"] = dict(compared.about)
    record("growth_compare", found)


if __name__ == "__main__":
    main()
