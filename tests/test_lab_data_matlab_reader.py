"""Promise: the program that reads SVHN's files gives their X and y, and says what is wrong with any others.

It is run as a process of its own (test_lab_data_damaged.py); here its parts are called in this one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.io import savemat

from tekfac.lab.data import matlab_reader

X, Y = np.arange(2 * 2 * 3 * 4, dtype=np.uint8).reshape(2, 2, 3, 4), np.arange(4)[:, None]


def saved(folder: Path, compressed: bool = True, **arrays: Any) -> Path:
    path = folder / "train_32x32.mat"
    savemat(path, arrays, do_compression=compressed)
    return path


@pytest.mark.parametrize("compressed", [True, False])
def test_x_and_y_are_read_and_what_else_there_is_is_not(compressed: bool, tmp_path: Path) -> None:
    path = saved(tmp_path, compressed, X=X, y=Y, other=np.ones((2, 2)))
    found = matlab_reader.wanted_arrays(str(path))
    assert list(found) == ["X", "y"]
    assert np.array_equal(found["X"], X)
    assert np.array_equal(found["y"], Y)


@pytest.mark.parametrize(
    ("arrays", "reason"),
    [
        ({"X": X}, "it has no y"),
        ({"X": "text", "y": Y}, "its X is of type char, which is none of numbers"),
        ({"X": X[..., None], "y": Y}, "its X is of shape .* expected two to four lengths"),
    ],
)
def test_what_svhn_does_not_have_is_refused_with_the_reason(
    arrays: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=reason):
        matlab_reader.wanted_arrays(str(saved(tmp_path, **arrays)))


@pytest.mark.parametrize(
    ("compressed", "reason"),
    [(False, "its X of shape .* is too large"), (True, "more than 40 bytes when unpacked")],
)
def test_what_is_larger_than_it_may_be_is_refused(
    compressed: bool, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(matlab_reader, "MOST_BYTES", 40)
    with pytest.raises(ValueError, match=reason):
        matlab_reader.wanted_arrays(str(saved(tmp_path, compressed, X=X, y=Y)))


def test_what_is_much_larger_than_its_file_is_refused(tmp_path: Path) -> None:
    equal = np.zeros((32, 32, 3, 1000), dtype=np.uint8)
    with pytest.raises(ValueError, match=r"more than [\d,]+ bytes when unpacked"):
        matlab_reader.wanted_arrays(str(saved(tmp_path, X=equal, y=Y)))
    photographs = np.random.default_rng(0).integers(256, size=(32, 32, 3, 1000), dtype=np.uint8)
    assert matlab_reader.wanted_arrays(str(saved(tmp_path, X=photographs, y=Y)))["X"].shape == equal.shape


@pytest.mark.parametrize("kind", sorted(matlab_reader.NUMBERS))
def test_the_bytes_of_every_kind_of_number_are_known(kind: str) -> None:
    assert matlab_reader.bytes_of(kind) == np.dtype(kind).itemsize


def test_an_array_that_is_cut_off_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path, X=X, y=Y)
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(ValueError, match="a compressed array is cut off"):
        matlab_reader.wanted_arrays(str(path))
