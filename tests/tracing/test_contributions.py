"""What blocks and branches add to the output telescopes to the whole."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.helpers import tracing as samples
from tests.zoo import CLASSIFIERS

import everydepth as ed


def test_contributions_telescope_from_the_embedding_to_the_output() -> None:
    model, data = samples.vit(), samples.pictures(50)
    t = ed.trace(model, data, ["contributions"], batch_size=8, progress=False)
    z, y = samples.logits(model, data), data["labels"].numpy()
    a = t.result("contributions").arrays
    followed = z[:, np.arange(50), y].mean(1)
    np.testing.assert_allclose(a["target"], np.diff(followed), atol=1e-5)
    assert float(a["start"][0] + a["target"].sum()) == pytest.approx(followed[-1], abs=1e-5)
    expected = np.linalg.norm(np.diff(z, axis=0), axis=-1).mean(1)
    np.testing.assert_allclose(a["norm"], expected, rtol=1e-5)


def test_with_a_linear_readout_a_contribution_is_the_head_of_what_the_branch_adds() -> None:
    model, data = samples.mlp(num_outputs=3), samples.points(20, 3)
    t = ed.trace(model, data, ["contributions"], progress=False)
    with torch.no_grad():
        h = model.embed(data["inputs"])
        for depth, block in enumerate(model.blocks):
            added = block.fc2(torch.relu(block.fc1(h)))
            wf = added @ model.head.weight.T  # W F_l(h_{l-1}), Eq. 10
            norm = t.result("contributions").arrays["norm"][depth]
            assert norm == pytest.approx(float(wf.norm(dim=1).mean()), rel=1e-5)
            h = h + added


def test_without_labels_the_final_prediction_is_followed() -> None:
    model, data = samples.vit(), samples.pictures(30)
    t = ed.trace(model, {"pixel_values": data["pixel_values"]}, ["contributions"], progress=False)
    z = samples.logits(model, data)
    followed = z[:, np.arange(30), z[-1].argmax(1)].mean(1)
    np.testing.assert_allclose(
        t.result("contributions").arrays["target"], np.diff(followed), atol=1e-5
    )


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_the_branches_of_a_block_add_up_to_the_block(name: str) -> None:
    model, batch = CLASSIFIERS[name].make()
    stream = ed.as_stream(model, **CLASSIFIERS[name].options)
    t = ed.trace(stream, batch, ["contributions", "branch_contributions"], progress=False)
    parts = t.result("branch_contributions")
    targets = [np.ma.filled(parts.arrays[n], 0) for n in parts.series if n.endswith("_target")]
    np.testing.assert_allclose(
        np.sum(targets, 0), t.result("contributions").arrays["target"], atol=1e-5
    )


def test_the_state_between_two_branches_is_read_out() -> None:
    model, data = samples.vit(), samples.pictures(20)
    t = ed.trace(model, data, ["branch_contributions"], batch_size=6, progress=False)
    stream = ed.as_stream(model)
    with torch.no_grad():
        states = stream.observe({"pixel_values": data["pixel_values"]})
        for depth, layer in enumerate(model.vit.layers, start=1):
            x = states[depth - 1]
            attended = layer.attention(layer.layernorm_before(x))
            between = x + (attended if isinstance(attended, torch.Tensor) else attended[0])
            z = [states.logits(depth - 1), stream.readout(between, depth, {}), states.logits(depth)]
            for name, a, b in (("attention", z[0], z[1]), ("mlp", z[1], z[2])):
                found = t.result("branch_contributions").arrays[name][depth - 1]
                assert found == pytest.approx(float((b - a).norm(dim=1).mean()), rel=1e-4)


def test_parallel_branches_are_split_too() -> None:
    from tests.zoo import ENTRIES

    name = next(n for n in ENTRIES if "NeoX" in n and "parallel" in n.lower() and "Causal" in n)
    model, batch = ENTRIES[name].make()
    t = ed.trace(model, batch, ["contributions", "branch_contributions"], progress=False)
    parts = t.result("branch_contributions").arrays
    np.testing.assert_allclose(
        parts["attention_target"] + parts["mlp_target"],
        t.result("contributions").arrays["target"],
        atol=1e-5,
    )


def test_a_block_is_held_against_what_was_missing_before_it() -> None:
    model, data = samples.mlp(num_outputs=2), samples.points()
    t = ed.trace(model, data, ["residual_target"], batch_size=7, progress=False)
    with torch.no_grad():
        states = ed.as_stream(model).observe(data)
        z = np.stack([states.logits(depth).numpy() for depth in range(len(states))])
    missing, added = (data["labels"].numpy() - z)[:-1], np.diff(z, axis=0)
    product = (missing * added).sum((1, 2))
    lengths = [np.sqrt(np.square(part).sum((1, 2))) for part in (missing, added)]
    found = t.result("residual_target").arrays
    np.testing.assert_allclose(found["cosine"], product / lengths[0] / lengths[1], atol=1e-5)
    np.testing.assert_allclose(found["share"], lengths[1] / lengths[0], rtol=1e-5)
    assert found["depth"].tolist() == [1, 2, 3, 4]
