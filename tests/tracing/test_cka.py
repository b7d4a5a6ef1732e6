"""CKA against `ckatorch.cka_base`, plain Gram matrices, and where other packages break."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from ckatorch import cka_base, cka_batch
from tests.helpers import tracing as samples
from torch import Tensor

import everydepth as ed
from everydepth.tracing.crossproducts import CrossProducts, MinibatchCKA


def gram_cka(x: np.ndarray, y: np.ndarray, *, unbiased: bool) -> float:
    """From N x N Gram matrices in float64, term by term."""
    x, y = (a.astype(np.float64) for a in (x, y))
    # A shift changes neither estimate; without it the reference itself would lose digits.
    k, m = ((a - a.mean(0)) @ (a - a.mean(0)).T for a in (x, y))
    n, one = len(k), np.ones(len(k))

    def hsic(a: np.ndarray, b: np.ndarray) -> float:
        if not unbiased:
            return float((a * b).sum())
        a, b = (g - np.diag(np.diag(g)) for g in (a, b))
        middle = one @ a @ one * (one @ b @ one) / ((n - 1) * (n - 2))
        return float(np.trace(a @ b) + middle - 2 / (n - 2) * (one @ a @ b @ one))

    return hsic(k, m) / np.sqrt(hsic(k, k) * hsic(m, m))


def related(n: int, d: int, shift: float, depths: int = 3) -> Tensor:
    """Features of several depths that share a part; std 1, mean `shift`, float32."""
    random = torch.Generator().manual_seed(0)
    base = torch.randn(n, d, generator=random)
    noise = torch.randn(depths, n, d, generator=random)
    return ((base + noise) / 2**0.5 + shift).float()


def exact(x: Tensor, size: int) -> CrossProducts:
    products = CrossProducts([x.shape[-1]] * len(x))
    for part in x.split(size, 1):
        products.add(part)
    return products


@pytest.mark.parametrize("shift", [0.0, 0.5, 1.0, 5.0, 20.0])
@pytest.mark.parametrize(("n", "d"), [(401, 24), (50, 96)])
def test_both_estimates_are_right_to_1e_6_whatever_the_mean(n: int, d: int, shift: float) -> None:
    x = related(n, d, shift)
    found = exact(x, 100).similarity()
    for i in range(3):
        for j in range(3):
            a, b = x[i].numpy(), x[j].numpy()
            assert abs(found.biased[i, j] - gram_cka(a, b, unbiased=False)) < 1e-6
            assert abs(found.unbiased[i, j] - gram_cka(a, b, unbiased=True)) < 1e-6


@pytest.mark.parametrize("shift", [0.0, 20.0])
@pytest.mark.parametrize("size", [1, 10, 50, 400])
def test_the_batch_size_changes_nothing_beyond_1e_6(size: int, shift: float) -> None:
    x = related(403, 24, shift)  # every size but one leaves a ragged last batch
    reference, found = exact(x, 403).similarity(), exact(x, size).similarity()
    assert np.abs(reference.biased - found.biased).max() < 1e-6
    assert np.abs(reference.unbiased - found.unbiased).max() < 1e-6


def test_a_full_buffer_is_folded_in(monkeypatch: pytest.MonkeyPatch) -> None:
    from everydepth.tracing import crossproducts

    x = related(403, 24, 5.0)
    reference = exact(x, 403).similarity()
    monkeypatch.setattr(crossproducts, "BUFFER", 72 * 17)  # 17 rows
    found = exact(x, 50).similarity()
    np.testing.assert_allclose(found.biased, reference.biased, atol=1e-6)
    np.testing.assert_allclose(found.unbiased, reference.unbiased, atol=1e-6)


def test_a_trace_agrees_with_ckatorch_to_1e_5() -> None:
    model, data = samples.vit(), samples.pictures(70)
    t = ed.trace(model, data, ["cka"], batch_size=9, progress=False)
    h = torch.from_numpy(samples.features(model, data))
    for i in range(1, 4):  # the class token is constant at depth 0
        for j in range(1, 4):
            assert t["cka"][i, j] == pytest.approx(float(cka_base(h[i], h[j])), abs=1e-5)
            unbiased = float(cka_batch(h[i][None], h[j][None]))
            assert t.result("cka").arrays["unbiased"][i, j] == pytest.approx(unbiased, abs=1e-5)
    assert np.ma.getmaskarray(t["cka"])[0].all()


@pytest.mark.parametrize("shift", [0.0, 20.0])
def test_the_minibatch_estimate_agrees_with_ckatorch(shift: float) -> None:
    x = related(400, 24, shift)
    found = MinibatchCKA()
    for part in x.split(50, 1):
        found.add(part)
    batches = (x.double() - shift).reshape(3, 8, 50, 24)
    for i in range(3):
        for j in range(3):
            expected = float(cka_batch(batches[i], batches[j]))
            assert found.similarity()[i, j] == pytest.approx(expected, abs=1e-5)


def test_products_beyond_the_budget_fall_back_to_chunks_and_say_so() -> None:
    model, data = samples.vit(), samples.pictures(70)
    t = ed.trace(model, data, ["cka"], memory_budget=1000, progress=False)
    assert str(t.result("cka").note).startswith("estimated from chunks: exact CKA needs")
    assert t.result("cka").meta["estimator"] == "HSIC_1 averaged over chunks of rows"
    exact_one = ed.trace(model, data, ["cka"], progress=False)
    # One chunk holds all samples, so here the estimate is the unbiased value itself.
    np.testing.assert_allclose(t["cka"], exact_one.result("cka").arrays["unbiased"], atol=1e-6)


def test_between_two_models_of_different_width_and_depth() -> None:
    a, b, data = samples.vit(), samples.vit(1, width=16, layers=2), samples.pictures(50)
    t = ed.trace(a, data, ["cka_between"], against=b, batch_size=8, progress=False)
    assert t["cka_between"].shape == (4, 3)
    x, y = samples.features(a, data), samples.features(b, data)
    for i in range(1, 4):
        for j in range(1, 3):
            assert t["cka_between"][i, j] == pytest.approx(
                gram_cka(x[i], y[j], unbiased=False), abs=1e-5
            )
            assert t.result("cka_between").arrays["unbiased"][i, j] == pytest.approx(
                gram_cka(x[i], y[j], unbiased=True), abs=1e-5
            )


def test_token_cka_takes_every_token_as_a_sample() -> None:
    model, data = samples.vit(), samples.pictures(12)
    t = ed.trace(model, data, ["token_cka"], batch_size=5, progress=False)
    with torch.no_grad():
        states = ed.as_stream(model).observe({"pixel_values": data["pixel_values"]})
    h = [x.double().flatten(0, 1) for x in states.h]
    for i in range(4):
        for j in range(4):
            assert t["token_cka"][i, j] == pytest.approx(float(cka_base(h[i], h[j])), abs=1e-5)
    assert t.result("token_cka").meta["rows"] == 12 * 17


def test_few_samples_leave_out_the_unbiased_estimate() -> None:
    t = ed.trace(samples.vit(), samples.pictures(3), ["cka"], progress=False)
    assert "needs 4 samples; there are 3" in str(t.result("cka").note)
    assert t.result("cka").series == ("value",)


def test_the_memory_of_the_products_is_known_beforehand_and_decides() -> None:
    within = CrossProducts([5, 5, 7])
    between = CrossProducts([5, 6], [3])
    for products, sizes in ((within, ([5, 5, 7],)), (between, ([5, 6], [3]))):
        held = sum(t.nbytes for row in products._products for t in row)
        assert CrossProducts.bytes_needed(*sizes) == held
    model, data = samples.vit(), samples.pictures(8)
    needed = CrossProducts.bytes_needed([32] * 4)
    for budget, exact in ((needed, True), (needed - 1, False)):
        t = ed.trace(model, data, ["cka"], memory_budget=budget, progress=False)
        assert ("unbiased" in t.result("cka").arrays) is exact
