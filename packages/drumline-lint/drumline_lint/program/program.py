"""The given files as one program: what names mean in them, through assignments, functions, classes and imports.

It never runs anything. What it says of an expression is all that it may be, as far as the text tells; where it says
nothing, it does not know, and rules keep silent.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from drumline_lint.program import bindings, calls, functions, queries
from drumline_lint.program.evaluate import evaluate
from drumline_lint.program.files import Files
from drumline_lint.program.queries import NO_LIMIT, Found, QueryCache
from drumline_lint.program.tree import Binding, Index, source_of
from drumline_lint.program.value import NOTHING, CallResult, Library, Method, Value, Values
from drumline_lint.reading.source import Source


class Program:
    """All files that were given, and what is known of them."""

    def __init__(self, sources: Sequence[Source]) -> None:
        self.files = Files(sources)
        self.sources = self.files.sources
        self.meanings = QueryCache(deepest=60, farthest=2_000, far=200)
        self._known = self.meanings.known
        self._names: dict[ast.expr, str] = {}
        self._asked: dict[str, QueryCache] = {}
        self._remembered: dict[object, Any] = {}

    # The files.

    def index(self, source: Source) -> Index:
        return self.files.index(source)

    def tree(self, source: Source) -> ast.Module:
        self.files.index(source)
        return source.tree

    def module(self, name: str, seen_from: Source) -> Source | None:
        return self.files.module(name, seen_from)

    # What was found before.

    def cached(self, key: object, find: Callable[[], Found]) -> Found:
        """What was found before, for questions that others ask of all files together."""
        if key not in self._remembered:
            self._remembered[key] = find()
        found: Found = self._remembered[key]
        return found

    def once(
        self, question: str, node: ast.AST, find: Callable[[], Found], meanwhile: Found, deepest: int = NO_LIMIT
    ) -> Found:
        """The same for a question about nodes that may lead back to itself: then it gets something to go on with.

        So it does where it leads too deep. What was found that way is not kept: others come to it by a shorter way.
        Where many call one another it is kept after all, or each question would go through all of them.
        """
        if question not in self._asked:
            self._asked[question] = QueryCache(deepest, far=10 * deepest)
        return self._asked[question].once(node, find, meanwhile)

    # What expressions may be.

    def values(self, expression: ast.expr | None) -> Values:
        if expression is None:
            return NOTHING
        if expression in self._known:
            known: Values = self._known[expression]
            return known
        return self.meanings.once(expression, lambda: evaluate(self, expression), NOTHING)

    def made(self, expression: ast.expr | None, *wanted: str) -> list[CallResult]:
        return [value for value in self.values(expression) if isinstance(value, CallResult) and value.name in wanted]

    def name_of(self, expression: ast.expr) -> str:
        """The library's name for it, with methods as in `torch.optim.SGD.step`; empty where it is not known."""
        if expression in self._names:
            return self._names[expression]
        # Of several, the same in every run: sets have no order.
        name = max(map(self._library_name, self.values(expression)), default="")
        if expression in self._known:
            self._names[expression] = name
        return name

    def _library_name(self, value: Value) -> str:
        if isinstance(value, Method):
            return f"{functions.name_of_owner(self, value.of)}.{value.name}"
        return value.name if isinstance(value, Library) else ""

    # Calls of a library's functions.

    def calls(self, source: Source, *wanted: str) -> Iterator[ast.Call]:
        return calls.calls_in(self, source, wanted)

    def all_calls(self, *wanted: str) -> Iterator[ast.Call]:
        found = self.cached(("all calls", wanted), lambda: list(calls.calls_in_all(self, wanted)))
        return iter(found)

    # Names, functions and classes of the given files.

    function_of = functions.function_of
    callers = functions.callers
    started_functions = functions.started_functions
    arguments_for = functions.arguments_for
    expressions_of = functions.expressions_of
    method = functions.method
    ancestry = functions.ancestry
    is_module = functions.is_module
    assigned = bindings.assigned
    iterated = staticmethod(queries.iterated)
    source_of = staticmethod(source_of)

    def bindings(self, name: ast.Name) -> list[Binding]:
        return bindings.bindings_of(self, name) or []
