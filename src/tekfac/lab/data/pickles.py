"""CIFAR's pickles, read as plain data: nothing that a file names is ever imported or called.

A pickle is a small program. Its instructions are looked over first, and only the few pass that build dicts,
lists, numbers, text and arrays. The names that it may mention are those of NumPy's arrays, and they stand for
inert things of ours.
"""

from __future__ import annotations

import io
import pickle
import pickletools
from pathlib import Path
from typing import Any

INSTRUCTIONS = """
PROTO FRAME STOP MARK NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 LONG1 BINSTRING SHORT_BINSTRING BINUNICODE
SHORT_BINUNICODE BINBYTES SHORT_BINBYTES EMPTY_DICT EMPTY_LIST EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 APPEND
APPENDS SETITEM SETITEMS BINPUT LONG_BINPUT MEMOIZE BINGET LONG_BINGET GLOBAL STACK_GLOBAL REDUCE BUILD
"""
"""What picklers write for dicts of lists, numbers, text and arrays."""

MOST_TUPLES = 10_000
"""An official file has about five; millions, one inside the other, would exhaust the stack."""


class _RefusedError(ValueError):
    """The file is a pickle, but not one of plain data."""


class PlainArray:
    """Bytes with a shape: what is left of a pickled array of uint8."""

    __slots__ = ("data", "shape")

    def __init__(self) -> None:
        self.shape: tuple[int, ...] = (0,)
        self.data = b""

    def __setstate__(self, state: Any) -> None:
        _, shape, dtype, columns_first, data = state
        if not isinstance(dtype, _Type) or dtype.code not in ("u1", b"u1"):
            raise ValueError("it has an array of another type than uint8")
        if columns_first or not isinstance(data, bytes):
            raise ValueError("its array is not stored row by row as bytes")
        size = 1
        for length in shape:
            if type(length) is not int or length < 0:
                raise ValueError("the shape of its array is not made of whole numbers")
            size *= length
        if size != len(data):
            raise ValueError(f"its array of shape {list(shape)} has {len(data):,} bytes instead of {size:,}")
        self.shape, self.data = tuple(shape), data


class _Type:
    """The type of an array, known by its code."""

    __slots__ = ("code",)

    def __init__(self, code: Any) -> None:
        self.code = code

    def __setstate__(self, state: Any) -> None:
        """Byte order and the like, which single bytes do not have."""


class _Name:
    """Stands for a name of NumPy, and has no attributes that a file could set."""

    __slots__ = ()

    def __call__(self, *arguments: Any) -> Any:
        raise ValueError("it calls what an array file does not call")


class _NewArray(_Name):
    __slots__ = ()

    def __call__(self, *arguments: Any) -> PlainArray:
        return PlainArray()


class _NewType(_Name):
    __slots__ = ()

    def __call__(self, code: Any, *arguments: Any) -> _Type:
        return _Type(code)


class _Encode(_Name):
    """How Python 3 writes bytes for Python 2: as text of the same numbers."""

    __slots__ = ()

    def __call__(self, text: Any, *arguments: Any) -> bytes:
        if not isinstance(text, str):
            raise ValueError("it encodes something that is not text")
        return text.encode("latin1")


STAND_INS = {
    ("numpy.core.multiarray", "_reconstruct"): _NewArray(),
    ("numpy._core.multiarray", "_reconstruct"): _NewArray(),
    ("numpy", "ndarray"): _Name(),
    ("numpy", "dtype"): _NewType(),
    ("_codecs", "encode"): _Encode(),
}


class _PlainUnpickler(pickle.Unpickler):
    """Knows the stand-ins and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        return _stand_in(module, name)


def read_pickle(path: Path) -> dict[str, Any]:
    """The dict in a pickle; its arrays are `PlainArray`s, its keys text, and text of Python 2 is bytes.

    Raises:
        ValueError: for anything that is not such a pickle, whole, and plain data throughout.
    """
    raw = path.read_bytes()
    try:
        _look_over(raw)
        value = _PlainUnpickler(io.BytesIO(raw), encoding="bytes").load()
        if not isinstance(value, dict):
            raise ValueError("it holds no dict")
        return {_text(key): entry for key, entry in value.items()}
    except Exception as error:  # a damaged pickle can end in nearly any error
        reason = str(error) or type(error).__name__
        raise ValueError(
            f"Cannot read {str(path)!r}: {reason}. Expected one of CIFAR's pickles, whole and unchanged; fetch "
            "it again."
        ) from error


def _stand_in(module: str, name: str) -> _Name:
    """What a name stands for."""
    if (module, name) not in STAND_INS:
        raise _RefusedError(f"it wants to run {module}.{name}, which no file of images needs; nothing was run")
    return STAND_INS[module, name]


def _look_over(raw: bytes) -> None:
    """Raise unless the instructions are those of plain data and end where the file ends."""
    allowed = frozenset(INSTRUCTIONS.split())
    tuples = position = 0
    strange = []
    try:
        for instruction, argument, place in pickletools.genops(io.BytesIO(raw)):
            position = place or 0
            if instruction.name in ("GLOBAL", "INST"):
                _stand_in(*str(argument).split(" ", 1))
            if instruction.name not in allowed:
                strange.append(instruction.name)
            tuples += instruction.name.startswith("TUPLE")
            if tuples > MOST_TUPLES:
                raise _RefusedError(f"it has more than {MOST_TUPLES} tuples")
            if instruction.name == "LONG_BINPUT" and (argument or 0) > len(raw):
                raise _RefusedError("it numbers more things than it has")
    except _RefusedError:
        raise
    except Exception as error:
        raise ValueError(f"it is no pickle, or cut off, after {position:,} of {len(raw):,} bytes") from error
    if strange:  # said last, so that a name that it wants to run is said first
        raise ValueError(f"its instruction {strange[0]} is none of plain data")
    if position + 1 != len(raw):
        raise ValueError(f"{len(raw) - position - 1:,} bytes follow its end")


def _text(key: Any) -> str:
    """A key of the dict as text, which Python 2 wrote as bytes."""
    if isinstance(key, bytes):
        return key.decode("ascii")
    if not isinstance(key, str):
        raise ValueError("a key of its dict is not text")
    return key
