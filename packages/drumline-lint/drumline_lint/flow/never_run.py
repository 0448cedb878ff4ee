"""Code that no run comes to: functions of a script that nothing mentions, and what is behind a name
that nothing defines."""

from __future__ import annotations

import ast
import builtins

from drumline_lint.program.bindings import bindings_of
from drumline_lint.program.imports import any_text_near, connected
from drumline_lint.program.program import Program
from drumline_lint.program.queries import cached_query
from drumline_lint.program.tree import ancestors, block_of, enclosing_class
from drumline_lint.reading.source import Source

# With one of these a function may be called by a name that is not written out.
_CALLING_BY_NAME = ("globals()", "locals()", "Fire(", "getattr(self,", "sys.modules[")
_PLAIN_BASES = ("object", "abc.ABC", "torch.nn.Module", "torch.nn.modules.module.Module")


def is_never_run(program: Program, node: ast.AST) -> bool:
    if _is_behind_undefined_name(program, node):
        return True
    functions = [
        outer
        for outer in ancestors(node)
        if isinstance(outer, (ast.FunctionDef, ast.AsyncFunctionDef))
    ]
    return any(_is_unused(program, function) for function in functions)


def _is_behind_undefined_name(program: Program, node: ast.AST) -> bool:
    """`not_tested_yet` as a statement raises a NameError."""
    for inner in (node, *ancestors(node)):
        if isinstance(inner, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            return False
        block = block_of(inner) if isinstance(inner, ast.stmt) else []
        for statement in block[: block.index(inner)] if isinstance(inner, ast.stmt) else ():
            value = statement.value if isinstance(statement, ast.Expr) else None
            if isinstance(value, ast.Name) and _is_undefined(program, value):
                return True
    return False


def _is_undefined(program: Program, name: ast.Name) -> bool:
    source = program.source_of(name)
    imports = program.index(source).every(ast.ImportFrom)
    has_all = any(alias.name == "*" for statement in imports for alias in statement.names)
    is_bound = hasattr(builtins, name.id) or bindings_of(program, name) is not None
    return not (is_bound or has_all or source.is_notebook)


@cached_query
def _is_unused(program: Program, function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """A function of a script, or a private method, whose name nothing that may run with it has."""
    source = program.source_of(function)
    owner = enclosing_class(function)
    is_private = function.name.startswith("_") and not function.name.endswith("__")
    if function.decorator_list or source.is_notebook:
        return False
    if owner is None and not (_is_script(program, source)):
        return False
    if owner is not None and not (is_private and _has_plain_bases(program, owner)):
        return False
    is_called_by_name = any_text_near(program, source, *_CALLING_BY_NAME)
    names = _names_mentioned(program, connected(program, source))
    return function.name not in names and not is_called_by_name


def _is_script(program: Program, source: Source) -> bool:
    return "__main__" in source.text or bool(program.launches_of(source))


def _has_plain_bases(program: Program, owner: ast.ClassDef) -> bool:
    """Others may call methods by their names."""
    bases = [place for place in program.ancestry(owner) if isinstance(place, str)]
    return all(base in _PLAIN_BASES for base in bases)


@cached_query
def _names_mentioned(program: Program, component: frozenset[Source]) -> set[str]:
    names: set[str] = set()
    for source in component:
        index = program.index(source)
        names.update(name.id for name in index.every(ast.Name))
        names.update(attribute.attr for attribute in index.every(ast.Attribute))
        names.update(
            text.value for text in index.every(ast.Constant) if isinstance(text.value, str)
        )
        for statement in index.every(ast.ImportFrom):
            names.update(alias.name for alias in statement.names)
    return names
