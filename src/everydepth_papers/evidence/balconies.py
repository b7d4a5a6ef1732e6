"""A published language model with balconies: tuned in stages, and what each depth is then worth."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 (its usual name)

import everydepth as ed
from everydepth.data import Corpus, load, token_blocks
from everydepth.exits.load import load as load_model
from everydepth.exits.load import load_tokenizer, quiet_transformers
from everydepth.files import whole_file
from everydepth_papers.evidence.recipe import Cell
from everydepth_papers.evidence.rows import numbers
from everydepth_papers.evidence.running import data_folder
from everydepth_papers.evidence.stages import precision_of, tuned

SEEN = 8  # rows by which blocks are chosen
TOGETHER = 64  # rows the model continues at once
NONSENSE = "the cat sat on the mat and the dog sat on the cat and all of them sat on the mat. "


def model_and_tokenizer(name: str) -> tuple[Any, Any]:
    """A folder under EVERYDEPTH_DATA, or "tiny", a small random model for smoke runs."""
    if name != "tiny":
        folder = data_folder(name)
        return load_model(folder), load_tokenizer(folder)
    from transformers import LlamaConfig, LlamaForCausalLM

    from everydepth.data.byte_tokens import byte_tokenizer

    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
    config = LlamaConfig(
        vocab_size=257, num_hidden_layers=8, bos_token_id=256, eos_token_id=256, **sizes
    )
    return LlamaForCausalLM(config).eval(), byte_tokenizer()


def texts(settings: Cell, tokenizer: Any) -> tuple[Tensor, Tensor]:
    """Rows to train on, and held-out ones."""
    length = settings["length"]
    most = max(SEEN, settings["rows"] * settings["marks"][-1])
    counts = {"train": most, "test": settings["held_out"]}
    found: list[Tensor] = []
    for split, count in counts.items():
        if settings["data"] == "nonsense":
            text = NONSENSE * count
        else:
            text = load(settings["data"], kind=Corpus, split=split).text
        # A few characters a token: no need to encode more than is used.
        ids = tokenizer(
            text[: count * length * 8], add_special_tokens=False, verbose=False
        )["input_ids"]  # fmt: skip
        found.append(token_blocks(ids, length).input_ids[:count])
    return found[0], found[1]


def own_text(model: Any, prompts: Tensor, file: Path) -> tuple[Tensor, float]:
    """What the model itself writes after a quarter of each row, and the CPU seconds that took.

    Drafts are judged by text like this. Written once, then read from the file.
    """
    if not file.is_file():
        begin = time.process_time()
        length = prompts.shape[1]
        how: dict[str, Any] = {"max_new_tokens": length - length // 4, "eos_token_id": ()}
        found = [
            ed.generate(model, rows[:, : length // 4], **how).sequences
            for rows in prompts.split(TOGETHER)
        ]
        spent = torch.tensor(time.process_time() - begin)
        with whole_file(file) as new:
            save_file({"rows": torch.cat(found), "cpu_seconds": spent}, new)
    written = load_file(file)
    return written["rows"], written["cpu_seconds"].item()


def mixed(text: Tensor, own: Tensor, seed: int) -> Tensor:
    """Half of these rows, and equally many of the model's own, sampled."""
    half = len(text) // 2
    drawn = torch.randint(len(own), (len(text) - half,), generator=_seeded(seed))
    return torch.cat([text[:half], own[drawn]])


def _seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def batches(rows: Tensor, size: int, seed: int) -> list[dict[str, Tensor]]:
    """Each row once, in an order of its own. Without labels: balconies learn from the model."""
    order = torch.randperm(len(rows), generator=_seeded(seed))
    return [{"input_ids": chosen} for chosen in rows[order].split(size)]


def cell(settings: Cell, seed: int, folder: Path) -> dict[str, Any]:
    """Tune until the last of `marks`, one stage after the other, and measure every rung.

    Stages lie beside the folders of the cells: the next cell goes on from them. In those after
    `own["after"]` steps, half of the text is the model's own.
    """
    model, tokenizer = model_and_tokenizer(settings["model"])
    train, held_out = texts(settings, tokenizer)
    torch.manual_seed(seed)
    net = ed.balcony(model, settings["rungs"])
    exits = ed.as_stream(net).exits
    rungs, added = [*exits, ed.as_stream(net).depth], len(exits[settings["rungs"][0]])
    size, own, writing = settings["rows"], None, 0.0
    if "own" in settings:
        count = settings["own"]["rows"]
        own, writing = own_text(model, train[:count], folder.parent / f"own-{count}.safetensors")

    def text(begin: int, end: int) -> list[dict[str, Tensor]]:
        rows = train[size * begin : size * end]
        if own is not None and begin >= settings["own"]["after"]:
            rows = mixed(rows, own, seed + begin)
        return batches(rows, size, seed)

    spent = writing + tuned(net, text, settings, seed, folder.parent, shuffle=False)
    net.eval()
    blocks = [*(depth + added for depth in rungs[:-1]), rungs[-1]]
    found: dict[str, Any] = {
        "rungs": rungs,
        "blocks": blocks,
        "cpu_seconds": round(spent, 1),
        "precision": precision_of(settings),
    }
    if settings["marks"] == [0]:
        found |= quality(model, held_out, blocks)  # as published
        found["blocks dropped"] = dropped(model, train, held_out, blocks[:-1])
    else:
        found |= quality(net, held_out, rungs)
    if settings.get("decode"):
        # A draft that costs as much as half of the model cannot pay.
        shallow = [depth for depth in rungs if 2 * (depth + added) < rungs[-1]]
        found["decoding"] = decoding(net, held_out, settings["new"], shallow)
        found["samples"] = samples(net, tokenizer, held_out, settings["new"], rungs)
        found["profile"] = shipped(net, tokenizer, held_out, rungs, folder / "checkpoints")
    return found


