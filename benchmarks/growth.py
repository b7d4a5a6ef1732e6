"""Growing: what scoring costs, how good the line search, the chosen site and the choice are.

    python benchmarks/growth.py [--growths 40] [--models 12]

Digits (scikit-learn), ResNets and ViTs trained for different lengths of time. Costs are ratios of
CPU seconds, interleaved, best of several, one thread. Written to benchmarks/results/growth.json.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from record import RESULTS, record
from rich.console import Console
from scipy.stats import spearmanr
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, ViTConfig, ViTForImageClassification

import everydepth as ed
from everydepth.architectures.cifar_resnet import CifarResNet, CifarResNetConfig
from everydepth.data import load_digits
from everydepth.data.feeding import Feed
from everydepth.growth import grow, jumpboard, score
from everydepth.growth.candidates import candidate, noted_calls
from everydepth.growth.fitting import fit_plainly
from everydepth.growth.jump import _Line, line_search
from everydepth.growth.losses import mean_loss, row_losses
from everydepth.stream import as_stream

TRAIN, VALID, TEST = load_digits("train").split((0.4, 0.3, 0.3), seed=0)
THIRD = load_digits("test")
console = Console()


def resnet(blocks: int = 1, width: int = 8) -> nn.Module:
    sizes = {"blocks_per_stage": (blocks, blocks), "widths": (width, 2 * width)}
    return CifarResNet(CifarResNetConfig(**sizes, num_channels=1, num_labels=10))


def vit(depth: int = 3, width: int = 32) -> nn.Module:
    config = ViTConfig(
        image_size=8, patch_size=2, num_channels=1, num_labels=10, hidden_size=width,
        num_hidden_layers=depth, num_attention_heads=4, intermediate_size=2 * width,
    )  # fmt: skip
    return ViTForImageClassification(config)


def trained(build: Callable[[], nn.Module], steps: int, seed: int, lr: float) -> nn.Module:
    torch.manual_seed(seed)
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    fit_plainly(as_stream(model), TRAIN, optimizer, steps, batch_size=64, seed=seed)
    return model.eval()


def models(count: int) -> list[tuple[str, nn.Module]]:
    """Of both kinds, from hardly trained to saturated."""
    found: list[tuple[str, nn.Module]] = []
    for i in range(count):
        steps = (40, 100, 250, 600)[(i // 2) % 4]
        build, lr = ((resnet, 3e-3), (vit, 1e-3))[i % 2]
        found.append((build.__name__, trained(build, steps, i, lr)))
    return found


def cost(rounds: int = 7) -> dict[str, dict[str, float]]:
    """All sites scored, over a forward and backward pass plus the candidates' own forward."""
    llama = LlamaConfig(
        hidden_size=128, num_hidden_layers=6, num_attention_heads=4, intermediate_size=344,
        vocab_size=1000, use_cache=False,
    )  # fmt: skip
    ids = torch.randint(0, 1000, (16, 64))
    images = torch.randn(32, 1, 8, 8)
    labels = torch.randint(0, 10, (32,))
    cases: dict[str, tuple[nn.Module, dict[str, Any]]] = {
        "Llama 6 x 128": (LlamaForCausalLM(llama), {"input_ids": ids, "labels": ids}),
        "ViT 6 x 64": (vit(6, 64), {"pixel_values": images, "labels": labels}),
        "ResNet 3+3": (resnet(3, 16), {"pixel_values": images, "labels": labels}),
    }
    found: dict[str, dict[str, float]] = {}
    for name, (model, batch) in cases.items():
        model.eval()
        stream = as_stream(model)
        candidates = {a: candidate(stream, a, seed=0) for a in ed.stream.sites(stream)}

        def passes(model=model, stream=stream, batch=batch) -> None:
            for _ in range(4):
                output = stream.call(stream.arguments(batch, None))
                losses, _ = row_losses(stream, stream.prediction(output), batch)
                losses.sum().backward()
                model.zero_grad(set_to_none=True)

        with torch.no_grad(), noted_calls(stream) as calls:
            states = stream.observe(batch)

        @torch.no_grad()
        def forwards(stream=stream, candidates=candidates, states=states, calls=calls) -> None:
            for _ in range(4):
                for after, tried in candidates.items():
                    calls[max(after - 1, 0)](tried.block.module, states.h[after])

        def scored(count: int, stream=stream, batch=batch) -> None:
            score(stream, [batch] * count, progress=False)

        ways: dict[str, Callable[[], object]] = {
            "pass": passes,
            "forward": forwards,
            "score 2": lambda scored=scored: scored(2),
            "score 6": lambda scored=scored: scored(6),
        }
        best = dict.fromkeys(ways, float("inf"))
        for _ in range(rounds):
            for way, run in ways.items():
                begin = time.process_time()
                run()
                best[way] = min(best[way], time.process_time() - begin)
        # Four more batches, so that what is done once (building blocks, tests) does not count.
        per_batch = best["score 6"] - best["score 2"]
        found[name] = {
            "score_without_candidates_over_pass": (per_batch - best["forward"]) / best["pass"],
            "score_over_pass": per_batch / best["pass"],
            "candidates_forward_over_pass": best["forward"] / best["pass"],
            "once_ms": 1e3 * (best["score 2"] - per_batch / 2),
        }
        console.print(name, found[name])
    return found


