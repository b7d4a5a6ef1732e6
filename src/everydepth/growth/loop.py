"""grow: score, insert, step, train, and keep what a held-out split confirms."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from everydepth.data import Rows, batches
from everydepth.errors import NonFiniteError, SettingError
from everydepth.growth.feed import Feed, rows_of
from everydepth.growth.held_out import Paired, paired_losses
from everydepth.growth.jump import Jumpboard, jumpboard
from everydepth.growth.losses import Criterion, losses_of, mean_loss, row_losses
from everydepth.growth.optimizers import (
    carried,
    frozen_but,
    load_named_state,
    named_state,
    settings_of,
)
from everydepth.growth.scoring import DEEPEN, Score, score
from everydepth.runs import Run
from everydepth.stream import ResidualStream, as_stream, insert, unwrapped
from everydepth.stream.rows import select_rows

Trainer = Callable[[nn.Module, Any, Optimizer, int], None]
"""Trains in place: `f(model, train, optimizer, steps)`."""

Choice = Literal["old", "jumpboard", "trained"]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What decides the outcome of a growth; resuming with others is an error."""

    steps: int
    rounds: int | None
    max_depth: int | None
    lr: float
    weight_decay: float
    batch_size: int
    trains: str
    precondition: bool
    alpha: float
    confidence: float
    score_rows: int
    tries: int
    patience: int
    seed: int

    def __post_init__(self) -> None:
        for name in ("batch_size", "score_rows", "tries", "patience"):
            if getattr(self, name) < 1:
                raise SettingError(f"{name}={getattr(self, name)}; use 1 or more")
        if self.steps < 0:
            raise SettingError(f"steps={self.steps}; use 0 or more")
        if self.trains not in ("all", "new"):
            raise SettingError(f"trains={self.trains!r}; use 'all' or 'new' (the new block only)")
        if not 0.5 < self.confidence < 1:
            raise SettingError(f"confidence={self.confidence}; use a share from 0.5 to below 1")


@dataclass(frozen=True)
class Round:
    """One attempt at growing by one block.

    train, valid: mean losses of the old model, the jumpboard and the trained model.
    paper: what the training loss alone would keep (SPEC 4.5). safe: what was kept.
    held_out: the paired comparison of the old model with the better of the two on `valid`.
    margin, gamma, margin_valid: `D`, `gamma_opt` and `D_T` of SPEC 4.4, 4.5.
    """

    number: int
    depth: int
    after: int
    z: float
    p: float
    eta: float
    evaluations: int
    train: dict[str, float]
    valid: dict[str, float]
    paper: Choice
    safe: Choice
    held_out: Paired
    margin: float
    gamma: float
    margin_valid: float
    seconds: float

    @property
    def accepted(self) -> bool:
        return self.safe != "old"

    def __str__(self) -> str:
        return (
            f"round {self.number}: block after {self.after} of {self.depth} (z {self.z:.1f}); by "
            f"training loss keep {self.paper}, by held-out loss keep {self.safe}; {self.held_out}"
        )

    def to_json(self) -> dict[str, Any]:
        held = {"held_out": self.held_out.to_json()}
        return {**asdict(self), **held, "accepted": self.accepted}


@dataclass(frozen=True)
class Grown:
    """The outcome. `model` is a plain model; `stopped` says why growing ended."""

    model: nn.Module = field(repr=False)
    optimizer: Optimizer = field(repr=False)
    depth: int
    rounds: tuple[Round, ...]
    stopped: str
    score: Score | None = field(repr=False)
    path: Path | None

    def __str__(self) -> str:
        return "\n".join([*map(str, self.rounds), f"stopped: {self.stopped}"])


