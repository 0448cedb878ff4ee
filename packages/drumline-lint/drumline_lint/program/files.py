"""The files of a program: the index of each, which file an import refers to, and which files may
call a name.

An index is made in one pass without recursion: a sum of a thousand terms is a thousand levels deep.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Sequence
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from drumline_lint.program.tree import COMPACT, FIELDS, SCOPES, Binding, Index, Scope, called_name
from drumline_lint.reading.source import Source

_SCOPE_KINDS = frozenset(SCOPES)


def index_of(source: Source) -> Index:
    """It is made once, whichever programs have the file."""
    return getattr(source.tree, "_index", None) or make_index(source)


def make_index(source: Source) -> Index:
    """Read the whole tree once, and keep compact nodes instead of it.

    A thousand files have a million nodes, so this must be fast.
    """
    index = Index({}, defaultdict(list), defaultdict(list), defaultdict(list))
    binders = _fill_nodes(source, index)

    for kind, node in binders:
        if kind in _SCOPE_KINDS:
            _open(node, source, index.scopes)
        _BINDERS[kind](node, index.scopes[node._scope], index)

    return index


def _fill_nodes(source: Source, index: Index) -> list[tuple[type, Any]]:
    """Replace the tree by one of compact nodes; returns those that bind names, by their kind, in the
    order of the text."""
    raw_tree = source.tree
    tree: Any = _NEW(COMPACT[ast.Module])
    tree._up = None
    tree._scope = tree
    tree._index = index

    num_lines = source.text.count("\n") + source.text.count("\r") + 1
    _reserve_numbers(num_lines + 1)

    nodes = index.nodes
    ends: list[tuple[Any, Any]] = []
    binders: list[tuple[type, Any]] = []
    stack: list[Any] = [(raw_tree, tree)]
    push = stack.append
    number = 0

    while stack:
        raw, node = stack.pop()
        kind = raw.__class__
        nodes[kind].append(node)

        if number == len(_NUMBERS):
            _reserve_numbers(2 * number)
        node._number = _NUMBERS[number]
        number += 1

        if kind in _BINDERS:
            binders.append((kind, node))

        size = len(stack)
        _expander(kind)(raw, node, push)
        if len(stack) > size:
            ends.append((node, stack[size][1]))

    # Inner nodes first: the last node inside a node is that of its last child.
    for node, last in reversed(ends):
        node._last = getattr(last, "_last", last._number)

    source.tree = tree
    return binders


_NEW: Any = ast.AST.__new__
# One object for each line and each number of a node, in all files: an eighth of the memory.
_NUMBERS: list[int] = []


def _reserve_numbers(size: int) -> None:
    _NUMBERS.extend(range(len(_NUMBERS), size))


def _adopt(raw: list[Any], node: Any, scope: Any, push: Any) -> list[Any]:
    """The compact nodes for several children, which are filled when their turn comes. The last is
    pushed first."""
    for number in reversed(range(len(raw))):
        part = raw[number]
        if part is None:  # `{**settings}` has no key
            continue

        child = raw[number] = _NEW(COMPACT[part.__class__])
        child._up = node
        child._scope = scope
        push((part, child))

    return raw


_FILL_WORD = "    node.{name} = raw.{name}"
_FILL_LINE = "    node.{name} = numbers[raw.{name}]"
# What has no children shares one list, as most calls have no keywords.
_FILL_CHILDREN = """\
    part = raw.{name}
    if part.__class__ is list:
        node.{name} = adopt(part, node, {scope}, push) if part else empty
    elif part is None:
        node.{name} = None
    else:
        child = node.{name} = new(compact[part.__class__])
        child._up = node
        child._scope = {scope}
        push((part, child))"""


@cache
def _expander(kind: type[ast.AST]) -> Any:
    """Fills a compact node: its words and numbers are copied, and its children are made.

    It is written out for each kind, which is three times as fast as a loop over the fields. The
    body of a function or class is a new scope. Its decorators, defaults and bases are evaluated in
    the outer one.
    """
    lines = ["def expand(raw, node, push):", "    pass"]
    slots = COMPACT[kind].__slots__  # type: ignore[attr-defined]

    for name in (*kind._fields, *kind._attributes):
        if name in slots and name not in FIELDS[kind]:
            fill = _FILL_LINE if "lineno" in name else _FILL_WORD
            lines.append(fill.format(name=name))

    for name in reversed(FIELDS[kind]):
        scope = "node" if name == "body" and kind in _SCOPE_KINDS else "node._scope"
        lines.append(_FILL_CHILDREN.format(name=name, scope=scope))

    written: dict[str, Any] = {
        "adopt": _adopt,
        "compact": COMPACT,
        "empty": [],
        "new": _NEW,
        "numbers": _NUMBERS,
    }
    exec("\n".join(lines), written)  # noqa: S102 - made of the names of Python's own nodes
    return written["expand"]


def _open(node: Any, source: Source, scopes: dict[ast.AST, Scope]) -> None:
    """A new scope."""
    node._source = source
    outer = None if node._up is None else scopes[node._scope]
    scopes[node] = Scope(node, outer)


# What binds names. Each function gets a node, the scope that it is in, and the index of the file.


def _bind(name: str, scope: Scope, binding: Binding) -> None:
    """Add a binding to the scope, or to the one that `global name` or `nonlocal name` says."""
    home: Scope | None = scope
    if name in scope.elsewhere:
        home = scope.outer
        while home is not None and home.outer is not None and scope.elsewhere[name] == "global":
            home = home.outer

    (home or scope).names[name].append(binding)


def _bind_target(target: ast.expr, scope: Scope, index: Index, binding: Binding) -> None:
    """What is on the left of an assignment: `x`, `self.x`, `x, (y, *z)`."""
    if isinstance(target, ast.Name):
        _bind(target.id, scope, binding)
    elif isinstance(target, ast.Attribute):
        index.attributes[target.attr].append((target, binding))
    elif isinstance(target, ast.Starred):
        _bind_target(target.value, scope, index, Binding(binding.node, kind="other"))
    elif isinstance(target, (ast.Tuple, ast.List)):
        for number, part in enumerate(target.elts):
            path = (*binding.path, number)
            inner = Binding(binding.node, binding.value, binding.kind, path)
            _bind_target(part, scope, index, inner)


def _bind_parameters(parameters: Any, scope: Scope, index: Index) -> None:
    """In the function that has them."""
    names = index.scopes[parameters._up].names
    for parameter in (*parameters.posonlyargs, *parameters.args, *parameters.kwonlyargs):
        names[parameter.arg].append(Binding(parameter, kind="parameter"))

    for parameter in (parameters.vararg, parameters.kwarg):
        if parameter is not None:
            names[parameter.arg].append(Binding(parameter, kind="other"))


def _assign(node: ast.Assign, scope: Scope, index: Index) -> None:
    """`x = y = 1`."""
    for target in node.targets:
        _bind_target(target, scope, index, Binding(node, node.value))


def _assign_one(node: Any, scope: Scope, index: Index) -> None:
    """`x: int = 1`, `x += 1`, `(x := 1)`."""
    value = None if isinstance(node, ast.AugAssign) else node.value
    _bind_target(node.target, scope, index, Binding(node, value, "assign" if value else "other"))


def _each(node: Any, scope: Scope, index: Index) -> None:
    """`for x in items`, in a comprehension too."""
    _bind_target(node.target, scope, index, Binding(node, node.iter, "each"))


def _enter(node: Any, scope: Scope, index: Index) -> None:
    """`with open(path) as file`."""
    for item in node.items:
        if item.optional_vars is not None:
            binding = Binding(node, item.context_expr, "entered")
            _bind_target(item.optional_vars, scope, index, binding)


def _import(node: ast.Import, scope: Scope, index: Index) -> None:
    """`import a.b` binds `a`; `import a.b as c` binds `c` to a.b."""
    for alias in node.names:
        top = alias.name.partition(".")[0]
        imported = alias.name if alias.asname else top
        _bind(alias.asname or top, scope, Binding(node, kind="import", imported=imported))


def _import_from(node: ast.ImportFrom, scope: Scope, index: Index) -> None:
    """`from .a import b` binds `b` to .a.b."""
    package = "." * node.level + (node.module or "")
    joint = "" if package.endswith(".") else "."

    for alias in node.names:
        if alias.name == "*":
            _bind("*", scope, Binding(node, kind="star", imported=package))
        else:
            imported = f"{package}{joint}{alias.name}"
            _bind(
                alias.asname or alias.name, scope, Binding(node, kind="import", imported=imported)
            )


def _define(node: Any, scope: Scope, index: Index) -> None:
    """`def name`, `class name`."""
    kind = "class" if isinstance(node, ast.ClassDef) else "function"
    _bind(node.name, scope, Binding(node, kind=kind))


def _declare(node: Any, scope: Scope, index: Index) -> None:
    """`global name`, `nonlocal name`."""
    kind = "global" if isinstance(node, ast.Global) else "nonlocal"
    scope.elsewhere.update(dict.fromkeys(node.names, kind))


def _catch(node: Any, scope: Scope, index: Index) -> None:
    """The name of an exception, or of what a `case` matched."""
    if node.name:
        _bind(node.name, scope, Binding(node, kind="other"))


def _nothing(node: Any, scope: Scope, index: Index) -> None:
    """A scope without a name."""


def _call(node: ast.Call, scope: Scope, index: Index) -> None:
    """A call binds nothing, but calls are searched by name."""
    if name := called_name(node):
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
    ast.arguments: _bind_parameters,
    ast.Module: _nothing,
    ast.Lambda: _nothing,
}


class Files:
    """All given files, before they are analyzed."""

    def __init__(self, sources: Sequence[Source]) -> None:
        self.sources = list(sources)

        self._indexes: dict[Source, Index] = {}
        self._modules: dict[tuple[str, str], Source | None] = {}

    def index(self, source: Source) -> Index:
        """It is made when it is needed first."""
        index = self._indexes.get(source)
        if index is None:
            index = self._indexes[source] = index_of(source)
        return index

    @cached_property
    def calling(self) -> dict[str, list[Source]]:
        """The files that call something by a name."""
        sources = defaultdict(list)

        for source in self.sources:
            for name in self.index(source).calls:
                sources[name].append(source)

        return sources

    def module(self, name: str, seen_from: Source) -> Source | None:
        """The given file that this import refers to; of several, the one nearest to the importing
        file."""
        key = (name, seen_from.folder)
        if key not in self._modules:
            self._modules[key] = self._find_module(name, seen_from)
        return self._modules[key]

    def submodule(self, package: Source, name: str) -> Source | None:
        """The file of a package, given its `__init__.py`."""
        folder = package.path.parent
        places = (folder / f"{name}.py", folder / name / "__init__.py")

        for source in self._by_file_name.get(name, ()):
            if source.path in places:
                return source

        return None

    def _find_module(self, name: str, seen_from: Source) -> Source | None:
        """For a relative name the file that it says; otherwise the nearest.

        `import lib.data` in a/b/train.py may be a/b/lib/data.py, a/lib/data.py or lib/data.py; if there
        is none of them, a file beside such a folder, as a/src/lib/data.py.
        """
        dots = len(name) - len(name.lstrip("."))
        parts = [part for part in name.lstrip(".").split(".") if part]
        parents = seen_from.path.parents
        if dots:
            return self._module_in(parents[dots - 1], parts) if dots <= len(parents) else None

        candidates = self._by_file_name.get(parts[-1], []) if parts else []
        if not candidates:
            return None

        folders = list(parents)
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
        """`a/b.py` or `a/b/__init__.py` in this folder."""
        inner = folder.joinpath(*parts)
        as_file = self._by_path.get(f"{inner}.py") if parts else None
        return as_file or self._by_path.get(str(inner / "__init__.py"))

    @cached_property
    def _by_path(self) -> dict[str, Source]:
        """By the path, as it was given."""
        return {str(source.path): source for source in self.sources}

    @cached_property
    def _by_file_name(self) -> dict[str, list[Source]]:
        """By the last part of a module's name."""
        sources = defaultdict(list)

        for source in self.sources:
            is_package = source.path.name == "__init__.py"
            name = source.path.parent.name if is_package else source.path.stem
            sources[name].append(source)

        return sources


def package_of(name: str) -> str:
    """The package of a module; empty for a top-level one, or only dots.

    It is `a` for `a.b`, `..` for `..b`, and `..a` for `..a.b`.
    """
    inner = name.lstrip(".")
    if not inner:
        return ""
    if "." not in inner:
        return name.removesuffix(inner)

    return name.rpartition(".")[0]


def _ends_with(path: Path, parts: list[str]) -> bool:
    """Whether a file is the module of this name in some folder: `lib/a/b.py` is a.b."""
    module = path.parent if path.name == "__init__.py" else path.with_suffix("")
    return list(module.parts[-len(parts) :]) == parts


def _is_beside(path: Path, parts: list[str], folders: list[Path]) -> bool:
    """Whether the folder that a module is found in is beside one of these, as `src` is."""
    module = path.parent if path.name == "__init__.py" else path
    return module.parents[len(parts) - 1].parent in folders


def _shared(first: Path, second: Path) -> int:
    """How many folders two paths have in common."""
    count = 0
    for left, right in zip(first.parts, second.parts, strict=False):
        if left != right:
            break
        count += 1

    return count
