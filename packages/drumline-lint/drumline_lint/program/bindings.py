"""What a name may be: by those of its bindings that may be the last before a use, in its file or in one it imports."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from drumline_lint.program import names, ranks
from drumline_lint.program.files import package_of
from drumline_lint.program.functions import of_parameter
from drumline_lint.program.queries import ProgramView, each, unpacked
from drumline_lint.program.tree import LOOPS, SCOPES, Binding, ancestors, parent_of, position, scope_of, source_of
from drumline_lint.program.value import NOTHING, Class, Function, Library, Module, Rank, Values
from drumline_lint.reading.source import Source

LEAVING = (ast.Return, ast.Raise)
TRIES = (ast.Try, ast.TryStar)
# Parts of a statement that come instead of each other, not one after the other.
BRANCHES = (ast.ExceptHandler, ast.match_case)
BLOCKS = ("body", "orelse", "handlers", "finalbody", "cases")


@dataclass(eq=False)
class _BindingTree:
    """One name's bindings, by what they are in."""

    by_node: dict[ast.AST, list[Binding]] = field(default_factory=dict)
    inner: dict[ast.AST, list[ast.AST]] = field(default_factory=dict)
    """Of each node, the statements directly in it that hold one."""
    elsewhere: list[Binding] = field(default_factory=list)
    """Parameters, and those that another function makes by `global`: it is not told when."""


def reaching_bindings(bindings: Sequence[Binding], use: ast.AST) -> list[Binding]:
    """Those before the use, back to the first that was made in any case; in a loop also those after it."""
    if len(bindings) == 1:
        return list(bindings)
    own = [one for one in bindings if isinstance(one.node, ast.comprehension) and _is_within(use, one)]
    if own:
        return own
    plain = [one for one in bindings if not isinstance(one.node, ast.comprehension)]
    scope = scope_of(use)
    held = _hold(plain, scope)
    found, is_certain = _before(held, use, scope)
    if not is_certain:
        found = [*found, *held.elsewhere]
    else:
        found = [*found, *(one for one in held.elsewhere if not isinstance(one.node, ast.arg))]
    return list(dict.fromkeys(found)) or plain or list(bindings)


def _is_within(use: ast.AST, binding: Binding) -> bool:
    """A comprehension's name is seen in it, but for where its first iterable is written."""
    whole = parent_of(binding.node)
    around = [use, *ancestors(use)]
    return whole in around and binding.value not in around


def _hold(bindings: Iterable[Binding], scope: ast.AST) -> _BindingTree:
    held = _BindingTree()
    for binding in bindings:
        chain = [binding.node, *ancestors(binding.node)]
        if scope not in chain or isinstance(binding.node, ast.arg):
            held.elsewhere.append(binding)
            continue
        chain = chain[: chain.index(scope) + 1]
        if any(isinstance(one, SCOPES) for one in chain[1:-1]):
            held.elsewhere.append(binding)
            continue
        for node, outer in zip(chain, [*chain[1:], None], strict=True):
            if node not in held.by_node and outer is not None:
                held.inner.setdefault(outer, []).append(node)
            held.by_node.setdefault(node, []).append(binding)
    return held


def _before(held: _BindingTree, use: ast.AST, scope: ast.AST) -> tuple[list[Binding], bool]:
    """From the use outwards: what is before it in its block, then in the one around, until one was made in any case."""
    found: list[Binding] = []
    current = use
    for outer in ancestors(use):
        if outer in held.by_node:
            more, is_certain = _earlier_in(held, outer, current)
            found += more
            if is_certain:
                return found, True
        if isinstance(outer, LOOPS) and not _is_first(outer, current):
            found += held.by_node.get(outer, [])  # those after it, in the round before
        if outer is scope:
            break
        current = outer
    return found, False


def _is_first(loop: ast.AST, part: ast.AST) -> bool:
    """What is iterated over is evaluated once."""
    return isinstance(loop, ast.For | ast.AsyncFor) and part is loop.iter


def _earlier_in(held: _BindingTree, outer: ast.AST, current: ast.AST) -> tuple[list[Binding], bool]:
    if not isinstance(current, (ast.stmt, *BRANCHES)):
        return _earlier_in_expression(held, outer, current)
    is_branch = isinstance(current, BRANCHES)
    siblings = [] if is_branch else _block(held, outer, current)
    found, is_certain = _sequence(held, [one for one in siblings if position(one) < position(current)])
    if is_certain:
        return found, True
    more, is_certain = _opened(held, outer, current)
    return found + more, is_certain


