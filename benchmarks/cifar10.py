"""CIFAR-10 from the official python archive's folder, as normalised tensors."""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

MEAN = torch.tensor([0.4914, 0.4822, 0.4465]).view(3, 1, 1)
STD = torch.tensor([0.2470, 0.2435, 0.2616]).view(3, 1, 1)

ALLOWED = {
    ("numpy.core.multiarray", "_reconstruct"),
    ("numpy._core.multiarray", "_reconstruct"),
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
    ("_codecs", "encode"),
}


class _ArraysOnly(pickle.Unpickler):
    """Reads arrays, lists and bytes; anything else that a pickle asks for is refused."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in ALLOWED:
            raise pickle.UnpicklingError(f"refused to load {module}.{name} from a data file")
        return super().find_class(module, name)


def load(folder: Path, train: bool) -> tuple[Tensor, Tensor]:
    """Images [N, 3, 32, 32] in float32, normalised, and labels [N]."""
    pixels, labels = load_pixels(folder, train)
    return normalised(pixels), labels


def normalised(pixels: Tensor) -> Tensor:
    """Pixels 0..255 with every channel at mean 0 and standard deviation 1, in float32."""
    return (pixels.float() / 255 - MEAN) / STD


def load_pixels(folder: Path, train: bool) -> tuple[Tensor, Tensor]:
    """Images [N, 3, 32, 32] as bytes and labels [N]."""
    names = [f"data_batch_{i}" for i in range(1, 6)] if train else ["test_batch"]
    images, labels = [], []
    for name in names:
        path = folder / name
        if not path.exists():
            raise SystemExit(
                f"{path} not found. --data-dir must hold CIFAR-10's python batches ({', '.join(names)})."
            )
        batch = _ArraysOnly(io.BytesIO(path.read_bytes()), encoding="bytes").load()
        images.append(np.asarray(batch[b"data"], dtype=np.uint8).reshape(-1, 3, 32, 32))
        labels.extend(batch[b"labels"])
    return torch.from_numpy(np.concatenate(images)), torch.tensor(labels)
