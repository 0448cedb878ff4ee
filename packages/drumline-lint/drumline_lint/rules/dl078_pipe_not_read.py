"""DL078: a launcher gives its processes a pipe that it does not read while they run."""

from __future__ import annotations

import re
from collections.abc import Iterator

from drumline_lint.findings import Finding, rule
from drumline_lint.program.calls import argument
from drumline_lint.program.program import Program
from drumline_lint.program.tree import position
from drumline_lint.reading.source import Source

RULE = rule("DL078", only_distributed=False, in_tests=False)
_LAUNCHES = re.compile(
    r"MASTER_ADDR|WORLD_SIZE|LOCAL_RANK|torchrun|torch\.distributed\.|accelerate launch"
)
_READS = re.compile(
    r"communicate\(|readline|Thread\(|select\(|selectors|asyncio|in \w+(?:\.\w+)*\.std(?:out|err)\b"
)


def check(program: Program, source: Source) -> Iterator[Finding]:
    text = source.text
    if "PIPE" not in text or not _LAUNCHES.search(text) or _READS.search(text):
        return
    calls = program.index(source).calls
    waits = [position(call) for name in ("wait", "poll") for call in calls.get(name, ())]
    reads = [position(call) for call in calls.get("read", ())]
    for call in program.calls(source, "subprocess.Popen"):
        for name in ("stdout", "stderr"):
            pipe = argument(call, None, name)
            is_pipe = pipe is not None and program.name_of(pipe) == "subprocess.PIPE"
            after = [wait for wait in waits if wait > position(call)]
            is_read = bool(after) and any(position(call) < read < min(after) for read in reads)
            if is_pipe and after and not is_read:
                message = f"nothing reads {name} while the process runs, and it blocks when the pipe is full"
                yield RULE.at(source, pipe, message)
                return
