"""What a name may be: from the bindings that may be the last before a use, in its file or in one
that it imports."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence
from itertools import pairwise, takewhile
from typing import TypeAlias

from drumline_lint.program import names, ranks
from drumline_lint.program.files import package_of
from drumline_lint.program.functions import of_parameter
from drumline_lint.program.queries import ProgramView, cached_query, each, unpacked
from drumline_lint.program.tree import (
    LOOPS,
    SCOPES,
    Binding,
    ancestors,
    block_of,
    parent_of,
    position,
    scope_of,
    source_of,
)
from drumline_lint.program.value import (
    NOTHING,
    Class,
    Function,
    Module,
    Rank,
    Values,
    from_library,
    union,
)
from drumline_lint.reading.source import Source

_LEAVING = (ast.Return, ast.Raise, ast.Continue, ast.Break)
_TRIES = (ast.Try, ast.TryStar)
# Parts of a statement that are alternatives, not a sequence.
_BRANCHES = (ast.ExceptHandler, ast.match_case)
# After these statements a name may have what it had before.
_COMPOUND = (ast.If, *_TRIES, ast.With, ast.AsyncWith, *LOOPS, ast.Match)
State: TypeAlias = frozenset[Binding | None]
"""The bindings of a name that may have been the last; includes None if there may be none."""


def reaching_bindings(
    program: ProgramView, bindings: list[Binding], use: ast.Name
) -> list[Binding]:
    """Of the bindings of this name in its scope: those that may have been the last before the
    use."""
    if len(bindings) == 1:
        return bindings
    in_comprehension = [
        binding
        for binding in bindings
        if isinstance(binding.node, ast.comprehension) and _is_within(use, binding)
    ]
    if in_comprehension:
        return in_comprehension
    plain = [binding for binding in bindings if not isinstance(binding.node, ast.comprehension)]
    scope = scope_of(use)
    walk = program.cached((_BindingWalk, scope, use.id), lambda: _BindingWalk(plain, scope))
    state = walk.before(use)
    state |= {
        binding
        for binding in walk.elsewhere
        if None in state or not isinstance(binding.node, ast.arg)
    }
    return [binding for binding in plain if binding in state] or plain or bindings


def _is_within(use: ast.AST, binding: Binding) -> bool:
    """A comprehension's name is visible in it, except in its first iterable."""
    whole = parent_of(binding.node)
    around = [use, *ancestors(use)]
    return whole in around and binding.value not in around


