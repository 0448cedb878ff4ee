"""DL014: every rank writes the same file."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from drumline_lint.findings import Finding, Severity, rule
from drumline_lint.flow.conditions import conditions
from drumline_lint.flow.distributed import is_of_ranks
from drumline_lint.program.calls import argument
from drumline_lint.program.names import DDP, FSDP
from drumline_lint.program.origins import parts
from drumline_lint.program.program import Program
from drumline_lint.program.tree import (
    called_name,
    enclosing_function,
    last_name,
    nodes_in,
    parent_of,
)
from drumline_lint.reading.source import Source
from drumline_lint.training.loaders import is_of_part
from drumline_lint.training.saves import Save, is_own, saves, severity_of_race

RULE = rule("DL014", in_tests=False)
_MODEL = re.compile(r"(^|_)(model|net|network|ddp|state_dict)$")
_WRITES = ("write", "writelines", "dump", "writerow", "writerows")
_GATHERED = (
    "gather the full state on every rank (get_model_state_dict with full_state_dict=True), "
    "then save under `if dist.get_rank() == 0:`"
)


def check(program: Program, source: Source) -> Iterator[Finding]:
    """Saves that all ranks come to, with a path that is the same on all."""
    is_sharded = next(program.all_calls(*FSDP), None) is not None
    functions = set()
    for save in saves(program, source):
        is_collective = is_sharded and last_name(save.call.func) == "save_pretrained"
        severity = severity_of_race(program, save.call)
        if severity is None or is_collective or is_own(program, save.path):
            continue  # of a sharded model, every rank must call it
        to = "the same file" if save.path is None else source.code(save.path)
        message = f"{source.code(save.call.func)} runs on every rank and writes {to}"
        is_shown = is_of_ranks(program, source) and (
            _is_of_model(program, save) or is_of_part(program, save.what)
        )
        function = enclosing_function(save.call)
        # The first save of a function stands for those after it.
        is_shown = is_shown and (function is None or function not in functions)
        functions.add(function)
        if not is_shown or _is_made_if_missing(program, save.call):
            severity = Severity.NOTE
        fix = _GATHERED if is_sharded else ""
        yield RULE.at(source, save.call, message, fix=fix, severity=severity)
    for call in _opened_for_writing(program, source):
        path = argument(call, 0, "file")
        is_raced = severity_of_race(program, call) is not None
        if is_raced and not is_own(program, path):
            to = "the same file" if path is None else source.code(path)
            message = f"every rank opens {to} for writing, and all write to it at the same time"
            is_part = is_of_ranks(program, source) and _writes_part(program, call)
            is_replaced = not _appends(call)
            severity = Severity.WARNING if is_part and is_replaced else Severity.NOTE
            yield RULE.at(source, call, message, severity=severity)


def _is_of_model(program: Program, save: Save) -> bool:
    """Whether a model, its state or that of an optimizer is in it; other things are small, or are
    prepared once."""
    name = called_name(save.call)
    if name in ("save_pretrained", "save_model") or save.what is None:
        return name in ("save_pretrained", "save_model")
    if name not in ("save", "save_file") or program.name_of(save.call.func).startswith("numpy."):
        return False
    if _MODEL.search(last_name(save.what).lower()) or program.made(save.what, DDP, *FSDP):
        return True
    return any(
        isinstance(part, ast.Call) and called_name(part) == "state_dict"
        for part in parts(program, save.what)
    )


def _is_made_if_missing(program: Program, call: ast.Call) -> bool:
    """`if not os.path.exists(path):`: what is computed once is there in most runs."""
    return any(
        called_name(question) in ("exists", "isfile", "is_file")
        for test, _ in conditions(program, call)
        for question in nodes_in(test, ast.Call)
    )


def _writes_part(program: Program, call: ast.Call) -> bool:
    """Whether what is written to an open file is of this rank's part of the data."""
    block = _block_of(call)
    writes = [inner for inner in nodes_in(block, ast.Call) if called_name(inner) in _WRITES]
    function = enclosing_function(call) or program.source_of(call).tree
    is_collected = bool(nodes_in(function, ast.For))  # not a number of the whole dataset
    return is_collected and any(
        is_of_part(program, write.args[0]) for write in writes if write.args
    )


def _appends(call: ast.Call) -> bool:
    """`open(path, "a")`: a line of each rank, and none is lost."""
    mode = argument(call, 1, "mode")
    return isinstance(mode, ast.Constant) and "a" in str(mode.value)


def _block_of(call: ast.Call) -> ast.AST:
    """The `with` that opens a file, or the call itself."""
    item = parent_of(call)
    block = None if item is None else parent_of(item)
    return block if isinstance(block, ast.With) else call


def _opened_for_writing(program: Program, source: Source) -> Iterator[ast.Call]:
    """`with open(path, "w") as file:` around what a program reads again."""
    for call in program.index(source).calls.get("open", ()):
        mode = argument(call, 1, "mode")
        is_writing = isinstance(mode, ast.Constant) and str(mode.value).startswith(("w", "x", "a"))
        calls = nodes_in(_block_of(call), ast.Call)
        is_dumped = any(program.name_of(inner.func) == "json.dump" for inner in calls)
        if is_writing and (is_dumped or _writes_part(program, call)):
            yield call
