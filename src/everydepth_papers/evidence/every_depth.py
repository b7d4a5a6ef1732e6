"""What recipes of Progressive Approximation share: data, one run, rows of E2E against LPA."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from everydepth.data import Images, load
from everydepth.objectives import Objective, end_to_end, lpa
from everydepth.training import EveryDepth, fit
from everydepth_papers.evidence.baselines import linear_accuracy
from everydepth_papers.evidence.figures import band
from everydepth_papers.evidence.recipe import Cell, Finished, Row, over_seeds
from everydepth_papers.evidence.rows import holds_in, learned, numbers, paired, where
from everydepth_papers.premise import Premise

NAMES = {"end_to_end": "E2E", "lpa": "LPA"}
LONG = 1000  # steps; a longer run keeps checkpoints, so that it can resume
ABOVE_LINEAR = learned("linear", "a linear classifier's")
# What a difference of accuracies must be, as in the ledger of claims.
POINT, MUCH = 0.01, 0.1


def objective_of(settings: Cell) -> Objective:
    """Weights 1 at the last depth and 0.1 at the others, or at the `top` ones (App. I)."""
    return end_to_end() if settings["objective"] == "end_to_end" else lpa(top=settings.get("top"))


def images(settings: Cell) -> tuple[Any, Any]:
    """Training and test images, normalized; of the hub, decoded row by row."""
    name, size = settings["data"], settings.get("size")
    if "/" in name:
        from everydepth_papers.evidence.hub_images import HubImages

        other = "validation" if "imagenet" in name else "test"
        side = size or 32
        return HubImages(name, "train", size=side, augment=True), HubImages(name, other, size=side)
    parts: list[Images] = []
    for split, rows in (("train", "rows"), ("test", "test_rows")):
        part = load(name, kind=Images, split=split)
        part = part.first(settings.get(rows)).as_float()
        if size is not None and part.pixel_values.shape[-1] != size:
            pixels = nn.functional.interpolate(part.pixel_values, size, mode="area")
            part = Images(pixels, part.labels, part.classes)
        parts.append(part)
    pixels = parts[0].pixel_values
    mean, std = pixels.mean((0, 2, 3)).tolist(), pixels.std((0, 2, 3)).tolist()
    return parts[0].normalized(mean, std), parts[1].normalized(mean, std)


def trained(
    model: nn.Module, settings: Cell, seed: int, folder: Path, train: Any, test: Any
) -> dict[str, Any]:
    """Fit once; loss, and accuracy or perplexity, of every depth 1..L on the test rows.

    The test rows are used once, after the last step.
    """
    how = {k: settings[k] for k in ("epochs", "steps") if k in settings}
    long = settings.get("steps", LONG) >= LONG
    done = fit(
        EveryDepth(model, objective_of(settings)),
        train,
        test,
        **how,
        batch_size=settings["batch"],
        optimizer=settings.get("optimizer", "adamw"),
        lr=settings["lr"],
        weight_decay=settings.get("decay"),
        warmup=settings.get("warmup", 0.1),
        clip=settings.get("clip"),
        validate_every=settings.get("steps"),
        seed=seed,
        run=folder / "training" if long else None,
        resume=long,
        progress=False,
    )
    return {"steps": done.steps, **{name: numbers(values) for name, values in done.valid.items()}}


def trained_on_images(
    settings: Cell, seed: int, folder: Path, *, build: Callable[[Cell], nn.Module]
) -> dict[str, Any]:
    """A cell: the data named in the settings, the network built after the seed is set."""
    train, test = images(settings)
    seeded(seed)
    found = trained(build(settings), settings, seed, folder, train, test)
    return {**found, "linear": linear_accuracy(train, test)}


def pairs(results: Sequence[Finished], **settings: Any) -> list[tuple[Finished, Finished]]:
    """(end-to-end, LPA) of the same settings and seed."""
    first, second = (where(results, objective=name, **settings) for name in NAMES)
    return paired(first, second)


def depth_rows(
    results: Sequence[Finished],
    what: str,
    printed: Mapping[str, Any],
    metric: str = "accuracy",
    *,
    scale: float = 100.0,
    **settings: Any,
) -> list[Row]:
    """E2E and LPA at the last depth and at half depth, and how far apart they are."""
    both = pairs(results, **settings)
    if not both:
        return []
    last = len(both[0][0][metric])
    found: list[Row] = []
    for depth, words in ((last, f"last of {last}"), (last // 2, f"depth {last // 2} of {last}")):
        values = {
            name: [scale * pair[place][metric][depth - 1] for pair in both]
            for place, name in enumerate(NAMES.values())
        }
        for name in NAMES.values():
            shown = printed.get(name) if depth == last else None
            note = ""
            if metric == "accuracy":
                note = linear_note(both[0][0], float(np.mean(values[name])) / scale)
            quantity = f"{what}, {name}, {metric}, {words}"
            found.append(over_seeds(quantity, shown, values[name], note))
        gain = np.subtract(values["LPA"], values["E2E"])
        shown = None
        if depth == last and all(name in printed for name in NAMES.values()):
            shown = round(printed["LPA"] - printed["E2E"], 2)
        found.append(over_seeds(f"{what}, LPA - E2E, {metric}, {words}", shown, gain.tolist()))
    return found


def statements(
    results: Sequence[Finished],
    what: str,
    *,
    last: str,
    early: str,
    premise: Premise = ABOVE_LINEAR,
    **settings: Any,
) -> list[Row]:
    """What the paper says of LPA against E2E, judged where every network learned.

    last, early: the tables and figures on the last depth and on those below it.
    """
    both = pairs(results, **settings)

    def say(item: str, words: str, says: str, test: Callable[..., bool]) -> Row:
        return holds_in(f"{item}: {what}, {words}", says, both, test, premises=[premise])

    return [
        say(
            last,
            "LPA's last depth is at most a point below E2E's",
            "LPA matches the final accuracy of E2E",
            lambda e2e, lpa: lpa["accuracy"][-1] >= e2e["accuracy"][-1] - POINT,
        ),
        say(
            early,
            "LPA's half depth is at least 10 points above E2E's",
            "LPA is much more accurate in the early layers",
            lambda e2e, lpa: at_half(lpa) >= at_half(e2e) + MUCH,
        ),
        say(
            early,
            "LPA's accuracy rises with depth, up to a point",
            "LPA's accuracy rises with depth",
            lambda _, lpa: falls(lpa["accuracy"]) <= POINT,
        ),
    ]


def at_half(result: Finished) -> float:
    """Accuracy at half depth."""
    by_depth = result["accuracy"]
    return by_depth[len(by_depth) // 2 - 1]


def share_rows(
    results: Sequence[Finished], *, printed: Mapping[str, Any], like: str, item: str
) -> list[Row]:
    """Accuracy at as many depths as the paper prints, evenly over the network, for each model.

    printed: by model and objective, one accuracy a printed depth; under `loss` the losses. like:
    the model that others are set beside. item: the table.
    """
    found: list[Row] = []
    for model in dict.fromkeys(r.cell["model"] for r in results):
        shown = printed.get(model, printed[like])
        for objective, name in NAMES.items():
            mine = where(results, objective=objective, model=model)
            last, count = len(mine[0]["accuracy"]), len(shown[name])
            for place, (figure, loss) in enumerate(
                zip(shown[name], shown["loss"][name], strict=True), start=1
            ):
                depth = max(1, round(place * last / count))
                values = [100 * r["accuracy"][depth - 1] for r in mine]
                note = linear_note(mine[0], float(np.mean(values)) / 100)
                at = f"depth {depth} of {last}"
                found.append(over_seeds(f"{model}, {name}, accuracy, {at}", figure, values, note))
                losses = [r["loss"][depth - 1] for r in mine]
                found.append(over_seeds(f"{model}, {name}, loss, {at}", loss, losses))
        found.append(last_gain(results, model, shown, "last depth"))
        found += worst_fall(results, model, model=model)
        found += statements(results, model, last=item, early=item, model=model)
    return found


def linear_note(result: Finished, accuracy: float) -> str:
    """A linear classifier on the same rows, where one was fitted."""
    linear = result.values.get("linear")
    if linear is None:
        return ""
    side = "below" if accuracy < linear else "above"
    return f"{side} a linear classifier's {100 * linear:.1f}"


def last_gain(
    results: Sequence[Finished], model: str, printed: Mapping[str, Any], last: str
) -> Row:
    """LPA minus E2E at the last depth, in points of accuracy. printed: one value per depth."""
    gain = [100 * (b["accuracy"][-1] - a["accuracy"][-1]) for a, b in pairs(results, model=model)]
    shown = round(printed["LPA"][-1] - printed["E2E"][-1], 2)
    return over_seeds(f"{model}, LPA - E2E, accuracy, {last}", shown, gain)


def falls(values: Sequence[float]) -> float:
    """The largest step in the wrong direction of values that should rise."""
    return float(max(0.0, -np.diff(values).min(initial=0.0)))


def worst_fall(results: Sequence[Finished], what: str, **settings: Any) -> list[Row]:
    """The largest drop in accuracy from one depth to the next, in points."""
    found: list[Row] = []
    for objective, name in NAMES.items():
        mine = where(results, objective=objective, **settings)
        values = [100 * falls(r["accuracy"]) for r in mine]
        printed = "0 (rises)" if name == "LPA" else None
        if mine:
            found.append(over_seeds(f"{what}, {name}, largest fall of accuracy", printed, values))
    return found


def depth_figure(
    results: Sequence[Finished], by: Sequence[str], metric: str = "accuracy", *, log: bool = False
) -> Any:
    """A panel for each combination of the settings `by`: the metric against depth."""
    from matplotlib.figure import Figure

    keys = list(dict.fromkeys(tuple(r.cell[name] for name in by) for r in results))
    columns = min(4, len(keys))
    lines = -(-len(keys) // columns)
    drawn = Figure(figsize=(3.4 * columns, 2.8 * lines), layout="constrained")
    axes = list(drawn.subplots(lines, columns, squeeze=False).flat)
    for place in axes:
        place.set_visible(False)
    for place, key in zip(axes, keys, strict=False):
        place.set_visible(True)
        for objective, name in NAMES.items():
            mine = where(results, objective=objective, **dict(zip(by, key, strict=True)))
            if not mine:
                continue
            values = [r[metric] for r in mine]
            band(place, range(1, len(values[0]) + 1), values, name)
        linear = [
            r["linear"]
            for r in results
            if "linear" in r.values
            and metric == "accuracy"
            and tuple(r.cell[name] for name in by) == key
        ]
        if linear:
            place.axhline(np.mean(linear), color="gray", linestyle=":", label="linear classifier")
        if log:
            place.set_yscale("log")
        place.set_title(", ".join(str(part).split("/")[-1] for part in key), fontsize=9)
        place.set_xlabel("depth")
        place.set_ylabel(metric)
    drawn.axes[0].legend(fontsize=8)
    return drawn


def seeded(seed: int) -> None:
    torch.manual_seed(seed)
