"""DL053: only rank 0 updates or restores what every rank has a copy of."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from drumline_lint.findings import Finding, rule
from drumline_lint.flow.conditions import are_exclusive, rank_tests_at
from drumline_lint.flow.distributed import is_of_ranks
from drumline_lint.flow.loops import calls_made_in, is_backward
from drumline_lint.program.names import DDP, FSDP
from drumline_lint.program.program import Program
from drumline_lint.program.queries import cached_query
from drumline_lint.program.tree import (
    called_name,
    calls_beside,
    dotted,
    enclosing_function,
    is_after,
    last_name,
    nodes_in,
    owner_of,
    scope_of,
)
from drumline_lint.reading.source import Source
from drumline_lint.training.models import has_devices, wraps_any
from drumline_lint.training.steps import is_optimizer, is_scaler

RULE = rule("DL053", only_distributed=False)
_TRAINER = "pytorch_lightning.Trainer"
_SENDING = re.compile(
    r"broadcast|scatter|all_gather_object|sync_(?:param|model|module|state|weight)"
)


def check(program: Program, source: Source) -> Iterator[Finding]:
    """Steps and restored states under a condition that holds on rank 0 only, and what Lightning's
    `prepare_data` leaves in the module."""
    yield from _left_by_preparation(program, source)
    is_distributed = wraps_any(program) or "ccelerat" in source.text
    is_distributed = is_distributed and is_of_ranks(program, source)
    calls = program.index(source).calls if is_distributed else {}
    for call in (*calls.get("step", ()), *calls.get("load_state_dict", ())):
        what = _changed(program, call) if _is_on_main_only(program, call) else ""
        if what and not _is_sent_later(call) and not _is_called_elsewhere(program, call):
            yield RULE.at(source, call, f"only rank 0 {what}: the replicas differ from here on")
    names = {"update", "step", *_names_of_restoring(program)} if is_distributed else set()
    for call in (call for name in sorted(names & calls.keys()) for call in calls[name]):
        what = _changed_by_function(program, call)
        if what and not _is_sent_later(call) and not _is_called_elsewhere(program, call):
            message = (
                f"only rank 0 calls {source.code(call.func)}, which {what}: the replicas differ"
            )
            yield RULE.at(source, call, message)


@cached_query
def _names_of_restoring(program: Program) -> set[str]:
    """Of the functions that load a state."""
    calls = [
        call
        for source in program.sources
        for call in program.index(source).calls.get("load_state_dict", ())
    ]
    functions = [enclosing_function(call) for call in calls]
    return {function.name for function in functions if function is not None}


def _changed_by_function(program: Program, call: ast.Call) -> str:
    """What a function changes that only rank 0 calls, and that comes to it without a condition on
    ranks: a restored optimizer, and averaged weights that every rank uses afterwards."""
    if called_name(call) == "load_state_dict" or not _is_on_main_only(program, call):
        return ""
    function = program.function_of(call)
    if function is None:
        return ""
    owner = owner_of(call)
    is_average = owner is not None and "ema" in last_name(owner).lower().split("_")
    if is_average and called_name(call) in ("update", "step") and owner is not None:
        return f"updates {dotted(owner)}" if _is_used_by_all(program, call, owner) else ""
    for restoring in nodes_in(function, ast.Call):
        if (
            called_name(restoring) == "load_state_dict"
            and not any(rank_tests_at(program, restoring))
            and (what := _changed(program, restoring))
        ):
            return what
    return ""


def _is_used_by_all(program: Program, update: ast.Call, owner: ast.expr) -> bool:
    """Whether it is read on all ranks in the same function."""
    names = nodes_in(scope_of(update), ast.Name, ast.Attribute)
    uses = [name for name in names if dotted(name) == dotted(owner) and is_after(name, update)]
    return any(not any(rank_tests_at(program, use)) for use in uses)


def _left_by_preparation(program: Program, source: Source) -> Iterator[Finding]:
    """`self.vocabulary = ...` in `prepare_data`, which one process of each node runs."""
    is_several = any(has_devices(program, trainer) for trainer in program.all_calls(_TRAINER))
    for owner in program.index(source).every(ast.ClassDef) if is_several else ():
        is_of_lightning = any("Lightning" in str(base) for base in program.ancestry(owner)[1:])
        method = program.method(owner, "prepare_data") if is_of_lightning else None
        if method is None or method not in owner.body:
            continue
        attributes = nodes_in(owner, ast.Attribute, into_functions=True)
        of_self = [part for part in attributes if getattr(part.value, "id", "") == "self"]
        outside = [part for part in of_self if enclosing_function(part) not in (method, None)]
        stored = {
            part.attr
            for part in outside
            if isinstance(part.ctx, ast.Store)
            and getattr(enclosing_function(part), "name", "") != "__init__"
        }
        read = {part.attr for part in outside if isinstance(part.ctx, ast.Load)} - stored
        for part in of_self:
            is_left = enclosing_function(part) is method and isinstance(part.ctx, ast.Store)
            if is_left and part.attr in read:
                message = (
                    f"prepare_data runs in one process of each node: self.{part.attr} is not set "
                    "in the others"
                )
                yield RULE.at(source, part, message, fix="set it in setup")


def _is_on_main_only(program: Program, call: ast.Call) -> bool:
    """Also on the first rank of each node."""
    tests = rank_tests_at(program, call)
    return any(test.is_main and test.is_needed and test.kind != "group" for test in tests)


def _changed(program: Program, call: ast.Call) -> str:
    """What a call changes that DDP does not copy from rank 0; empty if nothing."""
    owner = owner_of(call)
    if owner is None:
        return ""
    name = dotted(owner)
    is_state = is_optimizer(program, owner) or is_scaler(program, owner) or "sched" in name.lower()
    if called_name(call) == "step":
        return f"calls {name}.step()" if is_state else ""
    is_model = bool(program.made(owner, *FSDP))
    inner = owner.value if isinstance(owner, ast.Attribute) and owner.attr == "module" else owner
    is_model = is_model or (bool(program.made(inner, DDP)) and _is_trained_later(program, call))
    return f"restores {name}" if is_state or is_model else ""


def _is_called_elsewhere(program: Program, call: ast.Call) -> bool:
    """`if rank == 0: pipeline.step(batch)`, and `else: pipeline.step()`."""
    written = dotted(call.func)
    alike = [each for each in calls_beside(call) if dotted(each.func) == written]
    return any(are_exclusive(program, call, each) for each in alike if each is not call)


def _is_trained_later(program: Program, call: ast.Call) -> bool:
    """In its function, or after a call of it, perhaps in another method of the object that is being
    made."""
    function = enclosing_function(call)
    callers = [] if function is None else program.callers(function)
    makers = [enclosing_function(caller) for caller in callers]
    if any(maker is not None and maker.name == "__init__" for maker in makers):
        return True
    return any(
        is_after(later, earlier) and any(map(is_backward, [later, *calls_made_in(program, later)]))
        for earlier in (call, *callers)
        for later in calls_beside(earlier)
    )


def _is_sent_later(call: ast.Call) -> bool:
    """Whether the rest of the function sends something to the other ranks."""
    later_calls = [later for later in calls_beside(call) if is_after(later, call)]
    return any(_SENDING.search(called_name(later)) for later in later_calls)
