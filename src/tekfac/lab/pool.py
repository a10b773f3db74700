"""Many runs, several at a time, each in a process of its own and resumed if it was interrupted before."""

from __future__ import annotations

import multiprocessing
import os
import queue
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, Self

from tekfac.common.console import progress
from tekfac.lab.config import RunConfig
from tekfac.lab.inputs import SharedData, mapped
from tekfac.lab.interruption import SIGNALS, Interrupted, Interruption
from tekfac.lab.run_folder import RunFolder
from tekfac.lab.training import CHECKPOINT_SECONDS, Progress, check_all, train

POLL_SECONDS = 0.2
THREADS_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
"""By which a user tells torch how many threads to use."""

STOPPED = "stopped; the same command goes on where it was"


@dataclass(frozen=True)
class Job:
    """Runs that belong together, one after the other.

    Attributes:
        label: for the progress bar.
        configs: what to run.
        folders: where to.
    """

    label: str
    configs: tuple[RunConfig, ...]
    folders: tuple[Path, ...]


@dataclass(frozen=True)
class Manner:
    """How the runs of a pool are computed.

    Attributes:
        processes: how many runs at a time.
        command: what the user typed, for the record.
        checkpoint_seconds: time between checkpoints of a run.
        tensorboard: whether runs also write TensorBoard's files.
        quiet: no progress bars.
    """

    processes: int = 1
    command: str = ""
    checkpoint_seconds: float = CHECKPOINT_SECONDS
    tensorboard: bool = False
    quiet: bool = False


def cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def share(config: RunConfig, processes: int) -> RunConfig:
    """The config with its share of the cores, unless it or the environment says how many threads there are."""
    if config.threads is not None or any(os.environ.get(name) for name in THREADS_VARIABLES):
        return config
    return replace(config, threads=max(1, cores() // processes))


class Pool:
    """Processes that train, and bars that show how far they are."""

    def __init__(self, manner: Manner) -> None:
        self._manner = manner
        context = multiprocessing.get_context("spawn")
        self._news: Any = context.Queue()
        self._executor = ProcessPoolExecutor(
            manner.processes, mp_context=context, initializer=_begin, initargs=(self._news, os.getpid())
        )
        self._data = SharedData()
        self._bars = progress("told", quiet=manner.quiet)
        self._tasks: dict[Path, Any] = {}
        self._jobs: dict[Future[list[dict[str, Any]]], Job] = {}

    def __enter__(self) -> Self:
        self._before = {number: signal.signal(number, _hand_on) for number in SIGNALS}
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()
        self._executor.shutdown(wait=True, cancel_futures=True)
        self._data.close()
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @property
    def free(self) -> int:
        """Processes that have nothing to do."""
        return self._manner.processes - len(self._jobs)

    def submit(self, job: Job) -> Future[list[dict[str, Any]]]:
        """Begin a job as soon as a process is free; its outcome is the list of the runs' results."""
        paths = [self._data.path(config) for config in job.configs]
        handler = signal.signal(signal.SIGINT, signal.SIG_IGN)  # a process that begins now ignores it for good
        try:
            future = self._executor.submit(_work, job, paths, self._manner)
        finally:
            signal.signal(signal.SIGINT, handler)
        self._jobs[future] = job
        return future

    def wait(
        self, futures: Iterable[Future[list[dict[str, Any]]]], seconds: float | None = None
    ) -> set[Future[Any]]:
        """Wait until some job is done, or the seconds are over; those that are done."""
        pending, waited = set(futures), 0.0
        while True:
            done, _ = wait(pending, timeout=POLL_SECONDS, return_when=FIRST_COMPLETED)
            self._show()
            waited += POLL_SECONDS
            if done or (seconds is not None and waited >= seconds):
                break
        for future in done:
            for folder in self._jobs.pop(future).folders:
                if folder in self._tasks:
                    self._bars.remove_task(self._tasks.pop(folder))
        return done

    def overall(self, description: str, total: int) -> Callable[[int], None]:
        """A bar for all jobs together; call what is returned with the number that are done."""
        task = self._bars.add_task(description, total=total, told="")
        return lambda done: self._bars.update(task, completed=done)

    def _show(self) -> None:
        while True:
            try:
                folder, at = self._news.get_nowait()
            except queue.Empty:
                return
            labels = {own: job.label for job in self._jobs.values() for own in job.folders}
            if folder not in labels:
                continue
            if folder not in self._tasks:
                self._tasks[folder] = self._bars.add_task(labels[folder], told="")
            self._bars.update(self._tasks[folder], completed=at.step, total=at.steps, told=told(at))


def told(at: Progress) -> str:
    """The state of a run, for its bar."""
    accuracy = "" if at.test_accuracy is None else f", {100 * at.test_accuracy:.1f}%"
    return f"epoch {at.epoch}, loss {at.loss:.3f}{accuracy}"


def run_all(jobs: Sequence[Job], manner: Manner, description: str = "All runs") -> list[list[dict[str, Any]]]:
    """Run all jobs; the results of each, in their order.

    One that fails does not keep the others from being run.

    Raises:
        ValueError: if some failed, with what the first one said.
    """
    waiting, futures = deque(jobs), dict[Future[list[dict[str, Any]]], Job]()
    with Pool(manner) as pool:
        pending, advance = set[Future[list[dict[str, Any]]]](), pool.overall(description, len(jobs))
        while waiting or pending:
            while waiting and pool.free:  # no more, so that nothing is begun after an interruption
                job = waiting.popleft()
                future = pool.submit(job)
                futures[future] = job
                pending.add(future)
            done = pool.wait(pending)
            pending -= done
            advance(len(futures) - len(pending))
            for future in done:
                raise_if_over(future.exception())
    failed = [(job, error) for future, job in futures.items() if (error := future.exception()) is not None]
    if failed:
        job, first = failed[0]
        raise ValueError(f"{len(failed)} of {len(jobs)} jobs failed; {job.label}: {first}") from first
    return [future.result() for future in futures]


def run_configs(configs: Sequence[RunConfig], folder: Path, manner: Manner, description: str) -> list[Path]:
    """Run every config in a folder of its own below `folder`; what is there and finished is not run again.

    Returns:
        The runs' folders, in the order of the configs.
    """
    check_all(configs)
    several = len({(config.data, config.model) for config in configs}) > 1
    jobs = []
    for config in configs:
        task = f"{config.data}, {config.model}, " if several else ""
        label = f"{task}{config.optimizer}, seed {config.seed}"
        jobs.append(Job(label, (share(config, manner.processes),), (RunFolder.of(folder, config).path,)))
    run_all(jobs, manner, description)
    return [path for job in jobs for path in job.folders]


def raise_if_over(error: BaseException | None) -> None:
    """Raise what ends all jobs, not only its own.

    Raises:
        Interrupted: if the job was interrupted.
        ValueError: if a process was killed from outside.
    """
    if isinstance(error, Interrupted):
        raise Interrupted(STOPPED, error.status - 128) from error
    if isinstance(error, BrokenProcessPool):
        raise ValueError(
            "A process that trained was killed, perhaps for lack of memory. What is finished is kept, and the "
            "same command goes on; try it with --jobs 1."
        ) from error


def _hand_on(number: int, frame: FrameType | None) -> None:
    """Tell the processes that train, which ignore SIGINT, to save themselves; a second signal acts at once."""
    for sent in SIGNALS:
        signal.signal(sent, signal.SIG_DFL)
    for child in multiprocessing.active_children():
        child.terminate()
    raise Interrupted(STOPPED, number)


# -- in the processes ----------------------------------------------------------------------------------------

_news: Any = None


def _begin(news: Any, parent: int) -> None:
    """Take the queue for news, and make sure that this process does not outlive the one that began it."""
    global _news
    _news = news
    news.cancel_join_thread()  # the end does not wait for news that nobody reads any more
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(POLL_SECONDS)
    os._exit(1)  # whatever is half done: files are whole, and a run goes on from its checkpoint


def _work(job: Job, data: Sequence[Path | None], manner: Manner) -> list[dict[str, Any]]:
    """Train one after the other; a signal ends all of them."""
    results = []
    with Interruption() as interruption:
        for config, folder, path in zip(job.configs, job.folders, data, strict=True):
            results.append(
                train(
                    config,
                    folder,
                    resume=True,
                    wait=True,
                    command=manner.command,
                    checkpoint_seconds=manner.checkpoint_seconds,
                    tensorboard=manner.tensorboard,
                    watch=partial(_tell, folder),
                    data=None if path is None else mapped(path),
                )
            )
            if interruption.number is not None:
                raise Interrupted(STOPPED, interruption.number)
    return results


def _tell(folder: Path, at: Progress) -> None:
    _news.put((folder, at))
