"""Reads the numpy arrays of a pickle file without executing anything in it.

The python version of CIFAR-10 is distributed as pickles, and a pickle is a program: it may name any function and
have it called, refer to one value a million times, or ask for more memory than there is. This reader knows only the
opcodes that lists, dictionaries, text, numbers and arrays of integers consist of, and refuses all others. Nothing is
imported or called, and no memory is allocated that the file does not fill.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from drumline.errors import DataError
from drumline.untrusted import read_regular

MAX_BYTES = 512 << 20
"""Of a file; CIFAR-100 has one of 155 MB."""
MAX_OPCODES = 600_000
"""CIFAR-100 has 300,000."""
_INTEGER_TYPE = re.compile(r"[iu][1248]")
_NAMES = {
    "numpy.ndarray": "ndarray",
    "numpy.dtype": "dtype",
    "numpy.core.multiarray._reconstruct": "array",
    "numpy._core.multiarray._reconstruct": "array",
    "numpy.core.numeric._frombuffer": "whole_array",
    "numpy._core.numeric._frombuffer": "whole_array",
    "_codecs.encode": "bytes",
}


def load_arrays(path: Path) -> dict[str, Any]:
    """The dictionary that the file holds, its keys as text, its arrays of integers as numpy arrays."""
    try:
        content = _PickleReader(read_regular(path, most=MAX_BYTES, follow_links=True)).load()
        if not isinstance(content, dict):
            raise TypeError(f"it holds a {type(content).__name__}, not a dictionary")
        return {
            _text(name): _array(value) if isinstance(value, _PickledObject) else value
            for name, value in content.items()
        }
    except DataError as error:
        raise DataError(f"{path}: {error.what}", next_step=error.next_step) from error
    except Exception as error:  # a damaged pickle may raise anything
        raise DataError(
            f"{path} is damaged or not a pickled batch of images ({type(error).__name__}: {error})",
            next_step="download the file again and compare its checksum",
        ) from error


class _PickledName(NamedTuple):
    """A function or class that the file names."""

    kind: str


class _PickledObject:
    """How the file describes an array or a dtype: the arguments it is made with, and its state."""

    def __init__(self, kind: str, arguments: tuple[Any, ...]) -> None:
        self.kind, self.arguments = kind, arguments
        self.state: tuple[Any, ...] = ()


class _PickleReader:
    """The stack and the memo of a pickle that is being read."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}
        self._encoded = 0

    def load(self) -> Any:
        data, stack, memo, at = self._data, self._stack, self._memo, 0
        for _ in range(MAX_OPCODES):
            code = data[at]
            if code == 0x2E:
                return stack[-1]
            # What a batch has ten thousand of costs no call: small numbers, short text, and writing to the memo.
            if code == 0x4B:
                stack.append(data[at + 1])
                at += 2
            elif code in (0x55, 0x8C):
                end = at + 2 + data[at + 1]
                text = data[at + 2 : end]
                stack.append(text if code == 0x55 else text.decode("utf-8", "surrogatepass"))
                at = end
            elif code == 0x94:
                memo[len(memo)] = stack[-1]
                at += 1
            elif code == 0x72:
                memo[int.from_bytes(data[at + 1 : at + 5], "little")] = stack[-1]
                at += 5
            elif (operation := _OPCODES.get(code)) is None:
                raise _unknown(code)
            else:
                self._at = at + 1
                operation(self)
                at = self._at
        raise ValueError(f"it has more than {MAX_OPCODES:,} values")

    def take(self, count: int) -> bytes:
        if not 0 <= count <= len(self._data) - self._at:
            raise EOFError(f"it ends within a value of {count:,} bytes")
        self._at += count
        return self._data[self._at - count : self._at]

    def number(self, size: int, *, signed: bool = False) -> int:
        return int.from_bytes(self.take(size), "little", signed=signed)

    def line(self) -> str:
        end = self._data.index(b"\n", self._at, self._at + 200)
        return (self.take(end - self._at) + self.take(1)).decode("ascii").rstrip("\n")

    def push(self, value: Any) -> None:
        self._stack.append(value)

    def pop(self) -> Any:
        return self._stack.pop()

    def mark(self) -> None:
        self._marks.append(len(self._stack))

    def since_mark(self) -> list[Any]:
        begin = self._marks.pop()
        values = self._stack[begin:]
        del self._stack[begin:]
        return values

    def last(self, count: int) -> tuple[Any, ...]:
        values = tuple(self._stack[-count:])
        del self._stack[-count:]
        return values

    def memoize(self, number: int) -> None:
        self._memo[number] = self._stack[-1]

    def recall(self, number: int) -> None:
        self._stack.append(self._memo[number])

    def extend(self, values: list[Any]) -> None:
        _checked(list, self._stack[-1]).extend(values)

    def update(self, values: list[Any]) -> None:
        target = _checked(dict, self._stack[-1])
        for key, value in zip(values[::2], values[1::2], strict=True):
            # Not any value that has a hash: that of nested tuples may take for ever.
            target[_checked((str, bytes), key)] = value

    def name(self, module: Any, name: Any) -> None:
        whole = f"{_checked(str, module)}.{_checked(str, name)}"
        if whole not in _NAMES:
            raise _refused(f"asks for {whole}")
        self.push(_PickledName(_NAMES[whole]))

    def call(self, arguments: Any, function: Any) -> None:
        kind, given = _checked(_PickledName, function).kind, _checked(tuple, arguments)
        self.push(self._bytes(*given) if kind == "bytes" else _PickledObject(kind, given))

    def build(self, state: Any) -> None:
        _checked(_PickledObject, self._stack[-1]).state = _checked(tuple, state)

    def _bytes(self, text: Any, encoding: Any) -> bytes:
        """Protocol 2 has no bytes, so Python 3 writes them as text and its encoding."""
        self._encoded += len(_checked(str, text))
        if encoding != "latin1" or self._encoded > len(self._data):
            raise TypeError(f"bytes encoded as {encoding!r}, {self._encoded:,} in all")
        return bytes(text, "latin1")


