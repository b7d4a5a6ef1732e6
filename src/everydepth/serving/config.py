"""Settings of the server, which are also its command line options."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from everydepth.config import Config, setting


@dataclass(frozen=True, kw_only=True)
class ServeConfig(Config):
    """How a server handles requests, and at which depth."""

    title: ClassVar[str] = "Serving"

    places: int = setting(16, least=1, most=4096, help="Requests processed at once.")
    queue: int = setting(
        4096, least=1, help="Requests that may wait; others are told to retry (503)."
    )
    depth: int | None = setting(
        None, least=1, help="Depth of requests that do not set one; by default the last."
    )
    target: float | None = setting(
        None,
        above=0,
        help="Seconds in which 95% of requests should finish; under load, the governor chooses "
        "shallower depths.",
    )
    speed: float | None = setting(
        None,
        above=0,
        help="Instead of --target: tokens per second that 95% of requests should get.",
    )
    floor: float | None = setting(
        None, help="The lowest quality (see --profile) that the governor may choose."
    )
    engine: str = setting(
        "embedded",
        choices=("embedded", "vllm", "llama.cpp"),
        help="The decoding engine: everydepth itself, with all depths in one set of weights; or "
        "vLLM or llama.cpp, with one server for each of --rungs.",
    )
    rungs: str | None = setting(
        None, help="With another engine: depths to serve, like 4,8,12; by default half and all."
    )
    vllm: str = setting(
        "vllm", help="The vllm command, usually in its own environment, or its python."
    )
    ray: bool = setting(
        False, help="Run replicas behind one address with Ray Serve, here or on a cluster."
    )
    replicas: str = setting(
        "1", help="With --ray: their number, like 2, or a range to scale with the load, like 1-8."
    )
    packed: bool = setting(
        True,
        help="On a CPU, keep a second copy of large linear maps in a layout that multiplies "
        "faster, for twice the memory.",
    )
    largest: int = setting(2**20, least=1024, help="Largest request body, in bytes.")
