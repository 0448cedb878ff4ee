"""What a name may be: by those of its bindings that may have been the last, in its own file or in one it imports."""

from __future__ import annotations

import ast

from drumline_lint.program import names, ranks
from drumline_lint.program.files import package_of
from drumline_lint.program.parameters import of_parameter
from drumline_lint.program.reaching import reaching
from drumline_lint.program.tree import Binding, scope_node, source_of
from drumline_lint.program.unpacking import each, unpacked
from drumline_lint.program.value import NOTHING, Class, Function, Library, Module, Values
from drumline_lint.program.whole import Whole
from drumline_lint.reading.source import Source


def of_name(program: Whole, node: ast.Name) -> Values:
    """All that it may be where it is used."""
    bindings = bindings_of(program, node)
    if bindings is None:
        return _of_unbound(program, node)
    found: Values = frozenset().union(*(bound(program, binding) for binding in bindings))
    return found or ranks.by_name(node.id)


def bindings_of(program: Whole, node: ast.Name) -> list[Binding] | None:
    """Those that may have been the last before this use; None where the name is not bound at all."""
    scopes = program.files.index(source_of(node)).scopes
    scope = scopes.get(scope_node(node))
    is_own = True
    while scope is not None:
        is_class_seen_from_method = isinstance(scope.node, ast.ClassDef) and not is_own
        if node.id in scope.names and not is_class_seen_from_method:
            every = scope.names[node.id]
            return reaching(every, node) if is_own else every
        scope, is_own = scope.outer, False
    return None


def assigned(program: Whole, name: ast.Name) -> list[ast.expr]:
    """The expressions that a name may have got its value from; a loop's and a function's are not among them."""
    bindings = bindings_of(program, name) or []
    return [one.value for one in bindings if one.value is not None and one.kind in ("assign", "entered")]


def _of_unbound(program: Whole, node: ast.Name) -> Values:
    source = source_of(node)
    for binding in program.files.index(source).scopes[source.tree].names.get("*", ()):
        other = program.files.module(binding.imported, source)
        if other is not None and (found := exported(program, other, node.id)):
            return found
        if other is None and binding.imported.startswith("torch"):
            return frozenset({Library(names.canonical(f"{binding.imported}.{node.id}"))})
    return ranks.by_name(node.id) or frozenset({Library(node.id)})


def exported(program: Whole, source: Source, name: str) -> Values:
    """What a file has under a name, for those who import it."""
    return program.meanings.once((source, name), lambda: _export(program, source, name), NOTHING)


def _export(program: Whole, source: Source, name: str) -> Values:
    every = program.files.index(source).scopes[source.tree].names
    found: Values = frozenset().union(*(bound(program, binding) for binding in every.get(name, ())))
    for star in every.get("*", ()):
        other = program.files.module(star.imported, source)
        if not found and other is not None:
            found = exported(program, other, name)
    return found


def bound(program: Whole, binding: Binding) -> Values:
    """What a name is by one of its bindings."""
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


def _imported(program: Whole, name: str, source: Source) -> Values:
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
