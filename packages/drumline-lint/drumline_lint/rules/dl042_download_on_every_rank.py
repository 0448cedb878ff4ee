"""DL042: every rank downloads the dataset."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from drumline_lint.findings import Finding, rule
from drumline_lint.flow.guards import is_on_every_rank
from drumline_lint.program.calls import argument
from drumline_lint.program.program import Program
from drumline_lint.program.value import ConstantValue
from drumline_lint.reading.source import Source

RULE = rule("DL042")
_DATASETS = ("torchvision.datasets.", "torchaudio.datasets.", "torchtext.datasets.")


def check(program: Program, source: Source) -> Iterator[Finding]:
    """Datasets with `download=True` on every rank; not if some ranks make the same one before the
    others."""
    for call in _downloads(program, source):
        if is_on_every_rank(program, call) and not _is_made_before(program, call):
            message = (
                f"{source.code(call.func)} downloads on every rank: "
                "all ranks write the same files at the same time"
            )
            yield RULE.at(source, call, message)


def _downloads(program: Program, source: Source) -> Iterator[ast.Call]:
    for call in program.index(source).every(ast.Call) if "download" in source.text else ():
        option = argument(call, None, "download")
        is_on = option is not None and program.values(option) == {ConstantValue(True)}
        if is_on and program.name_of(call.func).startswith(_DATASETS):
            yield call


def _is_made_before(program: Program, call: ast.Call) -> bool:
    name = program.name_of(call.func)
    other_downloads = [
        download
        for source in program.sources
        for download in _downloads(program, source)
        if download is not call
    ]
    return any(
        program.name_of(download.func) == name and not is_on_every_rank(program, download)
        for download in other_downloads
    )
