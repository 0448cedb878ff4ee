"""What an expression may be, as far as the text tells."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from drumline.lint.program.tree import FunctionNode
    from drumline.lint.reading.source import Source


@dataclass(frozen=True)
class Library:
    """Something of a module that was not given: `torch.distributed.barrier`; of a builtin, its plain name."""

    name: str


@dataclass(frozen=True)
class Made:
    """What came of calling that, or a method of it: `torch.optim.SGD`, `torch.optim.SGD.state_dict`."""

    name: str
    call: ast.Call


@dataclass(frozen=True)
class Known:
    """A constant."""

    value: object


@dataclass(frozen=True)
class Several:
    """A tuple or list that is written out."""

    items: tuple[ast.expr, ...]


@dataclass(frozen=True)
class Element:
    """One of what is iterated over, or a part of that."""

    of: ast.expr


@dataclass(frozen=True)
class Module:
    """One of the given files."""

    source: Source


@dataclass(frozen=True)
class Function:
    """One that is defined in the given files; with its class, where it was got from an instance."""

    node: FunctionNode
    bound: Instance | None = None
    partials: tuple[ast.Call, ...] = ()
    """The calls of `functools.partial` that gave it arguments, first to last."""


@dataclass(frozen=True)
class Class:
    """One that is defined in the given files."""

    node: ast.ClassDef


@dataclass(frozen=True)
class Instance:
    """Of such a class."""

    of: ast.ClassDef


@dataclass(frozen=True)
class Method:
    """A method of something that a library made, or that such a class has from a library."""

    of: Value
    name: str


@dataclass(frozen=True)
class Rank:
    """A number of this process: global, local (to its host), node, group (within some processes), or spawned.

    One that mp.spawn gives is local, and global if there is one host.
    """

    kind: str


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


Value: TypeAlias = (
    Library
    | Made
    | Known
    | Several
    | Element
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
