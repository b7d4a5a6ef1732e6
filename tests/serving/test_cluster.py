"""Replicas behind one address."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections import Counter
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import httpx
import psutil
import pytest
from fastapi.testclient import TestClient
from tests.helpers.talking import Talker

import everydepth as ed
from everydepth.errors import RunError, SettingError
from everydepth.serving import Recipe, ServeConfig
from everydepth.serving.cluster import (
    PROXY,
    PROXY_VARIABLE,
    cluster,
    deployment,
    replica_counts,
    restart,
)
from everydepth.serving.retry import Retrying


@pytest.fixture
def recipe(talker: Talker, tmp_path: Path) -> Recipe:
    talker.model.save_pretrained(tmp_path / "talker")
    talker.tokenizer.save_pretrained(tmp_path / "talker")
    return Recipe(model=str(tmp_path / "talker"), config=ServeConfig(places=4))


def test_a_recipe_builds_the_server_it_describes(recipe: Recipe, talker: Talker) -> None:
    with TestClient(recipe.app()) as client:
        body = {"model": "talker@2", "prompt": "Once", "max_tokens": 5}
        (choice,) = client.post("/v1/completions", json=body).json()["choices"]
    said = ed.generate(talker.model, talker.ids("Once"), max_new_tokens=5, depth=2).tokens[0]
    assert choice["text"] == talker.tokenizer.decode(said, skip_special_tokens=True)
    assert choice["depth"] == 2


@pytest.mark.filterwarnings("ignore:Using extra keyword arguments on `Field`")  # in Ray's schema
def test_a_deployment_keeps_a_batch_and_a_queue_of_its_own_on_every_replica(recipe: Recipe) -> None:
    fixed = deployment(recipe, "2")
    assert (fixed.num_replicas, fixed.max_ongoing_requests) == (2, 8)
    scaled = deployment(recipe, "1-3")
    limits = scaled._deployment_config.autoscaling_config
    assert (limits.min_replicas, limits.max_replicas) == (1, 3)
    assert limits.target_ongoing_requests == recipe.config.places


@pytest.mark.filterwarnings("ignore:Using extra keyword arguments on `Field`")  # in Ray's schema
def test_rays_proxy_is_told_to_send_requests_of_a_dead_replica_again() -> None:
    from ray.serve._private import constants, http_util

    assert hasattr(constants, PROXY_VARIABLE)
    (around,) = http_util.validate_http_proxy_callback_return(resolve_name(PROXY)())
    assert around.cls is Retrying


@pytest.mark.parametrize("text", ["", "0", "two", "1-", "-3", "3-1", "1-2-3"])
def test_a_count_that_makes_no_sense_is_refused(text: str) -> None:
    with pytest.raises(SettingError, match="--replicas"):
        replica_counts(text)


@pytest.mark.filterwarnings("ignore:Using extra keyword arguments on `Field`")  # in Ray's schema
def test_replicas_that_do_not_start_are_an_error_that_ends_nothing(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise RuntimeError("Deploying application everydepth failed")  # as Ray says it

    monkeypatch.setattr("ray.serve.run", fails)
    with pytest.raises(RunError, match=r"not every .* \(Deploying .*; the running ones stay"):
        restart(recipe, "2")


class Clients:
    """Requests one after the other on several threads, until told to stop; what became of each."""

    def __init__(self, url: str, count: int) -> None:
        self.found: Counter[tuple[int, str]] = Counter()
        self._url, self._stop = url, threading.Event()
        self._threads = [threading.Thread(target=self._work) for _ in range(count)]

    def __enter__(self) -> Clients:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        body = {"model": "talker@3", "prompt": "Once", "max_tokens": 8}
        with httpx.Client(timeout=120) as client:
            while not self._stop.is_set():
                answer = client.post(f"{self._url}/v1/completions", json=body)
                good = answer.status_code == 200
                text = answer.json()["choices"][0]["text"] if good else ""
                self.found[answer.status_code, text] += 1

    def wait_for(self, more: int) -> None:
        goal = sum(self.found.values()) + more
        while sum(self.found.values()) < goal:
            time.sleep(0.1)


def replicas() -> set[int]:
    """Processes of replicas that this one has started."""
    family = psutil.Process().children(recursive=True)
    found: set[int] = set()
    for one in family:
        try:
            if any(part.startswith("ray::ServeReplica") for part in one.cmdline()):
                found.add(one.pid)
        except psutil.Error:
            continue
    return found


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # Ray's own
def test_replicas_are_killed_and_restarted_under_load_and_the_others_answer(
    recipe: Recipe, talker: Talker
) -> None:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    said = ed.generate(talker.model, talker.ids("Once"), max_new_tokens=8, depth=3).tokens[0]
    right = 200, talker.tokenizer.decode(said, skip_special_tokens=True)
    with cluster(recipe, "2", host="127.0.0.1", port=port):
        first = replicas()
        assert len(first) == 2
        with Clients(url, 4) as clients:
            clients.wait_for(20)
            restart(recipe, "2")
            clients.wait_for(20)
        assert set(clients.found) == {right}  # a rolling restart loses nothing
        second = replicas()
        assert len(second) == 2
        assert not first & second
        with Clients(url, 4) as clients:
            clients.wait_for(10)
            os.kill(min(second), signal.SIGKILL)
            clients.wait_for(40)
        assert set(clients.found) == {right}  # those of the dead replica were sent to the other
        assert httpx.get(f"{url}/ready").status_code == 200
    assert not replicas()
