"""COS, adjacent COS and norm ratio against numpy and scikit-learn on stored features."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.metrics.pairwise import paired_cosine_distances
from tests.helpers import tracing as samples
from tests.zoo import ENTRIES

import everydepth as ed


def centered_cosines(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    return 1 - paired_cosine_distances(x - x.mean(0), y - y.mean(0))


def test_cos_is_the_mean_cosine_of_centered_features_with_quantiles() -> None:
    model, data = samples.vit(), samples.pictures(80)
    t = ed.trace(model, data, ["cos", "adjacent_cos"], batch_size=13, progress=False)
    h = samples.features(model, data)
    for i in range(1, 4):
        for j in range(1, 4):
            each = centered_cosines(h[i], h[j])
            assert t["cos"][i, j] == pytest.approx(each.mean(), abs=1e-5)
            for name, share in {"q05": 0.05, "q50": 0.5, "q95": 0.95}.items():
                found = t.result("cos").arrays[name][i, j]
                assert found == pytest.approx(np.quantile(each, share), abs=1e-5)
    adjacent = t.result("adjacent_cos")
    for place, depth in ((1, 2), (2, 3)):
        each = centered_cosines(h[depth - 1], h[depth])
        assert t["adjacent_cos"][place] == pytest.approx(each.mean(), abs=1e-5)
        assert adjacent.arrays["q25"][place] == pytest.approx(np.quantile(each, 0.25), abs=1e-5)
    assert adjacent.arrays["depth"].tolist() == [1, 2, 3]


def test_cos_survives_features_far_from_zero() -> None:
    model, data = samples.mlp(regression=False, num_outputs=3), samples.points(40, 1)
    data["labels"] = torch.arange(40) % 3
    with torch.no_grad():
        model.embed.bias += 30.0
    t = ed.trace(model, data, ["cos"], progress=False)
    h = samples.features(model, data)
    expected = [[centered_cosines(x, y).mean() for y in h] for x in h]
    np.testing.assert_allclose(t["cos"], expected, atol=1e-5)


def test_the_norm_ratio_is_the_state_over_what_the_block_adds() -> None:
    model, data = samples.vit(), samples.pictures(30)
    t = ed.trace(model, data, ["norm_ratio"], batch_size=8, progress=False)
    h = samples.features(model, data)
    norm = np.linalg.norm
    expected = (norm(h[:-1], axis=-1) / norm(h[1:] - h[:-1], axis=-1)).mean(1)
    np.testing.assert_allclose(t["norm_ratio"], expected, rtol=1e-5)
    np.testing.assert_allclose(
        t.result("norm_ratio").arrays["norm"], norm(h, axis=-1).mean(1), rtol=1e-5
    )


def test_a_block_that_adds_nothing_has_no_ratio() -> None:
    model = samples.mlp()
    with torch.no_grad():
        model.blocks[1].fc2.weight.zero_()
        model.blocks[1].fc2.bias.zero_()
    t = ed.trace(model, samples.points(), ["norm_ratio"], progress=False)
    assert np.ma.getmaskarray(t["norm_ratio"]).tolist() == [False, True, False, False]
    assert "block 2 leaves some samples unchanged" in str(t.result("norm_ratio").note)


def test_stages_of_a_resnet_are_compared_in_the_last_stages_channels() -> None:
    model, batch = ENTRIES["CifarResNet-post-projection"].make()
    random = torch.Generator().manual_seed(0)
    data = {"pixel_values": torch.randn(20, 3, 32, 32, generator=random)}
    t = ed.trace(model, data, ["cos"], batch_size=6, progress=False)
    h = samples.features(model, data)
    expected = [[centered_cosines(x, y).mean() for y in h] for x in h]
    np.testing.assert_allclose(t["cos"], expected, atol=1e-5)
    assert batch["pixel_values"].shape[1:] == data["pixel_values"].shape[1:]


def test_two_models_are_compared_depth_by_depth() -> None:
    a, b, data = samples.vit(0), samples.vit(1, layers=2), samples.pictures(40)
    t = ed.trace(a, data, ["cos_between"], against=b, batch_size=7, progress=False)
    x, y = samples.features(a, data), samples.features(b, data)
    expected = [[centered_cosines(p, q).mean() for q in y[1:]] for p in x[1:]]
    np.testing.assert_allclose(t["cos_between"][1:, 1:], expected, atol=1e-5)
    assert t.about["against"] == "ViTForImageClassification"


def test_clip_is_compared_within_and_across_modalities() -> None:
    model, batch = ENTRIES["CLIPModel-vision"].make()
    random = torch.Generator().manual_seed(0)
    batch = {k: torch.cat([v] * 4) for k, v in batch.items()}
    shape = batch["pixel_values"].shape
    batch["pixel_values"] = torch.randn(shape, generator=random)
    batch["input_ids"][:, 1] = torch.randint(3, 50, (shape[0],), generator=random)
    vision, text = (ed.as_stream(model, tower=t) for t in ("vision", "text"))
    names = ["embedding_cos", "embedding_cos_other", "embedding_cos_between"]
    t = ed.trace(vision, batch, names, against=text, batch_size=5, progress=False)

    def embeddings(stream: ed.ResidualStream) -> list[np.ndarray]:
        with torch.no_grad():
            states = stream.observe(batch)
            return [states.logits(i).double().numpy() for i in range(len(states))]

    v, w = embeddings(vision), embeddings(text)
    for name, left, right in zip(names, (v, w, v), (v, w, w), strict=True):
        expected = [[centered_cosines(x, y).mean() for y in right] for x in left]
        found = t[name]
        defined = ~np.ma.getmaskarray(found)
        assert defined[1:, 1:].all()
        np.testing.assert_allclose(found[defined], np.array(expected)[defined], atol=1e-5)


def test_without_centering_what_all_samples_share_counts() -> None:
    model, data = samples.vit(), samples.pictures(30)
    metric = ed.tracing.metrics.similarity.Cos(centered=False)
    t = ed.trace(model, data, [metric], batch_size=7, progress=False)
    h = samples.features(model, data)
    expected = [[1 - paired_cosine_distances(x, y).mean() for y in h] for x in h]
    np.testing.assert_allclose(t["cos"], expected, atol=1e-5)
    assert t["cos"][0, 0] == pytest.approx(1)  # the class token: constant, so nothing if centered
    assert t.result("cos").meta["centered"] is False


def test_a_path_along_a_line_is_straight_and_one_there_and_back_is_not() -> None:
    model, data = samples.vit(), samples.pictures(20)
    t = ed.trace(model, data, ["straightness"], batch_size=7, progress=False)
    h = samples.features(model, data)[1:]
    path = np.linalg.norm(np.diff(h, axis=0), axis=-1).sum(0)
    expected = np.linalg.norm(h[-1] - h[0], axis=-1) / path
    assert float(t["straightness"]) == pytest.approx(expected.mean(), rel=1e-5)
    assert float(t.result("straightness").arrays["q50"]) == pytest.approx(np.median(expected))
    assert 0 < float(t["straightness"]) < 1
    few = ed.trace(samples.mlp(num_hidden_layers=1), samples.points(), ["straightness"])
    assert "two blocks" in str(few.result("straightness").note)
