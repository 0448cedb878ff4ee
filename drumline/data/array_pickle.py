"""Reads the numpy arrays of a pickle file without executing anything in it.

The python version of CIFAR-10 is distributed as pickles, and a pickle is a program: it may name any function and
have it called, refer to one value a million times, or ask for more memory than there is. `pickletools` of the standard
library splits it into opcodes without running them; this reader follows only those that lists, dictionaries, text,
numbers and arrays of integers consist of, and refuses all others. Nothing is imported or called, and no memory is
allocated that the file does not fill.
"""

from __future__ import annotations

import pickletools
import re
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from drumline.errors import DataError
from drumline.untrusted import read_regular

# The largest file of CIFAR-100 has 155 MB and 300,000 opcodes.
MAX_BYTES = 512 << 20
MAX_OPCODES = 400_000
_INTEGER_TYPE = re.compile(r"[iu][1248]")
_NAMES = {
    "numpy.ndarray": "ndarray",
    "numpy.dtype": "dtype",
    "numpy.core.multiarray._reconstruct": "array",
    "numpy.core.numeric._frombuffer": "whole_array",
    "_codecs.encode": "bytes",
}
# Opcodes whose argument is the value: integers, texts and bytes.
_VALUES = {
    *("BININT1", "BININT2", "BININT", "LONG1"),
    *("SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"),
    *("SHORT_BINBYTES", "BINBYTES", "BINBYTES8", "BYTEARRAY8"),
}
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_TUPLES = {"EMPTY_TUPLE": 0, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


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
        self._data = data
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}
        self._encoded = 0

    def load(self) -> Any:
        for count, (opcode, argument, _) in enumerate(pickletools.genops(self._data)):
            if opcode.name == "STOP":
                return self._stack[-1]
            if count == MAX_OPCODES:
                raise ValueError(f"it has more than {MAX_OPCODES:,} values")
            if opcode.name in _VALUES:
                self._stack.append(argument)
            else:
                self._follow(opcode.name, argument)
        raise EOFError("it has no end")

    def _follow(self, opcode: str, argument: Any) -> None:
        stack, memo = self._stack, self._memo
        match opcode:
            case "BINPUT" | "LONG_BINPUT":
                memo[argument] = stack[-1]
            case "MEMOIZE":
                memo[len(memo)] = stack[-1]
            case "BINGET" | "LONG_BINGET":
                stack.append(memo[argument])
            case "SHORT_BINSTRING" | "BINSTRING":  # bytes of Python 2, which pickletools gives as text
                stack.append(argument.encode("latin-1"))
            case "PROTO" | "FRAME":
                pass
            case "NONE" | "NEWTRUE" | "NEWFALSE":
                stack.append(_CONSTANTS[opcode])
            case "EMPTY_LIST":
                stack.append([])
            case "EMPTY_DICT":
                stack.append({})
            case "EMPTY_TUPLE" | "TUPLE1" | "TUPLE2" | "TUPLE3":
                stack.append(tuple(self._taken(len(stack) - _TUPLES[opcode])))
            case "MARK":
                self._marks.append(len(stack))
            case "TUPLE":
                stack.append(tuple(self._taken(self._marks.pop())))
            case "APPEND" | "APPENDS":
                values = self._taken(len(stack) - 1 if opcode == "APPEND" else self._marks.pop())
                _checked(list, stack[-1]).extend(values)
            case "SETITEM" | "SETITEMS":
                values = self._taken(len(stack) - 2 if opcode == "SETITEM" else self._marks.pop())
                target = _checked(dict, stack[-1])
                for key, value in zip(values[::2], values[1::2], strict=True):
                    # Not any value that has a hash: that of nested tuples may take without end.
                    target[_checked((str, bytes), key)] = value
            case "GLOBAL":
                self._name(*argument.split(" ", 1))
            case "STACK_GLOBAL":
                self._name(*self._taken(len(stack) - 2))
            case "REDUCE":
                function, given = self._taken(len(stack) - 2)
                kind, arguments = _checked(_PickledName, function).kind, _checked(tuple, given)
                stack.append(self._bytes(*arguments) if kind == "bytes" else _PickledObject(kind, arguments))
            case "BUILD":
                state = _checked(tuple, stack.pop())
                _checked(_PickledObject, stack[-1]).state = state
            case _:
                raise _refused(f"uses the pickle opcode {opcode}")

    def _taken(self, begin: int) -> list[Any]:
        """The values of the stack from there on, removed from it."""
        if begin < 0:
            raise IndexError("the stack is empty")
        values = self._stack[begin:]
        del self._stack[begin:]
        return values

    def _name(self, module: Any, name: Any) -> None:
        whole = f"{_checked(str, module)}.{_checked(str, name)}"
        if (kind := _NAMES.get(whole.replace("numpy._core.", "numpy.core."))) is None:
            raise _refused(f"asks for {whole[:200]}")
        self._stack.append(_PickledName(kind))

    def _bytes(self, text: Any, encoding: Any) -> bytes:
        """Protocol 2 has no bytes, so Python 3 writes them as text and its encoding."""
        self._encoded += len(_checked(str, text))
        if encoding != "latin1" or self._encoded > len(self._data):
            raise TypeError(f"bytes encoded as {encoding!r}, {self._encoded:,} in all")
        return bytes(text, "latin1")


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
