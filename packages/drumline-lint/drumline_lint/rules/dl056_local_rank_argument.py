"""DL056: the local rank is taken from the command line, where torchrun does not put it."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from drumline_lint.findings import Finding, Severity, rule
from drumline_lint.flow.distributed import framework
from drumline_lint.program.imports import connected
from drumline_lint.program.program import Program
from drumline_lint.reading.launchers import TORCHRUN
from drumline_lint.reading.source import Source

RULE = rule("DL056")
_FLAGS = {"--local_rank", "--local-rank"}


def check(program: Program, source: Source) -> Iterator[Finding]:
    """The flag, if no file of the program reads LOCAL_RANK; DeepSpeed's launcher gives it."""
    if framework(program, source) == "deepspeed":
        return
    for call in program.index(source).calls.get("add_argument", ()):
        names = [option.value for option in call.args if isinstance(option, ast.Constant)]
        flags = [name for name in names if isinstance(name, str) and name in _FLAGS]
        if not flags or _reads_variable(program, source):
            continue
        message = f"torchrun passes no {flags[0]}: it keeps its default on every rank"
        is_started = any(launch.kind == TORCHRUN for launch in program.launches_of(source))
        is_torchrun = is_started or "torchrun" in source.text
        is_sure = is_torchrun and not framework(program, source) and _is_used(program, source)
        severity = None if is_sure else Severity.NOTE
        yield RULE.at(source, call, message, severity=severity)


def _reads_variable(program: Program, source: Source) -> bool:
    words = ('"LOCAL_RANK"', "'LOCAL_RANK'", "SLURM_LOCALID")
    return any(word in near.text for near in connected(program, source) for word in words)


def _is_used(program: Program, source: Source) -> bool:
    """Whether something reads `args.local_rank`."""
    return any(
        attribute.attr == "local_rank" and isinstance(attribute.ctx, ast.Load)
        for near in connected(program, source)
        for attribute in program.index(near).every(ast.Attribute)
    )
