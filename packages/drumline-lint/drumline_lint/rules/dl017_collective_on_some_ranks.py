"""DL017: only some ranks call a collective, and wait for the others forever.

A collective returns when every rank has called it. Reported are those under a condition on ranks,
also behind functions of the given files, unless the other ranks call it in another branch.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from drumline_lint.findings import Finding, Severity, rule
from drumline_lint.flow.collectives import (
    collectives_in,
    has_counterpart,
    likely_collective_names,
    short_name,
    who_calls,
)
from drumline_lint.flow.conditions import conditions, is_for_debugging
from drumline_lint.flow.distributed import distributed_sources, framework
from drumline_lint.flow.some_ranks import calls_under_rank_tests
from drumline_lint.program.program import Program
from drumline_lint.program.tree import ancestors, called_name, enclosing
from drumline_lint.program.value import RankTest
from drumline_lint.reading.source import Source

RULE = rule("DL017", only_distributed=False)
# The package's name from its version 2 on.
_LIGHTNING = re.compile(r"^\s*(import|from) lightning\b", re.MULTILINE)


def check(program: Program, source: Source) -> Iterator[Finding]:
    """Collectives under a condition on ranks, and calls there of functions that come to one.

    if rank == 0:
        dist.barrier()
    """
    if source not in distributed_sources(program) and not framework(program, source):
        return

    likely = likely_collective_names(program)
    calls = [call for call in program.index(source).every(ast.Call) if called_name(call) in likely]
    for call, tests in calls_under_rank_tests(program, calls):
        for name, chain in collectives_in(program, call):
            if chain[0] is not call or _serves(chain) or has_counterpart(program, call, name):
                continue

            # `rank < n` may choose all of them
            is_certain = all(test.is_main is not None for test in tests)
            is_shown = _is_seen_here(program, name, chain) and not is_for_debugging(program, call)
            severity = None if is_certain and is_shown else Severity.NOTE
            message = _message(source, tests[0], name, chain)
            yield RULE.at(source, call, message, severity=severity)
            break


def _is_seen_here(program: Program, name: str, chain: tuple[ast.Call, ...]) -> bool:
    """Whether the collective is called beside the condition, in a function of the same file that is
    called there, or in functions that are known and have no conditions.

    A longer way, or one through other files, may have conditions that are not seen.
    """
    is_of_trainer = name.startswith("pytorch_lightning.Trainer.")
    if is_of_trainer and not _LIGHTNING.search(program.source_of(chain[-1]).text):
        return False  # whether a Trainer saves together depends on its version

    sources = {program.source_of(call) for call in chain}
    is_short = len(chain) <= 2 and len(sources) == 1
    is_known = all(program.function_of(call) is not None for call in chain[:-1])
    return is_short or (is_known and all(_is_always_made(program, call) for call in chain[1:]))


def _is_always_made(program: Program, call: ast.Call) -> bool:
    """Whether its function makes this call under no condition.

    For example:

        def means(self):
            dist.all_reduce(self.sums)
    """
    return not any(conditions(program, call)) and enclosing(call, ast.Try) is None


def _serves(chain: tuple[ast.Call, ...]) -> bool:
    """Whether the called function waits without end for what the other ranks send.

    while True:
        dist.recv(task)
    """
    for call in chain[1:]:
        for outer in ancestors(call):
            if isinstance(outer, ast.While) and isinstance(outer.test, ast.Constant):
                return True

    return False


def _message(source: Source, test: RankTest, name: str, chain: tuple[ast.Call, ...]) -> str:
    """What a rank calls, with the functions that lead to the collective.

    `only rank 0 calls save, which calls barrier through finish: that blocks until every rank calls
    it`
    """
    first = source.code(chain[0].func)
    if len(chain) == 1:
        return f"{who_calls(test)} {first}, which blocks until every rank calls it"

    through = " and ".join(ast.unparse(call.func) for call in chain[1:-1])
    by = f" through {through}" if through else ""
    return (
        f"{who_calls(test)} {first}, which calls {short_name(name)}{by}: "
        "that blocks until every rank calls it"
    )
