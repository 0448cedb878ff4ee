"""DL053: only rank 0 updates or restores what every rank has a copy of."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from drumline_lint.findings import Finding, rule
from drumline_lint.flow.conditions import are_exclusive, rank_tests_at
from drumline_lint.flow.distributed import is_of_ranks
from drumline_lint.program.names import DDP, FSDP
from drumline_lint.program.program import Program
from drumline_lint.program.tree import called_name, calls_beside, dotted, is_after, owner_of
from drumline_lint.reading.source import Source
from drumline_lint.training.models import wraps_any
from drumline_lint.training.steps import is_optimizer, is_scaler

RULE = rule("DL053")
_SENDING = ("broadcast", "scatter", "all_gather_object", "broadcast_object_list")


def check(program: Program, source: Source) -> Iterator[Finding]:
    """Steps and restored states under a condition that holds on rank 0 only."""
    is_distributed = wraps_any(program) or "ccelerat" in source.text
    is_distributed = is_distributed and is_of_ranks(program, source)
    calls = program.index(source).calls if is_distributed else {}
    for call in (*calls.get("step", ()), *calls.get("load_state_dict", ())):
        what = _changed(program, call) if _is_on_main_only(program, call) else ""
        if what and not _is_sent_later(call) and not _is_called_elsewhere(program, call):
            yield RULE.at(source, call, f"only rank 0 {what}: the replicas differ from here on")


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
    is_model = is_model or (bool(program.made(inner, DDP)) and _is_trained_later(call))
    return f"restores {name}" if is_state or is_model else ""


def _is_called_elsewhere(program: Program, call: ast.Call) -> bool:
    """`if rank == 0: pipeline.step(batch)`, and `else: pipeline.step()`."""
    written = dotted(call.func)
    alike = [each for each in calls_beside(call) if dotted(each.func) == written]
    return any(are_exclusive(program, call, each) for each in alike if each is not call)


def _is_trained_later(call: ast.Call) -> bool:
    calls = calls_beside(call)
    return any(called_name(later) == "backward" and is_after(later, call) for later in calls)


def _is_sent_later(call: ast.Call) -> bool:
    """Whether the rest of the function sends something to the other ranks."""
    later_calls = [later for later in calls_beside(call) if is_after(later, call)]
    return any(called_name(later) in _SENDING for later in later_calls)
