"""The cross-entropy of many depths through one head, one chunk of logits at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor

from everydepth.errors import SettingError, UnsupportedModelError

CHUNK_BYTES = 2**25
"""Size of a chunk of logits. Larger chunks read the head and its gradient less often, smaller ones
stay in the cache; 32 MB was the fastest of 4 to 128 MB for vocabularies of 16,000 and 32,000."""


@dataclass(frozen=True, kw_only=True)
class Pull:
    """`sum_l w_l T^2 sum_t scale_t KL(p_t || p_lt)`, added to the loss; `p = softmax(z / T)`.

    teacher: the head's input that gives `p`; it gets no gradient.
    weights: one per depth; 0 for the teacher itself.
    """

    teacher: Float[Tensor, "token dim"]
    weights: Sequence[float]
    temperature: float = 1.0


class Losses(NamedTuple):
    """The total to minimize; unweighted and detached, the cross-entropy and divergence by depth."""

    total: Tensor
    losses: Tensor
    divergences: Tensor


def any_depth_loss(
    features: Sequence[Float[Tensor, "token dim"]],
    weight: Float[Tensor, "classes dim"],
    bias: Float[Tensor, " classes"] | None,
    labels: Int[Tensor, " token"] | None,
    scale: Float[Tensor, " token"],
    depth_weights: Sequence[float],
    *,
    label_smoothing: float = 0.0,
    pull: Pull | None = None,
    chunk_bytes: int = CHUNK_BYTES,
) -> Losses:
    """`sum_l w_l sum_t scale_t CE(weight x_lt + bias, y_t)`, and the inner sums, detached.

    The gradient is computed together with the loss, so that no logits outlive their chunk. Besides
    its inputs, the function holds one gradient of the head, one of each feature, and one chunk.

    features: the inputs of the head (after the final norm), one tensor per depth.
    labels: None to learn only from `pull`.
    scale: the weight of each label in the mean. Omit the rows of ignored labels.
    pull: pulls the predictions toward a teacher's, in the same pass over the head.
    """
    if labels is None and pull is None:
        raise SettingError("labels=None and pull=None, so there is nothing to learn; pass one")
    # A teacher that is one of the depths needs no logits of its own.
    first = None
    if pull is not None:
        first = next((i for i, x in enumerate(features) if x is pull.teacher), None)
    asked = _Asked(
        labels=labels,
        scale=scale,
        weights=tuple(depth_weights) if labels is not None else (0.0,) * len(features),
        smoothing=label_smoothing,
        pull=pull,
        first=first,
        chunk_bytes=chunk_bytes,
        keep=torch.is_grad_enabled(),
    )
    return Losses(*cast(Any, _AnyDepthLoss).apply(weight, bias, asked, *features))


@dataclass(frozen=True, kw_only=True)
class _Asked:
    labels: Tensor | None
    scale: Tensor
    weights: tuple[float, ...]
    smoothing: float
    pull: Pull | None
    first: int | None
    chunk_bytes: int
    keep: bool

    @property
    def temperature(self) -> float:
        return 1.0 if self.pull is None else self.pull.temperature

    @property
    def pulls(self) -> tuple[float, ...]:
        return (0.0,) * len(self.weights) if self.pull is None else tuple(self.pull.weights)

    @property
    def buffers(self) -> int:
        """Chunks in memory at once: logits, the teacher's probabilities, the softened logits."""
        if self.pull is None:
            return 1
        return 2 if self.temperature == 1 or self.labels is None else 3


