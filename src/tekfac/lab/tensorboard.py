"""TensorBoard's event files."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tekfac.common.extras import require
from tekfac.lab.run_log import Epoch, LayerEpoch


class TensorBoard:
    """What a run logs, as scalars under the number of steps."""

    def __init__(self, folder: Path) -> None:
        require("tensorboard", "Writing TensorBoard's files")
        self._writer_class = require("torch.utils.tensorboard", "Writing TensorBoard's files").SummaryWriter
        self._folder = folder
        self._writer: Any = None

    def write(self, epoch: Epoch, layers: Iterable[LayerEpoch]) -> None:
        """An epoch and its layers; what was written for later steps before is hidden."""
        if self._writer is None:
            self._writer = self._writer_class(str(self._folder), purge_step=epoch.step)
        scalars = {
            f"run/{name}": value for name, value in epoch.plain().items() if name not in ("epoch", "step")
        }
        for layer in layers:
            own = layer.plain()
            for name in ("trace", "damping", "condition", "staleness"):
                scalars[f"{name}/{layer.layer}"] = own[name]
        for name, value in scalars.items():
            if value is not None:
                self._writer.add_scalar(name, value, epoch.step)
        self._writer.flush()

    def close(self) -> None:
        """Let go of the file."""
        if self._writer is not None:
            self._writer.close()
