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
    bias: Float[Tensor, " classes"] | None,
    labels: Int[Tensor, " token"],
    scale: Float[Tensor, " token"],
    depth_weights: Sequence[float],
    *,
    label_smoothing: float = 0.0,
    chunk_bytes: int = CHUNK_BYTES,
) -> tuple[Float[Tensor, ""], Float[Tensor, " depth"]]:
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
        wants_w, wants_b, _, *wants_x = [keep and wanted for wanted in ctx.needs_input_grad]
        classes, tokens = weight.shape[0], labels.shape[0]
        # Gradients are kept in units of the largest scale: 1/tokens would vanish in float16.
        unit = scale.max().to(wide).clamp_min(1e-30) if tokens else scale.new_ones((), dtype=wide)
        chunk = max(1, min(chunk_bytes // (classes * wide.itemsize), tokens))
        with torch.autocast(device, enabled=False):
            w = weight.to(compute)
            b = None if bias is None else bias.to(compute)
            dw = torch.zeros_like(weight, dtype=wide) if wants_w else None
            db = weight.new_zeros(classes, dtype=wide) if wants_b else None
            dxs = [
                torch.empty_like(x) if wanted else None
                for x, wanted in zip(features, wants_x, strict=True)
            ]
            losses = weight.new_zeros(len(features), dtype=wide)
            buffer = weight.new_empty(chunk, classes, dtype=wide)
            for index, (x, dx) in enumerate(zip(features, dxs, strict=True)):
                for start in range(0, tokens, chunk):
                    rows = slice(start, start + chunk)
                    xc, yc, s = x[rows].to(compute), labels[rows, None], scale[rows, None].to(wide)
                    z = _logits(xc, w, b, buffer)
                    loss, norm = _exponentials_(z, yc, smoothing)
                    losses[index] += (s * loss).sum()
                    if not (wants_x[index] or wants_w or wants_b):
                        continue
                    _gradient_(z, norm, yc, s / unit * depth_weights[index], smoothing)
                    g = z.to(compute)
                    if dx is not None:
                        dx[rows] = g @ w
                    if db is not None:
                        db.add_(z.sum(0))
                    if dw is not None and compute == wide:
                        dw.addmm_(g.T, xc)
                    elif dw is not None:
                        dw.add_(g.T @ xc)
            total = losses @ losses.new_tensor(depth_weights)
        ctx.gradients, ctx.unit = (dw, db, *dxs), unit
        ctx.dtypes = [None if t is None else t.dtype for t in (weight, bias, *features)]
        ctx.mark_non_differentiable(losses)
        return total, losses

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise UnsupportedModelError(
                "the any-depth loss cannot be differentiated twice (create_graph=True): its "
                "gradient is computed in the forward pass; use any_depth_loss=False"
            )
        factor = upstream[0] * ctx.unit
        dw, db, *dxs = (
            None if gradient is None else (gradient * factor).to(dtype)
            for gradient, dtype in zip(ctx.gradients, ctx.dtypes, strict=True)
        )
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


def _gradient_(z: Tensor, norm: Tensor, labels: Tensor, scale: Tensor, smoothing: float) -> None:
    """Exchange exponentials for `scale * (softmax - (1 - eps) onehot - eps / classes)`."""
    z.mul_(scale / norm)
    if smoothing:
        z.sub_(scale * (smoothing / z.shape[1]))
    z.scatter_add_(1, labels, scale * (smoothing - 1))
