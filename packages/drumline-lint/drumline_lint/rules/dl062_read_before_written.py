"""DL062: ranks read a file that rank 0 may still be writing."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from itertools import takewhile

from drumline_lint.findings import Finding, rule
from drumline_lint.flow.collectives import collectives_in
from drumline_lint.flow.conditions import rank_tests, rank_tests_at, rest_of_block
from drumline_lint.flow.guards import is_main_only
from drumline_lint.flow.loops import loop_around
from drumline_lint.flow.some_ranks import has_backward
from drumline_lint.program.calls import argument
from drumline_lint.program.imports import connected
from drumline_lint.program.origins import parts
from drumline_lint.program.program import Program
from drumline_lint.program.queries import cached_query
from drumline_lint.program.tree import SCOPES, ancestors, dotted, last_name, nodes_in
from drumline_lint.program.value import ConstantValue
from drumline_lint.reading.source import Source
from drumline_lint.training.saves import saves

RULE = rule("DL062")
_WRITING = re.compile(r"save|dump|write|download|urlretrieve|extract|to_csv|to_parquet")
_PREPARING = re.compile(r"prepare|preprocess|system|check_call|run|build|make|get_data|cache|load")
_READING = re.compile(
    r"(?<!down)(?<!up)load|open|read|from_file|from_pretrained|from_disk|loadtxt|memmap"
)
_OF_FILES = re.compile(r"path|file|dir|folder|ckpt|checkpoint|cache|dest|archive")
_LIBRARIES = ("torch.save", "torch.load", "numpy.", "pickle.", "json.", "open", "pandas.")
_LOCAL = ("/tmp", "/dev/shm", "/local")  # noqa: S108
_WAITING = re.compile(r"barrier|wait|sync|broadcast|gather|reduce")


def check(program: Program, source: Source) -> Iterator[Finding]:
    """`if rank == 0: save(path)`, then `load(path)` on all ranks with nothing between them."""
    for branch in program.index(source).every(ast.If):
        tests = rank_tests(program, branch.test)
        if not any(test.is_main is not None for test in tests) or _waits(program, branch):
            continue
        yield from _sleeping(program, source, branch)
        if not any(test.is_main for test in tests):
            continue
        written = _paths(program, branch, _WRITING)
        for call in _reads_after(program, branch) if written else ():
            is_for_all = not set(rank_tests_at(program, call)) - set(rank_tests_at(program, branch))
            if is_for_all and not written.isdisjoint(_paths_of(program, call)):
                message = (
                    f"every rank comes to {source.code(call.func)} without waiting for rank 0, "
                    f"which writes the file ({source.where(branch)})"
                )
                yield RULE.at(source, call, message)
    yield from _of_one_node(program, source)


def _sleeping(program: Program, source: Source, branch: ast.If) -> Iterator[Finding]:
    """`if rank == 0: download() else: time.sleep(60)`: nothing says that it takes less."""
    sleeps = [
        call
        for call in nodes_in(branch, ast.Call)
        if program.name_of(call.func) == "time.sleep" and loop_around(call) is loop_around(branch)
    ]
    rest = rest_of_block(branch)
    names = [last_name(call.func).lower() for call in nodes_in(branch, ast.Call)]
    is_written = any(_WRITING.search(name) or _PREPARING.search(name) for name in names)
    for call in sleeps if is_written else ():
        excluded = [test for test in rank_tests_at(program, call) if test.is_main is False]
        if excluded and not (rest and _waits(program, rest[0])):
            message = "the other ranks wait for rank 0 by the clock, however long its work takes"
            yield RULE.at(source, call, message, fix="wait with dist.barrier()")


def _of_one_node(program: Program, source: Source) -> Iterator[Finding]:
    """A file that only rank 0 saves, on a disk that only its node has, and that every rank loads."""
    for call in program.calls(source, "torch.load"):
        path = argument(call, 0, "f")
        folders = _saved_on_one_node(program, connected(program, source))
        is_same = path is not None and bool(dotted(path)) and dotted(path) in folders
        if is_same and not any(rank_tests_at(program, call)):
            message = (
                f"only rank 0 saves {dotted(path) if path else ''}, on the disk of its own node: "
                "ranks of other nodes do not have it"
            )
            yield RULE.at(source, call, message, fix="save to a folder that all nodes share")


@cached_query
def _saved_on_one_node(program: Program, sources: frozenset[Source]) -> set[str]:
    """Where rank 0 saves on such a disk, as it is written."""
    saved = [
        save.path
        for source in sources
        for save in saves(program, source)
        if is_main_only(frozenset(rank_tests_at(program, save.call)))
    ]
    return {dotted(path) for path in saved if path is not None and _is_local(program, path)}


def _is_local(program: Program, path: ast.expr) -> bool:
    texts = [part.value for part in parts(program, path) if isinstance(part, ast.Constant)]
    return any(isinstance(text, str) and text.startswith(_LOCAL) for text in texts)


def _reads_after(program: Program, branch: ast.If) -> Iterator[ast.Call]:
    """The calls that read after it, in its own block and in those around it, until ranks wait."""
    for outer in takewhile(lambda node: not isinstance(node, SCOPES), (branch, *ancestors(branch))):
        if isinstance(outer, ast.With) and any(_waits(program, item) for item in outer.items):
            return
        for statement in rest_of_block(outer) if isinstance(outer, ast.stmt) else ():
            if _waits(program, statement):
                return
            for call in nodes_in(statement, ast.Call):
                if _READING.search(last_name(call.func).lower()):
                    yield call


def _waits(program: Program, node: ast.AST) -> bool:
    calls = nodes_in(node, ast.Call)
    is_named = any(_WAITING.search(last_name(call.func).lower()) for call in calls)
    return (
        is_named
        or has_backward(program, [node])
        or next(collectives_in(program, node), None) is not None
    )


def _paths(program: Program, node: ast.AST, names: re.Pattern[str]) -> set[str]:
    calls = [
        call for call in nodes_in(node, ast.Call) if names.search(last_name(call.func).lower())
    ]
    return {path for call in calls for path in _paths_of(program, call)}


def _paths_of(program: Program, call: ast.Call) -> set[str]:
    """The files that it is given, as they are written; and their names, as far as known."""
    arguments = [*call.args, *(keyword.value for keyword in call.keywords)]
    is_of_library = program.name_of(call.func).startswith(_LIBRARIES)
    written = {ast.unparse(value) for value in arguments if not isinstance(value, ast.Constant)}
    constants = {
        value.value
        for expression in arguments
        for value in program.values(expression)
        if isinstance(value, ConstantValue) and isinstance(value.value, str)
    }
    return {text for text in written if is_of_library or _OF_FILES.search(text.lower())} | {
        text for text in constants if "." in text
    }
