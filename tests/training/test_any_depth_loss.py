"""The any-depth loss is the plain sum of cross-entropies, without ever holding all logits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 (its usual name)

from everydepth.errors import SettingError, UnsupportedModelError
from everydepth.training.any_depth_loss import Losses, Pull, any_depth_loss

DEPTH_WEIGHTS = [0.1, 0.3, 1.0]
TOKENS, DIM, CLASSES = 37, 16, 211
TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-12}


class Case:
    """Random features, head, labels and token weights."""

    def __init__(self, dtype: torch.dtype = torch.float64, bias: bool = True) -> None:
        torch.manual_seed(0)
        self.weight = torch.randn(CLASSES, DIM, dtype=dtype, requires_grad=True)
        self.bias = torch.randn(CLASSES, dtype=dtype, requires_grad=True) if bias else None
        self.features = [
            torch.randn(TOKENS, DIM, dtype=dtype, requires_grad=True) for _ in DEPTH_WEIGHTS
        ]
        self.labels = torch.randint(0, CLASSES, (TOKENS,))
        self.scale = torch.rand(TOKENS, dtype=dtype)

    @property
    def leaves(self) -> list[Tensor]:
        return [self.weight, *([] if self.bias is None else [self.bias]), *self.features]

    def plain(self, smoothing: float = 0.0) -> Tensor:
        total = torch.zeros((), dtype=self.weight.dtype)
        for w, x in zip(DEPTH_WEIGHTS, self.features, strict=True):
            logits = F.linear(x, self.weight, self.bias).to(total.dtype)
            rows = F.cross_entropy(logits, self.labels, reduction="none", label_smoothing=smoothing)
            total = total + w * (rows * self.scale).sum()
        return total

    def chunked(self, smoothing: float = 0.0, rows: int = 10) -> Tensor:
        return any_depth_loss(
            self.features,
            self.weight,
            self.bias,
            self.labels,
            self.scale,
            DEPTH_WEIGHTS,
            label_smoothing=smoothing,
            chunk_bytes=rows * CLASSES * self.weight.element_size(),
        )[0]

    def gradients(self, loss: Tensor) -> list[Tensor]:
        return list(torch.autograd.grad(loss, self.leaves))


def relative(found: Tensor, expected: Tensor) -> float:
    found, expected = found.detach(), expected.detach()
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_loss_and_gradients_equal_the_plain_sum_of_cross_entropies(
    dtype: torch.dtype, bias: bool, smoothing: float
) -> None:
    case = Case(dtype, bias)
    plain, ours = case.plain(smoothing), case.chunked(smoothing)
    assert relative(ours, plain) <= TOLERANCE[dtype]
    for found, expected in zip(case.gradients(ours), case.gradients(plain), strict=True):
        assert relative(found, expected) <= TOLERANCE[dtype]


@pytest.mark.parametrize("rows", [1, 7, TOKENS, 1000])
def test_the_size_of_the_chunks_does_not_matter(rows: int) -> None:
    case = Case()
    for found, expected in zip(
        case.gradients(case.chunked(rows=rows)), case.gradients(case.plain()), strict=True
    ):
        assert relative(found, expected) <= 1e-12


def test_the_losses_of_the_depths_are_given_unweighted_and_detached() -> None:
    case = Case()
    total, losses, _ = any_depth_loss(
        case.features, case.weight, case.bias, case.labels, case.scale, DEPTH_WEIGHTS
    )
    assert not losses.requires_grad
    for x, found in zip(case.features, losses, strict=True):
        rows = F.cross_entropy(F.linear(x, case.weight, case.bias), case.labels, reduction="none")
        assert torch.allclose(found, (rows * case.scale).sum(), rtol=1e-12)
    assert torch.allclose(total, losses @ losses.new_tensor(DEPTH_WEIGHTS), rtol=1e-12)


def test_a_scaled_loss_has_scaled_gradients() -> None:
    case = Case()
    for found, expected in zip(
        case.gradients(1024 * case.chunked()), case.gradients(case.plain()), strict=True
    ):
        assert relative(found, 1024 * expected) <= 1e-12


def test_the_gradient_can_be_taken_again_from_a_kept_graph() -> None:
    case = Case()
    loss = case.chunked()
    first = torch.autograd.grad(3 * loss, case.leaves, retain_graph=True)
    second = torch.autograd.grad(3 * loss, case.leaves)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_a_head_tied_to_the_embedding_gets_both_gradients() -> None:
    case = Case(bias=False)
    ids = torch.randint(0, CLASSES, (TOKENS,))

    def gradient(chunked: bool) -> Tensor:
        x = F.embedding(ids, case.weight).tanh()
        if not chunked:
            rows = F.cross_entropy(x @ case.weight.T, case.labels, reduction="none")
            return torch.autograd.grad((rows * case.scale).sum(), case.weight)[0]
        total = any_depth_loss([x], case.weight, None, case.labels, case.scale, [1.0])[0]
        return torch.autograd.grad(total, case.weight)[0]

    assert relative(gradient(True), gradient(False)) <= 1e-12


def test_what_is_frozen_gets_no_gradient_and_changes_nothing_else() -> None:
    case = Case()
    expected = torch.autograd.grad(case.plain(), case.features)
    case.weight.requires_grad_(False)
    found = torch.autograd.grad(case.chunked(), case.features)
    assert all(relative(a, b) <= 1e-12 for a, b in zip(found, expected, strict=True))
    for x in case.features[:2]:
        x.requires_grad_(False)
    assert relative(torch.autograd.grad(case.chunked(), case.features[2])[0], expected[2]) <= 1e-12


def test_without_gradients_only_the_loss_is_computed() -> None:
    case = Case()
    with torch.no_grad():
        loss = case.chunked()
    assert not loss.requires_grad
    assert relative(loss, case.plain()) <= 1e-12


def test_no_labels_at_all_give_a_loss_and_gradients_of_zero() -> None:
    case = Case()
    empty = [x[:0] for x in case.features]
    total, *_ = any_depth_loss(
        empty, case.weight, case.bias, case.labels[:0], case.scale[:0], DEPTH_WEIGHTS
    )
    assert total == 0
    assert not bool(torch.autograd.grad(total, case.weight)[0].any())


def test_under_autocast_it_computes_what_autocast_would() -> None:
    case = Case(torch.float32)
    exact = case.gradients(case.plain())
    with torch.autocast("cpu", torch.bfloat16):
        plain, ours = case.plain(), case.chunked()
    assert ours.dtype == torch.float32
    assert relative(ours, plain) <= 1e-5
    for found, theirs, expected in zip(
        case.gradients(ours), case.gradients(plain), exact, strict=True
    ):
        assert found.dtype == torch.float32
        assert relative(found, expected) <= max(1.2 * relative(theirs, expected), 5e-3)


def test_in_bfloat16_the_head_gradient_is_summed_in_float32() -> None:
    case = Case(torch.float32, bias=False)
    exact = case.gradients(case.plain())[0]
    low = Case(torch.float32, bias=False)
    low.weight = case.weight.detach().bfloat16().requires_grad_()
    low.features = [x.detach().bfloat16().requires_grad_() for x in case.features]
    found = low.gradients(low.chunked(rows=1))[0]
    assert found.dtype == torch.bfloat16
    assert relative(found.float(), exact) <= 1e-2


def test_in_float16_a_scaled_loss_keeps_gradients_of_many_tokens() -> None:
    # A mean over many tokens gives each a gradient too small for float16; scaling the loss cannot
    # help what was rounded to zero before.
    case = Case(torch.float32, bias=False)
    case.scale = torch.full((TOKENS,), 1e-6)
    exact = case.gradients(case.plain())
    with torch.autocast("cpu", torch.float16):
        loss = case.chunked()
    for found, expected in zip(case.gradients(2.0**16 * loss), exact, strict=True):
        assert relative(found / 2.0**16, expected) <= 5e-3


# -- distilled -------------------------------------------------------------------------------------

PULLS = [0.7, 0.2, 0.0]


def distilled(
    case: Case, temperature: float, *, labels: bool = True, apart: bool = False, rows: int = 10
) -> Losses:
    """apart: the teacher is not one of the depths."""
    teacher = case.features[-1].detach().flip(0).contiguous() if apart else case.features[-1]
    return any_depth_loss(
        case.features,
        case.weight,
        case.bias,
        case.labels if labels else None,
        case.scale,
        DEPTH_WEIGHTS,
        pull=Pull(teacher=teacher, weights=PULLS, temperature=temperature),
        chunk_bytes=3 * rows * CLASSES * case.weight.element_size(),
    )


def plain_divergences(case: Case, temperature: float, *, apart: bool = False) -> list[Tensor]:
    teacher = case.features[-1].detach().flip(0) if apart else case.features[-1].detach()
    weight, bias = case.weight, case.bias
    p = (F.linear(teacher, weight, bias).detach() / temperature).log_softmax(-1)
    found: list[Tensor] = []
    for x in case.features:
        q = (F.linear(x, weight, bias) / temperature).log_softmax(-1)
        rows = F.kl_div(q, p, reduction="none", log_target=True).sum(-1)
        found.append(temperature**2 * (rows * case.scale).sum())
    return found


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("temperature", [1.0, 2.5])
@pytest.mark.parametrize("labels", [True, False])
@pytest.mark.parametrize("apart", [True, False])
def test_distilled_loss_and_gradients_equal_the_plain_divergences(
    dtype: torch.dtype, temperature: float, labels: bool, apart: bool
) -> None:
    case = Case(dtype)
    plain = case.plain() if labels else torch.zeros((), dtype=dtype)
    for weight, divergence in zip(
        PULLS, plain_divergences(case, temperature, apart=apart), strict=True
    ):
        plain = plain + weight * divergence
    ours = distilled(case, temperature, labels=labels, apart=apart).total
    assert relative(ours, plain) <= TOLERANCE[dtype]
    for found, expected in zip(case.gradients(ours), case.gradients(plain), strict=True):
        if float(expected.norm()) == 0:
            assert not bool(found.any())
        else:
            assert relative(found, expected) <= TOLERANCE[dtype]


def test_divergences_are_given_by_depth_unweighted_and_detached() -> None:
    case = Case()
    found = distilled(case, 2.0)
    assert not found.divergences.requires_grad
    for ours, plain in zip(found.divergences[:2], plain_divergences(case, 2.0)[:2], strict=True):
        assert relative(ours, plain) <= 1e-12
    assert found.divergences[2] == 0


@pytest.mark.parametrize("rows", [1, 7, TOKENS])
def test_the_size_of_the_chunks_does_not_matter_to_the_pull(rows: int) -> None:
    case = Case()
    expected = case.gradients(distilled(case, 1.0).total)
    found = case.gradients(distilled(case, 1.0, rows=rows).total)
    assert all(relative(a, b) <= 1e-12 for a, b in zip(found, expected, strict=True))


def test_a_student_that_agrees_with_its_teacher_is_not_pulled() -> None:
    case = Case()
    case.features = [case.features[-1].detach().clone().requires_grad_() for _ in DEPTH_WEIGHTS]
    found = distilled(case, 1.0, labels=False)
    assert float(found.total.detach().abs()) < 1e-12
    assert all(float(g.norm()) < 1e-13 for g in case.gradients(found.total))


def test_nothing_to_learn_from_is_refused() -> None:
    case = Case()
    with pytest.raises(SettingError, match="labels=None and pull=None"):
        any_depth_loss(case.features, case.weight, None, None, case.scale, DEPTH_WEIGHTS)


def test_differentiating_twice_is_refused_with_a_way_out() -> None:
    case = Case()
    with pytest.raises(UnsupportedModelError, match=r"twice .*use any_depth_loss=False"):
        torch.autograd.grad(case.chunked(), case.leaves, create_graph=True)