@torch.no_grad()
def quality(net: Any, held_out: Tensor, rungs: Sequence[int]) -> dict[str, Any]:
    """Loss of every rung on held-out text, and how often it says what the last depth says.

    `logits` is a digest of what the last depth says of the first row, bit for bit.
    """
    stream = ed.as_stream(net)
    loss, agree = dict.fromkeys(rungs, 0.0), dict.fromkeys(rungs, 0)
    digest = ""
    for rows in held_out.split(4):
        states = stream.observe({"input_ids": rows})
        last = states.logits(rungs[-1])
        digest = digest or hashlib.sha256(last[0].contiguous().numpy().tobytes()).hexdigest()
        says = last[:, :-1].argmax(-1)
        for depth in rungs:
            logits = states.logits(depth)[:, :-1]
            rated = F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten(), reduction="sum")
            loss[depth] += rated.item()
            agree[depth] += int((logits.argmax(-1) == says).sum())
    tokens = len(held_out) * (held_out.shape[1] - 1)
    return {
        "nll": numbers([total / tokens for total in loss.values()]),
        "agreement": numbers([count / tokens for count in agree.values()]),
        "tokens": tokens,
        "logits": digest,
    }


def dropped(model: Any, train: Tensor, held_out: Tensor, counts: Sequence[int]) -> dict[str, Any]:
    """Loss of the model with this many blocks kept, chosen by similarity."""
    text = [{"input_ids": row} for row in train[:SEEN].split(1)]
    found: list[float] = []
    for count in counts:
        choice = ed.choose_blocks(model, text, keep=count, progress=False)
        small = ed.at_depth(model, keep=choice.keep)
        found += quality(small, held_out, [count])["nll"]
    return {"kept": list(counts), "nll": found}


def decoding(net: Any, held_out: Tensor, new: int, rungs: Sequence[int]) -> dict[str, Any]:
    """CPU seconds of greedy text: transformers, ours, and ours with drafts of each rung.

    One row: three prompts one after the other. Ways take turns; each has its best of two.
    """
    prompts = held_out[:8, : held_out.shape[1] // 4]
    found: dict[str, Any] = {}
    for name, batches in {"1": prompts[:3].split(1), "8": [prompts]}.items():
        ways = _ways(net, new, rungs)
        seconds = dict.fromkeys(ways, float("inf"))
        said: dict[str, list[Tensor]] = {}
        right: dict[str, float] = {}
        for _ in range(2):
            for way, run in ways.items():
                begin = time.process_time()
                outcome = [run(batch) for batch in batches]
                seconds[way] = min(seconds[way], time.process_time() - begin)
                said[way] = [sequences for sequences, _ in outcome]
                right[way] = outcome[0][1]
        found[name] = {
            way: {
                "cpu_seconds": round(seconds[way], 3),
                "acceptance": round(right[way], 4),
                "same_tokens": all(map(torch.equal, said[way], said["transformers"])),
            }
            for way in ways
        }
    return found


def _ways(
    net: Any, new: int, rungs: Sequence[int]
) -> dict[str, Callable[[Tensor], tuple[Tensor, float]]]:
    plain: Any = net.model.model

    def theirs(ids: Tensor) -> tuple[Tensor, float]:
        with torch.no_grad(), quiet_transformers():
            mask = torch.ones_like(ids)
            return plain.generate(
                ids, attention_mask=mask, max_new_tokens=new, do_sample=False
            ), 0.0

    def ours(draft: int | None) -> Callable[[Tensor], tuple[Tensor, float]]:
        def run(ids: Tensor) -> tuple[Tensor, float]:
            # Both end a text where the model does.
            done = ed.generate(net, ids, max_new_tokens=new, draft_depth=draft)
            return done.sequences, done.stats.acceptance or 0.0

        return run

    return {
        "transformers": theirs,
        "plain": ours(None),
        **{f"draft_depth={depth}": ours(depth) for depth in rungs},
    }


def samples(
    net: Any, tokenizer: Any, held_out: Tensor, new: int, rungs: Sequence[int]
) -> dict[str, Any]:
    """Continuations of the first held-out row, one per rung."""
    prompt = held_out[:1, : held_out.shape[1] // 4]
    found = {"prompt": tokenizer.decode(prompt[0].tolist())}
    for depth in rungs:
        done = ed.generate(net, prompt, max_new_tokens=new, depth=depth, eos_token_id=())
        found[str(depth)] = tokenizer.decode(done.tokens[0])
    return found


def shipped(
    net: Any, tokenizer: Any, held_out: Tensor, rungs: Sequence[int], folder: Path
) -> dict[str, Any]:
    """Profile of the rungs; the whole network and every rung as checkpoints with cards."""
    text = [{"input_ids": rows, "labels": rows} for rows in held_out[:4].split(4)]
    found = ed.profile(net, text, depths=rungs, repeats=2, progress=False)
    net.save_pretrained(folder / "all")
    tokenizer.save_pretrained(folder / "all")
    for depth in rungs[:-1]:
        ed.export(
            net,
            folder / f"depth-{depth}",
            depth=depth,
            tokenizer=tokenizer,
            profile=found,
            overwrite=True,
        )
    found.save(folder / "profile")
    names = ("quality", "latency", "batch_latency", "parameters", "checkpoint_bytes")
    return {name: numbers(found[name], 3) for name in names}
