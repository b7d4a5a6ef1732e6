"""The README of an export: what it is, how good and how fast, how to load it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from everydepth.exits.measure import checkpoint_bytes, parameter_count
from everydepth.exits.narrow import Narrowed, words
from everydepth.exits.policies import Policy
from everydepth.exits.profile import Profile

if TYPE_CHECKING:
    from everydepth.exits.export import Manifest


def model_card(
    manifest: Manifest,
    model: nn.Module,
    *,
    profile: Profile | None,
    policy: Policy | None,
    usage: str,
    costs: Narrowed | None = None,
) -> str:
    """Markdown with the front matter that the Hugging Face hub reads."""
    library = {"hf": "transformers", "web": "onnx"}.get(manifest.format, manifest.format)
    whole = manifest.depth == manifest.of
    parts = [
        f"---\nlibrary_name: {library}\ntags:\n- everydepth\n- early-exit\n---",
        f"# {manifest.model}, {'all' if whole else f'{manifest.depth} of'} {manifest.of} blocks",
        f"{parameter_count(model):,} parameters, {checkpoint_bytes(model):,} bytes of weights. "
        + (
            "The whole network."
            if whole
            else f"The first {manifest.depth} blocks of a network of {manifest.of}, "
            "read out by its own head."
        ),
        f"## Use\n\n```python\n{usage}\n```",
    ]
    if costs is not None:
        parts.append(f"## Fewer bits\n\n{words(costs)}")
    if policy is not None:
        parts.append(f"## Leaving early\n\n{_policy(policy)}")
    if profile is not None:
        parts.append(
            f"## Every depth\n\nOn {profile.samples:,} samples; latencies are medians "
            f"on the machine that made this card.\n\n{profile.table().markdown()}"
        )
    return "\n\n".join(parts) + "\n"


def _policy(policy: Policy) -> str:
    found = policy.certificate
    text = f"Samples leave by {policy.kind}."
    if found is None:
        return f"{text} The thresholds were set by hand: nothing is promised."
    if not found.certified:
        return f"{text} Not certified: {found.note}."
    risk = {
        "full": "predictions other than the full model's",
        "labels": "accuracy lost",
        "loss": "loss gained",
    }[found.against]
    return (
        f"{text} With probability {1 - found.delta:g} over {found.samples:,} calibration samples, "
        f"{risk}: at most {found.risk:g}. Layer-count speed-up on them: {found.speedup:.2f}."
    )
