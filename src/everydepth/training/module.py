"""A network with a loss at every depth: an ordinary `nn.Module` around the plain model."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from transformers.utils.generic import ModelOutput

from everydepth.config import Setting, brief, checked
from everydepth.errors import DepthError, ExportError, NonFiniteError, SettingError
from everydepth.files import explained
from everydepth.objectives import Distilled, Moment, Objective, Pass, Term, lpa
from everydepth.runs.together import several
from everydepth.stream import (
    BESIDE_INPUTS,
    Criterion,
    ResidualStream,
    States,
    Targets,
    adapter,
    as_stream,
    check_resident,
    no_labels,
    unwrapped,
)
from everydepth.stream.wrapping import ModelAround
from everydepth.training.any_depth_loss import Pull, any_depth_loss
from everydepth.training.lora import check_adapters
from everydepth.training.some_words import some_words

Measure = Callable[["EveryDepth", Mapping[str, Any]], Any]
"""Computes something other than the loss in a pass, from the network and a batch."""

WORDS_DRAWN = 2  # the purpose of the random numbers drawn here; see `Moment.random`
LARGE_LOGITS = 2**20
"""Use the any-depth loss from this many logits per depth on. Below, a plain loss is about as fast
(faster below 2^17, on a CPU) and also returns the logits."""


@dataclass
class EveryDepthOutput(ModelOutput):
    """The output of one pass.

    loss: the objective, to call `backward` on. None without labels, unless it is distilled.
    logits: the model's own, at the last depth. None in training mode with a large vocabulary,
        where they are never all in memory, unless `depths=` includes the last depth.
    losses: the unweighted loss at each supervised or requested depth, detached. For a batch without
        labels, and for balconies in training, which learn nothing from labels: the divergence of
        each depth from the last.
    regularizer: the sum of the objective's additional terms, detached; None without terms.
    logits_at: the predictions at the depths requested with `depths=`.
    """

    loss: Tensor | None = None
    logits: Tensor | None = None
    losses: dict[int, Tensor] | None = None
    regularizer: Tensor | None = None
    logits_at: dict[int, Tensor] | None = None


class _Loss(NamedTuple):
    """The total to minimize; detached: the losses by depth, and the sum of the terms."""

    total: Tensor
    losses: dict[int, Tensor]
    added: Tensor | None


@checked
class EveryDepth(ModelAround):
    """A model with an objective that supervises its depths; an ordinary `nn.Module`.

    The model is not changed: `net.model` is the plain one, and `net.state_dict()` has its keys.
    The network starts in the model's mode (`train` or `eval`). In eval mode nothing is random.

    Besides the model's inputs and "labels", a batch may hold "loss_weights", one number per label.
    As in Hugging Face, labels of language models are given unshifted, and those that are -100 or
    padding are ignored; `everydepth.stream.Targets` has the rules of every task. Without labels
    there is no loss, unless the objective is distilled: then every row except padding counts.

    label_smoothing, class_weights: as in `torch.nn.functional.cross_entropy`.
    criterion: your own loss, `f(prediction, labels, context)`, which returns one number per row.
        `context` holds the batch and the readout's other predictions (`context["pred_boxes"]`).
    any_depth_loss: compute the loss of all depths one chunk of logits at a time (True), plainly
        (False), or depending on the number of logits (None).
    raise_on_nan: raise an error that names the first depth with a NaN; this waits for the device
        once per step.
    options: passed to `as_stream`.

    >>> net = ed.EveryDepth(model, objective=ed.lpa())
    >>> out = net(**test.batch(range(8)))
    >>> out.loss.backward()
    >>> sorted(out.losses)  # one loss per depth
    [1, 2, 3]
    """

    def __init__(
        self,
        model: nn.Module | ResidualStream,
        objective: Objective | None = None,
        *,
        label_smoothing: Annotated[float, Setting(least=0, below=1)] = 0.0,
        class_weights: Tensor | Sequence[float] | None = None,
        criterion: Criterion | None = None,
        any_depth_loss: bool | None = None,
        raise_on_nan: bool = False,
        **options: Any,
    ) -> None:
        super().__init__()
        stream = as_stream(model, **options)
        check_adapters(stream)
        check_resident(stream.model, "EveryDepth")
        model = self.model = stream.model if isinstance(model, ResidualStream) else model
        self._options = dict(stream.options)
        self._stream: ResidualStream | None = stream
        self.objective = (lpa() if objective is None else objective).check(self.stream.depth)
        self.label_smoothing = label_smoothing
        self.criterion = criterion
        self.any_depth_loss = any_depth_loss
        self.raise_on_nan = raise_on_nan
        self.step = 0
        self.total_steps: int | None = None
        self._counts_itself = True
        self._labels_checked = False
        self.class_weights: Tensor | None
        self.register_buffer("class_weights", self._checked_weights(class_weights), False)
        self.heads = nn.ModuleDict()
        for technique in self.objective.techniques:
            made = technique.heads(self.stream)
            self.heads.update({str(depth): head for depth, head in made.items()})
        if self.heads and hasattr(model, "heads"):
            raise SettingError(
                f"{self.stream.name} already has an attribute `heads`, whose keys would collide "
                f"with those of {self.objective.name} in a state dict; rename it"
            )
        self.register_load_state_dict_pre_hook(_with_inner_keys)
        self.training = model.training
        self.name_inputs()

    @property
    def stream(self) -> ResidualStream:
        """The model, seen as a stream."""
        if self._stream is None:
            self._stream = as_stream(self.model, **self._options)
        return self._stream

    @property
    def ignores_labels(self) -> bool:
        """Whether only balconies are trained, and only to match the last depth."""
        exits = {id(p) for found in self.stream.exits.values() for p in found.parameters()}
        return bool(exits) and not (
            any(self.objective.label_weights([1.0] * (self.stream.depth + 1))[:-1])
            or any(p.requires_grad and id(p) not in exits for p in self.parameters())
        )

    @property
    def accepts_loss_kwargs(self) -> bool:
        """Whether Trainer's number of labels is the divisor of the mean loss.

        Otherwise, Trainer divides the loss by the number of accumulated batches.
        """
        return not self.ignores_labels

    @property
    def loss_type(self) -> str | None:
        """What Trainer reads to count labels: no token predicts the first one of a text."""
        return "ForCausalLM" if self.stream.task == "causal_lm" else None

    def set_progress(self, step: int, total_steps: int | None = None) -> None:
        """Tell the objective the current optimizer step, from 0, and the number of steps.

        Without it, and after `fit`, the network counts its passes in training mode.
        """
        self.step, self.total_steps, self._counts_itself = step, total_steps, False

    def count_on(self, step: int) -> None:
        """Let the network count its passes again, from this step on."""
        self.step, self._counts_itself = step, True

    @checked
    def check_labels(self, batch: Mapping[str, Any]) -> int | None:
        """Check the labels of a batch; returns how many there are, or None if none are used.

        Without this, the first pass does it, and refuses a batch without any. But with gradient
        accumulation or several processes, it may get a part without a label to learn from.
        """
        targets = self._targets(batch, check=True)
        self._labels_checked = True
        return None if targets is None else len(targets)

    def forward(
        self,
        *,
        depths: Sequence[int] = (),
        measure: Measure | None = None,
        labels: Any = None,  # by name, for Hugging Face's Trainer, which looks for it
        **batch: Any,
    ) -> Any:
        """Run the network; returns an `EveryDepthOutput`.

        depths: also return the prediction and loss at these depths.
        measure: return `measure(net, batch)` instead. Inside this call, wrappers are in effect:
            FSDP has gathered the parameters, and autocast is on.
        """
        batch = batch if labels is None else {**batch, "labels": labels}
        return self._pass(batch, depths) if measure is None else measure(self, batch)

    def _pass(self, batch: Mapping[str, Any], depths: Sequence[int]) -> EveryDepthOutput:
        last = self.stream.depth
        try:
            asked = [self.stream.check_depth(depth) for depth in depths]
        except (RuntimeError, TypeError) as error:  # no collection, or not of numbers
            raise DepthError(f"depths={brief(depths)}; give several, each 0 to {last}") from error
        targets = self._checked_targets(batch)
        unlabeled = targets is None and not self.objective.needs_labels
        chunked = self._chunks(targets) if targets is not None else unlabeled and self._chunkable
        logits = not (chunked and self.training) or last in asked
        states = self._observe(batch, logits=logits)
        if unlabeled:
            # A feature has the same rows as a prediction, without the cost of the head.
            rows = Targets.every(self.stream, states.batch, states.feature(last))
            targets = replace(rows, labels=None)
            chunked = chunked and self._large(targets)
        out = EveryDepthOutput(logits=self.logits_of(states, last) if logits else None)
        if asked:
            out.logits_at = {
                depth: out.logits
                if depth == last and out.logits is not None
                else self.logits_of(states, depth)
                for depth in asked
            }
        if targets is None:
            return out
        weights = self._weights()
        supervised = {depth: weight for depth, weight in enumerate(weights) if weight > 0}
        exits = states
        for technique in self.objective.techniques:
            exits = technique.exits(exits, weights)
        sought = self._chunked_loss if chunked else self._plain_loss
        loss, losses, out.regularizer = sought(exits, targets, supervised)
        if self.raise_on_nan and not bool(torch.isfinite(loss)):
            self._raise_not_finite(states, losses)
        rest = [depth for depth in asked if depth not in losses]
        if rest and targets.labels is not None:
            with torch.no_grad():
                losses |= {depth: self._loss(states, depth, targets) for depth in rest}
        out.loss, out.losses = loss, dict(sorted(losses.items()))
        if self.training and self._counts_itself:
            self.step += 1
        return out

    def logits_of(self, states: States, depth: int) -> Tensor:
        """The prediction at a depth, through its own head if it has one."""
        head = self.own_head(depth)
        if head is None:
            return states.logits(depth)
        return head(self.stream.normed(states.feature(depth), depth))

    def own_head(self, depth: int) -> nn.Module | None:
        """A depth's own head; None if it uses the model's."""
        name = str(depth)
        return self.heads[name] if name in self.heads else None  # noqa: SIM401 - no `get` there

    @property
    def _inner(self) -> nn.Module:
        """The model whose names a state dict has, inside `torch.compile` or DDP."""
        return adapter(self.model) or unwrapped(self.model)

    @checked
    @explained("the model cannot be saved", ExportError)
    def save_pretrained(self, directory: str | Path, **kwargs: Any) -> None:
        """Save the plain model; for a PEFT model, only the adapters, in PEFT's format."""
        around = adapter(self.model)
        if around is not None:
            around.save_pretrained(str(directory))
            return
        cast(Any, unwrapped(self.model)).save_pretrained(directory, **kwargs)

    def state_dict(self, *args: Any, prefix: str = "", **kwargs: Any) -> dict[str, Any]:
        """The state dict of the plain or PEFT model; additional heads are under `heads.`.

        Without `keep_vars`, the second of two tied weights is a copy: Hugging Face's Trainer saves
        this as safetensors, which refuse tensors that share memory.
        """
        state = self._inner.state_dict(*args, prefix=prefix, **kwargs)
        if self.heads:
            kwargs["destination"] = state
            self.heads.state_dict(prefix=f"{prefix}heads.", **kwargs)
        if not kwargs.get("keep_vars"):
            _separate(state, prefix)
        return state

    def signature(self) -> inspect.Signature:
        """The arguments of `forward`, the model's inputs, and what describes the loss."""
        own = dict(inspect.signature(type(self).forward).parameters)
        rest = own.pop("batch")
        del own["self"]
        for name, parameter in inspect.signature(unwrapped(self.model).forward).parameters.items():
            if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
                own.setdefault(name, parameter.replace(kind=parameter.KEYWORD_ONLY))
        for name in BESIDE_INPUTS:
            own.setdefault(name, inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY))
        return inspect.Signature([*own.values(), rest])

    # -- the parts of a pass ----------------------------------------------------------------------

    def _checked_targets(self, batch: Mapping[str, Any]) -> Targets | None:
        """The targets; raise if a first batch has no label to learn from."""
        # On an accelerator, every check waits for the device, so only the first batch is checked.
        # A later batch may happen to have no labels to learn from.
        labels, first = batch.get("labels"), not self._labels_checked
        on_cpu = isinstance(labels, Tensor) and labels.device.type == "cpu"
        targets = self._targets(batch, check=first or on_cpu)
        if targets is not None:
            # This may be a part of a batch: of one that Trainer accumulates, or a process's.
            if first and len(targets) == 0 and not (batch.get("num_items_in_batch") or several()):
                raise no_labels()
            self._labels_checked = True
        return targets

    def _targets(self, batch: Mapping[str, Any], *, check: bool) -> Targets | None:
        if batch.get("labels") is None or (self.training and self.ignores_labels):
            return None
        return Targets.of(
            self.stream,
            batch,
            items=batch.get("num_items_in_batch"),
            class_weights=self.class_weights,
            label_smoothing=self.label_smoothing,
            criterion=self.criterion,
            check=check,
        )

    def _weights(self) -> list[float]:
        objective = self.objective
        weights = objective.weights if self.training else objective.expected_weights
        return weights(self.step, self.total_steps, self.stream.depth).tolist()

    def _observe(self, batch: Mapping[str, Any], *, logits: bool) -> States:
        if self.training:
            for technique in self.objective.techniques:
                checked = self.stream.check_batch(batch)
                states = technique.observe(self.stream, checked, self._moment())
                if states is not None:
                    return states
        return self.stream.observe(batch, logits=logits)

    def _chunks(self, targets: Targets) -> bool:
        """Whether to compute the loss one chunk of logits at a time."""
        return self._chunkable and targets.can_be_chunked and self._large(targets)

    @property
    def _chunkable(self) -> bool:
        heads = (self.stream.head, *self.heads.values())
        linear = all(type(head) is nn.Linear for head in heads)
        pull = self._pull
        return linear and not any(t.whole_logits for t in self.objective.terms if t is not pull)

    @property
    def _pull(self) -> Distilled | None:
        """The term that the any-depth loss computes along with the loss; it needs a shared head."""
        return None if self.heads else self.objective.get(Distilled)

    def _large(self, targets: Targets) -> bool:
        many = len(targets) * self.stream.classes >= LARGE_LOGITS
        return many if self.any_depth_loss is None else self.any_depth_loss

    def _chunked_loss(
        self, states: States, targets: Targets, supervised: Mapping[int, float]
    ) -> _Loss:
        last, pull, labels = states.depth, self._pull, self._label_weights(supervised)
        students = [depth for depth in supervised if depth < last]
        depths = list(supervised) if targets.labels is not None else students
        inputs = {depth: targets.head_inputs(states, depth) for depth in depths}
        towards: Pull | None = None
        if pull is not None and students:
            with torch.no_grad():
                teacher = inputs[last] if last in inputs else targets.head_inputs(states, last)
            weights = [pull.weight * supervised[d] * (d < last) for d in depths]
            towards = Pull(teacher=teacher, weights=weights, temperature=pull.temperature)
        # Without labels and students, nothing is learned: a zero that supports backward.
        totals = [] if depths else [targets.head_inputs(states, last)[..., :0].sum()]
        losses: dict[int, Tensor] = {}
        added: Tensor | None = None
        for group in [[depth] for depth in depths] if self.heads else [depths][: len(depths)]:
            head = cast(nn.Linear, self.own_head(group[0]) or self.stream.head)
            weight, bias = head.weight, cast(Tensor | None, head.bias)
            asked = None if pull is None or targets.labels is not None else pull.words
            if asked is not None and towards is not None and self.training:
                random = self._moment().random(WORDS_DRAWN)
                weight, bias = some_words(towards.teacher, weight, bias, asked, random)
            found = any_depth_loss(
                [inputs[d] for d in group],
                weight,
                bias,
                targets.labels,
                targets.class_scale,
                [labels[d] for d in group],
                label_smoothing=targets.label_smoothing,
                pull=towards,
            )
            totals.append(found.total)
            if towards is not None:
                added = found.divergences @ found.divergences.new_tensor(towards.weights)
            seen = found.losses if targets.labels is not None else found.divergences
            losses |= dict(zip(group, seen.unbind(), strict=True))
        total = torch.stack(totals).sum() if len(totals) > 1 else totals[0]
        rest = [term for term in self.objective.terms if term is not pull]
        terms = self._terms(rest, states, targets, supervised)
        if terms is not None:
            added = terms.detach() if added is None else added + terms.detach()
            total = total + terms
        return _Loss(total, losses, added)

    def _plain_loss(
        self,
        states: States,
        targets: Targets,
        supervised: Mapping[int, float],
    ) -> _Loss:
        terms = self._terms(self.objective.terms, states, targets, supervised)
        added = None if terms is None else terms.detach()
        if targets.labels is None:
            assert terms is not None
            return _Loss(terms, self._divergences(states, targets, supervised), added)
        losses = {depth: self._loss(states, depth, targets) for depth in supervised}
        weights = self._label_weights(supervised)
        parts = [w * losses[depth] for depth, w in weights.items() if w]
        parts += [] if terms is None else [terms]
        # No depth has a weight at this step: a zero that supports backward.
        parts = parts or [self.logits_of(states, states.depth)[..., :0].sum()]
        total = sum(parts[1:], start=parts[0])
        return _Loss(total, {depth: loss.detach() for depth, loss in losses.items()}, added)

    def _divergences(
        self, states: States, targets: Targets, supervised: Mapping[int, float]
    ) -> dict[int, Tensor]:
        found = self.objective.get(Distilled)
        with torch.no_grad():
            seen = self._seen(states, targets, supervised)
            return {} if found is None else found.divergences(seen)

    def _label_weights(self, supervised: Mapping[int, float]) -> dict[int, float]:
        weights = [supervised.get(depth, 0.0) for depth in range(self.stream.depth + 1)]
        labels = self.objective.label_weights(weights)
        return {depth: labels[depth] for depth in supervised}

    def _loss(self, states: States, depth: int, targets: Targets) -> Tensor:
        z = targets.predicted(states, depth, self.own_head(depth))
        return targets.loss(z, targets.extras(states, depth))

    def _terms(
        self,
        terms: Sequence[Term],
        states: States,
        targets: Targets,
        supervised: Mapping[int, float],
    ) -> Tensor | None:
        """The sum of the terms; None without terms."""
        if not terms:
            return None
        seen = self._seen(states, targets, supervised)
        found = [term(seen) for term in terms]
        return sum(found[1:], start=found[0])

    def _seen(self, states: States, targets: Targets, supervised: Mapping[int, float]) -> Pass:
        return Pass(
            states=states,
            targets=targets,
            weights=supervised,
            logits=cache(lambda depth: self.logits_of(states, depth)),
            moment=self._moment(),
        )

    def _moment(self) -> Moment:
        return self.objective.moment(self.step, self.total_steps, self.stream.depth)

    def _raise_not_finite(self, states: States, losses: Mapping[int, Tensor]) -> None:
        states.check_finite()
        depth = next((d for d, loss in losses.items() if not bool(torch.isfinite(loss))), None)
        where = "the regularizer" if depth is None else f"the loss at depth {depth}"
        raise NonFiniteError(
            f"{where} is NaN or infinite, although all states are finite; check the labels and "
            "the head, or lower the learning rate",
            self.stream.depth if depth is None else depth,
        )

    def _checked_weights(self, weights: Tensor | Sequence[float] | None) -> Tensor | None:
        if weights is None:
            return None
        found = torch.as_tensor(weights, dtype=torch.float32)
        if found.shape != (self.stream.classes,):
            raise SettingError(
                f"class_weights have shape {tuple(found.shape)}, but the head of "
                f"{self.stream.name} has {self.stream.classes} classes; give one number per class"
            )
        if not bool((found.isfinite() & (found >= 0)).all()) or not bool(found.any()):
            raise SettingError(
                f"class_weights are {[round(w, 4) for w in found.tolist()]}; use numbers of 0 or "
                "more, at least one above 0"
            )
        return found


def _separate(state: dict[str, Any], prefix: str) -> None:
    """Copy the tensors that share memory with one before them."""
    seen: set[int] = set()
    for name, value in state.items():
        if name.startswith(prefix) and type(value) is Tensor and value.numel():
            place = value.untyped_storage().data_ptr()
            state[name] = value.clone() if place in seen else value
            seen.add(place)


def _with_inner_keys(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """A hook of `load_state_dict`: rename the plain model's keys to those of the wrapper."""
    net = cast(EveryDepth, module)
    inner = next(name for name, part in net.named_modules() if part is net._inner)  # pyright: ignore[reportPrivateUsage]
    heads = f"{prefix}heads." if net.heads else None
    for key in [k for k in state if k.startswith(prefix)]:
        if heads is None or not key.startswith(heads):
            state[f"{prefix}{inner}.{key[len(prefix) :]}"] = state.pop(key)
