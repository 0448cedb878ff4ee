"""DL014: every rank writes the same file."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from drumline_lint.findings import Finding, Severity, rule
from drumline_lint.flow.guards import is_on_every_rank
from drumline_lint.flow.paths import how_every_rank_gets_there
from drumline_lint.program.calls import argument
from drumline_lint.program.names import FSDP
from drumline_lint.program.program import Program
from drumline_lint.program.tree import enclosing_function, last_name, nodes_in, parent_of
from drumline_lint.reading.source import Source
from drumline_lint.training.saves import is_own, saves

RULE = rule("DL014", in_tests=False)
_OF_DATA = ("numpy.", "pickle.", "cloudpickle.", "joblib.")
_GATHERED = (
    "gather the full state on every rank (get_model_state_dict with full_state_dict=True), "
    "then save under `if dist.get_rank() == 0:`"
)


def check(program: Program, source: Source) -> Iterator[Finding]:
    """Saves that all ranks come to, with a path that is the same on all."""
    is_sharded = next(program.all_calls(*FSDP), None) is not None
    for save in saves(program, source):
        is_collective = is_sharded and last_name(save.call.func) == "save_pretrained"
        if is_collective or is_own(program, save.path):
            continue  # of a sharded model, every rank must call it
        if is_on_every_rank(program, save.call):
            to = "the same file" if save.path is None else source.code(save.path)
            how = how_every_rank_gets_there(program, save.call)
            through = f", {how}," if how else ""
            message = f"{source.code(save.call.func)} runs on every rank{through} and writes {to}"
            fix = _GATHERED if is_sharded else ""
            # what is prepared once is often there before ranks start
            is_data = program.name_of(save.call.func).startswith(_OF_DATA)
            severity = Severity.WARNING if is_data else None
            yield RULE.at(source, save.call, message, fix=fix, severity=severity)
    for call in _opened_for_writing(program, source):
        path = argument(call, 0, "file")
        if is_on_every_rank(program, call) and not is_own(program, path):
            to = "the same file" if path is None else source.code(path)
            message = f"every rank opens {to} for writing, and all write to it at the same time"
            severity = Severity.NOTE if _is_fetched(call) else Severity.WARNING
            yield RULE.at(source, call, message, severity=severity)


def _opened_for_writing(program: Program, source: Source) -> Iterator[ast.Call]:
    """`with open(path, "w") as file:` around something that writes to it."""
    for call in program.index(source).calls.get("open", ()):
        mode = argument(call, 1, "mode")
        item = parent_of(call)
        block = None if item is None else parent_of(item)
        is_writing = isinstance(mode, ast.Constant) and str(mode.value).startswith(("w", "x", "a"))
        if is_writing and isinstance(block, ast.With) and _writes(program, block):
            yield call


def _is_fetched(call: ast.Call) -> bool:
    """By its function's name: what is downloaded is there already in most runs, and the same."""
    function = enclosing_function(call)
    name = "" if function is None else function.name.lower()
    return any(word in name for word in ("download", "cache", "extract", "fetch", "http"))


def _writes(program: Program, block: ast.With) -> bool:
    """Lines, or JSON; `saves` has the other formats."""
    calls = nodes_in(block, ast.Call)
    is_json = any(program.name_of(call.func) == "json.dump" for call in calls)
    names = {last_name(call.func) for call in calls}
    return is_json or not names.isdisjoint({"write", "writerow", "writelines"})
