"""CIFAR's pickles, read as plain data: nothing that a file names is ever imported or called.

A pickle is a small program. Its instructions are looked over first, and only the few pass that build dicts,
lists, numbers, text and arrays. They are followed here, not by Python's unpickler. The names that they may
mention are those of NumPy's arrays and of bytes, and are mere words to us. Whatever a file says, time and
memory stay in proportion to its size.
"""

from __future__ import annotations

import io
import math
import pickletools
from enum import Enum, auto
from pathlib import Path
from typing import Any

LITERALS = """
NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 LONG1 BINSTRING SHORT_BINSTRING BINUNICODE SHORT_BINUNICODE
BINBYTES SHORT_BINBYTES BYTEARRAY8
"""
INSTRUCTIONS = f"""
{LITERALS} PROTO FRAME STOP MARK EMPTY_DICT EMPTY_LIST EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 APPEND APPENDS
SETITEM SETITEMS BINPUT LONG_BINPUT MEMOIZE BINGET LONG_BINGET GLOBAL STACK_GLOBAL REDUCE BUILD
"""
"""What picklers of protocol 2 and later write for dicts of lists, numbers, text and arrays."""

MOST_INSTRUCTIONS = 100_000
BYTES_PER_INSTRUCTION = 100
"""A file may have so many instructions, and one more per so many bytes; an image, of 3,072 bytes, takes ten."""

MOST_AXES = 4
MOST_BITS = 40
"""Of the length of an axis."""

LONGEST_KEY = 100
LONGEST_NAME = 100
"""How much of a name that is refused is shown."""

Instruction = tuple[str, Any]


class _RefusedError(ValueError):
    """The file is a pickle, but not one of plain data."""


class PlainArray:
    """Bytes with a shape: what is left of a pickled array of uint8."""

    __slots__ = ("data", "shape")

    def __init__(self) -> None:
        self.shape: tuple[int, ...] = (0,)
        self.data: bytes | bytearray = b""

    def fill(self, shape: Any, dtype: Any, data: Any, *, by_rows: bool) -> None:
        """Take the bytes, if they are as many as the shape says."""
        if not isinstance(dtype, _Type) or dtype.code not in ("u1", b"u1"):
            raise _RefusedError("it has an array of another type than uint8")
        if not by_rows or not isinstance(data, bytes | bytearray):
            raise _RefusedError("its array is not stored row by row as bytes")
        if not isinstance(shape, tuple) or len(shape) > MOST_AXES or not all(map(_is_length, shape)):
            raise _RefusedError(f"the shape of its array is not made of at most {MOST_AXES} whole numbers")
        size = math.prod(shape)
        if size != len(data):
            raise _RefusedError(f"its array of shape {list(shape)} has {len(data):,} bytes instead of {size:,}")
        self.shape, self.data = shape, data


class _Type:
    """The type of an array, known by its code."""

    __slots__ = ("code",)

    def __init__(self, code: Any) -> None:
        self.code = code


class _Name(Enum):
    """What a file may mention."""

    NEW_ARRAY = auto()
    FROM_BUFFER = auto()
    ARRAY = auto()
    TYPE = auto()
    ENCODE = auto()
    BYTES = auto()


NAMES = {
    ("numpy.core.multiarray", "_reconstruct"): _Name.NEW_ARRAY,
    ("numpy._core.multiarray", "_reconstruct"): _Name.NEW_ARRAY,
    ("numpy.core.numeric", "_frombuffer"): _Name.FROM_BUFFER,
    ("numpy._core.numeric", "_frombuffer"): _Name.FROM_BUFFER,
    ("numpy", "ndarray"): _Name.ARRAY,
    ("numpy", "dtype"): _Name.TYPE,
    ("_codecs", "encode"): _Name.ENCODE,
    ("__builtin__", "bytes"): _Name.BYTES,
}


def read_pickle(path: Path) -> dict[str, Any]:
    """The dict in a pickle; its arrays are `PlainArray`s, its keys text, and text of Python 2 is bytes.

    Raises:
        ValueError: for anything that is not such a pickle, whole, and plain data throughout.
    """
    raw = path.read_bytes()
    try:
        value = _Builder(len(raw)).build(_looked_over(raw))
        if not isinstance(value, dict):
            raise _RefusedError("it holds no dict")
        return {key.decode("ascii") if isinstance(key, bytes) else key: entry for key, entry in value.items()}
    except Exception as error:  # a damaged pickle can end in nearly any error
        reason = str(error) if isinstance(error, _RefusedError) else "its instructions do not fit together"
        raise ValueError(
            f"Cannot read {str(path)!r}: {reason}. Expected one of CIFAR's pickles, whole and unchanged; fetch "
            "it again."
        ) from error


def _looked_over(raw: bytes) -> list[Instruction]:
    """The instructions, if they are those of plain data and end where the file ends."""
    allowed = frozenset(INSTRUCTIONS.split())
    most = MOST_INSTRUCTIONS + len(raw) // BYTES_PER_INSTRUCTION
    found: list[Instruction] = []
    strange = ""
    position = 0
    try:
        for count, (instruction, argument, place) in enumerate(pickletools.genops(io.BytesIO(raw)), start=1):
            position = place or 0
            if count > most:
                raise _RefusedError(f"it has more than {most:,} instructions, too many for {len(raw):,} bytes")
            if instruction.name in ("GLOBAL", "INST"):
                _name(*str(argument).split(" ", 1))
            if instruction.name not in allowed:
                strange = strange or instruction.name
            if not strange:
                found.append((instruction.name, argument))
    except _RefusedError:
        raise
    except Exception as error:
        raise _RefusedError(f"it is no pickle, or cut off, after {position:,} of {len(raw):,} bytes") from error
    if strange:  # said last, so that a name that it wants to run is said first
        raise _RefusedError(f"its instruction {strange} is none of plain data")
    if position + 1 != len(raw):
        raise _RefusedError(f"{len(raw) - position - 1:,} bytes follow its end")
    return found


