"""How all ranks come to a place, in words."""

from __future__ import annotations

import ast

from drumline_lint.flow.call_values import CallFrame, truth
from drumline_lint.flow.conditions import conditions
from drumline_lint.flow.guards import is_on_every_rank
from drumline_lint.program.program import Program
from drumline_lint.program.tree import FunctionNode, enclosing_function


def how_every_rank_gets_there(program: Program, node: ast.AST) -> str:
    """In words: `through train (line 12)`, with the file if it is another; nothing where it is
    plain to see."""
    call = _call_of_all(program, node)
    if call is None:
        return ""
    function = enclosing_function(call)
    source = program.source_of(call)
    is_here = source is program.source_of(node)
    if function is None and is_here:
        return ""  # `main()` at the end of the file
    line = source.where(call) if is_here else f"{source.path.name}, {source.where(call)}"
    return f"through {line}" if function is None else f"through {function.name} ({line})"


def _call_of_all(program: Program, node: ast.AST) -> ast.Call | None:
    """The last call that all ranks make where other calls are only for some; if there is none, the
    nearest one."""
    deciding: ast.Call | None = None
    nearest: ast.Call | None = None
    functions: set[ast.AST] = set()
    while (function := enclosing_function(node)) is not None and function not in functions:
        functions.add(function)
        calls = [
            call for call in program.callers(function) if enclosing_function(call) is not function
        ]
        calls = [call for call in calls if function not in program.started_functions(call)]
        calls = [call for call in calls if _leads_to(program, call, function, node)]
        letting_all = [call for call in calls if is_on_every_rank(program, call)]
        if not letting_all:
            break
        node = letting_all[0]
        nearest = nearest or letting_all[0]
        deciding = letting_all[0] if len(letting_all) < len(calls) else deciding
    return deciding or nearest


def _leads_to(program: Program, call: ast.Call, function: FunctionNode, node: ast.AST) -> bool:
    """Whether what it gives does not switch off a place of the function that it runs."""
    place = CallFrame(function, call, None, ())
    return all(
        truth(program, test, place) is not (not holds) for test, holds in conditions(program, node)
    )
