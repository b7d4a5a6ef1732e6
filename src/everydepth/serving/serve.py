"""From a model on the disk to a running server."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from everydepth.config import checked
from everydepth.errors import SettingError
from everydepth.exits.policies import Policy
from everydepth.exits.profile import Profile
from everydepth.serving.config import ServeConfig
from everydepth.serving.governor import Deadline, Fixed, Governor, Speed
from everydepth.serving.names import Menu
from everydepth.serving.scheduler import Scheduler
from everydepth.serving.shared import extra_blocks
from everydepth.serving.simulation import LoadResult, price_of, read_load, simulate
from everydepth.stream import ResidualStream, as_stream

if TYPE_CHECKING:
    from fastapi import FastAPI
    from torch import nn

    from everydepth.serving.engine import Engine

HOST, PORT = "127.0.0.1", 8000


def check_installed() -> None:
    """An error that says which extra is missing."""
    from importlib.util import find_spec

    missing = [name for name in ("fastapi", "prometheus_client", "uvicorn") if not find_spec(name)]
    if missing:
        raise SettingError(
            f"the server needs {', '.join(missing)}; install the extra: "
            "pip install 'everydepth[serve]'"
        )


@dataclass(frozen=True, kw_only=True)
class Served:
    """What is served: a model, what belongs to it, and what is known of its depths."""

    name: str
    model: nn.Module | ResidualStream
    tokenizer: Any = None
    folder: Path = Path()
    policies: Mapping[str, Policy] = field(default_factory=dict[str, Policy])
    profile: Profile | None = None
    certificate: Policy | None = None


def governor_of(
    config: ServeConfig,
    menu: Menu,
    certified: int | None = None,
    depths: Sequence[int] | None = None,
) -> Governor:
    """Who decides how deep requests go that do not say.

    Never below the `certified` depth, and among `depths`, by default all.
    """
    depths = menu.depths if depths is None else depths
    last = _deepest(config, menu, depths)
    if config.target is not None and config.speed is not None:
        raise SettingError(f"--target {config.target} and --speed {config.speed}; give one of them")
    if config.target is None and config.speed is None:
        bounds = {"floor": config.floor, "certificate": certified}
        given = ", ".join(f"{name} {value}" for name, value in bounds.items() if value is not None)
        if given:
            raise SettingError(f"{given}: it bounds the governor; give --target or --speed, too")
        return Fixed(last)
    good = depths if config.floor is None else menu.above(config.floor, depths)
    allowed = [depth for depth in good if (certified or 1) <= depth <= last]
    if not allowed:
        raise SettingError(
            f"the floor allows depths {', '.join(map(str, good))}, the certificate "
            f"{certified or 1} and deeper, --depth {last} and shallower: no depth is left; lower "
            "the floor, or raise --depth"
        )
    if config.speed is not None:
        return Speed(config.speed, allowed)
    assert config.target is not None
    return Deadline(config.target, allowed)


def _deepest(config: ServeConfig, menu: Menu, depths: Sequence[int]) -> int:
    """The depth of requests that name none, when nothing presses."""
    if config.depth is None:
        return max(depths)
    if config.depth not in depths:
        known = f"{min(depths)} to {max(depths)}"
        if len(depths) <= max(depths) - min(depths):
            known = ", ".join(map(str, depths))
        raise SettingError(f"depth {config.depth}, but {menu.name} is served at {known}")
    return config.depth


@checked
def application(
    served: Served, config: ServeConfig | None = None, *, key: str | None = None
) -> FastAPI:
    """The ASGI application of a model, for uvicorn or any other server.

    >>> from everydepth.serving import Served, application
    >>> app = application(Served(name="tiny", model=llama, tokenizer=tokenizer))
    >>> from fastapi.testclient import TestClient
    >>> with TestClient(app) as client:
    ...     body = {"model": "tiny@2", "prompt": "Once", "max_tokens": 3}
    ...     answer = client.post("/v1/completions", json=body).json()
    >>> answer["choices"][0]["depth"], answer["usage"]["completion_tokens"]
    (2, 3)
    """
    check_installed()
    config = config or ServeConfig()
    stream = as_stream(served.model)
    menu = Menu(
        name=served.name, depth=stream.depth, policies=served.policies, profile=served.profile
    )
    if "@" in served.name or not served.name:
        raise SettingError(f"a model called {served.name!r}; choose a name without @")
    if stream.task == "causal_lm":
        return _language(served, stream, menu, config, key)
    if stream.task == "classification":
        return _classifier(served, stream, menu, config, key)
    raise SettingError(
        f"{stream.name} predicts {stream.task}; the server takes causal language models and "
        "classifiers"
    )


def _language(
    served: Served, stream: ResidualStream, menu: Menu, config: ServeConfig, key: str | None
) -> FastAPI:
    from everydepth.exits.generation.request import check_model
    from everydepth.serving.http import Server

    check_model(stream)
    if served.tokenizer is None:
        raise SettingError(f"{served.name} needs its tokenizer; save one beside the model")
    return Server(
        menu,
        _engine(served, stream, menu, config),
        served.tokenizer,
        ends=stream.end_tokens,
        positions=stream.positions,
        key=key,
        largest=config.largest,
    ).app


def _certified(certificate: Policy | None, stream: ResidualStream) -> int | None:
    from everydepth.exits.certify import certified_depth

    return None if certificate is None else certified_depth(certificate, stream)


def _engine(served: Served, stream: ResidualStream, menu: Menu, config: ServeConfig) -> Engine:
    certified = _certified(served.certificate, stream)
    if config.engine == "embedded":
        if config.rungs is not None:
            raise SettingError("--rungs are for other engines; the embedded one has all depths")
        from everydepth.serving.engine import Embedded

        governor = governor_of(config, menu, certified, _trained(stream))
        price = price_of(menu.profile, extra_blocks(stream))
        scheduler = Scheduler(
            stream, governor=governor, places=config.places, queue=config.queue, price=price
        )
        return Embedded(scheduler, packed=config.packed)
    depths = chosen_rungs(config.rungs, stream.depth)
    governor = governor_of(config, menu, certified, depths)
    if config.engine == "llama.cpp":
        from everydepth.serving.llama_cpp import LlamaCpp

        places = config.places
        return LlamaCpp(stream, depths, served.tokenizer, places=places, governor=governor)
    from everydepth.serving.vllm import Vllm

    return Vllm(stream, depths, served.tokenizer, program=config.vllm, governor=governor)


def _trained(stream: ResidualStream) -> Sequence[int]:
    """The depths that a governor may choose from: where there are balconies, only those."""
    return (*stream.exits, stream.depth) if stream.exits else range(1, stream.depth + 1)


def chosen_rungs(text: str | None, depth: int) -> list[int]:
    """Depths from 4,8,12; without a text half of them and all.

    >>> from everydepth.serving.serve import chosen_rungs
    >>> chosen_rungs("2,6", 6), chosen_rungs(None, 6)
    ([2, 6], [3, 6])
    """
    if text is None:
        return sorted({max(1, depth // 2), depth})
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and 1 <= int(part) <= depth for part in parts):
        raise SettingError(f"--rungs {text}; write depths from 1 to {depth}, like 1,{depth}")
    return sorted({int(part) for part in parts})


def _classifier(
    served: Served, stream: ResidualStream, menu: Menu, config: ServeConfig, key: str | None
) -> FastAPI:
    from everydepth.serving.classify import (
        Classifier,
        ClassifyServer,
        reads_pictures,
        reads_text,
    )

    given = ("target", "speed", "floor", "rungs")
    wrong = [f"--{name}" for name in given if getattr(config, name) is not None]
    wrong += ["--certificate"] if served.certificate is not None else []
    wrong += ["--engine"] if config.engine != "embedded" else []
    if wrong:
        raise SettingError(
            f"{', '.join(wrong)}: for language models; requests of a classifier like {served.name} "
            "name their depth or a policy"
        )
    settings = getattr(stream.model, "config", None)
    if "pixel_values" in stream.inputs:
        read, batch = reads_pictures(settings, served.folder)
    elif served.tokenizer is None:
        raise SettingError(f"{served.name} needs its tokenizer; save one beside the model")
    else:
        read, batch = reads_text(served.tokenizer, _longest(stream, settings, served.tokenizer))
    labels = getattr(settings, "id2label", None)
    classifier = Classifier(stream, batch, places=config.places, queue=config.queue)
    return ClassifyServer(
        menu,
        classifier,
        read,
        depth=_deepest(config, menu, menu.depths),
        labels=labels,
        key=key,
        largest=max(config.largest, 2**24),
    ).app


def _longest(stream: ResidualStream, settings: Any, tokenizer: Any) -> int | None:
    """Tokens of a text at most: what model and tokenizer say, the least of it."""
    said = (
        stream.positions,
        getattr(settings, "max_position_embeddings", None),
        getattr(tokenizer, "model_max_length", None),
    )
    return min((n for n in said if isinstance(n, int) and n > 0), default=None)


def simulated(
    stream: ResidualStream,
    load: Path,
    profile: Profile | None,
    config: ServeConfig,
    certificate: Policy | None = None,
) -> LoadResult:
    """What the load in a file would see of this server."""
    price = price_of(profile, extra_blocks(stream))
    if profile is None or price is None:
        raise SettingError(
            "a simulation needs to know what a token costs: give --profile of a causal language "
            "model, made with two texts or more on the machine that will serve: everydepth "
            "profile MODEL --data ..."
        )
    menu = Menu(name=stream.name, depth=stream.depth, profile=profile)
    return simulate(
        stream,
        read_load(load),
        price,
        governor=governor_of(config, menu, _certified(certificate, stream), _trained(stream)),
        places=config.places,
        quality=menu.quality,
    )


def bound(host: str, port: int) -> socket.socket:
    """A socket that listens, so that the address can be told before the first request."""
    found = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        found.bind((host, port))
        found.listen(2048)
    except OSError as error:
        found.close()
        raise SettingError(
            f"port {port} of {host} cannot be had ({error.strerror}); stop what is there, or "
            "choose another with --port"
        ) from error
    return found


def run(app: FastAPI, sock: socket.socket) -> None:
    """Answer until a signal comes; what runs then may end."""
    import uvicorn

    config = uvicorn.Config(
        app, log_level="warning", timeout_graceful_shutdown=30, timeout_keep_alive=30
    )
    uvicorn.Server(config).run(sockets=[sock])
