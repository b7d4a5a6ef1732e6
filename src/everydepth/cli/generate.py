"""`everydepth generate`."""

from __future__ import annotations

import secrets
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from everydepth.cli.loading import load_to_run
from everydepth.cli.options import Device, Model
from everydepth.environment import usable_device

if TYPE_CHECKING:
    from everydepth.exits.generation import GenerationStats


def generate(
    model: Model,
    prompt: Annotated[
        list[str], typer.Option("--prompt", "-p", help="The text to continue; repeatable.")
    ],
    depth: Annotated[
        int | None, typer.Option(help="Use only the first N blocks (default: all).")
    ] = None,
    draft_depth: Annotated[
        list[int] | None,
        typer.Option(
            help="Draft with the first N blocks, or with 0 from the text itself, which gains where "
            "it repeats itself: same text, faster. Repeatable; the fastest drafts."
        ),
    ] = None,
    draft_always: Annotated[
        bool, typer.Option("--draft-always", help="Draft even if it is slower.")
    ] = False,
    max_new_tokens: Annotated[
        int | None,
        typer.Option("--max-new-tokens", "-n", min=1, help="Default: 64, or as many as fit."),
    ] = None,
    sample: Annotated[
        bool, typer.Option("--sample", help="Sample tokens instead of taking the most likely.")
    ] = False,
    temperature: Annotated[
        float, typer.Option(help="With --sample: above 1 is more random, below 1 less.")
    ] = 1.0,
    top_k: Annotated[
        int | None, typer.Option(help="With --sample: only from the N most likely tokens.")
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option(help="With --sample: only from the most likely tokens, up to this total."),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="With --sample: makes it repeatable (default: a new one).")
    ] = None,
    device: Device = None,
) -> None:
    """Continue a text with a language model at any depth, or faster by drafting.

    $ everydepth generate MODEL -p "Once upon a time" --draft-depth 0

    The text goes to standard output as it is written, its speed to standard error.
    """
    from everydepth.exits.generation import generate as decode
    from everydepth.exits.generation.request import check_model
    from everydepth.exits.generation.text import TextStream
    from everydepth.exits.load import load_tokenizer
    from everydepth.stream import as_stream

    network: Any = load_to_run(model, device).to(usable_device(device or "cpu"))
    check_model(as_stream(network))
    tokenizer = load_tokenizer(model)
    ids = [tokenizer(text)["input_ids"] for text in prompt]
    growing = TextStream(tokenizer, before=ids[0])
    # Printed with the first token, so that an earlier error gets its own line.
    waiting = [str(tokenizer.decode(ids[0], skip_special_tokens=True))]

    def say(_row: int, new: list[int]) -> None:
        _say("".join(waiting) + growing.add(new))
        waiting.clear()

    if sample and seed is None:
        seed = secrets.randbits(32)
    said = decode(
        network,
        ids,
        max_new_tokens=max_new_tokens,
        depth=depth,
        draft_depth=draft_depth or None,
        draft_always=draft_always,
        do_sample=sample,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        on_tokens=say if len(prompt) == 1 else None,
    )
    if len(prompt) == 1:
        _say("".join(waiting) + growing.add([], last=True) + "\n")
    else:
        for row, new in zip(ids, said.tokens, strict=True):
            typer.echo(tokenizer.decode(row + new, skip_special_tokens=True))
    typer.echo(_summary(said.stats, drafting=bool(draft_depth), seed=seed), err=True)


def _say(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _summary(stats: GenerationStats, *, drafting: bool, seed: int | None = None) -> str:
    plural = "" if stats.tokens == 1 else "s"
    parts = [f"{stats.tokens} token{plural}, {stats.tokens_per_second:.0f} tokens/s"]
    if stats.acceptance is not None:
        parts.append(f"{stats.acceptance:.0%} of drafts accepted")
        parts.append(f"{stats.mean_draft_length:.1f} tokens per draft")
    elif drafting:
        parts.append("not drafted, since drafting would have been slower (see --draft-always)")
    if seed is not None:
        parts.append(f"--seed {seed}")
    return "; ".join(parts)
