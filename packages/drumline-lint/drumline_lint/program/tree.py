"""The nodes of an indexed file: the parents, children and position of each."""

from __future__ import annotations

import ast
from array import array
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

if TYPE_CHECKING:
    from drumline_lint.reading.source import Source

NamedFunction: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef
FunctionNode: TypeAlias = NamedFunction | ast.Lambda
ScopeNode: TypeAlias = ast.Module | FunctionNode | ast.ClassDef
Loop: TypeAlias = ast.For | ast.AsyncFor | ast.While
NAMED_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
FUNCTIONS = (*NAMED_FUNCTIONS, ast.Lambda)
SCOPES = (ast.Module, *FUNCTIONS, ast.ClassDef)
Kind = TypeVar("Kind", bound=ast.AST)
LOOPS = (ast.For, ast.AsyncFor, ast.While)
# Fields of nodes with words and numbers, or with nodes that no rule needs.
_WITHOUT_NODES = {
    "arg", "asname", "attr", "conversion", "ctx", "id", "is_async", "kwd_attrs", "level", "module", "name",
    "op", "ops", "rest", "simple", "str", "tag",
}  # fmt: skip
# Fields that are not kept: nothing asks for them, and annotations are a tenth of all nodes.
_LEFT_OUT = {"annotation", "kind", "returns", "type_comment"}
_LEAVES = (ast.Constant, ast.MatchSingleton, ast.Global, ast.Nonlocal)


def _fields_with_nodes(kind: type[ast.AST]) -> tuple[str, ...]:
    """The fields of a kind of node that hold its children."""
    if kind in _LEAVES:
        return ()
    return tuple(name for name in kind._fields if name not in _WITHOUT_NODES | _LEFT_OUT)


# The other fields, by kind of node.
FIELDS: dict[type, tuple[str, ...]] = {
    kind: _fields_with_nodes(kind)
    for kind in vars(ast).values()
    if isinstance(kind, type) and issubclass(kind, ast.AST)
}


def _compact(kind: type[ast.AST]) -> type[ast.AST]:
    """The kind of node that is kept: without a dict, which takes most of the memory of a tree, and
    with the position of the node."""
    slots = [*kind._fields, *kind._attributes, "_up", "_scope", "_number"]
    if FIELDS[kind]:
        slots.append("_last")

    if kind in SCOPES:
        slots.append("_source")

    members: dict[str, Any] = {"__doc__": kind.__doc__}
    if kind is ast.Name:  # a third of all nodes; it ends on the line that it begins on
        members["end_lineno"] = property(attrgetter("lineno"))

    members["__slots__"] = [name for name in slots if name not in _LEFT_OUT | members.keys()]
    return type(kind.__name__, (kind,), members)


COMPACT = {kind: _compact(kind) for kind in FIELDS}
FIELDS |= {COMPACT[kind]: fields for kind, fields in FIELDS.items()}
# Their lists may contain None: `{**settings}` has no key.
_WITH_GAPS = (COMPACT[ast.Dict], COMPACT[ast.arguments])


@dataclass(eq=False, slots=True)
class Binding:
    """One place where a name, or an attribute, gets a value.

    For `b` in `a, b = pair` it has the statement, the value `pair`, and the path (1,).
    """

    node: ast.AST
    """The statement; for a parameter, its `arg`; for an import, its `alias`."""
    value: ast.expr | None = None
    """What is assigned, iterated over or entered."""
    kind: str = "assign"
    """assign, each (of a loop), entered (of a `with`), import, star, function, class, parameter,
    other"""
    path: tuple[int, ...] = ()
    """The part of the value, if it is unpacked."""
    imported: str = ""
    """The dotted name; relative ones begin with dots."""


@dataclass(eq=False, slots=True)
class Scope:
    """A module, class or function, and the names bound in it.

    Of `def main(): rank = 0` the module has `main`, and the function has `rank`.
    """

    node: ScopeNode
    outer: Scope | None
    names: dict[str, list[Binding]] = field(default_factory=lambda: defaultdict(list))
    elsewhere: dict[str, str] = field(default_factory=dict)
    """Names declared `global` or `nonlocal`."""


@dataclass(eq=False)
class Index:
    """All nodes of one file, in the order of its text."""

    scopes: dict[ast.AST, Scope]
    nodes: dict[type, list[Any]]
    calls: dict[str, list[ast.Call]]
    """By the last part of the name that is called."""
    attributes: dict[str, list[tuple[ast.Attribute, Binding]]]
    """What is assigned to attributes, by their name."""
    _numbers: dict[type, array[int]] = field(default_factory=dict)

    def every(self, kind: type[Any]) -> list[Any]:
        """All nodes of a kind."""
        return self.nodes.get(kind, [])

    def between(self, kind: type[Any], first: int, last: int) -> list[Any]:
        """Those whose numbers in the order of the text are in this range."""
        every = self.nodes.get(kind)
        if not every:
            return []

        numbers = self._numbers.get(kind)
        if numbers is None:  # they are searched without a function that gets the number of a node
            numbers = self._numbers[kind] = array("I", map(_number, every))

        start = bisect_left(numbers, first)
        return every[start : bisect_right(numbers, last, start)]


# The position of a node: `_up` is its parent, `_scope` the innermost scope, `_number` its number in
# the order of the text, and `_last` the number of the last node inside it, if there is one.


def parent_of(node: ast.AST) -> ast.AST | None:
    """Its direct parent; known once its file has been indexed."""
    return getattr(node, "_up", None)


