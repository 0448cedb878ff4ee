"""DL087: a process uses the GPU, and then forks processes that use it.

CUDA does not work in a process that is forked from one that has used it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from drumline_lint.findings import Finding, rule
from drumline_lint.flow.conditions import conditions
from drumline_lint.program.imports import any_text_near
from drumline_lint.program.program import Program
from drumline_lint.program.tree import calls_beside, is_after, nodes_in
from drumline_lint.reading.source import Source
from drumline_lint.training.models import is_on_default_gpu

RULE = rule("DL087")

_FORKS = (
    "multiprocessing.Process",
    "torch.multiprocessing.Process",
    "accelerate.notebook_launcher",
)


def check(program: Program, source: Source) -> Iterator[Finding]:
    """A process that is forked after this one has used the GPU, in one function or notebook.

    For example:

        model.cuda()
        process = multiprocessing.Process(target=train, args=(model,))
    """
    if any_text_near(program, source, "spawn", "forkserver", "get_context"):
        return

    for fork in program.calls(source, *_FORKS):
        before = [call for call in calls_beside(fork) if is_after(fork, call)]
        use = next((call for call in before if _uses_gpu(program, call)), None)
        if use is not None:
            message = (
                f"{source.code(use)} uses the GPU before: forked processes cannot use it again"
            )
            yield RULE.at(source, fork, message)


def _uses_gpu(program: Program, call: ast.Call) -> bool:
    """Whether it uses the GPU in any case, itself or in the function that it calls.

    For example:

        def make_model():
            return Model().cuda()
    """
    function = program.function_of(call)
    inner = [] if function is None else nodes_in(function, ast.Call)
    return any(
        is_on_default_gpu(program, part) and not any(conditions(program, part))
        for part in (call, *inner)
    )
