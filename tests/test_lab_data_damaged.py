"""Promise: damaged and hostile files are refused, and the error says why; nothing is run."""

from __future__ import annotations

import pickle
import random
import struct
import time
import tracemalloc
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.io import savemat

from lab_data import python2_pickle, python3_pickle, random_images, write_set
from tekfac.lab.data import Images, load, matlab_reader
from tekfac.lab.data.catalogue import CIFAR10, CIFAR100, SVHN, Known
from tekfac.lab.data.cifar import names_in_pickle
from tekfac.lab.data.plain_pickles import read_pickle
from tekfac.lab.data.svhn import images_in_mat, read_mat


class Runs:
    """Pickles as a call of any function."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


def cifar10(folder: Path, first: bytes) -> Path:
    """CIFAR-10 with other bytes in its first batch."""
    write_set(CIFAR10, CIFAR10.layouts[0], folder)
    (folder / "data_batch_1").write_bytes(first)
    return folder


# -- pickles --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", range(6))
def test_a_pickle_that_runs_code_is_refused_and_nothing_runs(protocol: int, tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    raw = pickle.dumps({b"data": Runs(Path.touch, trace), b"labels": [1]}, protocol=protocol)
    pickle.loads(raw)
    assert trace.exists(), "the pickle would run"
    trace.unlink()
    with pytest.raises(
        ValueError, match=r"data_batch_1': it wants to run [\w.]+, which no file of images needs"
    ):
        load("cifar10", cifar10(tmp_path / "cifar", raw), allow_partial=True)
    assert not trace.exists()


@pytest.mark.parametrize(
    ("raw", "wanted"),
    [
        (b"cos\nsystem\n(S'true'\ntR.", "os.system"),
        (b"(S'true'\nios\nsystem\n.", "os.system"),
        (b"\x80\x04\x8c\x02os\x8c\x06system\x93\x8c\x04true\x85R.", "os.system"),
        (b"\x80\x02cbuiltins\neval\nU\x011\x85R.", "builtins.eval"),
        (b"\x80\x02cnumpy\nload\nU\x011\x85R.", "numpy.load"),
    ],
)
def test_the_error_names_what_the_file_wanted_to_run(raw: bytes, wanted: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(raw)
    with pytest.raises(ValueError, match=f"wants to run {wanted}, "):
        read_pickle(tmp_path / "file", "data")


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"\x80\x02U\x011Q.", "BINPERSID"),
        (b"P1\n.", "PERSID"),
        (b"\x80\x02\x82\x01.", "EXT1"),
        (b"\x80\x02cnumpy\ndtype\n)\x81.", "NEWOBJ"),
        (b"\x80\x02cnumpy\ndtype\nN}X\x01\x00\x00\x00aK\x01s\x86b.", "holds no dict"),
        (b"\x80\x02cnumpy\nndarray\n)R.", "holds no dict"),
        (b"\x80\x02)" + b"\x85" * 90_000 + b".", "more than 10 tuples beside the arguments of calls"),
        (b"\x80\x02)" + b"N" * 110_000 + b".", "more than 101,100 instructions, too many for 110,004 bytes"),
        (b"\x80\x02Nr\xff\xff\xff\x7f.", "numbers one of its parts 2,147,483,647"),
        (b"\x80\x02(K\x01K\x02a.", "do not fit together"),
        (b"\x80\x02]U\x01aK\x02s.", "do not fit together"),
        (b"\x80\x02}K\x01s.", "do not fit together"),
        (b"\x80\x02}h\x01.", "do not fit together"),
        (b"\x80\x04K\x01K\x02\x93.", "do not fit together"),
        (b"\x80\x02cos\n" + b"a" * 5000 + b"\n.", r"wants to run os\.a{97}, "),
        (b"\x80\x04\x8c\x02os\x8c\x04\x1b[2J\x93.", r"wants to run 'os\.\\x1b\[2J', "),
        (b"\x80\x02]q\x00.", "holds no dict"),
        (b"\x80\x02}K\x01K\x02s.", "key of its dict is not text"),
        (b"\x80\x02}.more", "4 bytes follow its end"),
        (b"\x80\x02}", "cut off, after 2 of 3 bytes"),
        (b"", "cut off, after 0 of 0 bytes"),
    ],
)
def test_strange_pickles_are_refused(raw: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(raw)
    with pytest.raises(ValueError, match=message):
        read_pickle(tmp_path / "file", "data")


@contextmanager
def cheap(most_bytes: int) -> Iterator[None]:
    """What is done inside takes seconds at most, and not more memory than this."""
    tracemalloc.start()
    began = time.process_time()
    try:
        yield
        assert time.process_time() - began < 5
        assert tracemalloc.get_traced_memory()[1] < most_bytes
    finally:
        tracemalloc.stop()


def unicode(text: bytes) -> bytes:
    return b"X" + struct.pack("<I", len(text)) + text


LONG = b"\x8a\xff" + b"\xff" * 254 + b"\x7f"
"""A number of 255 bytes."""

ARRAY = b"}U\x04datacnumpy.core.multiarray\n_reconstruct\n)R"
TYPE = b"cnumpy\ndtype\nU\x02u1\x85R"
ENCODE = b"c_codecs\nencode\nq\x00" + unicode(b"a" * 100_000)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (ENCODE + b"\x85q\x01](" + b"h\x00h\x01R" * 2000 + b"e.", "takes a tuple twice"),
        (ENCODE + b"q\x01](" + b"h\x00h\x01\x85R" * 2000 + b"e.", "holds no dict"),
        (ARRAY + b"(K\x01(" + LONG * 4 + b"t" + TYPE + b"\x89U\x00tbs.", "at most 4 whole numbers"),
        (ARRAY + b"(K\x01(" + b"K\x01" * 5 + b"t" + TYPE + b"\x89U\x01atbs.", "at most 4 whole numbers"),
        (ARRAY + b"(K\x01(" + LONG * 80 + b"t" + TYPE + b"\x89U\x00tbs.", "at most 4 whole numbers"),
        (b"})" + b"q\x00h\x00\x86" * 60 + b"K\x01s.", "takes a tuple twice"),
        (b"}" + b"(" * 40_000 + b"K\x01" + b"t" * 40_000 + b"K\x01s.", "more than 10 tuples"),
        (b"}" + unicode(b"a" * 101) + b"K\x01s.", "or too long"),
        (b"]" * 200_000 + b".", "more than 102,000 instructions"),
    ],
    ids=["text", "texts", "long numbers", "axes", "both", "nested keys", "deep keys", "long keys", "lists"],
)
def test_small_pickles_that_would_take_much_memory_or_time_are_refused(
    raw: bytes, message: str, tmp_path: Path
) -> None:
    (tmp_path / "file").write_bytes(b"\x80\x02" + raw)
    with cheap(64 << 20), pytest.raises(ValueError, match=message):
        read_pickle(tmp_path / "file", "data")


def test_things_inside_each_other_are_let_go(tmp_path: Path) -> None:
    types = b"cnumpy\ndtype\nq\x00K\x01q\x01" + b"h\x00h\x01\x85Rq\x01" * 15_000
    lists = b"K\x01" + b"q\x01]h\x01aq\x01" * 10_000
    for raw in (types, lists):
        (tmp_path / "file").write_bytes(b"\x80\x02" + raw + b".")
        with cheap(64 << 20), pytest.raises(ValueError, match="holds no dict"):
            read_pickle(tmp_path / "file", "data")


def test_one_long_text_as_the_bytes_of_many_arrays_is_not_copied_for_each(tmp_path: Path) -> None:
    head = ENCODE + b"\x85Rq\x01}("
    array = ARRAY.removeprefix(b"}U\x04data") + b"(K\x01J\xa0\x86\x01\x00\x85" + TYPE + b"\x89h\x01tb"
    entries = b"".join(b"U\x04%04d" % number + array for number in range(5))
    many = b"".join(b"U\x04%04d" % number + b"h\x02" for number in range(5, 1000))
    raw = head + entries.replace(b"tb", b"tbq\x02", 1) + many + b"u."
    (tmp_path / "file").write_bytes(b"\x80\x02" + raw)
    with cheap(8 << 20):
        assert read_pickle(tmp_path / "file", "0001")[0].shape == (100_000,)


def test_one_long_name_many_times_is_refused_before_it_is_copied(tmp_path: Path) -> None:
    names = b"](T" + struct.pack("<I", 1 << 20) + bytes(1 << 20) + b"q\x01" + b"h\x01" * 1000 + b"e"
    (tmp_path / "meta").write_bytes(b"\x80\x02}U\x0blabel_names" + names + b"s.")
    with cheap(64 << 20), pytest.raises(ValueError, match="no list of names 'label_names'"):
        names_in_pickle(tmp_path / "meta", "label_names")


@pytest.mark.parametrize("raw", [python2_pickle(random_images(2, 10)), python3_pickle(random_images(2, 10))])
def test_no_cut_or_change_ends_in_another_error(raw: bytes, tmp_path: Path) -> None:
    path = tmp_path / "file"
    chance = random.Random(0)
    heads = [position for position in range(len(raw)) if position < 120 or position > len(raw) - 60]
    for length in heads:
        path.write_bytes(raw[:length])
        with pytest.raises(ValueError, match="Cannot read"):
            read_pickle(path, "data")
    refused = 0
    for _ in range(300):
        changed = bytearray(raw)
        for _ in range(chance.randint(1, 4)):
            changed[chance.choice(heads)] = chance.randrange(256)
        path.write_bytes(changed)
        try:
            read_pickle(path, "data")
        except ValueError as error:
            refused += str(error).startswith("Cannot read")
    assert refused > 50
    for _ in range(100):
        path.write_bytes(chance.randbytes(chance.randint(0, 40)))
        with pytest.raises(ValueError, match="Cannot read"):
            read_pickle(path, "data")


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({b"labels": [1]}, "'data' in .* is missing"),
        (
            {b"data": np.zeros((1, 3071), np.uint8), b"labels": [1]},
            r"is of shape \[1, 3071\]\. Expected \[N, 3072\]",
        ),
        ({b"data": np.zeros((1, 3072), np.float32), b"labels": [1]}, "another type than uint8"),
        ({b"data": np.zeros((2, 3072), np.uint8, "F"), b"labels": [1, 1]}, "row by row"),
        ({b"data": np.zeros((1, 3072), np.uint8)}, "labels 'labels' in .* are missing"),
        ({b"data": np.zeros((1, 3072), np.uint8), b"labels": ["1"]}, "not small whole numbers"),
        ({b"data": np.zeros((1, 3072), np.uint8), b"labels": [1, 2]}, "2 labels for 1 images"),
        (
            {b"data": np.zeros((1, 3072), np.uint8), b"labels": [10]},
            "Image 0 of .* has label 10. Expected 0 to 9",
        ),
        ({b"data": np.zeros((1, 3072), np.uint8), b"labels": [-1]}, "has label -1"),
        ({b"data": np.zeros((1, 3072), np.uint8), b"labels": [1 << 70]}, "not small whole numbers"),
        ({b"data": np.zeros((0, 3072), np.uint8), b"labels": []}, "holds no images"),
    ],
)
def test_batches_that_are_not_cifars_are_refused(batch: dict[bytes, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        load("cifar10", cifar10(tmp_path, pickle.dumps(batch, protocol=3)), allow_partial=True)


def test_an_array_of_another_size_than_its_shape_is_refused(tmp_path: Path) -> None:
    raw = python2_pickle(random_images(2, 10)).replace(b"M\x02\x00M\x00\x0c", b"M\x03\x00M\x00\x0c", 1)
    with pytest.raises(ValueError, match=r"shape \[3, 3072\] has 6,144 bytes instead of 9,216"):
        load("cifar10", cifar10(tmp_path, raw), allow_partial=True)


# -- records, names and MATLAB --------------------------------------------------------------------------------


def test_records_that_are_cut_off_are_refused_with_the_numbers(tmp_path: Path) -> None:
    write_set(CIFAR100, CIFAR100.layouts[1], tmp_path)
    path = tmp_path / "train.bin"
    path.write_bytes(path.read_bytes()[:-1])
    message = r"train\.bin' has 36,887 bytes, which is 11 records of 3,074 and 3,073 bytes more"
    with pytest.raises(ValueError, match=message):
        load("cifar100", tmp_path, allow_partial=True)
    path.write_bytes(b"")
    with pytest.raises(ValueError, match="is empty"):
        load("cifar100", tmp_path, allow_partial=True)


def test_records_with_other_labels_are_refused(tmp_path: Path) -> None:
    write_set(CIFAR10, CIFAR10.layouts[1], tmp_path)
    path = tmp_path / "data_batch_3.bin"
    raw = bytearray(path.read_bytes())
    raw[2 * 3073] = 77
    path.write_bytes(raw)
    with pytest.raises(ValueError, match=r"Image 2 of .*data_batch_3\.bin' has label 77"):
        load("cifar10", tmp_path, allow_partial=True)


def test_names_that_are_not_as_many_as_classes_are_refused(tmp_path: Path) -> None:
    write_set(CIFAR100, CIFAR100.layouts[1], tmp_path)
    (tmp_path / "fine_label_names.txt").write_text("one\ntwo\n")
    with pytest.raises(ValueError, match=r"names 2 classes\. Expected 100"):
        load("cifar100", tmp_path, allow_partial=True)
    write_set(CIFAR100, CIFAR100.layouts[0], tmp_path)
    (tmp_path / "meta").write_bytes(pickle.dumps({}))
    with pytest.raises(ValueError, match="no list of names 'fine_label_names'"):
        load("cifar100", tmp_path, allow_partial=True)


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"X": np.zeros((32, 32, 3, 2), np.uint8)}, "has no y"),
        (
            {"X": np.zeros((32, 32, 2, 2), np.uint8), "y": np.ones((2, 1), np.uint8)},
            r"of shape \[32, 32, 2, 2\]",
        ),
        ({"X": np.zeros((32, 32, 3, 2)), "y": np.ones((2, 1), np.uint8)}, r"is torch\.float64 of shape"),
        (
            {"X": np.zeros((32, 32, 3, 2), np.uint8), "y": np.ones((3, 1), np.uint8)},
            "3 labels for 2 images",
        ),
        (
            {"X": np.zeros((32, 32, 3, 2), np.uint8), "y": np.full((2, 1), 11)},
            "are 11 to 11. Expected whole numbers from 1 to 10",
        ),
        (
            {"X": np.zeros((32, 32, 3, 2), np.uint8), "y": np.zeros((2, 1), np.uint8)},
            "are 0 to 0. Expected whole",
        ),
    ],
)
def test_matlab_files_that_are_not_svhns_are_refused(
    variables: dict[str, Any], message: str, tmp_path: Path
) -> None:
    write_set(SVHN, SVHN.layouts[0], tmp_path)
    savemat(tmp_path / "train_32x32.mat", variables)
    with pytest.raises(ValueError, match=message):
        load("svhn", tmp_path, allow_partial=True)


@pytest.mark.parametrize("compressed", [True, False])
def test_no_cut_or_change_of_a_matlab_file_ends_in_another_error(compressed: bool, tmp_path: Path) -> None:
    """Nor in a crash, as it may in SciPy."""
    path = tmp_path / "file.mat"
    images = np.arange(32 * 32 * 3 * 2, dtype=np.uint8).reshape(32, 32, 3, 2)
    savemat(path, {"X": images, "y": np.ones((2, 1), np.uint8)}, do_compression=compressed)
    raw = path.read_bytes()
    chance = random.Random(0)
    ends = [position for position in range(len(raw)) if position < 220 or position > len(raw) - 90]
    refused = 0
    for _ in range(8):
        changed = bytearray(raw[: chance.choice(ends)] if chance.random() < 0.2 else raw)
        for _ in range(chance.randint(1, 4)):
            position = chance.choice(ends)
            changed[position : position + 1] = chance.randbytes(1)
        path.write_bytes(changed)
        try:
            images_in_mat(path)
        except ValueError as error:
            refused += str(path) in str(error)
    assert refused > 1


@pytest.mark.parametrize("kept", [0, 100, 200, 5000])
def test_a_matlab_file_that_is_cut_off_is_refused(kept: int, tmp_path: Path) -> None:
    write_set(SVHN, SVHN.layouts[0], tmp_path)
    path = tmp_path / "test_32x32.mat"
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(ValueError, match=r"test_32x32\.mat'"):
        load("svhn", tmp_path, allow_partial=True)


def test_a_compressed_array_without_its_checksum_is_refused(tmp_path: Path) -> None:
    pixels = zlib.compress(matrix([32, 32, 3, 2], bytes(6144)))
    for content, count in ((pixels, 0), (pixels[:-4], 1)):
        cut = struct.pack("<II", 15, len(content)) + content
        path = write_mat(tmp_path / "file.mat", packed(matrix([2, 1], b"\x01\x02", b"y")), cut)
        if count:
            with pytest.raises(ValueError, match="a compressed array is cut off"):
                images_in_mat(path)
        else:
            assert len(images_in_mat(path)) == 2


def element(kind: int, content: bytes) -> bytes:
    return struct.pack("<II", kind, len(content)) + content + bytes(-len(content) % 8)


def matrix(shape: list[int], content: bytes = b"", name: bytes = b"X") -> bytes:
    """An array of uint8."""
    lengths = struct.pack(f"<{len(shape)}i", *shape)
    return element(
        14, element(6, struct.pack("<II", 9, 0)) + element(5, lengths) + element(1, name) + element(2, content)
    )


UINT8 = struct.pack("<II", 2, 1)


def packed(content: bytes) -> bytes:
    small = zlib.compress(content)
    return struct.pack("<II", 15, len(small)) + small


def write_mat(path: Path, *elements: bytes) -> Path:
    path.write_bytes(b"MATLAB 5.0".ljust(124) + b"\x00\x01IM" + b"".join(elements))
    return path


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (matrix([]), r"X is of shape \[\]; expected two to four lengths"),
        (matrix([1], b"1"), r"X is of shape \[1\]; expected two to four lengths"),
        (matrix([1] * 5, b"1"), r"X is of shape \[1, 1, 1, 1, 1\]; expected two to four lengths"),
        (matrix([1] * 100_000, b"1"), "Unexpected amount of data"),
        (matrix([0, *[2**31 - 1] * 3]), r"of shape \[0, 2147483647, .*\] is too large"),
        (matrix([-1, -1], b"1"), r"X is of shape \[-1, -1\]"),
        (matrix([2, 2], b"1"), "array of size 1 into shape"),
        (matrix([1, 1], b"1", b"X" * 64), "has no X"),
        (bytes(8) * 2000, "Did not read any bytes"),
        (packed(bytes(1 << 19)), "Expecting miMATRIX"),
        (packed(element(14, bytes(1 << 19))), "Expecting miINT32"),
        (matrix([1, 1], b"1").replace(UINT8, struct.pack("<II", 0x4242, 1)), "as a MATLAB file"),
        (matrix([1, 1], b"1").replace(UINT8, struct.pack("<II", 2, 2**32 - 16)), "MemoryError"),
        (packed(matrix([1 << 15, 1 << 15])), r"of shape \[32768, 32768\] is too large"),
        (element(14, element(6, struct.pack("<II", 1, 0)) + matrix([1, 1], b"1")[24:]), "type cell"),
    ],
    ids=[
        *("none", "one", "five", "many", "zero", "negative", "bytes", "name", "elements", "zeros", "inside"),
        *("no type", "false size", "large", "cells"),
    ],
)
def test_strange_arrays_of_a_matlab_file_are_refused(raw: bytes, message: str, tmp_path: Path) -> None:
    path = write_mat(tmp_path / "file.mat", raw, matrix([1, 1], b"1", b"y"))
    with cheap(256 << 20), pytest.raises(ValueError, match=rf"file\.mat' .*{message}.*Fetch it again\."):
        read_mat(path)


def test_a_matlab_file_on_which_scipy_crashes_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    crashes = tmp_path / "crashes.py"
    crashes.write_text("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
    monkeypatch.setattr(matlab_reader, "__file__", str(crashes))
    with pytest.raises(ValueError, match=r"file\.mat' as a MATLAB file: SciPy crashed on it\. Fetch it again"):
        read_mat(tmp_path / "file.mat")


def test_what_a_matlab_file_unpacks_to_is_bounded(tmp_path: Path) -> None:
    stream, zeros = zlib.compressobj(1), bytes(1 << 24)
    small = b"".join([*(stream.compress(zeros) for _ in range(33)), stream.flush()])
    path = write_mat(tmp_path / "file.mat", struct.pack("<II", 15, len(small)) + small)
    with cheap(64 << 20), pytest.raises(ValueError, match=r"more than [\d,]+ bytes when unpacked"):
        read_mat(path)


def test_numbers_of_a_matlab_file_are_bounded_by_the_bytes_that_they_take(tmp_path: Path) -> None:
    """Small numbers are kept in a byte each, and are eight bytes each when they are read."""
    double = matrix([1 << 10, 1 << 11], bytes(1 << 21)).replace(
        struct.pack("<II", 9, 0), struct.pack("<II", 6, 0)
    )
    path = write_mat(tmp_path / "file.mat", packed(double), matrix([1, 1], b"1", b"y"))
    with cheap(64 << 20), pytest.raises(ValueError, match=r"more than [\d,]+ bytes when unpacked"):
        read_mat(path)
    double = matrix([1 << 9, 1 << 9], bytes(1 << 18)).replace(
        struct.pack("<II", 9, 0), struct.pack("<II", 6, 0)
    )
    path = write_mat(tmp_path / "file.mat", packed(double), matrix([1, 1], b"1", b"y"))
    with cheap(64 << 20), pytest.raises(ValueError, match=r"X of shape \[512, 512\] is too large"):
        read_mat(path)


def test_an_empty_array_of_a_matlab_file_is_read(tmp_path: Path) -> None:
    pixels, _ = read_mat(write_mat(tmp_path / "file.mat", matrix([0, 5]), matrix([1, 1], b"1", b"y")))
    assert pixels.shape == (0, 5)


def test_one_image_is_a_set_too(tmp_path: Path) -> None:
    """MATLAB drops a last axis of length one."""
    write_set(SVHN, SVHN.layouts[0], tmp_path, count=1)
    assert len(load("svhn", tmp_path, allow_partial=True).train) == 1


@pytest.mark.parametrize(
    ("known", "name"),
    [(CIFAR10, "data_batch_2"), (CIFAR10, "batches.meta"), (SVHN, "test_32x32.mat")],
    ids=["pickle", "names", "matlab"],
)
def test_a_file_of_many_times_the_official_size_is_not_read(known: Known, name: str, tmp_path: Path) -> None:
    write_set(known, known.layouts[0], tmp_path)
    [most] = [4 * file.size for file in known.layouts[0].files if file.name == name]
    with (tmp_path / name).open("r+b") as file:
        file.truncate(most + 1)
    with cheap(64 << 20), pytest.raises(ValueError, match=f"{name}' has {most + 1:,} bytes. Expected at most"):
        load(known.name, tmp_path, allow_partial=True)


# -- what the user says ---------------------------------------------------------------------------------------


def test_an_unknown_name_suggests_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no data set 'CIFAR-10'\. Did you mean 'cifar10'\?"):
        load("CIFAR-10", tmp_path)
    with pytest.raises(ValueError, match=r"Expected one of cifar10, cifar100, svhn, digits, folder\.$"):
        load("zzz", tmp_path)


def test_a_folder_without_the_set_is_refused_with_advice(tmp_path: Path) -> None:
    with pytest.raises(
        FileNotFoundError, match=r"no files of svhn, such as svhn/train_32x32\.mat.*data fetch svhn"
    ):
        load("svhn", tmp_path)
    with pytest.raises(FileNotFoundError, match="does not exist"):
        load("svhn", tmp_path / "nothing")
    (tmp_path / "file").touch()
    with pytest.raises(FileNotFoundError, match="is a file"):
        load("svhn", tmp_path / "file")


def test_sizes_are_for_folders_alone() -> None:
    with pytest.raises(ValueError, match="--image-size is for the data set 'folder'"):
        load("digits", image_size=4)


def test_images_are_checked() -> None:
    pixels = torch.zeros(2, 1, 3, 3, dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"Pixels are torch\.float32 of shape"):
        Images(pixels.float(), torch.zeros(2, dtype=torch.int64))
    with pytest.raises(
        ValueError, match=r"Labels are torch\.int64 of shape \[3\]\. Expected torch\.int64 of shape \[2\]"
    ):
        Images(pixels, torch.zeros(3, dtype=torch.int64))