def search(trained_models: list[tuple[str, nn.Module]]) -> dict[str, Any]:
    """The loss found by at most 12 evaluations over the best of 200 steps."""
    worst: list[float] = []
    counts: list[int] = []
    for _, model in trained_models[:6]:
        found = score(model, TRAIN, batch_size=256, progress=False)
        site = found.best.after
        line = _Line(
            found.candidates[site],
            Feed(TRAIN, as_stream(model), batch_size=256),
            None,
            found.directions[site],
        )
        first, slope = line.first_step(), found[site].norm ** 2
        eta, tried = line_search(line, found.loss, slope, first)
        grid = min(line(e) for e in np.geomspace(first / 1000, first * 1000, 200))
        ours = dict(tried).get(eta, found.loss)
        worst.append((ours - grid) / (found.loss - grid))
        counts.append(len(tried))
        console.print(f"line search: {len(tried)} evaluations, misses {worst[-1]:.2%} of the gain")
    return {"missed_share_of_gain": worst, "evaluations": counts}


def chosen_site(trained_models: list[tuple[str, nn.Module]], steps: int = 30) -> dict[str, Any]:
    """Held-out gain of every site after a jumpboard and a short training, against the choice."""
    rows: list[dict[str, Any]] = []
    for i, (kind, model) in enumerate(trained_models):
        order = TRAIN.split((0.5, 0.5), seed=1)
        found = score(model, order[0], batch_size=128, progress=False)
        how = {"scored": found, "precondition": True, "batch_size": 128}
        jumps = {s.after: jumpboard(model, *order, after=s.after, **how) for s in found.sites}
        before = mean_loss(model, TEST)
        gains: dict[int, float] = {}
        jump_gains: dict[int, float] = {}
        for after, jump in jumps.items():
            grown = jump.model if jump.found else ed.insert(model, after)
            jump_gains[after] = before - mean_loss(grown, TEST)
            optimizer = torch.optim.AdamW(grown.parameters(), lr=1e-3)
            fit_plainly(as_stream(grown), TRAIN, optimizer, steps, batch_size=64, seed=i)
            gains[after] = before - mean_loss(grown, TEST)
        top = sorted(found.sites, key=lambda s: -s.z)[:3]
        pick = max(top, key=lambda s: jumps[s.after].margin_valid or 0.0).after
        sites = [s.after for s in found.sites]
        z, norm = [s.z for s in found.sites], [s.norm for s in found.sites]
        margin = [jumps[a].margin_valid or 0.0 for a in sites]
        true, jumped = [gains[a] for a in sites], [jump_gains[a] for a in sites]
        row = {
            "kind": kind,
            "loss": before,
            "chosen": pick,
            "gain": gains[pick],
            "best": max(true),
            "mean": float(np.mean(true)),
            "jump_gain": jump_gains[pick],
            "jump_best": max(jumped),
            "spearman_z": float(spearmanr(z, jumped)[0]),
            "spearman_norm": float(spearmanr(norm, jumped)[0]),
            "spearman_margin": float(spearmanr(margin, jumped)[0]),
        }
        rows.append(row)
        console.print({k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()})
    shares = {
        "trained": sum(r["gain"] for r in rows) / sum(r["best"] for r in rows),
        "jumpboard": sum(r["jump_gain"] for r in rows) / sum(r["jump_best"] for r in rows),
    }
    means = {
        k: float(np.nanmean([r[k] for r in rows])) for k in rows[0] if k.startswith("spearman")
    }
    return {"share_of_best_gain": shares, **means, "models": rows}


def safe_choice(count: int, steps: int = 30) -> dict[str, Any]:
    """One growth each: is the result worse on a third split? And by the paper's rule?"""
    rows: list[dict[str, Any]] = []
    for i, (kind, model) in enumerate(models(count)):
        grown = grow(
            model, TRAIN, VALID, steps=steps, rounds=1, batch_size=64, seed=i, progress=False
        )
        before, after = mean_loss(model, THIRD), mean_loss(grown.model, THIRD)
        round_ = grown.rounds[0] if grown.rounds else None
        rows.append(
            {
                "kind": kind,
                "safe": "old" if round_ is None else round_.safe,
                "third_before": before,
                "third_after": after,
                "worse": after > before,
                "paper": None if round_ is None else round_.paper,
                "paper_worse": round_ is not None
                and round_.valid[round_.paper] > round_.valid["old"],
            }
        )
        console.print(i, rows[-1])
    return {
        "growths": count,
        "accepted": sum(r["safe"] != "old" for r in rows),
        "worse_on_third_split": sum(r["worse"] for r in rows),
        "paper_rule_worse_on_held_out": sum(r["paper_worse"] for r in rows),
        "rows": rows,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--growths", type=int, default=40)
    parser.add_argument("--models", type=int, default=12)
    parser.add_argument(
        "--parts", default="cost,search,site,safe", help="the others stay as they are"
    )
    asked = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    parts = asked.parts.split(",")
    several = models(asked.models) if {"search", "site"} & set(parts) else []
    measures: dict[str, Callable[[], Any]] = {
        "cost": cost,
        "search": lambda: search(several),
        "site": lambda: chosen_site(several),
        "safe": lambda: safe_choice(asked.growths),
    }
    file = RESULTS / "growth.json"
    for part in parts:
        figures = json.loads(file.read_text()) if file.exists() else {}
        figures.pop("machine", None)
        record("growth", {**figures, part: measures[part]()})


if __name__ == "__main__":
    main()
