"""Runs for the playground, made in a second: real models, trained for one step or not at all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, ViTConfig, ViTForImageClassification

from everydepth.app.content import SURFACE, WAYS, surface_folder
from everydepth.app.tales import tales
from everydepth.architectures.residual_mlp import ResidualMLP, ResidualMLPConfig
from everydepth.data import load_digits, surface_data, token_blocks
from everydepth.data.byte_tokens import byte_tokenizer
from everydepth.runs import Run
from everydepth.tracing import trace

HOSTILE = "</script><script>window.harmed = true</script><img src=x onerror='window.harmed = true'>"


def classifier(*, blocks: int = 3, labels: tuple[str, ...] | None = None) -> Any:
    torch.manual_seed(0)
    named = {} if labels is None else {"id2label": dict(enumerate(labels))}
    config = ViTConfig(
        image_size=8,
        patch_size=4,
        num_channels=1,
        num_labels=10 if labels is None else len(labels),
        hidden_size=16,
        num_hidden_layers=blocks,
        num_attention_heads=2,
        intermediate_size=16,
        **named,
    )
    model: Any = ViTForImageClassification(config)
    # So that depths differ: freshly initialized, the blocks add next to nothing.
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(6)
    return model.eval()


def speaker(vocabulary: int, *, blocks: int = 3) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=blocks,
        num_attention_heads=2,
        max_position_embeddings=128,
        eos_token_id=0,
        bos_token_id=0,
        pad_token_id=0,
    )
    model: Any = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(6)
    return model.eval()


def save_run(folder: Path, model: Any, *, data: Any = None, **config: Any) -> Path:
    """A run directory as `fit` leaves it."""
    run = Run.create(folder, {"model": "tiny", **config})
    run.log({"step": 1, "loss": 2.0})
    run.log({"step": 2, "loss": 1.0})
    run.write_results({"steps": 2})
    model.save_pretrained(folder / "model")
    if data is not None:
        trace(model, data, progress=False).save(folder / "trace")
    return folder


def save_language_run(folder: Path) -> Path:
    texts = tales(60)
    folder.parent.mkdir(parents=True, exist_ok=True)
    tokenizer = byte_tokenizer(texts).backend_tokenizer
    tokenizer.save(str(folder.parent / "tokenizer.json"))
    ids = [i for line in tokenizer.encode_batch(texts[:8]) for i in line.ids]
    model = speaker(tokenizer.get_vocab_size())
    save_run(folder, model, data=token_blocks(ids, 32))
    (folder.parent / "tokenizer.json").rename(folder / "model" / "tokenizer.json")
    return folder


def demo_folder(folder: Path) -> Path:
    """What `prepare` makes, without its training."""
    test = load_digits("test").subset(range(60))
    for way in WAYS:
        save_run(folder / way, classifier(), data=test)
        torch.manual_seed(0)
        surface = ResidualMLP(ResidualMLPConfig(num_hidden_layers=3)).eval()
        points = surface_data(SURFACE, n_train=10, n_test=50)[1]
        place = surface_folder(folder, SURFACE, way)
        save_run(place, surface, data=points, about={"data": f"surface:{SURFACE}"})
    save_language_run(folder / "tales")
    return folder