def _opened(held: _BindingTree, outer: ast.AST, current: ast.AST) -> tuple[list[Binding], bool]:
    """What the head of a statement binds for its body, and what an earlier part of a `try` may have bound."""
    if isinstance(outer, TRIES):
        if current in outer.orelse:
            return _sequence(held, _in_field(held, outer, "body"))
        parts = {"handlers": ("body",), "finalbody": ("body", "handlers", "orelse")}
        for name, before in parts.items():
            if current in getattr(outer, name):
                return [b for part in before for s in _in_field(held, outer, part) for b in held.by_node[s]], False
        return [], False
    own = [one for one in held.by_node[outer] if one.node is outer and not isinstance(outer, SCOPES)]
    heads = [one for one in held.inner.get(outer, ()) if not isinstance(one, (ast.stmt, *BRANCHES))]
    own += [binding for head in heads for binding in held.by_node[head]]
    return own, bool(own)


def _earlier_in_expression(held: _BindingTree, outer: ast.AST, current: ast.AST) -> tuple[list[Binding], bool]:
    """`(n := f()) and g(n)`; an assignment's own name is not bound yet while its value is computed."""
    found = []
    first = current.context_expr if isinstance(current, ast.withitem) else current
    for binding in held.by_node[outer]:
        is_walrus = isinstance(binding.node, ast.NamedExpr) and binding.node is not outer
        is_entered = isinstance(outer, ast.With | ast.AsyncWith) and binding.node is outer
        if is_walrus and not isinstance(current, ast.stmt):
            inside = current in (binding.node, *ancestors(binding.node))
            if not inside and position(binding.node) < position(first) and _is_in_head(outer, binding.node):
                found.append(binding)
        elif is_entered and position(binding.value or current) < position(first):
            found.append(binding)
    return found, bool(found)


def _is_in_head(outer: ast.AST, node: ast.AST) -> bool:
    for one in ancestors(node):
        if one is outer:
            return True
        if isinstance(one, ast.stmt):
            return False
    return False


def _block(held: _BindingTree, outer: ast.AST, current: ast.AST) -> list[ast.AST]:
    for name in BLOCKS:
        statements = getattr(outer, name, None)
        if isinstance(statements, list) and any(one is current for one in statements):
            return _in_field(held, outer, name)
    return []


def _in_field(held: _BindingTree, outer: ast.AST, name: str) -> list[ast.AST]:
    holding = held.inner.get(outer, [])
    if isinstance(outer, SCOPES):
        return holding
    statements = getattr(outer, name, [])
    return [one for one in holding if any(one is other for other in statements)]


def _sequence(held: _BindingTree, statements: Iterable[ast.AST]) -> tuple[list[Binding], bool]:
    """What a name may be after some statements, and whether it was bound in any case."""
    found: list[Binding] = []
    for statement in sorted(statements, key=position, reverse=True):
        more, is_certain = _after(held, statement)
        found += more
        if is_certain:
            return found, True
    return found, False


def _after(held: _BindingTree, statement: ast.AST) -> tuple[list[Binding], bool]:
    every = held.by_node[statement]
    if isinstance(statement, ast.If):
        return _after_if(held, statement)
    if isinstance(statement, TRIES):
        found, is_certain = _sequence(held, _in_field(held, statement, "finalbody"))
        return (found, True) if is_certain else (every, _is_bound_by_try(held, statement))
    if isinstance(statement, ast.With | ast.AsyncWith):
        found, is_certain = _sequence(held, _in_field(held, statement, "body"))
        own = [one for one in every if one.node is statement]
        return (found, True) if is_certain else (found + own, bool(own))
    return every, not isinstance(statement, (*LOOPS, ast.Match))


def _after_if(held: _BindingTree, statement: ast.If) -> tuple[list[Binding], bool]:
    """Each branch; one that returns or raises does not come here. An `elif` is an `if` in the `else`."""
    found: list[Binding] = []
    is_certain = True
    rest: list[ast.stmt] = [statement]
    while len(rest) == 1 and isinstance(branch := rest[0], ast.If):
        if branch.test in held.by_node:
            return found + held.by_node[branch], is_certain
        more, is_bound = _sequence(held, _in_field(held, branch, "body"))
        if not isinstance(branch.body[-1], LEAVING):
            found, is_certain = found + more, is_certain and (is_bound or _goes_on_elsewhere(branch.body))
        rest, last = branch.orelse, branch
    if rest and isinstance(rest[-1], LEAVING):
        return found, is_certain
    more, is_bound = _sequence(held, _in_field(held, last, "orelse"))
    return found + more, is_certain and (is_bound or _goes_on_elsewhere(rest))


