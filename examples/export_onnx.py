"""Choose a depth for a budget, write it as ONNX and as a stock checkpoint, and use both.

    python examples/export_onnx.py

The model is random, to keep the example short: put your own in its place.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import onnxruntime
import torch
from rich.console import Console
from transformers import AutoModelForImageClassification, ViTConfig, ViTForImageClassification

import everydepth as ed
from everydepth.data import load_digits


def main() -> None:
    console = Console()
    torch.manual_seed(0)
    config = ViTConfig(
        hidden_size=64,
        num_hidden_layers=6,
        num_attention_heads=4,
        intermediate_size=128,
        image_size=8,
        patch_size=2,
        num_channels=1,
        num_labels=10,
    )
    model = ViTForImageClassification(config).eval()
    digits = load_digits("test")
    profile = ed.profile(model, digits, repeats=5)
    console.print(profile.table())
    depth = profile.choose(bytes=profile.at(4).checkpoint_bytes)
    console.print(f"depth {depth} is the best within the bytes of four blocks")
    batch = digits.batch(range(8))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ed.export(model, folder / "onnx", depth=depth, format="onnx", example=batch)
        ed.export(model, folder / "hf", depth=depth, profile=profile)
        session = onnxruntime.InferenceSession(str(folder / "onnx" / "model.onnx"))
        pixels = digits.batch(range(100))["pixel_values"]
        (found,) = session.run(None, {"pixel_values": pixels.numpy()})
        stock = AutoModelForImageClassification.from_pretrained(folder / "hf").eval()
        with torch.no_grad():
            gap = (stock(pixels).logits - torch.tensor(found)).abs().max()
        console.print(f"ONNX Runtime and the stock checkpoint differ by at most {float(gap):.0e}")


if __name__ == "__main__":
    main()
