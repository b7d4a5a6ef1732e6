"""The loss of all depths: stacked logits, a loop, and the any-depth loss, side by side.

    python benchmarks/any_depth_loss.py

8 depths x 1024 tokens x 32,000 classes, width 256, float32: loss, gradients of features and head.
"distilled" adds the divergence from the last depth, "softened" with a temperature of 2.
Time: interleaved, one compute thread, CPU seconds, best of several rounds, none of which begins
after PACE seconds. Memory: see peak.py. Written to benchmarks/results/any_depth_loss.json.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from peak import peak_mb
from record import no_options, record_times, sized
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 (its usual name)

from everydepth.training.any_depth_loss import Pull, any_depth_loss

DEPTHS, ROUNDS = 8, sized(3, 1)
PACE = 150.0
TOKENS, CLASSES, DIM = sized((1024, 32_000, 256), (32, 200, 16))
WANTED = {
    "peak_mb": 200.0,
    "time_over_loop": 0.75,
    "distilled_peak_mb": 120.0,
    "distilled_over_any_depth": 1.25,
}


class Case:
    """Features, head and labels; what is wanted is the gradient of all but the labels."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.weight = (0.02 * torch.randn(CLASSES, DIM)).requires_grad_()
        self.features = [torch.randn(TOKENS, DIM, requires_grad=True) for _ in range(DEPTHS)]
        self.labels = torch.randint(0, CLASSES, (TOKENS,))
        self.scale = torch.full((TOKENS,), 1 / TOKENS)

    def stacked(self) -> Tensor:
        logits = torch.stack(self.features) @ self.weight.T
        labels = self.labels.expand(DEPTHS, -1)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten()) * DEPTHS

    def loop(self) -> Tensor:
        losses = [F.cross_entropy(x @ self.weight.T, self.labels) for x in self.features]
        return torch.stack(losses).sum()

    def one_backward_a_depth(self) -> Tensor:
        for x in self.features:
            loss = F.cross_entropy(x @ self.weight.T, self.labels)
            loss.backward()
        return torch.zeros((), requires_grad=True)

    def any_depth(self) -> Tensor:
        ones = [1.0] * DEPTHS
        return any_depth_loss(self.features, self.weight, None, self.labels, self.scale, ones)[0]

    def distilled(self, temperature: float = 1.0) -> Tensor:
        weights = [1.0] * DEPTHS
        pull = Pull(teacher=self.features[-1], weights=[*weights[1:], 0.0], temperature=temperature)
        given = (self.features, self.weight, None, self.labels, self.scale, weights)
        return any_depth_loss(*given, pull=pull).total

    def softened(self) -> Tensor:
        return self.distilled(2.0)

    def distilled_loop(self) -> Tensor:
        last = (self.features[-1].detach() @ self.weight.detach().T).log_softmax(-1)
        losses = [F.cross_entropy(x @ self.weight.T, self.labels) for x in self.features]
        pulls = [
            F.kl_div(
                (x @ self.weight.T).log_softmax(-1), last, reduction="batchmean", log_target=True
            )
            for x in self.features[:-1]
        ]
        return torch.stack(losses + pulls).sum()

    def clear(self) -> None:
        for leaf in (self.weight, *self.features):
            leaf.grad = None


WAYS = (
    *("stacked", "loop", "one_backward_a_depth", "any_depth"),
    *("distilled", "softened", "distilled_loop"),
)


def prepare(way: str) -> Callable[[], object]:
    case = Case()
    return lambda: getattr(case, way)().backward()


def gradient_error(case: Case) -> float:
    """Of the head's gradient, relative, against the loop in float64."""
    case.any_depth().backward()
    found = case.weight.grad
    exact = Case()
    exact.weight = exact.weight.detach().double().requires_grad_()
    total = torch.zeros_like(exact.weight)
    for x in exact.features:
        loss = F.cross_entropy(x.detach().double() @ exact.weight.T, exact.labels)
        total += torch.autograd.grad(loss, exact.weight)[0]
    assert found is not None
    return float((found - total).norm() / total.norm())


def main() -> None:
    torch.set_num_threads(1)
    started, rounds = time.monotonic(), 0
    memory = {way: peak_mb(prepare, way) for way in WAYS}
    case = Case()
    best = dict.fromkeys(WAYS, float("inf"))
    for _ in track(range(ROUNDS), description="any-depth loss"):
        if rounds and time.monotonic() - started > PACE:
            break
        rounds += 1
        for way in WAYS:
            case.clear()
            begin = time.process_time()
            getattr(case, way)().backward()
            best[way] = min(best[way], time.process_time() - begin)
    case.clear()
    ratio = {way: best[way] / best["loop"] for way in WAYS}
    table = Table(title=f"{DEPTHS} depths x {TOKENS} tokens x {CLASSES} classes, width {DIM}")
    for column in ("way", "peak MB", "seconds", "over the loop"):
        table.add_column(column, justify="right")
    for way in WAYS:
        table.add_row(way, f"{memory[way]:.0f}", f"{best[way]:.2f}", f"{ratio[way]:.2f}")
    Console().print(table)
    record_times(
        "any_depth_loss",
        {
            "rounds": rounds,
            "threads": 1,
            "wanted": WANTED,
            "peak_mb": memory,
            "seconds": best,
            "time_over_loop": ratio,
            "distilled_over_any_depth": {
                way: best[way] / best["any_depth"]
                for way in WAYS
                if way in ("distilled", "softened")
            },
            "relative_error_of_head_gradient": gradient_error(case),
        },
    )


if __name__ == "__main__":
    no_options()
    main()
