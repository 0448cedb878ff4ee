"""DL053: only rank 0 updates or restores what every rank has a copy of.

DDP copies parameters and buffers from rank 0 when it wraps the model. What it does not copy, as the
state of an optimizer, then differs across ranks.
"""

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
    FunctionNode,
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
    """What changes on rank 0 only: steps, restored states, and averaged weights.

    The same happens to what Lightning's `prepare_data` leaves in the module.
    """
    yield from _left_by_preparation(program, source)

    is_distributed = wraps_any(program) or "ccelerat" in source.text
    if is_distributed and is_of_ranks(program, source):
        yield from _changed_here(program, source)
        yield from _changed_in_functions(program, source)


def _changed_here(program: Program, source: Source) -> Iterator[Finding]:
    """What rank 0 changes by itself.

    if rank == 0:
        optimizer.load_state_dict(state)
    """
    calls = program.index(source).calls
    for call in (*calls.get("step", ()), *calls.get("load_state_dict", ())):
        change = _change(program, call) if _is_on_main_only(program, call) else ""
        if change and not _is_evened_out(program, call):
            yield RULE.at(source, call, f"only rank 0 {change}: the replicas differ from here on")


def _changed_in_functions(program: Program, source: Source) -> Iterator[Finding]:
    """What a function changes that only rank 0 calls.

    if rank == 0:
        resume(path)  # optimizer.load_state_dict(torch.load(path))
    """
    calls = program.index(source).calls
    names = {"update", "step", *_names_of_restoring(program)} - {"load_state_dict"}
    for name in sorted(names & calls.keys()):
        for call in calls[name]:
            change = _change_in_function(program, call) if _is_on_main_only(program, call) else ""
            if change and not _is_evened_out(program, call):
                function = source.code(call.func)
                message = f"only rank 0 calls {function}, which {change}: the replicas differ"
                yield RULE.at(source, call, message)


@cached_query
def _names_of_restoring(program: Program) -> set[str]:
    """The names of the functions that load a state: `resume`, where it has `load_state_dict`."""
    names = set()
    for source in program.sources:
        for call in program.index(source).calls.get("load_state_dict", ()):
            function = enclosing_function(call)
            if function is not None:
                names.add(function.name)

    return names


def _is_on_main_only(program: Program, call: ast.Call) -> bool:
    """Whether rank 0 alone comes to it, or the first rank of each node."""
    tests = rank_tests_at(program, call)
    return any(test.is_main and test.is_needed and test.kind != "group" for test in tests)


# What a call changes.


def _change(program: Program, call: ast.Call) -> str:
    """What a call changes that DDP does not copy from rank 0; empty if nothing.

    Examples: `calls scheduler.step()`, `restores optimizer`. The weights of a model count if DDP
    has wrapped it already, and it is trained afterwards.
    """
    owner = owner_of(call)
    if owner is None:
        return ""

    name = dotted(owner)
    is_state = is_optimizer(program, owner) or is_scaler(program, owner) or "sched" in name.lower()
    if called_name(call) == "step":
        return f"calls {name}.step()" if is_state else ""

    if is_state or program.made(owner, *FSDP):
        return f"restores {name}"

    inner = owner.value if isinstance(owner, ast.Attribute) and owner.attr == "module" else owner
    is_trained = bool(program.made(inner, DDP)) and _is_trained_later(program, call)
    return f"restores {name}" if is_trained else ""


def _change_in_function(program: Program, call: ast.Call) -> str:
    """What a function changes: a restored optimizer, or averaged weights that every rank uses.

    Examples: `resume(path)` that comes to `optimizer.load_state_dict(state)` without a condition
    on ranks, and `ema.update(model)`.
    """
    function = program.function_of(call)
    if function is None:
        return ""

    owner = owner_of(call)
    is_average = owner is not None and "ema" in last_name(owner).lower().split("_")
    if owner is not None and is_average and called_name(call) in ("update", "step"):
        return f"updates {dotted(owner)}" if _is_used_by_all(program, call, owner) else ""

    for restoring in nodes_in(function, ast.Call):
        if called_name(restoring) != "load_state_dict" or any(rank_tests_at(program, restoring)):
            continue

        change = _change(program, restoring)
        if change:
            return change

    return ""


def _is_used_by_all(program: Program, update: ast.Call, owner: ast.expr) -> bool:
    """Whether averaged weights are read on all ranks in the same function.

    if rank == 0:
        ema.update(model)
    evaluate(ema.module)
    """
    names = nodes_in(scope_of(update), ast.Name, ast.Attribute)
    uses = [name for name in names if dotted(name) == dotted(owner) and is_after(name, update)]
    return any(not any(rank_tests_at(program, use)) for use in uses)


def _is_trained_later(program: Program, call: ast.Call) -> bool:
    """Whether the model is trained in the same function, or after a call of it.

    What `__init__` calls is trained by another method of the object that is being made.
    """
    function = enclosing_function(call)
    callers = [] if function is None else program.callers(function)
    makers = [enclosing_function(caller) for caller in callers]
    if any(maker is not None and maker.name == "__init__" for maker in makers):
        return True

    for earlier in (call, *callers):
        for later in calls_beside(earlier):
            if not is_after(later, earlier):
                continue
            if any(map(is_backward, (later, *calls_made_in(program, later)))):
                return True

    return False


# What evens it out.


def _is_evened_out(program: Program, call: ast.Call) -> bool:
    """Whether the function sends something to the other ranks later, or they make the call, too.

    if rank == 0:
        pipeline.step(batch)
    else:
        pipeline.step()
    """
    calls = calls_beside(call)
    if any(is_after(later, call) and _SENDING.search(called_name(later)) for later in calls):
        return True

    alike = [nearby for nearby in calls if dotted(nearby.func) == dotted(call.func)]
    return any(are_exclusive(program, call, nearby) for nearby in alike)


# Lightning.


def _left_by_preparation(program: Program, source: Source) -> Iterator[Finding]:
    """What `prepare_data` leaves in the module, which one process of each node runs.

    def prepare_data(self):
        self.vocabulary = build_vocabulary(self.path)
    """
    is_several = any(has_devices(program, trainer) for trainer in program.all_calls(_TRAINER))
    for owner in program.index(source).every(ast.ClassDef) if is_several else ():
        if not any("Lightning" in str(base) for base in program.ancestry(owner)[1:]):
            continue

        method = program.method(owner, "prepare_data")
        if method is None or method not in owner.body:
            continue

        attributes = nodes_in(owner, ast.Attribute, into_functions=True)
        of_self = [part for part in attributes if getattr(part.value, "id", "") == "self"]
        missing = _read_elsewhere(method, of_self)
        for part in of_self:
            is_left = enclosing_function(part) is method and isinstance(part.ctx, ast.Store)
            if is_left and part.attr in missing:
                message = (
                    f"prepare_data runs in one process of each node: self.{part.attr} is not set "
                    "in the others"
                )
                yield RULE.at(source, part, message, fix="set it in setup")


def _read_elsewhere(method: FunctionNode, of_self: list[ast.Attribute]) -> set[str]:
    """The attributes that methods read, and none sets, but for this one and `__init__`.

    `setup` may set them as well, and it runs on every rank.
    """
    read = set()
    stored = set()
    for part in of_self:
        function = enclosing_function(part)
        if function is None or function is method:
            continue

        if isinstance(part.ctx, ast.Load):
            read.add(part.attr)
        elif isinstance(part.ctx, ast.Store) and function.name != "__init__":
            stored.add(part.attr)

    return read - stored
