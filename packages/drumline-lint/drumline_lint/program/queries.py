"""The interface of a program for the modules that evaluate expressions, and a cache for recursive
queries.

An expression may be the result of a call, which is what a function returns, which is again an
expression. So these modules get the whole program as an argument, and none of them imports it.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from drumline_lint.program.files import Files
from drumline_lint.program.tree import Binding, called_name, last_name
from drumline_lint.program.value import NOTHING, Items, LoopItem, Value, Values, only, union
from drumline_lint.reading.source import Source

Answer = TypeVar("Answer")
NOT_CUT = 1_000_000
NO_LIMIT = 1_000_000_000


@dataclass(eq=False)
class QueryCache:
    """The results of one kind of query, and the queries that are running."""

    deepest: int = NO_LIMIT
    """How deep queries may be nested."""
    farthest: int = NO_LIMIT
    """After how many nested queries one is given up."""
    far: int = NO_LIMIT
    """After how many nested queries even incomplete results are cached, because they were
    expensive."""
    results: dict[object, Any] = field(default_factory=dict)
    _for_now: dict[object, Any] = field(default_factory=dict)
    """Incomplete results, until the outermost query ends."""
    _depths: dict[object, int] = field(default_factory=dict)
    """The running queries, and how many each is nested in."""
    _cut: int = NOT_CUT
    """The least depth of a running query whose result was needed inside of it; 0 after one was given
    up."""
    _num_looked: int = 0
    """How many queries the outermost one has begun."""

    @property
    def is_idle(self) -> bool:
        """Whether no query is running."""
        return not self._depths

    def once(self, key: object, find: Callable[[], Answer], meanwhile: Answer) -> Answer:
        """The cached result; an inner query for the same key gets `meanwhile`.

        `rank = rank + 1` in a loop asks what `rank` is while that is being found out.

        Results that depend on `meanwhile` are used for the outermost query and then dropped, unless
        they were expensive; the result of the outermost query itself is complete. A query that is
        nested too deeply is given up.
        """
        result: Answer
        if key in self.results:
            result = self.results[key]
            return result

        if key in self._for_now:
            self._cut = 0
            result = self._for_now[key]
            return result

        depths = self._depths
        if not depths:
            self._begin()

        if key in depths or len(depths) > self.deepest or self._num_looked > self.farthest:
            self._cut = min(self._cut, depths.get(key, 0))
            return meanwhile

        depth = depths[key] = len(depths)
        self._num_looked += 1
        try:
            result = find()
        finally:
            del depths[key]

        self._keep(key, result, depth)
        return result

    def memo(self, key: object, find: Callable[[], Answer]) -> Answer:
        """A part of a query that several have in common; kept unless it may be incomplete."""
        result: Answer
        if key in self.results:
            result = self.results[key]
            return result

        was_cut = self._cut != NOT_CUT
        result = find()
        if not was_cut and self._cut == NOT_CUT:
            self.results[key] = result

        return result

    def _keep(self, key: object, result: object, depth: int) -> None:
        """Cache a result: for good if it depends on no query that still runs."""
        if self._cut >= depth:
            self.results[key] = result
            self._cut = NOT_CUT
        else:
            self._for_now[key] = result

        if depth == 0:
            if self._num_looked > self.far:
                self.results.update(self._for_now)
            self._for_now.clear()

    def _begin(self) -> None:
        """A new outermost query; the last one may have ended in an error."""
        self._for_now.clear()
        self._cut = NOT_CUT
        self._num_looked = 0


class ProgramView(Protocol):
    """The interface of a program for the modules that implement it."""

    files: Files
    meanings: QueryCache
    """The caches for names, parameters, functions and expressions."""
    answers: dict[object, dict[Any, Any]]
    """The results of each query, by what it is about."""

    def values(self, expression: ast.expr | None) -> Values:
        """All that it may be."""

    def name_of(self, expression: ast.expr) -> str:
        """The library's name for it; empty if unknown."""

    def calls(self, source: Source, *full_names: str) -> Iterator[ast.Call]:
        """All calls of these in a file."""


View = TypeVar("View", bound=ProgramView)
Parameters = ParamSpec("Parameters")


def cached_query(
    find: Callable[Concatenate[View, Parameters], Answer],
) -> Callable[Concatenate[View, Parameters], Answer]:
    """Caches the results of a function of a program and its arguments."""

    @wraps(find)
    def ask(program: View, /, *arguments: Parameters.args, **named: Parameters.kwargs) -> Answer:
        answers = program.answers[find]
        key = arguments[0] if len(arguments) == 1 else arguments
        if key not in answers:
            answers[key] = find(program, *arguments, **named)

        result: Answer = answers[key]
        return result

    return ask


# They yield the items of their first argument.
_GIVING_ON = {"enumerate", "tqdm", "trange", "zip", "iter", "islice", "track", "cycle", "reversed"}


def any_of(program: ProgramView, expressions: Iterable[ast.expr | None]) -> Values:
    """All that one of these expressions may be."""
    return union(map(program.values, expressions))


def unpacked(program: ProgramView, values: Values, path: tuple[int, ...]) -> Values:
    """The part of a value that is assigned to a name.

    For the path (1, 0), which is `c` in `a, (c, d) = value`, it is the first item of the second.
    """
    for number in path:
        inner: set[Value] = set()
        for value in values:
            if isinstance(value, Items) and number < len(value.items):
                inner |= program.values(value.items[number])
            elif isinstance(value, LoopItem):
                inner.add(value)

        values = frozenset(inner)

    return values


def each(program: ProgramView, binding: Binding) -> Values:
    """What a loop gives its variable: the items that are written out, or some item."""
    assert binding.value is not None
    values: set[Value] = set()
    for value in program.values(binding.value):
        if isinstance(value, Items):
            values.update(*map(program.values, value.items))

    if values:
        return frozenset(values)

    return NOTHING if is_counter(binding) else only(LoopItem(iterated(binding.value)))


def is_counter(binding: Binding) -> bool:
    """Whether it is the number that `enumerate` gives."""
    called = getattr(binding.value, "func", None)

    return called is not None and last_name(called) == "enumerate" and binding.path[:1] == (0,)


def iterated(expression: ast.expr) -> ast.expr:
    """The iterable inside `enumerate(...)`, `tqdm(...)`, `zip(...)`: their first argument.

    Of `enumerate(tqdm(loader))` it is `loader`.
    """
    while isinstance(expression, ast.Call) and expression.args:
        if called_name(expression) not in _GIVING_ON:
            break
        expression = expression.args[0]

    return expression
