"""SVHN's files of cropped digits."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import torch
from torch import Tensor

from tekfac.common.extras import require
from tekfac.lab.data import matlab_reader
from tekfac.lab.data.images import Images


def images_in_mat(path: Path) -> Images:
    """The images X, [32, 32, 3, N], and the digits y, [N, 1], of which 10 is the digit zero.

    Raises:
        ValueError: if the file is damaged; the message says how.
    """
    pixels, digits = read_mat(path)
    digits = digits.flatten()
    if pixels.ndim == 3:
        pixels = pixels[..., None]  # MATLAB drops a last axis of length one
    if pixels.dtype != torch.uint8 or pixels.ndim != 4 or pixels.shape[:3] != (32, 32, 3):
        raise ValueError(
            f"X in {str(path)!r} is {pixels.dtype} of shape {list(pixels.shape)}. "
            "Expected torch.uint8 of shape [32, 32, 3, N]."
        )
    count = pixels.shape[3]
    if len(digits) != count:
        raise ValueError(f"{str(path)!r} has {len(digits):,} labels for {count:,} images. Fetch it again.")
    if not count:
        raise ValueError(f"{str(path)!r} holds no images.")
    labels = digits.to(torch.int64)
    if not torch.equal(labels.double(), digits.double()) or labels.min() < 1 or labels.max() > 10:
        raise ValueError(
            f"The digits in {str(path)!r} are {digits.double().min():g} to {digits.double().max():g}. Expected "
            "whole numbers from 1 to 10, where 10 is the digit zero."
        )
    return Images(pixels.permute(3, 2, 0, 1).contiguous(), labels % 10)


def read_mat(path: Path) -> tuple[Tensor, Tensor]:
    """The arrays X and y of a MATLAB file, read in a process of its own: a damaged file can crash SciPy.

    Raises:
        ValueError: if the file is damaged or of another format.
    """
    require("scipy", "Reading SVHN")
    ended = subprocess.run(
        [sys.executable, "-P", matlab_reader.__file__, str(path)],
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
        capture_output=True,
        check=False,
    )
    if ended.returncode:
        reason = ended.stderr.decode(errors="replace").strip() or "SciPy crashed on it"
        raise ValueError(f"Cannot read {str(path)!r} as a MATLAB file: {reason}. Fetch it again.")
    with require("numpy", "Reading SVHN").load(io.BytesIO(ended.stdout)) as arrays:
        return torch.from_numpy(arrays["X"]), torch.from_numpy(arrays["y"])
