"""A model and a shallow depth of it that drafts for it, as engines read them.

    python benchmarks/engines/pair.py FOLDER [--arm balcony] [--depth 2] [--seconds 100]
    python benchmarks/engines/pair.py FOLDER --tuned CHECKPOINT --depth 2 --weights int8
        [--whole float32,float16,int8]

Tunes stories15M as benchmarks/pretrained.py does (EVERYDEPTH_DATA says where it is), for as many
CPU seconds, at a rate chosen by its rule; or takes a tuned checkpoint, such as the folder `all`
that `everydepth reproduce smollm2` leaves. Writes FOLDER/whole and FOLDER/draft as stock
checkpoints with their tokenizer, and both again as GGUF files, the draft in so few bits, the whole
in each of the types named. A balcony leaves the model itself untouched: `whole` is the published
one. The prompts of pair.json are the beginnings of texts like those it was tuned on; `sure` says of
text that the model wrote behind other such beginnings how likely the draft thought its own choice,
token by token, and whether the model chose the same.
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
OWN = 96  # tokens that the model writes behind each prompt, to see how sure its draft is
TYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "int8": torch.float32,
    "int4": torch.float32,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--arm", default="balcony", choices=[n for n, make in ARMS.items() if make])
    parser.add_argument("--depth", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=100.0)
    parser.add_argument("--tuned", type=Path, help="a checkpoint that needs no tuning")
    parser.add_argument("--weights", choices=("float32", "int8", "int4"), default="float32")
    parser.add_argument("--whole", default="float32", help=f"some of {', '.join(TYPES)}")
    given = parser.parse_args()
    torch.set_num_threads(1)
    given.folder.mkdir(parents=True, exist_ok=True)
    if given.tuned is None:
        net, about = tuned_stories(given)
        tokenizer = load_tokenizer(Path(os.environ[DATA_VARIABLE]) / NAME)
        about["prompts"], texts = ["Once upon a time"], text_for(NAME, net, given.folder).held_out
    else:
        net, tokenizer = ed.load(given.tuned), load_tokenizer(given.tuned)
        texts = read(tokenizer, "test", 32)
        beginnings = texts[:16:2, :32].tolist()
        about: dict[str, Any] = {
            "arm": f"balcony in {given.weights}",
            "prompts": [tokenizer.decode(row) for row in beginnings],
        }
        about["model"] = given.folder.name
        about["sure"] = sureness(net, texts[1:16:2, :32], given.depth)
    # What is rounded to fewer bits comes last: it is not undone.
    wholes = sorted(given.whole.split(","), key=lambda kind: TYPES[kind] is torch.float16)
    files: dict[str, tuple[int | None, str]] = {"draft": (given.depth, given.weights)}
    files |= {f"whole-{kind}" if kind != "float32" else "whole": (None, kind) for kind in wholes}
    rows = [{"input_ids": part} for part in texts[-8:].split(4)]
    for name, (depth, kind) in files.items():
        if name in ("draft", "whole"):
            ed.export(net, given.folder / name, depth=depth, tokenizer=tokenizer)
        told: dict[str, Any] = {"weights": kind, "data": rows} if kind in ("int8", "int4") else {}
        torch.nn.Module.to(net, TYPES[kind])
        found = ed.export(
            net,
            given.folder / f"{name}-gguf",
            depth=depth,
            format="gguf",
            tokenizer=tokenizer,
            **told,
        )
        (found / "model.gguf").rename(given.folder / f"{name}.gguf")
    stream = ed.as_stream(net)
    blocks = given.depth + len(stream.exits.get(given.depth, ()))
    about |= {"depth": given.depth, "blocks": blocks, "weights": given.weights}
    (given.folder / "pair.json").write_text(json.dumps(about))


@torch.no_grad()
def sureness(net: Any, prompts: torch.Tensor, depth: int) -> list[list[tuple[float, bool]]]:
    """Of the model's own text: the draft's probability of its choice, and if it was the model's."""
    said = ed.generate(net, prompts, max_new_tokens=OWN, eos_token_id=())
    seen = ed.as_stream(net).observe({"input_ids": said.sequences})
    begin = prompts.shape[1]
    likely, chosen = seen.logits(depth)[:, begin - 1 : -1].float().softmax(-1).max(-1)
    right = chosen == said.sequences[:, begin:]
    return [
        [(round(p, 3), bool(r)) for p, r in zip(*row, strict=True)]
        for row in zip(likely.tolist(), right.tolist(), strict=True)
    ]


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
