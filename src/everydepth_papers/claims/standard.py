"""The standard networks: trained once a seed, shared by all claims.

| cell | network | data |
|---|---|---|
| `vit:*` | vision transformer, 6 blocks, width 48 | digits, clean |
| `noisy:*` | the same | digits, a fifth of the labels flipped; skips of a layer gone in training |
| `resnet:*` | ResNet-14 | digits |
| `sweep:*` | ResNets of other depths and widths | digits |
| `mlp:*` | residual perceptron, 6 blocks, width 30 | three surfaces |
| `perceptron:*` | residual perceptron with and without skips | digits |
| `lm:*` | language model on bytes, 4 blocks, width 64 | tiny Shakespeare |
| `layer:*` | one transformer layer, constructed or trained | maps of `constructions` |
| `cost:*` | steps of training timed side by side | digits |

The same seed gives the same initialization and the same order of data to every objective.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from everydepth.ablations import gradient_study, memorization, scaled_skip
from everydepth.data import (
    Corpus,
    Images,
    batches,
    flip_labels,
    load,
    load_digits,
    surface_data,
    token_blocks,
)
from everydepth.objectives import (
    Objective,
    aligned,
    cosine_regularized,
    end_to_end,
    lpa,
    multi_classifier,
)
from everydepth.training import EveryDepth, UntilAccuracy, fit
from everydepth_papers.claims.facts import Batches, gather

OBJECTIVES: Mapping[str, Callable[[], Objective]] = {
    "end_to_end": end_to_end,
    "lpa": lpa,
    "aligned": aligned,
    "multi_classifier": multi_classifier,
    "cosine": lambda: cosine_regularized(1.0),
}
SURFACES = ("exponential_saddle", "standing_wave_grid", "logarithmic_central_well")


@dataclass(frozen=True, kw_only=True)
class Scale:
    """How large the standard networks and their trainings are."""

    blocks: int
    width: int
    rows: int | None  # of the training data; None: all
    epochs: int
    noisy_rows: int
    noisy_epochs: int
    points: int
    surface_epochs: int
    lm_steps: int
    lm_blocks: int
    sweep: tuple[tuple[int, int], ...]  # (layers, width) of ResNets: shallow and deep, narrow, wide
    maps: tuple[str, ...]
    precisions: tuple[float, ...]
    layer_steps: int


SCALES: Mapping[str, Scale] = {
    "smoke": Scale(
        blocks=3,
        width=16,
        rows=128,
        epochs=1,
        noisy_rows=64,
        noisy_epochs=2,
        points=128,
        surface_epochs=1,
        lm_steps=3,
        lm_blocks=2,
        sweep=((8, 4), (14, 4), (8, 8), (14, 8)),
        maps=("wave",),
        precisions=(0.1,),
        layer_steps=20,
    ),
    "standard": Scale(
        blocks=6,
        width=48,
        rows=None,
        epochs=16,
        noisy_rows=320,
        noisy_epochs=60,
        points=3000,
        surface_epochs=30,
        lm_steps=200,
        lm_blocks=4,
        sweep=((8, 4), (20, 4), (8, 16), (20, 16)),
        maps=("wave", "turn", "places", "contrast", "soft_lookup", "neighbors", "prefix", "sort"),
        precisions=(0.1, 0.05),
        layer_steps=400,
    ),
}


def cell(name: str, seed: int, scale: Scale, groups: tuple[str, ...]) -> dict[str, Any]:
    """Train what the name says and measure it; JSON values."""
    kind, _, how = name.partition(":")
    started = time.process_time()
    found = KINDS[kind](how, seed, scale, groups)
    found["values"]["cpu_seconds"] = round(time.process_time() - started, 2)
    return found


# -- images ----------------------------------------------------------------------------------------


def _digits(scale: Scale, seed: int) -> tuple[Images, Images]:
    train, test = load_digits("train", seed=seed), load_digits("test", seed=seed)
    if scale.rows is None:
        return train, test
    return train.subset(range(scale.rows)), test.subset(range(min(len(test), 64)))


def _seeded(build: Callable[[], nn.Module], seed: int) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build()


def vit(scale: Scale) -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    labels: dict[str, Any] = {"num_labels": 10}
    return ViTForImageClassification(
        ViTConfig(
            image_size=8,
            patch_size=2,
            num_channels=1,
            hidden_size=scale.width,
            num_hidden_layers=scale.blocks,
            num_attention_heads=4,
            intermediate_size=2 * scale.width,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            **labels,
        )
    )


def _resnet(layers: int, width: int) -> nn.Module:
    from everydepth.architectures.cifar_resnet import CifarResNet, CifarResNetConfig

    config = CifarResNetConfig.of_depth(layers, width=width, num_channels=1, num_labels=10)
    return CifarResNet(config)


def _trained(
    model: nn.Module, how: str, rows: Any, seed: int, epochs: int, lr: float, **more: Any
) -> EveryDepth:
    net = EveryDepth(model, OBJECTIVES[how]())
    fit(
        net,
        rows,
        epochs=epochs,
        batch_size=64,
        lr=lr,
        warmup=0.1,
        clip=1.0,
        seed=seed,
        progress=False,
        **more,
    )
    return net


def _vit(how: str, seed: int, scale: Scale, groups: tuple[str, ...]) -> dict[str, Any]:
    train, test = _digits(scale, seed)
    model = _seeded(lambda: vit(scale), seed)
    net = _trained(model, how, train, seed, scale.epochs, 1e-3)
    if how == "multi_classifier":  # its own heads: the shared readout says nothing of them
        return {"values": {"accuracy": _own_heads(net, test)}, "missing": {}}
    return gather(model, _batches(test), groups, train=_batches(train.subset(range(128))))


@torch.no_grad()
def _own_heads(net: EveryDepth, test: Images) -> list[float]:
    """Accuracy at depths 1..L, each through its own head."""
    net.eval()
    hits: list[torch.Tensor] = []
    for batch in _batches(test):
        found = net(**batch, depths=range(1, net.stream.depth + 1)).logits_at
        assert found is not None
        by_depth = [found[depth].argmax(-1) for depth in sorted(found)]
        hits.append(torch.stack(by_depth) == batch["labels"])
    return torch.cat(hits, 1).double().mean(1).tolist()


def _batches(rows: Any) -> Batches:
    return list(batches(rows, 64))


def _noisy(how: str, seed: int, scale: Scale, groups: tuple[str, ...]) -> dict[str, Any]:
    train, test = _digits(scale, seed)
    train = train.subset(range(scale.noisy_rows))
    flipped = flip_labels(train.labels, 0.2, seed=seed, classes=10)
    noisy = Images(train.pixel_values, flipped.labels, classes=train.classes)
    model = _seeded(lambda: vit(scale), seed)
    layer = {"whole": None, "first": 1, "last": scale.blocks}[how]
    skip = None if layer is None else scaled_skip(model, layer=layer, c=0.0).attach()
    _trained(
        model,
        "end_to_end",
        noisy,
        seed,
        scale.noisy_epochs,
        1e-3,
        schedule="constant",
        callbacks=[UntilAccuracy(noisy)],
    )
    found = memorization(model, noisy, test, flipped=flipped, batch_size=64, progress=False)
    values: dict[str, Any] = {
        "memorization": found.memorization,
        "test_accuracy": found.test_accuracy,
        "train_accuracy": found.train_accuracy,
        "reached": float(found.reached),
    }
    if skip is None:
        study = gradient_study(model, test, noisy, flipped=flipped, batch_size=64, progress=False)
        taps = study.learning.std.keys() & study.memorization.std.keys()
        apart = [
            np.abs(study.memorization.std[t].mean(1) / study.learning.std[t].mean(1) - 1)
            for t in sorted(taps)
        ]
        values |= {
            "gradient_ratio": study.smaller.tolist(),
            "learning_norm": study.learning.norm.tolist(),
            "std_apart": float(np.max(apart)),
        }
    else:
        skip.remove()
    return {"values": values, "missing": {}}


def _resnet_cell(how: str, seed: int, scale: Scale, groups: tuple[str, ...]) -> dict[str, Any]:
    train, test = _digits(scale, seed)
    small = scale.rows is not None
    model = _seeded(lambda: _resnet(8 if small else 14, 4 if small else 8), seed)
    _trained(model, how, train, seed, max(1, scale.epochs // 2), 3e-3)
    return gather(model, _batches(test), groups, train=_batches(train.subset(range(128))))


def _sweep(how: str, seed: int, scale: Scale, groups: tuple[str, ...]) -> dict[str, Any]:
    deep, wide = how.split("-")
    layers, width = scale.sweep[(deep == "deep") + 2 * (wide == "wide")]
    train, test = _digits(scale, seed)
    model = _seeded(lambda: _resnet(layers, width), seed)
    _trained(model, "end_to_end", train, seed, max(1, scale.epochs // 3), 3e-3)
    from everydepth.tracing import gradient_alignment, trace

    both = [
        trace(model, _batches(rows), metrics=["gradient_mean", "loss"], progress=False)
        for rows in (train, test)
    ]
    aligned_by_depth = gradient_alignment(*both).arrays["cosine"]
    return {
        "values": {
            "signal": float(both[0]["gradient_mean"][-1]),
            "test_loss": float(both[1]["loss"][-1]),
            "alignment": float(np.ma.mean(aligned_by_depth[:-1])),
        },
        "missing": {},
    }


# -- points ----------------------------------------------------------------------------------------


def _mlp(how: str, seed: int, scale: Scale, groups: tuple[str, ...]) -> dict[str, Any]:
    from everydepth.architectures.residual_mlp import ResidualMLP, ResidualMLPConfig
    from everydepth.tracing import trace

    config = ResidualMLPConfig(num_hidden_layers=scale.blocks)
    losses: list[list[float]] = []
    worst: list[list[float]] = []
    for name in SURFACES:
        train, test = surface_data(name, n_train=scale.points, n_test=2000, seed=seed)
        model = _seeded(lambda: ResidualMLP(config), seed)
        _trained(model, how, train, seed, scale.surface_epochs, 3e-3)
        found = trace(model, list(batches(test, 500)), ["mse", "sup_error"], progress=False)
        losses.append([float(v) for v in found["mse"]])
        worst.append([float(v) for v in found["sup_error"]])
    return {"values": {"loss": losses, "sup_error": worst}, "missing": {}}


def _perceptron(how: str, seed: int, scale: Scale, groups: tuple[str, ...]) -> dict[str, Any]:
    from everydepth.architectures.residual_mlp import ResidualMLP, ResidualMLPConfig

    train, test = (
        [{"inputs": b["pixel_values"].flatten(1), "labels": b["labels"]} for b in _batches(rows)]
        for rows in _digits(scale, seed)
    )
    config = ResidualMLPConfig(
        num_inputs=64,
        num_outputs=10,
        hidden_size=48,
        num_hidden_layers=scale.blocks,
        regression=False,
        norm=True,
        skips=how == "skips",
    )
    model = _seeded(lambda: ResidualMLP(config), seed)
    _trained(model, "end_to_end", train, seed, scale.epochs, 1e-3)
    return gather(model, test, ("trace",))


# -- text ------------------------------------------------------------------------------------------


def _lm(how: str, seed: int, scale: Scale, groups: tuple[str, ...]) -> dict[str, Any]:
    from transformers import LlamaConfig, LlamaForCausalLM

    small = scale.rows is not None
    length = 16 if small else 64
    text = _smoke_text() if small else _shakespeare()
    ids = list(text.encode("utf-8", "replace"))
    cut = len(ids) * 9 // 10
    train, test = token_blocks(ids[:cut], length), token_blocks(ids[cut:], length)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        num_hidden_layers=scale.lm_blocks,
        num_attention_heads=4,
        intermediate_size=128,
        max_position_embeddings=256,
        tie_word_embeddings=False,
    )
    model = _seeded(lambda: LlamaForCausalLM(config), seed)
    net = EveryDepth(model, OBJECTIVES[how]())
    fit(
        net,
        train,
        steps=scale.lm_steps,
        batch_size=32,
        lr=3e-3,
        warmup=0.1,
        clip=1.0,
        seed=seed,
        progress=False,
    )
    held = _batches(test.subset(range(min(len(test), 256))))
    return gather(model, held, ("trace",))


def _shakespeare() -> str:
    found = load("tinyshakespeare")
    assert isinstance(found, Corpus)
    return found.text


def _smoke_text() -> str:
    import inspect
    import textwrap

    return inspect.getsource(textwrap)  # English and Python, on every machine


# -- one layer, and time ---------------------------------------------------------------------------


def _layer(how: str, seed: int, scale: Scale, groups: tuple[str, ...]) -> dict[str, Any]:
    from everydepth_papers.constructions import MAPS, construct, fit_single_layer

    if how == "constructed":
        ratios = [
            construct(MAPS[m], precision=p, points=4000, seed=seed).error / p
            for m in scale.maps
            for p in scale.precisions
        ]
        return {"values": {"ratios": ratios}, "missing": {}}
    settings: dict[str, Any] = {"steps": scale.layer_steps, "points": 2000, "seed": seed}
    errors = [
        fit_single_layer(MAPS["neighbors"], width=w, progress=False, **settings).error
        for w in (8, 128)
    ]
    return {"values": {"errors": errors}, "missing": {}}


def _cost(how: str, seed: int, scale: Scale, groups: tuple[str, ...]) -> dict[str, Any]:
    """Seconds of a training step, LPA over end to end: steps in turn, the best of several."""
    train, _ = _digits(scale, seed)
    batch = train.batch(range(64))
    nets = [
        EveryDepth(_seeded(lambda: vit(scale), seed), objective)
        for objective in (end_to_end(), lpa())
    ]
    optimizers = [torch.optim.AdamW(net.parameters(), lr=1e-4) for net in nets]
    best = [float("inf")] * 2
    for _ in range(4 if scale.rows is not None else 30):
        for place, (net, optimizer) in enumerate(zip(nets, optimizers, strict=True)):
            started = time.perf_counter()
            optimizer.zero_grad()
            net(**batch).loss.backward()
            optimizer.step()
            best[place] = min(best[place], time.perf_counter() - started)
    return {"values": {"step_ratio": best[1] / best[0]}, "missing": {}}


Kind = Callable[[str, int, Scale, tuple[str, ...]], dict[str, Any]]
KINDS: Mapping[str, Kind] = {
    "vit": _vit,
    "noisy": _noisy,
    "resnet": _resnet_cell,
    "sweep": _sweep,
    "mlp": _mlp,
    "perceptron": _perceptron,
    "lm": _lm,
    "layer": _layer,
    "cost": _cost,
}