_Operation: TypeAlias = Callable[[_PickleReader], Any]


def _text_of(size: int) -> _Operation:
    return lambda reader: reader.push(reader.take(reader.number(size)).decode("utf-8", "surrogatepass"))


def _bytes_of(size: int) -> _Operation:
    return lambda reader: reader.push(reader.take(reader.number(size)))


_OPCODES: dict[int, _Operation] = {
    ord(code): operation
    for code, operation in {
        "\x80": lambda reader: reader.take(1),  # protocol
        "\x95": lambda reader: reader.take(8),  # frame
        "(": _PickleReader.mark,
        "}": lambda reader: reader.push({}),
        "]": lambda reader: reader.push([]),
        ")": lambda reader: reader.push(()),
        "t": lambda reader: reader.push(tuple(reader.since_mark())),
        "\x85": lambda reader: reader.push(reader.last(1)),
        "\x86": lambda reader: reader.push(reader.last(2)),
        "\x87": lambda reader: reader.push(reader.last(3)),
        "a": lambda reader: reader.extend([reader.pop()]),
        "e": lambda reader: reader.extend(reader.since_mark()),
        "s": lambda reader: reader.update(list(reader.last(2))),
        "u": lambda reader: reader.update(reader.since_mark()),
        "N": lambda reader: reader.push(None),
        "\x88": lambda reader: reader.push(True),
        "\x89": lambda reader: reader.push(False),
        "J": lambda reader: reader.push(reader.number(4, signed=True)),
        "M": lambda reader: reader.push(reader.number(2)),
        "\x8a": lambda reader: reader.push(reader.number(reader.number(1), signed=True)),
        "T": _bytes_of(4),
        "C": _bytes_of(1),
        "B": _bytes_of(4),
        "\x8e": _bytes_of(8),
        "\x96": _bytes_of(8),
        "X": _text_of(4),
        "\x8d": _text_of(8),
        "q": lambda reader: reader.memoize(reader.number(1)),
        "h": lambda reader: reader.recall(reader.number(1)),
        "j": lambda reader: reader.recall(reader.number(4)),
        "c": lambda reader: reader.name(reader.line(), reader.line()),
        "\x93": lambda reader: reader.name(*reader.last(2)),
        "R": lambda reader: reader.call(reader.pop(), reader.pop()),
        "b": lambda reader: reader.build(reader.pop()),
    }.items()
}


def _unknown(code: int) -> Exception:
    import pickletools

    name = next((known.name for known in pickletools.opcodes if ord(known.code) == code), None)
    if name is None:
        return ValueError(f"byte 0x{code:02x} is not a pickle opcode")
    return _refused(f"uses the pickle opcode {name}")


def _refused(what: str) -> DataError:
    return DataError(
        f"the file {what}, which an array of numbers does not need; none of its code was run",
        next_step="do not trust this file; download it again from its source",
    )


def _checked(kinds: type | tuple[type, ...], value: Any) -> Any:
    if not isinstance(value, kinds):
        raise TypeError(f"a {type(value).__name__} where none may be")
    return value


def _array(made: _PickledObject) -> NDArray[Any]:
    if made.kind == "array":
        _, shape, kind, is_fortran, raw = made.state
        order = "F" if is_fortran else "C"
    elif made.kind == "whole_array":
        raw, kind, shape, order = made.arguments[:4]
    else:
        raise TypeError(f"a {made.kind} where an array was expected")
    if order not in ("C", "F"):
        raise TypeError("an array in another memory order")
    array = np.frombuffer(_checked((bytes, bytearray), raw), dtype=_type(_checked(_PickledObject, kind)))
    sizes = [_checked(int, size) for size in _checked(tuple, shape)]
    return array.reshape(sizes, order="F" if order == "F" else "C")


def _type(made: _PickledObject) -> np.dtype[Any]:
    name, order = _text(made.arguments[0]), _text(made.state[1])
    if made.kind != "dtype" or not _INTEGER_TYPE.fullmatch(name) or order not in ("<", ">", "|", "="):
        raise TypeError(f"an array of type {order[:1]}{name[:9]}, where integers were expected")
    return np.dtype(order + name)


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(_checked(str, value))
