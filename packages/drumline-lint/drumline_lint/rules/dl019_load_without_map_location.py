"""DL019: every rank loads onto the GPU that the file was saved from."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator

from drumline_lint.findings import Finding, rule
from drumline_lint.flow.guards import is_on_main_only
from drumline_lint.program.calls import argument, has_unknown_arguments
from drumline_lint.program.origins import parts
from drumline_lint.program.program import Program
from drumline_lint.program.queries import cached_query
from drumline_lint.program.tree import enclosing_class, enclosing_function, last_name
from drumline_lint.program.value import ConstantValue
from drumline_lint.reading.source import Source
from drumline_lint.training.saves import Save, is_in_memory, is_own, saves

RULE = rule("DL019")


def check(program: Program, source: Source) -> Iterator[Finding]:
    """Loads of a file that more than one process makes."""
    for call in program.calls(source, "torch.load"):
        if (
            _has_map_location(program, call)
            or _is_of_sample(program, call)
            or is_on_main_only(program, call)
        ):
            continue
        path = argument(call, 0, "f")
        if not (
            is_in_memory(program, path)
            or is_own(program, path)
            or _is_saved_from_cpu(program, path)
        ):
            what = "a file" if path is None else source.code(path)
            message = f"every rank loads {what} onto the GPU that it was saved from"
            yield RULE.at(source, call, message)


def _has_map_location(program: Program, call: ast.Call) -> bool:
    """By an argument; one that is a name leaves it to the caller."""
    location = argument(call, 1, "map_location")
    if location is not None:
        return not isinstance(location, ast.Constant) or location.value is not None
    mapped = argument(call, None, "mmap")
    return has_unknown_arguments(call) or (
        mapped is not None and program.values(mapped) != {ConstantValue(False)}
    )


def _is_saved_from_cpu(program: Program, path: ast.expr | None) -> bool:
    """Whether something was moved to the CPU before every save to a file of that name."""
    saves_of_file = [
        save
        for name in _file_names(program, path)
        for save in _saves_by_file_name(program).get(name, ())
    ]
    return bool(saves_of_file) and all(
        isinstance(save.what, ast.Call) and last_name(save.what.func) == "cpu"
        for save in saves_of_file
    )


@cached_query
def _saves_by_file_name(program: Program) -> dict[str, list[Save]]:
    by_name: dict[str, list[Save]] = defaultdict(list)
    for save in (save for source in program.sources for save in saves(program, source)):
        for name in _file_names(program, save.path):
            by_name[name].append(save)
    return by_name


def _file_names(program: Program, path: ast.expr | None) -> set[str]:
    texts = [part.value for part in parts(program, path) if isinstance(part, ast.Constant)]
    return {text for text in texts if isinstance(text, str) and "." in text}


def _is_of_sample(program: Program, call: ast.Call) -> bool:
    """A dataset's files hold samples, which are not saved from a GPU."""
    function = enclosing_function(call)
    owner = None if function is None else enclosing_class(function)
    if owner is None:
        return function is not None and function.name == "__getitem__"
    bases = [place for place in program.ancestry(owner) if isinstance(place, str)]
    return any("Dataset" in name for name in (owner.name, *bases))
