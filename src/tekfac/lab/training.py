"""One run: a network trained as its config says, logged, saved as it goes, resumed bit by bit.

Where torchrun has started several processes, all of them are one run (see crew.py): they do the same, each with
its part of every batch, and only the first one writes.
"""

from __future__ import annotations

import logging
import math
import signal
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from tekfac.lab import models, optimizers
from tekfac.lab.config import OF_DATA, RunConfig
from tekfac.lab.counting import PARTS, Clock, Sums, evaluate
from tekfac.lab.crew import Crew
from tekfac.lab.data.images import DataSet
from tekfac.lab.devices import choose, set_random_states
from tekfac.lab.inputs import batches, given, read
from tekfac.lab.interruption import Interrupted, Interruption
from tekfac.lab.provenance import identity, provenance
from tekfac.lab.run_folder import RunFolder
from tekfac.lab.run_log import Epoch, LayerEpoch, TensorBoard
from tekfac.optim.natural_gradient import NaturalGradient
from tekfac.ranks.launched import joined

logger = logging.getLogger("tekfac")

CHECKPOINT_SECONDS = 120.0
"""How much work may be lost, unless the user says otherwise."""

WATCH_SECONDS = 0.2
"""Between two calls of the watcher within an epoch."""


@dataclass(frozen=True)
class Progress:
    """How far a run is.

    Attributes:
        step: steps taken.
        steps: steps in all.
        epoch: the epoch that is being trained, from 1.
        loss: mean training loss of this epoch so far.
        test_accuracy: after the last epoch; None in the first.
    """

    step: int
    steps: int
    epoch: int
    loss: float
    test_accuracy: float | None


Watcher = Callable[[Progress], None]


def train(
    config: RunConfig,
    folder: Path,
    *,
    resume: bool = False,
    wait: bool = False,
    command: str = "",
    checkpoint_seconds: float = CHECKPOINT_SECONDS,
    tensorboard: bool = False,
    watch: Watcher | None = None,
    tell: Callable[[str], None] | None = None,
    data: DataSet | None = None,
) -> dict[str, Any]:
    """Train as the config says, and leave everything about it in the folder.

    Args:
        config: what to run.
        folder: where to; it may hold the same run, interrupted, if `resume`.
        resume: go on with the run in the folder, or begin if there is none.
        wait: if another process is at work in the folder, wait for it, and take what it has done.
        command: what the user typed, for the record.
        checkpoint_seconds: time between checkpoints; 0 for one after every step.
        tensorboard: also write TensorBoard's event files.
        watch: called now and then with the progress.
        tell: called with a line where something is off with the optimizer's curvature; the log has it, too.
        data: what the config names, if it has been read already.

    Returns:
        The run's result (see RunFolder.result).

    Raises:
        ValueError: if the folder holds another run, or this one and `resume` is not set.
        Interrupted: after SIGINT or SIGTERM, when a checkpoint has been written.
    """
    run = RunFolder(folder)
    if run.has_progress:
        config = _require_same(run, config, resume)
    with Interruption() as interruption:
        data = read(config) if data is None else data
        source = identity(config, data)
        with joined() as ranks, ExitStack() as kept:
            crew = Crew(ranks, choose(config.device))
            crew.require_same({**config.plain(), **source})
            is_new = False

            def begin() -> tuple[RunConfig, dict[str, Any] | None]:
                """By the first: the config to go on with, and the result of a run that has ended."""
                nonlocal is_new
                kept.enter_context(run.locked(lambda: wait and interruption.number is None))
                kept.enter_context(run.messages())
                is_new = not run.has_progress
                if is_new:
                    return config, None
                known = _require_same(run, config, resume)
                _require_same_source(run, source)
                ended = run.result()
                if ended is not None:
                    run.checkpoints.drop()
                return known, ended

            config, ended = crew.of_first(begin)
            if ended is not None:
                return ended
            config = _with_threads(config)
            training = _Training(run, config, data, crew, checkpoint_seconds, tensorboard, interruption)
            training.tell = tell
            if is_new:
                where = provenance(command, choose(config.device))
                together = {"processes": crew.count} if crew.count > 1 else {}
                run.begin(config, source, {**where, **together, "data_notes": list(data.notes)})
            return training.run(watch)


