"""`grow`: score, insert, step, train, and keep what a held-out split confirms."""

from __future__ import annotations

import copy
import time
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import AdamW, Optimizer

from everydepth.config import checked, parted, plain
from everydepth.errors import SettingError
from everydepth.files import remove_folder
from everydepth.growth.config import GrowConfig
from everydepth.growth.held_out import paired, paired_losses
from everydepth.growth.jump import Jumpboard, best_jumpboard
from everydepth.growth.losses import losses_of, mean_loss
from everydepth.growth.optimizers import carried, frozen_except, twin
from everydepth.growth.rounds import Choice, Grown, Round
from everydepth.growth.scoring import score
from everydepth.growth.sites import DEEPEN, Score, SiteScore
from everydepth.growth.trainer import Trainer, halves, repeatable, train_plainly
from everydepth.progress import quiet_transformers
from everydepth.results.results import restored
from everydepth.runs import Run
from everydepth.runs.opening import opened
from everydepth.runs.together import is_main, on_main, wait_for_all
from everydepth.stream import Criterion, ResidualStream, as_stream, unwrapped
from everydepth.stream.edit import described
from everydepth.stream.insert import inserted
from everydepth.training.snapshot import load_optimizer, optimizer_state


@checked
def grow(
    model: nn.Module | ResidualStream,
    train: Any,
    valid: Any,
    test: Any = None,
    *,
    config: GrowConfig | None = None,
    optimizer: Optimizer | None = None,
    fit: Trainer | None = None,
    criterion: Criterion | None = None,
    run: str | Path | None = None,
    resume: bool = False,
    progress: bool = True,
    **settings: Any,
) -> Grown:
    """Deepen a model block by block, as long as held-out rows confirm that it helps.

    Each round scores every site on half of `score_rows` training rows, takes the best `tries`
    sites, and picks the one whose jumpboard gains most on the other half. It trains the deeper
    model, which is kept only if the paired interval of the gain on `valid` lies above zero. (The
    paper keeps whichever has the lower training loss; that choice is reported, and
    `select="paper"` follows it.) Growing stops after `patience` rejections in a row, when no site
    has a signal ("deepest model"), or at `rounds` or `max_depth`.

    valid: rows used for this choice and nothing else. Since every round reuses them, round k gets
        `1 / (k (k + 1))` of the allowed error, so that the rounds together stay within it.
    test: rows used only to compare the grown model with the original at the end.
    config, settings: a `GrowConfig`, or its fields by name (`steps=50`); other settings go to
        `as_stream`.
    optimizer: the one the model was trained with; the state of old parameters is carried over.
    fit: replaces the built-in training: `fit(model, train, optimizer, steps, folder)`.
    run: a directory for all measurements and the grown model. `resume` continues an interrupted
        run, even in the middle of a round's training.

    Under `accelerate launch`, give each process the same data: every batch is divided among them,
    and all end with the same model. The model you pass is not changed.

    >>> few = train.subset(range(200))
    >>> grown = ed.grow(model, few, valid, steps=5, rounds=1, progress=False)
    >>> ed.as_stream(grown.model).depth in (3, 4)  # deeper only if it helps on `valid`
    True
    """
    asked: GrowConfig
    (asked,), options = parted(settings, "grow", config or GrowConfig)
    if resume and run is None:
        raise SettingError("resume=True without run=; give the directory of the run to continue")
    first = as_stream(model, **options)
    growth = _Growth(asked, first, train, valid, test, optimizer, fit, criterion, progress)
    with ExitStack() as stack:
        growth.open(run, resume, stack)
        stopped = growth.go()
        return growth.finished(stopped, first)


