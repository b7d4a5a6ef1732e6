"""`check_stream`: the contract as a test to run on your own model."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 (its usual name)

from everydepth.config import checked
from everydepth.errors import FOREIGN, EveryDepthError, SettingError, UnsupportedModelError
from everydepth.stream.block import Block
from everydepth.stream.contract import IGNORE_INDEX, TOKEN_TASKS, Batch, ResidualStream
from everydepth.stream.modes import as_written, differentiating, evaluating
from everydepth.stream.registry import as_stream
from everydepth.stream.states import States
from everydepth.stream.taps import (
    BranchRecord,
    first_tensor,
    hooked,
    record_branches,
    with_first_tensor,
)
from everydepth.stream.targets import Targets, check_labels
from everydepth.stream.wrapping import check_copied, check_resident, sharded, unwrapped


@dataclass(frozen=True)
class Check:
    """One clause of the contract. `passed` is None if the clause does not apply."""

    name: str
    passed: bool | None
    detail: str


Report = TypeVar("Report", bound="CheckReport")


@dataclass(frozen=True, kw_only=True)
class CheckReport(ABC):
    """A list of checks; prints as a verdict and a table."""

    checks: tuple[Check, ...]

    @property
    @abstractmethod
    def verdict(self) -> str:
        """One line."""

    @property
    def ok(self) -> bool:
        return all(check.passed is not False for check in self.checks)

    def __str__(self) -> str:
        marks = {True: "ok  ", False: "FAIL", None: "-   "}
        width = max(len(check.name) for check in self.checks)
        lines = [f"{marks[c.passed]} {c.name:<{width}}  {c.detail}" for c in self.checks]
        return "\n".join([self.verdict, *lines])

    def raise_if_failed(self: Report) -> Report:
        if not self.ok:
            raise EveryDepthError(str(self))
        return self


@dataclass(frozen=True, kw_only=True)
class StreamReport(CheckReport):
    """The outcome of `check_stream`; prints as a verdict and a table."""

    model: str

    @property
    def verdict(self) -> str:
        return f"{self.model} {'is a residual stream' if self.ok else 'breaks the contract'}"


@checked
def check_stream(model: nn.Module | ResidualStream, batch: Batch, **options: Any) -> StreamReport:
    """Check every clause of the contract on one batch, preferably of two rows or more.

    The model is checked in eval mode and left unchanged.

    >>> report = ed.check_stream(model, test.batch(range(4)))
    >>> report.ok
    True
    """
    stream = as_stream(model, **options)
    batch = stream.check_batch(batch)
    if isinstance(batch.get("labels"), Tensor):
        check_labels(stream, batch["labels"])
    inner = unwrapped(stream.model)
    before = _fingerprint(inner)
    clauses: dict[str, Callable[[_Evidence], str | None]] = {
        "last depth is the model": _last_depth,
        "observe equals drive": _drive,
        "branches add up": _branches,
        "a zero projection is silent": _silence,
        "gradient reaches every block": _gradient,
        "rows can be selected": _rows,
        "truncation gives the same": _truncation,
        "cache equals full forward": _cache,
        "the loss is the model's own": _loss,
    }
    checks: list[Check] = []
    with evaluating(inner), as_written(inner):
        with torch.no_grad():
            evidence = _Evidence(
                stream, stream.observe(batch), stream.call(stream.arguments(batch, None))
            )
        for name, clause in clauses.items():
            checks.append(_judged(name, clause, evidence))
    after = _fingerprint(inner)
    left = [key for key in before if before[key] != after[key]]
    checks.append(
        Check(
            "nothing is left behind",
            not left,
            f"changed: {left}" if left else "no hooks, forward, config and mode as before",
        )
    )
    return StreamReport(model=stream.name, checks=tuple(checks))


@dataclass(frozen=True)
class _Evidence:
    stream: ResidualStream
    states: States
    output: Any

    @property
    def batch(self) -> Mapping[str, Any]:
        return self.states.batch

    def tolerance(self, scale: Tensor) -> float:
        # 1e-6 relative in float32 and 1e-12 in float64, with room for sums over a layer.
        eps = {torch.float64: 1e-12, torch.float32: 1e-6}.get(scale.dtype, 2e-2)
        return eps * max(1.0, float(scale.abs().max()))


class _Failed(Exception):
    """A clause does not hold; the message says why."""


class _NotApplicable(Exception):
    """A clause does not apply to this model; the message says why."""


def _judged(name: str, clause: Callable[[_Evidence], str | None], evidence: _Evidence) -> Check:
    try:
        return Check(name, True, clause(evidence) or "")
    except _NotApplicable as reason:
        return Check(name, None, str(reason))
    except _Failed as reason:
        return Check(name, False, str(reason))
    except (EveryDepthError, *FOREIGN) as error:
        return Check(name, False, f"{type(error).__name__}: {error}")


def _difference(a: Tensor, b: Tensor) -> float:
    if a.shape != b.shape:
        raise _Failed(f"shapes differ: {tuple(a.shape)} and {tuple(b.shape)}")
    return float((a - b).abs().max())


@torch.no_grad()
def _last_depth(e: _Evidence) -> str:
    expected = e.stream.prediction(e.output)
    found = e.stream.readout(e.states.h[-1], e.stream.depth, e.batch)
    if not torch.equal(found, expected):
        raise _Failed(f"readout(h_L) differs from the model by {_difference(found, expected):.1e}")
    if not torch.equal(e.stream.prediction(e.states.output), expected):
        raise _Failed("observing changed the model's output")
    for name, value in e.stream.extras(e.states.h[-1], e.stream.depth, e.batch).items():
        if not torch.equal(value, getattr(e.output, name)):
            raise _Failed(f"{name} differs from the model's own")
    return f"bit for bit, shape {tuple(expected.shape)}"


@torch.no_grad()
def _drive(e: _Evidence) -> str:
    cursor, worst = e.stream.start(e.batch), 0.0
    for depth, h in enumerate(e.states):
        if depth:
            cursor = e.stream.step(cursor)
        worst = max(worst, _difference(cursor.h, h))
        if worst > e.tolerance(h):
            raise _Failed(f"at depth {depth} the states differ by {worst:.1e}")
    return f"at all {e.stream.depth + 1} depths, largest difference {worst:.0e}"


@torch.no_grad()
def _branches(e: _Evidence) -> str:
    blocks = e.stream.blocks
    if not any(block.branches for block in blocks):
        raise _NotApplicable("branches are unknown")
    given: list[Tensor] = []

    def see(_: nn.Module, __: Any, output: Any) -> None:
        given.append(first_tensor(output).clone())

    modules = dict.fromkeys(block.module for block in blocks)
    handles = [module.register_forward_hook(see) for module in modules]
    with hooked(*handles), record_branches(blocks, copy=True) as records:
        e.stream.call(e.stream.arguments(e.batch, None))
    worst = 0.0
    for number, (block, record) in enumerate(zip(blocks, records, strict=True), start=1):
        for name, found, then in _sums(block, record) if record else ():
            expected = given[number - 1] if then is None else then
            gap = _moved_difference(found, expected, e.tolerance(expected))
            if gap > e.tolerance(expected) and then is None:
                # The model may apply `post` to the last sum outside the block.
                found, expected = e.stream.between(found, number, e.batch), e.states.h[number]
                gap = _moved_difference(found, expected, e.tolerance(expected))
            worst = max(worst, gap)
            if gap > e.tolerance(expected):
                raise _Failed(f"block {number}, {name}: post(skip(x) + out) is off by {gap:.1e}")
    total = sum(len(block.branches) for block in blocks)
    return f"{total} branches, largest difference {worst:.0e}"


def _sums(
    block: Block, records: list[BranchRecord]
) -> Generator[tuple[str, Tensor, Tensor | None], None, None]:
    """For each sum: its name, `post(skip(x) + out)`, and the next `x` (None after the last)."""
    shape = records[0].shape
    together = [block.parallel or branch.beside for branch in block.branches]
    total = records[0].x
    for i, (branch, record) in enumerate(zip(block.branches, records, strict=True)):
        x = total if i and together[i] else record.x
        total = branch.added(x, record.out)
        if i + 1 < len(records) and together[i + 1]:
            continue
        then = records[i + 1].x if i + 1 < len(records) else None
        # Some blocks flatten tokens into rows for one branch.
        target = shape if then is None else then.shape
        found = total if branch.post is None else branch.post(total)
        found = found.reshape(target) if found.ndim != len(target) else found
        yield "parallel branches" if together[i] and i else branch.kind, found, then


def _moved_difference(a: Tensor, b: Tensor, tolerance: float) -> float:
    """The largest difference; if a block rearranged entries (into windows), of sorted entries."""
    gap = _difference(a, b) if a.shape == b.shape else float("inf")
    if gap > tolerance and a.numel() == b.numel():
        gap = _difference(a.flatten().sort().values, b.flatten().sort().values)
    return gap


@torch.no_grad()
def _silence(e: _Evidence) -> str:
    """A branch whose projection outputs zero adds zero; inserting a block relies on it."""
    blocks = e.stream.blocks
    projections = [proj for block in blocks for branch in block.branches for proj in branch.last]
    if not projections:
        raise _NotApplicable("branches are unknown")

    def zero(_: nn.Module, __: Any, output: Any) -> Any:
        return with_first_tensor(output, torch.zeros_like(first_tensor(output)))

    handles = [proj.register_forward_hook(zero) for proj in dict.fromkeys(projections)]
    with hooked(*handles), record_branches(blocks, copy=True) as records:
        e.stream.call(e.stream.arguments(e.batch, None))
    for number, (block, record) in enumerate(zip(blocks, records, strict=True), start=1):
        for branch, seen in zip(block.branches, record, strict=True):
            if bool(seen.out.any()):
                raise _Failed(f"block {number}, {branch.kind}: proj is zero, out is not")
    return f"{len(projections)} projections"


def _gradient(e: _Evidence) -> str:
    blocks = [list(block.module.parameters()) for block in e.stream.blocks]
    if not all(any(p.requires_grad for p in params) for params in blocks):
        raise _NotApplicable("some blocks are frozen")
    if sharded(e.stream.model):
        raise _NotApplicable("sharded parameters get their gradients after the backward pass")
    _where(check_resident, e.stream.model, "a gradient")
    with differentiating():
        states = e.stream.observe(e.batch)
        loss = sum(
            (states.logits(d).float().square().mean() for d in range(1, len(states))),
            torch.zeros(()),
        )
        wanted = [p for p in dict.fromkeys(chain(*blocks)) if p.requires_grad]
        grads = torch.autograd.grad(loss, wanted, allow_unused=True, materialize_grads=True)
        reached = {p for p, grad in zip(wanted, grads, strict=True) if bool(grad.any())}
        for number, params in enumerate(blocks, start=1):
            if reached.isdisjoint(params):
                raise _Failed(f"block {number} gets no gradient")
    return f"{len(blocks)} blocks"


def _where(check: Callable[..., None], *about: Any) -> None:
    """Make the clause not applicable if a check of the model raises."""
    try:
        check(*about)
    except UnsupportedModelError as reason:
        raise _NotApplicable(str(reason)) from reason


@torch.no_grad()
def _rows(e: _Evidence) -> str:
    stream = e.stream
    cursor = stream.start(e.batch)
    if cursor.batch_size < 2:
        raise _NotApplicable("the batch has one row; pass two or more")
    rows = torch.arange(cursor.batch_size - 1, -1, -2, device=cursor.h.device)
    for depth in (0, stream.depth // 2):
        part = stream.advance(stream.advance(cursor, depth).select(rows))
        expected = stream.logits(stream.advance(cursor))[rows]
        gap = _difference(stream.logits(part), expected)
        # Matrix products of fewer rows may round differently.
        if gap > 10 * e.tolerance(expected):
            raise _Failed(f"rows selected at depth {depth} end {gap:.1e} off")
    return f"{len(rows)} of {cursor.batch_size} rows, before and between blocks"


@torch.no_grad()
def _truncation(e: _Evidence) -> str:
    _where(check_copied, e.stream.model)
    depths = sorted({1, (e.stream.depth + 1) // 2, e.stream.depth})
    worst = 0.0
    for depth in depths:
        small = e.stream.truncated(depth, share=True)
        cut = as_stream(small, **e.stream.options)
        found = cut.prediction(cut.call(cut.arguments(e.batch, None)))
        gap = _difference(found, e.states.logits(depth))
        worst = max(worst, gap)
        if gap > 10 * e.tolerance(found):
            raise _Failed(f"the model cut to depth {depth} is off by {gap:.1e}")
    return f"depths {depths}, largest difference {worst:.0e}"


@torch.no_grad()
def _cache(e: _Evidence) -> str:
    stream, ids = e.stream, e.batch.get("input_ids")
    if stream.task != "causal_lm" or ids is None:
        raise _NotApplicable("not a causal language model")
    beside = [k for k, v in e.batch.items() if isinstance(v, Tensor) and v.is_floating_point()]
    if beside and beside != ["attention_mask"]:
        raise _NotApplicable(f"the batch has {beside[0]} beside its text")
    try:
        cache = stream.new_cache()
    except UnsupportedModelError as reason:
        raise _NotApplicable(str(reason)) from reason
    mask, steps = e.batch.get("attention_mask"), []
    mask = torch.ones_like(ids) if mask is None else mask
    for t in range(ids.shape[1]):
        batch = {"input_ids": ids[:, t : t + 1], "attention_mask": mask[:, : t + 1]}
        steps.append(stream.logits(stream.advance(stream.start(batch, cache=cache))))
    full, real = stream.prediction(e.output), mask.bool()
    gap = _difference(torch.cat(steps, 1)[real], full[real])
    if gap > 10 * e.tolerance(full):
        raise _Failed(f"token by token the logits differ by {gap:.1e}")
    return f"{ids.shape[1]} steps, largest difference {gap:.0e}"


@torch.no_grad()
def _loss(e: _Evidence) -> str:
    stream, z = e.stream, e.states.logits(e.stream.depth)
    batch = {**e.batch, "labels": _countable(e)}
    try:
        targets = Targets.of(stream, batch)
    except SettingError as reason:  # several labels a row, or none that a built-in loss can use
        raise _NotApplicable(str(reason)) from reason
    found, own = float(targets.loss(targets.pick(z))), _own_loss(stream, batch)
    # Many models compute their loss in float32, whatever their weights.
    kind = torch.float32 if z.dtype == torch.float64 else z.dtype
    tolerance = 10 * e.tolerance(torch.tensor(own, dtype=kind))
    if abs(found - own) <= tolerance:
        return f"{found:.4f}, difference {abs(found - own):.0e}"
    if stream.task in TOKEN_TASKS:
        shifted = stream.task == "causal_lm"
        y = batch["labels"] if shifted else batch["labels"][:, 1:]
        other = float(F.cross_entropy(z[:, : y.shape[1]].flatten(0, 1), y.flatten()))
        if abs(other - own) <= tolerance:
            ours, theirs = ("t + 1", "t") if shifted else ("t", "t + 1")
            raise _NotApplicable(
                f"position t predicts label {ours}; in the loss of this class, label {theirs}"
            )
    raise _Failed(f"the loss at the last depth is {found:.6g}, the model's own is {own:.6g}")


def _countable(e: _Evidence) -> Tensor:
    """The labels, with those of padding ignored: a model's own loss counts them, `Targets` do not.

    Nor do they count what padding predicts: the first token after it.
    """
    labels = e.batch.get("labels")
    if not isinstance(labels, Tensor):
        raise _NotApplicable("the batch has no labels")
    key = "decoder_attention_mask" if e.stream.task == "seq2seq_lm" else "attention_mask"
    mask = e.batch.get(key)
    if not isinstance(mask, Tensor) or mask.shape != labels.shape:
        return labels
    padding = mask == 0
    if e.stream.task == "causal_lm":
        padding = padding | F.pad(padding[:, :-1], (1, 0))
    return labels.masked_fill(padding, IGNORE_INDEX)


def _own_loss(stream: ResidualStream, batch: Mapping[str, Any]) -> float:
    inner = unwrapped(stream.model)
    takes = "labels" in inspect.signature(inner.forward).parameters
    if not takes or stream.task in ("detection", "embedding"):
        raise _NotApplicable("the model takes no labels for one loss")
    config = getattr(inner, "config", None)
    before = getattr(config, "problem_type", None)
    try:
        output = stream.call({**stream.arguments(batch, None), "labels": batch["labels"]})
    except FOREIGN as error:
        # transformers chooses a loss by the name of the class, which may be the user's own.
        reason = f"its own loss fails: {type(error).__name__}: {error}"
        raise _NotApplicable(reason[:120]) from error
    finally:
        if getattr(config, "problem_type", None) != before:  # set by the first loss
            config.problem_type = before  # pyright: ignore[reportOptionalMemberAccess]
    loss = getattr(output, "loss", None)
    if not isinstance(loss, Tensor) or not bool(loss.isfinite().all()):
        raise _NotApplicable("the model computes no finite loss")
    return float(loss)


def _fingerprint(model: nn.Module) -> dict[str, Any]:
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    modules = list(model.modules())
    config = getattr(model, "config", None)
    return {
        "hooks": [len(getattr(module, name)) for module in modules for name in hooks],
        "forward": ["forward" in module.__dict__ for module in modules],
        "mode": [module.training for module in modules],
        # As text, because some configs do not support comparison.
        "config": repr(config),
        "requires_grad": [p.requires_grad for p in model.parameters()],
    }
