"""Every depth trained by the Hugging Face Trainer, with resume; the result is a plain model.

python examples/hf_trainer.py
"""

import tempfile
from pathlib import Path

import torch
from transformers import Trainer, TrainingArguments, ViTConfig, ViTForImageClassification

import everydepth as ed
from everydepth.data import load_digits
from everydepth.training.hf_trainer import DepthProgress


def network() -> ed.EveryDepth:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
    config = ViTConfig(image_size=8, patch_size=4, num_channels=1, num_labels=10, **sizes)
    return ed.EveryDepth(ViTForImageClassification(config), objective=ed.lpa())


def train(folder: str, steps: int, *, resume: bool = False) -> ed.EveryDepth:
    net = network()
    arguments = TrainingArguments(
        output_dir=folder,
        max_steps=steps,
        per_device_train_batch_size=32,
        learning_rate=3e-3,
        lr_scheduler_type="constant",
        report_to="none",
        disable_tqdm=True,
    )
    Trainer(
        model=net,
        args=arguments,
        train_dataset=load_digits("train"),
        callbacks=[DepthProgress(net)],  # for objectives that change over training
    ).train(resume_from_checkpoint=resume)
    return net


def main(folder: str) -> None:
    train(folder, steps=10)
    net = train(folder, steps=20, resume=True)  # goes on at step 10
    net.save_pretrained(Path(folder) / "plain")  # the inner model, as itself
    plain = ViTForImageClassification.from_pretrained(Path(folder) / "plain")
    print(f"saved and loaded a {type(plain).__name__} with {plain.config.num_hidden_layers} blocks")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        main(scratch)
