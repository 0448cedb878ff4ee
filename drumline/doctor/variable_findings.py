"""What is to be said of variables that are set: old names, misspelt ones, and those that slow a run or break it."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from typing import Any

from drumline.doctor.finding import Finding
from drumline.doctor.variables import MAX_SOCKETS, MEANING, RENAMED, RULES, STILL_READ

CHECK = "variables"
# Of whom we know all names that matter; CUDA_ and FI_ have hundreds that are nobody's mistake.
SPELT = ("NCCL_", "GLOO_", "TORCH_NCCL_", "TORCH_DISTRIBUTED_", "CUDA_VISIBLE", "OMP_NUM")
NEAR = 0.85


def variable_findings(facts: Mapping[str, Any]) -> Iterator[Finding]:
    """Of one host's facts."""
    host, variables = facts["host"], facts["variables"]
    for name, value in variables.items():
        broken = list(_broken_rules(host, name, value))
        yield from broken
        if name in RENAMED and not broken:
            yield _renamed(host, name, value)
        elif name not in MEANING and name not in RENAMED and name.startswith(SPELT):
            yield from _misspelt(host, name)
    yield from _too_many_sockets(host, variables)


def _renamed(host: str, name: str, value: str) -> Finding:
    new = RENAMED[name]
    if name in STILL_READ:
        what = f"{name}={value} is an old name, which will be ignored one day; it is now {new}"
        return Finding(
            level="note", check=CHECK, where=host, what=what, fix=f"unset {name}; export {new}={value}"
        )
    what = f"{name}={value} has no effect any more" + (f"; see {new}" if new else "")
    return Finding(level="warning", check=CHECK, where=host, what=what, fix=f"unset {name}")


def _misspelt(host: str, name: str) -> Iterator[Finding]:
    for near in difflib.get_close_matches(name, MEANING, n=1, cutoff=NEAR):
        yield Finding(
            level="warning",
            check=CHECK,
            where=host,
            what=f"{name} is read by nobody that we know; did you mean {near}?",
            fix=f'export {near}="${name}"; unset {name}',
        )


def _broken_rules(host: str, name: str, value: str) -> Iterator[Finding]:
    current = RENAMED.get(name) or name
    for rule in RULES:
        if rule.name == current and (not rule.values or value.upper() in (v.upper() for v in rule.values)):
            yield Finding(
                level=rule.level,
                check=CHECK,
                where=host,
                what=f"{name}={value}: {rule.what}",
                fix=rule.fix or f"unset {name}",
            )


def _too_many_sockets(host: str, variables: Mapping[str, str]) -> Iterator[Finding]:
    threads, sockets = (variables.get(n, "") for n in ("NCCL_SOCKET_NTHREADS", "NCCL_NSOCKS_PERTHREAD"))
    if threads.isdigit() and sockets.isdigit() and int(threads) * int(sockets) > MAX_SOCKETS:
        yield Finding(
            level="warning",
            check=CHECK,
            where=host,
            what=f"NCCL_SOCKET_NTHREADS={threads} times NCCL_NSOCKS_PERTHREAD={sockets} is more than the "
            f"{MAX_SOCKETS} sockets that NCCL allows, and it takes fewer",
            fix=f"export NCCL_NSOCKS_PERTHREAD={max(1, MAX_SOCKETS // max(1, int(threads)))}",
        )
