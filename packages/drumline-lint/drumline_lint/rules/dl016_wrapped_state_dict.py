"""DL016: what is saved has the wrapper's name in every key."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from drumline_lint.findings import Edit, Finding, Severity, rule
from drumline_lint.flow.conditions import held_conditions
from drumline_lint.flow.guards import is_single_process
from drumline_lint.program.names import DDP, FSDP
from drumline_lint.program.origins import MOST_PARTS, parts, previous_values, written_values
from drumline_lint.program.program import Program
from drumline_lint.program.queries import cached_query
from drumline_lint.program.tree import (
    ancestors,
    called_name,
    end_position,
    last_name,
    nodes_in,
    owner_of,
    parent_of,
)
from drumline_lint.reading.source import Source
from drumline_lint.training.saves import saves
from drumline_lint.training.steps import is_method

RULE = rule("DL016")
# `module.` is often cut off by hand, also by its length.
_STRIPPING = re.compile(
    r"\[7:\]|(?:len|replace|removeprefix|lstrip|split)\([\"']module|consume_prefix_in_state"
)

_OTHER_STATES = ("optim", "sched", "scaler", "sampler", "loader")
# Methods that give the model that they are called on.
_GIVING_MODEL = ("to", "cuda", "cpu", "train", "eval", "half", "float", "bfloat16")


def check(program: Program, source: Source) -> Iterator[Finding]:
    """Calls of it in this file that end in a save of any file."""
    for call in program.index(source).calls.get("state_dict", ()):
        model = owner_of(call)
        if model is None or call not in _saved(program):
            continue
        written = source.code(model)
        if program.made(model, DDP) and not _is_unwrapped(program, model):
            is_loaded = _loads_plain(program) and _is_read(program, _key_of(call))
            yield RULE.at(
                source,
                call,
                f"{written} is wrapped: the keys of {written}.state_dict() all begin with `module.`",
                fix=f"save `{written}.module.state_dict()`",
                edits=[] if _expects_prefix(program) else _edits(program, model),
                severity=None if is_loaded else Severity.NOTE,
            )
        elif _is_compiled(program, model):
            message = f"{written} is compiled: all keys of its state begin with `_orig_mod.`"
            fix = "save the state of the model that was given to torch.compile"
            is_known = any("_orig_mod" in file.text for file in program.sources)
            if not is_known and _loads_plain(program) and _loads_other(program, model):
                yield RULE.at(source, call, message, fix=fix)


@cached_query
def _saved(program: Program) -> set[ast.expr]:
    """All calls of `.state_dict()` whose result is saved, in all given files."""
    every = [save for source in program.sources for save in saves(program, source)]
    return {
        part
        for save in every
        for part in parts(program, save.what)
        if isinstance(part, ast.Call) and is_method(part, "state_dict")
    }


def _is_unwrapped(program: Program, model: ast.expr) -> bool:
    """Whether something takes, or may take, the model out of its wrapper, or there is one
    process."""
    is_tried = any(isinstance(outer, ast.ExceptHandler) for outer in ancestors(model))
    if (
        is_tried
        or program.made(model, *FSDP)  # by a setting, and its keys have no prefix
        or is_single_process(program, model)
        or any(_unwraps(part) for part in parts(program, model))
    ):
        return True
    names = {
        part for test, _ in held_conditions(program, model) for part in ast.unparse(test).split("(")
    }
    return any(name.strip() in ("isinstance", "hasattr", "not isinstance") for name in names)


def _unwraps(part: ast.expr) -> bool:
    if isinstance(part, ast.Attribute) and part.attr in ("module", "_orig_mod"):
        return True
    name = called_name(part).lower() if isinstance(part, ast.Call) else ""
    return name == "getattr" or "unwrap" in name


def _key_of(call: ast.Call) -> str:
    """Under which it is saved, if in a dictionary that is written out."""
    saved = parent_of(call)
    entries = zip(saved.keys, saved.values, strict=True) if isinstance(saved, ast.Dict) else ()
    keys = [key.value for key, value in entries if value is call and isinstance(key, ast.Constant)]
    return str(keys[0]) if keys else ""


@cached_query
def _is_read(program: Program, key: str) -> bool:
    """Whether some file takes a state out by this key, or loads a file as it is."""
    if not key:
        return any(_is_whole_file(program, call) for call in _loads(program))
    reading = re.compile(rf"[\[(]\s*[\"']{re.escape(key)}[\"']")
    return any(reading.search(source.text) for source in program.sources)


def _is_whole_file(program: Program, load: ast.Call) -> bool:
    """Whether what is loaded is no part of a file, and not written anew key by key."""
    states = [origin for state in load.args for origin in written_values(program, state)]
    return any(
        not isinstance(state, ast.Subscript | ast.Dict | ast.DictComp)
        and not (isinstance(state, ast.Call) and called_name(state) not in ("load", "load_file"))
        for state in states
    )


def _loads_plain(program: Program) -> bool:
    """Whether states are loaded, and none with the wrapper's name."""
    return bool(_loads(program)) and not _expects_prefix(program)


