"""DL041: a barrier at every step."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from drumline_lint.findings import Finding, rule
from drumline_lint.flow.conditions import always_exits, held_conditions
from drumline_lint.flow.guards import is_now_and_then
from drumline_lint.flow.loops import repeated
from drumline_lint.program.program import Program
from drumline_lint.program.queries import cached_query
from drumline_lint.program.ranks import is_about_being_distributed
from drumline_lint.program.tree import SCOPES, ancestors, nodes_in
from drumline_lint.reading.source import Source
from drumline_lint.training.steps import round_functions, training_loops

RULE = rule("DL041")
_WAITING = {
    "torch.distributed.barrier": "makes all ranks wait for the slowest",
    "torch.cuda.empty_cache": "gives back memory that is allocated again",
}


def check(program: Program, source: Source) -> Iterator[Finding]:
    """Barriers that every round of a training loop calls, in the loop or in a function that it
    calls."""
    for call in _barriers(program):
        if program.source_of(call) is source:
            what = _WAITING[program.name_of(call.func)]
            yield RULE.at(source, call, f"{source.code(call)} {what} at every step")


@cached_query
def _barriers(program: Program) -> dict[ast.Call, None]:
    barriers: dict[ast.Call, None] = {}
    for loop in training_loops(program):
        for root, rare in round_functions(program, loop, _is_rare).items():
            parts = (
                [part for part in repeated(root) if not isinstance(part, SCOPES)]
                if not rare
                else []
            )
            for call in (inner_call for part in parts for inner_call in nodes_in(part, ast.Call)):
                if program.name_of(call.func) in _WAITING and not _is_rare(program, call, root):
                    barriers[call] = None
    return barriers


def _is_rare(program: Program, node: ast.AST, until: ast.AST) -> bool:
    """Under any condition but that the code is distributed, or in an inner loop: it may be there
    for a reason."""
    if is_now_and_then(program, node, until):
        return True
    inner: ast.AST = node
    for outer in ancestors(node):
        if outer is until:
            return False
        if isinstance(outer, ast.If) and inner is not outer.test:
            tests = held_conditions(program, outer.body[0]) if inner in outer.body else []
            if always_exits(program, outer.body) or not all(
                is_about_being_distributed(test) for test, _ in tests
            ):
                return True
        if isinstance(outer, ast.For | ast.While | ast.Try):
            return True
        inner = outer
    return False
