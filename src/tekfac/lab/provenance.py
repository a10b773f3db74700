"""Where a result comes from: the command, the commit, the machine, the versions."""

from __future__ import annotations

import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

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
