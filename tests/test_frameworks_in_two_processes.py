"""Promise: accelerate and the Hugging Face Trainer, with two processes, train and resume as with one."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from framework_examples import EXAMPLES

SECONDS = 240


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "framework"), [("accelerate_digits", "accelerate"), ("huggingface_bert", "transformers")]
)
def test_the_example_runs_with_two_processes(script: str, framework: str, tmp_path: Path) -> None:
    pytest.importorskip(framework)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    quiet = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"} if sys.platform == "linux" else {}
    done = subprocess.run(
        [*launcher, str(EXAMPLES / f"{script}.py"), str(tmp_path)],
        env={**os.environ, **quiet},
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (losses,) = re.findall(r"TEKFAC ([0-9.]+), SGD ([0-9.]+)$", done.stdout, re.MULTILINE)
    assert float(losses[0]) < float(losses[1])
    assert done.stdout.count("the same weights") == 1
