"""Serve classifiers: rows of different depths share every block they need."""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from everydepth.data.pictures import Lens, decoded
from everydepth.errors import BatchError, DataError
from everydepth.exits.policies import Policy
from everydepth.exits.predict import predict
from everydepth.exits.untrusted import read_json
from everydepth.serving.bodies import Classify
from everydepth.serving.http import application
from everydepth.serving.meter import Meter
from everydepth.serving.names import Menu
from everydepth.serving.scheduler import Busy
from everydepth.stream import ResidualStream, unwrapped
from everydepth.stream.states import are_finite


@dataclass(frozen=True)
class Answer:
    label: int
    probability: float
    depth: int


@dataclass(eq=False)
class _Item:
    row: Any
    depth: int
    policy: Policy | None
    answer: asyncio.Future[Answer]


class Classifier:
    """Collects the inputs that arrive while a batch runs, and runs them as the next one.

    prepare: combines several inputs into a batch.
    """

    def __init__(
        self,
        stream: ResidualStream,
        prepare: Callable[[Sequence[Any]], Mapping[str, Tensor]],
        *,
        places: int = 64,
        queue: int = 4096,
    ) -> None:
        self.stream, self._prepare, self._places, self._most = stream, prepare, places, queue
        self._items: asyncio.Queue[_Item] = asyncio.Queue()
        self._task: asyncio.Task[None] | None = None
        self._counts = {"requests_total": 0.0, "batches_total": 0.0, "passes_total": 0.0}

    def start(self) -> None:
        unwrapped(self.stream.model).eval()

    def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()

    @property
    def ready(self) -> bool:
        return True

    @property
    def facts(self) -> Mapping[str, float]:
        return {**self._counts, "waiting": float(self._items.qsize())}

    async def run(self, rows: Sequence[Any], depth: int, policy: Policy | None) -> list[Answer]:
        if self._items.qsize() >= self._most:
            raise Busy(f"{self._items.qsize()} inputs are already waiting; try again later")
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._work())
        loop = asyncio.get_running_loop()
        items = [_Item(row, depth, policy, loop.create_future()) for row in rows]
        for item in items:
            self._items.put_nowait(item)
        return list(await asyncio.gather(*(item.answer for item in items)))

    async def _work(self) -> None:
        while True:
            items = [await self._items.get()]
            while len(items) < self._places and not self._items.empty():
                items.append(self._items.get_nowait())
            items = [item for item in items if not item.answer.cancelled()]
            if not items:
                continue
            self._counts["requests_total"] += len(items)
            for policy in dict.fromkeys(item.policy for item in items):
                await self._settle([item for item in items if item.policy == policy], policy)

    async def _settle(self, items: list[_Item], policy: Policy | None) -> None:
        try:
            answers = await asyncio.to_thread(self._answers, items, policy)
        except Exception as error:  # noqa: BLE001 - passed on to those who wait
            for item in items:
                if not item.answer.done():
                    item.answer.set_exception(error)
            return
        for item, answer in zip(items, answers, strict=True):
            if not item.answer.done():
                item.answer.set_result(answer)

    @torch.inference_mode()
    def _answers(self, items: list[_Item], policy: Policy | None) -> list[Answer]:
        batch = self._prepare([item.row for item in items])
        self._counts["batches_total"] += 1
        if policy is None:
            depths = [item.depth for item in items]
            logits = at_depths(self.stream, batch, depths)
        else:
            seen = predict(self.stream, batch, policy=policy)
            logits, depths = seen.logits, seen.depths.tolist()
        if not bool(are_finite(logits).all()):
            self.stream.observe(batch).check_predictions()
        self._counts["passes_total"] += sum(depths)
        best, label = logits.float().softmax(-1).max(-1)
        told = zip(label.tolist(), best.tolist(), depths, strict=True)
        return [Answer(*one) for one in told]


