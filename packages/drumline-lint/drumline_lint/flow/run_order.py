"""The calls of a script in the order of a run, with functions, `with` blocks and imports
followed."""

from __future__ import annotations

import ast
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TypeAlias, TypeVar

from drumline_lint.flow.distributed import distributed_sources
from drumline_lint.program.imports import imported_by, imported_sources
from drumline_lint.program.program import Program
from drumline_lint.program.queries import cached_query
from drumline_lint.program.tree import FUNCTIONS, FunctionNode, children, last_name, nodes_in
from drumline_lint.program.value import Function, Instance
from drumline_lint.reading.source import Source

Action: TypeAlias = ast.Call | ast.Import | ast.ImportFrom | ast.With | ast.AsyncWith | ast.Yield
_AS_THEY_ARE = (ast.Import, ast.ImportFrom, ast.With, ast.AsyncWith)
_AFTER_THEIR_PARTS = (ast.Call, ast.Yield)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


def ordered_actions(nodes: Sequence[ast.AST]) -> list[Action]:
    """One statement after the other, arguments before their call, both branches of an `if`.

    The caller handles the body of a `with`, which depends on its context manager.
    """
    actions: list[Action] = []
    stack: list[tuple[ast.AST, bool]] = [(node, False) for node in reversed(nodes)]
    while stack:
        node, are_parts_done = stack.pop()
        if are_parts_done or isinstance(node, _AS_THEY_ARE):
            assert isinstance(node, (*_AS_THEY_ARE, *_AFTER_THEIR_PARTS))
            actions.append(node)
            continue
        if isinstance(node, _AFTER_THEIR_PARTS):
            stack.append((node, True))
        stack += [(part, False) for part in reversed(_parts(node))]
    return actions


def _parts(node: ast.AST) -> list[ast.AST]:
    """In the order of evaluation; for a function definition, what is evaluated there."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return [*node.decorator_list, node.args]
    if isinstance(node, ast.Lambda):
        return []
    parts = children(node)
    if isinstance(node, _COMPREHENSIONS):
        parts.sort(key=lambda part: not isinstance(part, ast.comprehension))
    return parts


DEEPEST = 24
# How often one function is followed in one run: after the first its calls are known; more are for
# the order.
MOST_TIMES = 2
MOST_STEPS = 20_000
MAIN_RUNNERS = ("fire.Fire", "typer.run", "absl.app.run")


@dataclass(eq=False, slots=True)  # a long run has many: a frozen one takes three times as long
class Step:
    """A call, and how it was reached."""

    call: ast.Call
    through: tuple[ast.AST, ...] = ()
    """The calls, `with`s and imports on the way to it, outermost first."""


Run: TypeAlias = list[Step]
Found = TypeVar("Found")
Finds: TypeAlias = Callable[[Program, Run], Iterable[tuple[ast.AST, Found]]]


def steps_calling(program: Program, run: Run, *full_names: str) -> list[int]:
    """The numbers of the steps that call one of these."""
    calls = program.cached(
        (steps_calling, full_names), lambda: frozenset(program.all_calls(*full_names))
    )
    return [number for number, step in enumerate(run) if step.call in calls]


def found_in_runs(program: Program, source: Source, find: Finds[Found]) -> dict[ast.AST, Found]:
    """What `find` finds in a file, from all runs of scripts; each run is searched once."""
    return _found_by_source(program, find).get(source, {})


def all_runs(program: Program) -> Iterator[Run]:
    """The runs of every script of the distributed files, and of every `main` without callers. They
    are not kept: each may have thousands of steps."""
    every = _in_order(program)
    for source in every:
        if _is_script(program, source):
            yield script(program, source)
    for source in every:
        yield from _mains(program, source)


@cached_query
def all_imported(program: Program) -> set[Source]:
    return {
        imported for source in _in_order(program) for imported in imported_sources(program, source)
    }


def script(program: Program, source: Source) -> Run:
    """The run of a file; empty for a file with only definitions."""
    return list(steps_of(program, source))


def steps_of(program: Program, source: Source) -> Iterator[Step]:
    """The same, step by step, for those who need only the first."""
    walk = _RunWalk(program, source).over(source, program.tree(source).body, _Frame())
    return islice(walk, MOST_STEPS)


def process_of(program: Program, step: Step) -> tuple[ast.AST, ...]:
    """The calls that started its process; empty for the script's own process and its threads."""
    return _process_after(program, step.through)


