"""What an expression may be, as far as the text tells.

Sets of them are gone through in the order of their hashes. Those of text and of nodes are others in every process, and
what is found must not be: each has one of its own here.
"""

from __future__ import annotations

import ast
import zlib
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from drumline_lint.program.tree import FunctionNode
    from drumline_lint.reading.source import Source


@cache
def _of_text(text: str) -> int:
    return zlib.crc32(text.encode("utf-8", "surrogatepass"))


def _of_node(node: ast.AST) -> int:
    return getattr(node, "lineno", 0) * 1_009 + getattr(node, "col_offset", 0)


@dataclass(frozen=True)
class Library:
    """Something of a module that was not given: `torch.distributed.barrier`; of a builtin, its plain name."""

    name: str

    def __hash__(self) -> int:
        return _of_text(self.name)


@dataclass(frozen=True)
class CallResult:
    """What came of calling that, or a method of it: `torch.optim.SGD`, `torch.optim.SGD.state_dict`."""

    name: str
    call: ast.Call

    def __hash__(self) -> int:
        return _of_text(self.name) ^ _of_node(self.call)


@dataclass(frozen=True)
class ConstantValue:
    """A constant."""

    value: object

    def __hash__(self) -> int:
        is_number = isinstance(self.value, int | float | complex)
        return hash(self.value) if is_number else _of_text(repr(self.value))


@dataclass(frozen=True)
class Items:
    """A tuple or list that is written out."""

    items: tuple[ast.expr, ...]

    def __hash__(self) -> int:
        return _of_node(self.items[0]) if self.items else 1


@dataclass(frozen=True)
class LoopItem:
    """One of what is iterated over, or a part of that."""

    of: ast.expr

    def __hash__(self) -> int:
        return _of_node(self.of) + 2


@dataclass(frozen=True)
class Module:
    """One of the given files."""

    source: Source

    def __hash__(self) -> int:
        return _of_text(str(self.source.path))


@dataclass(frozen=True)
class Function:
    """One that is defined in the given files; with its class, where it was got from an instance."""

    node: FunctionNode
    bound: Instance | None = None

    def __hash__(self) -> int:
        return _of_node(self.node) + 3


@dataclass(frozen=True)
class Class:
    """One that is defined in the given files."""

    node: ast.ClassDef

    def __hash__(self) -> int:
        return _of_node(self.node) + 4


@dataclass(frozen=True)
class Instance:
    """Of such a class."""

    of: ast.ClassDef

    def __hash__(self) -> int:
        return _of_node(self.of) + 5


@dataclass(frozen=True)
class Method:
    """A method of something that a library made, or that such a class has from a library."""

    of: Value
    name: str

    def __hash__(self) -> int:
        return _of_text(self.name)


@dataclass(frozen=True)
class Rank:
    """A number of this process: global, local (to its host), node, group (within some processes), or spawned.

    One that mp.spawn gives is local, and global if there is one host. So is one that is not told to be either.
    """

    kind: str

    def __hash__(self) -> int:
        return _of_text(self.kind) + 6


@dataclass(frozen=True)
class RankTest:
    """Something that is true on some ranks only."""

    kind: str
    """Of the rank that is asked for."""
    is_main: bool | None
    """True on rank 0 alone, false on all others, None on yet others."""
    is_needed: bool = True
    """Whether other ranks never come through; not so of `rank == 0 or always`."""
    is_enough: bool = True
    """Whether all those ranks come through; not so of `rank == 0 and verbose`."""

    def __hash__(self) -> int:
        return _of_text(self.kind) + 8 * bool(self.is_main) + 16 * self.is_needed + 32 * self.is_enough


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
