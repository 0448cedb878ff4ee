"""DL004: both shuffle and a sampler set the order of the samples."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from drumline_lint.findings import Finding, rule
from drumline_lint.program.names import DISTRIBUTED_SAMPLER, LOADER
from drumline_lint.program.program import Program
from drumline_lint.reading.source import Source
from drumline_lint.training.loaders import given, stream_classes

RULE = rule("DL004")


def check(program: Program, source: Source) -> Iterator[Finding]:
    """`shuffle=True` beside a sampler that is made at least where there are several processes."""
    for call in program.calls(source, LOADER):
        sampler = given(call, "sampler")
        is_made = bool(program.made(sampler, DISTRIBUTED_SAMPLER))
        shuffle = given(call, "shuffle")
        is_on = isinstance(shuffle, ast.Constant) and shuffle.value is True
        if sampler is not None and is_made and is_on:
            message = f"shuffle=True beside sampler={source.code(sampler)}: DataLoader raises a ValueError"
            yield RULE.at(source, call, message)
        elif is_made and stream_classes(program, given(call, "dataset")):
            message = "a DistributedSampler chooses from an IterableDataset: DataLoader raises a ValueError"
            fix = "divide the samples in the dataset itself, by rank and worker"
            yield RULE.at(source, call, message, fix=fix)
