"""grow: score, insert, step, train, and keep what a held-out split confirms."""

from __future__ import annotations

import copy
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

from torch import nn
from torch.optim import AdamW, Optimizer

from everydepth.data import Rows, batches
from everydepth.data.feeding import Feed
from everydepth.errors import SettingError
from everydepth.files import remove_folder
from everydepth.growth.certify import certificate
from everydepth.growth.fitting import Trainer, fit_plainly, is_main, wait_for_all
from everydepth.growth.held_out import paired_losses
from everydepth.growth.jump import Jumpboard, jumpboard
from everydepth.growth.losses import losses_of, mean_loss
from everydepth.growth.optimizers import carried, frozen_but, load_named_state, named_state, twin
from everydepth.growth.rounds import Choice, Grown, Round, Settings, round_of
from everydepth.growth.scoring import DEEPEN, Score, score
from everydepth.runs import Run
from everydepth.stream import Criterion, ResidualStream, as_stream, insert, unwrapped


def grow(
    model: nn.Module | ResidualStream,
    train: Any,
    valid: Any,
    test: Any = None,
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
    test: rows used for nothing at all, to certify the outcome at the end.
    trains: "all" parameters or the "new" block only, for `steps` steps of AdamW.
    optimizer: the one the model was trained with; its state of old parameters is carried over.
    fit: trains instead of the built-in loop: `fit(model, train, optimizer, steps, folder)`.
    run: a directory for everything that is measured and the grown model; `resume` continues it
        where it was cut off, inside the training of a round as well.

    With several processes (torch.distributed) give each the same data: the built-in loop divides
    every batch among them, and all end with the same model. The model given is not changed.

    >>> few = train.subset(range(200))
    >>> grown = ed.grow(model, few, valid, steps=5, rounds=1, progress=False)
    >>> ed.as_stream(grown.model).depth in (3, 4)  # deeper only if `valid` says it helps
    True
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
    first = as_stream(model, **options)
    growth = _Growth(settings, first, train, valid, optimizer, fit, criterion, progress)
    growth.open(run, resume)
    stopped = growth.go()
    return growth.finished(stopped, first.model, test)


class _Growth:
    """The state of a growth between rounds."""

    def __init__(
        self,
        settings: Settings,
        original: ResidualStream,
        train: Any,
        valid: Any,
        optimizer: Optimizer | None,
        fit: Trainer | None,
        criterion: Criterion | None,
        progress: bool,
    ) -> None:
        self.settings, self.options = settings, dict(original.options)
        self.criterion = criterion
        self.progress, self.fit = progress, fit
        self.name, self.start_depth = original.name, original.depth
        self.model: nn.Module = copy.deepcopy(unwrapped(original.model))
        first = optimizer or AdamW(
            original.model.parameters(), settings.lr, weight_decay=settings.weight_decay
        )
        self.optimizer = twin(first, unwrapped(original.model), self.model)
        self.train = train if isinstance(train, Rows) else list(Feed(train, original))
        self.valid = valid if isinstance(valid, Rows) else list(Feed(valid, original))
        self.scores: list[dict[str, Any]] = []
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
        if is_main():
            if resume and Run.exists(path):
                Run.open(path).check_config(config)
            else:
                Run.create(path, config, kind="grow")
        wait_for_all()
        self.run = Run.open(path)
        if resume and self.run.latest() is not None:
            self._restore()
        elif is_main():
            self.run.cut_metrics(0)
        wait_for_all()

    def _restore(self) -> None:
        assert self.run is not None
        saved = self.run.checkpoint()
        state = saved.state
        for after in state["inserted"]:
            self._put(insert(self.model, after, **self.options), after)
        self.model.load_state_dict(saved.load("model"))
        load_named_state(self.optimizer, self.model, saved.load("optimizer"))
        self.inserted, self.rejected = list(state["inserted"]), list(state["rejected"])
        self.found = [round_of(entry) for entry in state["rounds"]]
        self.scores = list(state["scores"])
        if is_main():
            self.run.cut_metrics(state["metrics"])  # of a round that was not saved

    def _save(self) -> None:
        if self.run is None or not is_main():
            return
        last = self.found[-1]
        depth = self.start_depth + len(self.inserted)
        kept = {"loss": last.train[last.safe], "valid_loss": last.valid[last.safe]}
        self.run.log({"step": len(self.found), "depth": depth, **kept})
        parts = {
            "model": self.model.state_dict(),
            "optimizer": named_state(self.optimizer, self.model),
        }
        state = {
            "inserted": self.inserted,
            "rejected": self.rejected,
            "rounds": [entry.to_json() for entry in self.found],
            "scores": self.scores,
            "metrics": self.run.metrics_size(),
        }
        self.run.save_checkpoint(len(self.found), parts, state)
        remove_folder(self.run.path / "rounds")

    def finished(self, stopped: str, first: nn.Module, test: Any) -> Grown:
        proof = None
        if test is not None:
            settings: dict[str, Any] = {"criterion": self.criterion, **self.options}
            proof = certificate(unwrapped(first), self.model, self.train, test, **settings)
        if self.run is not None and is_main() and not self.run.finished:
            model: Any = self.model
            if hasattr(model, "save_pretrained"):
                self.run.write_folder("model", lambda folder: model.save_pretrained(folder))
            outcome = {
                "model": self.name,
                "rounds": [entry.to_json() for entry in self.found],
                "stopped": stopped,
                "scores": self.scores,
            }
            results = {
                "growth_score": None if self.score is None else self.score.to_json(),
                "growth": outcome,
                "growth_certificate": None if proof is None else proof.to_json(),
            }
            self.run.write_results({k: v for k, v in results.items() if v is not None})
        return Grown(
            model=self.model,
            optimizer=self.optimizer,
            depth=self.start_depth + len(self.inserted),
            rounds=tuple(self.found),
            stopped=stopped,
            score=self.score,
            certificate=proof,
            path=None if self.run is None else self.run.path,
        )

    # -- rounds -----------------------------------------------------------------------------------

    def go(self) -> str:
        """Rounds until there is a reason to stop, which is returned."""
        while True:
            stopped = self._stop_before() or self._round()
            if stopped is not None:
                return stopped

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
        half, other = halves(stream, self.train, s.score_rows, batch_size=s.batch_size, seed=s.seed)
        self.score = score(
            stream, half, alpha=s.alpha, seed=seed, criterion=self.criterion, progress=self.progress
        )
        found = self.score.to_json()
        for site in found["sites"]:
            del site["covariance"]["matrix"], site["covariance"]["coordinates"]
        tried = [site for site in self.score.ranked if site.after not in self.rejected][: s.tries]
        if not tried:
            if any(site.verdict == DEEPEN for site in self.score.sites):
                return "no other site has a signal"
            return self.score.verdict
        jumps = [self._jump(site.after, half, other, seed) for site in tried]
        jump = max(jumps, key=lambda j: j.margin_valid or 0.0)
        if not jump.found:
            return "no step along any gradient lowers the loss"
        self.scores.append(found)
        trained = copy.deepcopy(jump.model)
        optimizer = self._trained(stream, trained, jump.after, seed, number)
        self._choose(stream, jump, trained, optimizer, number, begin)
        self._save()
        return None

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

    def _trained(
        self, old: ResidualStream, grown: nn.Module, after: int, seed: int, number: int
    ) -> Optimizer:
        s = self.settings
        new = as_stream(grown, **self.options)
        optimizer = carried(self.optimizer, old, new, after)
        only = None if s.trains == "all" else list(new.blocks[after].module.parameters())
        frozen = frozen_but(grown, only)
        folder = None if self.run is None else self.run.path / "rounds" / f"{number + 1:03d}"
        try:
            if self.fit is not None:
                self.fit(grown, self.train, optimizer, s.steps, folder)
            else:
                fit_plainly(
                    new,
                    self.train,
                    optimizer,
                    s.steps,
                    batch_size=s.batch_size,
                    seed=seed,
                    criterion=self.criterion,
                    run=None if folder is None else _opened(folder, after),
                    progress=self.progress,
                )
        finally:
            for parameter in frozen:
                parameter.requires_grad_()
        return optimizer

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
                tried=jump.tried,
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


def _opened(folder: Path, after: int) -> Run:
    """The run of one round's training, empty if the last one was of another site."""
    if is_main():
        if Run.exists(folder) and Run.open(folder).config["after"] != after:
            remove_folder(folder)
        if not Run.exists(folder):
            Run.create(folder, {"after": after}, kind="grow round")
    wait_for_all()
    return Run.open(folder)


def halves(
    stream: ResidualStream, train: Any, rows: int, *, batch_size: int, seed: int
) -> tuple[list[Any], list[Any]]:
    """Batches of training rows for the direction and the step, and others to rank sites by."""
    found: list[Any] = []
    seen = 0
    order = train
    if isinstance(order, Rows):
        order = cast(Any, batches(order, batch_size, shuffle=True, seed=seed))
    for batch in Feed(order, stream, batch_size=batch_size):
        found.append(batch)
        seen += stream.rows(batch)
        if seen >= rows:
            break
    return (found[::2], found[1::2]) if len(found) > 1 else (found, found)
