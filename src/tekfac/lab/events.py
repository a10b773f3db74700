"""TensorBoard's event files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tekfac.common.extras import require


class Events:
    """What a run logs, as scalars in TensorBoard, under the number of steps."""

    def __init__(self, folder: Path) -> None:
        require("tensorboard", "Writing TensorBoard's files")
        self._writer_class = require("torch.utils.tensorboard", "Writing TensorBoard's files").SummaryWriter
        self._folder = folder / "tensorboard"
        self._writer: Any = None

    def write(self, epoch: Mapping[str, Any], layers: Iterable[Mapping[str, Any]]) -> None:
        """The line of an epoch and those of its layers; what was written for later steps before is hidden."""
        step = epoch["step"]
        if self._writer is None:
            self._writer = self._writer_class(str(self._folder), purge_step=step)
        for key, value in epoch.items():
            if key not in ("epoch", "step") and value is not None:
                self._writer.add_scalar(f"run/{key}", value, step)
        for layer in layers:
            for key in ("trace", "damping", "condition", "staleness"):
                if layer[key] is not None:
                    self._writer.add_scalar(f"{key}/{layer['layer']}", layer[key], step)
        self._writer.flush()

    def close(self) -> None:
        """Let go of the file."""
        if self._writer is not None:
            self._writer.close()