@cached_query
def _process_after(program: Program, through: tuple[ast.AST, ...]) -> tuple[ast.AST, ...]:
    starting = (
        call for call in through if isinstance(call, ast.Call) and program.started_functions(call)
    )
    return tuple(call for call in starting if last_name(call.func) != "Thread")


def _is_called(program: Program, source: Source, function: FunctionNode) -> bool:
    return bool(program.callers(function)) or any(
        function in _begun(program, call)
        for name in MAIN_RUNNERS
        for call in program.index(source).calls.get(name.rpartition(".")[2], ())
    )


@cached_query
def _found_by_source(program: Program, find: Finds[Found]) -> dict[Source, dict[ast.AST, Found]]:
    by_source: dict[Source, dict[ast.AST, Found]] = defaultdict(dict)
    for run in all_runs(program):
        for node, what in find(program, run):
            by_source[program.source_of(node)].setdefault(node, what)
    return by_source


def _is_script(program: Program, source: Source) -> bool:
    """Whether it is run as a script: not if others import it, unless it has `if __name__ ==
    "__main__"`."""
    return source not in all_imported(program) or any(map(is_for_script, program.tree(source).body))


def _mains(program: Program, source: Source) -> Iterator[Run]:
    """A `main` without callers is called by a package's entry point."""
    for function in program.tree(source).body:
        if (
            isinstance(function, ast.FunctionDef)
            and function.name == "main"
            and not _is_called(program, source, function)
        ):
            frame = _Frame(functions=frozenset({function}))
            walk = _RunWalk(program, source).over(function, function.body, frame)
            yield list(islice(walk, MOST_STEPS))


def _in_order(program: Program) -> list[Source]:
    distributed = distributed_sources(program)
    return [source for source in program.sources if source in distributed]


@dataclass(eq=False, slots=True)
class _Frame:
    """The position of the walk: the functions, the way to it, and what runs at a `yield`."""

    functions: frozenset[ast.AST] = frozenset()
    through: tuple[ast.AST, ...] = ()
    at_yield: list[_Todo] = field(default_factory=list)


@dataclass(eq=False, slots=True)
class _Todo:
    """Actions to visit one after the other; or a function to enter for a `with`."""

    actions: Iterator[tuple[ast.AST, Sequence[FunctionNode]]]
    frame: _Frame
    rest: list[_Todo] = field(default_factory=list)
    """The body of a `with` whose context manager the action makes."""
    entered_by: ast.AST | None = None