def _goes_on_elsewhere(block: Sequence[ast.stmt]) -> bool:
    return bool(block) and isinstance(block[-1], ast.Continue | ast.Break)


def _is_bound_by_try(held: _BindingTree, statement: ast.Try | ast.TryStar) -> bool:
    body = [*_in_field(held, statement, "body"), *_in_field(held, statement, "orelse")]
    caught = [
        isinstance(handler.body[-1], (*LEAVING, ast.Continue, ast.Break))
        or _sequence(held, _in_field(held, handler, "body"))[1]
        for handler in statement.handlers
    ]
    return _sequence(held, body)[1] and all(caught)


def of_name(program: ProgramView, node: ast.Name) -> Values:
    bindings = bindings_of(program, node)
    if bindings is None:
        return _of_unbound(program, node)
    found: Values = frozenset().union(*(bound(program, binding) for binding in bindings))
    if not found and any(_is_looked_up(program, binding.value) for binding in bindings):
        return NOTHING
    return found or ranks.by_name(node.id)


def _is_looked_up(program: ProgramView, value: ast.expr | None) -> bool:
    """`rank = pool[rank]` is no rank any more, whatever its name says."""
    index = value.slice if isinstance(value, ast.Subscript) else None
    return any(isinstance(one, Rank) for one in program.values(index))


def bindings_of(program: ProgramView, node: ast.Name) -> list[Binding] | None:
    """Those that may have been the last before this use; None where the name is not bound at all."""
    scopes = program.files.index(source_of(node)).scopes
    scope = scopes.get(scope_of(node))
    is_own = True
    while scope is not None:
        is_class_seen_from_method = isinstance(scope.node, ast.ClassDef) and not is_own
        if node.id in scope.names and not is_class_seen_from_method:
            every = scope.names[node.id]
            return reaching_bindings(every, node) if is_own else every
        scope, is_own = scope.outer, False
    return None


def assigned(program: ProgramView, name: ast.Name) -> list[ast.expr]:
    """The expressions that a name may have got its value from; a loop's and a function's are not among them."""
    bindings = bindings_of(program, name) or []
    return [one.value for one in bindings if one.value is not None and one.kind in ("assign", "entered")]


def _of_unbound(program: ProgramView, node: ast.Name) -> Values:
    source = source_of(node)
    for binding in program.files.index(source).scopes[source.tree].names.get("*", ()):
        other = program.files.module(binding.imported, source)
        if other is not None and (found := exported(program, other, node.id)):
            return found
        if other is None and binding.imported.startswith("torch"):
            return frozenset({Library(names.canonical(f"{binding.imported}.{node.id}"))})
    return ranks.by_name(node.id) or frozenset({Library(node.id)})


def exported(program: ProgramView, source: Source, name: str) -> Values:
    return program.meanings.once((source, name), lambda: _export(program, source, name), NOTHING)


def _export(program: ProgramView, source: Source, name: str) -> Values:
    every = program.files.index(source).scopes[source.tree].names
    found: Values = frozenset().union(*(bound(program, binding) for binding in every.get(name, ())))
    for star in every.get("*", ()):
        other = program.files.module(star.imported, source)
        if not found and other is not None:
            found = exported(program, other, name)
    return found


def bound(program: ProgramView, binding: Binding) -> Values:
    if binding.kind == "import":
        return _imported(program, binding.imported, source_of(binding.node))
    if binding.kind == "function":
        assert isinstance(binding.node, ast.FunctionDef | ast.AsyncFunctionDef)
        return frozenset({Function(binding.node)})
    if binding.kind == "class":
        assert isinstance(binding.node, ast.ClassDef)
        return frozenset({Class(binding.node)})
    if binding.kind == "parameter":
        assert isinstance(binding.node, ast.arg)
        return of_parameter(program, binding.node)
    if binding.kind == "each":
        return each(program, binding)
    if binding.value is None:
        return NOTHING
    return unpacked(program, program.values(binding.value), binding.path)


def _imported(program: ProgramView, name: str, source: Source) -> Values:
    whole = program.files.module(name, source)
    if whole is not None:
        return frozenset({Module(whole)})
    package, last = package_of(name), name.rpartition(".")[2]
    if package:
        home = program.files.module(package, source)
        if home is not None and home is not source:
            return exported(program, home, last) or ranks.by_name(last)
    if name.startswith("."):
        return ranks.by_name(last)
    return ranks.of_library(name) or frozenset({Library(names.canonical(name))})
