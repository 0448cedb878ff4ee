"""DL009: the weights that training begins with are drawn without a seed."""

from __future__ import annotations

from collections.abc import Iterator

from drumline_lint.findings import Finding, rule
from drumline_lint.flow.distributed import framework
from drumline_lint.program.imports import any_text_near
from drumline_lint.program.program import Program
from drumline_lint.program.value import CallResult, Instance
from drumline_lint.reading.source import Source
from drumline_lint.training.models import WRAPPERS, wrapped

RULE = rule("DL009")


def check(program: Program, source: Source) -> Iterator[Finding]:
    """Models of known making that are wrapped in a program without any seed."""
    if framework(program, source) or any_text_near(program, source, "seed", "from_pretrained"):
        return
    for call in program.calls(source, *WRAPPERS):
        is_drawn = any(
            isinstance(value, Instance)
            or (
                isinstance(value, CallResult)
                and value.name.startswith(("torch.nn.", "torchvision."))
            )
            for value in program.values(wrapped(call))
        )
        if is_drawn:
            message = f"{source.code(call)} wraps a model whose weights are drawn without a seed"
            yield RULE.at(source, call, message)
