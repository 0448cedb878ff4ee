"""DL080: gradients of micro-batches that never reach the step, or never the other ranks."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterator
from typing import Any

from drumline_lint.findings import Finding, rule
from drumline_lint.flow.conditions import conditions
from drumline_lint.flow.loops import batch_loops
from drumline_lint.program.program import Program
from drumline_lint.program.tree import Loop, ancestors, dotted, last_name, nodes_in
from drumline_lint.reading.source import Source
from drumline_lint.training.steps import every_nth, is_method, optimizer_steps, round_functions

RULE = rule("DL080", only_distributed=False)
# The tests are computed for the first rounds, with this for the number of micro-batches.
_MICRO_BATCHES = 4
_ROUNDS = range(3 * _MICRO_BATCHES)
_LAST = 1_000_003
_OPERATORS: dict[type[ast.AST], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Mod: operator.mod,
    ast.FloorDiv: operator.floordiv,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}


def check(program: Program, source: Source) -> Iterator[Finding]:
    """`zero_grad` in every round with a step in some; `no_sync` in the round that steps."""
    for loop in batch_loops(program, source) if "%" in source.text else ():
        roots = round_functions(program, loop, every_nth)
        steps = [
            (call, rare or every_nth(program, call, root))
            for root, rare in roots.items()
            for call in optimizer_steps(program, root)
        ]
        if not steps or not all(rare for _, rare in steps):
            continue
        yield from _zeroed(program, source, loop, steps[0][0])
        for call, _ in steps:
            yield from _unsynced(program, source, loop, call)


def _zeroed(program: Program, source: Source, loop: Loop, step: ast.Call) -> Iterator[Finding]:
    calls = nodes_in(loop, ast.Call)
    passes = [call for call in calls if is_method(call, "backward")]
    if loop not in ancestors(step) or any(every_nth(program, call, loop) for call in passes):
        return
    for call in calls:
        is_handler = any(isinstance(outer, ast.ExceptHandler) for outer in ancestors(call))
        is_every = not is_handler and not any(_inner_tests(program, call, loop))
        if is_method(call, "zero_grad") and is_every:
            message = (
                f"{source.code(call)} runs for every micro-batch, {source.code(step)} only after "
                "several: the gradients of all but the last are thrown away"
            )
            yield RULE.at(source, call, message)


def _inner_tests(program: Program, node: ast.AST, loop: Loop) -> list[tuple[ast.expr, bool]]:
    return [
        (test, holds)
        for test, holds in conditions(program, node, with_exits=False)
        if loop in ancestors(test)
    ]


def _unsynced(program: Program, source: Source, loop: Loop, step: ast.Call) -> Iterator[Finding]:
    """Where the conditions of `no_sync` and of the step are both computed to hold in a round."""
    stepping = _inner_tests(program, step, loop)
    for attribute in nodes_in(loop, ast.Attribute):
        tests = _inner_tests(program, attribute, loop) if attribute.attr == "no_sync" else []
        if tests and stepping and _meet(program, loop, [*tests, *stepping]):
            message = (
                "the micro-batch before the step is under no_sync: "
                "every rank steps with gradients of its own"
            )
            yield RULE.at(source, attribute, message)


def _meet(program: Program, loop: Loop, tests: list[tuple[ast.expr, bool]]) -> bool:
    counter = _counter(loop)
    written = [(_resolved(program, test), holds) for test, holds in tests]
    moduli = {
        ast.unparse(part.right)
        for test, _ in written
        for part in ast.walk(test)
        if isinstance(part, ast.BinOp) and isinstance(part.op, ast.Mod)
    }
    if not counter or len(moduli) != 1:
        return False
    names = {modulus: _MICRO_BATCHES for modulus in moduli if not modulus.isdecimal()}
    try:
        return any(
            all(
                bool(_computed(test, {**names, counter: number})) == holds
                for test, holds in written
            )
            for number in _ROUNDS
        )
    except (ValueError, ZeroDivisionError):
        return False


def _counter(loop: Loop) -> str:
    """`step` of `for step, batch in enumerate(loader)`; one that is counted up has no fixed place."""
    called = (
        loop.iter.func if isinstance(loop, ast.For) and isinstance(loop.iter, ast.Call) else None
    )
    target = loop.target if isinstance(loop, ast.For) else None
    if (
        called is not None
        and last_name(called) in ("enumerate", "tqdm")
        and isinstance(target, ast.Tuple)
    ):
        target = target.elts[0]
    name = target.id if isinstance(target, ast.Name) else ""
    changed = {dotted(statement.target) for statement in nodes_in(loop, ast.AugAssign)}
    return "" if name in changed else name


def _resolved(program: Program, test: ast.expr) -> ast.expr:
    """A flag is what was assigned to it."""
    assigned = program.assigned(test) if isinstance(test, ast.Name) else []
    return assigned[0] if len(assigned) == 1 else test


def _computed(node: ast.expr, names: dict[str, int]) -> Any:
    """The value of a test; ValueError where something in it is not known."""
    if ast.unparse(node) in names:
        return names[ast.unparse(node)]
    match node:
        case ast.Constant(value=int()):
            return node.value
        case ast.BinOp() if type(node.op) in _OPERATORS:
            return _OPERATORS[type(node.op)](
                _computed(node.left, names), _computed(node.right, names)
            )
        case ast.Compare() if len(node.ops) == 1 and type(node.ops[0]) in _OPERATORS:
            return _OPERATORS[type(node.ops[0])](
                _computed(node.left, names), _computed(node.comparators[0], names)
            )
        case ast.BoolOp():
            values = [bool(_computed(value, names)) for value in node.values]
            return all(values) if isinstance(node.op, ast.And) else any(values)
        case ast.UnaryOp(op=ast.Not()):
            return not _computed(node.operand, names)
        case ast.Call() if last_name(node.func) == "len":
            return _LAST
    raise ValueError(ast.unparse(node))
