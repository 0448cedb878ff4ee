"""DL019: every rank loads onto the GPU that the file was saved from."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from drumline_lint.findings import Finding, Severity, rule
from drumline_lint.flow.distributed import is_of_ranks
from drumline_lint.flow.guards import guards, is_main_only, is_on_every_rank
from drumline_lint.program.calls import argument, has_unknown_arguments
from drumline_lint.program.imports import calls_near
from drumline_lint.program.origins import parts, written_values
from drumline_lint.program.program import Program
from drumline_lint.program.tree import (
    called_name,
    enclosing_class,
    enclosing_function,
    nodes_in,
    parent_of,
)
from drumline_lint.reading.source import Source
from drumline_lint.training.saves import is_in_memory, is_own

RULE = rule("DL019", in_tests=False)


def check(program: Program, source: Source) -> Iterator[Finding]:
    """Loads of a file that more than one process makes."""
    for call in program.calls(source, "torch.load"):
        path = argument(call, 0, "f")
        is_alone = is_main_only(guards(program, call)) or _is_of_sample(program, call)
        is_own_file = is_in_memory(program, path) or is_own(program, path)
        if is_alone or is_own_file or _is_placed(call):
            continue
        what = "a file" if path is None else source.code(path)
        location = argument(call, 1, "map_location")
        if _is_first_gpu(program, source, location) and is_on_every_rank(program, call):
            message = f"every rank loads {what} onto the first GPU"
            severity = Severity.WARNING if is_of_ranks(program, source) else None
            yield RULE.at(source, call, message, severity=severity)
        elif not _is_placed_by(location):
            message = f"every rank loads {what} onto the GPU that it was saved from"
            severity = Severity.WARNING if _is_resumed(program, source, call) else None
            yield RULE.at(source, call, message, severity=severity)


def _is_resumed(program: Program, source: Source, call: ast.Call) -> bool:
    """Whether every rank loads what the program itself saves: a model or an optimizer, with the
    place of its tensors."""
    function = enclosing_function(call) or source.tree
    loads = [
        each
        for each in nodes_in(function, ast.Call)
        if "load_state_dict" in called_name(each) and _may_load(program, each, call)
    ]
    names = [name for load in loads for name in nodes_in(load.func, ast.Name)]
    is_loaded = any(program.bindings(name) for name in names)
    method = enclosing_function(call)
    owner = None if method is None else enclosing_class(method)
    is_part = owner is not None and program.is_module(owner)  # often of another program
    is_come_to = is_on_every_rank(program, call)
    is_run = is_of_ranks(program, source) and is_come_to and not is_part
    return is_loaded and is_run and _holds_state(program, source, argument(call, 0, "f"))


def _holds_state(program: Program, source: Source, path: ast.expr | None) -> bool:
    """Whether the program saves a state: to this path, where it is seen what it saves there."""
    saves = list(program.calls(source, "torch.save"))
    loaded = _paths(program, path)
    saves_there = [
        save
        for save in saves
        if isinstance(argument(save, 0, "obj"), ast.Dict)
        and not loaded.isdisjoint(_paths(program, argument(save, 1, "f")))
    ]
    saved = [argument(save, 0, "obj") for save in saves_there or saves]
    return any(what is not None and "state_dict" in ast.unparse(what) for what in saved)


def _paths(program: Program, path: ast.expr | None) -> set[str]:
    """How it is written where it comes from; a name of unknown origin may be any path."""
    origins = written_values(program, path)
    return {ast.unparse(origin) for origin in origins if not isinstance(origin, ast.Name)}


def _may_load(program: Program, load: ast.Call, file: ast.Call) -> bool:
    """Whether a state is of this file, unless it is known to be of another."""
    states = [part for state in load.args for part in parts(program, state)]
    calls = [part for part in states if isinstance(part, ast.Call)]
    files = [call for call in calls if program.name_of(call.func) == "torch.load"]
    return not files or file in files


def _is_placed(call: ast.Call) -> bool:
    """`torch.load(path).cuda()`, options that may name a device, `mmap`, and a schedule, which has
    no tensors."""
    is_mapped = argument(call, None, "mmap") is not None
    outer = parent_of(call)
    is_moved = isinstance(outer, ast.Attribute) and outer.attr in ("cuda", "to", "cpu")
    is_schedule = isinstance(outer, ast.Call) and "sched" in ast.unparse(outer.func).lower()
    return is_moved or is_mapped or is_schedule or has_unknown_arguments(call)


def _is_placed_by(location: ast.expr | None) -> bool:
    return location is not None and not (
        isinstance(location, ast.Constant) and location.value is None
    )


def _is_first_gpu(program: Program, source: Source, location: ast.expr | None) -> bool:
    """`"cuda:0"`, and `"cuda"`, the current one, where nothing chooses one."""
    value = location.value if isinstance(location, ast.Constant) else None
    is_current = value == "cuda" and not calls_near(program, source, "torch.cuda.set_device")
    return value == "cuda:0" or is_current


def _is_of_sample(program: Program, call: ast.Call) -> bool:
    """A dataset's files hold samples, which are not saved from a GPU; and what one process does
    after the training."""
    function = enclosing_function(call)
    if function is None:
        return False
    owner = enclosing_class(function)
    bases = [] if owner is None else [str(place) for place in program.ancestry(owner)]
    is_dataset = any("Dataset" in name for name in (owner.name if owner else "", *bases))
    return is_dataset or any(word in function.name for word in ("__getitem__", "predict", "infer"))