@cached_query
def _expects_prefix(program: Program) -> bool:
    """Whether a wrapped model loads a state, or the prefix is cut off."""
    owners = [call.func for call in _loads(program)]
    is_wrapped = any(
        isinstance(owner, ast.Attribute) and program.made(owner.value, DDP) for owner in owners
    )
    return is_wrapped or any(_STRIPPING.search(source.text) for source in program.sources)


def _loads(program: Program) -> list[ast.Call]:
    """What loads the state of a model."""
    indexes = [program.index(source) for source in program.sources]
    calls = [call for index in indexes for call in index.calls.get("load_state_dict", ())]
    owners = [(call, ast.unparse(call.func).lower()) for call in calls]
    return [call for call, owner in owners if not any(word in owner for word in _OTHER_STATES)]


def _is_compiled(program: Program, model: ast.expr) -> bool:
    """Whether `torch.compile` made it, perhaps inside DDP; not the model inside a DDP that is
    compiled."""
    if isinstance(model, ast.Attribute) and model.attr == "module":
        model = model.value
        if program.made(model, "torch.compile"):
            return False
    every = list(parts(program, model))
    return not any(last_name(part) == "_orig_mod" for part in every) and any(
        program.name_of(call.func) == "torch.compile" for call in _makers(program, model)
    )


def _makers(program: Program, model: ast.expr) -> list[ast.Call]:
    """The calls that give the model itself, also inside DDP: not those that give what was made of
    it, as a scheduler."""
    makers: list[ast.Call] = []
    pending = [model]
    while pending and len(makers) < MOST_PARTS:
        origins = written_values(program, pending.pop())
        calls = [call for call in origins if isinstance(call, ast.Call) and call not in makers]
        makers += calls
        for call in calls:
            pending += _passed_through(program, call)
    return makers


def _passed_through(program: Program, call: ast.Call) -> list[ast.expr]:
    """Where the model comes from that a call gives: `model.to(device)`, `DDP(model)`,
    `accelerator.prepare(model)`, or a function of the given files."""
    function = program.function_of(call)
    if function is not None:
        values = [statement.value for statement in nodes_in(function, ast.Return)]
        return [value for value in values if value is not None]
    name = called_name(call)
    if program.name_of(call.func) in (DDP, *FSDP) or name in ("prepare", "DataParallel"):
        return list(call.args)
    owner = owner_of(call)
    return [owner] if owner is not None and name in _GIVING_MODEL else []


def _loads_other(program: Program, model: ast.expr) -> bool:
    """Whether a model that is made of the same class, and not compiled, loads a state."""
    for call in _loads(program):
        owner = owner_of(call)
        is_plain = owner is not None and not _is_compiled(program, owner)
        if is_plain and program.values(owner) & program.values(model):
            return True
    return False


def _edits(program: Program, model: ast.expr) -> list[Edit]:
    """Where it is wrapped whatever happens. A function's parameter may be given something else."""
    values = previous_values(program, model)
    if isinstance(model, ast.Name):
        values = [binding.value for binding in program.bindings(model)]
    is_certain = bool(values) and all(
        isinstance(value, ast.Call) and program.name_of(value.func) == DDP for value in values
    )
    end = end_position(model)
    return [Edit(start=end, end=end, text=".module")] if is_certain else []
