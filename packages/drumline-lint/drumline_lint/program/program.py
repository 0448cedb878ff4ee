"""The given files as one program: resolves names through assignments, functions, classes and
imports.

It never runs anything. The values of an expression are all that it may be, as far as the source
shows; if there are none, it is unknown, and rules report nothing.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from drumline_lint.program import calls, evaluate, functions, queries
from drumline_lint.program.files import Files
from drumline_lint.program.queries import QueryCache
from drumline_lint.program.tree import Binding, FunctionNode, Index, source_of
from drumline_lint.program.value import NOTHING, CallResult, Library, Method, Value, Values
from drumline_lint.reading.launchers import Launch
from drumline_lint.reading.source import Source


class Program:
    """All given files, and what is known about them."""

    def __init__(self, sources: Sequence[Source]) -> None:
        self.files = Files(sources)
        self.sources = self.files.sources
        self.launches: Mapping[Path, Sequence[Launch]] = {}
        """What scripts start, by the path of the file."""
        self.documents: Mapping[Path, str] = {}
        """The texts of settings and requirements, by the path of the file."""
        self.mentioned: frozenset[str] = frozenset()
        """The files and modules that texts of the repository name."""

        self.meanings = QueryCache(deepest=60, farthest=2_000, far=200)
        self.answers: dict[object, dict[Any, Any]] = defaultdict(dict)
        """The results of each query, by what it is about."""
        self._results = self.meanings.results
        self._names: dict[ast.expr, str] = {}
        """What `name_of` returned."""
        self._functions: dict[ast.Call, FunctionNode | None] = {}
        """What `function_of` returned."""
        self._calls: dict[tuple[str, ...], dict[Source, list[ast.Call]]] = defaultdict(dict)
        """What `calls` returned, by the names and the file."""

    # The files.

    def index(self, source: Source) -> Index:
        """All nodes of a file, by kind, and its scopes."""
        return self.files.index(source)

    def tree(self, source: Source) -> ast.Module:
        """The tree of a file; its nodes have their places only once it has been indexed."""
        self.files.index(source)
        return source.tree

    def launches_of(self, source: Source) -> Sequence[Launch]:
        """How scripts start a file."""
        return [launch for launch in self.starts_of(source) if not launch.script.is_readme]

    def starts_of(self, source: Source) -> Sequence[Launch]:
        """How scripts start a file, and how a README says that it is started."""
        return self.launches.get(source.path, ())

    def module(self, name: str, seen_from: Source) -> Source | None:
        """The given file that an import refers to."""
        return self.files.module(name, seen_from)

    # Values of expressions.

    def values(self, expression: ast.expr | None) -> Values:
        """All that an expression may be; empty if that is unknown."""
        if expression is None:
            return NOTHING

        if expression in self._results:
            values: Values = self._results[expression]
            return values

        return self.meanings.once(expression, lambda: evaluate.evaluate(self, expression), NOTHING)

    def made(self, expression: ast.expr | None, *full_names: str) -> list[CallResult]:
        """The calls of these that it may be the result of: `DDP(model)` for `model`."""
        return [
            value
            for value in self.values(expression)
            if isinstance(value, CallResult) and value.name in full_names
        ]

    def name_of(self, expression: ast.expr) -> str:
        """The library's name for it, with methods as in `torch.optim.SGD.step`; empty if
        unknown."""
        if expression in self._names:
            return self._names[expression]

        # Of several, the same in every process: sets have no order.
        name = max(map(self._library_name, self.values(expression)), default="")
        if expression in self._results:
            self._names[expression] = name

        return name

    def _library_name(self, value: Value) -> str:
        """Its name, if it is something of a library; empty otherwise."""
        if isinstance(value, (Method, Library)):
            return functions.name_of_owner(self, value)
        return ""

    # Calls of a library's functions.

    def calls(self, source: Source, *full_names: str) -> Iterator[ast.Call]:
        """All calls of these in a file, in the order of the text."""
        by_source = self._calls[full_names]

        if source not in by_source:
            by_source[source] = calls.calls_in(self, source, full_names)
        return iter(by_source[source])

    def all_calls(self, *full_names: str) -> Iterator[ast.Call]:
        """All calls of these in all given files."""
        return iter(calls.calls_in_all(self, full_names))

    # Names, functions and classes of the given files.

    def function_of(self, call: ast.Call) -> FunctionNode | None:
        """The function of the given files that a call runs; for a class, its `__init__`."""
        if call in self._functions:
            return self._functions[call]

        function = functions.function_of(self, call)
        if self.meanings.is_idle:  # within a query, its result may be incomplete
            self._functions[call] = function

        return function

    callers = functions.callers
    started_functions = functions.started_functions
    arguments_for = functions.arguments_for
    method = functions.method
    ancestry = functions.ancestry
    is_module = functions.is_module
    assigned = evaluate.assigned
    iterated = staticmethod(queries.iterated)
    source_of = staticmethod(source_of)

    def bindings(self, name: ast.Name) -> list[Binding]:
        """The bindings that may have been the last before this use."""
        return evaluate.bindings_of(self, name) or []
