"""CIFAR's pickles, read as plain data: nothing that a file names is ever imported or called.

A pickle is a small program. Python's unpickler follows it, but where the program calls a function, the call is
only noted; the few names that an array of NumPy's needs may be noted, and all others are refused. What would
cost the unpickler itself more than the file is large is refused before.
"""

from __future__ import annotations

import io
import math
import pickle
import pickletools
from pathlib import Path
from typing import Any, NamedTuple

TUPLES = frozenset(("TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"))
USES = frozenset(("REDUCE", "BUILD"))
PUTS = frozenset(("BINPUT", "LONG_BINPUT", "MEMOIZE"))
GETS = frozenset(("BINGET", "LONG_BINGET"))
OTHERS = """
PROTO FRAME STOP MARK NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 LONG1 BINSTRING SHORT_BINSTRING BINUNICODE
SHORT_BINUNICODE BINBYTES SHORT_BINBYTES BYTEARRAY8 EMPTY_DICT EMPTY_LIST EMPTY_TUPLE APPEND APPENDS SETITEM
SETITEMS GLOBAL STACK_GLOBAL
"""
INSTRUCTIONS = TUPLES | USES | PUTS | GETS | frozenset(OTHERS.split())
"""What picklers of protocol 2 and later write for dicts of lists, numbers, text and arrays."""

NAMES = {
    "numpy.core.multiarray._reconstruct": "array",
    "numpy._core.multiarray._reconstruct": "array",
    "numpy.core.numeric._frombuffer": "buffer",
    "numpy._core.numeric._frombuffer": "buffer",
    "numpy.ndarray": "class",
    "numpy.dtype": "type",
    "_codecs.encode": "encode",
    "__builtin__.bytes": "bytes",
}
"""What a file may mention, as NumPy 1 and 2 and Python 2 and 3 name it, and what we call it."""

MOST_INSTRUCTIONS = 100_000
BYTES_PER_INSTRUCTION = 100
"""A file may have so many instructions, and one more per so many bytes; an image, of 3,072 bytes, takes ten."""

MOST_TUPLES = 10
"""Beside the arguments of calls; an array has two. Many inside each other, as a key, are hashed for ever."""

MOST_AXES = 4
MOST_BITS = 40
"""Of the length of an axis."""

LONGEST_TEXT = 100
"""Of a key or a class's name, and how much of a name that is refused is shown."""


class _RefusedError(ValueError):
    """The file is a pickle, but not one of plain data."""


class PlainArray(NamedTuple):
    """Bytes with a shape: what is left of a pickled array of uint8."""

    shape: tuple[int, ...]
    data: bytes | bytearray


def read_pickle(path: Path, *wanted: str) -> list[Any]:
    """Entries of the dict in a pickle, None for those that it has not; an array is a `PlainArray`.

    Raises:
        ValueError: for anything that is not such a pickle, whole, and plain data throughout.
    """
    raw = path.read_bytes()
    try:
        _look_over(raw)
        value = _Unpickler(io.BytesIO(raw), encoding="bytes").load()
        if not isinstance(value, dict):
            raise _RefusedError("it holds no dict")
        entries = {short_text(key): entry for key, entry in value.items()}
        if None in entries:
            raise _RefusedError("a key of its dict is not text, or too long")
        return [_array(entries.get(key)) for key in wanted]
    except Exception as error:  # a damaged pickle can end in nearly any error
        reason = str(error) if isinstance(error, _RefusedError) else "its instructions do not fit together"
        raise ValueError(
            f"Cannot read {str(path)!r}: {reason}. Expected one of CIFAR's pickles, whole and unchanged; fetch "
            "it again."
        ) from error


def short_text(value: Any) -> str | None:
    """Text, as any Python pickles it; None for anything else, and for more than belongs into a name."""
    value = value.encoded() if isinstance(value, _Call) else value
    if not isinstance(value, bytes | str) or len(value) > LONGEST_TEXT:
        return None
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value


