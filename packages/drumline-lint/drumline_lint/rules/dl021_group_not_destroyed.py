"""DL021: the process group is left to the end of the process."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from drumline_lint.findings import Finding, rule
from drumline_lint.flow.conditions import ENDING_CALLS, conditions
from drumline_lint.flow.distributed import framework
from drumline_lint.flow.run_order import MOST_STEPS, Run, process_of, scripts_through
from drumline_lint.program.names import DESTROY, INIT
from drumline_lint.program.program import Program
from drumline_lint.program.tree import (
    SCOPES,
    FunctionNode,
    above,
    class_around,
    function_around,
    inside,
    is_called,
    last_name,
)
from drumline_lint.program.value import Module
from drumline_lint.reading.source import Source

RULE = rule("DL021")
# Python calls them by itself.
_CALLED_BY_PYTHON = ("__exit__", "__aexit__", "__del__")


def check(program: Program, source: Source) -> Iterator[Finding]:
    """Of the runs of scripts: who only offers `setup()` and `cleanup()` leaves it to others to call both."""
    if framework(program, source):
        return
    for call in program.calls(source, INIT):
        through = [run for run in scripts_through(program, source) if any(step.call is call for step in run)]
        if through and not all(_is_destroyed(program, run) or _is_endless(program, run) for run in through):
            yield RULE.at(
                source,
                call,
                f"{source.code(call.func)} is called, and nothing in this run calls destroy_process_group",
            )
        elif not through and _is_nowhere_destroyed(program, call):
            yield RULE.at(
                source, call, f"{source.code(call.func)} is called, and destroy_process_group nowhere"
            )


def _is_nowhere_destroyed(program: Program, init: ast.Call) -> bool:
    """Of one that a run comes to by a name which it puts together: no file as much as mentions it."""
    is_mentioned = any("destroy_process_group" in source.text for source in program.sources)
    return not is_mentioned and is_looked_up(program, function_around(init))


def _is_destroyed(program: Program, run: Run) -> bool:
    if len(run) >= MOST_STEPS or any(program.name_of(step.call.func) == DESTROY for step in run):
        return True
    called = {last_name(step.call.func) for step in run if program.function_of(step.call) is None}
    return any(
        _may_be_reached(program, mention, called)
        for source in _sources_of(program, run)
        for mention in _mentions(program, source)
    )


def _is_endless(program: Program, run: Run) -> bool:
    """Whether it comes, whatever holds, to a `while True` that only an exception ends."""
    ranks = {process_of(program, step) for step in run if program.name_of(step.call.func) == INIT}
    return any(
        _is_in_endless_loop(program, step.call)
        and process_of(program, step) in ranks
        and not any(_is_conditional(program, way) or _is_thread(way) for way in step.through)
        for step in run
    )


def _is_thread(way: ast.AST) -> bool:
    """What goes on beside the run's own end."""
    return isinstance(way, ast.Call) and last_name(way.func) == "Thread"


def _is_in_endless_loop(program: Program, call: ast.Call) -> bool:
    for outer in above(call):
        if isinstance(outer, SCOPES):
            return False
        if isinstance(outer, ast.While) and isinstance(outer.test, ast.Constant) and outer.test.value:
            is_left = inside(outer, ast.Break, ast.Return, ast.Yield) or any(
                program.name_of(one.func) in ENDING_CALLS for one in inside(outer, ast.Call)
            )
            return not is_left and not _is_conditional(program, outer)
    return False


def _is_conditional(program: Program, node: ast.AST) -> bool:
    """But for `if __name__ == "__main__"`; an exception in a `try` may be how it ends."""
    tests = [test for test, _ in conditions(program, node, with_exits=False)]
    is_script = all("__name__" in {one.id for one in inside(test, ast.Name)} for test in tests)
    return not is_script or any(isinstance(outer, ast.Try) for outer in above(node))


def _sources_of(program: Program, run: Run) -> list[Source]:
    every = dict.fromkeys(program.source_of(step.call) for step in run)
    return [source for source in every if "destroy_process_group" in source.text]


def _mentions(program: Program, source: Source) -> Iterator[ast.expr]:
    yield from (call.func for call in program.calls(source, DESTROY))
    index = program.index(source)
    for node in (*index.every(ast.Attribute), *index.every(ast.Name)):
        if last_name(node) == "destroy_process_group" and not is_called(node):
            yield node


def _may_be_reached(program: Program, mention: ast.expr, called: set[str]) -> bool:
    """Whether it is handed on, as to `atexit.register`, or called by who is not seen to be called, but may be."""
    function = function_around(mention)
    if function is None or not is_called(mention):
        return True
    is_handed_on = any(_is_handed_on(program, source, function) for source in program.sources)
    return bool(
        function.name in _CALLED_BY_PYTHON
        or function.name in called
        or function.decorator_list
        or is_handed_on
        or any(_may_be_reached_from(program, caller, called) for caller in program.callers(function))
    )


def _may_be_reached_from(program: Program, caller: ast.Call, called: set[str]) -> bool:
    function = function_around(caller)
    return function is not None and (function.name in called or function.name in _CALLED_BY_PYTHON)


def _is_handed_on(program: Program, source: Source, function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """`atexit.register(cleanup)`: named, not called."""
    if function.name not in source.text:  # no need to look at its tree
        return False
    return function.name in program.remember(("handed on", source), lambda: _handed_on(program, source))


def _handed_on(program: Program, source: Source) -> set[str]:
    """What a file names and does not call there."""
    index = program.index(source)
    return {
        last_name(one) for one in (*index.every(ast.Name), *index.every(ast.Attribute)) if not is_called(one)
    }


def is_looked_up(program: Program, function: FunctionNode | None) -> bool:
    """Whether some file asks its module for a name that begins like its own."""
    if not isinstance(function, ast.FunctionDef) or class_around(function) is not None:
        return False
    home = Module(program.source_of(function))
    return any(
        function.name.startswith(beginning) and home in program.values(module)
        for module, beginning in program.remember("looked up", lambda: _find(program))
    )


def _find(program: Program) -> list[tuple[ast.expr, str]]:
    """What is asked, and how the names begin; nothing where they may begin with anything."""
    asked = [
        (call.args[0], _beginning(call.args[1]))
        for source in program.sources
        if "getattr" in source.text
        for call in program.index(source).calls.get("getattr", ())
        if len(call.args) >= 2
    ]
    return [(module, beginning) for module, beginning in asked if beginning]


def _beginning(name: ast.expr) -> str:
    if isinstance(name, ast.BinOp) and isinstance(name.op, ast.Mod | ast.Add):
        name = name.left
    if isinstance(name, ast.JoinedStr) and name.values:
        name = name.values[0]
    text = name.value if isinstance(name, ast.Constant) else ""
    return text.partition("%")[0] if isinstance(text, str) else ""
