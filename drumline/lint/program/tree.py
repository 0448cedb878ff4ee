"""The index of one file: what is inside what, what is bound where, and what is called.

One pass over the tree, without recursion: a sum of a thousand terms is a thousand deep.
"""

from __future__ import annotations

import ast
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from drumline.lint.reading.source import Source

FunctionNode: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
ScopeNode: TypeAlias = ast.Module | FunctionNode | ast.ClassDef
Loop: TypeAlias = ast.For | ast.AsyncFor | ast.While
SCOPES = (ast.Module, ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
LOOPS = (ast.For, ast.AsyncFor, ast.While)
# Fields of nodes with words and numbers in them, or with nodes that say nothing a rule could ask for.
_WITHOUT_NODES = """
    arg asname attr conversion ctx id is_async kind level module name n s op ops rest simple tag type_comment
"""
_FIELDS: dict[type, tuple[str, ...]] = {}
_SCOPE_KINDS = frozenset(SCOPES)


@dataclass(eq=False)
class Binding:
    """One place where a name, or an attribute, gets a value."""

    node: ast.AST
    """The statement; of a parameter, its `arg`; of an import, its `alias`."""
    value: ast.expr | None = None
    """What is assigned, iterated over or entered."""
    kind: str = "assign"
    """assign, each (of a loop), entered (of a `with`), import, star, function, class, parameter, other"""
    path: tuple[int, ...] = ()
    """Which part of the value, where it is unpacked."""
    imported: str = ""
    """The dotted name; relative ones begin with dots."""


@dataclass(eq=False)
class Scope:
    """A module, class or function, and the names bound in it."""

    node: ScopeNode
    outer: Scope | None
    names: dict[str, list[Binding]] = field(default_factory=lambda: defaultdict(list))
    elsewhere: dict[str, str] = field(default_factory=dict)
    """Names declared `global` or `nonlocal`."""


@dataclass(eq=False)
class Index:
    """All of one file, in the order of its text."""

    scopes: dict[ast.AST, Scope]
    nodes: dict[type, list[Any]]
    calls: dict[str, list[ast.Call]]
    """By the last part of the name that is called."""
    attributes: dict[str, list[tuple[ast.Attribute, Binding]]]
    """What is assigned to attributes, by their name."""

    def every(self, kind: type[Any]) -> list[Any]:
        """All nodes of a kind."""
        return self.nodes.get(kind, [])


def up(node: ast.AST) -> ast.AST | None:
    """What it is directly inside of; known once its file has been indexed."""
    return getattr(node, "_up", None)


def above(node: ast.AST) -> Iterator[ast.AST]:
    """All that it is inside of, inmost first."""
    current = up(node)
    while current is not None:
        yield current
        current = up(current)


def scope_node(node: ast.AST) -> ScopeNode:
    """The function, class or module whose names it sees first."""
    found = getattr(node, "_scope", node)
    assert isinstance(found, SCOPES), "the file of this node has not been indexed"
    return found


def source_of(node: ast.AST) -> Source:
    """The file that it is in."""
    found: Source = node._source  # type: ignore[attr-defined]
    return found


def function_around(node: ast.AST) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
    """The function in which it is run."""
    current: ast.AST = node
    while not isinstance(current, ast.Module):
        current = scope_node(current)
        if isinstance(current, ast.FunctionDef | ast.AsyncFunctionDef):
            return current
    return None


def class_around(node: ast.AST) -> ast.ClassDef | None:
    """The class that a function is a method of."""
    outer = up(node)
    return outer if isinstance(outer, ast.ClassDef) else None


def statement_of(node: ast.AST) -> ast.stmt:
    """The statement that it is part of, or is."""
    for candidate in (node, *above(node)):
        if isinstance(candidate, ast.stmt):
            return candidate
    raise AssertionError("every node but a module is part of a statement")


def position(node: ast.AST) -> tuple[int, int]:
    """To order by."""
    return getattr(node, "lineno", 0), getattr(node, "col_offset", 0)


def end_position(node: ast.AST) -> tuple[int, int]:
    """Where it ends."""
    return getattr(node, "end_lineno", None) or 0, getattr(node, "end_col_offset", None) or 0


def last_name(expression: ast.expr) -> str:
    """`barrier` of `dist.barrier`; empty where there is no name."""
    if isinstance(expression, ast.Attribute):
        return expression.attr
    return expression.id if isinstance(expression, ast.Name) else ""


def dotted(expression: ast.expr) -> str:
    """`self.args.rank` as it is written; empty where it is more than names and dots."""
    parts = []
    while isinstance(expression, ast.Attribute):
        parts.append(expression.attr)
        expression = expression.value
    return ".".join([expression.id, *reversed(parts)]) if isinstance(expression, ast.Name) else ""


def children(node: ast.AST, fields: tuple[str, ...] = ()) -> list[Any]:
    """As `ast.iter_child_nodes`, without those that say nothing, and twice as fast."""
    found: list[Any] = []
    for name in fields or _fields(type(node)):
        value = getattr(node, name, None)
        if value.__class__ is list:
            found += [one for one in value if isinstance(one, ast.AST)]
        elif isinstance(value, ast.AST):
            found.append(value)
    return found


def inside(node: ast.AST, *kinds: type[Any], into_functions: bool = False) -> list[Any]:
    """All nodes of some kinds that are in it, itself included, in the order of the text.

    What inner functions and classes do is left out, unless it is asked for.
    """
    index: Index = source_of(node).tree._index  # type: ignore[attr-defined]
    first, last = _number(node), node._last  # type: ignore[attr-defined]
    found: list[Any] = []
    for kind in kinds:
        every = index.nodes.get(kind, [])
        start = bisect_left(every, first, key=_number)
        found += every[start : bisect_right(every, last, lo=start, key=_number)]
    if len(kinds) > 1:
        found.sort(key=_number)
    if into_functions:
        return found
    own = (node, scope_node(node)) if isinstance(node, SCOPES) else (scope_node(node),)
    return [one for one in found if one is node or scope_node(one) in own]


def _number(node: ast.AST) -> int:
    number: int = node._number  # type: ignore[attr-defined]
    return number


def calls_written(node: ast.AST) -> list[ast.Call]:
    """All calls in it, in the order of the text, those of inner functions left out. Kept with the node."""
    found: list[ast.Call] | None = getattr(node, "_calls", None)
    if found is None:
        found = [] if isinstance(node, SCOPES) else inside(node, ast.Call)
        node._calls = found  # type: ignore[attr-defined]
    return found


def make_index(source: Source) -> Index:
    """Read the whole tree once."""
    index = Index({}, defaultdict(list), defaultdict(list), defaultdict(list))
    tree: Any = source.tree
    index.scopes[tree] = Scope(tree, None)
    tree._up, tree._scope, tree._source, tree._index = None, tree, source, index
    nodes = index.nodes
    order: list[Any] = []
    stack: list[Any] = [tree]
    while stack:
        node = stack.pop()
        kind = node.__class__
        nodes[kind].append(node)
        node._number = node._last = len(order)
        order.append(node)
        if kind in _BINDERS:
            _BINDERS[kind](node, index.scopes[node._scope], index)
        if fields := _FIELDS.get(kind) or _fields(kind):
            parts = children(node, fields)
            _place(parts, node, kind, source, index)
            parts.reverse()
            stack += parts
    for node in reversed(order[1:]):
        if node._up._last < node._last:
            node._up._last = node._last
    return index


def _place(parts: list[Any], node: Any, kind: type, source: Source, index: Index) -> None:
    """Tell nodes where they are."""
    if kind not in _SCOPE_KINDS:
        around = node._scope
        for part in parts:
            part._up, part._scope, part._source = node, around, source
        return
    if node not in index.scopes:
        index.scopes[node] = Scope(node, index.scopes[node._scope])
        if isinstance(node, FUNCTIONS):
            _bind_parameters(node, index.scopes[node])
    for part in parts:
        part._up, part._source = node, source
        part._scope = node._scope if _is_outside(node, part) else node


def _fields(kind: type[ast.AST]) -> tuple[str, ...]:
    if kind not in _FIELDS:
        left_out = _WITHOUT_NODES.split()
        _FIELDS[kind] = tuple(name for name in kind._fields if name not in left_out)
    return _FIELDS[kind]


def _is_outside(owner: ast.AST, part: ast.AST) -> bool:
    """Decorators, defaults, annotations and bases are evaluated where a function or class is defined."""
    if isinstance(owner, ast.ClassDef):
        return not any(part is statement for statement in owner.body)
    if isinstance(owner, ast.FunctionDef | ast.AsyncFunctionDef):
        return part is owner.args or part is owner.returns or any(part is one for one in owner.decorator_list)
    return isinstance(owner, ast.Lambda) and part is owner.args


def _bind(name: str, scope: Scope, binding: Binding) -> None:
    home: Scope | None = scope
    if name in scope.elsewhere:
        home = scope.outer
        while home is not None and home.outer is not None and scope.elsewhere[name] == "global":
            home = home.outer
    (home or scope).names[name].append(binding)


def _bind_target(target: ast.expr, scope: Scope, index: Index, binding: Binding) -> None:
    if isinstance(target, ast.Name):
        _bind(target.id, scope, binding)
    elif isinstance(target, ast.Attribute):
        index.attributes[target.attr].append((target, binding))
    elif isinstance(target, ast.Starred):
        _bind_target(target.value, scope, index, Binding(binding.node, kind="other"))
    elif isinstance(target, ast.Tuple | ast.List):
        for number, part in enumerate(target.elts):
            inner = Binding(binding.node, binding.value, binding.kind, (*binding.path, number))
            _bind_target(part, scope, index, inner)


def _bind_parameters(function: FunctionNode, scope: Scope) -> None:
    every = function.args
    extra = [one for one in (every.vararg, every.kwarg) if one is not None]
    for parameter in (*every.posonlyargs, *every.args, *every.kwonlyargs):
        scope.names[parameter.arg].append(Binding(parameter, kind="parameter"))
    for parameter in extra:
        scope.names[parameter.arg].append(Binding(parameter, kind="other"))


def _assign(node: ast.Assign, scope: Scope, index: Index) -> None:
    for target in node.targets:
        _bind_target(target, scope, index, Binding(node, node.value))


def _assign_one(node: Any, scope: Scope, index: Index) -> None:
    value = None if isinstance(node, ast.AugAssign) else node.value
    _bind_target(node.target, scope, index, Binding(node, value, "assign" if value else "other"))


def _each(node: Any, scope: Scope, index: Index) -> None:
    _bind_target(node.target, scope, index, Binding(node, node.iter, "each"))


def _enter(node: Any, scope: Scope, index: Index) -> None:
    for item in node.items:
        if item.optional_vars is not None:
            _bind_target(item.optional_vars, scope, index, Binding(node, item.context_expr, "entered"))


def _import(node: ast.Import, scope: Scope, index: Index) -> None:
    for alias in node.names:
        name, full = (alias.asname, alias.name) if alias.asname else (alias.name.partition(".")[0],) * 2
        _bind(name, scope, Binding(node, kind="import", imported=full))


def _import_from(node: ast.ImportFrom, scope: Scope, index: Index) -> None:
    package = "." * node.level + (node.module or "")
    for alias in node.names:
        if alias.name == "*":
            _bind("*", scope, Binding(node, kind="star", imported=package))
        else:
            full = f"{package}{'' if package.endswith('.') else '.'}{alias.name}"
            _bind(alias.asname or alias.name, scope, Binding(node, kind="import", imported=full))


def _define(node: Any, scope: Scope, index: Index) -> None:
    kind = "class" if isinstance(node, ast.ClassDef) else "function"
    _bind(node.name, scope, Binding(node, kind=kind))


def _declare(node: Any, scope: Scope, index: Index) -> None:
    kind = "global" if isinstance(node, ast.Global) else "nonlocal"
    scope.elsewhere.update(dict.fromkeys(node.names, kind))


def _catch(node: Any, scope: Scope, index: Index) -> None:
    """The name of an exception, or of what a `case` matched."""
    if node.name:
        _bind(node.name, scope, Binding(node, kind="other"))


def _call(node: ast.Call, scope: Scope, index: Index) -> None:
    if name := last_name(node.func):
        index.calls[name].append(node)


_BINDERS: dict[type, Any] = {
    ast.Assign: _assign,
    ast.AnnAssign: _assign_one,
    ast.AugAssign: _assign_one,
    ast.NamedExpr: _assign_one,
    ast.For: _each,
    ast.AsyncFor: _each,
    ast.comprehension: _each,
    ast.With: _enter,
    ast.AsyncWith: _enter,
    ast.Import: _import,
    ast.ImportFrom: _import_from,
    ast.FunctionDef: _define,
    ast.AsyncFunctionDef: _define,
    ast.ClassDef: _define,
    ast.ExceptHandler: _catch,
    ast.MatchAs: _catch,
    ast.MatchStar: _catch,
    ast.Global: _declare,
    ast.Nonlocal: _declare,
    ast.Call: _call,
}
