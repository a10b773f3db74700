"""Where a result comes from: the command, the commit, the machine, the versions; the data and the model."""

from __future__ import annotations

import hashlib
import inspect
import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from tekfac.common.user_code import find_function
from tekfac.lab.config import RunConfig
from tekfac.lab.data.images import DataSet
from tekfac.version import __version__


def provenance(command: str, device: torch.device) -> dict[str, Any]:
    """How to get the same result again, in plain values."""
    return {
        "command": command,
        "commit": commit(),
        "machine": machine(device),
        "threads": torch.get_num_threads(),
        "device": str(device),
        "versions": {
            "python": platform.python_version(),
            "torch": str(torch.__version__),
            "tekfac": __version__,
        },
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
    }


def identity(config: RunConfig, data: DataSet) -> dict[str, str]:
    """A digest of all images and labels, and of the file that a model of the user's own comes from."""
    return {"data": data.digest, "model": _of_source(config.model) if ":" in config.model else ""}


def _of_source(name: str) -> str:
    module = inspect.getmodule(find_function(name, "model"))
    try:
        source = "" if module is None else inspect.getsource(module)
    except OSError:  # made without a file
        source = ""
    return hashlib.sha256(source.encode()).hexdigest()[:16]


def commit() -> str:
    """The commit of tekfac, "+changes" where something differs from it; "none" where it is not run from git."""
    package = Path(__file__).resolve().parent

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(package), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", Path(__file__).name)  # a package inside of another repository is not
        return git("rev-parse", "--short", "HEAD") + (
            "+changes" if git("status", "--porcelain", "-uno") else ""
        )
    except (OSError, subprocess.CalledProcessError):
        return "none"


def machine(device: torch.device) -> str:
    """The processor, or the accelerator in use, and the system."""
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)}, {platform.system()}"
    return f"{_processor()}, {platform.system()}"


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
