"""Batched early exit: the same as one row at a time, for every classifier, in order."""

from __future__ import annotations

import pytest
import torch
import transformers as hf
from tests.helpers.rows import more_rows
from tests.zoo import CLASSIFIERS, ENTRIES, Entry
from torch import Tensor, nn

import everydepth as ed
from everydepth.errors import BatchError, PolicyError
from everydepth.exits import evaluate, predict
from everydepth.exits.calibrate import observe
from everydepth.exits.policies import NEVER, POLICIES, Agreement, Confidence, Patience, Policy
from everydepth.stream import as_stream, check_stream
from everydepth.stream.rows import select_rows


def splitting(model: nn.Module, batch: dict[str, Tensor], entry: Entry) -> Confidence:
    """Thresholds between two rows at every depth, so that some leave and some stay."""
    certainty = observe(as_stream(model, **entry.options), batch, Confidence).certainty
    ordered = certainty.sort(0, descending=True).values
    third = len(ordered) // 3
    return Confidence(threshold=tuple(((ordered[third] + ordered[third + 1]) / 2).tolist()))


def one_by_one(
    model: nn.Module, batch: dict[str, Tensor], policy: Policy, **options: object
) -> tuple[list[int], list[int]]:
    """The plain reference: every depth of every row, read out by the model itself."""
    stream = as_stream(model, **options)
    thresholds = (*policy.for_stream(stream), -NEVER)
    labels, depths = [], []
    size = next(iter(batch.values())).shape[0]
    for row in range(size):
        with torch.no_grad():
            states = stream.observe(select_rows(batch, torch.tensor([row]), size))
            memory = ()
            for depth, threshold in enumerate(thresholds, start=1):
                logits = states.logits(depth)
                score, memory = policy.certainty(logits, memory)
                if float(score) >= threshold:
                    break
        labels.append(int(logits.argmax()))
        depths.append(depth)
    return labels, depths


@pytest.mark.parametrize("name", sorted(CLASSIFIERS))
def test_a_batch_gives_what_one_row_at_a_time_gives(name: str) -> None:
    entry = CLASSIFIERS[name]
    model, batch = entry.make(torch.float64)
    batch = more_rows(batch, 7)
    policy = splitting(model, batch, entry)
    found = predict(model, batch, policy=policy, **entry.options)
    labels, depths = one_by_one(model, batch, policy, **entry.options)
    assert found.labels.tolist() == labels
    assert found.depths.tolist() == depths
    assert len(set(depths)) > 1


