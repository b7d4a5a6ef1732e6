"""The Vision tab: one image at every depth of a network, and the cost of each depth."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from everydepth.app.shelf import Item
from everydepth.data import Images, load, load_digits
from everydepth.data.pictures import Lens, Pixels, floats, to_data_url
from everydepth.errors import DataError, EveryDepthError
from everydepth.exits import Certificate, Policy, Profile, calibrate, predict, profile
from everydepth.exits.calibrate import NotCertifiedWarning
from everydepth.exits.load import model_folder
from everydepth.exits.untrusted import check_inside, read_json
from everydepth.reports.markup import text
from everydepth.results.table import shown
from everydepth.stream import ResidualStream, evaluating
from everydepth.stream.states import holds_from

TOP = 3  # classes shown per depth
OFFERED = 24  # images to pick from
MOST_TESTED = 2000  # most images of a dataset that are used
Number = float | int


@dataclass(frozen=True, kw_only=True)
class Rise:
    """The predictions of depths 0..L for one image.

    chances: probabilities, (depth, class).
    settled: the depth from which on the top class is the final one.
    leaves: the depth at which the policy exits; None without a policy.
    """

    chances: np.ndarray
    names: tuple[str, ...]
    settled: int
    leaves: int | None = None
    label: int | None = None

    @property
    def depth(self) -> int:
        return len(self.chances) - 1

    def said(self, depth: int) -> str:
        return self.names[int(self.chances[depth].argmax())]


@dataclass(frozen=True, eq=False)
class Desk:
    """An image classifier, and the data to try it on, if any."""

    item: Item
    data: str | None = None

    @property
    def stream(self) -> ResidualStream:
        return self.item.stream

    @cached_property
    def lens(self) -> Lens:
        return Lens.of(self.stream.model.config, _preprocessing(self.item))

    @cached_property
    def test(self) -> Images | None:
        return self._split("test")

    @cached_property
    def valid(self) -> Images | None:
        """Images to calibrate on."""
        try:
            return self._split("valid")
        except DataError:
            # Without a validation split, use half of the test images.
            found = self._split("test")
            return None if found is None else found.split((0.5, 0.5))[0]

    @cached_property
    def names(self) -> tuple[str, ...]:
        known = None if self.test is None else self.test.classes
        if known is not None and len(known) == self.stream.classes:
            return tuple(known)
        labels: Mapping[Any, Any] = getattr(self.stream.model.config, "id2label", None) or {}
        found = [str(labels.get(i, f"class {i}")) for i in range(self.stream.classes)]
        return tuple(name.replace("LABEL_", "class ") for name in found)

    @cached_property
    def offered(self) -> list[int]:
        """Rows of the test data to pick from: one per class, then those that settle last."""
        if self.test is None:
            return []
        with torch.no_grad(), evaluating(self.stream.model):
            states = self.stream.observe({"pixel_values": self._batch(self.test)})
            said = torch.stack([states.logits(d).argmax(-1) for d in range(states.depth + 1)])
        settled = holds_from(said == said[-1]).numpy()
        labels = self.test.labels.numpy()
        firsts = [int(np.flatnonzero(labels == c)[0]) for c in np.unique(labels)[: OFFERED // 2]]
        late = [int(i) for i in np.argsort(-settled, kind="stable") if i not in firsts]
        return firsts + late[: OFFERED - len(firsts)]

    def pixels(self, row: int) -> Pixels:
        """An image of the test data, in 0..1."""
        assert self.test is not None
        return self.lens.resized(floats(self.test.pixel_values[row : row + 1]))[0]

    def label(self, row: int) -> int | None:
        return None if self.test is None else int(self.test.labels[row])

    def policy(self, risk: float) -> tuple[Policy | None, str]:
        """An exit policy with this risk of disagreement, and a description of its guarantee."""
        if self.valid is None:
            return None, "No data to calibrate on: give its name with --data."
        batch = {"pixel_values": self._batch(self.valid), "labels": self.valid.labels}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", NotCertifiedWarning)  # the page says so
            found = calibrate(
                self.stream, batch, risk=risk, clock=False, batch_size=256, progress=False
            )
        return found, "" if found.certificate is None else _promised(found.certificate)

    @cached_property
    def profile(self) -> Profile:
        """The profile saved in the run if it fits, or else measured now."""
        try:
            return _saved_profile(self.item, self.stream)
        except EveryDepthError:
            pixels = self._batch(self.test) if self.test is not None else self._blank()
            batch: dict[str, Any] = {"pixel_values": pixels}
            if self.test is not None:
                batch["labels"] = self.test.labels
            return profile(self.stream, batch, repeats=3, progress=False)

    @torch.no_grad()
    def rise(self, pixels: Pixels, policy: Policy | None, label: int | None = None) -> Rise:
        """Predict one image at every depth, and with the policy."""
        batch = {"pixel_values": self.lens.normalized(pixels[None])}
        with evaluating(self.stream.model):
            states = self.stream.observe(batch, check_finite=True)
            logits = [states.logits(depth)[0].float() for depth in range(states.depth + 1)]
        chances = torch.stack(logits).softmax(-1)
        said = chances.argmax(-1)
        leaves = None
        if policy is not None:
            leaves = int(predict(self.stream, batch, policy=policy).depths[0])
        return Rise(
            chances=chances.numpy(),
            names=self.names,
            settled=int(holds_from(said == said[-1])),
            leaves=leaves,
            label=label,
        )

    def _split(self, split: str) -> Images | None:
        name = self.data or self.item.data
        if name is None:
            return load_digits(split) if self._takes_digits() else None
        return load(name, split=split, kind=Images).first(MOST_TESTED)

    def _takes_digits(self) -> bool:
        return self.lens.size == (8, 8) and self.lens.channels == 1 and self.stream.classes == 10

    def _batch(self, images: Images) -> Tensor:
        return self.lens.normalized(self.lens.resized(floats(images.pixel_values)))

    def _blank(self) -> Tensor:
        return torch.zeros(1, self.lens.channels, *self.lens.size)


# -- what is shown ---------------------------------------------------------------------------------


def tower(rise: Rise, depth: int) -> str:
    """The top classes of every depth, with the embedding at the bottom; highlights `depth`."""
    final = int(rise.chances[-1].argmax())
    rows = "".join(_floor(rise, level, depth, final) for level in range(rise.depth, -1, -1))
    return f'<div class="ed-tower" role="table">{rows}</div>'


def _floor(rise: Rise, level: int, depth: int, final: int) -> str:
    chances = rise.chances[level]
    best = np.argsort(-chances, kind="stable")[:TOP]
    bars = "".join(
        f'<span class="ed-bar {"ed-same" if c == final else ""}" style="--p:{chances[c]:.3f}">'
        f"<b>{text(rise.names[c])}</b> <i>{chances[c]:.0%}</i></span>"
        for c in best.tolist()
    )
    marks: list[str] = []
    if level == rise.leaves:
        marks.append('<em class="ed-exit">exits here</em>')
    if level == rise.settled:
        marks.append('<em class="ed-settled">settled</em>')
    classes = ["ed-floor"]
    classes += ["ed-at"] if level == depth else []
    classes += ["ed-skipped"] if rise.leaves is not None and level > rise.leaves else []
    return (
        f'<div class="{" ".join(classes)}" role="row" data-depth="{level}">'
        f'<span class="ed-depth">{level}</span><span class="ed-bars">{bars}</span>'
        f'<span class="ed-marks">{"".join(marks)}</span></div>'
    )


def sentence(rise: Rise, depth: int) -> str:
    """The result in words."""
    truth = "" if rise.label is None else _right(rise)
    parts = [
        f"The network says <b>{text(rise.said(rise.depth))}</b>{truth}.",
        f"It settles at depth {rise.settled} of {rise.depth}"
        + (
            "."
            if rise.leaves is None
            else f"; the policy exits at depth {rise.leaves} with <b>"
            f"{text(rise.said(rise.leaves))}</b>."
        ),
        f"Cut to depth {depth}, it would say <b>{text(rise.said(depth))}</b>.",
    ]
    return f'<p class="ed-words">{" ".join(parts)}</p>'


def _right(rise: Rise) -> str:
    assert rise.label is not None
    name = rise.names[rise.label] if rise.label < len(rise.names) else str(rise.label)
    right = rise.said(rise.depth) == name
    return ", and that is right" if right else f", but the label is <b>{text(name)}</b>"


def tiles(found: Profile, depth: int, *, judged: bool) -> str:
    """The accuracy, latency, parameters and size of a depth, relative to full depth.

    judged: whether the quality was measured on labeled data.
    """
    here, full = found.at(max(depth, 1)), found.at(found.depth)
    cells = [
        (
            found.metric,
            f"{here.quality:.1%}" if found.more_is_better else f"{here.quality:.4g}",
            f"{full.quality:.1%} at full depth" if found.more_is_better else "",
        )
        if judged
        else ("accuracy", "not known", "give labeled data with --data"),
        (
            "latency, one picture",
            f"{here.latency.median:.2f} ms",
            _share(here.latency.median, full.latency.median),
        ),
        ("parameters", f"{here.parameters:,}", _share(here.parameters, full.parameters)),
        (
            "bytes of the checkpoint",
            shown(here.checkpoint_bytes, "bytes"),
            _share(here.checkpoint_bytes, full.checkpoint_bytes),
        ),
    ]
    drawn = "".join(
        f'<div class="ed-tile"><span>{text(name)}</span><strong>{text(value)}</strong>'
        f"<small>{text(beside)}</small></div>"
        for name, value, beside in cells
    )
    return f'<div class="ed-tiles">{drawn}</div>'


def promise(note: str) -> str:
    """The policy's guarantee as HTML."""
    return f'<p class="ed-soft">{text(note)}</p>' if note else ""


