"""Cross-entropy of many depths against one head, a chunk of logits at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor

from everydepth.errors import UnsupportedModelError

CHUNK_BYTES = 2**25
"""Logits alive at once: larger chunks read the head and its gradient less often, smaller ones stay
in the cache; 32 MB was the fastest of 4 to 128 MB for vocabularies of 16,000 and 32,000."""


def any_depth_loss(
    features: Sequence[Float[Tensor, "token dim"]],
    weight: Float[Tensor, "classes dim"],
    bias: Float[Tensor, "classes"] | None,
    labels: Int[Tensor, "token"],
    scale: Float[Tensor, "token"],
    depth_weights: Sequence[float],
    *,
    label_smoothing: float = 0.0,
    chunk_bytes: int = CHUNK_BYTES,
) -> tuple[Float[Tensor, ""], Float[Tensor, "depth"]]:
    """`sum_l w_l sum_t scale_t CE(weight x_lt + bias, y_t)`, and the inner sums, detached.

    The gradient is computed with the loss, so that no logits outlive their chunk: beside its inputs
    the function holds one gradient of the head, one of each feature, and one chunk.

    features: what the head receives (after the final norm), one tensor a depth.
    scale: the weight of each label in the mean; leave ignored labels out.
    """
    keep = torch.is_grad_enabled()
    flat = (labels, scale, tuple(depth_weights), label_smoothing, chunk_bytes, keep)
    total, losses = cast(Any, _AnyDepthLoss).apply(weight, bias, flat, *features)
    return total, losses


class _AnyDepthLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, weight: Tensor, bias: Tensor | None, flat: tuple[Any, ...], *features: Tensor
    ) -> tuple[Tensor, Tensor]:
        labels, scale, depth_weights, smoothing, chunk_bytes, keep = flat
        device = weight.device.type
        lowered = torch.is_autocast_enabled(device)
        compute = torch.get_autocast_dtype(device) if lowered else features[0].dtype
        # Softmax, sums and the gradient of the head in float32 at least, as autocast would.
        wide = torch.float64 if compute == torch.float64 else torch.float32
        wants_x = [keep and wanted for wanted in ctx.needs_input_grad[3:]]
        wants_w = keep and ctx.needs_input_grad[0]
        classes, tokens = weight.shape[0], labels.shape[0]
        chunk = max(1, min(chunk_bytes // (classes * wide.itemsize), tokens))
        with torch.autocast(device, enabled=False):
            w = weight.to(compute)
            b = None if bias is None else bias.to(compute)
            dw = torch.zeros_like(weight, dtype=wide) if wants_w else None
            wants_b = keep and ctx.needs_input_grad[1]
            db = torch.zeros(classes, dtype=wide, device=weight.device) if wants_b else None
            losses = torch.zeros(len(features), dtype=wide, device=weight.device)
            dxs: list[Tensor | None] = []
            buffer = torch.empty(chunk, classes, dtype=wide, device=weight.device)
            for index, (x, depth_weight) in enumerate(zip(features, depth_weights, strict=True)):
                dx = torch.empty_like(x) if wants_x[index] else None
                for start in range(0, tokens, chunk):
                    rows = slice(start, start + chunk)
                    xc, yc = x[rows].to(compute), labels[rows, None]
                    s = scale[rows, None].to(wide)
                    z = _logits(xc, w, b, buffer)
                    loss, norm = _exponentials_(z, yc, smoothing)
                    losses[index] += (s * loss).sum()
                    if not (dx is not None or wants_w or wants_b):
                        continue
                    # In place: scale * (softmax - (1 - smoothing) onehot - smoothing / classes).
                    s = s * depth_weight
                    z.mul_(s / norm)
                    if smoothing:
                        z.sub_(s * (smoothing / classes))
                    z.scatter_add_(1, yc, s * (smoothing - 1))
                    g = z.to(compute)
                    if dx is not None:
                        dx[rows] = g @ w
                    if dw is not None and dw.dtype == compute:
                        dw.addmm_(g.T, xc)
                    elif dw is not None:
                        dw.add_(g.T @ xc)
                    if db is not None:
                        db.add_(z.sum(0))
                dxs.append(dx)
            total = losses @ losses.new_tensor(depth_weights)
        ctx.gradients = (
            None if dw is None else dw.to(weight.dtype),
            None if db is None or bias is None else db.to(bias.dtype),
            *dxs,
        )
        ctx.mark_non_differentiable(losses)
        return total, losses

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise UnsupportedModelError(
                "the any-depth loss cannot be differentiated twice (create_graph=True): its "
                "gradient is computed in the forward pass; use any_depth_loss=False"
            )
        up = upstream[0]
        dw, db, *dxs = (None if g is None else g * up.to(g.dtype) for g in ctx.gradients)
        return dw, db, None, *dxs


def _logits(x: Tensor, w: Tensor, b: Tensor | None, buffer: Tensor) -> Tensor:
    """`x w^T + b`, in the buffer."""
    out = buffer[: len(x)]
    if x.dtype == out.dtype:
        torch.mm(x, w.T, out=out)
        return out if b is None else out.add_(b)
    return out.copy_(torch.nn.functional.linear(x, w, b))


def _exponentials_(z: Tensor, labels: Tensor, smoothing: float) -> tuple[Tensor, Tensor]:
    """Exchange logits for `exp(z - max z)`, in place; gives cross-entropy and sum, a row each."""
    z.sub_(z.amax(1, keepdim=True))
    target = z.gather(1, labels)
    if smoothing:
        target = (1 - smoothing) * target + smoothing * z.mean(1, keepdim=True)
    total = z.exp_().sum(1, keepdim=True)
    return total.log() - target, total
