"""DL014: every rank writes the same file."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from drumline_lint.findings import Finding, Severity, rule
from drumline_lint.flow.conditions import conditions
from drumline_lint.flow.guards import is_on_every_rank
from drumline_lint.flow.never_run import is_never_run
from drumline_lint.flow.paths import how_every_rank_gets_there
from drumline_lint.program.calls import argument
from drumline_lint.program.names import FSDP
from drumline_lint.program.origins import parts
from drumline_lint.program.program import Program
from drumline_lint.program.tree import (
    enclosing_class,
    enclosing_function,
    last_name,
    nodes_in,
    parent_of,
    statement_of,
)
from drumline_lint.reading.source import Source
from drumline_lint.training.saves import is_own, saves, severity_of_race

RULE = rule("DL014", in_tests=False)
_ITEM = re.compile(r"(^|_)(i|idx|index|batch|chunk|shard|part)(_|\d|$)")
_RANK = re.compile(r"(^|_)(rank|process_(idx|index|id)|proc_id|worker_id)$")
_GATHERED = (
    "gather the full state on every rank (get_model_state_dict with full_state_dict=True), "
    "then save under `if dist.get_rank() == 0:`"
)


def check(program: Program, source: Source) -> Iterator[Finding]:
    """Saves that all ranks come to, with a path that is the same on all."""
    is_sharded = next(program.all_calls(*FSDP), None) is not None
    for save in saves(program, source):
        is_collective = is_sharded and last_name(save.call.func) == "save_pretrained"
        if is_collective or is_own(program, save.path) or is_never_run(program, save.call):
            continue  # of a sharded model, every rank must call it
        if is_on_every_rank(program, save.call):
            is_mild = _is_made_if_missing(program, save.call) or _is_by_owner(program, save.path)
            to = "the same file" if save.path is None else source.code(save.path)
            how = how_every_rank_gets_there(program, save.call)
            through = f", {how}," if how else ""
            message = f"{source.code(save.call.func)} runs on every rank{through} and writes {to}"
            fix = _GATHERED if is_sharded else ""
            yield RULE.at(
                source,
                save.call,
                message,
                fix=fix,
                severity=Severity.NOTE if is_mild else severity_of_race(program, save.call),
            )
    for call in _opened_for_writing(program, source):
        path = argument(call, 0, "file")
        is_shared = not is_own(program, path) and not is_never_run(program, call)
        if is_shared and is_on_every_rank(program, call):
            to = "the same file" if path is None else source.code(path)
            message = f"every rank opens {to} for writing, and all write to it at the same time"
            is_json = _writes_json(program, call)
            severity = severity_of_race(program, call) if is_json else Severity.NOTE
            yield RULE.at(source, call, message, severity=severity)


def _is_by_owner(program: Program, path: ast.expr | None) -> bool:
    """Whether the path has the number of an item, and beside it ranks leave out the items of
    others: `if owner != rank: continue`."""
    every = list(parts(program, path))
    if not any(_ITEM.search(last_name(part).lower()) for part in every):
        return False
    functions = [enclosing_function(part) for part in every]
    places = {enclosing_class(function) or function for function in functions if function}
    return any(
        _leaves_out_others(branch)
        for place in places
        for branch in nodes_in(place, ast.If, into_functions=True)
    )


def _leaves_out_others(branch: ast.If) -> bool:
    test = branch.test
    if not isinstance(test, ast.Compare) or not isinstance(test.ops[0], ast.NotEq):
        return False
    is_by_rank = _RANK.search(last_name(test.comparators[0]).lower()) is not None
    return is_by_rank and isinstance(branch.body[0], ast.Continue)


def _writes_json(program: Program, call: ast.Call) -> bool:
    """A file that a program reads again; lines of a log that are there twice lose nothing."""
    block = statement_of(call)
    return any(program.name_of(inner.func) == "json.dump" for inner in nodes_in(block, ast.Call))


def _is_made_if_missing(program: Program, call: ast.Call) -> bool:
    """`if not os.path.exists(path):`: what is computed once is there in most runs."""
    return any(
        last_name(question.func) in ("exists", "isfile", "is_file")
        for test, _ in conditions(program, call)
        for question in nodes_in(test, ast.Call)
    )


def _opened_for_writing(program: Program, source: Source) -> Iterator[ast.Call]:
    """`with open(path, "w") as file:` around something that writes to it."""
    for call in program.index(source).calls.get("open", ()):
        mode = argument(call, 1, "mode")
        item = parent_of(call)
        block = None if item is None else parent_of(item)
        is_writing = isinstance(mode, ast.Constant) and str(mode.value).startswith(("w", "x", "a"))
        if is_writing and isinstance(block, ast.With) and _writes(program, block):
            yield call


def _writes(program: Program, block: ast.With) -> bool:
    """Lines, or JSON; `saves` has the other formats."""
    calls = nodes_in(block, ast.Call)
    is_json = any(program.name_of(call.func) == "json.dump" for call in calls)
    names = {last_name(call.func) for call in calls}
    return is_json or not names.isdisjoint({"write", "writerow", "writelines"})
