"""Every depth trained in your own PyTorch loop: two lines change.

python examples/plain_loop.py
"""

import torch
from transformers import ViTConfig, ViTForImageClassification

import everydepth as ed
from everydepth.data import batches, load_digits


def main(steps: int = 100) -> None:
    torch.manual_seed(0)
    config = ViTConfig(
        image_size=8,
        patch_size=4,
        num_channels=1,
        hidden_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=128,
        id2label={i: str(i) for i in range(10)},
    )
    model = ViTForImageClassification(config)

    net = ed.EveryDepth(model, objective=ed.lpa())  # instead of: net = model
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3)
    step = 0
    while step < steps:
        for batch in batches(load_digits("train"), 64, shuffle=True, seed=step):
            net.set_progress(step, steps)  # for objectives that change over training
            out = net(**batch)
            out.loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if step % 20 == 0:
                losses = "  ".join(f"depth {d} {v:.3f}" for d, v in out.losses.items())
                print(f"step {step}: {losses}")
            if step == steps:
                break

    test = load_digits("test")
    shallow = ed.at_depth(model, 2).eval()  # a plain ViT with two blocks
    with torch.no_grad():
        right = shallow(pixel_values=test.pixel_values).logits.argmax(-1) == test.labels
    print(f"accuracy of the first two blocks: {right.float().mean():.2f}")


if __name__ == "__main__":
    main()
