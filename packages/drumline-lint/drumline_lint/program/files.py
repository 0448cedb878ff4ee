"""The files of a program: the index of each, which file an import refers to, and which files may
call a name.

An index is made in one pass without recursion: a sum of a thousand terms is a thousand levels deep.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from drumline_lint.program.tree import (
    FIELDS,
    FUNCTIONS,
    LAST,
    NUMBER,
    SCOPE,
    SCOPES,
    Binding,
    FunctionNode,
    Index,
    Scope,
    children,
    last_name,
)
from drumline_lint.reading.source import Source

_SCOPE_KINDS = frozenset(SCOPES)


def make_index(source: Source) -> Index:
    """Read the whole tree once. A thousand files have a million nodes, so this must be fast."""
    index = Index({}, defaultdict(list), defaultdict(list), defaultdict(list))
    tree: Any = source.tree
    scopes = index.scopes
    nodes = index.nodes
    binders = _BINDERS
    scopes[tree] = Scope(tree, None)
    tree._at = [None, tree, 0, 0]
    tree._source = source
    tree._index = index
    ends: list[tuple[list[Any], list[Any]]] = []
    stack: list[Any] = [tree]
    number = 0
    while stack:
        node = stack.pop()
        kind = node.__class__
        nodes[kind].append(node)
        place = node._at
        place[NUMBER] = place[LAST] = number
        number += 1
        if kind in binders:
            binders[kind](node, scopes[place[SCOPE]], index)
        if FIELDS[kind] and (parts := children(node)):
            around = place[SCOPE]
            for part in parts:
                part._at = [node, around, 0, 0]
            if kind in _SCOPE_KINDS:
                _open(node, source, scopes)
            ends.append((place, parts[-1]._at))
            parts.reverse()
            stack += parts
    for place, last in reversed(ends):
        place[LAST] = last[LAST]
    return index


def _open(node: Any, source: Source, scopes: dict[ast.AST, Scope]) -> None:
    """The body of a function or class is a new scope. Its decorators, defaults, annotations and
    bases are evaluated in the outer one."""
    if isinstance(node, ast.Module):
        return
    scope = scopes[node] = Scope(node, scopes[node._at[SCOPE]])
    node._source = source
    body: list[Any] = [node.body] if isinstance(node, ast.Lambda) else node.body
    for part in body:
        part._at[SCOPE] = node
    if isinstance(node, FUNCTIONS):
        _bind_parameters(node, scope)


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
    extra = [parameter for parameter in (every.vararg, every.kwarg) if parameter is not None]
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
            _bind_target(
                item.optional_vars, scope, index, Binding(node, item.context_expr, "entered")
            )


def _import(node: ast.Import, scope: Scope, index: Index) -> None:
    for alias in node.names:
        top = alias.name.partition(".")[0]
        imported = alias.name if alias.asname else top
        _bind(alias.asname or top, scope, Binding(node, kind="import", imported=imported))


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


_CALLED = re.compile(r"(\w+)\s*\(")


class Files:
    """All given files, before they are analyzed."""

    def __init__(self, sources: Sequence[Source]) -> None:
        self.sources = list(sources)
        self._indexes: dict[Source, Index] = {}
        self._modules: dict[tuple[str, Source], Source | None] = {}

    def index(self, source: Source) -> Index:
        index = self._indexes.get(source)
        if index is None:
            index = self._indexes[source] = make_index(source)
        return index

    def is_indexed(self, source: Source) -> bool:
        return source in self._indexes

    @cached_property
    def calling(self) -> dict[str, list[Source]]:
        """The files that may call something by a name, from their text only."""
        sources = defaultdict(list)
        for source in self.sources:
            index = self._indexes.get(source)
            for name in set(_CALLED.findall(source.text)) if index is None else index.calls:
                sources[name].append(source)
        return sources

    def module(self, name: str, seen_from: Source) -> Source | None:
        """The given file that this import refers to; of several, the one nearest to the importing
        file."""
        key = (name, seen_from)
        if key not in self._modules:
            self._modules[key] = self._find_module(name, seen_from)
        return self._modules[key]

    def submodule(self, package: Source, name: str) -> Source | None:
        """The file of a package, given its `__init__.py`."""
        inner = package.path.parent / f"{name}.py"
        for source in self._by_file_name.get(name, ()):
            if source.path in (inner, package.path.parent / name / "__init__.py"):
                return source
        return None

    def _find_module(self, name: str, seen_from: Source) -> Source | None:
        dots = len(name) - len(name.lstrip("."))
        parts = [part for part in name.lstrip(".").split(".") if part]
        candidates = self._by_file_name.get(parts[-1]) if parts else None
        if not dots and not candidates:
            return None
        folders = list(seen_from.path.parents)
        if dots or not candidates:
            return self._module_in(folders[dots - 1], parts) if dots <= len(folders) else None
        for folder in folders:
            if module := self._module_in(folder, parts):
                return module
        fitting = [
            source
            for source in candidates
            if _ends_with(source.path, parts) and _is_beside(source.path, parts, folders)
        ]
        return max(fitting, key=lambda source: _shared(source.path, seen_from.path), default=None)

    def _module_in(self, folder: Path, parts: list[str]) -> Source | None:
        inner = folder.joinpath(*parts)
        by_path = self._by_path
        as_file = by_path.get(f"{inner}.py") if parts else None
        return as_file or by_path.get(str(inner / "__init__.py"))

    @cached_property
    def _by_path(self) -> dict[str, Source]:
        return {str(source.path): source for source in self.sources}

    @cached_property
    def _by_file_name(self) -> dict[str, list[Source]]:
        sources = defaultdict(list)
        for source in self.sources:
            is_package = source.path.name == "__init__.py"
            sources[source.path.parent.name if is_package else source.path.stem].append(source)
        return sources


def package_of(name: str) -> str:
    """The package of a module: `a` for `a.b`, `..` for `..b`; empty for a top-level one, or only
    dots."""
    package = name.rpartition(".")[0]
    inner = name.lstrip(".")
    dots = "." * (len(name) - len(inner))
    return "" if not inner else dots if "." not in inner else package


def _ends_with(path: Path, parts: list[str]) -> bool:
    module_parts = (
        [*path.parts[:-1]] if path.name == "__init__.py" else [*path.parts[:-1], path.stem]
    )
    return module_parts[-len(parts) :] == parts


def _is_beside(path: Path, parts: list[str], folders: list[Path]) -> bool:
    """Whether the folder that a module is found in is beside one of these, as `src` is."""
    module = path.parent if path.name == "__init__.py" else path
    return module.parents[len(parts) - 1].parent in folders


def _shared(first: Path, second: Path) -> int:
    count = 0
    for left, right in zip(first.parts, second.parts, strict=False):
        if left != right:
            break
        count += 1
    return count
