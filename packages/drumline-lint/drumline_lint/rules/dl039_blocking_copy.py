"""DL039: memory is pinned, but the copy still waits."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from drumline_lint.findings import Edit, Finding, rule
from drumline_lint.program.calls import argument, has_unknown_arguments
from drumline_lint.program.origins import written_values
from drumline_lint.program.program import Program
from drumline_lint.program.tree import Binding, ancestors, end_position, last_name, nodes_in
from drumline_lint.reading.source import Source
from drumline_lint.training.loaders import given, loaders, loaders_behind
from drumline_lint.training.models import moves_to_gpu

RULE = rule("DL039")


def check(program: Program, source: Source) -> Iterator[Finding]:
    """Copies of what a loader yields, where the loader pins."""
    calls = program.index(source).calls
    for call in sorted(
        [*calls.get("to", ()), *calls.get("cuda", ())], key=lambda move: move.lineno
    ):
        if (
            not isinstance(call.func, ast.Attribute)
            or not _waits(call)
            or not moves_to_gpu(program, call)
        ):
            continue
        copied = call.func.value
        if _is_of_one_batch(program, call):
            continue
        if any(_is_pinned(program, loader) for loader in loaders_behind(program, copied)):
            yield RULE.at(
                source,
                call,
                f"{source.code(copied)} is in pinned memory, but {source.code(call)} waits until it is copied",
                edits=_fixed_file(program, source, call),
            )


def _waits(call: ast.Call) -> bool:
    """Whether non_blocking is certainly not given, by name or by position."""
    return (
        argument(call, None, "non_blocking") is None
        and len(call.args) < 2
        and not has_unknown_arguments(call)
    )


def _is_of_one_batch(program: Program, call: ast.Call) -> bool:
    """In a loop over batches that is always left after the first: one copy is not worth a word."""
    return any(
        isinstance(outer.body[-1], ast.Break | ast.Return)
        and not nodes_in(outer, ast.Continue)
        and bool(loaders(program, outer.iter))
        for outer in ancestors(call)
        if isinstance(outer, ast.For)
    )


def _is_pinned(program: Program, loader: ast.Call) -> bool:
    for origin in written_values(program, given(loader, "pin_memory")):
        if isinstance(origin, ast.Constant) and origin.value is True:
            return True
        if isinstance(origin, ast.Compare | ast.Call) and "cuda" in ast.unparse(origin):
            return True
    return False


def _fixed_file(program: Program, source: Source, call: ast.Call) -> list[Edit]:
    """The argument behind the last one, if what is copied is a tensor for sure."""
    assert isinstance(call.func, ast.Attribute)
    if not _is_part(program, call.func.value):
        return []
    arguments = [*call.args, *(keyword.value for keyword in call.keywords)]
    end = end_position(call)
    place = max(map(end_position, arguments)) if arguments else (end[0], end[1] - 1)
    behind = source.between(place, end)
    if behind.replace(",", "").split() != [")"]:
        return []  # a bracket around the last argument, or a comment behind it
    return [
        Edit(
            start=place, end=place, text=", non_blocking=True" if arguments else "non_blocking=True"
        )
    ]


def _is_part(program: Program, copied: ast.expr) -> bool:
    """Of a batch that is taken apart; a whole one may be of a class whose `.to` knows no such
    argument."""
    if isinstance(copied, ast.Subscript):
        return True
    bindings = program.bindings(copied) if isinstance(copied, ast.Name) else []
    return bool(bindings) and all(
        binding.kind == "each" and len(binding.path) > _counted(binding) for binding in bindings
    )


def _counted(binding: Binding) -> int:
    """How deep the whole batch is: one deeper by `enumerate`."""
    over = binding.value
    depth = 0
    while (
        isinstance(over, ast.Call)
        and last_name(over.func) in ("enumerate", "zip", "tqdm")
        and over.args
    ):
        depth += last_name(over.func) != "tqdm"
        over = over.args[0]
    return depth