def _with_threads(config: RunConfig) -> RunConfig:
    """The config with the number of threads that are used from here on, chosen by torch or by itself."""
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    return replace(config, threads=torch.get_num_threads())


def check_all(configs: Iterable[RunConfig]) -> None:
    """Find out, before any training, whether the data, networks and optimizers of some configs can be had.

    Raises:
        ValueError: if not.
        TypeError: for a setting that a network does not have.
    """
    distinct = {replace(config, seed=0).fingerprint(): config for config in configs}
    known: dict[tuple[Any, ...], dict[str, int]] = {}
    for config in distinct.values():
        key = tuple(getattr(config, name) for name in OF_DATA)
        if key not in known:
            data = read(config)
            batches(data, config, torch.device("cpu"))  # checks them
            known[key] = given(data)
        choose(config.device)
        _build(replace(config, device="cpu"), known[key])


def _build(config: RunConfig, given: Mapping[str, int]) -> tuple[nn.Module, Optimizer]:
    """The network at its start, for data of which that is known, and its optimizer."""
    torch.manual_seed(config.seed)
    model = models.build(config.model, options=config.model_options, **given)
    models.require_fit(model, config.model, **given)
    model.to(choose(config.device))
    return model, optimizers.build(config, model)


def learning_rate_factor(config: RunConfig, epoch: int, step: int, steps: int) -> float:
    """What the learning rate is multiplied by; epoch and step count from 0."""
    if config.schedule == "step":
        return config.decay_factor ** (epoch // config.decay_every)
    return 0.5 * (1 + math.cos(math.pi * step / steps)) if config.schedule == "cosine" else 1.0


class _Training:
    """A run in progress: what a checkpoint holds, and what can be made again from the config."""

    def __init__(
        self,
        folder: RunFolder,
        config: RunConfig,
        data: DataSet,
        crew: Crew,
        checkpoint_seconds: float,
        tensorboard: bool,
        interruption: Interruption,
    ) -> None:
        self.config = config
        self.folder = folder
        self.crew = crew
        self.interruption = interruption
        self.device = choose(config.device)
        self.train, self.test = batches(data, config, self.device)
        self.model, self.optimizer = _build(config, given(data))
        self.trained = crew.together(self.model)
        crew.seed(config.seed)
        self.base_rates = [group["lr"] for group in self.optimizer.param_groups]
        self.clock = Clock(self.device, self.optimizer)
        self.epoch = self.batch = 0
        self.sums = Sums(self.device)
        self.accuracies: list[float] = []
        self.checkpoint_seconds = checkpoint_seconds
        self.events = TensorBoard(folder.events) if tensorboard and crew.is_first else None
        self.tell: Callable[[str], None] | None = None
        self.told: set[str] = set()
        self._restore()

    @property
    def steps_per_epoch(self) -> int:
        return len(self.train)

    @property
    def steps(self) -> int:
        """Steps in all."""
        return self.config.epochs * self.steps_per_epoch

    @property
    def step(self) -> int:
        """Steps taken."""
        return self.epoch * self.steps_per_epoch + self.batch

    def run(self, watch: Watcher | None) -> dict[str, Any]:
        """Train to the end, or until a signal asks to stop."""
        status = "finished"
        self.saved = self.watched = time.monotonic()
        while self.epoch < self.config.epochs:
            self._train_epoch(watch)
            if not self._end_epoch():
                status = "diverged"
                break
        return self.crew.of_first(lambda: self._ended(status))

    def _ended(self, status: str) -> dict[str, Any]:
        result = self._result(status)
        self.folder.end(self.model.state_dict(), result)
        if self.events is not None:
            self.events.close()
        return result

    def _train_epoch(self, watch: Watcher | None) -> None:
        self.model.train()
        left = self.train.epoch(self.epoch, start=self.batch)
        while True:
            with self.clock.part("data"):
                batch = next(left, None)
            if batch is None:
                return
            self._step(*batch)
            self.batch += 1
            self._tell(watch)
            was_asked, is_due = self.crew.any([self.interruption.number is not None, self._is_due])
            if was_asked:
                self._save()
                raise Interrupted(
                    f"stopped and saved at step {self.step}; tekfac train --resume {self.folder.path} goes on",
                    self.interruption.number or signal.SIGTERM,
                )
            if is_due and self.batch < self.steps_per_epoch:
                self._save()

    @property
    def _is_due(self) -> bool:
        """Whether it is time for a checkpoint, by the clock of the first process."""
        return self.crew.is_first and time.monotonic() - self.saved >= self.checkpoint_seconds

    def _step(self, inputs: Tensor, labels: Tensor) -> None:
        factor = learning_rate_factor(self.config, self.epoch, self.step, self.steps)
        for group, rate in zip(self.optimizer.param_groups, self.base_rates, strict=True):
            group["lr"] = rate * factor
        with self.clock.part("update"):
            self.optimizer.zero_grad()
        own = self.crew.part(inputs, labels)
        with self.clock.part("forward"):
            outputs = self.trained(own.inputs)
            loss = F.cross_entropy(outputs, own.labels)
        with self.clock.part("backward"):
            (loss if own.weight == 1 else loss * own.weight).backward()  # type: ignore[no-untyped-call]
        with self.clock.part("update"):
            if isinstance(self.optimizer, NaturalGradient):
                self.optimizer.report_loss(loss)
            self.optimizer.step()
        if own.counts:
            self.sums.add(loss.detach(), outputs.detach(), own.labels)

    def _end_epoch(self) -> bool:
        """Test, log and save; whether it makes sense to go on."""
        self.crew.level_buffers(self.model)
        tested = evaluate(self.model, self.crew.share_of(self.test), self.device)
        test_loss, test_accuracy = self.crew.added(tested).means()
        train_loss, train_accuracy = self.crew.added(self.sums).means()
        step, lr = self.step, self.optimizer.param_groups[0]["lr"]
        self.epoch, self.batch, self.sums = self.epoch + 1, 0, Sums(self.device)
        self.accuracies.append(test_accuracy)
        skipped = self.optimizer.skipped_steps if isinstance(self.optimizer, NaturalGradient) else 0
        epoch = Epoch(
            epoch=self.epoch,
            step=step,
            train_loss=train_loss,
            train_accuracy=train_accuracy,
            test_loss=test_loss,
            test_accuracy=test_accuracy,
            lr=lr,
            seconds=self.clock.total,
            parts=dict(self.clock.seconds),
            skipped_steps=skipped,
        )
        self.crew.of_first(lambda: self._log(epoch))
        goes_on = math.isfinite(train_loss) and math.isfinite(test_loss)
        (is_due,) = self.crew.any([self._is_due])
        if goes_on and is_due:
            self._save()
        return goes_on

    def _log(self, epoch: Epoch) -> None:
        layers = self._layers()
        self.folder.log(epoch, layers)
        if self.events is not None:
            self.events.write(epoch, layers)

    def _layers(self) -> list[LayerEpoch]:
        """The curvature of the layers; what is off with it is told, once of each kind."""
        if not isinstance(self.optimizer, NaturalGradient):
            return []
        health, staleness = self.optimizer.health(), self.optimizer.steps_since_refresh
        for problem in health.problems:
            if problem.kind not in self.told:
                self.told.add(problem.kind)
                words = f"Epoch {self.epoch}, layer {problem.layer!r}: {problem.advice}"
                logger.warning("%s", words)
                if self.tell is not None:
                    self.tell(words)
        return [
            LayerEpoch(
                epoch=self.epoch,
                step=self.step,
                layer=own.layer,
                trace=own.trace,
                damping=own.damping,
                condition=own.condition,
                staleness=staleness,
                failed_refreshes=own.failed_refreshes,
                age_of_factors=math.nan if own.age_of_factors is None else own.age_of_factors,
                age_of_basis=math.nan if own.age_of_basis is None else own.age_of_basis,
                empty_refreshes=own.empty_refreshes,
            )
            for own in health.layers
            if not math.isnan(own.condition)  # of those that have a block
        ]

    def _tell(self, watch: Watcher | None) -> None:
        now = time.monotonic()
        if watch is None or (now - self.watched < WATCH_SECONDS and self.batch < self.steps_per_epoch):
            return  # and where there are several processes, each tells of its own part of the batches
        self.watched = now
        accuracy = self.accuracies[-1] if self.accuracies else None
        watch(Progress(self.step, self.steps, self.epoch + 1, self.sums.means()[0], accuracy))

    def _result(self, status: str) -> dict[str, Any]:
        last = self.folder.epochs()[-1].plain()
        return {
            "status": status,
            "epochs": self.epoch,
            **{key: value for key, value in last.items() if key not in ("epoch", "lr", *PARTS)},
            "best_test_accuracy": max(self.accuracies),
            "parameters": models.count_parameters(self.model),
        }

    # -- checkpoints -----------------------------------------------------------------------------------

    def _save(self) -> None:
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "epoch": self.epoch,
            "batch": self.batch,
            "sums": self.crew.added(self.sums).state(),
            "accuracies": self.accuracies,
            "seconds": self.clock.seconds,
            "generators": self.crew.random_states(),
        }
        self.crew.of_first(lambda: self.folder.save(self.config, state))
        self.saved = time.monotonic()

    def _restore(self) -> None:
        """Go on from the checkpoint in the folder, if there is one; only then is anything there changed."""
        state = self.crew.of_first(lambda: self.folder.load(self.config))
        if state is not None:
            self.crew.require_as_many(len(state.get("generators", ())), str(self.folder.path))
            self._take_up(state)
        self.crew.of_first(lambda: self.folder.go_on_from(state))

    def _take_up(self, state: Mapping[str, Any]) -> None:
        try:
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
            self.epoch, self.batch = state["epoch"], state["batch"]
            if self.crew.is_first:  # what was added up of all is its own from here on
                self.sums.add_state(state["sums"])
            self.accuracies = state["accuracies"]
            self.clock.seconds = state["seconds"]
            if not (0 <= self.epoch <= self.config.epochs and 0 <= self.batch <= self.steps_per_epoch):
                raise ValueError(f"it is of epoch {self.epoch!r}, batch {self.batch!r}.")
            set_random_states(self.crew.own(state["generators"]), self.device)
        except Exception as error:  # what another program wrote can end in nearly any error
            raise ValueError(
                f"A checkpoint in {str(self.folder.path)!r} does not fit its run: {error} Remove it to begin "
                "anew."
            ) from error


def _require_same(run: RunFolder, config: RunConfig, resume: bool) -> RunConfig:
    """The config to go on with: the run's own threads, since sums depend on their number in the last bits."""
    saved = run.config()
    differences = saved.differences(config)
    if differences:
        raise ValueError(
            f"{str(run.path)!r} holds a run with another config ({'; '.join(differences)}). Choose "
            "another folder, or resume it with its own."
        )
    if not resume:
        raise ValueError(
            f"{str(run.path)!r} already holds this run. Resume it (--resume), or choose another folder."
        )
    return replace(config, threads=saved.threads)


def _require_same_source(run: RunFolder, source: Mapping[str, str]) -> None:
    changed = [name for name, digest in run.identity().items() if digest != source.get(name)]
    if changed:
        what = " and ".join({"data": "images", "model": "source code of the model"}[name] for name in changed)
        raise ValueError(
            f"{str(run.path)!r} holds a run with other {what} than there are now. Choose another folder."
        )
