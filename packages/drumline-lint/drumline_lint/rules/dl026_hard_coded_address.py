"""DL026: where ranks meet is written into the code."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from drumline_lint.finding import Finding, Severity
from drumline_lint.program.arguments import argument
from drumline_lint.program.names import INIT
from drumline_lint.program.program import Program
from drumline_lint.reading.source import Source
from drumline_lint.rule import Rule
from drumline_lint.running.hosts import is_loopback, is_right_on_one_host, written_text

RULE = Rule(
    id="DL026",
    name="hard-coded-address",
    severity=Severity.WARNING,
    summary="ranks meet at an address that is written into the code",
    why=(
        "The scheduler gives other hosts next time: ranks then wait for one that is not part of the job, or join "
        "another job that runs there. A loopback address means another host on every host. It is right only where the "
        "script starts all processes itself, by mp.spawn, on one host; there it is not reported."
    ),
    fix='leave the address to the launcher: init_method="env://", which is the default',
    bad="""\
import os
import torch.distributed as dist

rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
dist.init_process_group("nccl", init_method="tcp://10.1.2.3:29500", rank=rank, world_size=size)
dist.destroy_process_group()
""",
    good="""\
import torch.distributed as dist

dist.init_process_group("nccl", init_method="env://")
dist.destroy_process_group()
""",
)
STORE = "torch.distributed.TCPStore"


def check(program: Program, source: Source) -> Iterator[Finding]:
    """In init_process_group's `init_method`, and the host of a TCPStore."""
    for call in program.calls(source, INIT, STORE):
        given, host = _host(program, call)
        if given is None or not host:
            continue
        if not is_loopback(host):
            yield RULE.at(
                source, given, f"{host} is written into the code: the job can run only with that host"
            )
        elif not is_right_on_one_host(program, call):
            yield RULE.at(
                source, given, f"{host} is another host on every host: ranks of two do not meet there"
            )


def _host(program: Program, call: ast.Call) -> tuple[ast.expr | None, str]:
    if program.name_of(call.func) == STORE:
        given = argument(call, 0, "host_name")
        return given, written_text(program, given) or ""
    given = argument(call, 1, "init_method")
    return given, _host_of(written_text(program, given) or "")


def _host_of(address: str) -> str:
    """`10.1.2.3` of `tcp://10.1.2.3:29500`; nothing where the host is not all written, nor of file:// and env://."""
    scheme, _, rest = address.partition("://")
    host, colon, _ = rest.rpartition(":")
    return host if scheme == "tcp" and colon and not any(sign in host for sign in "{}%$") else ""