class _Builder:
    """Follows instructions; makes no more bytes out of text than the file has."""

    def __init__(self, size: int) -> None:
        self._bytes_left = size
        self._stack: list[Any] = []
        self._below_marks: list[list[Any]] = []
        self._numbered: dict[int, Any] = {}

    def build(self, instructions: list[Instruction]) -> Any:
        """What the last instruction leaves."""
        literals = frozenset(LITERALS.split())
        for name, argument in instructions:
            if name in literals:
                self._stack.append(_literal(name, argument))
            else:
                self._follow(name, argument)
        return self._stack.pop()

    def _follow(self, name: str, argument: Any) -> None:
        match name:
            case "MARK":
                self._below_marks.append(self._stack)
                self._stack = []
            case "EMPTY_DICT":
                self._stack.append({})
            case "EMPTY_LIST":
                self._stack.append([])
            case "EMPTY_TUPLE":
                self._stack.append(())
            case "TUPLE":
                items = self._since_mark()
                self._stack.append(tuple(items))
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                items = [self._stack.pop() for _ in range(int(name[-1]))]
                self._stack.append(tuple(reversed(items)))
            case "APPEND":
                self._append([self._stack.pop()])
            case "APPENDS":
                self._append(self._since_mark())
            case "SETITEM":
                value, key = self._stack.pop(), self._stack.pop()
                self._set([key, value])
            case "SETITEMS":
                self._set(self._since_mark())
            case "BINPUT" | "LONG_BINPUT":
                self._numbered[argument] = self._stack[-1]
            case "MEMOIZE":
                self._numbered[len(self._numbered)] = self._stack[-1]
            case "BINGET" | "LONG_BINGET":
                self._stack.append(self._numbered[argument])
            case "GLOBAL":
                self._stack.append(_name(*argument.split(" ", 1)))
            case "STACK_GLOBAL":
                word, module = self._stack.pop(), self._stack.pop()
                self._stack.append(_name(module, word))
            case "REDUCE":
                arguments, called = self._stack.pop(), self._stack.pop()
                self._stack.append(self._called(called, arguments))
            case "BUILD":
                state = self._stack.pop()
                _set_state(self._stack[-1], state)

    def _since_mark(self) -> list[Any]:
        """What was put on the stack since the last mark, taken off it."""
        items, self._stack = self._stack, self._below_marks.pop()
        return items

    def _append(self, items: list[Any]) -> None:
        if not isinstance(self._stack[-1], list):
            raise _RefusedError("it appends to what is no list")
        self._stack[-1].extend(items)

    def _set(self, items: list[Any]) -> None:
        """Set keys, which are short text: to hash and to compare others could take for ever."""
        if not isinstance(self._stack[-1], dict):
            raise _RefusedError("it sets items of what is no dict")
        for key, value in zip(items[::2], items[1::2], strict=True):
            if not isinstance(key, bytes | str) or len(key) > LONGEST_KEY:
                raise _RefusedError("a key of its dict is not text, or too long")
            self._stack[-1][key] = value

    def _called(self, name: Any, arguments: Any) -> Any:
        """What the function of a name would give; only those of arrays and of bytes are known."""
        match name, arguments:
            case _Name.NEW_ARRAY, _:
                return PlainArray()
            case _Name.FROM_BUFFER, (data, dtype, shape, order):
                array = PlainArray()
                array.fill(shape, dtype, data, by_rows=order == "C")
                return array
            case _Name.TYPE, (code, *_):
                return _Type(code)
            case _Name.ENCODE, (str(text), *_):  # how Python 3 writes bytes for Python 2
                self._bytes_left -= len(text)
                if self._bytes_left < 0:
                    raise _RefusedError("it makes more bytes out of text than it has")
                return text.encode("latin1")
            case _Name.BYTES, ():
                return b""
        raise _RefusedError("it calls what an array file does not call")


def _literal(name: str, argument: Any) -> Any:
    """A number or text; text of Python 2 is bytes."""
    if name in ("NEWTRUE", "NEWFALSE"):
        return name == "NEWTRUE"
    return argument.encode("latin1") if name in ("BINSTRING", "SHORT_BINSTRING") else argument


def _name(module: Any, name: Any) -> _Name:
    """What a name stands for."""
    if not isinstance(module, str) or not isinstance(name, str):
        raise _RefusedError("it has a name that is not text")
    if (module, name) not in NAMES:
        shown = f"{module}.{name}"[:LONGEST_NAME]
        shown = shown if shown.isprintable() else ascii(shown)
        raise _RefusedError(f"it wants to run {shown}, which no file of images needs; nothing was run")
    return NAMES[module, name]


def _set_state(thing: Any, state: Any) -> None:
    """Fill an array; a type has byte order and the like, which single bytes do not have."""
    if isinstance(thing, PlainArray):
        _, shape, dtype, columns_first, data = state
        thing.fill(shape, dtype, data, by_rows=not columns_first)
    elif not isinstance(thing, _Type):
        raise _RefusedError("it sets the state of what has none")


def _is_length(value: Any) -> bool:
    return type(value) is int and value >= 0 and value.bit_length() <= MOST_BITS
