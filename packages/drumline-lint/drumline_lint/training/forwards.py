"""Where wrapped models are run: the calls of them, and those that lead there, under whatever name."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from drumline_lint.program.arguments import argument, number_of
from drumline_lint.program.bindings import bound
from drumline_lint.program.origins import origins, parts
from drumline_lint.program.parameters import function_with
from drumline_lint.program.program import Program
from drumline_lint.program.tree import Binding, FunctionNode, function_around, inside, last_name, position
from drumline_lint.program.value import Made
from drumline_lint.training.models import WRAPPERS

DEEPEST = 5
MOST_CALLS = 20
MOST = 8
LONGEST = 20
Chain = tuple[ast.Call, ...]
"""Calls that lead to one; the last is the call of the model itself."""


def forwards_in(program: Program, node: ast.AST) -> Iterator[Chain]:
    """All calls in it of something that may be a wrapped model, with those that lead there."""
    for call in inside(node, ast.Call):
        yield from forwards_by(program, call)


def forwards_by(program: Program, call: ast.Call) -> Iterator[Chain]:
    """If a call may run a wrapped model, how."""
    if program.made(run_by(call), *WRAPPERS):
        yield (call,)
        return
    function = program.function_of(call)
    if function is not None:
        for chain in _forwards_of(program, function):
            yield (call, *chain)


def run_by(call: ast.Call) -> ast.expr:
    """The model that a call runs, if it runs one: `model(x)`, `model.forward(x)`."""
    called = call.func
    return called.value if isinstance(called, ast.Attribute) and called.attr == "forward" else called


def _forwards_of(program: Program, function: FunctionNode) -> tuple[Chain, ...]:
    """The first few, one way to each."""
    nothing: tuple[Chain, ...] = ()
    return program.once("forwards", function, lambda: _find_first(program, function), nothing, MOST_CALLS)


def _find_first(program: Program, function: FunctionNode) -> tuple[Chain, ...]:
    found: dict[ast.Call, Chain] = {}
    for chain in forwards_in(program, function):
        found.setdefault(chain[-1], chain)
        if len(found) == MOST:
            break
    return tuple(found.values())


def wrappings_by(program: Program, chain: Chain) -> list[Made]:
    """What wraps the model that a chain of calls runs; nothing where it may well be another model.

    A function may get the wrapped model from one caller and the inner one from another: what counts is what the calls
    of this chain give it.
    """
    model: ast.expr | None = run_by(chain[-1])
    callers = list(chain[:-1])
    for _ in range(LONGEST):
        behind = _only_binding(program, model) if callers and isinstance(model, ast.Name) else None
        function = function_with(behind) if isinstance(behind, ast.arg) else None
        if isinstance(behind, ast.Name):
            model = behind
        elif isinstance(behind, ast.arg) and function and function is program.function_of(callers[-1]):
            model = argument(callers.pop(), number_of(function, behind), behind.arg)
        else:
            break
    return [] if model is None else wrappings(program, model)


def _only_binding(program: Program, name: ast.Name) -> ast.AST | None:
    """The parameter or the other name that it stands for, if that is all it may be."""
    bindings = program.bindings(name)
    if len(bindings) != 1:
        return None
    return bindings[0].node if bindings[0].kind == "parameter" else bindings[0].value


def wrappings(program: Program, model: ast.expr, depth: int = 0) -> list[Made]:
    """What wraps a model; nothing if it may have been taken out again.

    That it is bare in a run with one process does not matter: there are no other ranks in that.
    """
    made = program.made(model, *WRAPPERS)
    if not made or depth > DEEPEST or any(_is_other(program, part) for part in parts(program, model)):
        return []
    return made if _is_given_wrapped(program, model, depth) else []


def _is_given_wrapped(program: Program, model: ast.expr, depth: int) -> bool:
    """Whether all callers give a wrapped one for a parameter; of what is assigned, one that is wrapped will do."""
    if isinstance(model, ast.Name):
        bindings = program.bindings(model)
        assigned = [one for one in bindings if one.kind != "parameter"]
        return any(_binds_wrapped(program, one, depth) for one in assigned or bindings)
    if isinstance(model, ast.Attribute):
        behind = origins(program, model)
        earlier = [one for one in behind if not _is_later(one, model)]
        return any(_is_wrapped(program, one, depth) for one in earlier) or not behind
    return True


def _binds_wrapped(program: Program, binding: Binding, depth: int) -> bool:
    if binding.kind == "parameter" or (binding.kind == "assign" and not binding.path):
        return all(_is_wrapped(program, one, depth) for one in program.given_by(binding))
    return any(isinstance(one, Made) and one.name in WRAPPERS for one in bound(program, binding))


def _is_wrapped(program: Program, model: ast.expr | None, depth: int) -> bool:
    return model is not None and bool(wrappings(program, model, depth + 1))


def _is_later(value: ast.expr, use: ast.expr) -> bool:
    """Of `self.model = DDP(self.model)`: after a use in the same function."""
    return function_around(value) is function_around(use) and position(use) < position(value)


def _is_other(program: Program, part: ast.expr) -> bool:
    """Whether it may take the model out of its wrapper, or make another one of it."""
    if isinstance(part, ast.Attribute):
        return part.attr in ("module", "_orig_mod")
    if not isinstance(part, ast.Call):
        return False
    return program.name_of(part.func) in ("getattr", "copy.deepcopy", "copy.copy") or _says_so(part.func)


def _says_so(function: ast.expr) -> bool:
    name = last_name(function).lower()
    return "unwrap" in name or "without_ddp" in name
