"""What a program does first: its calls in the order in which they would be made, functions and imports looked into.

Without recursion into the tree: a sum of a thousand terms is a thousand deep.
"""

from __future__ import annotations

import ast
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from drumline.lint.program.distributed import distributed_sources
from drumline.lint.program.imports import imported_by
from drumline.lint.program.program import Program
from drumline.lint.program.tree import FUNCTIONS, FunctionNode, function_around, inside, position, up
from drumline.lint.program.value import Function, Instance
from drumline.lint.reading.source import Source

DEEPEST = 24
# Of one function in one run: what it does is known after the first; the others are there for the order.
MOST_TIMES = 3
MAIN_RUNNERS = ("fire.Fire", "typer.run", "absl.app.run")


@dataclass(frozen=True)
class Step:
    """A call, and how it was come to."""

    call: ast.Call
    through: tuple[ast.AST, ...] = ()
    """The calls, `with`s and imports on the way to it, outermost first."""


Run: TypeAlias = list[Step]


def runs(program: Program, source: Source) -> list[list[ast.Call]]:
    """Of a file: what it does when it is run, and what each function does that nobody calls."""
    return [[step.call for step in run] for run in (script(program, source), *loose(program, source)) if run]


def runs_through(program: Program, source: Source) -> list[Run]:
    """All runs, of whichever distributed file, that come through a file; those of scripts first."""
    return program.remember("runs through", lambda: _runs_by_source(program)).get(source, [])


def scripts_through(program: Program, source: Source) -> list[Run]:
    """Those of them that are whole: what a script does, or a `main` that nobody calls."""
    return program.remember("scripts through", lambda: _scripts_by_source(program)).get(source, [])


def script(program: Program, source: Source) -> Run:
    """What a file does when it is run; nothing for one that only defines."""
    return program.remember(
        ("script", source), lambda: list(_Walk(program, source).over(program.tree(source).body, _Frame()))
    )


def loose(program: Program, source: Source) -> list[Run]:
    """What each function does that nobody calls."""
    return program.remember(("loose", source), lambda: _find_loose(program, source))


def process_of(program: Program, step: Step) -> tuple[ast.AST, ...]:
    """The calls that started the process in which it happens; of a script's own, nothing."""
    return tuple(one for one in step.through if isinstance(one, ast.Call) and program.started(one))


def parting(one: Step, other: Step) -> tuple[ast.AST, ast.AST]:
    """The two places of one function in which the ways to two steps part."""
    ways = [(*step.through, step.call) for step in (one, other)]
    for left, right in zip(*ways, strict=False):
        if left is not right:
            return left, right
    return one.call, other.call


def _find_loose(program: Program, source: Source) -> list[Run]:
    done = {function_around(step.call) for step in script(program, source)}
    functions = [
        function
        for kind in (ast.FunctionDef, ast.AsyncFunctionDef)
        for function in program.index(source).every(kind)
        if function not in done and not program.callers(function)
    ]
    every = sorted(functions, key=position)
    found = [list(_Walk(program, source).over(one.body, _Frame(functions=frozenset({one})))) for one in every]
    return [run for run in found if run]


def _runs_by_source(program: Program) -> dict[Source, list[Run]]:
    found: dict[Source, list[Run]] = defaultdict(list)
    for source in _in_order(program):
        _sort(program, [script(program, source)], found)
    for source in _in_order(program):
        _sort(program, loose(program, source), found)
    return found


def _scripts_by_source(program: Program) -> dict[Source, list[Run]]:
    found: dict[Source, list[Run]] = defaultdict(list)
    for source in _in_order(program):
        _sort(program, [script(program, source), *_mains(program, source)], found)
    return found


def _mains(program: Program, source: Source) -> list[Run]:
    """`main` that nobody calls is called by a package's entry point."""
    return [run for run in loose(program, source) if _is_main(function_around(run[0].call))]


def _is_main(function: ast.AST | None) -> bool:
    return (
        getattr(function, "name", "") == "main"
        and function is not None
        and isinstance(up(function), ast.Module)
    )


def _sort(program: Program, every: list[Run], found: dict[Source, list[Run]]) -> None:
    for run in every:
        for source in {program.source_of(step.call): None for step in run}:
            found[source].append(run)


def _in_order(program: Program) -> list[Source]:
    distributed = distributed_sources(program)
    return [source for source in program.sources if source in distributed]


@dataclass(frozen=True, eq=False)
class _Frame:
    """Where the walk is: in which functions, how it came there, and what a `yield` there lets happen."""

    functions: frozenset[ast.AST] = frozenset()
    through: tuple[ast.AST, ...] = ()
    at_yield: list[_Todo] = field(default_factory=list)


@dataclass(frozen=True, eq=False)
class _Todo:
    """Something to look at; a call to make, its arguments looked at; or a function to enter by a `with`."""

    node: ast.AST
    frame: _Frame
    kind: str = "look"
    rest: list[_Todo] = field(default_factory=list)
    """The body of a `with` whose context manager this makes."""
    way: ast.AST | None = None


