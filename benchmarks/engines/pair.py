"""stories15M and a shallow depth of it that drafts for it, as engines read them.

    python benchmarks/engines/pair.py FOLDER [--arm balcony] [--depth 2] [--seconds 100]

Tunes the model as benchmarks/pretrained.py does (EVERYDEPTH_DATA says where it is), for as many CPU
seconds, at a rate chosen by its rule, and writes FOLDER/whole and FOLDER/draft as stock checkpoints
with their tokenizer, and both again as GGUF files. A balcony leaves the model itself untouched:
`whole` is the published one.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from pretrained import (
    ARMS,
    NEW_PARAMETERS,
    NEW_RATES,
    RATES,
    published,
    rate_for,
    rungs_of,
    steps_for,
    text_for,
    tuned,
)

import everydepth as ed
from everydepth.environment import DATA_VARIABLE
from everydepth.exits.load import load_tokenizer

NAME = "stories15M"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--arm", default="balcony", choices=[n for n, make in ARMS.items() if make])
    parser.add_argument("--depth", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=100.0)
    given = parser.parse_args()
    torch.set_num_threads(1)
    make = ARMS[given.arm]
    assert make is not None

    def made() -> ed.EveryDepth:
        torch.manual_seed(0)
        return make(published(NAME))

    text = text_for(NAME, published(NAME), given.folder)
    steps = steps_for(made, text.train, given.seconds)
    rates = NEW_RATES if given.arm in NEW_PARAMETERS else RATES
    lr = rate_for(made, rates, text, steps, rungs_of(published(NAME)))
    net: Any = made()
    spent = tuned(net, text.train, steps, lr, 0)
    tokenizer = load_tokenizer(Path(os.environ[DATA_VARIABLE]) / NAME)
    for name, depth in (("whole", None), ("draft", given.depth)):
        ed.export(net, given.folder / name, depth=depth, tokenizer=tokenizer)
        found = ed.export(
            net, given.folder / f"{name}-gguf", depth=depth, format="gguf", tokenizer=tokenizer
        )
        (found / "model.gguf").rename(given.folder / f"{name}.gguf")
    about = {"model": NAME, "arm": given.arm, "depth": given.depth, "steps": steps, "lr": lr}
    (given.folder / "pair.json").write_text(json.dumps(about | {"cpu_seconds": round(spent)}))


if __name__ == "__main__":
    main()
