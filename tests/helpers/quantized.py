"""A model quantized by torchao, through the verbs; a process of its own (`python -m`)."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from tests.zoo import ENTRIES
from torchao.quantization import Int8WeightOnlyConfig, quantize_

import everydepth as ed
from everydepth.errors import UnsupportedModelError


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    model, batch = ENTRIES["Llama-untied-CausalLM-left"].make()
    quantize_(model, Int8WeightOnlyConfig())
    asked = {**batch, "labels": batch["input_ids"]}
    with torch.no_grad():
        states = ed.as_stream(model).observe(batch)
        assert torch.equal(states.logits(4), model(**batch).logits)
        cut = ed.at_depth(model, 2)(**batch).logits
        torch.testing.assert_close(cut, states.logits(2), rtol=1e-4, atol=1e-5)
    report = ed.check_stream(model, batch)
    assert report.ok, str(report)
    found = ed.trace(model, [asked], metrics=["loss", "weight_std"], progress=False)
    assert found["loss"].shape == (5,)
    assert len(ed.profile(model, [asked], repeats=1).depths) == 4
    prompt = batch["input_ids"][:1]
    plain = ed.generate(model, prompt, max_new_tokens=3)
    assert plain.tokens == ed.generate(model, prompt, max_new_tokens=3, draft_depth=1).tokens
    for act in (
        lambda: ed.insert(model, after=2),
        lambda: ed.export(model, folder / "cut", depth=2),
        lambda: ed.fit(model, [asked], epochs=1, progress=False),
    ):
        said = "nothing"
        try:
            act()
        except UnsupportedModelError as error:
            said = str(error)
        assert "needs plain weights, but LlamaForCausalLM has quantized ones" in said, said
    assert not (folder / "cut").exists()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
