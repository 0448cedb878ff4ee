"""DL019: every rank loads onto the GPU that the file was saved from."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from drumline_lint.findings import Finding, Severity, rule
from drumline_lint.flow.guards import guards, is_main_only, is_on_every_rank
from drumline_lint.program.calls import argument, has_unknown_arguments
from drumline_lint.program.origins import parts
from drumline_lint.program.program import Program
from drumline_lint.program.queries import cached_query
from drumline_lint.program.tree import (
    called_name,
    dotted,
    enclosing_class,
    enclosing_function,
    nodes_in,
    parent_of,
    position,
    scope_of,
    statement_of,
)
from drumline_lint.reading.source import Source
from drumline_lint.training.saves import is_in_memory, is_own, saves

RULE = rule("DL019", in_tests=False)
# Of what a run resumes from, and not of weights from elsewhere.
_WORDS = ("resume", "ckpt", "checkpoint", "snapshot", "last", "latest", "best")
_OPTIMIZERS = ("optim", "opt", "scaler")


def check(program: Program, source: Source) -> Iterator[Finding]:
    """Loads of a file that more than one process makes; a note where that is not seen."""
    for call in program.calls(source, "torch.load"):
        path = argument(call, 0, "f")
        is_alone = is_main_only(guards(program, call)) or _is_of_sample(program, call)
        is_own_file = is_in_memory(program, path) or is_own(program, path)
        if is_alone or is_own_file or _is_placed(call):
            continue
        what = "a file" if path is None else source.code(path)
        location = argument(call, 1, "map_location")
        if _is_first_gpu(location) and is_on_every_rank(program, call):
            message = f"every rank loads {what} onto the first GPU"
            yield RULE.at(source, call, message)
        elif not _is_placed_by(location):
            is_shown = _is_checkpoint(program, call) and is_on_every_rank(program, call)
            message = f"every rank loads {what} onto the GPU that it was saved from"
            severity = None if is_shown else Severity.NOTE
            yield RULE.at(source, call, message, severity=severity)


def _is_placed(call: ast.Call) -> bool:
    """`torch.load(path).cuda()`, options that may name a device, and `mmap`."""
    is_mapped = argument(call, None, "mmap") is not None
    method = parent_of(call)
    is_moved = isinstance(method, ast.Attribute) and method.attr in ("cuda", "to", "cpu")
    return is_moved or is_mapped or has_unknown_arguments(call)


def _is_placed_by(location: ast.expr | None) -> bool:
    return location is not None and not (
        isinstance(location, ast.Constant) and location.value is None
    )


def _is_first_gpu(location: ast.expr | None) -> bool:
    value = location.value if isinstance(location, ast.Constant) else None
    return value in ("cuda", "cuda:0")


def _is_checkpoint(program: Program, call: ast.Call) -> bool:
    """Whether states are restored from it in the same function, an optimizer's among them or from
    a path that says so, and this program saves states."""
    scope = scope_of(call)
    calls = nodes_in(scope, ast.Call)
    restored = [other for other in calls if called_name(other) == "load_state_dict"]
    if not any(position(other) >= position(statement_of(call)) for other in restored):
        return False
    loads = [other for other in calls if called_name(other) == "load" and other is not call]
    if any(_is_placed_by(argument(other, None, "map_location")) for other in loads):
        return False  # the other branch of a choice
    statement = statement_of(call)
    path = argument(call, 0, "f")
    words = f"{'' if path is None else ast.unparse(path)} {ast.unparse(statement)}".lower()
    owners = [dotted(other.func).lower() for other in restored]
    is_named = any(word in words for word in _WORDS)
    is_whole = any(word in owner for owner in owners for word in _OPTIMIZERS)
    if "sched" in words or "sampler" in words or all("sched" in owner for owner in owners):
        return False  # numbers, and no tensors
    return (is_named or is_whole) and _saves_states(program)


@cached_query
def _saves_states(program: Program) -> bool:
    """Whether states are saved, from a GPU for all that is seen."""
    contents = [save.what for source in program.sources for save in saves(program, source)]
    calls = [
        part for what in contents for part in parts(program, what) if isinstance(part, ast.Call)
    ]
    names = {called_name(call) for call in calls}
    return "state_dict" in names and "cpu" not in names


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