def grow(
    model: nn.Module,
    train: Any,
    valid: Any,
    *,
    steps: int = 200,
    rounds: int | None = None,
    max_depth: int | None = None,
    lr: float = 1e-3,
    weight_decay: float = 0.0,
    batch_size: int = 32,
    trains: str = "all",
    precondition: bool = True,
    alpha: float = 0.05,
    confidence: float = 0.95,
    score_rows: int = 1024,
    tries: int = 3,
    patience: int = 2,
    optimizer: Optimizer | None = None,
    fit: Trainer | None = None,
    criterion: Criterion | None = None,
    run: str | Path | None = None,
    resume: bool = False,
    seed: int = 0,
    progress: bool = True,
    **options: Any,
) -> Grown:
    """Deepen a model block by block, as long as rows it has never used say that it helps.

    Each round: score every site on half of `score_rows` training rows; of the `tries` clearest
    take the one whose jumpboard gains most on the other half; train; then choose. The paper keeps
    whatever has the lower training loss. That rule is shown, but decides nothing: the model grows
    only if on `valid` the paired interval of the gain lies above zero. After `patience` refusals
    in a row, when no site has a signal ("deepest model"), or at `rounds` or `max_depth`, it stops.

    valid: rows used for this choice and nothing else.
    trains: "all" parameters or the "new" block only, for `steps` steps of AdamW.
    optimizer: the one the model was trained with; its state of old parameters is carried over.
    fit: trains instead of the built-in loop: `fit(model, train, optimizer, steps)`.
    run: a directory for everything that is measured and the grown model; `resume` continues it at
        the round that was not finished.

    With several processes (torch.distributed) give each the same data: the built-in loop divides
    every batch among them, and all end with the same model. The model given is not changed.
    """
    settings = Settings(
        steps=steps,
        rounds=rounds,
        max_depth=max_depth,
        lr=lr,
        weight_decay=weight_decay,
        batch_size=batch_size,
        trains=trains,
        precondition=precondition,
        alpha=alpha,
        confidence=confidence,
        score_rows=score_rows,
        tries=tries,
        patience=patience,
        seed=seed,
    )
    if resume and run is None:
        raise SettingError("resume=True without run=; give the directory of the run to continue")
    growth = _Growth(settings, model, train, valid, optimizer, fit, criterion, progress, options)
    growth.open(run, resume)
    return growth.go()


