"""DL015: one process of every node writes the same file.

A local rank of 0 is on every node. That is right for a disk of the node, and wrong for the one
that all nodes share.
"""

from __future__ import annotations

from collections.abc import Iterator

from drumline_lint.findings import Finding, Severity, rule
from drumline_lint.flow.guards import guards, is_main_only
from drumline_lint.flow.hosts import NODES
from drumline_lint.program.program import Program
from drumline_lint.reading.source import Source
from drumline_lint.training.saves import is_own_of_node, saves

RULE = rule("DL015", in_tests=False)


def check(program: Program, source: Source) -> Iterator[Finding]:
    """Saves by the first process of each node, with a path that is the same on all nodes.

    if local_rank == 0:
        torch.save(model.state_dict(), "model.pt")

    They are notes in a file that does not speak of nodes, or that nothing is seen to start: on one
    node, nothing is wrong.
    """
    for save in saves(program, source):
        tests = guards(program, save.call)
        is_local = any(test.kind == "local" and test.is_main and test.is_needed for test in tests)
        if not is_local or any(test.kind not in ("local", "group") for test in tests):
            continue
        if is_main_only(tests) or is_own_of_node(program, save.path):
            continue

        file = "the same file" if save.path is None else source.code(save.path)
        message = (
            f"{source.code(save.call.func)} runs once on every node, and all nodes write {file}"
        )

        is_started = "torchrun" in source.text or "srun" in source.text
        is_shown = NODES.search(source.text) and (is_started or program.launches_of(source))
        severity = None if is_shown else Severity.NOTE
        yield RULE.at(source, save.call, message, severity=severity)
