"""Functions and classes that nothing in a program names."""

from __future__ import annotations

import ast

from drumline_lint.program.imports import importers
from drumline_lint.program.program import Program
from drumline_lint.program.queries import cached_query
from drumline_lint.reading.source import Source


@cached_query
def unused_lines(program: Program, source: Source) -> list[range]:
    """The lines of those at the top of a file that other files import: copied code that this
    program does not run. What a decorator may register is used."""
    if not importers(program, source) or source.is_notebook:
        return []
    return [
        range(definition.lineno, (definition.end_lineno or definition.lineno) + 1)
        for definition in program.tree(source).body
        if isinstance(definition, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        if not definition.decorator_list and definition.name not in _names(program)
    ]


@cached_query
def _names(program: Program) -> set[str]:
    """All names that any file reads, imports or has as a text."""
    names: set[str] = set()
    for source in program.sources:
        index = program.index(source)
        names.update(name.id for name in index.every(ast.Name))
        names.update(attribute.attr for attribute in index.every(ast.Attribute))
        for statement in (*index.every(ast.Import), *index.every(ast.ImportFrom)):
            names.update(alias.name.rpartition(".")[2] for alias in statement.names)
        texts = (constant.value for constant in index.every(ast.Constant))
        names.update(text for text in texts if isinstance(text, str) and text.isidentifier())
    return names
