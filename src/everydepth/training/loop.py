"""The training loop: steps, validation, checkpoints, resuming."""

from __future__ import annotations

import math
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, nullcontext
from typing import Any, cast

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from everydepth.data import Batch
from everydepth.errors import DataError, RunError, SettingError
from everydepth.runs import Checkpoint, Run
from everydepth.runs.checkpoint import STATE, whole
from everydepth.runs.opening import opened
from everydepth.runs.together import on_main
from everydepth.signals import Signals
from everydepth.stream import unwrapped
from everydepth.training.alike import warn_if_alike
from everydepth.training.best import Best
from everydepth.training.callbacks import Callback
from everydepth.training.config import FitConfig, RunConfig
from everydepth.training.failures import check_weights, not_finite
from everydepth.training.loader import Loader
from everydepth.training.module import EveryDepth
from everydepth.training.optimizers import optimizer_of
from everydepth.training.pieces import Ready, check_first, ready, shares_of
from everydepth.training.processes import of_every_process
from everydepth.training.progress import Display
from everydepth.training.result import FINISHED, FitResult, flat, write_result
from everydepth.training.schedules import Schedule, schedule_of
from everydepth.training.scoring import Evaluator, Scores
from everydepth.training.snapshot import (
    load_model,
    load_optimizer,
    model_state,
    optimizer_state,
    random_state,
    seed_everything,
    set_random_state,
)