class _Walk:
    """One run: what is still to be looked at, the next at the end."""

    def __init__(self, program: Program, source: Source) -> None:
        self.program = program
        self.imported = {source}
        self.times: Counter[ast.AST] = Counter()
        self.stack: list[_Todo] = []

    def over(self, nodes: Iterable[ast.AST], frame: _Frame) -> Iterator[Step]:
        """A statement after the other, arguments before the call that they are for, both branches of an `if`."""
        self.stack = _in_turn(nodes, frame)
        while self.stack:
            todo = self.stack.pop()
            if todo.kind == "make":
                assert isinstance(todo.node, ast.Call)
                yield Step(todo.node, todo.frame.through)
                for function in _begun(self.program, todo.node):
                    self._enter(function, replace(todo, way=todo.node))
            elif todo.kind == "enter":
                assert isinstance(todo.node, FUNCTIONS)
                self._enter(todo.node, todo)
            else:
                self._look_at(todo.node, todo.frame)

    def _look_at(self, node: ast.AST, frame: _Frame) -> None:
        if isinstance(node, ast.Import | ast.ImportFrom):
            self._import(node, frame)
        elif isinstance(node, ast.With | ast.AsyncWith):
            self._with(node, frame)
        elif isinstance(node, ast.Yield) and frame.at_yield:
            self.stack += frame.at_yield
            frame.at_yield.clear()
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            self.stack += _in_turn([*node.decorator_list, node.args], frame)
        elif isinstance(node, ast.Call):
            self.stack.append(_Todo(node, frame, "make"))
            self.stack += _in_turn(ast.iter_child_nodes(node), frame)
        elif isinstance(node, ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp):
            parts = ast.iter_child_nodes(node)
            loops_first = sorted(parts, key=lambda part: not isinstance(part, ast.comprehension))
            self.stack += _in_turn(loops_first, frame)
        elif not isinstance(node, ast.Lambda):
            self.stack += _in_turn(ast.iter_child_nodes(node), frame)

    def _enter(self, function: FunctionNode, todo: _Todo) -> None:
        frame = todo.frame
        is_too_often = function in frame.functions or self.times[function] >= MOST_TIMES
        if is_too_often or len(frame.through) >= DEEPEST:
            self.stack += todo.rest
            return
        self.times[function] += 1
        assert todo.way is not None
        inner = _Frame(frame.functions | {function}, (*frame.through, todo.way), list(todo.rest))
        self.stack += _in_turn(function.body if isinstance(function.body, list) else [function.body], inner)

    def _import(self, node: ast.Import | ast.ImportFrom, frame: _Frame) -> None:
        others = [one for one in imported_by(self.program, node) if one not in self.imported]
        self.imported.update(others)
        inner = _Frame(frame.functions, (*frame.through, node))
        for other in reversed(list(dict.fromkeys(others))):
            self.stack += _in_turn(_done_at_import(self.program, other), inner)

    def _with(self, node: ast.With | ast.AsyncWith, frame: _Frame) -> None:
        """Up to the `yield` of a context manager, or its `__enter__`; the body; and the rest of it."""
        todo = _in_turn(node.body, frame)
        for item in reversed(node.items):
            expression = item.context_expr
            manager = _with_methods(self.program, expression)
            if isinstance(expression, ast.Call) and _is_generator(self.program, expression):
                todo = [_Todo(expression, frame, "make", rest=todo)]
                todo += _in_turn(ast.iter_child_nodes(expression), frame)
            else:
                enter, leave = ([_Todo(one, frame, "enter", way=node) for one in part] for part in manager)
                todo = [*leave, *todo, *enter, _Todo(expression, frame)]
        self.stack += todo


def _in_turn(nodes: Iterable[ast.AST], frame: _Frame) -> list[_Todo]:
    return [_Todo(node, frame) for node in reversed(list(nodes))]


def _begun(program: Program, call: ast.Call) -> list[FunctionNode]:
    """What a call runs: one function, as far as can be told, or what it starts in another process."""
    function = program.function_of(call)
    if function is None and call.args and program.name_of(call.func) in MAIN_RUNNERS:
        return [value.node for value in program.values(call.args[0]) if isinstance(value, Function)]
    return [function] if function is not None else program.started(call)


def _is_generator(program: Program, call: ast.Call) -> bool:
    function = program.function_of(call)
    return function is not None and next(inside(function, ast.Yield), None) is not None


def _with_methods(program: Program, expression: ast.expr) -> tuple[list[FunctionNode], list[FunctionNode]]:
    """`__enter__` and `__exit__` of a class of the given files."""
    classes = [value.of for value in program.values(expression) if isinstance(value, Instance)][:1]
    found = [[program.method(one, name) for one in classes] for name in ("__enter__", "__exit__")]
    enter, leave = ([one for one in part if one is not None] for part in found)
    return enter, leave


def _done_at_import(program: Program, source: Source) -> list[ast.stmt]:
    """Its outermost statements, but for what is done only where it is the script."""
    return program.remember(
        ("done at import", source),
        lambda: [one for one in program.tree(source).body if not _is_for_script(one) and _may_call(one)],
    )


def _is_for_script(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.If) and "__name__" in {
        one.id for one in inside(statement.test, ast.Name)
    }


def _may_call(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Import | ast.ImportFrom) or any(inside(statement, ast.Call))
