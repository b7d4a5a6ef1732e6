"""The standard networks: trained once per seed, shared by all claims.

| cell | network | data |
|---|---|---|
| `vit:*` | vision transformer, 6 blocks, width 48 | digits, clean |
| `noisy:*` | the same, trained on clean rows first | 320 digits, 5 % of the labels flipped |
| `resnet:*` | ResNet-14 | digits |
| `sweep:*` | ResNets of other depths and widths | digits |
| `mlp:*` | residual perceptron, 6 blocks, width 30 | eight surfaces |
| `perceptron:*` | residual perceptron with and without skips | digits |
| `lm:*` | language model on bytes, 4 blocks, width 64 | tiny Shakespeare |
| `layer:*` | one transformer layer, constructed or trained | maps of `constructions` |
| `cost:*` | steps of training timed side by side | digits |

The same seed gives the same initialization and the same order of data to every objective.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import nn
from torch.utils.data import ConcatDataset

from everydepth.ablations import gradient_study, memorization, scaled_skip
from everydepth.config import plain
from everydepth.data import (
    SURFACES,
    Corpus,
    Images,
    batches,
    flip_labels,
    load,
    load_digits,
    token_blocks,
)
from everydepth.data.sets import Rows
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
from everydepth_papers.evidence import networks
from everydepth_papers.evidence.baselines import linear_accuracy

OBJECTIVES: Mapping[str, Callable[[], Objective]] = {
    "end_to_end": end_to_end,
    "lpa": lpa,
    "aligned": aligned,
    "multi_classifier": multi_classifier,
    "cosine": lambda: cosine_regularized(1.0),
}


@dataclass(frozen=True, kw_only=True)
class Scale:
    """How large the standard networks and their training runs are."""

    blocks: int
    width: int
    patch: int
    rows: int | None  # of the training data; None: all
    epochs: int  # of all classifiers but the ResNet-14
    resnet_epochs: int
    noisy_rows: int
    noisy_epochs: int
    points: int
    surface_epochs: int
    lm_steps: int
    lm_blocks: int
    lm_held: int
    sweep: tuple[tuple[int, int], ...]  # (layers, width) of ResNets: shallow and deep, narrow, wide
    maps: tuple[str, ...]
    precisions: tuple[float, ...]
    layer_steps: int


SCALES: Mapping[str, Scale] = {
    "smoke": Scale(
        blocks=3,
        width=16,
        patch=4,
        rows=128,
        epochs=1,
        resnet_epochs=1,
        noisy_rows=64,
        noisy_epochs=2,
        points=128,
        surface_epochs=1,
        lm_steps=3,
        lm_blocks=2,
        lm_held=32,
        sweep=((8, 4), (14, 4), (8, 8), (14, 8)),
        maps=("wave",),
        precisions=(0.1,),
        layer_steps=20,
    ),
    "standard": Scale(
        blocks=6,
        width=48,
        patch=4,
        rows=None,
        epochs=40,
        resnet_epochs=8,
        noisy_rows=320,
        noisy_epochs=70,
        points=3000,
        surface_epochs=100,
        lm_steps=200,
        lm_blocks=4,
        lm_held=256,
        sweep=((8, 8), (20, 8), (8, 16), (20, 16)),
        maps=("wave", "turn", "places", "contrast", "soft_lookup", "neighbors", "prefix", "sort"),
        precisions=(0.1, 0.05),
        layer_steps=400,
    ),
}


def cell(name: str, seed: int, scale: Scale, groups: tuple[str, ...]) -> dict[str, Any]:
    """Train and measure the network of this name; returns JSON values."""
    kind, _, how = name.partition(":")
    started = time.process_time()
    found = KINDS[kind](how, seed, scale, groups)
    found["values"]["cpu_seconds"] = round(time.process_time() - started, 2)
    return found


# -- images ----------------------------------------------------------------------------------------


def _digits(rows: int | None, seed: int) -> tuple[Images, Images]:
    train, test = load_digits("train", seed=seed), load_digits("test", seed=seed)
    if rows is None:
        return train, test
    return train.subset(range(rows)), test.first(64)


def _seeded(build: Callable[[], nn.Module], seed: int) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build()


def vit(scale: Scale) -> nn.Module:
    sizes = {"depth": scale.blocks, "width": scale.width, "heads": 4, "inner": 2 * scale.width}
    return networks.vit(size=8, patch=scale.patch, channels=1, **sizes)


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


@cache
def _linear_digits(rows: int | None, seed: int) -> float:
    """Accuracy of the linear baseline, the same for every network of a seed."""
    return linear_accuracy(*_digits(rows, seed))


def _classifier(
    model: nn.Module, seed: int, scale: Scale, groups: tuple[str, ...]
) -> dict[str, Any]:
    """The facts of a trained classifier, with its skill and its training accuracy by depth."""
    from everydepth.tracing import trace

    train, test = _digits(scale.rows, seed)
    found = gather(model, _batches(test), groups, train=_batches(train.subset(range(128))))
    fitted = trace(model, _batches(train), ["accuracy"], progress=False)["accuracy"]
    values = found["values"]
    values["train_accuracy"] = plain(fitted)
    if "accuracy" in values:
        values["skill"] = values["accuracy"][-1] - _linear_digits(scale.rows, seed)
    return found


def _vit(how: str, seed: int, scale: Scale, groups: tuple[str, ...]) -> dict[str, Any]:
    train, test = _digits(scale.rows, seed)
    model = _seeded(lambda: vit(scale), seed)
    net = _trained(model, how, train, seed, scale.epochs, 1e-3)
    if how == "multi_classifier":  # its own heads: the shared readout says nothing of them
        own = _own_heads(net, test)
        skill = own[-1] - _linear_digits(scale.rows, seed)
        return {"values": {"accuracy": own, "skill": skill}, "missing": {}}
    return _classifier(model, seed, scale, groups)


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
    """A network trained on clean rows, then, with all skips and without those of a layer, on others
    of which 5 % have a wrong label; every arm for the same number of epochs."""
    train, test = _digits(scale.rows, seed)
    rows, clean = train.subset(range(scale.noisy_rows)), range(scale.noisy_rows, len(train))
    flipped = flip_labels(rows.labels, 0.05, seed=seed, classes=10)
    noisy = Images(rows.pixel_values, flipped.labels, classes=train.classes)
    start, before = _seeded(lambda: vit(scale), seed), train.subset(clean)
    _trained(start, "end_to_end", before, seed, scale.epochs, 1e-3)
    values: dict[str, Any] = {}
    for arm, layer in {"whole": None, "first": 1, "last": scale.blocks}.items():
        model = copy.deepcopy(start)
        skip = None if layer is None else scaled_skip(model, layer=layer, c=0.0).attach()
        first = UntilAccuracy(noisy, stop=False, also=test)
        epochs = scale.noisy_epochs
        _trained(model, "end_to_end", noisy, seed, epochs, 1e-3, callbacks=[first])
        found = memorization(model, noisy, test, flipped=flipped, batch_size=64, progress=False)
        values |= {
            f"{arm}_memorization": found.memorization,
            f"{arm}_test_accuracy": found.test_accuracy,
            f"{arm}_train_accuracy": found.train_accuracy,
            f"{arm}_fitted_epoch": (first.first or {}).get("epoch"),
            f"{arm}_fitted_test_accuracy": (first.first or {}).get("also"),
        }
        if skip is None:
            values |= _studied(model, noisy, test, flipped)
            linear = linear_accuracy(ConcatDataset([noisy, before]), test)
            values["skill"] = (found.test_accuracy or 0.0) - linear
        else:
            skip.remove()
    return {"values": values, "missing": {}}


def _studied(model: nn.Module, noisy: Images, test: Images, flipped: Any) -> dict[str, Any]:
    study = gradient_study(model, test, noisy, flipped=flipped, batch_size=64, progress=False)
    learning, memorized = study.learning, study.memorization
    apart = [
        np.abs(memorized.std[tap].mean(1) / learning.std[tap].mean(1) - 1)
        for tap in sorted(learning.std.keys() & memorized.std.keys())
    ]
    return {
        "gradient_ratio": study.smaller.tolist(),
        "learning_norm": learning.norm.tolist(),
        "std_apart": float(np.max(apart)),
    }


def _resnet_cell(how: str, seed: int, scale: Scale, groups: tuple[str, ...]) -> dict[str, Any]:
    train, _ = _digits(scale.rows, seed)
    small = scale.rows is not None
    model = _seeded(lambda: _resnet(8 if small else 14, 4 if small else 8), seed)
    _trained(model, how, train, seed, scale.resnet_epochs, 3e-3)
    return _classifier(model, seed, scale, groups)


def _sweep(how: str, seed: int, scale: Scale, groups: tuple[str, ...]) -> dict[str, Any]:
    deep, wide = how.split("-")
    layers, width = scale.sweep[(deep == "deep") + 2 * (wide == "wide")]
    train, test = _digits(scale.rows, seed)
    model = _seeded(lambda: _resnet(layers, width), seed)
    _trained(model, "end_to_end", train, seed, scale.epochs, 3e-3)
    from everydepth.tracing import gradient_alignment, trace

    metrics = ["gradient_mean", "loss", "accuracy"]
    both = [trace(model, _batches(rows), metrics, progress=False) for rows in (train, test)]
    aligned_by_depth = gradient_alignment(*both).arrays["cosine"]
    return {
        "values": {
            "signal": float(both[0]["gradient_mean"][-1]),
            "test_loss": float(both[1]["loss"][-1]),
            "alignment": float(np.ma.mean(aligned_by_depth[:-1])),
            "skill": float(both[1]["accuracy"][-1]) - _linear_digits(scale.rows, seed),
        },
        "missing": {},
    }


# -- points ----------------------------------------------------------------------------------------


def _mlp(how: str, seed: int, scale: Scale, groups: tuple[str, ...]) -> dict[str, Any]:
    from everydepth_papers.evidence.surfaces import plane_error, train_surfaces

    found = train_surfaces(
        list(SURFACES),
        {how: OBJECTIVES[how]()},
        seed=seed,
        epochs=scale.surface_epochs,
        points=scale.points,
        lr=3e-3,
        num_hidden_layers=scale.blocks,
    )["networks"]
    mse, worst, cosine = (
        [found[name][how][what] for name in SURFACES] for what in ("mse", "sup", "toward_residual")
    )
    planes = [plane_error(name, scale.points, seed) for name in SURFACES]
    skill = np.mean([1 - last[-1] / plane for last, plane in zip(mse, planes, strict=True)])
    values = {"loss": mse, "sup_error": worst, "toward_residual": cosine}
    return {"values": values | {"skill": float(skill)}, "missing": {}}


@dataclass(frozen=True, eq=False, repr=False)
class _Flat(Rows):
    """Images as vectors."""

    KEYS: ClassVar[Mapping[str, str]] = {"inputs": "inputs", "labels": "labels"}

    inputs: Float[torch.Tensor, "rows pixels"]
    labels: Int[torch.Tensor, " rows"]


def _perceptron(how: str, seed: int, scale: Scale, groups: tuple[str, ...]) -> dict[str, Any]:
    from everydepth.architectures.residual_mlp import ResidualMLP, ResidualMLPConfig

    images = _digits(scale.rows, seed)
    train, test = (_Flat(rows.pixel_values.flatten(1), rows.labels) for rows in images)
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
    found = gather(model, _batches(test), ("trace",))
    found["values"]["skill"] = found["values"]["accuracy"][-1] - _linear_digits(scale.rows, seed)
    return found


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
    held = test.first(scale.lm_held)
    found = gather(model, _batches(held), ("trace",))
    found["values"]["skill"] = found["values"]["accuracy"][-1] - _pairs(ids[:cut], held)
    return found


def _pairs(ids: list[int], held: Any) -> float:
    """Next-token accuracy of a table: the byte that most often followed this one in training."""
    followed = np.zeros((256, 256))
    np.add.at(followed, (ids[:-1], ids[1:]), 1)
    tokens = np.stack([np.asarray(held[i]["input_ids"]) for i in range(len(held))])
    return float((followed.argmax(1)[tokens[:, :-1]] == tokens[:, 1:]).mean())


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
    """CPU seconds of a training step, LPA over end to end: steps in turn, medians."""
    train, _ = _digits(scale.rows, seed)
    batch = train.batch(range(64))
    nets = [
        EveryDepth(_seeded(lambda: vit(scale), seed), objective)
        for objective in (end_to_end(), lpa())
    ]
    optimizers = [torch.optim.AdamW(net.parameters(), lr=1e-4) for net in nets]
    seconds: list[list[float]] = [[], []]
    for _ in range(4 if scale.rows is not None else 300):
        for net, optimizer, spent in zip(nets, optimizers, seconds, strict=True):
            # CPU seconds: other processes stretch the clock, by more than what is asked here.
            started = time.process_time()
            optimizer.zero_grad()
            net(**batch).loss.backward()
            optimizer.step()
            spent.append(time.process_time() - started)
    plain, progressive = map(np.median, seconds)
    return {"values": {"step_ratio": float(progressive / plain)}, "missing": {}}


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
