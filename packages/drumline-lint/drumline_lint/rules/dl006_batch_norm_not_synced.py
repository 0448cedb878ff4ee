"""DL006: BatchNorm sees only one rank's part of the batch."""

from __future__ import annotations

import re
from collections.abc import Iterator

from drumline_lint.findings import Finding, rule
from drumline_lint.flow.distributed import framework
from drumline_lint.program.imports import any_text_near
from drumline_lint.program.names import DDP
from drumline_lint.program.program import Program
from drumline_lint.reading.source import Source
from drumline_lint.training.models import wrapped

RULE = rule("DL006")
_LAYERS = re.compile(
    r"\bBatchNorm[123]d\b|models\.(?:wide_)?(?:res|dense|google|mobile|shuffle|efficient|reg)\w*net\w*\("
)
_SYNCED = ("SyncBatchNorm", "syncbn", "sync_bn", "SyncBN", "sync_batchnorm")


def check(program: Program, source: Source) -> Iterator[Finding]:
    """Models that are wrapped in a file that names a BatchNorm, where nothing speaks of a
    synchronised one."""
    layer = _LAYERS.search(source.text)
    if layer is None or framework(program, source) or any_text_near(program, source, *_SYNCED):
        return
    for call in program.calls(source, DDP):
        model = wrapped(call)
        if model is not None:
            message = f"{source.code(model)} may have BatchNorm ({layer[0].rstrip('(')})"
            yield RULE.at(
                source, call, f"{message}, which sees only this rank's part of each batch"
            )
