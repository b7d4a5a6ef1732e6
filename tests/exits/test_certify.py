"""A fixed depth with a promise."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.helpers.generation import DECODERS, decoder, talkative
from tests.zoo import VOCABULARY

import everydepth as ed
from everydepth.errors import PolicyError, SettingError
from everydepth.exits.calibrate import NotCertifiedWarning
from everydepth.exits.certify import certified_depth, certify_depth
from everydepth.exits.policies import Against


def texts(rows: int) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, VOCABULARY, (rows, 5), generator=generator)
    return [{"input_ids": part} for part in ids.split(32)]


@pytest.mark.parametrize("against", ["full", "labels"])
def test_the_depth_after_which_blocks_add_nothing_is_certified(
    against: Against, tmp_path: Path
) -> None:
    model = talkative(decoder(DECODERS[0]), quiet_after=2, scale=0.0)
    stream = ed.as_stream(model)
    assert stream.depth > 2
    policy = certify_depth(model, texts(96), risk=0.1, against=against, progress=False)
    # By chance no depth of a random network predicts labels worse than another.
    assert certified_depth(policy, stream) == {"full": 2, "labels": 1}[against]
    assert policy.certificate is not None
    assert policy.certificate.certified
    policy.save(tmp_path / "policy.json")
    assert ed.Policy.load(tmp_path / "policy.json") == policy


def test_where_every_block_matters_only_the_last_depth_is_left() -> None:
    model = talkative(decoder(DECODERS[0]))
    with pytest.warns(NotCertifiedWarning, match="only the last depth"):
        policy = certify_depth(model, texts(32), risk=0.01, progress=False)
    stream = ed.as_stream(model)
    assert certified_depth(policy, stream) == stream.depth


def test_few_texts_promise_nothing_however_alike_the_depths_are() -> None:
    model = talkative(decoder(DECODERS[0]), quiet_after=2, scale=0.0)
    with pytest.warns(NotCertifiedWarning, match="from 3 samples"):
        certify_depth(model, texts(3), risk=0.1, progress=False)


def test_a_policy_that_decides_row_by_row_certifies_no_depth() -> None:
    stream = ed.as_stream(talkative(decoder(DECODERS[0])))
    with pytest.raises(PolicyError, match="row by row"):
        certified_depth(ed.Confidence(threshold=0.5), stream)
    with pytest.raises(SettingError, match="risk=2"):
        certify_depth(stream, texts(3), risk=2.0)