class _RunWalk:
    """One run, with a stack of what is left to visit, the next at the end."""

    def __init__(self, program: Program, source: Source) -> None:
        self.program = program
        self.imported = {source}
        self.times: Counter[ast.AST] = Counter()
        self.stack: list[_Todo] = []

    def over(self, owner: object, body: Sequence[ast.AST], frame: _Frame) -> Iterator[Step]:
        self.stack = [self._in_turn(owner, body, frame)]
        while self.stack:
            todo = self.stack[-1]
            for node, begun in todo.actions:
                if isinstance(node, ast.Call):
                    yield Step(node, todo.frame.through)
                    if begun or todo.rest:
                        self._call(node, begun, todo)
                        break
                elif self._visit(node, todo):
                    break
            else:
                self.stack.pop()

    def _visit(self, node: ast.AST, todo: _Todo) -> bool:
        """Whether there is something to visit before the rest."""
        size = len(self.stack)
        if todo.entered_by is not None:
            assert isinstance(node, FUNCTIONS)
            self._enter(node, todo, todo.entered_by)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            self._import(node, todo.frame)
        elif isinstance(node, (ast.With, ast.AsyncWith)):
            self._with(node, todo.frame)
        elif todo.frame.at_yield:
            self.stack += todo.frame.at_yield
            todo.frame.at_yield.clear()
        return len(self.stack) > size

    def _in_turn(self, owner: object, nodes: Sequence[ast.AST], frame: _Frame) -> _Todo:
        actions = self.program.cached(
            ("doings", owner), lambda: _with_begun(self.program, ordered_actions(nodes))
        )
        return _Todo(iter(actions), frame)

    def _call(self, node: ast.Call, begun: Sequence[FunctionNode], todo: _Todo) -> None:
        if not begun:
            self.stack += todo.rest
        for function in begun:
            self._enter(function, todo, node)

    def _enter(self, function: FunctionNode, todo: _Todo, way: ast.AST) -> None:
        frame = todo.frame
        is_too_often = function in frame.functions or self.times[function] >= MOST_TIMES
        if is_too_often or len(frame.through) >= DEEPEST:
            self.stack += todo.rest
            return
        self.times[function] += 1
        inner = _Frame(frame.functions | {function}, (*frame.through, way), list(todo.rest))
        body = function.body if isinstance(function.body, list) else [function.body]
        self.stack.append(self._in_turn(function, body, inner))

    def _import(self, node: ast.Import | ast.ImportFrom, frame: _Frame) -> None:
        sources = [
            source for source in imported_by(self.program, node) if source not in self.imported
        ]
        if not sources:
            return
        self.imported.update(sources)
        inner = _Frame(frame.functions, (*frame.through, node))
        for source in reversed(list(dict.fromkeys(sources))):
            done = _done_at_import(self.program, source)
            self.stack.append(self._in_turn(source.tree, done, inner))

    def _with(self, node: ast.With | ast.AsyncWith, frame: _Frame) -> None:
        """A context manager up to its `yield`, or its `__enter__`; the body; and its rest."""
        todo = [self._in_turn(node, node.body, frame)]
        for item in reversed(node.items):
            expression = item.context_expr
            before = self._in_turn(expression, [expression], frame)
            if isinstance(expression, ast.Call) and _is_generator(self.program, expression):
                *arguments, _ = before.actions
                begun = _begun(self.program, expression)
                manager = _Todo(iter([(expression, begun)]), frame, rest=todo)
                todo = [manager, _Todo(iter(arguments), frame)]
            else:
                enter, leave = (
                    _Todo(iter([(method, ()) for method in methods]), frame, entered_by=node)
                    for methods in _with_methods(self.program, expression)
                )
                todo = [leave, *todo, enter, before]
        self.stack += todo


def _with_begun(
    program: Program, actions: Sequence[Action]
) -> list[tuple[Action, Sequence[FunctionNode]]]:
    """Without imports of libraries."""
    return [
        (action, _begun(program, action) if isinstance(action, ast.Call) else ())
        for action in actions
        if not isinstance(action, (ast.Import, ast.ImportFrom)) or imported_by(program, action)
    ]


@cached_query
def _begun(program: Program, call: ast.Call) -> list[FunctionNode]:
    """What a call runs: one function, as far as known, or what it starts in another process."""
    function = program.function_of(call)
    if function is None and call.args and program.name_of(call.func) in MAIN_RUNNERS:
        return [value.node for value in program.values(call.args[0]) if isinstance(value, Function)]
    return [function] if function is not None else program.started_functions(call)


def _is_generator(program: Program, call: ast.Call) -> bool:
    function = program.function_of(call)
    return function is not None and bool(nodes_in(function, ast.Yield))


def _with_methods(
    program: Program, expression: ast.expr
) -> tuple[list[FunctionNode], list[FunctionNode]]:
    """`__enter__` and `__exit__` of a class of the given files."""
    classes = [value.of for value in program.values(expression) if isinstance(value, Instance)][:1]
    methods = [
        [program.method(class_, name) for class_ in classes] for name in ("__enter__", "__exit__")
    ]
    enter, leave = ([method for method in part if method is not None] for part in methods)
    return enter, leave


@cached_query
def _done_at_import(program: Program, source: Source) -> list[ast.stmt]:
    """Its top-level statements, without `if __name__ == "__main__"`."""
    return [
        statement
        for statement in program.tree(source).body
        if not is_for_script(statement) and _may_call(statement)
    ]


def is_for_script(statement: ast.stmt) -> bool:
    """`if __name__ == "__main__":`"""
    return isinstance(statement, ast.If) and "__name__" in {
        name.id for name in nodes_in(statement.test, ast.Name)
    }


def _may_call(statement: ast.stmt) -> bool:
    """Not a function or class: their decorators do not matter here."""
    if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return False
    return bool(nodes_in(statement, ast.Call, ast.Import, ast.ImportFrom))
