"""DL044: the number of GPUs of one host is used as the world size."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from drumline_lint.findings import Finding, rule
from drumline_lint.flow.hosts import meets_on_one_host
from drumline_lint.program.calls import argument
from drumline_lint.program.names import DISTRIBUTED_SAMPLER, INIT
from drumline_lint.program.origins import written_values
from drumline_lint.program.program import Program
from drumline_lint.program.ranks import OF_FUNCTION
from drumline_lint.program.value import Rank
from drumline_lint.reading.source import Source

RULE = rule("DL044")


def check(program: Program, source: Source) -> Iterator[Finding]:
    """Groups and samplers with the GPUs of a host as their size, and the rank among all hosts as
    their rank."""
    pairs = [
        (call, argument(call, 3, "world_size"), argument(call, 4, "rank"))
        for call in program.calls(source, INIT)
    ]
    if meets_on_one_host(program, source) and not any(
        _is_global(program, rank) for _, _, rank in pairs
    ):
        return
    for call in program.calls(source, DISTRIBUTED_SAMPLER):
        pairs.append((call, argument(call, 1, "num_replicas"), argument(call, 2, "rank")))
    for call, size, rank in pairs:
        if size is not None and _is_of_host(program, size) and _is_global(program, rank):
            assert rank is not None
            message = (
                f"{source.code(size)} counts the GPUs of this host, "
                f"and {source.code(rank)} the processes of all hosts"
            )
            yield RULE.at(source, call, message)


def _is_of_host(program: Program, size: ast.expr) -> bool:
    """`torch.cuda.device_count()` or LOCAL_WORLD_SIZE, and nothing that it is multiplied by."""
    return all(
        isinstance(origin, ast.Call | ast.Subscript)
        and any(w in ast.unparse(origin) for w in ("device_count", "LOCAL_WORLD_SIZE"))
        for origin in written_values(program, size)
    )


def _is_global(program: Program, rank: ast.expr | None) -> bool:
    """From the environment or `get_rank()`; a name alone may be the number of a process of
    mp.spawn."""
    if rank is None or program.values(rank) != {Rank("global")}:
        return False
    origins = written_values(program, rank)
    return bool(origins) and all(
        isinstance(origin, ast.Call | ast.Subscript)
        and (
            program.name_of(getattr(origin, "func", origin)) in OF_FUNCTION
            or "RANK" in ast.unparse(origin)
            or "PROCID" in ast.unparse(origin)
        )
        for origin in origins
    )
