"""Settings of the server, shown by the command line as they are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from everydepth.config import Config, setting


@dataclass(frozen=True, kw_only=True)
class ServeConfig(Config):
    """How a server takes requests, and how deep they go."""

    title: ClassVar[str] = "Serving"

    places: int = setting(16, least=1, most=4096, help="Requests that are worked on at once.")
    queue: int = setting(
        4096, least=1, help="Requests that may wait; further ones are told to come again (503)."
    )
    depth: int | None = setting(
        None, least=1, help="The depth of requests that name none; by default the last."
    )
    target: float | None = setting(
        None,
        above=0,
        help="Seconds within which 95 of 100 requests should end: under load the governor then "
        "chooses shallower depths.",
    )
    floor: float | None = setting(
        None, help="The least quality (as in the profile) that the governor may choose."
    )
    engine: str = setting(
        "embedded",
        choices=("embedded", "vllm"),
        help="Who decodes: everydepth itself, all depths in one set of weights; or vLLM, a server "
        "for each of --rungs.",
    )
    rungs: str | None = setting(
        None, help="With --engine vllm: the depths to serve, like 4,8,12; by default half and all."
    )
    vllm: str = setting("vllm", help="The vllm command, usually of an environment of its own.")
    largest: int = setting(2**20, least=1024, help="Most bytes of a request's body.")
