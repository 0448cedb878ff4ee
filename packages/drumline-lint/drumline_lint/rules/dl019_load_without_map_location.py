"""DL019: every rank loads onto the GPU that the file was saved from."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from drumline_lint.findings import Finding, Severity, rule
from drumline_lint.flow.distributed import is_of_ranks
from drumline_lint.flow.guards import guards, is_main_only, is_on_every_rank
from drumline_lint.program.calls import argument, has_unknown_arguments
from drumline_lint.program.imports import calls_near
from drumline_lint.program.program import Program
from drumline_lint.program.tree import enclosing_class, enclosing_function, parent_of
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
            yield RULE.at(source, call, message)


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
