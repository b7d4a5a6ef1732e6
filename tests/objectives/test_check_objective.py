"""Every objective trains every block and every head; one that does not is found out."""

from __future__ import annotations

import pytest
import torch
from tests.helpers.objectives import FACTORIES
from tests.zoo import ENTRIES
from torch import nn

import everydepth as ed
from everydepth.errors import BatchError, EveryDepthError, LabelError

KINDS = ["ViT", "Llama-tied-CausalLM-left", "CifarResNet-post-projection", "Bert-MaskedLM"]


def make(kind: str, objective: ed.Objective) -> tuple[ed.EveryDepth, dict[str, torch.Tensor]]:
    model, batch = ENTRIES[kind].make()
    rows = 3 if kind in ("ViT", "CifarResNet-post-projection") else batch["input_ids"].shape
    size = (rows,) if isinstance(rows, int) else tuple(rows)
    return ed.EveryDepth(model, objective), {**batch, "labels": torch.randint(0, 7, size)}


@pytest.mark.parametrize("kind", KINDS[:2])
@pytest.mark.parametrize("name", FACTORIES)
def test_every_objective_trains_every_block_and_the_head(name: str, kind: str) -> None:
    net, batch = make(kind, FACTORIES[name])
    report = ed.check_objective(net, batch)
    assert report.ok, str(report)


def test_dropout_draws_from_random_numbers_that_are_put_back() -> None:
    net, batch = make("Bert-MaskedLM", ed.lpa())
    net.train()
    assert any(m.p > 0 for m in net.modules() if isinstance(m, nn.Dropout))
    before = torch.get_rng_state()
    ed.check_objective(net, batch)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("kind", KINDS[2:])
@pytest.mark.parametrize("name", ["lpa-sampled", "layerskip", "multi_classifier-kl"])
def test_so_do_they_in_other_families(name: str, kind: str) -> None:
    net, batch = make(kind, FACTORIES[name])
    report = ed.check_objective(net, batch)
    assert report.ok, str(report)


def test_an_objective_that_forgets_the_last_block_is_found_out() -> None:
    with pytest.warns(UserWarning, match="last depth"):
        net, batch = make("ViT", ed.weighted([0.0, 1.0, 1.0, 1.0, 0.0]))
    report = ed.check_objective(net, batch)
    assert not report.ok
    assert "no gradient: block 4" in str(report)
    assert "does not work as documented" in str(report)
    with pytest.raises(EveryDepthError, match="no gradient: block 4"):
        report.raise_if_failed()


def test_a_head_that_is_cut_off_is_found_out() -> None:
    net, batch = make("ViT", ed.lpa())

    class Detached(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ self.weight.detach().T + self.bias.detach()

    net.model.classifier = Detached(32, 10)
    net._stream = None
    assert "no gradient: the head" in str(ed.check_objective(net, batch))


def test_checking_leaves_the_net_as_it_was() -> None:
    net, batch = make("CifarResNet-post-projection", ed.layerskip(dropout=0.5))
    before = {key: value.clone() for key, value in net.state_dict().items()}
    ed.check_objective(net, batch)
    assert all(torch.equal(before[key], value) for key, value in net.state_dict().items())
    assert all(p.grad is None for p in net.parameters())
    assert (net.step, net.training) == (0, False)


def test_the_report_reads_well() -> None:
    net, batch = make("ViT", ed.lpa())
    text = str(ed.check_objective(net, batch))
    assert text.startswith("lpa trains every block (cycle of 1 steps, 1 run)")
    assert text.endswith("mean weight of depth 0..4: 0 0.1 0.1 0.1 1")


def test_a_batch_of_lists_is_refused() -> None:
    net, batch = make("ViT", ed.lpa())
    with pytest.raises(BatchError, match=r"pixel_values is list; pass a tensor"):
        ed.check_objective(net, {name: value.tolist() for name, value in batch.items()})


def test_labels_are_asked_for_where_the_objective_needs_them() -> None:
    net, batch = make("ViT", ed.lpa())
    with pytest.raises(LabelError, match="labels"):
        ed.check_objective(net, {"pixel_values": batch["pixel_values"]})
    text, ids = make("Llama-tied-CausalLM-left", ed.lpa())
    del ids["labels"]
    assert ed.check_objective(text, ids).ok  # text is its own label
