"""Metrics of the server, for Prometheus and as Results."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from everydepth.serving.engine import Backend
from everydepth.serving.names import Menu
from everydepth.serving.seen import Answered, LoadResult, answered

RECENT, WINDOW = 4096, 300.0  # how far `results` looks back, in requests and seconds
SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class Meter:
    """Counts requests and latencies; `text()` is the answer of /metrics."""

    def __init__(self, menu: Menu, engine: Backend) -> None:
        self._registry = CollectorRegistry()
        self._model = model = menu.name
        self._quality = menu.quality
        self._latency = self._histogram("request_seconds", "From arrival to the last token")
        self._wait = self._histogram("first_token_seconds", "From arrival to the first token")
        self._finished = Counter(
            "everydepth_finished",
            "Finished requests by depth and reason",
            ("model", "depth", "reason"),
            registry=self._registry,
        )
        self._tokens = Counter(
            "everydepth_generated_tokens",
            "Generated tokens by depth",
            ("model", "depth"),
            registry=self._registry,
        )
        self._registry.register(_Facts(model, engine))  # pyright: ignore[reportArgumentType]
        self._engine = engine
        self._recent: deque[Answered] = deque(maxlen=RECENT)
        self._since = time.monotonic()

    def first(self, seconds: float) -> None:
        self._wait.labels(self._model).observe(seconds)

    def ended(
        self, seconds: float, depth: int, tokens: int, reason: str, first: float | None = None
    ) -> None:
        now, first = time.monotonic(), seconds if first is None else first
        self._recent.append(
            Answered(at=now, seconds=seconds, first=first, depth=depth, tokens=tokens)
        )
        self._latency.labels(self._model).observe(seconds)
        self._finished.labels(self._model, str(depth), reason).inc()
        self._tokens.labels(self._model, str(depth)).inc(tokens)

    def results(self) -> LoadResult:
        """Latencies and depths of recent requests, and the engine's current state."""
        now = time.monotonic()
        recent = [one for one in self._recent if one.at > now - WINDOW]
        begin = max(self._since, now - WINDOW)
        if len(self._recent) == RECENT:  # older requests were dropped
            begin = max(begin, self._recent[0].at)
        facts = {k: v for k, v in self._engine.facts.items() if not k.endswith("_total")}
        return answered(recent, now - begin, quality=self._quality, facts=facts, curves=True)

    def text(self) -> bytes:
        return generate_latest(self._registry)

    def _histogram(self, name: str, about: str) -> Histogram:
        return Histogram(
            f"everydepth_{name}", about, ("model",), buckets=SECONDS, registry=self._registry
        )


class _Facts:
    """The engine's numbers, read at every scrape."""

    def __init__(self, model: str, engine: Backend) -> None:
        self._model, self._engine = model, engine

    def collect(self) -> Iterator[Metric]:
        for name, value in self._engine.facts.items():
            family = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
            metric = family(f"everydepth_engine_{name}", name.replace("_", " "), labels=["model"])
            metric.add_metric([self._model], value)
            yield metric
