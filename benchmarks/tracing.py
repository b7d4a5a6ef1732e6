"""What tracing costs: ratios of CPU seconds, interleaved in one run, best of several rounds.

    python benchmarks/tracing.py [--rounds 6] [--images 2000] [--only vit,memory,language]

"vit" compares times, "memory" peaks of resident memory, each in a process of its own, "language"
traces a model of GPT-2's size.

The peers are only needed here; they bring no torch of their own with
`pip install --no-deps pytorch-cka torch_cka tqdm` (rows of a peer that is missing are left out, and
the result says so). Both hook modules; they are given the same features as everydepth, the class
token of every depth, through identity modules.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib.util
import io
import json
import resource
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Generator, Iterator, Mapping
from typing import Any

import torch
from record import SMOKE, record_times, recorded_times, sized
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from transformers import GPT2Config, GPT2LMHeadModel, ViTConfig, ViTForImageClassification

import everydepth as ed

BATCH = sized(100, 4)
CLASSES = 10
TOKENS = sized(1024, 256)  # in a batch of the language model
Timed = Callable[[], object]


def vit() -> ViTForImageClassification:
    """12 layers of width 192 on 65 tokens (32 x 32 pixels in patches of 4)."""
    torch.manual_seed(0)
    config = ViTConfig(
        hidden_size=sized(192, 24),
        num_hidden_layers=12,
        num_attention_heads=3,
        intermediate_size=sized(768, 32),
        image_size=32,
        patch_size=4,
        num_labels=CLASSES,
    )
    return ViTForImageClassification(config).eval()


class Images(Dataset[Any]):
    """Noise images made when asked for, so that 20,000 take no more memory than 2,000."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count // BATCH

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if index >= len(self):
            raise IndexError(index)
        random = torch.Generator().manual_seed(index)
        return {
            "pixel_values": torch.randn(BATCH, 3, 32, 32, generator=random),
            "labels": torch.randint(0, CLASSES, (BATCH,), generator=random),
        }


class Batches:
    """The same batches as an iterable that can be read again."""

    def __init__(self, count: int) -> None:
        self.images = Images(count)

    def __len__(self) -> int:
        return len(self.images)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return (self.images[i] for i in range(len(self.images)))