class _BindingWalk:
    """The bindings of one name in a scope, and which of them reach a place."""

    def __init__(self, bindings: Iterable[Binding], scope: ast.AST) -> None:
        self.scope = scope
        self.by_node: dict[ast.AST, list[Binding]] = {}
        """The bindings in a node, including itself."""
        self.inner: dict[ast.AST, list[ast.AST]] = {}
        """For each node, its direct children with a binding."""
        self.elsewhere: list[Binding] = []
        """Parameters, and bindings that another function makes by `global`, at an unknown time."""
        for binding in bindings:
            chain = [binding.node, *ancestors(binding.node)]
            chain = chain[: chain.index(scope) + 1] if scope in chain else []
            if (
                not chain
                or isinstance(binding.node, ast.arg)
                or any(isinstance(node, SCOPES) for node in chain[1:-1])
            ):
                self.elsewhere.append(binding)
                continue
            for node, outer in zip(chain, [*chain[1:], None], strict=True):
                if node not in self.by_node and outer is not None:
                    self.inner.setdefault(outer, []).append(node)
                self.by_node.setdefault(node, []).append(binding)

    def before(self, use: ast.AST) -> State:
        path = [use]
        while path[-1] is not self.scope and (outer := parent_of(path[-1])) is not None:
            path.append(outer)
        state: State = frozenset({None})
        for outer, child in pairwise(reversed(path)):
            if outer in self.by_node:
                state = self._entering(outer, child, state)
        return state

    def _entering(self, outer: ast.AST, child: ast.AST, state: State) -> State:
        """The state at the beginning of a part of a node."""
        if isinstance(outer, LOOPS) and child is not getattr(outer, "iter", None):
            state |= {*self.by_node[outer]}  # from the previous round
        if not isinstance(child, (ast.stmt, *_BRANCHES)):
            return self._earlier_in_line(outer, child) or state
        if not isinstance(outer, _TRIES):
            state = self._opened(outer) or state
        elif child in outer.orelse:
            state = self._after_all(self._held(outer, outer.body), state)
        elif child not in outer.body:
            earlier = (
                [*outer.body]
                if child in outer.handlers
                else [*outer.body, *outer.handlers, *outer.orelse]
            )
            state |= {
                binding for node in self._held(outer, earlier) for binding in self.by_node[node]
            }
        if isinstance(child, _BRANCHES):
            return state
        siblings = (
            self.inner.get(outer, [])
            if isinstance(outer, SCOPES)
            else self._held(outer, block_of(child))
        )
        place = position(child)
        return self._after_all(
            [sibling for sibling in siblings if position(sibling) < place], state
        )

    def _opened(self, outer: ast.AST) -> State:
        """What the head of a statement binds for its body."""
        opening = [
            binding
            for binding in self.by_node.get(outer, ())
            if binding.node is outer and not isinstance(outer, SCOPES)
        ]
        heads = [
            part
            for part in self.inner.get(outer, ())
            if not isinstance(part, (ast.stmt, *_BRANCHES))
        ]
        return frozenset([*opening, *(binding for head in heads for binding in self.by_node[head])])

    def _earlier_in_line(self, outer: ast.AST, child: ast.AST) -> State:
        """`(n := f()) and g(n)`; the name of an assignment is not bound while its value is
        computed."""
        first = child.context_expr if isinstance(child, ast.withitem) else child
        earlier = set()
        for binding in self.by_node[outer]:
            node: ast.AST = binding.node
            between = list(takewhile(lambda inner: inner is not outer, (node, *ancestors(node))))
            if isinstance(outer, (ast.With, ast.AsyncWith)) and node is outer:
                is_in_line = True
                node = binding.value or child
            else:
                is_in_line = (
                    isinstance(node, ast.NamedExpr) and node is not outer and child not in between
                )
            if (
                is_in_line
                and position(node) < position(first)
                and not any(isinstance(o, ast.stmt) for o in between)
            ):
                earlier.add(binding)
        return frozenset(earlier)

    def _held(self, outer: ast.AST, parts: Sequence[ast.AST]) -> list[ast.AST]:
        members = set(parts)
        return [node for node in self.inner.get(outer, ()) if node in members]

    def _after_all(self, statements: Iterable[ast.AST], state: State) -> State:
        ordered = sorted(statements, key=position)
        # What was bound before a statement that always binds the name is bound again by it.
        plain = (
            number
            for number in reversed(range(len(ordered)))
            if not isinstance(ordered[number], _COMPOUND)
        )
        for statement in ordered[next(plain, 0) :]:
            state = self._after(statement, state)
        return state

    def _after(self, statement: ast.AST, state: State) -> State:
        if isinstance(statement, ast.If):
            return self._after_if(statement, state)
        if isinstance(statement, _TRIES):
            return self._after_try(statement, state)
        if isinstance(statement, (ast.With, ast.AsyncWith)):
            return self._after_all(
                self._held(statement, statement.body), self._opened(statement) or state
            )
        every = frozenset(self.by_node[statement])
        return state | every if isinstance(statement, (*LOOPS, ast.Match)) else every

    def _after_if(self, statement: ast.If, state: State) -> State:
        """Each branch, except those that exit. An `elif` is an `if` in the `else`."""
        after: State = frozenset()
        rest: list[ast.stmt] = [statement]
        outer: ast.AST = statement
        while len(rest) == 1 and isinstance(branch := rest[0], ast.If):
            state = frozenset(self.by_node.get(branch.test, ())) or state
            if not isinstance(branch.body[-1], _LEAVING):
                after |= self._after_all(self._held(branch, branch.body), state)
            rest = branch.orelse
            outer = branch
        if rest and isinstance(rest[-1], _LEAVING):
            return after
        return after | self._after_all(self._held(outer, rest), state)

    def _after_try(self, statement: ast.Try | ast.TryStar, state: State) -> State:
        tried = self._held(statement, statement.body)
        after = self._after_all(
            self._held(statement, statement.orelse), self._after_all(tried, state)
        )
        anywhere = state | {binding for node in tried for binding in self.by_node[node]}
        for handler in statement.handlers:
            if not isinstance(handler.body[-1], _LEAVING):
                after |= self._after_all(
                    self._held(handler, handler.body), self._opened(handler) or anywhere
                )
        return self._after_all(self._held(statement, statement.finalbody), after)


