"""DL019: every rank loads onto the GPU that the file was saved from."""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from collections.abc import Iterator

from drumline_lint.findings import Finding, Severity, rule
from drumline_lint.flow.guards import is_on_main_only
from drumline_lint.flow.hosts import is_started_alone
from drumline_lint.flow.never_run import is_never_run
from drumline_lint.flow.shown import is_shown_on_every_rank
from drumline_lint.program.calls import argument, has_unknown_arguments
from drumline_lint.program.names import STARTS
from drumline_lint.program.origins import parts
from drumline_lint.program.program import Program
from drumline_lint.program.queries import cached_query
from drumline_lint.program.tree import (
    enclosing_class,
    enclosing_function,
    last_name,
    nodes_in,
    parent_of,
    position,
    scope_of,
    statement_of,
)
from drumline_lint.program.value import ConstantValue
from drumline_lint.reading.source import Source
from drumline_lint.training.saves import Save, is_in_memory, is_own, saves

RULE = rule("DL019", in_tests=False)
# Of what a run resumes from, and not of weights from elsewhere.
_WORDS = ("resume", "ckpt", "checkpoint", "snapshot", "last", "latest", "best")


def check(program: Program, source: Source) -> Iterator[Finding]:
    """Loads of a file that more than one process makes."""
    for call in program.calls(source, "torch.load"):
        if _is_placed(program, call) or is_on_main_only(program, call):
            continue
        if is_never_run(program, call):
            continue
        path = argument(call, 0, "f")
        what = "a file" if path is None else source.code(path)
        if _is_of_ranks(program, call) and _is_checkpoint_of_run(program, call):
            message = f"every rank loads {what} onto the GPU that it was saved from"
            severity = Severity.NOTE if is_started_alone(program, source) else None
            yield RULE.at(source, call, message, severity=severity)
        else:
            message = f"{what} is loaded onto the device that it was saved from"
            yield RULE.at(source, call, message, severity=Severity.NOTE)


def _is_placed(program: Program, call: ast.Call) -> bool:
    """Whether the device does not matter, or is given."""
    path = argument(call, 0, "f")
    return (
        _has_map_location(program, call)
        or _is_of_sample(program, call)
        or is_in_memory(program, path)
        or is_own(program, path)
        or _is_saved_from_cpu(program, path)
        or _is_of_schedule(program, path)
        or _restores_schedule(call)
        or _is_moved(call)
    )


def _is_moved(call: ast.Call) -> bool:
    """`torch.load(path).cuda()`: a tensor, which is on its device at once."""
    method = parent_of(call)
    return isinstance(method, ast.Attribute) and method.attr in ("cuda", "to", "cpu")


def _is_of_schedule(program: Program, path: ast.expr | None) -> bool:
    """`scheduler.pt` has numbers and no tensors."""
    names = _file_names(program, path)
    return bool(names) and all("sched" in name or "args" in name for name in names)


def _restores_schedule(call: ast.Call) -> bool:
    """Whether a schedule or a sampler alone takes its state from it, until the name is given to
    another one."""
    statement = statement_of(call)
    targets = statement.targets if isinstance(statement, ast.Assign) else []
    names = {last_name(target) for target in targets}
    scope = scope_of(call)
    stores = [name for name in nodes_in(scope, ast.Name) if isinstance(name.ctx, ast.Store)]
    later = [position(name) for name in stores if name.id in names]
    end = min((place for place in later if place > position(call)), default=(sys.maxsize, 0))
    owners = [
        restoring.func.value
        for restoring in nodes_in(scope, ast.Call)
        if isinstance(restoring.func, ast.Attribute)
        and restoring.func.attr == "load_state_dict"
        and position(call) < position(restoring) < end
        and names & {name.id for name in nodes_in(restoring, ast.Name)}
    ]
    names_restored = [last_name(owner).lower() for owner in owners]
    return bool(owners) and all("sched" in name or "sampler" in name for name in names_restored)


def _is_checkpoint_of_run(program: Program, call: ast.Call) -> bool:
    """Whether a state is restored from it that this program saves, and so from a rank's GPU."""
    calls = nodes_in(scope_of(call), ast.Call)
    restores = any(last_name(candidate.func) == "load_state_dict" for candidate in calls)
    loads = [candidate for candidate in calls if last_name(candidate.func) == "load"]
    if any(_has_map_location(program, candidate) for candidate in loads):
        return False  # the other branch of a choice
    return restores and _is_named_so(program, call) and _saves_states(program)


def _is_named_so(program: Program, call: ast.Call) -> bool:
    path = argument(call, 0, "f")
    saved = _saves_by_file_name(program).keys()
    statement = statement_of(call)
    targets = statement.targets if isinstance(statement, ast.Assign) else []
    texts = [] if path is None else [program.source_of(call).code(path)]
    texts += [last_name(target) for target in targets]
    is_checkpoint = any(word in text.lower() for text in texts for word in _WORDS)
    return (
        is_checkpoint
        or not saved.isdisjoint(_file_names(program, path))
        or bool(_keys_read(call) & _keys_saved(program))
    )


def _keys_read(call: ast.Call) -> set[object]:
    """The keys by which the function takes the states out of what it loads."""
    statement = statement_of(call)
    targets = statement.targets if isinstance(statement, ast.Assign) else []
    names = {last_name(target) for target in targets}
    return {
        node.slice.value
        for node in nodes_in(scope_of(call), ast.Subscript)
        if isinstance(node.slice, ast.Constant)
        and isinstance(node.slice.value, str)
        and (node.value is call or last_name(node.value) in names)
    }


@cached_query
def _keys_saved(program: Program) -> set[object]:
    """The keys under which this program saves states."""
    contents = [save.what for source in program.sources for save in saves(program, source)]
    dictionaries = [
        part
        for content in contents
        for part in parts(program, content)
        if isinstance(part, ast.Dict)
    ]
    return {
        key.value
        for dictionary in dictionaries
        for key, value in zip(dictionary.keys, dictionary.values, strict=True)
        if isinstance(key, ast.Constant)
        and isinstance(value, ast.Call)
        and last_name(value.func) == "state_dict"
    }


def _is_of_ranks(program: Program, call: ast.Call) -> bool:
    """Whether every rank comes there, as far as known; also by what else its class does."""
    function = enclosing_function(call)
    owner = None if function is None else enclosing_class(function)
    if is_shown_on_every_rank(program, call):
        return True
    if function is not None and any(word in function.name for word in ("predict", "infer")):
        return False  # what one process does after the training
    calls = [] if owner is None else nodes_in(owner, ast.Call, into_functions=True)
    return any(program.name_of(candidate.func) in STARTS for candidate in calls)


@cached_query
def _saves_states(program: Program) -> bool:
    contents = [save.what for source in program.sources for save in saves(program, source)]
    return any(
        isinstance(part, ast.Call) and last_name(part.func) == "state_dict"
        for content in contents
        for part in parts(program, content)
    )


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
