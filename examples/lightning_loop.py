"""Every depth trained by Lightning: the module is one line of training_step.

pip install 'everydepth[lightning]' && python examples/lightning_loop.py
"""

import lightning
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import ViTConfig, ViTForImageClassification

import everydepth as ed
from everydepth.data import load_digits


class Digits(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        config = ViTConfig(
            image_size=8,
            patch_size=4,
            num_channels=1,
            hidden_size=32,
            num_hidden_layers=3,
            num_attention_heads=4,
            intermediate_size=64,
            id2label={i: str(i) for i in range(10)},
        )
        self.net = ed.EveryDepth(ViTForImageClassification(config), objective=ed.lpa())

    def training_step(self, batch: dict[str, Tensor]) -> Tensor:
        self.net.set_progress(self.global_step, int(self.trainer.estimated_stepping_batches))
        out = self.net(**batch)
        self.log_dict({f"loss at depth {depth}": loss for depth, loss in out.losses.items()})
        return out.loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.net.parameters(), lr=3e-3)


def main() -> None:
    lightning.seed_everything(0, verbose=False)
    trainer = lightning.Trainer(
        max_steps=20,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Digits(), DataLoader(load_digits("train"), batch_size=32, shuffle=True))
    for name, value in trainer.callback_metrics.items():
        print(f"{name}: {value:.3f}")


if __name__ == "__main__":
    main()
