"""Settings of the server, shown by the command line as they are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from everydepth.config import Config, setting


@dataclass(frozen=True, kw_only=True)
class ServeConfig(Config):
    """How a server takes requests, and how deep they go."""

    title: ClassVar[str] = "Serving"

    places: int = setting(16, least=1, most=4096, help="Requests processed at once.")
    queue: int = setting(
        4096, least=1, help="Requests that may wait; further ones are told to retry (503)."
    )
    depth: int | None = setting(
        None, least=1, help="The depth of requests that name none; by default the last."
    )
    target: float | None = setting(
        None,
        above=0,
        help="Seconds in which 95 % of requests should finish: under load the governor then "
        "chooses shallower depths.",
    )
    speed: float | None = setting(
        None,
        above=0,
        help="Tokens a second that 95 of 100 requests should get; instead of --target.",
    )
    floor: float | None = setting(
        None, help="The least quality (as in the profile) that the governor may choose."
    )
    engine: str = setting(
        "embedded",
        choices=("embedded", "vllm", "llama.cpp"),
        help="Who decodes: everydepth itself, all depths in one set of weights; or vLLM or "
        "llama.cpp, a server for each of --rungs.",
    )
    rungs: str | None = setting(
        None, help="With another engine: the depths to serve, like 4,8,12; by default half and all."
    )
    vllm: str = setting(
        "vllm", help="The vllm command of an environment of its own, or that environment's python."
    )
    ray: bool = setting(
        False, help="Replicas behind one address, on this machine or a cluster: Ray Serve."
    )
    replicas: str = setting(
        "1", help="With --ray: how many, like 2; or like 1-8, as many as the requests need."
    )
    packed: bool = setting(
        True,
        help="On a CPU, keep a second copy of large linear maps in the order in which they are "
        "multiplied fastest: more speed, and twice the memory.",
    )
    largest: int = setting(2**20, least=1024, help="Largest request body, in bytes.")
