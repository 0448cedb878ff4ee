"""Scripts that are run in one process, although training code imports them or they call some of it."""

from __future__ import annotations

import ast
import re

from drumline_lint.program.names import DDP, FSDP, INIT
from drumline_lint.program.program import Program
from drumline_lint.program.tree import above, class_around, function_around, last_name
from drumline_lint.reading.source import Source
from drumline_lint.running.distributed import framework
from drumline_lint.running.order import MOST_STEPS, Run, all_imported, all_scripts, is_for_script, script

_MANAGER = "drumline.DDPManager"
_WRAPPING = frozenset({DDP, *FSDP, _MANAGER})
# What may start ranks where it is not seen what it does.
_MAY_START = re.compile(
    r"init\w*(dist|group|ddp|process|env)|setup\w*(dist|ddp)|launch|spawn|^initialize$", re.IGNORECASE
)


def is_in_lone_run(program: Program, node: ast.AST) -> bool:
    """Of what is done outside of functions: whether it is done only in a run that starts no process group."""
    source = program.source_of(node)
    is_main = any(isinstance(one, ast.stmt) and is_for_script(one) for one in (node, *above(node)))
    return is_main and program.remember(("is lone", source), lambda: _is_lone(program, source))


def _is_lone(program: Program, source: Source) -> bool:
    """All it wraps must be wrapped in other runs, too, that start a group; else that is somewhere unseen."""
    if next(program.all_calls(INIT), None) is None or framework(program, source):
        return False
    run = script(program, source)
    if len(run) >= MOST_STEPS or any(_may_start(program, step.call) for step in run):
        return False
    wrapping = _wrapping(program, run)
    if not wrapping:
        return source in all_imported(program)
    elsewhere = [_wrapping(program, other) for other in all_scripts(program) if _starts(program, other)]
    return wrapping <= set().union(*elsewhere)


def _wrapping(program: Program, run: Run) -> set[ast.Call]:
    return {step.call for step in run if program.name_of(step.call.func) in _WRAPPING}


def _starts(program: Program, run: Run) -> bool:
    return any(program.name_of(step.call.func) == INIT for step in run)


def _may_start(program: Program, call: ast.Call) -> bool:
    named = program.name_of(call.func)
    if named in (INIT, _MANAGER):
        return True
    if program.function_of(call) is not None:
        return False
    name = last_name(call.func)
    own = (name, isinstance(call.func, ast.Attribute))
    is_of_files = not named and own in program.remember("starting", lambda: _starting(program))
    return is_of_files or bool(_MAY_START.search(name))


def _starting(program: Program) -> set[tuple[str, bool]]:
    """The names of all functions that come to the start of a process group, and whether they are methods."""
    pending, seen = list(program.all_calls(INIT)), set[ast.AST]()
    names = set()
    while pending:
        function = function_around(pending.pop())
        if function is not None and function not in seen:
            seen.add(function)
            names.add((function.name, class_around(function) is not None))
            pending += program.callers(function)
    return names
