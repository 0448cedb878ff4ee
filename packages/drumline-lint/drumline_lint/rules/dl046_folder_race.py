"""DL046: every rank deletes or creates the same folder.

The first rank succeeds. The next ones find no folder to delete, or one that is already there, or
delete what the first has written in the meantime.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from drumline_lint.findings import Finding, rule
from drumline_lint.flow.guards import is_on_every_rank
from drumline_lint.program.calls import argument, has_unknown_arguments
from drumline_lint.program.program import Program
from drumline_lint.program.tree import enclosing, owner_of
from drumline_lint.reading.source import Source
from drumline_lint.training.saves import is_own

RULE = rule("DL046", in_tests=False)


def check(program: Program, source: Source) -> Iterator[Finding]:
    """Deletions of folders, and creations that may find the folder, that all ranks make at the same
    path.

    shutil.rmtree("results")
    os.makedirs("results")
    """
    for call in program.calls(source, "shutil.rmtree"):
        if argument(call, 1, "ignore_errors") is None and _is_race(program, call):
            message = (
                f"{source.code(call.func)} runs on every rank: "
                "one deletes what another has written or is about to read"
            )
            yield RULE.at(source, call, message)

    for call in program.calls(source, "os.makedirs", "os.mkdir", "pathlib.Path.mkdir"):
        is_allowed = argument(call, 2, "exist_ok") is not None or has_unknown_arguments(call)
        if not is_allowed and _is_race(program, call):
            message = (
                "every rank creates the folder, also after another has: "
                "that raises a FileExistsError"
            )
            yield RULE.at(source, call, message)


def _is_race(program: Program, call: ast.Call) -> bool:
    """Whether all ranks do it to the same folder, and nothing catches the error.

    `os.makedirs(f"results/{rank}")` is a folder of each rank.
    """
    if enclosing(call, ast.Try) is not None:
        return False

    path = call.args[0] if call.args else owner_of(call)
    return is_on_every_rank(program, call) and not is_own(program, path)
