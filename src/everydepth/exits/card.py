"""The README of an export."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from everydepth.exits.measure import checkpoint_bytes, parameter_count
from everydepth.exits.narrow import Narrowed, words
from everydepth.exits.policies import Policy
from everydepth.exits.profile import Profile
from everydepth.exits.risk import bounded

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
    """A model card for the Hugging Face Hub: contents, usage, quality and speed."""
    library = {"hf": "transformers", "web": "onnx"}.get(manifest.format, manifest.format)
    whole = manifest.depth == manifest.of
    held = f"{'all' if whole else f'{manifest.depth} of'} {manifest.of} blocks"
    if manifest.balcony:
        held += f" and a balcony of {manifest.balcony}"
    parts = [
        f"---\nlibrary_name: {library}\ntags:\n- everydepth\n- early-exit\n---",
        f"# {manifest.model}, {held}",
        f"{parameter_count(model):,} parameters, {checkpoint_bytes(model):,} bytes of weights. "
        + ("The whole network." if whole else f"The first {held}, with the network's own head."),
        f"## Use\n\n```python\n{usage}\n```",
    ]
    if costs is not None:
        parts.append(f"## Quantization\n\n{words(costs)}")
    if policy is not None:
        parts.append(f"## Early exit\n\n{_policy(policy)}")
    if profile is not None:
        parts.append(
            f"## Every depth\n\nMeasured on {profile.samples:,} samples; latencies are medians on "
            f"the machine that wrote this card.\n\n{profile.table().markdown()}"
        )
    return "\n\n".join(parts) + "\n"


def _policy(policy: Policy) -> str:
    found = policy.certificate
    text = f"Samples exit by {policy.kind}."
    if found is None:
        return f"{text} The thresholds were set by hand, without a guarantee."
    if not found.certified:
        return f"{text} Not certified: {found.note}."
    bound = bounded(found.risk, found.delta, found.samples, found.against)
    return f"{text} {bound[:1].upper()}{bound[1:]}. They ran {found.saved}."