def _promised(found: Certificate) -> str:
    if not found.certified:
        return (
            f"Exit policy: {found.samples} images are too few to guarantee that at most "
            f"{found.risk:.0%} of answers change, so every image uses the full depth. Allow more "
            "risk."
        )
    return (
        f"Exit policy: with probability {1 - found.delta:.0%}, at most {found.risk:.0%} of answers "
        f"change; calibrated on {found.samples} images, which ran {found.saved}."
    )


def gallery(desk: Desk, chosen: int | None) -> str:
    """Images to pick from, as buttons."""
    buttons = "".join(
        f'<button data-row="{row}" class="{"ed-chosen" if row == chosen else ""}" '
        f'title="{text(_named(desk, row))}"><img src="{to_data_url(desk.pixels(row))}" '
        f'alt="{text(_named(desk, row))}"></button>'
        for row in desk.offered
    )
    about = "One of each class, then those on which the network decides last."
    return f'<p class="ed-soft">{about}</p><div class="ed-gallery">{buttons}</div>'


def preview(pixels: Pixels) -> str:
    """The model's input as HTML."""
    return (
        f'<figure class="ed-seen"><img src="{to_data_url(pixels)}" alt="what the network sees">'
        f"<figcaption>what the network sees, {pixels.shape[-1]} x {pixels.shape[-2]} pixels"
        "</figcaption></figure>"
    )


def _named(desk: Desk, row: int) -> str:
    label = desk.label(row)
    return desk.names[label] if label is not None and label < len(desk.names) else str(label)


def _share(part: Number, whole: Number) -> str:
    return f"{part / whole:.0%} of full depth" if whole else ""


def _preprocessing(item: Item) -> Mapping[str, Any]:
    file = Path(model_folder(item.path)) / "preprocessor_config.json"
    if item.preprocessing is not None or not file.is_file():
        return item.preprocessing or {}
    check_inside(file.parent, item.path)
    found = read_json(file)
    return found if isinstance(found, dict) else {}


def _saved_profile(item: Item, stream: ResidualStream) -> Profile:
    """The profile saved in a run; an error if it is of another model."""
    check_inside(item.path, item.path)
    found = Profile.load(item.path / "profile")
    if found.model != stream.name or found.depth != stream.depth:
        raise DataError(f"{item.path / 'profile'} is of another model; profile again")
    return found
