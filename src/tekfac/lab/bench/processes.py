"""Processes of their own for what is measured: threads are fixed at the start, and a peak never falls."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tekfac.common.files import read_json, write_json

THREADS_OF = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


def alone(job: Mapping[str, Any], environment: Mapping[str, str] | None = None) -> Any:
    """Do a job (see `worker`) in a new process, and wait for it.

    Args:
        job: plain values.
        environment: further variables of the process.

    Raises:
        ValueError: if it fails, with the last line that it said.
    """
    threads = dict.fromkeys(THREADS_OF, str(job["threads"]))
    with TemporaryDirectory(prefix="tekfac-bench-") as folder:
        asked, told = Path(folder, "job.json"), Path(folder, "told.json")
        write_json(asked, job)
        done = subprocess.run(
            [sys.executable, "-m", "tekfac.lab.bench.worker", str(asked), str(told)],
            env={**os.environ, **threads, **(environment or {})},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
        if done.returncode:
            raise ValueError(_why(job, done))
        return read_json(told)


def _why(job: Mapping[str, Any], done: subprocess.CompletedProcess[str]) -> str:
    """What is said of a process that failed."""
    what = " ".join(str(job[key]) for key in ("kind", "network") if key in job)
    if done.returncode < 0:
        return (
            f"The process of {what} was killed by signal {-done.returncode}, perhaps for lack of memory. Try "
            "fewer --contestants at a time."
        )
    said = [line for line in done.stderr.splitlines() if line.strip()]
    return f"The process of {what} failed: {said[-1].strip() if said else 'it said nothing'}"
