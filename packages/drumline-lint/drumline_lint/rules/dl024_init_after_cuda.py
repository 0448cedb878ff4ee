"""DL024: the GPU is used before it is known which one."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from drumline_lint.finding import Finding, Severity
from drumline_lint.program.arguments import argument
from drumline_lint.program.names import INIT
from drumline_lint.program.program import Program
from drumline_lint.program.value import Known
from drumline_lint.reading.source import Source
from drumline_lint.rule import Rule
from drumline_lint.running.alternatives import are_alternatives
from drumline_lint.running.environment import settings
from drumline_lint.running.guards import is_on_some_only
from drumline_lint.running.order import Run, found_in_scripts, process_of
from drumline_lint.training.cuda import CHOOSES, CHOOSING_VARIABLES, works_on_first_gpu

RULE = Rule(
    id="DL024",
    name="init-after-cuda",
    severity=Severity.ERROR,
    summary="CUDA is used before init_process_group, without set_device",
    why=(
        "Until torch.cuda.set_device is called, the current GPU of every process is number 0. Work before it makes a "
        "context of every rank on GPU 0 of its host, some hundred MiB each; and if the device is not chosen after it "
        "either, NCCL finds several ranks on one GPU and refuses, or hangs."
    ),
    fix='call torch.cuda.set_device(int(os.environ["LOCAL_RANK"])) first, then init_process_group',
    bad="""\
import torch
import torch.distributed as dist

model = torch.nn.Linear(8, 2).cuda()
dist.init_process_group("nccl")
""",
    good="""\
import os
import torch
import torch.distributed as dist

torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
model = torch.nn.Linear(8, 2).cuda()
dist.destroy_process_group()
""",
)


def check(program: Program, source: Source) -> Iterator[Finding]:
    """In the order of a script's run, at init_process_group."""
    if next(program.all_calls(INIT), None) is None:
        return
    for call, work in found_in_scripts(program, source, _too_late).items():
        assert isinstance(call, ast.Call)
        done = program.source_of(work).code(work)
        yield RULE.at(
            source,
            call,
            f"{done} comes before {source.code(call.func)}: every rank of a host has used GPU 0 by then",
        )


def _too_late(program: Program, run: Run) -> Iterator[tuple[ast.AST, ast.Call]]:
    for number, step in enumerate(run):
        if program.name_of(step.call.func) == INIT and _takes_current_gpu(program, step.call):
            work = _work_before(program, run, number)
            if work is not None and not _is_chosen_by_variable(program, run):
                yield step.call, work


def _takes_current_gpu(program: Program, init: ast.Call) -> bool:
    """Gloo's ranks may share a GPU, and `device_id` says which one it is."""
    backends = program.values(argument(init, 0, "backend"))
    return backends != {Known("gloo")} and argument(init, None, "device_id") is None


def _work_before(program: Program, run: Run, number: int) -> ast.Call | None:
    init, process = run[number], process_of(program, run[number])
    choices = [step for step in run[:number] if program.name_of(step.call.func) in CHOOSES]
    if any(process_of(program, step) == process for step in choices):
        return None
    works = [step for step in run[:number] if works_on_first_gpu(program, step.call)]
    works = [step for step in works if process_of(program, step) == process]
    done = [step.call for step in works if not are_alternatives(program, step, init)]
    return next((call for call in done if not is_on_some_only(program, call)), None)


def _is_chosen_by_variable(program: Program, run: Run) -> bool:
    sources = dict.fromkeys(program.source_of(step.call) for step in run)
    return any(one.name in CHOOSING_VARIABLES for source in sources for one in settings(program, source))
