"""Optimizers side by side: the same task, several seeds, one report."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tekfac.lab.config import RunConfig
from tekfac.lab.pool import Job, Manner, run_all, share
from tekfac.lab.run_folder import run_folder
from tekfac.lab.training import check_all


def run_configs(configs: Sequence[RunConfig], folder: Path, manner: Manner, description: str) -> list[Path]:
    """Run every config in a folder of its own below `folder`; what is there and finished is not run again.

    Returns:
        The runs' folders, in the order of the configs.
    """
    shared = [share(config, manner.processes) for config in configs]
    folders = [run_folder(folder, config) for config in shared]
    several = len({(config.data, config.model) for config in configs}) > 1
    jobs = [
        Job(f"{_task(config) if several else ''}{config.optimizer}, seed {config.seed}", (config,), (path,))
        for config, path in zip(shared, folders, strict=True)
    ]
    check_all(configs)
    run_all(jobs, manner, description)
    return folders


def _task(config: RunConfig) -> str:
    return f"{config.data}, {config.model}, "
