"""Serve with llama.cpp: each depth is a GGUF file in its own llama.cpp server."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from everydepth.engines.llama_cpp import check_installed
from everydepth.engines.llama_worker import parameters
from everydepth.exits.export import export
from everydepth.serving.governor import Governor
from everydepth.serving.request import Request
from everydepth.serving.upstream import Rung, Tokens, Upstream, events
from everydepth.stream import ResidualStream, unwrapped

LONGEST = 4096  # most tokens of a request, for models without a lower limit
QUIET = -1  # verbosity of llama.cpp's log


class LlamaCpp(Upstream):
    """Depths exported as GGUF files; llama.cpp's server batches the requests of each.

    places: the most requests that run at once per depth.
    """

    def __init__(
        self,
        stream: ResidualStream,
        depths: Sequence[int],
        tokenizer: Any,
        *,
        places: int = 8,
        governor: Governor | None = None,
    ) -> None:
        check_installed()
        rungs = {depth: Rung("", f"rung-{depth}") for depth in depths}
        super().__init__(stream, rungs, governor=governor, places=places, speaks=completion)
        self._tokenizer = tokenizer

    def start(self) -> None:
        engine: Any = import_module("xllamacpp")
        model = unwrapped(self.stream.model)
        with ExitStack() as stack:
            place = Path(stack.enter_context(TemporaryDirectory(prefix="everydepth-rungs-")))
            for depth, rung in self.rungs.items():
                folder = export(
                    model, place / rung.model, depth=depth, format="gguf", tokenizer=self._tokenizer
                )
                (file,) = folder.glob("*.gguf")
                context = self.places * min(self.stream.positions or LONGEST, LONGEST)
                asked = parameters(str(file), context=context, threads=torch.get_num_threads())
                asked.n_parallel, asked.verbosity = self.places, QUIET
                servers = [engine.Server(asked)]
                rung.url = servers[0].listening_address
                stack.callback(servers.clear)  # a server ends with its last reference
            self._held = stack.pop_all()
        super().start()


async def completion(rung: Rung, request: Request) -> AsyncGenerator[Tokens, None]:
    """Ask llama.cpp's own route, which returns token ids.

    Not streamed: for a character made of several tokens, it would send only the last one.
    """
    sampling = request.sampling
    body = {
        "prompt": list(request.prompt),
        "n_predict": request.max_tokens,
        "temperature": sampling.temperature if sampling.do_sample else 0,
        "top_p": sampling.top_p or 1.0,
        "top_k": sampling.top_k or 0,
        "min_p": 0.0,
        "seed": -1 if request.seed is None else request.seed,
        "return_tokens": True,
    }
    async for found in events(rung, "/completion", body):
        yield tuple(found["tokens"]), "stop" if found["stop_type"] == "eos" else "length"
