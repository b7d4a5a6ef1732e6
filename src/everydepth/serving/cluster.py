"""Several replicas of a server behind one address, on one machine or many, with Ray Serve."""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from everydepth.environment import require
from everydepth.errors import RunError, SettingError
from everydepth.serving.recipe import Recipe
from everydepth.serving.retry import Retrying

APPLICATION = "everydepth"
# Ray's proxy asks this function for what to put around it.
PROXY_VARIABLE, PROXY = "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH", f"{__name__}:around_proxy"
PATIENCE = 60.0  # seconds for a replaced replica to finish its requests


def around_proxy() -> list[Any]:
    """Called by Ray's HTTP proxy: requests of a dead replica get another one (see `Retrying`)."""
    from starlette.middleware import Middleware

    return [Middleware(Retrying)]


def replica_counts(text: str) -> tuple[int, int]:
    """The minimum and maximum number of replicas in a text like 2 or 1-8.

    >>> from everydepth.serving.cluster import replica_counts
    >>> replica_counts("2"), replica_counts("1-8")
    ((2, 2), (1, 8))
    """
    least, dash, most = text.partition("-")
    parts = (least, most if dash else least)
    if not all(part.isascii() and part.isdigit() and int(part) for part in parts):
        raise SettingError(f"--replicas {text}; write a number like 2, or a range like 1-8")
    if int(parts[0]) > int(parts[1]):
        raise SettingError(f"--replicas {text}; the range ends before it begins")
    return int(parts[0]), int(parts[1])


class Replica:
    """One replica, which builds the application where it runs."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe

    def __serve_build_asgi_app__(self) -> Any:
        return self._recipe.app()


def deployment(recipe: Recipe, replicas: str = "1", *, cpus: float = 1.0) -> Any:
    """A Ray Serve deployment of a recipe's application; call `bind(recipe)` on it.

    Every replica has its own engine. A replica gets at most twice as many requests as fit its
    batch; others wait in the router, so that no replica falls behind. With a range like 1-8, the
    number of replicas follows the load. A new deployment replaces the replicas one by one, and each
    may finish its requests.
    """
    require("--ray", "ray", "grpc_reflection", extra="serve,ray")
    from ray import serve

    least, most = replica_counts(replicas)
    places = recipe.config.places
    scale: dict[str, Any] = {"num_replicas": least}
    if least < most:
        scale = {
            "autoscaling_config": {
                "min_replicas": least,
                "max_replicas": most,
                "target_ongoing_requests": places,
            }
        }
    return serve.deployment(
        serve.ingress()(Replica),
        name=APPLICATION,
        max_ongoing_requests=2 * places,
        graceful_shutdown_timeout_s=PATIENCE,
        ray_actor_options={"num_cpus": cpus},
        **scale,
    )


@contextmanager
def cluster(
    recipe: Recipe, replicas: str, *, host: str, port: int, address: str | None = None
) -> Generator[None, None, None]:
    """Inside the context, the replicas answer at `host:port`.

    address: of a running Ray cluster, or "auto" for the one on this machine; by default a new
        cluster is started here.
    """
    found = deployment(recipe, replicas)
    import ray
    from ray import serve

    if not ray.is_initialized():
        options: dict[str, Any] = {
            "address": address,
            "log_to_driver": False,
            "runtime_env": {"env_vars": {PROXY_VARIABLE: PROXY}},
        }
        if address is None and "RAY_ADDRESS" not in os.environ:
            # "local": without it, Ray would join a cluster that happens to run here.
            # Ray's workers have low priority by default, which a server should not have.
            options |= {"address": "local", "include_dashboard": False}
            options["_system_config"] = {"worker_niceness": 0}
        ray.init(**options)
    serve.start(http_options={"host": host, "port": port, "location": "HeadOnly"})
    try:
        serve.run(found.bind(recipe), name=APPLICATION, route_prefix="/")
        yield
    finally:
        serve.shutdown()
        if address is None:
            ray.shutdown()


def restart(recipe: Recipe, replicas: str) -> None:
    """Inside `cluster`: replace every replica by a new one, without losing a request.

    If a new one does not start, that is an error, and the running ones stay.
    """
    from ray import serve

    try:
        serve.run(deployment(recipe, replicas).bind(recipe), name=APPLICATION, route_prefix="/")
    except RuntimeError as error:
        raise RunError(
            f"not every replica was replaced ({error}); the running ones stay. Try again"
        ) from error