class _Growth:
    """The state between rounds."""

    def __init__(
        self,
        config: GrowConfig,
        first: ResidualStream,
        train: Any,
        valid: Any,
        test: Any,
        optimizer: Optimizer | None,
        fit: Trainer | None,
        criterion: Criterion | None,
        progress: bool,
    ) -> None:
        self.test = test
        self.config, self.criterion, self.progress, self.fit = config, criterion, progress, fit
        self.start_depth = first.depth
        given = unwrapped(first.model)
        self.stream = as_stream(copy.deepcopy(given), **first.options)
        used = optimizer or AdamW(given.parameters(), config.lr, weight_decay=config.weight_decay)
        self.optimizer = twin(used, given, self.model)
        self.train, self.valid = (
            repeatable(data, first, config.batch_size) for data in (train, valid)
        )
        self.found: list[Round] = []
        self.inserted: list[int] = []
        self.rejected: list[int] = []
        self.score: Score | None = None
        self.run: Run | None = None

    @property
    def model(self) -> nn.Module:
        return unwrapped(self.stream.model)

    # -- the run directory ------------------------------------------------------------------------

    def open(self, path: str | Path | None, resume: bool, stack: ExitStack) -> None:
        """Start or resume the run, and hold its lock until `stack` is closed."""
        if path is None:
            return
        about = {"name": self.stream.name, "depth": self.start_depth}
        config = {**plain(self.config), "model": about}
        self.run, _ = stack.enter_context(opened(path, config, kind="grow", resume=resume))
        if self.run.latest() is not None:
            self._restore(self.run)
        elif is_main():
            self.run.cut_metrics(0)
        wait_for_all()

    def _restore(self, run: Run) -> None:
        saved = run.checkpoint()
        state = saved.state
        for after in state["inserted"]:
            grown = inserted(self.stream, after)
            self.optimizer = carried(self.optimizer, self.stream, grown, after)
            self.stream = grown
        self.model.load_state_dict(saved.load("model"))
        load_optimizer(self.model, self.optimizer, saved.load("optimizer"), saved.path)
        self.inserted, self.rejected = list(state["inserted"]), list(state["rejected"])
        self.found = [restored(Round, entry) for entry in state["rounds"]]
        if is_main():
            run.cut_metrics(state["metrics"])  # drops those of an unsaved round

    def _save(self) -> None:
        if self.run is None or not is_main():
            return
        last = self.found[-1]
        kept = {"loss": last.train[last.kept], "valid_loss": last.valid[last.kept]}
        self.run.log({"step": len(self.found), "depth": self.stream.depth, **kept})
        parts = {
            "model": self.model.state_dict(),
            "optimizer": optimizer_state(self.model, self.optimizer, keep=True),
        }
        state = {
            "inserted": self.inserted,
            "rejected": self.rejected,
            "rounds": [asdict(entry) for entry in self.found],
            "metrics": self.run.metrics_size(),
        }
        self.run.save_checkpoint(len(self.found), parts, state)
        self._forget_rounds(self.run)

    def _forget_rounds(self, run: Run) -> None:
        """Delete the training runs of rounds whose outcome is in a checkpoint."""
        with run.writing("the folder of finished rounds could not be deleted"):
            remove_folder(run.path / "rounds")

    def finished(self, stopped: str, first: ResidualStream) -> Grown:
        held_out = None
        if self.test is not None:
            held_out = paired(first, self.stream, self.test, criterion=self.criterion)
        grown = Grown(
            model=self.model,
            optimizer=self.optimizer,
            depth=self.stream.depth,
            rounds=tuple(self.found),
            stopped=stopped,
            score=self.score,
            held_out=held_out,
            path=None if self.run is None else self.run.path,
        )
        if self.run is not None and is_main() and not self.run.finished:
            self._write(self.run, grown)
        return grown

    def _write(self, run: Run, grown: Grown) -> None:
        self._forget_rounds(run)  # left behind by a killed process
        model: Any = grown.model
        # A grown post-norm network is not a stock model: only its checkpoint has it.
        if hasattr(model, "save_pretrained") and described(model):
            with quiet_transformers():
                run.write_folder("model", lambda folder: model.save_pretrained(folder))
        if grown.score is not None:
            grown.score.save(run.path / "growth_score")
        grown.results.save(run.path / "growth")
        run.write_results({"depth": grown.depth, "stopped": grown.stopped})

    # -- rounds -----------------------------------------------------------------------------------

    def go(self) -> str:
        """Run rounds until there is a reason to stop, and return that."""
        while True:
            stopped = self._stop_before() or self._round()
            if stopped is not None:
                return stopped

    def _stop_before(self) -> str | None:
        config, depth = self.config, self.stream.depth
        if config.rounds is not None and len(self.found) >= config.rounds:
            return f"finished {config.rounds} rounds"
        if config.max_depth is not None and depth >= config.max_depth:
            return f"reached depth {depth} of at most {config.max_depth}"
        last = self.found[-config.patience :]
        if len(last) == config.patience and not any(entry.accepted for entry in last):
            return f"{config.patience} attempts in a row did not help on held-out rows"
        return None

    def _round(self) -> str | None:
        begin, config, stream = time.perf_counter(), self.config, self.stream
        number = len(self.found)
        seed = config.seed * 100_003 + number
        half, other = halves(
            stream, self.train, config.score_rows, batch_size=config.batch_size, seed=config.seed
        )
        shared: dict[str, Any] = {"seed": seed, "criterion": self.criterion}
        self.score = score(stream, half, alpha=config.alpha, progress=self.progress, **shared)
        tried = [site.after for site in self.score.ranked if site.after not in self.rejected]
        if not tried:
            if any(site.verdict == DEEPEN for site in self.score.sites):
                return "no other site has a signal"
            return self.score.verdict
        how = {"scored": self.score, "precondition": config.precondition, **shared}
        jump, _ = best_jumpboard(stream, half, other, tried[: config.tries], **how)
        if not jump.found:
            return "no step along any gradient lowers the loss"
        trained, optimizer = self._trained(jump, seed)
        self._choose(jump, trained, optimizer, begin)
        self._save()
        return None

    def _trained(self, jump: Jumpboard, seed: int) -> tuple[ResidualStream, Optimizer]:
        """A trained copy of the jumpboard, and its optimizer."""
        config = self.config
        new = as_stream(copy.deepcopy(jump.model), **self.stream.options)
        model = unwrapped(new.model)
        optimizer = carried(self.optimizer, self.stream, new, jump.after)
        only = None if config.trains == "all" else new.blocks[jump.after].module.parameters()
        folder = None if self.run is None else self._folder(self.run, jump.after)
        with frozen_except(model, only):
            if self.fit is not None:
                self.fit(model, self.train, optimizer, config.steps, folder)
            else:
                train_plainly(
                    new,
                    self.train,
                    optimizer,
                    config.steps,
                    batch_size=config.batch_size,
                    seed=seed,
                    criterion=self.criterion,
                    run=folder,
                    about={"after": jump.after},
                    progress=self.progress,
                )
        return new, optimizer

    def _folder(self, run: Run, after: int) -> Path:
        """The folder of this round's training, emptied if it holds training at another site."""
        folder = run.path / "rounds" / f"{len(self.found) + 1:03d}"

        def emptied() -> None:
            if Run.exists(folder) and Run.open(folder).config.get("about") != {"after": after}:
                with run.writing("the folder of an earlier round could not be deleted"):
                    remove_folder(folder)

        on_main(emptied)
        return folder

    def _choose(
        self, jump: Jumpboard, trained: ResidualStream, optimizer: Optimizer, begin: float
    ) -> None:
        number, depth = len(self.found), self.stream.depth
        streams = {"old": self.stream, "jumpboard": jump.stream, "trained": trained}
        measure: dict[str, Any] = {"criterion": self.criterion}
        train = {k: mean_loss(s, self.train, **measure) for k, s in streams.items()}
        rows = {k: losses_of(s, self.valid, **measure) for k, s in streams.items()}
        valid = {k: float(sums.sum() / counts.sum()) for k, (sums, counts) in rows.items()}
        paper: Choice = "trained" if train["trained"] <= train["jumpboard"] else "jumpboard"
        better: Choice = "trained" if valid["trained"] <= valid["jumpboard"] else "jumpboard"
        # 1/2 + 1/6 + 1/12 + ... = 1: the rounds share the allowed error. The interval is two-sided
        # although one side would do, which pays for choosing `better` on the same rows.
        allowed = (1 - self.config.confidence) / ((number + 1) * (number + 2))
        held = paired_losses(rows["old"], rows[better], confidence=1 - allowed, seed=number)
        safe: Choice = better if held.better else "old"
        kept = paper if self.config.select == "paper" else safe
        assert self.score is not None
        site = self.score.at(jump.after)
        self.found.append(
            Round(
                number=number + 1,
                depth=depth,
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
                kept=kept,
                sites=tuple(map(_brief, self.score.sites)),
            )
        )
        if kept == "old":
            self.rejected.append(jump.after)
            return
        if kept == "jumpboard":
            optimizer = carried(self.optimizer, self.stream, jump.stream, jump.after)
        self.stream, self.optimizer = streams[kept], optimizer
        self.inserted.append(jump.after)
        self.rejected = []


def _brief(site: SiteScore) -> SiteScore:
    return replace(site, covariance=replace(site.covariance, coordinates=(), matrix=()))