@pytest.mark.parametrize("kind", sorted(POLICIES))
def test_every_policy_gives_what_one_row_at_a_time_gives(kind: str) -> None:
    model, batch = ENTRIES["Bert-SequenceClassification"].make(torch.float64)
    batch = more_rows(batch, 9)
    certainty = observe(as_stream(model), batch, POLICIES[kind]).certainty
    spread = certainty[:, 1].unique()
    between = POLICIES[kind].least(float(spread[len(spread) // 2]) + 1e-9)
    policy = POLICIES[kind](threshold=between)
    found = predict(model, batch, policy=policy)
    assert (found.labels.tolist(), found.depths.tolist()) == one_by_one(model, batch, policy)


def test_the_logits_of_a_row_are_those_of_the_depth_where_it_left() -> None:
    entry = ENTRIES["ViT"]
    model, batch = entry.make(torch.float64)
    batch = more_rows(batch, 8)
    found = predict(model, batch, policy=splitting(model, batch, entry))
    with torch.no_grad():
        states = as_stream(model).observe(batch)
    for row, depth in enumerate(found.depths.tolist()):
        torch.testing.assert_close(found.logits[row], states.logits(depth)[row])


def test_a_policy_that_never_leaves_gives_the_untouched_models_output() -> None:
    for name in ("ViT", "Llama-tied-SequenceClassification-left"):
        model, batch = ENTRIES[name].make()
        found = predict(model, batch, policy=Confidence(threshold=NEVER))
        with torch.no_grad():
            assert torch.equal(found.logits, model(**batch).logits)
        assert found.depths.unique().tolist() == [as_stream(model).depth]


def test_everyone_leaves_at_once_if_the_threshold_is_zero() -> None:
    model, batch = ENTRIES["ViT"].make()
    ran: list[int] = []
    for number, block in enumerate(as_stream(model).blocks, start=1):
        entry = block.branches[0].entry
        entry.register_forward_hook(lambda *_, number=number: ran.append(number))
    assert predict(model, batch, policy=Confidence(threshold=0.0)).depths.tolist() == [1, 1, 1]
    assert ran == [1]


def test_rows_that_are_done_are_not_computed_any_further() -> None:
    entry = ENTRIES["ViT"]
    model, batch = entry.make(torch.float64)
    batch = more_rows(batch, 9)
    policy, rows = splitting(model, batch, entry), []
    for block in as_stream(model).blocks:
        entering = block.branches[0].entry
        entering.register_forward_hook(lambda _, args, __: rows.append(args[0].shape[0]))
    found = predict(model, batch, policy=policy)
    expected = [int((found.depths >= depth).sum()) for depth in range(1, 5)]
    assert rows == [count for count in expected if count]


def test_depths_where_nobody_may_leave_are_not_read_out() -> None:
    model, batch = ENTRIES["ViT"].make()
    heads: list[int] = []
    as_stream(model)  # is looked at once
    model.classifier.register_forward_hook(lambda *_: heads.append(1))
    predict(model, batch, policy=Confidence(threshold=(NEVER, NEVER, NEVER)))
    assert len(heads) == 1


def test_a_model_in_training_predicts_in_eval_mode_and_goes_on_training() -> None:
    model, batch = ENTRIES["Bert-SequenceClassification"].make()
    policy = Confidence(threshold=0.4)
    expected = predict(model, batch, policy=policy)
    model.train()
    assert torch.equal(predict(model, batch, policy=policy).logits, expected.logits)
    assert model.training
    model.eval()
    assert check_stream(model, batch).ok


def test_a_batch_may_come_as_inputs_alone_or_with_labels() -> None:
    model, batch = ENTRIES["ViT"].make()
    x, policy = batch["pixel_values"], Confidence(threshold=0.3)
    expected = predict(model, batch, policy=policy)
    for form in (x, x.numpy(), (x, torch.zeros(len(x)).long())):
        found = predict(model, form, policy=policy)
        assert torch.equal(found.logits, expected.logits)


def test_an_empty_batch_and_a_foreign_policy_are_refused() -> None:
    model, batch = ENTRIES["ViT"].make()
    with pytest.raises(BatchError, match="the batch is empty"):
        predict(model, torch.zeros(0, 3, 32, 32), policy=Confidence(threshold=0.5))
    with pytest.raises(PolicyError, match="thresholds for 3 depths"):
        predict(model, batch, policy=Agreement(threshold=(0.5, 0.5)))


def test_evaluation_counts_what_prediction_does() -> None:
    entry = ENTRIES["ViT"]
    model, batch = entry.make(torch.float64)
    batch = more_rows(batch, 12)
    policy = splitting(model, batch, entry)
    found = predict(model, batch, policy=policy)
    with torch.no_grad():
        full = model(**batch).logits.argmax(-1)
    labels = full.clone()
    labels[0] = -100
    result = evaluate(
        model, batch | {"labels": labels}, policy, batch_size=5, repeats=2, progress=False
    )
    assert result.samples == 12
    assert result.exits == tuple(int((found.depths == depth).sum()) for depth in range(1, 5))
    assert result.accuracy_full == 1
    assert result.accuracy == pytest.approx(float((found.labels == full)[1:].double().mean()))
    assert result.agreement == pytest.approx(float((found.labels == full).double().mean()))
    assert result.layer_speedup == pytest.approx(4 * 12 / int(found.depths.sum()))
    assert result.block_speedup is not None
    assert 1 < result.block_speedup < 4
    assert result.measured_speedup == pytest.approx(result.seconds_full / result.seconds)
    assert result.table().column("exits") == list(result.exits)


def test_evaluation_without_labels_reports_agreement_only() -> None:
    model, batch = ENTRIES["ViT"].make()
    result = evaluate(model, [batch], Patience(threshold=1.0), progress=False)
    assert result.accuracy is None
    assert 0 <= result.agreement <= 1


def test_rows_leave_early_with_positions_of_their_own_after_a_batch_without() -> None:
    torch.manual_seed(0)
    config = hf.LlamaConfig(
        vocab_size=50, hidden_size=16, intermediate_size=32, num_hidden_layers=3,
        num_attention_heads=2, pad_token_id=0, num_labels=3,
    )  # fmt: skip
    model = hf.LlamaForSequenceClassification(config).eval()
    torch.nn.init.normal_(model.score.weight)
    stream, ids = ed.as_stream(model), torch.randint(1, 50, (8, 6))
    mask = torch.ones_like(ids)
    ids[1:, :3], mask[1:, :3] = 0, 0
    padded = {"input_ids": ids, "attention_mask": mask}
    placed = {**padded, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}
    for batch in ({"input_ids": torch.randint(1, 50, (8, 6))}, placed, padded, placed):
        with torch.no_grad():
            states = stream.observe(batch)
            half = float(states.logits(1).softmax(-1).amax(-1).median())
        found = ed.predict(stream, batch, policy=ed.Confidence(threshold=half))
        assert len(set(found.depths.tolist())) > 1
        for row, depth in enumerate(found.depths.tolist()):
            torch.testing.assert_close(found.logits[row], states.logits(depth)[row])
