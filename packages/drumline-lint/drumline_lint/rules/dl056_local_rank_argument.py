"""DL056: the local rank is taken from the command line, where torchrun does not put it."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from drumline_lint.findings import Finding, Severity, rule
from drumline_lint.flow.distributed import framework
from drumline_lint.program.calls import argument
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
        is_sure = is_torchrun and not framework(program, source) and _is_used(program, call)
        severity = None if is_sure else Severity.NOTE
        yield RULE.at(source, call, message, severity=severity)


def _reads_variable(program: Program, source: Source) -> bool:
    words = ('"LOCAL_RANK"', "'LOCAL_RANK'", "SLURM_LOCALID")
    return any(word in near.text for near in connected(program, source) for word in words)


def _is_used(program: Program, option: ast.Call) -> bool:
    """Whether something reads `args.local_rank`, `vars(args)["local_rank"]` or
    `getattr(args, "local_rank")`."""
    name = _destination(option)
    return any(
        _is_read_in(program, near, name) for near in connected(program, program.source_of(option))
    )


def _destination(option: ast.Call) -> str:
    """The attribute that argparse gives the value: by `dest`, or by the first long flag."""
    destination = argument(option, None, "dest")
    if isinstance(destination, ast.Constant):
        return str(destination.value)
    names = [str(part.value) for part in option.args if isinstance(part, ast.Constant)]
    long_name = next(name for name in names if name.startswith("--"))
    return long_name.lstrip("-").replace("-", "_")


def _is_read_in(program: Program, source: Source, name: str) -> bool:
    index = program.index(source)
    attributes = [part.attr for part in index.every(ast.Attribute) if _is_load(part)]
    keys = [part.slice for part in index.every(ast.Subscript) if _is_load(part)]
    keys += [argument(call, 1, "name") for call in index.calls.get("getattr", ())]
    keys += [argument(call, 0, "key") for call in index.calls.get("get", ())]
    texts = [key.value for key in keys if isinstance(key, ast.Constant)]
    return name in attributes or name in texts


def _is_load(part: ast.Attribute | ast.Subscript) -> bool:
    return isinstance(part.ctx, ast.Load)