class _AnyDepthLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, weight: Tensor, bias: Tensor | None, asked: _Asked, *features: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        device = weight.device.type
        lowered = torch.is_autocast_enabled(device)
        compute = torch.get_autocast_dtype(device) if lowered else features[0].dtype
        # Softmax, sums and the gradient of the head are at least float32, as with autocast.
        wide = torch.float64 if compute == torch.float64 else torch.float32
        wants_w, wants_b, _, *wants_x = [asked.keep and wanted for wanted in ctx.needs_input_grad]
        classes, tokens = weight.shape[0], asked.scale.shape[0]
        # Gradients are in units of the largest scale: 1/tokens would underflow in float16.
        scale = asked.scale.to(wide)
        unit = scale.max().clamp_min(1e-30) if tokens else scale.new_ones(())
        room = asked.chunk_bytes // (classes * wide.itemsize * asked.buffers)
        chunk = max(1, min(room, tokens))
        with torch.autocast(device, enabled=False):
            w = weight.to(compute)
            b = None if bias is None else bias.to(compute)
            dw = torch.zeros_like(weight, dtype=wide) if wants_w else None
            db = weight.new_zeros(classes, dtype=wide) if wants_b else None
            dxs = [
                torch.empty_like(x) if wanted else None
                for x, wanted in zip(features, wants_x, strict=True)
            ]
            losses = weight.new_zeros(2, len(features), dtype=wide)
            scores = _Scores(asked, weight.new_empty(asked.buffers, chunk, classes, dtype=wide))
            order = sorted(range(len(features)), key=lambda index: index != asked.first)
            for start in range(0, tokens, chunk):
                rows = slice(start, start + chunk)
                scores.begin(rows, scale[rows, None], unit)
                if asked.pull is not None and asked.first is None:
                    given = asked.pull.teacher.detach()[rows].to(compute)
                    scores.teach(_logits(given, w, b, scores.z))
                for index in order:
                    x, dx = features[index][rows].to(compute), dxs[index]
                    z = _logits(x, w, b, scores.z)
                    if index == asked.first:
                        scores.teach(z)
                    wanted = wants_x[index] or wants_w or wants_b
                    found, z = scores.judged(z, index, wanted)
                    losses[:, index] += found
                    if z is None:
                        if dx is not None:
                            dx[rows] = 0
                        continue
                    g = z.to(compute)
                    if dx is not None:
                        dx[rows] = g @ w
                    if db is not None:
                        db.add_(z.sum(0))
                    if dw is not None and compute == wide:
                        dw.addmm_(g.T, x)
                    elif dw is not None:
                        dw.add_(g.T @ x)
            weighed = losses * losses.new_tensor([asked.weights, asked.pulls])
            # Two sums: without a pull, the first must stay the same to the last bit.
            total = weighed[0].sum() if asked.pull is None else weighed[0].sum() + weighed[1].sum()
        ctx.gradients, ctx.unit = (dw, db, *dxs), unit
        ctx.dtypes = [None if t is None else t.dtype for t in (weight, bias, *features)]
        label_losses, divergences = losses.unbind()
        ctx.mark_non_differentiable(label_losses, divergences)
        return total, label_losses, divergences

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


