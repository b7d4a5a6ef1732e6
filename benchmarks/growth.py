"""Growing: what scoring costs, how good the line search, the chosen site and the choice are.

    python benchmarks/growth.py [--growths 40] [--models 12] [--parts cost,site_fashion]

ResNets and ViTs trained for different lengths of time on digits (scikit-learn) and, for the parts
whose name ends in `_fashion`, on 2,400 images of Fashion-MNIST at 14 x 14 pixels. Costs are ratios
of CPU seconds, interleaved, best of several, one thread. Calibration uses seeds that nothing was
tuned on. Written to benchmarks/results/growth.json.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from record import record_times, recorded_times, sized
from rich.console import Console
from scipy.stats import binomtest, spearmanr
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, ViTConfig, ViTForImageClassification

import everydepth as ed
from everydepth.architectures.cifar_resnet import CifarResNet, CifarResNetConfig
from everydepth.data import Images, load, load_digits
from everydepth.growth import grow, jumpboard, score
from everydepth.growth.candidates import candidate
from everydepth.growth.jump import _Line, line_search
from everydepth.growth.losses import mean_loss, row_losses
from everydepth.growth.scoring import DEEPEN
from everydepth.growth.trainer import train_plainly
from everydepth.stream import as_stream
from everydepth.stream.feed import Feed

sys.path.append(str(Path(__file__).parents[1]))
from tests.helpers.growth import mlp, points

console = Console()


@dataclass(frozen=True, kw_only=True)
class Parts:
    """Rows to train on, to choose by, to measure gains on, and a split used for nothing else."""

    train: Any
    valid: Any
    test: Any
    third: Any
    side: int


def digits() -> Parts:
    rows = load_digits("train")
    rows = sized(rows, rows.subset(range(120)))
    train, valid, test = rows.split((0.4, 0.3, 0.3), seed=0)
    return Parts(train=train, valid=valid, test=test, third=load_digits("test"), side=8)


def fashion() -> Parts:
    def small(split: str, rows: int) -> Images:
        images = load("fashion-mnist", kind=Images, split=split).subset(range(rows)).as_float()
        return replace(images, pixel_values=nn.functional.avg_pool2d(images.pixel_values, 2))

    train, valid, test = small("train", 2400).split((0.4, 0.3, 0.3), seed=0)
    return Parts(train=train, valid=valid, test=test, third=small("test", 1000), side=14)


def resnet(blocks: int = 1, width: int = 8) -> nn.Module:
    sizes: dict[str, Any] = {"blocks_per_stage": (blocks, blocks), "widths": (width, 2 * width)}
    return CifarResNet(CifarResNetConfig(**sizes, num_channels=1, num_labels=10))


def vit(depth: int = 3, width: int = 32, side: int = 8) -> nn.Module:
    config = ViTConfig(
        image_size=side, patch_size=2, num_channels=1, num_labels=10, hidden_size=width,
        num_hidden_layers=depth, num_attention_heads=4, intermediate_size=2 * width,
    )  # fmt: skip
    return ViTForImageClassification(config)


def trained(parts: Parts, kind: str, steps: int, seed: int, *, blocks: int = 1) -> nn.Module:
    torch.manual_seed(seed)
    model, lr = (resnet(blocks), 3e-3) if kind == "resnet" else (vit(side=parts.side), 1e-3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    train_plainly(as_stream(model), parts.train, optimizer, steps, batch_size=64, seed=seed)
    return model.eval()


def models(parts: Parts, count: int) -> Iterator[tuple[str, nn.Module]]:
    """Of both kinds, from hardly trained to saturated."""
    for i in range(count):
        kind = ("resnet", "vit")[i % 2]
        yield kind, trained(parts, kind, sized((40, 100, 250, 600), (1,) * 4)[(i // 2) % 4], i)


def cost(rounds: int = sized(12, 1)) -> dict[str, dict[str, float]]:
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

        with torch.no_grad():
            states = stream.observe(batch, calls=True)

        @torch.no_grad()
        def forwards(candidates=candidates, states=states) -> None:
            for _ in range(4):
                for after, tried in candidates.items():
                    states.calls[max(after - 1, 0)](tried.block.module, states.h[after])

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


def search(count: int) -> dict[str, Any]:
    """The loss found by at most 12 evaluations over the best of 200 steps."""
    worst: list[float] = []
    counts: list[int] = []
    parts = digits()
    for _, model in models(parts, count):
        found = score(model, parts.train, batch_size=256, progress=False)
        site = found.best.after
        line = _Line(
            found.candidates[site],
            Feed(parts.train, as_stream(model), batch_size=256),
            None,
            found.directions[site],
        )
        first, slope = line.first_step(), found.at(site).norm ** 2
        eta, tried = line_search(line, found.loss, slope, first)
        grid = min(line(e) for e in np.geomspace(first / 1000, first * 1000, sized(200, 3)))
        ours = dict(tried).get(eta, found.loss)
        worst.append((ours - grid) / (found.loss - grid))
        counts.append(len(tried))
        console.print(f"line search: {len(tried)} evaluations, misses {worst[-1]:.2%} of the gain")
    return {"missed_share_of_gain": worst, "evaluations": counts}


def rank(a: list[float], b: list[float]) -> float:
    """Spearman's correlation."""
    found: Any = spearmanr(a, b)
    return float(found[0])