def of_name(program: ProgramView, node: ast.Name) -> Values:
    bindings = bindings_of(program, node)
    if bindings is None:
        return _of_unbound(program, node)
    values = union(bound(program, binding) for binding in bindings)
    if not values and any(
        _is_looked_up(program, binding.value) or _is_counted(program, binding.value)
        for binding in bindings
    ):
        return NOTHING
    return values or ranks.by_name(node.id)


def _is_looked_up(program: ProgramView, value: ast.expr | None) -> bool:
    """`rank = pool[rank]` is no longer a rank, whatever its name is."""
    index = value.slice if isinstance(value, ast.Subscript) else None
    return any(isinstance(value, Rank) for value in program.values(index))


def _is_counted(program: ProgramView, value: ast.expr | None) -> bool:
    """`local_rank = row * columns + column`, of two loops, is the number of any rank."""
    if not isinstance(value, ast.BinOp):
        return False
    used = [node for node in ast.walk(value) if isinstance(node, ast.Name)]
    return any(
        isinstance(binding.node, LOOPS)
        for name in used
        for binding in bindings_of(program, name) or ()
    )


@cached_query
def bindings_of(program: ProgramView, node: ast.Name) -> list[Binding] | None:
    """The bindings that may have been the last before this use; None if the name is not bound at
    all."""
    scopes = program.files.index(source_of(node)).scopes
    scope = scopes.get(scope_of(node))
    is_own = True
    while scope is not None:
        is_class_seen_from_method = isinstance(scope.node, ast.ClassDef) and not is_own
        if node.id in scope.names and not is_class_seen_from_method:
            every = scope.names[node.id]
            return reaching_bindings(program, every, node) if is_own else every
        scope = scope.outer
        is_own = False
    return None


def assigned(program: ProgramView, name: ast.Name) -> list[ast.expr]:
    """The expressions that may have been assigned to a name, without loops and functions."""
    bindings = bindings_of(program, name) or []
    return [
        binding.value
        for binding in bindings
        if binding.value is not None and binding.kind in ("assign", "entered")
    ]


def _of_unbound(program: ProgramView, node: ast.Name) -> Values:
    source = source_of(node)
    for binding in program.files.index(source).scopes[source.tree].names.get("*", ()):
        module = program.files.module(binding.imported, source)
        if module is not None and (values := exported(program, module, node.id)):
            return values
        if module is None and binding.imported.startswith("torch"):
            return from_library(names.canonical(f"{binding.imported}.{node.id}"))
    return ranks.by_name(node.id) or from_library(node.id)


def exported(program: ProgramView, source: Source, name: str) -> Values:
    return program.meanings.once((source, name), lambda: _export(program, source, name), NOTHING)


def _export(program: ProgramView, source: Source, name: str) -> Values:
    every = program.files.index(source).scopes[source.tree].names
    values = union(bound(program, binding) for binding in every.get(name, ()))
    for star in every.get("*", ()):
        module = program.files.module(star.imported, source)
        if not values and module is not None:
            values = exported(program, module, name)
    return values


def bound(program: ProgramView, binding: Binding) -> Values:
    return program.meanings.memo(binding, lambda: _bind(program, binding))


def _bind(program: ProgramView, binding: Binding) -> Values:
    if binding.kind == "import":
        return _imported(program, binding.imported, source_of(binding.node))
    if binding.kind == "function":
        assert isinstance(binding.node, (ast.FunctionDef, ast.AsyncFunctionDef))
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
    package = package_of(name)
    last = name.rpartition(".")[2]
    if package:
        home = program.files.module(package, source)
        if home is not None and home is not source:
            return exported(program, home, last) or ranks.by_name(last)
    if name.startswith("."):
        return ranks.by_name(last)
    return ranks.of_library(name) or from_library(names.canonical(name))
