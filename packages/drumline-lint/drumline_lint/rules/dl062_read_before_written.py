"""DL062: ranks read a file that rank 0 may still be writing."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from drumline_lint.findings import Finding, rule
from drumline_lint.flow.collectives import collectives_in
from drumline_lint.flow.conditions import rank_tests, rank_tests_at, rest_of_block
from drumline_lint.flow.guards import is_main_only
from drumline_lint.program.calls import argument
from drumline_lint.program.imports import connected
from drumline_lint.program.origins import parts
from drumline_lint.program.program import Program
from drumline_lint.program.tree import dotted, last_name, nodes_in
from drumline_lint.reading.source import Source
from drumline_lint.training.saves import saves

RULE = rule("DL062")
_WRITING = re.compile(r"save|dump|write|download|urlretrieve|extract|to_csv|to_parquet")
_READING = re.compile(r"load|open|read|from_file|from_pretrained|from_disk|loadtxt|memmap")
_OF_FILES = re.compile(r"path|file|dir|folder|ckpt|checkpoint|cache|dest|archive")
_LOCAL = ("/tmp", "/dev/shm", "/local")  # noqa: S108
_WAITING = re.compile(r"barrier|wait|sync|broadcast|gather|reduce")


def check(program: Program, source: Source) -> Iterator[Finding]:
    """`if rank == 0: save(path)`, then `load(path)` on all ranks with nothing between them."""
    for branch in program.index(source).every(ast.If):
        tests = rank_tests(program, branch.test)
        if not any(test.is_main for test in tests) or branch.orelse or _waits(program, branch):
            continue
        written = _paths(branch, _WRITING)
        for call in _reads_after(program, branch) if written else ():
            is_for_all = not set(rank_tests_at(program, call)) - set(rank_tests_at(program, branch))
            if is_for_all and not written.isdisjoint(_paths_of(call)):
                message = (
                    f"every rank comes to {source.code(call.func)} without waiting for rank 0, "
                    f"which writes the file ({source.where(branch)})"
                )
                yield RULE.at(source, call, message)
    yield from _of_one_node(program, source)


def _of_one_node(program: Program, source: Source) -> Iterator[Finding]:
    """A file that only rank 0 saves, on a disk that only its node has, and that every rank loads."""
    saved = [
        save.path
        for file in connected(program, source)
        for save in saves(program, file)
        if is_main_only(frozenset(rank_tests_at(program, save.call)))
    ]
    folders = {dotted(path) for path in saved if path is not None and _is_local(program, path)}
    for call in program.calls(source, "torch.load"):
        path = argument(call, 0, "f")
        is_same = path is not None and bool(dotted(path)) and dotted(path) in folders
        if is_same and not any(rank_tests_at(program, call)):
            message = (
                f"only rank 0 saves {dotted(path) if path else ''}, on the disk of its own node: "
                "ranks of other nodes do not have it"
            )
            yield RULE.at(source, call, message, fix="save to a folder that all nodes share")


def _is_local(program: Program, path: ast.expr) -> bool:
    texts = [part.value for part in parts(program, path) if isinstance(part, ast.Constant)]
    return any(isinstance(text, str) and text.startswith(_LOCAL) for text in texts)


def _reads_after(program: Program, branch: ast.If) -> Iterator[ast.Call]:
    for statement in rest_of_block(branch):
        if _waits(program, statement):
            return
        for call in nodes_in(statement, ast.Call):
            if _READING.search(last_name(call.func).lower()):
                yield call


def _waits(program: Program, node: ast.AST) -> bool:
    names = [last_name(call.func).lower() for call in nodes_in(node, ast.Call)]
    is_named = any(_WAITING.search(name) for name in names)
    return is_named or next(collectives_in(program, node), None) is not None


def _paths(node: ast.AST, names: re.Pattern[str]) -> set[str]:
    calls = [
        call for call in nodes_in(node, ast.Call) if names.search(last_name(call.func).lower())
    ]
    return {path for call in calls for path in _paths_of(call)}


def _paths_of(call: ast.Call) -> set[str]:
    """The names and texts of files that it is given, as they are written."""
    arguments = [*call.args, *(keyword.value for keyword in call.keywords)]
    names = {dotted(value) for value in arguments}
    return {name for name in names if _OF_FILES.search(name.lower())} | {
        value.value
        for value in arguments
        if isinstance(value, ast.Constant) and isinstance(value.value, str) and "." in value.value
    }