def chosen_site(parts: Parts, count: int, steps: int = sized(30, 1)) -> dict[str, Any]:
    """Held-out gain of every site after a jumpboard and a short training, against the choice."""
    rows: list[dict[str, Any]] = []
    for i, (kind, model) in enumerate(models(parts, count)):
        order = parts.train.split((0.5, 0.5), seed=1)
        found = score(model, order[0], batch_size=128, progress=False)
        how = {"scored": found, "precondition": True, "batch_size": 128}
        jumps = {s.after: jumpboard(model, *order, after=s.after, **how) for s in found.sites}
        before = mean_loss(model, parts.test)
        gains: dict[int, float] = {}
        jump_gains: dict[int, float] = {}
        for after, jump in jumps.items():
            grown = jump.model if jump.found else ed.insert(model, after)
            jump_gains[after] = before - mean_loss(grown, parts.test)
            optimizer = torch.optim.AdamW(grown.parameters(), lr=1e-3)
            train_plainly(as_stream(grown), parts.train, optimizer, steps, batch_size=64, seed=i)
            gains[after] = before - mean_loss(grown, parts.test)
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
            "spearman_z": rank(z, jumped),
            "spearman_norm": rank(norm, jumped),
            "spearman_margin": rank(margin, jumped),
        }
        rows.append(row)
        console.print({k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()})
    for kind in ("resnet", "vit"):
        mine = [r for r in rows if r["kind"] == kind]
        console.print(kind, sum(r["gain"] for r in mine) / sum(r["best"] for r in mine))
    shares = {
        "trained": sum(r["gain"] for r in rows) / sum(r["best"] for r in rows),
        "jumpboard": sum(r["jump_gain"] for r in rows) / sum(r["jump_best"] for r in rows),
    }
    means = {
        k: float(np.nanmean([r[k] for r in rows])) for k in rows[0] if k.startswith("spearman")
    }
    return {"share_of_best_gain": shares, **means, "models": rows}


def safe_choice(parts: Parts, count: int, steps: int = sized(30, 1)) -> dict[str, Any]:
    """One growth each: is the result worse on a third split? And by the paper's rule?"""
    rows: list[dict[str, Any]] = []
    for i, (kind, model) in enumerate(models(parts, count)):
        grown = grow(
            model,
            parts.train,
            parts.valid,
            steps=steps,
            rounds=1,
            batch_size=64,
            seed=i,
            progress=False,
        )
        before, after = mean_loss(model, parts.third), mean_loss(grown.model, parts.third)
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


def calibration(trials: int, powers: int, first: int = 10_000) -> dict[str, Any]:
    """How often "deepen" is said where no block can help, and where one can."""
    alarms = hits = 0
    for trial in range(first, first + trials):
        model = mlp(trial)
        found = score(model, points(model, 128, seed=trial), batch_size=128, progress=False)
        alarms += any(site.verdict == DEEPEN for site in found.sites)
    console.print(f"false 'deepen': {alarms} of {trials}")
    for trial in range(first, first + powers):
        model = mlp(trial)
        teacher = candidate(as_stream(model), 1, seed=trial + 1)
        with torch.no_grad():
            torch.nn.init.normal_(cast(Tensor, teacher.maps[0].weight), std=0.5)
        data = points(teacher.model, 512, seed=trial, scale=2.0)
        found = score(model, data, batch_size=256, progress=False)
        hits += found.verdict.startswith(DEEPEN)
    console.print(f"power: {hits} of {powers}")
    return {
        "first_seed": first,
        "trials": trials,
        "false_deepen": alarms,
        "false_deepen_share": alarms / trials,
        "false_deepen_95": _wilson(alarms, trials),
        "power_trials": powers,
        "found": hits,
        "power": hits / powers,
        "power_95": _wilson(hits, powers),
    }


def _wilson(k: int, n: int) -> list[float]:
    """95 % interval of a share."""
    found = binomtest(k, n).proportion_ci(method="wilson")
    return [float(found.low), float(found.high)]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--growths", type=int, default=sized(40, 1))
    parser.add_argument("--models", type=int, default=sized(12, 2))
    parser.add_argument("--trials", type=int, default=sized(1000, 2))
    on_fashion = sized(",site_fashion,safe_fashion", "")  # the same code on other data
    parser.add_argument(
        "--parts", default=f"cost,search,site,safe,calibration{on_fashion}",
        help="the others stay as they are",
    )  # fmt: skip
    asked = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    measures: dict[str, Callable[[], Any]] = {
        "cost": cost,
        "search": lambda: search(sized(6, 1)),
        "site": lambda: chosen_site(digits(), asked.models),
        "safe": lambda: safe_choice(digits(), asked.growths),
        "calibration": lambda: calibration(asked.trials, asked.trials // 2),
        "site_fashion": lambda: chosen_site(fashion(), asked.models),
        "safe_fashion": lambda: safe_choice(fashion(), asked.growths),
    }
    for part in asked.parts.split(","):
        found = measures[part]()
        figures = recorded_times("growth")
        figures.pop("machine", None)
        record_times("growth", {**figures, part: found})


if __name__ == "__main__":
    main()
