"""In the environment of onnxruntime-genai: greedy decoding with a folder of its builder."""

# pyright: basic, reportMissingImports=false

import json
import sys
import time
from importlib.metadata import version

import onnxruntime_genai as genai

ONE_THREAD = {"intra_op_num_threads": 1}


def decoded(folder, prompt, new):
    config = genai.Config(folder)
    config.overlay(json.dumps({"model": {"decoder": {"session_options": ONE_THREAD}}}))
    model = genai.Model(config)
    settings = genai.GeneratorParams(model)
    settings.set_search_options(do_sample=False, max_length=len(prompt) + new)
    generator = genai.Generator(model, settings)
    began = time.process_time()
    generator.append_tokens(prompt)
    while not generator.is_done():
        generator.generate_next_token()
    seconds = time.process_time() - began
    tokens = [int(token) for token in generator.get_sequence(0)][len(prompt) :]
    return tokens, len(tokens) / seconds


def main():
    asked = json.load(sys.stdin)
    answer = {name: version(name) for name in ("onnxruntime-genai", "onnxruntime", "transformers")}
    found = [decoded(asked["folder"], asked["prompt"], asked["new"]) for _ in range(3)]
    best = max(speed for _, speed in found)
    print(json.dumps({"versions": answer, "tokens": found[0][0], "tokens a second": best}))


main()
