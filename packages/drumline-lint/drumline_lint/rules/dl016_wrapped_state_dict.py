"""DL016: what is saved has the wrapper's name in every key.

The keys of a wrapped model begin with `module.`, those of a compiled one with `_orig_mod.`. That is
a mistake where a model without the wrapper loads them; a program may also cut the prefix off.
"""

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
    called_name,
    enclosing,
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
    """Calls of `model.state_dict()` in this file that end in a save of any file."""
    for call in program.index(source).calls.get("state_dict", ()):
        model = owner_of(call)
        if model is None or call not in _saved(program):
            continue

        if program.made(model, DDP) and not _is_unwrapped(program, model):
            yield _wrapped(program, source, call, model)
        elif _is_compiled(program, model) and _is_loaded_uncompiled(program, model):
            message = (
                f"{source.code(model)} is compiled: all keys of its state begin with `_orig_mod.`"
            )
            fix = "save the state of the model that was given to torch.compile"
            yield RULE.at(source, call, message, fix=fix)


def _wrapped(program: Program, source: Source, call: ast.Call, model: ast.expr) -> Finding:
    """The finding at a state with `module.` in its keys: `DDP(net).state_dict()`.

    It is a note if no other model is seen to load it.
    """
    written = source.code(model)
    is_loaded = _loads_plain(program) and _is_read(program, _key_of(call))
    return RULE.at(
        source,
        call,
        f"{written} is wrapped: the keys of {written}.state_dict() all begin with `module.`",
        fix=f"save `{written}.module.state_dict()`",
        edits=[] if _expects_prefix(program) else _edits(program, model),
        severity=None if is_loaded else Severity.NOTE,
    )


def _edits(program: Program, model: ast.expr) -> list[Edit]:
    """The fix, where the model is wrapped whatever happens: `model.module.state_dict()`.

    A function's parameter may be given something else, which has no `module`.
    """
    values = previous_values(program, model)
    if isinstance(model, ast.Name):
        values = [binding.value for binding in program.bindings(model)]

    is_certain = bool(values) and all(
        isinstance(value, ast.Call) and program.name_of(value.func) == DDP for value in values
    )
    end = end_position(model)
    return [Edit(start=end, end=end, text=".module")] if is_certain else []


# What is saved.


@cached_query
def _saved(program: Program) -> set[ast.expr]:
    """All calls of `.state_dict()` whose result is saved, in all given files.

    checkpoint = {"model": model.state_dict()}
    torch.save(checkpoint, path)
    """
    every = [save for source in program.sources for save in saves(program, source)]
    return {
        part
        for save in every
        for part in parts(program, save.what)
        if isinstance(part, ast.Call) and is_method(part, "state_dict")
    }


def _key_of(call: ast.Call) -> str:
    """Its key in what is written out: `model` of `{"model": net.state_dict()}`; else empty.

    Who loads the file names the same key, and so shows that it is this state.
    """
    saved = parent_of(call)
    if not isinstance(saved, ast.Dict):
        return ""

    for key, value in zip(saved.keys, saved.values, strict=True):
        if value is call and isinstance(key, ast.Constant):
            return str(key.value)
    return ""


# Whether the model is still in its wrapper.


def _is_unwrapped(program: Program, model: ast.expr) -> bool:
    """Whether something takes, or may take, the model out of its wrapper, or there is one process.

    if isinstance(model, DDP):
        model = model.module
    """
    if program.made(model, *FSDP):  # by a setting, and its keys have no prefix
        return True
    if enclosing(model, ast.ExceptHandler) is not None or is_single_process(program, model):
        return True

    if any(_unwraps(part) for part in parts(program, model)):
        return True

    tests = [ast.unparse(test) for test, _ in held_conditions(program, model)]
    return any(test.startswith(("isinstance(", "hasattr(")) for test in tests)


def _unwraps(part: ast.expr) -> bool:
    """Whether this is what is inside a wrapper.

    Examples: `model.module`, `getattr(model, "module", model)`, `unwrap_model(model)`.
    """
    if isinstance(part, ast.Attribute):
        return part.attr in ("module", "_orig_mod")

    name = called_name(part).lower() if isinstance(part, ast.Call) else ""
    return name == "getattr" or "unwrap" in name


