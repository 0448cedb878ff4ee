"""DL004: both shuffle and a sampler set the order of the samples.

DataLoader refuses both, but only where the sampler is made, which is often a run with several
processes: on a laptop the same line works.
"""

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
    """A DistributedSampler beside `shuffle=True`, or over a dataset that has no indexes.

    The sampler is made at least where there are several processes, as in
    `sampler = DistributedSampler(data) if distributed else None`.
    """
    for loader in program.calls(source, LOADER):
        sampler = given(loader, "sampler")
        if sampler is None or not program.made(sampler, DISTRIBUTED_SAMPLER):
            continue

        shuffle = given(loader, "shuffle")
        if isinstance(shuffle, ast.Constant) and shuffle.value is True:
            message = f"shuffle=True beside sampler={source.code(sampler)}: DataLoader raises a ValueError"
            yield RULE.at(source, loader, message)
        elif stream_classes(program, given(loader, "dataset")):
            message = "a DistributedSampler chooses from an IterableDataset: DataLoader raises a ValueError"
            fix = "divide the samples in the dataset itself, by rank and worker"
            yield RULE.at(source, loader, message, fix=fix)