def _look_over(raw: bytes) -> None:
    """Refuse what is cut off, what are no instructions of plain data, and what the unpickler would choke on."""
    most = MOST_INSTRUCTIONS + len(raw) // BYTES_PER_INSTRUCTION
    tuples, strange, position = _Tuples(most), "", 0
    try:
        for count, (instruction, argument, place) in enumerate(pickletools.genops(raw), start=1):
            position = place or 0
            if count > most:
                raise _RefusedError(f"it has more than {most:,} instructions, too many for {len(raw):,} bytes")
            if instruction.name in ("GLOBAL", "INST"):
                _known(str(argument).replace(" ", ".", 1))
            if instruction.name not in INSTRUCTIONS:
                strange = strange or instruction.name
            if not strange:
                tuples.follow(instruction.name, argument)
    except _RefusedError:
        raise
    except Exception as error:
        raise _RefusedError(f"it is no pickle, or cut off, after {position:,} of {len(raw):,} bytes") from error
    if strange:  # said last, so that a name that it wants to run is said first
        raise _RefusedError(f"its instruction {strange} is none of plain data")
    if position + 1 != len(raw):
        raise _RefusedError(f"{len(raw) - position - 1:,} bytes follow its end")


class _Tuples:
    """Follows tuples: one is the argument of a call at once, or among few others, and none is taken twice."""

    def __init__(self, most_numbers: int) -> None:
        self._most_numbers, self._left = most_numbers, MOST_TUPLES
        self._numbered: dict[int, bool] = {}
        self._is_tuple = False

    def follow(self, name: str, argument: Any) -> None:
        """Take note of an instruction."""
        if name in PUTS:
            number = len(self._numbered) if argument is None else argument
            if number > self._most_numbers:  # the unpickler would make a table that long
                raise _RefusedError(f"it numbers one of its parts {number:,}, and has not that many")
            self._numbered[number] = self._is_tuple
            return
        if name in GETS and self._numbered.get(argument):
            raise _RefusedError("it takes a tuple twice")
        self._left -= self._is_tuple and name not in USES
        if self._left < 0:
            raise _RefusedError(f"it has more than {MOST_TUPLES} tuples beside the arguments of calls")
        self._is_tuple = name in TUPLES


class _Call:
    """A name, or a call of it: what it was called with, and what state it was then given."""

    __slots__ = ("arguments", "name", "state")

    def __init__(self, name: str, arguments: Any = None) -> None:
        self.name, self.arguments, self.state = name, arguments, None

    def __call__(self, *arguments: Any) -> _Call:
        return _Call(self.name, arguments)

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def encoded(self) -> Any:
        """The bytes that Python 3 writes as a call, for Python 2."""
        match self.name, self.arguments:
            case "encode", (str(text), *_):
                return text.encode("latin1")
            case "bytes", ():
                return b""
        return None


class _Unpickler(pickle.Unpickler):
    """Python's unpickler, which calls nothing but `_Call`s."""

    def find_class(self, module: str, name: str) -> _Call:
        return _Call(_known(f"{module}.{name}"))


def _known(name: str) -> str:
    if name not in NAMES:
        shown = name[:LONGEST_TEXT] if name[:LONGEST_TEXT].isprintable() else ascii(name[:LONGEST_TEXT])
        raise _RefusedError(f"it wants to run {shown}, which no file of images needs; nothing was run")
    return NAMES[name]


def _array(entry: Any) -> Any:
    """The array that a call stands for, if its bytes are as many as its shape says; others as they are."""
    match entry:
        case _Call(name="array", state=(_, shape, dtype, columns_first, data)):
            by_rows = not columns_first
        case _Call(name="buffer", arguments=(data, dtype, shape, order)):
            by_rows = order == "C"
        case _:
            return entry
    match dtype:
        case _Call(name="type", arguments=("u1" | b"u1", *_)):
            data = data.encoded() if isinstance(data, _Call) else data
        case _:
            raise _RefusedError("it has an array of another type than uint8")
    if not by_rows or not isinstance(data, bytes | bytearray):
        raise _RefusedError("its array is not stored row by row as bytes")
    if not isinstance(shape, tuple) or len(shape) > MOST_AXES or not all(map(_is_length, shape)):
        raise _RefusedError(f"the shape of its array is not made of at most {MOST_AXES} whole numbers")
    if math.prod(shape) != len(data):
        raise _RefusedError(
            f"its array of shape {list(shape)} has {len(data):,} bytes instead of {math.prod(shape):,}"
        )
    return PlainArray(shape, data)


def _is_length(value: Any) -> bool:
    return type(value) is int and value >= 0 and value.bit_length() <= MOST_BITS