class _Growth:
    """The state of a growth between rounds."""

    def __init__(
        self,
        settings: Settings,
        model: nn.Module,
        train: Any,
        valid: Any,
        optimizer: Optimizer | None,
        fit: Trainer | None,
        criterion: Criterion | None,
        progress: bool,
        options: dict[str, Any],
    ) -> None:
        self.settings, self.options, self.criterion = settings, options, criterion
        self.progress, self.fit = progress, fit
        original = as_stream(model, **options)
        self.name, self.start_depth = original.name, original.depth
        self.model: nn.Module = copy.deepcopy(unwrapped(original.model))
        first = optimizer or AdamW(
            model.parameters(), settings.lr, weight_decay=settings.weight_decay
        )
        self.optimizer = _twin(first, unwrapped(original.model), self.model)
        self.train = train if isinstance(train, Rows) else list(Feed(train, original))
        self.valid = valid if isinstance(valid, Rows) else list(Feed(valid, original))
        self.rounds: list[dict[str, Any]] = []
        self.found: list[Round] = []
        self.inserted: list[int] = []
        self.rejected: list[int] = []
        self.score: Score | None = None
        self.run: Run | None = None

    # -- the run directory ------------------------------------------------------------------------

    def open(self, path: str | Path | None, resume: bool) -> None:
        if path is None:
            return
        config = {**asdict(self.settings), "model": {"name": self.name, "depth": self.start_depth}}
        if not _is_main():
            dist.barrier()
            self.run = Run.open(path)
        elif resume and Run.exists(path):
            self.run = Run.open(path)
            self.run.check_config(config)
        else:
            self.run = Run.create(path, config, kind="grow")
        if _is_main() and _world() > 1:
            dist.barrier()
        if resume and self.run.latest() is not None:
            self._restore()

    def _restore(self) -> None:
        assert self.run is not None
        saved = self.run.checkpoint()
        state = saved.state
        for after in state["inserted"]:
            self._put(insert(self.model, after, **self.options), after)
        self.model.load_state_dict(saved.load("model"))
        load_named_state(self.optimizer, self.model, saved.load("optimizer"))
        self.inserted, self.rejected = list(state["inserted"]), list(state["rejected"])
        self.found = [_round(entry) for entry in state["rounds"]]

    def _save(self) -> None:
        if self.run is None or not _is_main():
            return
        self.run.log({"round": len(self.found), **self.found[-1].to_json()})
        parts = {
            "model": self.model.state_dict(),
            "optimizer": named_state(self.optimizer, self.model),
        }
        state = {
            "inserted": self.inserted,
            "rejected": self.rejected,
            "rounds": [entry.to_json() for entry in self.found],
        }
        self.run.save_checkpoint(len(self.found), parts, state)

    def _finish(self, stopped: str) -> Grown:
        path = None
        if self.run is not None:
            path = self.run.path
            if _is_main() and not self.run.finished:
                model: Any = self.model
                if hasattr(model, "save_pretrained"):
                    self.run.write_folder("model", lambda folder: model.save_pretrained(folder))
                score = None if self.score is None else self.score.to_json()
                rounds = [entry.to_json() for entry in self.found]
                outcome = {"rounds": rounds, "stopped": stopped, "score": score}
                self.run.write_results({"growth": outcome})
        return Grown(
            model=self.model,
            optimizer=self.optimizer,
            depth=self.start_depth + len(self.inserted),
            rounds=tuple(self.found),
            stopped=stopped,
            score=self.score,
            path=path,
        )

    # -- rounds -----------------------------------------------------------------------------------

    def go(self) -> Grown:
        while True:
            stopped = self._stop_before() or self._round()
            if stopped is not None:
                return self._finish(stopped)

    def _stop_before(self) -> str | None:
        s, depth = self.settings, self.start_depth + len(self.inserted)
        if s.rounds is not None and len(self.found) >= s.rounds:
            return f"{s.rounds} rounds are done"
        if s.max_depth is not None and depth >= s.max_depth:
            return f"depth {depth} of at most {s.max_depth} is reached"
        refused = 0
        for entry in reversed(self.found):
            if entry.accepted:
                break
            refused += 1
        if refused >= s.patience:
            return f"{refused} attempts in a row did not help on held-out rows"
        return None

    def _round(self) -> str | None:
        begin, s = time.perf_counter(), self.settings
        number = len(self.found)
        seed = s.seed * 100_003 + number
        stream = as_stream(self.model, **self.options)
        half, other = self._halves(stream)
        self.score = score(
            stream, half, alpha=s.alpha, seed=seed, criterion=self.criterion, progress=self.progress
        )
        tried = [site for site in self.score.ranked if site.after not in self.rejected][: s.tries]
        if not tried:
            if any(site.verdict == DEEPEN for site in self.score.sites):
                return "no other site has a signal"
            return self.score.verdict
        jumps = [self._jump(site.after, half, other, seed) for site in tried]
        jump = max(jumps, key=lambda j: j.margin_valid or 0.0)
        if not jump.found:
            return "no step along any gradient lowers the loss"
        trained = copy.deepcopy(jump.model)
        optimizer = self._trained(stream, trained, jump.after, seed)
        self._choose(stream, jump, trained, optimizer, number, begin)
        self._save()
        return None

    def _halves(self, stream: ResidualStream) -> tuple[list[Any], list[Any]]:
        """Training rows for the direction and the step, and others to rank sites by."""
        found: list[Any] = []
        rows = 0
        order = self.train
        if isinstance(order, Rows):
            shuffled = batches(
                order, self.settings.batch_size, shuffle=True, seed=self.settings.seed
            )
            order = cast(Any, shuffled)
        for batch in Feed(order, stream):
            found.append(batch)
            rows += rows_of(stream, batch)
            if rows >= self.settings.score_rows:
                break
        return (found[::2], found[1::2]) if len(found) > 1 else (found, found)

    def _jump(self, after: int, half: Any, other: Any, seed: int) -> Jumpboard:
        s = self.settings
        return jumpboard(
            self.model,
            half,
            other,
            after=after,
            scored=self.score,
            precondition=s.precondition,
            criterion=self.criterion,
            seed=seed,
            **self.options,
        )

    def _trained(self, old: ResidualStream, grown: nn.Module, after: int, seed: int) -> Optimizer:
        s = self.settings
        new = as_stream(grown, **self.options)
        optimizer = carried(self.optimizer, old, new, after)
        only = None if s.trains == "all" else list(new.blocks[after].module.parameters())
        frozen = frozen_but(grown, only)
        try:
            if self.fit is None:
                self._default_fit(new, optimizer, seed)
            else:
                self.fit(grown, self.train, optimizer, s.steps)
        finally:
            for parameter in frozen:
                parameter.requires_grad_()
        return optimizer

    def _default_fit(self, stream: ResidualStream, optimizer: Optimizer, seed: int) -> None:
        fit_plainly(
            stream,
            self.train,
            optimizer,
            self.settings.steps,
            batch_size=self.settings.batch_size,
            seed=seed,
            criterion=self.criterion,
        )

    def _choose(
        self,
        stream: ResidualStream,
        jump: Jumpboard,
        trained: nn.Module,
        optimizer: Optimizer,
        number: int,
        begin: float,
    ) -> None:
        models: dict[str, nn.Module] = {
            "old": self.model,
            "jumpboard": jump.model,
            "trained": trained,
        }
        measure: dict[str, Any] = {"criterion": self.criterion, **self.options}
        train = {k: mean_loss(m, self.train, **measure) for k, m in models.items()}
        rows = {k: losses_of(m, self.valid, **measure) for k, m in models.items()}
        valid = {k: float(sums.sum() / counts.sum()) for k, (sums, counts) in rows.items()}
        paper: Choice = "trained" if train["trained"] <= train["jumpboard"] else "jumpboard"
        better: Choice = "trained" if valid["trained"] <= valid["jumpboard"] else "jumpboard"
        held = paired_losses(
            rows["old"], rows[better], confidence=self.settings.confidence, seed=number
        )
        safe: Choice = better if held.better else "old"
        assert self.score is not None
        site = self.score[jump.after]
        self.found.append(
            Round(
                number=number + 1,
                depth=stream.depth,
                after=jump.after,
                z=site.z,
                p=site.p,
                eta=jump.eta,
                evaluations=len(jump.tried),
                train=train,
                valid=valid,
                paper=paper,
                safe=safe,
                held_out=held,
                margin=train["old"] - train["jumpboard"],
                gamma=train["jumpboard"] - min(train["jumpboard"], train["trained"]),
                margin_valid=valid["old"] - valid["jumpboard"],
                seconds=round(time.perf_counter() - begin, 3),
            )
        )
        if safe == "old":
            self.rejected.append(jump.after)
            return
        if safe == "jumpboard":
            optimizer = carried(
                self.optimizer, stream, as_stream(jump.model, **self.options), jump.after
            )
        self.model, self.optimizer = models[safe], optimizer
        self.inserted.append(jump.after)
        self.rejected = []

    def _put(self, grown: nn.Module, after: int) -> None:
        old, new = (as_stream(m, **self.options) for m in (self.model, grown))
        self.optimizer = carried(self.optimizer, old, new, after)
        self.model = grown