class Training:
    """Training in progress; passed to callbacks.

    net, model: the network being trained, and the plain model inside it.
    step, epoch: the numbers of completed steps and epochs.
    loss, losses: the total loss of the last step, and its losses by depth.
    valid: the last validation: by metric, a value per depth.
    """

    def __init__(
        self,
        *,
        net: EveryDepth,
        accelerator: Accelerator,
        loader: Loader,
        evaluator: Evaluator | None,
        config: FitConfig,
        where: RunConfig,
        callbacks: tuple[Callback, ...],
        about: dict[str, Any],
    ) -> None:
        self.net, self.accelerator, self.loader = net, accelerator, loader
        self.config, self.where, self.callbacks, self._about = config, where, callbacks, about
        self.run: Run | None = None
        self._began = self._checked = False
        self.step = self.epoch = 0
        self.loss = math.nan
        self._losses: dict[int, Tensor] = {}  # of the last step, on the device
        self._losses_read: dict[int, float] | None = None  # the same as floats, once read
        self._grad_norm: Tensor | None = None
        self.valid: Scores = {}
        self.stopped: str | None = None
        self._evaluator = evaluator
        self._position = 0  # completed batches of this epoch
        self._epoch_random: Any = None  # random states at the start of this epoch
        self.best = Best()
        self._validated_at: int | None = None
        self._history: list[dict[str, Any]] = []
        self._seconds = 0.0
        self.total_steps = self._total()
        self.display = Display(net.stream.depth, self.total_steps, enabled=False)

    # -- for callbacks ----------------------------------------------------------------------------

    @property
    def model(self) -> nn.Module:
        return unwrapped(self.net.model)

    @property
    def losses(self) -> dict[int, float]:
        """The losses of the last step by depth. The first read of a step waits for the device."""
        if self._losses_read is None:
            values = torch.stack(list(self._losses.values())).tolist() if self._losses else []
            self._losses_read = dict(zip(self._losses, values, strict=True))
        return self._losses_read

    @property
    def grad_norm(self) -> float | None:
        """The gradient norm of the last step before clipping; None without `clip`."""
        return None if self._grad_norm is None else float(self._grad_norm)

    def stop(self, reason: str) -> None:
        """End the run after this step."""
        self.stopped = self.stopped or reason

    def log(self, values: Mapping[str, Any]) -> None:
        """Add a line to the metrics."""
        entry = {"step": self.step, "epoch": self.epoch, **values}
        if self.run is None:
            self._history.append(entry)
        elif self.accelerator.is_main_process:
            self.run.log(entry)
        self.accelerator.log(flat(values), step=self.step)

    def evaluate(self, evaluator: Evaluator) -> Scores:
        """Evaluate the network as it is now, without changing the run's random state."""
        with torch.random.fork_rng(), self.autocast():
            return evaluator(self.net, self.called, self.accelerator)

    # -- setup ------------------------------------------------------------------------------------

    def prepare(self) -> None:
        config, schedule = self.config, self.config.schedule
        seed_everything(config.seed, self.accelerator.process_index)
        built = optimizer_of(config.optimizer, self.net, config.lr, config.weight_decay)
        self.schedule: Schedule | None = None
        self.scheduler: LRScheduler | None = None
        if isinstance(schedule, LRScheduler):
            if schedule.optimizer is not config.optimizer:
                raise SettingError(
                    "a torch scheduler belongs to one optimizer; also pass that optimizer"
                )
            if config.warmup:
                raise SettingError(
                    f"warmup={config.warmup} with a torch scheduler; build it into the scheduler"
                )
            self.scheduler = schedule
        else:
            self.schedule = schedule_of(schedule, config.warmup, self.total_steps)
        self._rates = [group["lr"] for group in built.param_groups]
        called, prepared = self.accelerator.prepare(self.net, built)
        self.called: nn.Module = called
        self.optimizer: Optimizer = built
        self._prepared = prepared
        trained = {id(p) for group in built.param_groups for p in group["params"]}
        self._untrained = [p for p in self.net.parameters() if id(p) not in trained]
        self.net.zero_grad()  # gradients from before training must not enter the first step

    def leave(self) -> None:
        """Undo what lasts: the schedule's learning rates, and that the network is told its step.

        An optimizer of the user's may train again, and its rates are where that begins.
        """
        self.net.count_on(self.step)
        if self.schedule is not None:
            for group, rate in zip(self.optimizer.param_groups, self._rates, strict=False):
                group["lr"] = rate

    def describe(self) -> dict[str, Any]:
        """Everything that determines the outcome, as JSON: the config of the run."""
        net = self.net
        return {
            **self.config.to_json(),
            "objective": net.objective.to_json(),
            "label_smoothing": net.label_smoothing,
            "model": {
                "name": net.stream.name,
                "depth": net.stream.depth,
                "parameters": sum(p.numel() for p in net.parameters()),
            },
            "data": self.loader.describe(),
            **({"about": self._about} if self._about else {}),
        }

    def open_run(self, stack: ExitStack) -> None:
        """Start or continue the run, and lock it until `stack` is closed."""
        if self.where.run is None:
            return
        whole_run = opened(self.where.run, self.describe(), resume=self.where.resume)
        self.run, continued = stack.enter_context(whole_run)
        self._began = not continued
        # Without a checkpoint, the process died before it could write the first one.
        if continued and self.run.latest() is not None:
            saved = self.run.checkpoint()
            with whole(saved.path / STATE):
                self._restore(saved)
        else:
            self._save()

    def discard(self) -> None:
        """Delete the run directory if this call created it."""
        run = self.run
        if run is not None and self._began:
            on_main(lambda: shutil.rmtree(run.path))

    def _total(self) -> int:
        if self.config.steps is not None:
            return self.config.steps
        if self.loader.steps is None:
            raise SettingError(
                f"epochs={self.config.epochs}, but the number of batches in an epoch of "
                f"{self.loader.describe()} is unknown; give steps= instead"
            )
        if self.loader.steps == 0:
            raise _no_batches(self.loader, 0)
        return cast(int, self.config.epochs) * self.loader.steps

    # -- the loop ---------------------------------------------------------------------------------

    def go(self) -> FitResult:
        enabled = self.where.progress and self.accelerator.is_main_process
        self.display = Display(
            self.net.stream.depth, self.total_steps, enabled=enabled, start=self.step
        )
        before = self._seconds - time.perf_counter()
        with self.display, Signals() as signals:
            self._call("on_start")
            while not self._done:
                for batch in self._ready_batches():
                    self._train_on(batch, signals)
                    self._seconds = before + time.perf_counter()
                    self._after_step(signals)
                    if self._done or self._position == 0:
                        break
                else:
                    if self._position == 0:
                        raise _no_batches(self.loader, self.epoch)
                    self._end_epoch()
                    self._save_if_due(ended=True)
            if self._evaluator is not None and self._validated_at != self.step:
                self._validate()
            self._call("on_end")
            return self._finish()

    @property
    def _done(self) -> bool:
        return self.step >= self.total_steps or self.stopped is not None

    def _batches(self) -> Iterator[Batch]:
        """The rest of this epoch; after a resume, with the same random numbers as before."""
        generators = self.loader.generators()
        if self._position == 0:
            self._epoch_random = random_state(generators)
            return self.loader.epoch(self.epoch, 0)
        here = random_state(generators)
        set_random_state(self._epoch_random, generators)
        batches = self.loader.epoch(self.epoch, self._position)
        set_random_state(here, generators)
        return batches

    def _ready_batches(self) -> Iterator[Ready]:
        """The rest of this epoch, ready to be trained on."""
        count = self.config.grad_accumulation
        for raw in self._batches():
            if not self.net.training:
                self.net.train()
            found = ready(raw, self.net, self.accelerator, count, first=not self._checked)
            if not self._checked:
                check_first(found, self.accelerator)
                self._checked = True
            yield found

    def _train_on(self, ready: Ready, signals: Signals) -> None:
        """One optimizer step."""
        batch, pieces = ready.batch, ready.pieces
        if self.step == 0:
            warn_if_alike(self, batch)
        self.net.set_progress(self.step, self.total_steps)
        if self.schedule is not None:
            factor = self.schedule.factor(self.step, self.total_steps)
            for group, rate in zip(self.optimizer.param_groups, self._rates, strict=True):
                group["lr"] = rate * factor
        shares = shares_of(ready, self.accelerator)
        self._losses, self._losses_read = {}, None
        total: Tensor | None = None
        for number, (piece, share) in enumerate(zip(pieces, shares, strict=True), start=1):
            last = number == len(pieces)
            with nullcontext() if last else self.accelerator.no_sync(self.called):
                with self.autocast():
                    out = self.called(**piece)
                loss = out.loss if share is None else out.loss * share
                self.accelerator.backward(loss)
            total = loss.detach() if total is None else total + loss.detach()
            for depth, value in out.losses.items():
                part = value if share is None else value * share
                self._losses[depth] = self._losses[depth] + part if number > 1 else part
        self.loss = self._over_processes(cast(Tensor, total), signals)
        if not math.isfinite(self.loss):
            raise not_finite(self, batch)
        self._call("on_gradients")
        for parameter in self._untrained:
            parameter.grad = None  # or it would accumulate and count in the clipped norm
        if self.config.clip is not None:
            norm = self.accelerator.clip_grad_norm_(self.net.parameters(), self.config.clip)
            # Gathering needs every process, so it happens here and not where the norm is read.
            self._grad_norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        # Only a gradient scaler needs accelerate's step, which takes a millisecond longer.
        optimizer = self.optimizer if self.accelerator.scaler is None else self._prepared
        optimizer.step()
        optimizer.zero_grad()
        if self.scheduler is not None:
            self.scheduler.step()
        self.step += 1
        self._position += 1

    def _after_step(self, signals: Signals) -> None:
        logged = self.step % self.where.log_every == 0 or self._done
        if logged:
            self._log_step()
        self.display.step(self.step, self.epoch, self.losses if logged else {})
        self._call("on_step")
        every = self.config.validate_every
        if every is not None and self.step % every == 0:
            self._validate()
        ended = self._position == self.loader.steps
        if ended:
            self._end_epoch()
        self._save_if_due(ended)
        if signals.received is not None and not self._done:
            self._interrupted(signals.received)

    def _end_epoch(self) -> None:
        if self.config.validate_every is None:
            self._validate()
        self._call("on_epoch")
        self.epoch += 1
        self._position = 0

    def _save_if_due(self, ended: bool) -> None:
        every = self.where.save_every
        if self.best.new or (ended if every is None else self.step % every == 0):
            self._save()

    def _log_step(self) -> None:
        values: dict[str, Any] = {
            "loss": self.loss,
            "losses": {str(depth): value for depth, value in self.losses.items()},
            "lr": float(self.optimizer.param_groups[0]["lr"]),
            "seconds": round(self._seconds, 3),
        }
        if self.grad_norm is not None:
            values["grad_norm"] = self.grad_norm
        self.log(values)

    def _validate(self) -> None:
        if self._evaluator is None or self._validated_at == self.step:
            return
        self.valid = self.evaluate(self._evaluator)
        self._validated_at = self.step
        self.log({"valid": self.valid})
        self.display.validated(self.valid)
        reason = self.best.judge(self.step, self.valid, self.config.rule, self.net.stream)
        if reason is not None:
            self.stop(reason)
        self._call("on_validation")

    def _finish(self) -> FitResult:
        self._save()
        reports = {type(callback).__name__: dict(callback.results()) for callback in self.callbacks}
        stream, run = self.net.stream, self.run
        result = FitResult.of(
            model=stream.name,
            task=stream.task,
            depth=stream.depth,
            steps=self.step,
            epochs=self.epoch,
            stopped=self.stopped or FINISHED,
            seconds=round(self._seconds, 3),
            valid=self.valid,
            best_step=self.best.step,
            best_value=self.best.value,
            callbacks={name: report for name, report in reports.items() if report},
            history=self._history if run is None else run.metrics(),
            path=None if run is None else run.path,
        )
        if run is not None:
            state = model_state(self.net, keep=self.accelerator.is_main_process)
            on_main(lambda: write_result(run, result, self.net, state))
        return result

    # -- processes ---------------------------------------------------------------------

    def _over_processes(self, loss: Tensor, signals: Signals) -> float:
        """The mean loss over all processes; also averages the losses by depth, and passes a signal
        received by one on to all.

        The only place where every step waits for the device.
        """
        if self.accelerator.num_processes == 1:
            return loss.item()
        told = loss.new_tensor(float(signals.received or 0))
        mine = torch.stack([told, loss, *(part.to(loss) for part in self._losses.values())])
        found = cast(Tensor, self.accelerator.gather(mine)).view(-1, len(mine))
        self._losses = dict(zip(self._losses, found[:, 2:].mean(0).unbind(), strict=True))
        received, total = torch.stack([found[:, 0].max(), found[:, 1].mean()]).tolist()
        signals.received = int(received) or None
        return total

    def autocast(self) -> Any:
        if self.config.precision is None:
            return self.accelerator.autocast()
        return torch.autocast(
            self.accelerator.device.type,
            torch.bfloat16,
            enabled=self.config.precision == "bf16",
        )

    def _call(self, moment: str) -> None:
        for callback in self.callbacks:
            getattr(callback, moment)(self)

    # -- checkpoints ------------------------------------------------------------------------------

    def _save(self) -> None:
        run, best, self.best.new = self.run, self.best.new, False
        if run is None:
            return
        # A checkpoint of this step is already there, and would be the same.
        if on_main(lambda: run.latest() == self.step):
            if best:
                on_main(lambda: run.mark_best(self.step))
            on_main(lambda: run.forget_checkpoints(self.where.keep))
            return
        main = self.accelerator.is_main_process
        state = model_state(self.net, keep=main)
        optimizer = optimizer_state(self.net, self.optimizer, keep=main)
        parts = {"model": state, "optimizer": optimizer}
        here = random_state(self.loader.generators())
        scaler = self.accelerator.scaler
        content = {
            "step": self.step,
            "epoch": self.epoch,
            "position": self._position,
            "stopped": self.stopped,
            "best_step": self.best.step,
            "best_value": self.best.value,
            "validations_without_gain": self.best.without_gain,
            "validated_at": self._validated_at,
            "valid": self.valid,
            "seconds": self._seconds,
            "scheduler": None if self.scheduler is None else self.scheduler.state_dict(),
            "scaler": None if scaler is None else scaler.state_dict(),
            "callbacks": [callback.state_dict() for callback in self.callbacks],
            "random": of_every_process(here, self.accelerator),
            "epoch_random": of_every_process(self._epoch_random, self.accelerator),
        }

        def write() -> None:
            check_weights(self, state)
            content["metrics_size"] = run.metrics_size()
            run.save_checkpoint(self.step, parts, content, best=best, keep=self.where.keep)

        on_main(write)

    def _restore(self, saved: Checkpoint) -> None:
        load_model(self.net, saved.load("model"), saved.path)
        load_optimizer(self.net, self.optimizer, saved.load("optimizer"), saved.path)
        state = saved.state
        for name in ("step", "epoch", "stopped", "valid"):
            setattr(self, name, state[name])
        for name in ("position", "validated_at", "seconds"):
            setattr(self, f"_{name}", state[name])
        self.best = Best(
            step=state["best_step"],
            value=state["best_value"],
            without_gain=state["validations_without_gain"],
        )
        if self.scheduler is not None:
            self.scheduler.load_state_dict(state["scheduler"])
        if self.accelerator.scaler is not None and state["scaler"] is not None:
            self.accelerator.scaler.load_state_dict(state["scaler"])
        if len(state["callbacks"]) != len(self.callbacks):
            raise RunError(
                f"the run was started with {len(state['callbacks'])} callbacks and is resumed with "
                f"{len(self.callbacks)}; pass the same ones"
            )
        for callback, kept in zip(self.callbacks, state["callbacks"], strict=True):
            callback.load_state_dict(kept)
        rank = self.accelerator.process_index
        if rank < len(state["random"]):
            set_random_state(state["random"][rank], self.loader.generators())
            self._epoch_random = state["epoch_random"][rank]
        else:
            # More processes than before: the new ones get their own random streams.
            seed_everything(self.config.seed, rank, self.step)
            self._epoch_random = state["epoch_random"][0]
        run = cast(Run, self.run)
        on_main(lambda: run.cut_metrics(state["metrics_size"]))

    def what_is_kept(self) -> str:
        """The newest checkpoint, for error messages."""
        if self.run is None:
            return "without run=, no checkpoint was saved"
        return f"the last good checkpoint is step {self.run.latest()} in {self.run.path}"

    def _interrupted(self, number: int) -> None:
        self._save()
        name = signal.Signals(number).name
        kept = "without run=, nothing was saved"
        if self.run is not None:
            kept = f"saved a checkpoint in {self.run.path}; continue with "
            kept += "resume=True, or --resume on the command line"
        message = f"{name} at step {self.step} of {self.total_steps}: {kept}"
        if self.accelerator.is_main_process:
            print(message, file=sys.stderr)
        if number == signal.SIGINT:
            raise KeyboardInterrupt(message)
        raise SystemExit(128 + number)


def _no_batches(loader: Loader, epoch: int) -> DataError:
    again = "a generator can be iterated only once; " if epoch else ""
    return DataError(
        f"the training data ({loader.describe()}) yields no batch in epoch {epoch + 1}; {again}"
        "give a Dataset with rows, a DataLoader, or a list of batches"
    )