def at_depths(stream: ResidualStream, batch: Mapping[str, Tensor], depths: Sequence[int]) -> Tensor:
    """The logits of every row at its own depth; each block runs once, for the rows that need it.

    >>> from everydepth.serving.classify import at_depths
    >>> at_depths(ed.as_stream(model), test.batch(range(3)), [1, 3, 2]).shape
    torch.Size([3, 10])
    """
    cursor = stream.start(batch)
    wanted = torch.tensor([stream.check_depth(depth) for depth in depths], device=cursor.h.device)
    rows = torch.arange(len(wanted), device=cursor.h.device)
    found: list[Tensor | None] = [None] * len(rows)
    while True:
        here = wanted[rows] == cursor.depth
        if bool(here.any()):
            logits = stream.logits(cursor if bool(here.all()) else cursor.select(here))
            for row, one in zip(rows[here].tolist(), logits, strict=True):
                found[row] = one
            if bool(here.all()):
                return torch.stack([one for one in found if one is not None])
            cursor, rows = cursor.select(~here), rows[~here]
        cursor = stream.step(cursor)


class ClassifyServer:
    """Serves a classifier of texts or images; `app` is the ASGI application."""

    def __init__(
        self,
        menu: Menu,
        classifier: Classifier,
        read: Callable[[str], Any],
        *,
        depth: int | None = None,
        labels: Mapping[int, str] | None = None,
        key: str | None = None,
        largest: int = 2**24,
    ) -> None:
        self.menu, self.classifier, self._read = menu, classifier, read
        self._depth, self._labels = menu.depth if depth is None else depth, labels or {}
        self._meter = Meter(menu, classifier)
        self.app = application(classifier, self._meter, menu, key=key, largest=largest)
        self.app.post("/v1/classify")(self.classify)

    async def classify(self, body: Classify) -> dict[str, Any]:
        depth = self.menu.depth_of(body.model, body.depth)
        depth = self._depth if depth is None else depth
        self.classifier.stream.check_depth(depth, lowest=1)
        policy = self.menu.policy_of(body.policy)
        if policy is not None and (body.depth is not None or "@" in body.model):
            raise BatchError(
                f"policy {body.policy!r} and depth {depth}: a policy chooses the depth; send one"
            )
        inputs = [body.input] if isinstance(body.input, str) else body.input
        begin = time.monotonic()
        rows = await asyncio.to_thread(lambda: [self._read(one) for one in inputs])
        answers = await self.classifier.run(rows, depth, policy)
        for answer in answers:
            self._meter.ended(time.monotonic() - begin, answer.depth, 0, "stop")
        return {
            "object": "list",
            "model": body.model,
            "data": [
                {
                    "index": i,
                    "class": answer.label,
                    "label": self._labels.get(answer.label, str(answer.label)),
                    "probability": answer.probability,
                    "depth": answer.depth,
                }
                for i, answer in enumerate(answers)
            ],
        }


def reads_text(tokenizer: Any, positions: int | None) -> tuple[Callable[[str], Any], Any]:
    """Functions that convert a text to a row, and rows to a batch."""

    def read(text: str) -> list[int]:
        ids = list(tokenizer(text)["input_ids"])
        if not ids or (positions is not None and len(ids) > positions):
            raise BatchError(
                f"the text has {len(ids)} tokens; send 1 to {positions or 'as many as you like'}"
            )
        return ids

    def batch(rows: Sequence[list[int]]) -> Mapping[str, Tensor]:
        return dict(tokenizer.pad({"input_ids": list(rows)}, return_tensors="pt"))

    return read, batch


def reads_pictures(config: Any, folder: Path) -> tuple[Callable[[str], Any], Any]:
    """Like `reads_text` for images, with the preprocessing saved next to the model."""
    file = folder / "preprocessor_config.json"
    preprocessing = read_json(file) if file.is_file() else {}
    lens = Lens.of(config, preprocessing if isinstance(preprocessing, dict) else {})

    def read(text: str) -> Tensor:
        body = text.partition(",")[2] if text.startswith("data:") else text
        try:
            content = base64.b64decode(body, validate=True)
        except ValueError as error:  # also for characters that are not ASCII
            raise DataError(f"the image is not base64 ({error}); encode its file") from error
        return lens.look(decoded(content))

    def batch(rows: Sequence[Tensor]) -> Mapping[str, Tensor]:
        return {"pixel_values": lens.normalized(torch.stack(list(rows)))}

    return read, batch
