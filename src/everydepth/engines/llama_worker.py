"""The process that runs llama.cpp: reads a question from stdin, writes the answer to stdout."""

from __future__ import annotations

import json
import os
import sys
from importlib import import_module
from typing import Any
from urllib.request import Request, urlopen


def parameters(path: str, *, context: int, threads: int = 1) -> Any:
    """Settings of llama.cpp: on the CPU, with unmodified weights and float32 keys and values."""
    engine: Any = import_module("xllamacpp")
    found = engine.CommonParams()
    found.model.path = path
    found.n_ctx = context
    found.n_parallel = 1
    found.n_gpu_layers = 0
    found.cpuparams.n_threads = threads
    found.cpuparams_batch.n_threads = threads
    found.warmup = False
    found.no_extra_bufts = True  # no second, reordered copy of the weights
    found.cache_type_k = engine.ggml_type.GGML_TYPE_F32
    found.cache_type_v = engine.ggml_type.GGML_TYPE_F32
    found.flash_attn_type = engine.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    return found


# A server that is freed while it still starts deadlocks, so none is ever freed.
_servers: list[Any] = []


def answer(asked: dict[str, Any]) -> Any:
    """The steps of the continuation for each file and prompt; or the tokens of texts."""
    if "texts" in asked:
        server = _server(asked["paths"][0], 64)
        return [_tokens(server, text) for text in asked["texts"]]
    longest = max(map(len, asked["prompts"])) + asked["tokens"]
    answers: list[list[list[dict[str, Any]]]] = []
    for path in asked["paths"]:
        server = _server(path, longest + 8)
        answers.append([_continued(server, prompt, asked) for prompt in asked["prompts"]])
    return answers


def _server(path: str, context: int) -> Any:
    engine: Any = import_module("xllamacpp")
    _servers.append(engine.Server(parameters(path, context=context)))
    return _servers[-1]


def _continued(server: Any, prompt: list[int], asked: dict[str, Any]) -> list[dict[str, Any]]:
    """The steps of a continuation, one request each.

    For a token that is half a character, the server reports no probabilities. So its sampling is
    biased to the token `stop`, which is not text; the reported distribution is the model's own.
    """
    steps: list[dict[str, Any]] = []
    for _ in range(asked["tokens"]):
        request = {
            "prompt": [*prompt, *(step["token"] for step in steps)],
            "n_predict": 1,
            "temperature": 0,
            "n_probs": asked["top"],
            "logit_bias": [[asked["stop"], 1e6]],
            "cache_prompt": True,
        }
        found = server.handle_completions(request)
        if "choices" not in found:
            raise RuntimeError(f"no answer: {found}")
        (step,) = found["choices"][0]["logprobs"]["content"]
        top = [(entry["id"], entry["logprob"]) for entry in step["top_logprobs"]]
        steps.append({"token": top[0][0], "top": top})
    return steps


def _tokens(server: Any, text: str) -> list[int]:
    # The binding has no function for this, but its server listens on a local port.
    body = json.dumps({"content": text, "add_special": True}).encode()
    headers = {"Content-Type": "application/json"}
    request = Request(f"{server.listening_address}/tokenize", body, headers)
    with urlopen(request, timeout=60) as response:
        return json.load(response)["tokens"]


if __name__ == "__main__":
    # Whatever llama.cpp prints goes to stderr; only the answer goes to stdout.
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    print(json.dumps(answer(json.load(sys.stdin))), file=output, flush=True)
    os._exit(0)