class Tapped(nn.Module):
    """The model with an identity module at the class token of every depth, for peers to hook."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        stream = ed.as_stream(model)
        self.taps = nn.ModuleList(nn.Identity() for _ in range(stream.depth + 1))
        blocks = [block.module for block in stream.blocks]
        blocks[0].register_forward_pre_hook(lambda _, args: self.see(0, args[0]))
        for i, block in enumerate(blocks, start=1):
            block.register_forward_hook(lambda _, __, out, i=i: self.see(i, out))

    def see(self, depth: int, h: Any) -> None:
        self.taps[depth]((h if isinstance(h, Tensor) else h[0])[:, 0])

    def forward(self, pixel_values: Tensor) -> Any:
        return self.model(pixel_values)


def pair(batch: Any) -> tuple[Tensor, ...]:
    return tuple(batch.values())


def loader(count: int) -> DataLoader[Any]:
    """The same batches as the peers take them: pairs of inputs and labels, made when asked for."""
    return DataLoader(Images(count), batch_size=None, collate_fn=pair)


# -- what is timed -----------------------------------------------------------------------------


@torch.no_grad()
def forward(model: nn.Module, data: Batches) -> None:
    for batch in data:
        model(pixel_values=batch["pixel_values"])


@torch.no_grad()
def forward_in_parts(model: nn.Module, data: Batches) -> None:
    """As `trace` runs it: a third of a batch at a time, which stays in the cache."""
    for batch in data:
        for part in batch["pixel_values"].split(34):
            model(pixel_values=part)


def forward_backward(model: nn.Module, data: Batches) -> None:
    for batch in data:
        model(**batch).loss.backward()
        model.zero_grad(set_to_none=True)


def cka_only(model: nn.Module, data: Batches) -> Any:
    return ed.trace(model, data, ["cka"], progress=False)


def pytorch_cka(tapped: Tapped, data: DataLoader[Any]) -> Any:
    from cka import compute_cka

    layers = [f"taps.{i}" for i in range(len(tapped.taps))]
    with quiet():
        return compute_cka(tapped, tapped, data, layers=layers, device="cpu")


def torch_cka(tapped: Tapped, data: DataLoader[Any]) -> Any:
    from torch_cka import CKA

    layers = [f"taps.{i}" for i in range(len(tapped.taps))]
    with quiet():
        cka = CKA(tapped, tapped, model1_layers=layers, model2_layers=layers, device="cpu")
        cka.compare(data)
        for tap in tapped.taps:
            tap._forward_hooks.clear()  # it leaves its hooks behind
        return cka.export()["CKA"]


@contextlib.contextmanager
def quiet() -> Generator[None]:
    with (
        warnings.catch_warnings(),
        contextlib.redirect_stderr(io.StringIO()),
        contextlib.redirect_stdout(io.StringIO()),
    ):
        warnings.simplefilter("ignore")
        yield


def has(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def best(timed: Mapping[str, Timed], rounds: int) -> dict[str, float]:
    """CPU seconds of each, the smallest of `rounds`, taken in turn."""
    seconds: dict[str, list[float]] = {name: [] for name in timed}
    for number in range(rounds):
        for name, run in timed.items():
            gc.collect()
            start = time.process_time()
            run()
            seconds[name].append(time.process_time() - start)
            print(f"round {number + 1}: {name:24s} {seconds[name][-1]:8.2f} s CPU", flush=True)
    return {name: round(min(values), 3) for name, values in seconds.items()}


def ratio(found: Mapping[str, float], a: str, b: str) -> float | None:
    return round(found[a] / found[b], 4) if a in found and b in found else None


def measure_vit(images: int, rounds: int) -> dict[str, Any]:
    model, data = vit(), Batches(images)
    timed: dict[str, Timed] = {
        "forward": lambda: forward(model, data),
        "forward_in_parts": lambda: forward_in_parts(model, data),
        "all_metrics": lambda: ed.trace(model, data, progress=False),
        "cka": lambda: cka_only(model, data),
        "token_cka": lambda: ed.trace(model, data, ["token_cka"], progress=False),
        "forward_backward": lambda: forward_backward(model, data),
        "gradients": lambda: ed.trace(model, data, ["gradients"], progress=False),
    }
    tapped, pairs = Tapped(vit()), loader(images)
    if has("cka"):
        timed["pytorch_cka"] = lambda: pytorch_cka(tapped, pairs)
    if has("torch_cka"):
        timed["torch_cka"] = lambda: torch_cka(tapped, pairs)
    found = best(timed, rounds)
    return {
        "images": images,
        "batch_size": BATCH,
        "rounds": rounds,
        "cpu_seconds": found,
        "metrics": list(ed.trace(model, data, max_samples=BATCH, progress=False)),
        "ratios": {
            "all non-gradient metrics / forward (goal 1.10)": ratio(
                found, "all_metrics", "forward"
            ),
            "cka / pytorch-cka (goal 1.0)": ratio(found, "cka", "pytorch_cka"),
            "cka / torch_cka (goal 0.45)": ratio(found, "cka", "torch_cka"),
            "cka / forward": ratio(found, "cka", "forward"),
            "all non-gradient metrics / forward in parts": ratio(
                found, "all_metrics", "forward_in_parts"
            ),
            "token-level cka / forward (goal 1.6)": ratio(found, "token_cka", "forward"),
            "gradients / forward+backward (goal 1.15)": ratio(
                found, "gradients", "forward_backward"
            ),
        },
    }


# -- memory, each in a process of its own --------------------------------------------------------

MEMORY: dict[str, Callable[[int], Any]] = {
    "nothing": lambda images: vit(),
    "forward": lambda images: forward(vit(), Batches(images)),
    "cka": lambda images: cka_only(vit(), Batches(images)),
    "all_metrics": lambda images: ed.trace(vit(), Batches(images), progress=False),
    "pytorch_cka": lambda images: pytorch_cka(Tapped(vit()), loader(images)),
    "torch_cka": lambda images: torch_cka(Tapped(vit()), loader(images)),
}


def peak_mib(name: str, size: int) -> float:
    """Peak resident memory of one measurement."""
    if SMOKE:
        MEMORY[name](size)
        return peak()
    arguments = [sys.executable, __file__, "--child", name, "--images", str(size)]
    done = subprocess.run(arguments, capture_output=True, text=True, check=True)
    return float(done.stdout.split()[-1])


def peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measure_memory(images: int, large: int) -> dict[str, Any]:
    peers = {"pytorch_cka": "cka", "torch_cka": "torch_cka"}
    names = [n for n in MEMORY if n != "language" and (n not in peers or has(peers[n]))]
    found: dict[str, float] = {}
    for name in names:
        found[name] = peak_mib(name, images)
        print(f"peak of {name}: {found[name]:,.0f} MiB", flush=True)
    found["cka_large"] = peak_mib("cka", large)
    found["all_metrics_large"] = peak_mib("all_metrics", large)
    base = found["nothing"]
    above = {k: round(v - base, 1) for k, v in found.items()}
    return {
        "images": images,
        "images_large": large,
        "peak_mib": {k: round(v, 1) for k, v in found.items()},
        "above_an_idle_model_mib": above,
        "ratios": {
            "cka / torch_cka (goal 0.25)": ratio(found, "cka", "torch_cka"),
            "cka / torch_cka, above an idle model": ratio(above, "cka", "torch_cka"),
            "cka, large / small (goal 1.1)": ratio(found, "cka_large", "cka"),
            "all metrics, large / small": ratio(found, "all_metrics_large", "all_metrics"),
        },
    }


def trace_language(tokens: int) -> Any:
    """GPT-2's size: 12 x 768, vocabulary 50,257, every default metric."""
    torch.manual_seed(0)
    model = GPT2LMHeadModel(sized(GPT2Config(), GPT2Config(n_embd=12, n_layer=2))).eval()
    batches = [
        {"input_ids": torch.randint(0, 50_257, (TOKENS // 256, 256))}
        for _ in range(max(1, tokens // TOKENS))
    ]
    found = ed.trace(model, batches, progress=False)
    print(found.table(), found.about, file=sys.stderr)
    return found


MEMORY["language"] = trace_language


def measure_language(tokens: int) -> dict[str, Any]:
    """Peaks at half the tokens and at all.

    Features are held up to `trace`'s budget (13,000 tokens here), and then let go for a second
    pass: beyond, only what is kept of each prediction grows. 100,000 tokens take 40 minutes.
    """
    start = time.perf_counter()
    sizes = [tokens // 2, tokens]
    return {
        "tokens": [size // TOKENS * TOKENS for size in sizes],
        "peak_mib": [round(peak_mib("language", size), 1) for size in sizes],
        "seconds": round(time.perf_counter() - start),
        "goal_mib": 4096,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=sized(6, 1))
    parser.add_argument("--images", type=int, default=sized(2000, 8))
    parser.add_argument("--large", type=int, default=sized(20_000, 8))
    parser.add_argument("--tokens", type=int, default=sized(100_000, 512))
    parser.add_argument("--only", default="vit,memory,language")
    parser.add_argument("--child", choices=MEMORY, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.child:
        kept = MEMORY[options.child](options.images)
        print(peak())
        del kept
        return
    parts: dict[str, Callable[[], dict[str, Any]]] = {
        "vit": lambda: measure_vit(options.images, options.rounds),
        "memory": lambda: measure_memory(options.images, options.large),
        "language": lambda: measure_language(options.tokens),
    }
    for name in options.only.split(","):
        found = parts[name]()
        print(json.dumps(found, indent=1), flush=True)
        # Parts can be measured one by one: the others keep their last figures.
        report = recorded_times("tracing")
        report[name] = found
        report["peers"] = {p: has(p) for p in ("cka", "torch_cka")}
        record_times("tracing", {key: value for key, value in report.items() if key != "machine"})


if __name__ == "__main__":
    main()