class _Scores:
    """The losses of a chunk of logits and their gradient, in place."""

    def __init__(self, asked: _Asked, buffers: Tensor) -> None:
        self._asked, self._buffers = asked, buffers
        self._temperature = asked.temperature

    def begin(self, rows: slice, scale: Tensor, unit: Tensor) -> None:
        """Go to the next chunk of tokens."""
        labels, count = self._asked.labels, len(scale)
        self._labels = None if labels is None else labels[rows, None]
        self._scale, self._unit = scale, unit
        self.z, *beside = self._buffers[:, :count]
        self._probabilities = beside[0] if beside else self.z
        self._soft = beside[-1] if len(beside) > 1 else self.z

    def teach(self, z: Tensor) -> None:
        """Set the teacher's logits; subtracts the maximum from `z`, and keeps it otherwise."""
        p = self._probabilities
        # Softmax is invariant to an offset, and without it nothing overflows.
        z.sub_(z.amax(1, keepdim=True))
        torch.div(z, self._temperature, out=p)
        # sum p log p = p z/T - log sum exp z/T
        total = p.exp_().sum(1, keepdim=True)
        p.div_(total)
        self._information = _dots(p, z) / self._temperature - total.log()

    def judged(self, z: Tensor, index: int, wanted: bool) -> tuple[Tensor, Tensor | None]:
        """The cross-entropy and divergence of the chunk, and the logits' gradient if wanted."""
        asked, scale = self._asked, self._scale
        a, b = asked.weights[index], asked.pulls[index]
        found = scale.new_zeros(2)
        wanted = wanted and (a > 0 or b > 0)
        z.sub_(z.amax(1, keepdim=True))
        # A depth needs two softmaxes, unless they are equal or one has no weight.
        soft = z
        if b > 0 and self._soft is not z:
            soft = torch.div(z, self._temperature, out=self._soft)
        elif b > 0 and self._temperature != 1:
            soft = z.div_(self._temperature)
        cross = _dots(self._probabilities, soft) if b > 0 else None
        entropy = norm = soft_norm = None
        if self._labels is not None:
            entropy, norm = _exponentials_(z, self._labels, asked.smoothing)
            found[0] = (scale * entropy).sum()
        if cross is not None:
            soft_norm = norm if soft is z and norm is not None else _exp_sum_(soft)
            rows = self._information - cross + soft_norm.log()
            found[1] = self._temperature**2 * (scale * rows).sum()
        if not wanted:
            return found, None
        share = scale / self._unit
        if soft_norm is None:
            assert self._labels is not None
            assert norm is not None
            _gradient_(z, norm, self._labels, share * a, asked.smoothing)
            return found, z
        # The gradient of T^2 KL by z is T (softmax(z / T) - p).
        pulled = share * (b * self._temperature)
        if soft is z:
            label_share = share * a if self._labels is not None else torch.zeros_like(share)
            z.mul_((label_share + pulled) / soft_norm)
            if self._labels is not None and a > 0:
                _subtract_labels_(z, self._labels, label_share, asked.smoothing)
        else:
            soft.mul_(pulled / soft_norm)
            if a > 0:
                assert self._labels is not None
                assert norm is not None
                _gradient_(z, norm, self._labels, share * a, asked.smoothing)
                z.add_(soft)
            else:
                z = soft
        return found, z.addcmul_(self._probabilities, -pulled)


def _logits(x: Tensor, w: Tensor, b: Tensor | None, out: Tensor) -> Tensor:
    """`x w^T + b`, written to `out`."""
    if x.dtype == out.dtype:
        torch.mm(x, w.T, out=out)
        return out if b is None else out.add_(b)
    return out.copy_(torch.nn.functional.linear(x, w, b))


def _dots(a: Tensor, b: Tensor) -> Tensor:
    """Row-wise dot products, `(rows, 1)`, without a temporary matrix."""
    return torch.bmm(a[:, None], b[:, :, None])[:, 0]


def _exp_sum_(z: Tensor) -> Tensor:
    return z.exp_().sum(1, keepdim=True)


def _exponentials_(z: Tensor, labels: Tensor, smoothing: float) -> tuple[Tensor, Tensor]:
    """Replace logits by their exponentials; returns each row's cross-entropy and sum."""
    target = z.gather(1, labels)
    if smoothing:
        target = (1 - smoothing) * target + smoothing * z.mean(1, keepdim=True)
    total = _exp_sum_(z)
    return total.log() - target, total


def _gradient_(z: Tensor, norm: Tensor, labels: Tensor, scale: Tensor, smoothing: float) -> None:
    """Replace exponentials by `scale * (softmax - (1 - eps) onehot - eps / classes)`."""
    z.mul_(scale / norm)
    _subtract_labels_(z, labels, scale, smoothing)


def _subtract_labels_(z: Tensor, labels: Tensor, scale: Tensor, smoothing: float) -> None:
    if smoothing:
        z.sub_(scale * (smoothing / z.shape[1]))
    z.scatter_add_(1, labels, scale * (smoothing - 1))
