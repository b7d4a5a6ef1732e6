"""Clear errors, or clearly marked gaps."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tests.helpers import tracing as samples

import everydepth as ed
from everydepth.errors import BatchError, LabelError, NonFiniteError, SettingError
from everydepth.tracing import metric


def traced(data: Any, metrics: Any = None, **options: Any) -> ed.Trace:
    return ed.trace(samples.vit(), data, metrics, progress=False, **options)


def unlabeled(count: int = 8) -> dict[str, torch.Tensor]:
    return {"pixel_values": samples.pictures(count)["pixel_values"]}


def test_metrics_that_need_labels_are_named_with_what_to_drop() -> None:
    with pytest.raises(LabelError) as error:
        traced(unlabeled(), ["loss", "cos", "accuracy"])
    message = str(error.value)
    assert "loss: needs labels, but the batch has keys ['pixel_values']" in message
    assert "accuracy: needs labels" in message
    assert "Add 'labels' to the data, or drop them: metrics=['cos']" in message


def test_without_a_list_of_metrics_those_that_need_labels_are_skipped_and_named() -> None:
    t = traced(unlabeled())
    assert "loss" not in t
    assert t.skipped["loss"].startswith("needs labels")
    assert "saturation" in t
    with pytest.raises(SettingError, match=r"this trace has no 'loss' \(loss was left out: needs"):
        t["loss"]


def test_a_metric_that_does_not_exist_gets_the_closest_name() -> None:
    with pytest.raises(SettingError, match="there is no metric 'acuracy'; did you mean 'accuracy"):
        traced(samples.pictures(8), ["acuracy"])
    with pytest.raises(SettingError, match="did you mean 'loss'"):
        traced(samples.pictures(8), ["loss"]).result("los")


def test_a_metric_of_another_task_says_so() -> None:
    with pytest.raises(SettingError, match=r"mse: for regression, not classification\. Drop them"):
        traced(samples.pictures(8), ["mse", "loss"])


def test_a_single_class_leaves_a_gap_in_neural_collapse() -> None:
    data = {**samples.pictures(8), "labels": torch.full((8,), 2)}
    t = traced(data, ["neural_collapse", "distinguishability", "loss"])
    assert t.result("neural_collapse").is_gap
    assert t.result("neural_collapse").note == "it needs 2 classes or more, and the data has 1"
    assert "the same label" in str(t.result("distinguishability").note)
    assert "neural_collapse: it needs 2 classes" in str(t.table())


def test_fewer_samples_than_classes_leave_a_gap() -> None:
    data = {**samples.pictures(4), "labels": torch.arange(4)}
    note = str(traced(data, ["neural_collapse"]).result("neural_collapse").note)
    assert note.startswith("it needs more samples than classes, and the data has 4 samples in 4")


def test_classes_that_do_not_occur_are_named() -> None:
    data = {**samples.pictures(12), "labels": torch.arange(12) % 3}
    t = traced(data, ["neural_collapse"])
    assert "3 of 6 classes are in the data" in str(t.result("neural_collapse").note)
    assert np.isfinite(np.ma.filled(t["neural_collapse"], 0)).all()


def test_one_sample_gives_gaps_and_no_nan() -> None:
    t = traced(samples.pictures(1))
    assert t.result("cos").note == "centering needs 2 samples or more"
    assert t.result("cka").is_gap
    assert t["loss"].shape == (4,)
    for result in t.results.values():
        for array in result.arrays.values():
            assert array.dtype.kind != "f" or np.isfinite(np.ma.filled(array, 0)).all()


def test_constant_features_have_no_cosine_and_are_masked_not_nan() -> None:
    data = samples.pictures(10)
    data["pixel_values"][:] = data["pixel_values"][:1]
    t = traced(data)
    for name in ("cos", "cka"):
        assert np.ma.getmaskarray(t[name]).all()
        assert not np.isnan(np.ma.getdata(t[name])).any()
    assert "undefined at depth 0, 1, 2, 3" in str(t.result("cos").note)
    assert "all classes have the same mean" in str(t.result("neural_collapse").note)


def test_notes_name_depths_when_only_some_are_read_out() -> None:
    data = samples.pictures(10)
    data["pixel_values"][:] = data["pixel_values"][:1]
    t = ed.trace(samples.vit(), data, ["cos", "adjacent_cos"], depths=[1, 3], progress=False)
    assert "undefined at depth 1, 3," in str(t.result("cos").note)
    assert "undefined at depth 3:" in str(t.result("adjacent_cos").note)


@pytest.mark.parametrize("numbers", [False, True])
def test_batches_without_labels_do_not_count_where_labels_are_needed(numbers: bool) -> None:
    model = samples.mlp() if numbers else samples.vit()
    data = samples.points(48, 1) if numbers else samples.pictures(48)
    few = [{key: value[i::4] for key, value in data.items()} for i in range(4)]
    for batch in few[2:]:
        del batch["labels"]
    fitting = ed.trace(model, few[:1], "all", progress=False)
    names = [n for n, m in metric._registry.items() if n in fitting and m.needs == {"labels"}]  # pyright: ignore[reportPrivateUsage]
    assert len(names) > 3
    mixed = ed.trace(model, few, names, progress=False)
    alone = ed.trace(model, few[:2], names, progress=False)
    assert (mixed.samples, alone.samples) == (48, 24)
    for name in names:
        np.testing.assert_array_equal(mixed[name], alone[name], err_msg=name)


def test_labels_that_are_all_ignored_leave_a_gap() -> None:
    data = {**samples.pictures(8), "labels": torch.full((8,), -100)}
    t = traced(data, ["loss", "accuracy", "f1", "calibration", "neural_collapse"])
    assert {r.note for r in t.results.values()} == {"the data has no labels"}


def test_an_infinite_prediction_names_its_depth() -> None:
    model = samples.mlp(regression=False, num_outputs=3, norm=False)
    with torch.no_grad():
        model.head.weight[0] = torch.inf
    data = {"inputs": torch.ones(4, 2), "labels": torch.tensor([0, 1, 2, 1])}
    with pytest.raises(NonFiniteError, match="predictions at depth 0 of 4"):
        ed.trace(model, data, ["loss", "accuracy"], progress=False)


def test_nan_in_the_states_names_the_block() -> None:
    model = samples.vit()
    with torch.no_grad():
        model.vit.layers[1].mlp.fc1.weight.fill_(torch.nan)
    with pytest.raises(NonFiniteError, match="first appears after block 2"):
        ed.trace(model, samples.pictures(4), progress=False)


def test_labels_that_do_not_fit_the_head_are_refused() -> None:
    data = {**samples.pictures(4), "labels": torch.tensor([0, 1, 9, 2])}
    with pytest.raises(LabelError, match=r"label 9, but the head of .* has 6 classes"):
        traced(data, ["loss"])


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], "the data has no batches"),
        (3, "data is int; pass batches"),
        ([b"a"], "a batch is bytes; pass mappings"),
        ([{"labels": torch.zeros(2)}], "the batch has keys .'labels'., but"),
    ],
)
def test_data_of_the_wrong_form_is_refused(data: Any, message: str) -> None:
    with pytest.raises(BatchError, match=message):
        traced(data)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_samples": 0}, "max_samples=0; use 1 or more"),
        ({"batch_size": 0}, "batch_size=0; use 1 or more"),
        ({"memory_budget": -1}, r"memory_budget=-1\); use a whole number of 0 or more"),
        ({"metrics": []}, "metrics is empty"),
        ({"metrics": ["cos_between"]}, "needs a second model; pass against="),
    ],
)
def test_settings_out_of_range_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingError, match=message):
        traced(samples.pictures(4), **options)


def test_a_batch_size_for_data_in_batches_is_refused() -> None:
    with pytest.raises(SettingError, match="batch_size=4, but list is already in batches"):
        traced([samples.pictures(4)], ["loss"], batch_size=4)


def test_features_of_different_width_leave_a_gap() -> None:
    t = traced(samples.pictures(8), ["cos_between"], against=samples.vit(width=16))
    assert "features of widths 32 and 16 have no cosine" in str(t.result("cos_between").note)


def test_token_metrics_refuse_states_of_changing_shape() -> None:
    from tests.zoo import ENTRIES

    model, batch = ENTRIES["CifarResNet-post-pad"].make()
    with pytest.raises(SettingError, match="token_cka: needs tokens, but CifarResNet has no atten"):
        ed.trace(model, batch, ["token_cka"], progress=False)


def test_gradients_without_a_loss_are_refused() -> None:
    from tests.zoo import ENTRIES

    model, batch = ENTRIES["CLIPVision"].make()
    with pytest.raises(SettingError, match=r"gradient_norm: for .*, not embedding"):
        ed.trace(model, batch, ["gradient_norm"], progress=False)
