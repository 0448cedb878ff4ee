"""Functions and classes that nothing in a program names, or that only one process runs."""

from __future__ import annotations

import ast
from collections import defaultdict
from typing import TypeAlias

from drumline_lint.flow.distributed import programs_of_ranks, run_by
from drumline_lint.program.imports import importers
from drumline_lint.program.program import Program
from drumline_lint.program.queries import cached_query
from drumline_lint.program.tree import nodes_in, source_of
from drumline_lint.reading.source import Source

Definition: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


@cached_query
def unused_lines(program: Program, source: Source) -> list[range]:
    """The lines of definitions that nothing names: of a file that other files import, where they are
    copied code, and of a file with code for `__main__`."""
    if source.is_notebook:
        return _replaced(program, source)
    if not importers(program, source):
        return _not_named(program, source)

    definitions = _definitions(program, source)
    names = _names(program)
    return [_lines(definition) for definition in definitions if definition.name not in names]


def _not_named(program: Program, source: Source) -> list[range]:
    """The lines of functions that a file which is started, and which no other imports, does not
    name."""
    tree = program.tree(source)
    names = _names_read(tree) | _names_in_any_file(tree)
    if "Fire" in names or not any(map(_is_for_main, tree.body)):
        return []

    unnamed = [each for each in _definitions(program, source) if each.name not in names]
    return [_lines(each) for each in unnamed if not isinstance(each, ast.ClassDef)]


@cached_query
def lines_of_one_process(program: Program, source: Source) -> list[range]:
    """The lines of definitions in a file of which programs with ranks import something, but not
    these: another program runs them, as one process."""
    if source in programs_of_ranks(program) or source not in _files_of_ranks(program):
        return []

    reached = _reached(program)
    definitions = _definitions(program, source)
    return [_lines(definition) for definition in definitions if definition not in reached]


def _replaced(program: Program, source: Source) -> list[range]:
    """The lines of definitions of a notebook that a later cell has again: a part of another
    example, which ends before that cell."""
    definitions = _definitions(program, source)
    last = {definition.name: definition for definition in definitions}
    return [_lines(each) for each in definitions if last[each.name] is not each]


def _definitions(program: Program, source: Source) -> list[Definition]:
    """Those at the top of a file; what a decorator may register is left out."""
    return [
        statement
        for statement in program.tree(source).body
        if isinstance(statement, Definition) and not statement.decorator_list
    ]


def _lines(definition: Definition) -> range:
    """From its `def` or `class` to its last line."""
    return range(definition.lineno, (definition.end_lineno or definition.lineno) + 1)


@cached_query
def _names(program: Program) -> set[str]:
    """All names that any file reads, imports or has as a text."""
    names: set[str] = set()
    for source in program.sources:
        tree = program.tree(source)
        names |= _names_read(tree) | _names_in_any_file(tree)

    return names


@cached_query
def _files_of_ranks(program: Program) -> set[Source]:
    """The files of which programs with ranks import something."""
    return run_by(program, programs_of_ranks(program))


@cached_query
def _reached(program: Program) -> set[Definition]:
    """The definitions that programs with ranks come to, by their names.

    From the code of `train.py`, which calls `train()`, to `train` of `engine.py`, to what this
    calls, and so on.
    """
    by_name, pending = _definitions_and_code(program)
    reached: set[Definition] = set()

    while pending:
        statement = pending.pop()
        here = _names_read(statement)
        anywhere = _names_in_any_file(statement)
        if _imports_every_name(program, source_of(statement)):
            anywhere |= here

        for name in by_name.keys() & (here | anywhere):
            for definition in by_name[name]:
                is_named = name in anywhere or source_of(definition) is source_of(statement)
                if is_named and definition not in reached:
                    reached.add(definition)
                    pending.append(definition)

    return reached


def _definitions_and_code(
    program: Program,
) -> tuple[dict[str, list[Definition]], list[ast.stmt]]:
    """Of the files of programs with ranks: the definitions of those that are imported, and the
    statements that are surely run."""
    main_files = programs_of_ranks(program)
    by_name: dict[str, list[Definition]] = defaultdict(list)
    code: list[ast.stmt] = []

    for source in _files_of_ranks(program):
        statements = program.tree(source).body
        if source in main_files:
            code += statements
            continue

        definitions = _definitions(program, source)
        for definition in definitions:
            by_name[definition.name].append(definition)

        remaining = [statement for statement in statements if statement not in definitions]
        code += [statement for statement in remaining if not _is_for_main(statement)]

    return by_name, code


def _is_for_main(statement: ast.stmt) -> bool:
    """`if __name__ == "__main__":`"""
    return isinstance(statement, ast.If) and "__name__" in ast.unparse(statement.test)


def _imports_every_name(program: Program, source: Source) -> bool:
    """`from train import *`"""
    return "*" in program.index(source).scopes[program.tree(source)].names


def _names_read(node: ast.AST) -> set[str]:
    """All names of a piece of code, without attributes."""
    return {name.id for name in nodes_in(node, ast.Name, into_functions=True)}


def _names_in_any_file(node: ast.AST) -> set[str]:
    """What may be of another file: imported names, attributes and texts."""
    names = {part.attr for part in nodes_in(node, ast.Attribute, into_functions=True)}

    for statement in nodes_in(node, ast.Import, ast.ImportFrom, into_functions=True):
        names.update(alias.name.rpartition(".")[2] for alias in statement.names)

    constants = nodes_in(node, ast.Constant, into_functions=True)
    texts = (constant.value for constant in constants)
    return names | {text for text in texts if isinstance(text, str) and text.isidentifier()}
