"""The process in which llama.cpp runs: a question on its input, the answer on its output."""

from __future__ import annotations

import json
import os
import sys
from importlib import import_module
from typing import Any


def parameters(path: str, *, context: int, threads: int = 1) -> Any:
    """llama.cpp on the CPU, with the file as it is and exact keys and values."""
    engine: Any = import_module("xllamacpp")
    found = engine.CommonParams()
    found.model.path = path
    found.n_ctx = context
    found.n_parallel = 1
    found.n_gpu_layers = 0
    found.cpuparams.n_threads = threads
    found.cpuparams_batch.n_threads = threads
    found.warmup = False
    found.no_extra_bufts = True  # no second copy of the weights in another order
    found.cache_type_k = engine.ggml_type.GGML_TYPE_F32
    found.cache_type_v = engine.ggml_type.GGML_TYPE_F32
    found.flash_attn_type = engine.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    return found


def answer(asked: dict[str, Any]) -> list[list[list[dict[str, Any]]]]:
    """For each file and prompt the steps of its continuation."""
    engine: Any = import_module("xllamacpp")
    longest = max(map(len, asked["prompts"])) + asked["tokens"]
    answers: list[list[list[dict[str, Any]]]] = []
    for path in asked["paths"]:
        server = engine.Server(parameters(path, context=longest + 8))
        answers.append([_continued(server, prompt, asked) for prompt in asked["prompts"]])
    return answers


def _continued(server: Any, prompt: list[int], asked: dict[str, Any]) -> list[dict[str, Any]]:
    request = {
        "prompt": prompt,
        "n_predict": asked["tokens"],
        "temperature": 0,
        "n_probs": asked["top"],
        "cache_prompt": False,
    }
    found = server.handle_completions(request)
    if "choices" not in found:
        raise RuntimeError(f"no answer: {found}")
    return [_step(step) for step in found["choices"][0]["logprobs"]["content"]]


def _step(found: dict[str, Any]) -> dict[str, Any]:
    top = [(entry["id"], entry["logprob"]) for entry in found["top_logprobs"]]
    return {"token": found["id"], "top": top}


if __name__ == "__main__":
    # Whatever llama.cpp prints goes to the log; the answer alone goes to the output.
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    print(json.dumps(answer(json.load(sys.stdin))), file=output, flush=True)
