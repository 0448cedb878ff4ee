"""DL016: what is saved has the wrapper's name in every key."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence

from drumline_lint.findings import Edit, Finding, Severity, rule
from drumline_lint.flow.conditions import held_conditions
from drumline_lint.flow.single_process import says_distributed
from drumline_lint.program.names import DDP
from drumline_lint.program.origins import parts, previous_values
from drumline_lint.program.program import Program
from drumline_lint.program.queries import cached_query
from drumline_lint.program.tree import (
    ancestors,
    branches_of,
    dotted,
    enclosing_function,
    last_name,
    nodes_in,
    parent_of,
    position,
)
from drumline_lint.program.value import ConstantValue, Instance
from drumline_lint.reading.source import Source
from drumline_lint.training.saves import saves
from drumline_lint.training.steps import is_method

RULE = rule("DL016")
_LOADING = re.compile(r"load|resume|restore|restart", re.IGNORECASE)
# `module.` is often cut off by hand, also by its length.
_STRIPPING = re.compile(
    r"\[7:\]|(?:len|replace|removeprefix|lstrip|split)\([\"']module|consume_prefix_in_state"
)


def check(program: Program, source: Source) -> Iterator[Finding]:
    """Calls of it in this file that end in a save of any file."""
    for call in program.index(source).calls.get("state_dict", ()):
        model = call.func.value if isinstance(call.func, ast.Attribute) else None
        if model is not None and _is_wrapped(program, model) and call in _saved(program):
            written = source.code(model)
            is_loaded_so = _is_loaded_wrapped(program)
            is_loaded = _is_loaded(program, _key_of(call))
            as_well = ", and load it without the wrapper as well" if is_loaded_so else ""
            yield RULE.at(
                source,
                call,
                f"{written} is wrapped: the keys of {written}.state_dict() all begin with `module.`",
                fix=f"save `{written}.module.state_dict()`{as_well}",
                edits=[] if as_well else _edits(program, model),
                severity=Severity.NOTE if is_loaded_so or not is_loaded else None,
            )
        elif model is not None and _is_compiled(program, model) and call in _saved(program):
            yield from _loaded_plain(program, source, call, model)


def _is_compiled(program: Program, model: ast.expr) -> bool:
    """Whether `torch.compile` made it, perhaps inside DDP."""
    for part in parts(program, model):
        if last_name(part) == "_orig_mod" or "unwrap" in ast.unparse(part):
            return False
        if isinstance(part, ast.Call) and program.name_of(part.func) == "torch.compile":
            return True
    inner = model.value if isinstance(model, ast.Attribute) and model.attr == "module" else None
    return inner is not None and _is_compiled(program, inner)


def _loaded_plain(
    program: Program, source: Source, call: ast.Call, model: ast.expr
) -> Iterator[Finding]:
    """Reported where a model that is not compiled loads such a state."""
    if any("_orig_mod" in file.text for file in program.sources):
        return
    for file in program.sources:
        for loading in program.index(file).calls.get("load_state_dict", ()):
            owner = loading.func.value if isinstance(loading.func, ast.Attribute) else None
            is_model = owner is not None and any(
                isinstance(value, Instance) and value in program.values(model)
                for value in program.values(owner)
            )
            if owner is not None and is_model and not _is_compiled(program, owner):
                message = (
                    f"{source.code(model)} is compiled: all keys of its state begin with "
                    f"`_orig_mod.`, and {file.code(loading.func)} ({file.where(loading)}) has none"
                )
                fix = "save the state of the model that was given to torch.compile"
                yield RULE.at(source, call, message, fix=fix)
                return


@cached_query
def _saved(program: Program) -> set[ast.expr]:
    """All calls of `.state_dict()` whose result is saved, in all given files."""
    return {
        part
        for source in program.sources
        for save in saves(program, source)
        for part in parts(program, save.what)
        if isinstance(part, ast.Call) and is_method(part, "state_dict")
    }


def _is_wrapped(program: Program, model: ast.expr) -> bool:
    """Whether it is DDP's, and nothing on the way may have taken the model out of it."""
    if not program.made(model, DDP) or is_unwrapped(program, model):
        return False
    return not any(_unwraps(program, part) for part in parts(program, model))


def _key_of(call: ast.Call) -> str:
    """Under which it is saved, if in a dictionary that is written out."""
    saved = parent_of(call)
    entries = zip(saved.keys, saved.values, strict=True) if isinstance(saved, ast.Dict) else ()
    keys = [key.value for key, value in entries if value is call and isinstance(key, ast.Constant)]
    return str(keys[0]) if keys else ""


@cached_query
def _is_loaded(program: Program, key: str) -> bool:
    """Whether some file loads states, and takes one out by this key."""
    if not any("load_state_dict" in source.text for source in program.sources):
        return False
    reading = re.compile(rf"[\[(]\s*[\"']{re.escape(key)}[\"']")
    return not key or any(reading.search(source.text) for source in program.sources)