def fit_plainly(
    stream: ResidualStream,
    data: Any,
    optimizer: Optimizer,
    steps: int,
    *,
    batch_size: int = 32,
    seed: int = 0,
    criterion: Criterion | None = None,
) -> None:
    """Steps of plain training; with several processes each takes its part of every batch."""
    model = unwrapped(stream.model)
    before = model.training
    model.train()
    rank, world = (dist.get_rank(), _world()) if _world() > 1 else (0, 1)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed * world + rank)
        for step, batch in zip(range(steps), _endless(stream, data, batch_size, seed)):  # noqa: B905 - endless
            size = rows_of(stream, batch)
            part = (
                batch if world == 1 else select_rows(batch, torch.arange(rank, size, world), size)
            )
            output = stream.call(stream.arguments(part, None))
            losses, counts = row_losses(stream, stream.prediction(output), part, criterion)
            total = counts.sum()
            if world > 1:
                dist.all_reduce(total)
            loss = losses.sum() / total
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            if not bool(torch.isfinite(loss)):
                raise NonFiniteError(
                    f"the loss is {loss.item()} at step {step} of training the grown model; use a "
                    "lower lr",
                    stream.depth,
                )
            if world > 1:
                _sum_gradients(model)
            optimizer.step()
    if world > 1:
        _agree(model, world)
    model.train(before)


def _endless(stream: ResidualStream, data: Any, batch_size: int, seed: int) -> Iterator[Any]:
    source = batches(data, batch_size, shuffle=True, seed=seed) if isinstance(data, Rows) else data
    feed = Feed(source, stream)
    while True:
        yield from feed


def _sum_gradients(model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.requires_grad:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad)


@torch.no_grad()
def _agree(model: nn.Module, world: int) -> None:
    """Statistics of batch norms are averaged; parameters are the same already, to the last bit."""
    for buffer in model.buffers():
        if buffer.is_floating_point():
            dist.all_reduce(buffer)
            buffer.div_(world)
    for parameter in model.parameters():
        dist.broadcast(parameter, 0)


def _world() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def _is_main() -> bool:
    return _world() == 1 or dist.get_rank() == 0


def _twin(optimizer: Optimizer, model: nn.Module, copied: nn.Module) -> Optimizer:
    """The same optimizer for a copy of the model."""
    twins: dict[int, Tensor] = {
        id(a): b for a, b in zip(model.parameters(), copied.parameters(), strict=True)
    }
    state = copy.deepcopy(optimizer.state_dict())
    groups = [
        {**group, "params": [twins[id(p)] for p in group["params"]]}
        for group in optimizer.param_groups
    ]
    made = type(optimizer)(groups, **settings_of(optimizer))
    made.load_state_dict(state)
    return made


def _round(entry: Mapping[str, Any]) -> Round:
    held = {**entry["held_out"]}
    held.pop("better")
    for name in ("bootstrap", "bernstein"):
        held[name] = tuple(held[name])
    plain = {k: v for k, v in entry.items() if k not in ("held_out", "accepted")}
    return Round(**plain, held_out=Paired(**held))
