"""DL089: each rank spreads its model over all GPUs.

`device_map="auto"` is for one process, which uses all GPUs that it sees.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from drumline_lint.findings import Finding, Severity, rule
from drumline_lint.flow.conditions import conditions
from drumline_lint.flow.distributed import is_of_ranks
from drumline_lint.program.calls import argument
from drumline_lint.program.imports import connected, with_imported
from drumline_lint.program.origins import written_values
from drumline_lint.program.program import Program
from drumline_lint.reading.allocation import processes_per_node
from drumline_lint.reading.launchers import PYTHON
from drumline_lint.reading.source import Source

RULE = rule("DL089", only_distributed=False)

_OVER_ALL = {"auto", "balanced", "balanced_low_0", "sequential"}
# A comment or docstring that says how the file is started.
_STARTED = re.compile(r"torchrun\b.*--nproc[-_]per[-_]node[= ](?!1\b)\S|accelerate launch\b.*\.py")
_LAUNCHES = re.compile(r"notebook_launcher\(|\bspawn\(|start_processes\(|Popen\(|subprocess\.")
_TRAINS = re.compile(r"\.backward\(|Trainer\(")
_READS_RANK = re.compile(r"environ(?:\.get\(|\[)[\"']LOCAL_RANK")


def check(program: Program, source: Source) -> Iterator[Finding]:
    """A model over all GPUs, in a training that several processes make together.

    For example:

        model = AutoModelForCausalLM.from_pretrained(name, device_map="auto")
        Trainer(model, arguments).train()
    """
    if "device_map" not in source.text or not _is_of_several(program, source):
        return

    for call in program.index(source).calls.get("from_pretrained", ()):
        option = argument(call, None, "device_map")
        names = {getattr(origin, "value", None) for origin in written_values(program, option)}
        if not names or not names <= _OVER_ALL or any(conditions(program, call)):
            continue

        message = (
            f'device_map="{names.pop()}" spreads the model over all GPUs in every rank: '
            "the ranks share each GPU, and neither DDP nor Trainer takes such a model"
        )
        severity = Severity.NOTE if _is_of_one_kernel(program, source) else None
        yield RULE.at(source, option, message, severity=severity)


def _is_of_one_kernel(program: Program, source: Source) -> bool:
    """Whether it is a notebook that starts no ranks: its kernel is one process."""
    may_start = _LAUNCHES.search(source.text) is not None or bool(program.launches_of(source))
    return source.is_notebook and not may_start


def _is_of_several(program: Program, source: Source) -> bool:
    """Whether a training runs it that is started with several processes.

    Either it trains itself, or a file that trains imports it.
    """
    for file in connected(program, source):
        if not _TRAINS.search(file.text) or not _is_started(program, file):
            continue

        if source in with_imported(program, [file]):
            return True
    return False


def _is_started(program: Program, file: Source) -> bool:
    """Whether ranks run it: a script starts them, it says so, or it reads its local rank.

    For example:

        # torchrun --nproc-per-node=4 finetune.py
    """
    for launch in program.launches_of(file):
        if launch.kind != PYTHON and processes_per_node(launch) != 1:
            return True

    if _STARTED.search(file.text):
        return True
    return _READS_RANK.search(file.text) is not None and is_of_ranks(program, file)