@cached_query
def _is_loaded_wrapped(program: Program) -> bool:
    """Whether the wrapper's name is expected where something is loaded: other keys would not fit
    there."""
    for source in program.sources:
        if _STRIPPING.search(source.text):
            return True
        for call in program.index(source).calls.get("load_state_dict", ()):
            if isinstance(call.func, ast.Attribute) and _is_wrapped(program, call.func.value):
                return True
        if any(_restores_wrapped(program, call) for call in program.calls(source, DDP)):
            return True
    return False


def _restores_wrapped(program: Program, wrapping: ast.Call) -> bool:
    """Whether the name of the wrapped model is given to a function that loads: `resume(model)`."""
    statement = parent_of(wrapping)
    targets = statement.targets if isinstance(statement, ast.Assign) else []
    names = {last_name(target) for target in targets}
    for call in nodes_in(
        enclosing_function(wrapping) or program.source_of(wrapping).tree, ast.Call
    ):
        arguments = [*call.args, *(keyword.value for keyword in call.keywords)]
        is_later = position(call) > position(wrapping)
        if (
            is_later
            and _LOADING.search(last_name(call.func))
            and names & set(map(last_name, arguments))
        ):
            return True
    return False


def _unwraps(program: Program, part: ast.expr) -> bool:
    if isinstance(part, ast.Attribute) and part.attr in ("module", "_orig_mod"):
        return True
    return isinstance(part, ast.Call) and program.name_of(part.func) == "getattr"


def _edits(program: Program, model: ast.expr) -> list[Edit]:
    """Where it is wrapped whatever happens. A function's parameter may be given something else."""
    if isinstance(model, ast.Name):
        origins = [
            binding.value if binding.kind == "assign" else None
            for binding in program.bindings(model)
        ]
    elif isinstance(model, ast.Attribute):
        origins = [*previous_values(program, model)]
    else:
        return []
    if not origins or not all(_is_wrapping(program, value) for value in origins):
        return []
    end = (model.end_lineno or model.lineno, model.end_col_offset or 0)
    return [Edit(start=end, end=end, text=".module")]


def _is_wrapping(program: Program, value: ast.expr | None) -> bool:
    return isinstance(value, ast.Call) and program.name_of(value.func) == DDP


_MODULE = "module"


def is_unwrapped(program: Program, model: ast.expr) -> bool:
    """Whether a condition on the model, or on there being several processes, says so at this
    place."""
    held = held_conditions(program, model)
    is_said = any(_says_unwrapped(program, test, holds, model) for test, holds in held)
    return is_said or _is_instead(model) or _is_other_branch(model)


def _says_unwrapped(program: Program, test: ast.expr, holds: bool, model: ast.expr) -> bool:
    """Where `isinstance(model, DDP)` or `hasattr(model, "module")` does not hold, or there is one
    process."""
    if not isinstance(test, ast.BoolOp) and says_distributed(program, test) is (not holds):
        return True
    if not isinstance(test, ast.Call) or len(test.args) != 2 or not dotted(model):
        return False
    name = program.name_of(test.func)
    if holds:
        is_other = name == "isinstance" and program.name_of(test.args[1]) != DDP
        return is_other and dotted(test.args[0]) == dotted(model)
    is_asked = name == "isinstance" or (
        name == "hasattr" and ConstantValue(_MODULE) in program.values(test.args[1])
    )
    return is_asked and dotted(test.args[0]) == dotted(model)


def _is_other_branch(model: ast.expr) -> bool:
    """`model.module` in the other branch of a condition: here it is not wrapped."""
    inner: ast.AST = model
    for outer in ancestors(model):
        other_branches: Sequence[ast.AST] = []
        if isinstance(outer, ast.If) and inner is not outer.test:
            other_branches = branches_of(outer, inner)[1]
        elif isinstance(outer, ast.IfExp):
            other_branches = [outer.body, outer.orelse]
        attributes = [node for part in other_branches for node in nodes_in(part, ast.Attribute)]
        if any(node.attr == _MODULE and dotted(node.value) == dotted(model) for node in attributes):
            return True
        inner = outer
    return False


def _is_instead(model: ast.expr) -> bool:
    """`try: model.module.state_dict()`, and in its `except` there is no such thing."""
    inner: ast.AST = model
    for outer in ancestors(model):
        if isinstance(outer, ast.Try) and isinstance(inner, ast.ExceptHandler):
            tried = [
                attribute for part in outer.body for attribute in nodes_in(part, ast.Attribute)
            ]
            if any(
                attribute.attr == _MODULE and dotted(attribute.value) == dotted(model)
                for attribute in tried
            ):
                return True
        inner = outer
    return False
