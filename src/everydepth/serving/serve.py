"""Build and run a server for a model."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from everydepth.config import checked
from everydepth.environment import require
from everydepth.errors import PolicyError, SettingError
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


def check_installed() -> None:
    """Raise an error if the extra `serve` is not installed."""
    require("the server", "fastapi", "prometheus_client", "uvicorn", extra="serve")


@dataclass(frozen=True, kw_only=True)
class Served:
    """A model to serve, with its tokenizer, exit policies, profile and certificate."""

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
    """The governor for requests that do not set a depth.

    It chooses among `depths` (by default all), and never below the `certified` one.
    """
    depths = menu.depths if depths is None else depths
    last = _deepest(config, menu, depths)
    if config.target is not None and config.speed is not None:
        raise SettingError(f"--target {config.target} and --speed {config.speed}; give one of them")
    if config.target is None and config.speed is None:
        bounds = {"floor": config.floor, "certificate": certified}
        given = ", ".join(f"{name} {value}" for name, value in bounds.items() if value is not None)
        if given:
            raise SettingError(f"{given} limits the governor; also give --target or --speed")
        return Fixed(last)
    good = depths if config.floor is None else menu.above(config.floor, depths)
    allowed = [depth for depth in good if (certified or 1) <= depth <= last]
    if not allowed:
        raise SettingError(
            f"the floor allows depths {', '.join(map(str, good))}, the certificate {certified or 1}"
            f" and deeper, and --depth {last} and shallower, so no depth is left; lower the floor, "
            "or raise --depth"
        )
    if config.speed is not None:
        return Speed(config.speed, allowed)
    assert config.target is not None
    return Deadline(config.target, allowed)


def _deepest(config: ServeConfig, menu: Menu, depths: Sequence[int]) -> int:
    """The depth of requests that do not set one, without load."""
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
    rungs = None
    if config.engine != "embedded":
        rungs = tuple(chosen_rungs(config.rungs, stream.depth))
    menu = Menu(
        name=served.name,
        depth=stream.depth,
        rungs=rungs,
        policies=served.policies,
        profile=served.profile,
    )
    if "@" in served.name or not served.name:
        raise SettingError(f"the model is called {served.name!r}; choose a name without @")
    for name, policy in served.policies.items():
        try:
            policy.thresholds(stream)
        except PolicyError as error:
            raise PolicyError(f"policy {name!r}: {error}") from error
    if stream.task == "causal_lm":
        return _language(served, stream, menu, config, key)
    if stream.task == "classification":
        return _classifier(served, stream, menu, config, key)
    raise SettingError(
        f"{stream.name} does {stream.task}, but the server supports only causal language models "
        "and classifiers"
    )


def _language(
    served: Served, stream: ResidualStream, menu: Menu, config: ServeConfig, key: str | None
) -> FastAPI:
    from everydepth.exits.generation.request import check_model
    from everydepth.serving.completions import Server

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
            raise SettingError(
                f"--rungs {config.rungs} is for other engines; the embedded one has all depths"
            )
        from everydepth.serving.engine import Embedded

        governor = governor_of(config, menu, certified, _trained(stream))
        price = price_of(menu.profile, extra_blocks(stream))
        scheduler = Scheduler(
            stream, governor=governor, places=config.places, queue=config.queue, price=price
        )
        return Embedded(scheduler, packed=config.packed)
    depths = menu.depths
    governor = governor_of(config, menu, certified)
    if config.engine == "llama.cpp":
        from everydepth.serving.llama_cpp import LlamaCpp

        places = config.places
        return LlamaCpp(stream, depths, served.tokenizer, places=places, governor=governor)
    from everydepth.serving.vllm import Vllm

    return Vllm(stream, depths, served.tokenizer, program=config.vllm, governor=governor)


def _trained(stream: ResidualStream) -> Sequence[int]:
    """The depths a governor may choose from; if there are balconies, only those and the last."""
    return (*stream.exits, stream.depth) if stream.exits else range(1, stream.depth + 1)


def chosen_rungs(text: str | None, depth: int) -> list[int]:
    """The depths in a text like 4,8,12; by default half and all.

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
            f"{', '.join(wrong)}: only for language models; requests to a classifier like "
            f"{served.name} set a depth or a policy"
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
    """The most tokens of a text, by the lowest limit of model and tokenizer."""
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
    """Simulate the load in a file."""
    price = price_of(profile, extra_blocks(stream))
    if profile is None or price is None:
        raise SettingError(
            "a simulation needs the cost of a token: give the --profile of a causal language "
            "model, measured with two or more texts on the machine that will serve: everydepth "
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
    """A listening socket, so that the address is known before the server runs."""
    found = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        found.bind((host, port))
        found.listen(2048)
    except OSError as error:
        found.close()
        raise SettingError(
            f"port {port} on {host} is not available ({error.strerror}); free it, or choose "
            "another with --port"
        ) from error
    return found


def run(app: FastAPI, sock: socket.socket) -> None:
    """Serve until a signal arrives; running requests may then finish."""
    import uvicorn

    config = uvicorn.Config(
        app, log_level="warning", timeout_graceful_shutdown=30, timeout_keep_alive=30
    )
    uvicorn.Server(config).run(sockets=[sock])
