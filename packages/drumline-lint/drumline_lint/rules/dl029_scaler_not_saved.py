"""DL029: a checkpoint has the optimizer's state and not the scaler's."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from drumline_lint.findings import Finding, rule
from drumline_lint.flow.loops import loop_around
from drumline_lint.program.imports import with_imported
from drumline_lint.program.program import Program
from drumline_lint.program.queries import cached_query
from drumline_lint.program.tree import enclosing_function, last_name, nodes_in, parent_of
from drumline_lint.program.value import Class
from drumline_lint.reading.source import Source
from drumline_lint.training.saves import saves
from drumline_lint.training.steps import SCALERS, is_method, is_optimizer, is_scaler
from drumline_lint.training.tensors import passed

RULE = rule("DL029", in_tests=False)
DEEPEST = 4
COPIES = ("asdict", "vars", "dict", "copy", "deepcopy")


def check(program: Program, source: Source) -> Iterator[Finding]:
    """Saves whose contents are written out, in a program that steps by a scaler."""
    every = list(saves(program, source))
    scaler = _scaler_in_use(program, source) if every else ""
    places: dict[ast.expr, ast.expr] = {}
    for save in every if scaler else ():
        for content in _contents(program, save.what):
            is_short = _has_optimizer(program, content) and not _has_scaler(program, content)
            if is_short and not program.source_of(content).is_test:
                if content not in places or enclosing_function(content) is enclosing_function(
                    save.call
                ):
                    places[content] = _where(program, save.call, content)
                break
    for where in dict.fromkeys(places.values()):
        yield RULE.at(
            source, where, f"what is saved has the optimizer's state, and not that of {scaler}"
        )


def _where(program: Program, save: ast.Call, content: ast.expr) -> ast.expr:
    """At the save, or at what is handed to the function that saves, if both are in one file."""
    is_near = enclosing_function(content) is enclosing_function(save)
    return save if is_near or program.source_of(content) is not program.source_of(save) else content


def _scaler_in_use(program: Program, saving: Source) -> str:
    """As it is written where it makes a step, in a file that imports the one that saves, or is
    imported by it."""
    for source, scaler in _scalers_in_use(program):
        if saving in with_imported(program, [source]) or source in with_imported(program, [saving]):
            return scaler
    return ""


@cached_query
def _scalers_in_use(program: Program) -> list[tuple[Source, str]]:
    scalers = []
    for source in program.sources:
        for call in program.index(source).calls.get("step", ()) if "caler" in source.text else ():
            owner = call.func.value if isinstance(call.func, ast.Attribute) else None
            made = program.made(owner, *SCALERS)
            is_new = bool(made) and all(_is_made_again(program, result.call) for result in made)
            if owner is not None and made and is_scaler(program, owner) and not is_new:
                scalers.append((source, source.code(owner)))
                break
    return scalers


def _is_made_again(program: Program, call: ast.Call) -> bool:
    """By a function that runs once an epoch: what a scaler has learnt is lost in any case."""
    function = enclosing_function(call)
    statement = parent_of(call)
    targets = statement.targets if isinstance(statement, ast.Assign) else []
    if function is None or not all(isinstance(target, ast.Name) for target in targets):
        return False
    return any(loop_around(caller) is not None for caller in program.callers(function))


def _contents(program: Program, expression: ast.expr | None, depth: int = 0) -> Iterator[ast.expr]:
    """The dicts, or calls of a class with named values, that a saved expression may be."""
    if depth > DEEPEST or expression is None:
        return
    if isinstance(expression, ast.Dict):
        yield expression
    elif isinstance(expression, ast.Call):
        name = last_name(expression.func)
        if name in COPIES and expression.args:
            yield from _contents(program, expression.args[0], depth + 1)
        elif name == "dict" or any(
            isinstance(value, Class) for value in program.values(expression.func)
        ):
            yield expression
        else:
            function = program.function_of(expression)
            for statement in nodes_in(function, ast.Return) if function is not None else ():
                yield from _contents(program, statement.value, depth + 1)
    elif isinstance(expression, ast.Name) and not _is_added_to(program, expression):
        for value in (*program.assigned(expression), *passed(program, expression)):
            yield from _contents(program, value, depth + 1)


def _is_added_to(program: Program, name: ast.Name) -> bool:
    """`state["scaler"] = ...`, `state.update(...)`: what is in it is not all in one place."""
    around = enclosing_function(name) or program.source_of(name).tree
    for node in nodes_in(around, ast.Subscript, ast.Call):
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
            if last_name(node.value) == name.id:
                return True
        elif isinstance(node, ast.Call) and is_method(node, "update", "setdefault"):
            assert isinstance(node.func, ast.Attribute)
            if last_name(node.func.value) == name.id:
                return True
    return False


def _parts(content: ast.expr) -> list[tuple[str, ast.expr]] | None:
    if isinstance(content, ast.Dict):
        if any(key is None for key in content.keys):
            return None
        return [
            (str(getattr(key, "value", "")), value)
            for key, value in zip(content.keys, content.values, strict=True)
        ]
    assert isinstance(content, ast.Call)
    if any(keyword.arg is None for keyword in content.keywords) or content.args:
        return None
    return [(keyword.arg or "", keyword.value) for keyword in content.keywords]


def _has_optimizer(program: Program, content: ast.expr) -> bool:
    values = [value for _, value in _parts(content) or ()]
    behind = [
        origin
        for value in values
        if isinstance(value, ast.Name)
        for origin in program.assigned(value)
    ]
    return any(
        is_method(call, "state_dict")
        and isinstance(call.func, ast.Attribute)
        and is_optimizer(program, call.func.value)
        for value in (*values, *behind)
        for call in nodes_in(value, ast.Call)
    )


def _has_scaler(program: Program, content: ast.expr) -> bool:
    """By a name in it; a value that is a call of something else may hold anything, and is taken as
    it is named."""
    for key, value in _parts(content) or ():
        words = [key, *(last_name(name) for name in nodes_in(value, ast.Name, ast.Attribute))]
        if any("scal" in word.lower() or "amp" in word.lower().split("_") for word in words):
            return True
    return False