def _is_compiled(program: Program, model: ast.expr) -> bool:
    """Whether `torch.compile` made it, perhaps inside DDP.

    `compiled.module` is the model inside a DDP that is compiled, and is not compiled itself.
    """
    if isinstance(model, ast.Attribute) and model.attr == "module":
        model = model.value
        if program.made(model, "torch.compile"):
            return False

    if any(last_name(part) == "_orig_mod" for part in parts(program, model)):
        return False

    makers = _makers(program, model)
    return any(program.name_of(call.func) == "torch.compile" for call in makers)


def _makers(program: Program, model: ast.expr) -> list[ast.Call]:
    """The calls that give the model itself, also inside DDP.

    model = torch.compile(Net())
    model = DDP(model)  # both, not `optim.SGD(model.parameters())`
    """
    makers: list[ast.Call] = []
    pending = [model]
    while pending and len(makers) < MOST_PARTS:
        for origin in written_values(program, pending.pop()):
            if isinstance(origin, ast.Call) and origin not in makers:
                makers.append(origin)
                pending += _passed_through(program, origin)

    return makers


def _passed_through(program: Program, call: ast.Call) -> list[ast.expr]:
    """Where the model comes from that a call gives.

    Examples: `model.to(device)`, `DDP(model)`, `accelerator.prepare(model)`, or a function of the
    given files.
    """
    function = program.function_of(call)
    if function is not None:
        values = [statement.value for statement in nodes_in(function, ast.Return)]
        return [value for value in values if value is not None]

    name = called_name(call)
    if program.name_of(call.func) in (DDP, *FSDP) or name in ("prepare", "DataParallel"):
        return list(call.args)

    owner = owner_of(call)
    return [owner] if owner is not None and name in _GIVING_MODEL else []


# Who loads the state.


def _loads(program: Program) -> list[ast.Call]:
    """The calls that load the state of a model: `model.load_state_dict(state)`.

    Those of optimizers, schedulers and the like are told apart by their names.
    """
    loads = []
    for source in program.sources:
        for call in program.index(source).calls.get("load_state_dict", ()):
            written = ast.unparse(call.func).lower()
            if not any(word in written for word in _OTHER_STATES):
                loads.append(call)

    return loads


def _loads_plain(program: Program) -> bool:
    """Whether states are loaded, and none with the wrapper's name."""
    return bool(_loads(program)) and not _expects_prefix(program)


def _is_loaded_uncompiled(program: Program, model: ast.expr) -> bool:
    """Whether a model that is made of the same class, and not compiled, loads a state.

    Files that name `_orig_mod` know of the prefix.

    Net().load_state_dict(torch.load(path))
    """
    if not _loads_plain(program) or any("_orig_mod" in file.text for file in program.sources):
        return False

    for call in _loads(program):
        owner = owner_of(call)
        if owner is None or _is_compiled(program, owner):
            continue
        if program.values(owner) & program.values(model):
            return True

    return False


@cached_query
def _expects_prefix(program: Program) -> bool:
    """Whether a wrapped model loads a state, or the prefix is cut off.

    state = {name.replace("module.", ""): value for name, value in state.items()}
    """
    if any(_STRIPPING.search(source.text) for source in program.sources):
        return True

    return any(program.made(owner_of(call), DDP) for call in _loads(program))


@cached_query
def _is_read(program: Program, key: str) -> bool:
    """Whether some file takes a state out by this key, or loads a file as it is.

    model.load_state_dict(checkpoint["model"])
    """
    if not key:
        return any(_is_whole_file(program, call) for call in _loads(program))

    reading = re.compile(rf"[\[(]\s*[\"']{re.escape(key)}[\"']")
    return any(reading.search(source.text) for source in program.sources)


def _is_whole_file(program: Program, load: ast.Call) -> bool:
    """Whether what is loaded is no part of a file, and not written anew key by key.

    net.load_state_dict(torch.load(path))
    """
    states = [origin for state in load.args for origin in written_values(program, state)]
    return any(_is_of_file(state) for state in states)


def _is_of_file(state: ast.expr) -> bool:
    """`torch.load(path)`, or of unknown origin; not `checkpoint["model"]`."""
    if isinstance(state, ast.Call):
        return called_name(state) in ("load", "load_file")

    return not isinstance(state, ast.Subscript | ast.Dict | ast.DictComp)
