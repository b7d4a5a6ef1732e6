"""A model and a shallow depth of it that drafts for it, as engines read them.

    python benchmarks/engines/pair.py FOLDER [--arm balcony] [--depth 2] [--seconds 100]
    python benchmarks/engines/pair.py FOLDER --tuned CHECKPOINT --depth 2 --weights int8

Tunes stories15M as benchmarks/pretrained.py does (EVERYDEPTH_DATA says where it is), for as many
CPU seconds, at a rate chosen by its rule; or takes a tuned checkpoint, such as the folder `all`
that `everydepth reproduce smollm2` leaves. Writes FOLDER/whole and FOLDER/draft as stock
checkpoints with their tokenizer, and both again as GGUF files, the draft in so few bits. A balcony
leaves the model itself untouched: `whole` is the published one. The prompts of pair.json are the
beginnings of texts like those it was tuned on.
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
    read,
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
    parser.add_argument("--tuned", type=Path, help="a checkpoint that needs no tuning")
    parser.add_argument("--weights", choices=("float32", "int8", "int4"), default="float32")
    given = parser.parse_args()
    torch.set_num_threads(1)
    given.folder.mkdir(parents=True, exist_ok=True)
    if given.tuned is None:
        net, about = tuned_stories(given)
        tokenizer = load_tokenizer(Path(os.environ[DATA_VARIABLE]) / NAME)
        about["prompts"], texts = ["Once upon a time"], text_for(NAME, net, given.folder).held_out
    else:
        net, tokenizer = ed.load(given.tuned), load_tokenizer(given.tuned)
        texts = read(tokenizer, "test", 16)
        beginnings = texts[:8:2, :32].tolist()
        about = {
            "arm": f"balcony in {given.weights}",
            "prompts": [tokenizer.decode(row) for row in beginnings],
        }
        about["model"] = f"{given.folder.name} in float32"
    for name, depth in (("whole", None), ("draft", given.depth)):
        fewer: dict[str, Any] = {}
        if name == "draft" and given.weights != "float32":
            rows = [{"input_ids": part} for part in texts[8:16].split(4)]
            fewer = {"weights": given.weights, "data": rows}
        ed.export(net, given.folder / name, depth=depth, tokenizer=tokenizer)
        found = ed.export(
            net,
            given.folder / f"{name}-gguf",
            depth=depth,
            format="gguf",
            tokenizer=tokenizer,
            **fewer,
        )
        (found / "model.gguf").rename(given.folder / f"{name}.gguf")
    stream = ed.as_stream(net)
    blocks = given.depth + len(stream.exits.get(given.depth, ()))
    about |= {"depth": given.depth, "blocks": blocks, "weights": given.weights}
    (given.folder / "pair.json").write_text(json.dumps(about))


def tuned_stories(given: Any) -> tuple[Any, dict[str, Any]]:
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
    about = {"model": NAME, "arm": given.arm, "steps": steps, "lr": lr}
    return net, about | {"cpu_seconds": round(spent)}


if __name__ == "__main__":
    main()