def ancestors(node: ast.AST) -> Iterator[ast.AST]:
    """All its parents, innermost first."""
    current = parent_of(node)
    while current is not None:
        yield current
        current = parent_of(current)


def enclosing(node: ast.AST, *kinds: type[Kind]) -> Kind | None:
    """The innermost node around it that is of one of these kinds: `enclosing(call, ast.Try)`."""
    for outer in ancestors(node):
        if isinstance(outer, kinds):
            return outer
    return None


def scope_of(node: ast.AST) -> ScopeNode:
    """The function, class or module whose names it sees first."""
    scope: ScopeNode = node._scope  # type: ignore[attr-defined]
    return scope


def source_of(node: ast.AST) -> Source:
    """The file that it is in."""
    source: Source = scope_of(node)._source  # type: ignore[union-attr]
    return source


def enclosing_function(node: ast.AST) -> NamedFunction | None:
    """The innermost function around it, lambdas left out."""
    current: ast.AST = node

    while not isinstance(current, ast.Module):
        current = scope_of(current)
        if isinstance(current, NAMED_FUNCTIONS):
            return current

    return None


def enclosing_class(node: ast.AST) -> ast.ClassDef | None:
    """The class that a function is a method of."""
    outer = parent_of(node)
    return outer if isinstance(outer, ast.ClassDef) else None


def statement_of(node: ast.AST) -> ast.stmt:
    """The innermost statement that it is part of, or itself."""
    for candidate in (node, *ancestors(node)):
        if isinstance(candidate, ast.stmt):
            return candidate

    raise AssertionError("every node but a module is part of a statement")


def block_of(statement: ast.AST) -> list[ast.stmt]:
    """The statements of its block, in order; empty if it is not a statement."""
    outer = parent_of(statement)
    for name in ("body", "orelse", "finalbody"):
        block = getattr(outer, name, None)
        if isinstance(block, list) and statement in block:
            return block

    return []


def branches_of(branching: ast.If, taken: ast.AST) -> tuple[list[ast.stmt], list[ast.stmt]]:
    """The branch that a statement is in, and the other one: `if`, then `else`, or the reverse."""
    if taken in branching.body:
        return branching.body, branching.orelse
    return branching.orelse, branching.body


def position(node: ast.AST) -> tuple[int, int]:
    """The line and column of its first letter."""
    return getattr(node, "lineno", 0), getattr(node, "col_offset", 0)


def end_position(node: ast.AST) -> tuple[int, int]:
    """The line and column behind its last letter."""
    return getattr(node, "end_lineno", None) or 0, getattr(node, "end_col_offset", None) or 0


def last_name(expression: ast.expr) -> str:
    """`barrier` of `dist.barrier`; empty if there is no name."""
    if isinstance(expression, ast.Attribute):
        return expression.attr

    return expression.id if isinstance(expression, ast.Name) else ""


def called_name(call: ast.Call) -> str:
    """`barrier` of `dist.barrier()`."""
    return last_name(call.func)


def owner_of(call: ast.Call) -> ast.expr | None:
    """`model` of `model.eval()`; None if it is no method."""
    return call.func.value if isinstance(call.func, ast.Attribute) else None


def calls_beside(node: ast.AST) -> list[ast.Call]:
    """All calls of its function, or of the file outside of functions."""
    return nodes_in(scope_of(node), ast.Call)


def is_after(node: ast.AST, earlier: ast.AST) -> bool:
    """Whether it is written later in the same file."""
    return position(node) > position(earlier)


def dotted(expression: ast.expr) -> str:
    """`self.args.rank` as it is written; empty if it is more than names and dots, as `get().rank`."""
    parts = []
    while isinstance(expression, ast.Attribute):
        parts.append(expression.attr)
        expression = expression.value

    if not isinstance(expression, ast.Name):
        return ""

    return ".".join([expression.id, *reversed(parts)])


def children(node: ast.AST) -> list[Any]:
    """As `ast.iter_child_nodes`, without irrelevant nodes, and several times as fast."""
    nodes: list[Any] = []
    kind = node.__class__

    for name in FIELDS[kind]:
        value = getattr(node, name)
        if value.__class__ is list:
            nodes += value
        elif value is not None:
            nodes.append(value)

    if kind in _WITH_GAPS:
        return [child for child in nodes if child is not None]

    return nodes


def nodes_in(node: ast.AST, *kinds: type[Any], into_functions: bool = False) -> list[Any]:
    """All nodes of some kinds that are in it, itself included, in the order of the text.

    Inner functions and classes are left out, unless requested.
    """
    index: Index = source_of(node).tree._index  # type: ignore[attr-defined]
    first = _number(node)
    last = getattr(node, "_last", first)

    nodes: list[Any] = []
    for kind in kinds:
        nodes += index.between(kind, first, last)

    if len(kinds) > 1:
        nodes.sort(key=_number)

    if into_functions:
        return nodes

    scopes = (node, scope_of(node)) if isinstance(node, SCOPES) else (scope_of(node),)
    return [inner for inner in nodes if inner is node or inner._scope in scopes]


def _number(node: ast.AST) -> int:
    """Its number in the order of the text."""
    number: int = node._number  # type: ignore[attr-defined]
    return number


def calls_written(node: ast.AST) -> list[ast.Call]:
    """All calls in it, in the order of the text, those of inner functions left out."""
    return [] if isinstance(node, SCOPES) else nodes_in(node, ast.Call)
