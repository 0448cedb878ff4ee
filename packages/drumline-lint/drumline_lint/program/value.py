"""The possible values of an expression, as far as the source shows.

Sets are iterated in the order of hashes. The hashes of text and of nodes differ in every process,
but findings must not: so each class here defines its own hash.
"""

from __future__ import annotations

import ast
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from drumline_lint.program.tree import FunctionNode
    from drumline_lint.reading.source import Source


@cache
def _of_text(text: str) -> int:
    """The hash of a text, the same in every process."""
    return zlib.crc32(text.encode("utf-8", "surrogatepass"))


def _of_node(node: ast.AST) -> int:
    """The hash of a node, by where it is written."""
    lines = getattr(node, "lineno", 0) + 65_537 * (getattr(node, "end_lineno", 0) or 0)
    return lines * 1_009 + getattr(node, "col_offset", 0)


@dataclass(frozen=True, slots=True)
class Library:
    """Something from a library: `torch.distributed.barrier`; for a builtin, its plain name: `print`."""

    name: str

    def __hash__(self) -> int:
        return _of_text(self.name)


@dataclass(frozen=True, slots=True)
class CallResult:
    """The result of calling a library's function or method: `torch.optim.SGD`,
    `torch.optim.SGD.state_dict`."""

    name: str
    call: ast.Call

    def __hash__(self) -> int:
        return _of_text(self.name) ^ _of_node(self.call)


@dataclass(frozen=True, slots=True)
class ConstantValue:
    """A constant."""

    value: object

    def __hash__(self) -> int:
        is_number = isinstance(self.value, (int, float, complex))
        return hash(self.value) if is_number else _of_text(repr(self.value))


@dataclass(frozen=True, slots=True)
class Items:
    """A tuple or list that is written out: `(0, rank)`."""

    items: tuple[ast.expr, ...]

    def __hash__(self) -> int:
        return _of_node(self.items[0]) if self.items else 1


@dataclass(frozen=True, slots=True)
class LoopItem:
    """An item of an iterable, or a part of one: `batch` in `for batch in loader`."""

    of: ast.expr

    def __hash__(self) -> int:
        return _of_node(self.of) + 2


@dataclass(frozen=True, slots=True)
class Module:
    """One of the given files."""

    source: Source

    def __hash__(self) -> int:
        return _of_text(str(self.source.path))


@dataclass(frozen=True, slots=True)
class Function:
    """A function of the given files; with its class, if it is a method of an instance."""

    node: FunctionNode
    bound: Instance | None = None

    def __hash__(self) -> int:
        return _of_node(self.node) + 3


@dataclass(frozen=True, slots=True)
class Class:
    """A class of the given files."""

    node: ast.ClassDef

    def __hash__(self) -> int:
        return _of_node(self.node) + 4


@dataclass(frozen=True, slots=True)
class Instance:
    """An instance of such a class."""

    of: ast.ClassDef

    def __hash__(self) -> int:
        return _of_node(self.of) + 5


@dataclass(frozen=True, slots=True)
class Method:
    """A method of a library's object, or one that a class of the given files inherits from a
    library."""

    of: Value
    name: str

    def __hash__(self) -> int:
        return _of_text(self.name)


@dataclass(frozen=True, slots=True)
class Rank:
    """A number of this process: global, local (to its host), node, group (within some processes),
    or spawned.

    A rank from mp.spawn is local, and also global if there is one host. So is one that is not known
    to be either.
    """

    kind: str

    def __hash__(self) -> int:
        return _of_text(self.kind) + 6


@dataclass(frozen=True, slots=True)
class RankTest:
    """A condition that holds only on some ranks."""

    kind: str
    """The kind of the rank that is tested."""
    is_main: bool | None
    """True: it holds on rank 0 only; False: on all others; None: on other ranks."""
    is_needed: bool = True
    """Whether other ranks never pass; False for `rank == 0 or always`."""
    is_enough: bool = True
    """Whether all these ranks pass; False for `rank == 0 and verbose`."""

    def __hash__(self) -> int:
        flags = 8 * bool(self.is_main) + 16 * self.is_needed + 32 * self.is_enough
        return _of_text(self.kind) + flags


Value: TypeAlias = (
    Library
    | CallResult
    | ConstantValue
    | Items
    | LoopItem
    | Module
    | Function
    | Class
    | Instance
    | Method
    | Rank
    | RankTest
)
Values: TypeAlias = frozenset[Value]
NOTHING: Values = frozenset()


def union(parts: Iterable[Values]) -> Values:
    """The values of all parts; those of a single one are shared, not copied."""
    every = [values for values in parts if values]
    return every[0] if len(every) == 1 else NOTHING.union(*every)


def only(value: Value) -> Values:
    """The values of something that can be nothing else."""
    return frozenset({value})


def constants_in(values: Values) -> list[object]:
    """The constants among them, as Python has them: 0 and "cuda"."""
    return [value.value for value in values if isinstance(value, ConstantValue)]


@lru_cache(maxsize=None, typed=True)  # True is not 1
def of_constant(value: object) -> Values:
    """Shared by all places where it is written."""
    return only(ConstantValue(value))


@cache
def from_library(name: str) -> Values:
    """Shared by all that name it: in large programs, hundreds of thousands."""
    return only(Library(name))
