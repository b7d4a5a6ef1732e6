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
    largest: int = setting(2**20, least=1024, help="Most bytes of a request's body.")
