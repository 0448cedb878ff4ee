"""DL025: how long ranks wait for a stuck one is left open."""

from __future__ import annotations

from collections.abc import Iterator

from drumline.lint.finding import Finding, Severity
from drumline.lint.program.arguments import argument, has_unknown_arguments
from drumline.lint.program.names import INIT
from drumline.lint.program.program import Program
from drumline.lint.program.value import Known
from drumline.lint.reading.source import Source
from drumline.lint.rule import Rule

RULE = Rule(
    id="DL025",
    name="init-without-timeout",
    severity=Severity.NOTE,
    summary="init_process_group without a timeout",
    why=(
        "When a rank is stuck, or lost and nobody says so, the others wait in their next collective until the timeout: "
        "by default 10 minutes with NCCL and 30 with Gloo. All GPUs of the job are held for that time. And where rank "
        "0 alone prepares data or saves for longer than that, a run that is in order is ended."
    ),
    fix="give timeout=datetime.timedelta(...), longer than the longest time one rank may keep the others waiting",
    bad="""\
import torch.distributed as dist

dist.init_process_group("nccl")
dist.destroy_process_group()
""",
    good="""\
from datetime import timedelta
import torch.distributed as dist

dist.init_process_group("nccl", timeout=timedelta(minutes=5))
dist.destroy_process_group()
""",
)
DEFAULTS = {"nccl": "10 minutes with NCCL", "gloo": "30 minutes with Gloo"}


def check(program: Program, source: Source) -> Iterator[Finding]:
    """Every call without it; MPI has no such timeout."""
    for call in program.calls(source, INIT):
        backends = {
            one.value for one in program.values(argument(call, 0, "backend")) if isinstance(one, Known)
        }
        timeout = argument(call, 2, "timeout")
        is_given = timeout is not None and program.values(timeout) != {Known(None)}
        if has_unknown_arguments(call) or is_given or backends == {"mpi"}:
            continue
        waits = [words for name, words in DEFAULTS.items() if name in backends] or DEFAULTS.values()
        yield RULE.at(
            source,
            call,
            f"{source.code(call.func)} has no timeout: ranks wait for a stuck one for {' or '.join(waits)}",
        )
