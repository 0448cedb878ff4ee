"""DL062: ranks read a file that rank 0 may still be writing."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from drumline_lint.findings import Finding, Severity, rule
from drumline_lint.flow.collectives import collectives_in
from drumline_lint.flow.conditions import rank_tests, rank_tests_at, rest_of_block
from drumline_lint.flow.distributed import is_of_ranks
from drumline_lint.flow.guards import is_single_process
from drumline_lint.flow.loops import loop_around
from drumline_lint.program.calls import argument
from drumline_lint.program.program import Program
from drumline_lint.program.tree import ancestors, called_name, nodes_in
from drumline_lint.reading.source import Source

RULE = rule("DL062")
_WRITING = re.compile(r"save|dump|write|download|urlretrieve|extract|to_csv|to_parquet")
_PREPARING = re.compile(r"prepare|preprocess|system|check_call|run|build|make|get_data|cache")
_READING = re.compile(
    r"(?<!down)(?<!up)load|open|read|from_file|from_pretrained|from_disk|loadtxt|memmap"
)
_OF_FILES = re.compile(
    r"path|file|dir|folder|ckpt|checkpoint|cache|dest|archive|[\"'][^\"']+\.\w+[\"']"
)
_FROM_ELSEWHERE = re.compile(r"pretrained|base_model")
_WAITING = re.compile(r"barrier|wait|sync|broadcast|gather|reduce|backward")


def check(program: Program, source: Source) -> Iterator[Finding]:
    """`if rank == 0: save(path)`, then `load(path)` on all ranks with nothing between them; and
    sleeping instead of waiting."""
    for branch in program.index(source).every(ast.If):
        if not _works(branch):
            continue
        tests = rank_tests(program, branch.test)
        if not any(test.is_main is not None for test in tests) or _waits(program, branch):
            continue
        yield from _sleeping(program, source, branch)
        calls = [call for part in branch.body for call in nodes_in(part, ast.Call)]
        written = {path for call in calls for path in _written_by(program, call)}
        if not written or not any(test.is_main for test in tests):
            continue
        for call in _reads_after(program, branch):
            is_for_all = not any(rank_tests_at(program, call))
            if (
                written & {*_paths(call), _dataset(call)}
                and is_for_all
                and not is_single_process(program, call)
            ):
                message = (
                    f"every rank comes to {source.code(call.func)} without waiting for rank 0, "
                    f"which writes the file ({source.where(branch)})"
                )
                severity = None if is_of_ranks(program, source) else Severity.NOTE
                yield RULE.at(source, call, message, severity=severity)


def _works(branch: ast.If) -> bool:
    """Whether it writes or prepares something, by the names of what it calls."""
    calls = nodes_in(branch, ast.Call)
    names = [called_name(call).lower() for call in calls]
    return any(_WRITING.search(name) or _PREPARING.search(name) for name in names) or any(
        map(_downloads, calls)
    )


def _downloads(call: ast.Call) -> bool:
    """`CIFAR10(root, download=True)`"""
    option = argument(call, None, "download")
    return isinstance(option, ast.Constant) and option.value is True


def _dataset(call: ast.Call) -> str:
    """The dataset of a library, by its class and folder."""
    root = argument(call, 0, "root")
    return "" if root is None else f"{called_name(call)} in {ast.unparse(root)}"


def _sleeping(program: Program, source: Source, branch: ast.If) -> Iterator[Finding]:
    """`if rank == 0: download() else: time.sleep(60)`: nothing says that it takes less."""
    following = rest_of_block(branch)[:1]
    is_waited = any(_waits(program, statement) for statement in following)
    for call in [] if is_waited else nodes_in(branch, ast.Call):
        is_sleep = program.name_of(call.func) == "time.sleep"
        is_here = loop_around(call) is loop_around(branch)
        tests = rank_tests_at(program, call) if is_sleep and is_here else ()
        if any(test.is_main is False for test in tests):
            message = "the other ranks wait for rank 0 by the clock, however long its work takes"
            yield RULE.at(source, call, message, fix="wait with dist.barrier()")


def _reads_after(program: Program, branch: ast.If) -> Iterator[ast.Call]:
    """The calls that read after it, in its block and in those around it, until ranks wait."""
    for outer in (branch, *ancestors(branch)):
        if isinstance(outer, ast.FunctionDef | ast.AsyncFunctionDef | ast.With):
            return
        for statement in rest_of_block(outer) if isinstance(outer, ast.stmt) else ():
            if _waits(program, statement):
                return
            for call in nodes_in(statement, ast.Call):
                if _reads(program, call) or _is_of_library(program, call):
                    yield call


def _written_by(program: Program, call: ast.Call) -> set[str]:
    """The files that a call writes, itself or in the function that it calls: there, only what is
    named outside of the function."""
    if _downloads(call):
        return {_dataset(call)} - {""}
    if _WRITING.search(called_name(call).lower()):
        return _paths(call)
    function = program.function_of(call)
    inner = [] if function is None else nodes_in(function, ast.Call)
    writes = [part for part in inner if _WRITING.search(called_name(part).lower())]
    names = {path for part in writes for path in _paths(part)}
    return {*(_paths(call) if writes else ()), *(name for name in names if name.isupper())}


def _reads(program: Program, call: ast.Call) -> bool:
    """By its name, or the names of what a class of the given files calls as it is made."""
    function = program.function_of(call)
    is_made = getattr(function, "name", "") == "__init__"
    inner = nodes_in(function, ast.Call) if function is not None and is_made else []
    return any(_READING.search(called_name(part).lower()) for part in (call, *inner))


def _is_of_library(program: Program, call: ast.Call) -> bool:
    return program.name_of(call.func).startswith(("torchvision.", "torchaudio."))


def _waits(program: Program, node: ast.AST) -> bool:
    names = [called_name(call).lower() for call in nodes_in(node, ast.Call)]
    is_named = any(_WAITING.search(name) for name in names)
    return is_named or any(collectives_in(program, node))


def _paths(call: ast.Call) -> set[str]:
    """The files that it is given, as they are written."""
    arguments = [*call.args, *(keyword.value for keyword in call.keywords)]
    owner = [call.func.value] if isinstance(call.func, ast.Attribute) else []
    texts = {ast.unparse(value) for value in (*arguments, *owner)}
    is_whole = called_name(call) in ("save", "load")
    return {
        text
        for text in texts
        if (is_whole or _OF_FILES.search(text.lower())) and not _FROM_ELSEWHERE.search(text.lower())
    }
