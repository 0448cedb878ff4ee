"""DL042: every rank downloads the dataset."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from drumline_lint.findings import Finding, Severity, rule
from drumline_lint.flow.guards import is_on_every_rank
from drumline_lint.flow.shown import is_shown_on_every_rank, takes_turns
from drumline_lint.program.calls import argument
from drumline_lint.program.program import Program
from drumline_lint.program.tree import last_name
from drumline_lint.program.value import ConstantValue
from drumline_lint.reading.source import Source
from drumline_lint.training.saves import is_own

RULE = rule("DL042", in_tests=False)
_FETCHING = (
    "urllib.request.urlretrieve",
    "torch.hub.download_url_to_file",
    "wget.download",
    "gdown.download",
    "torchvision.datasets.utils.download_url",
    "torchvision.datasets.utils.download_and_extract_archive",
)
_DATASETS = ("torchvision.datasets.", "torchaudio.datasets.", "torchtext.datasets.")


def check(program: Program, source: Source) -> Iterator[Finding]:
    """Datasets with `download=True` on every rank; not if some ranks make the same one before the
    others."""
    for call in _downloads(program, source):
        is_ready = takes_turns(program, call) or _is_made_before(program, call)
        if is_on_every_rank(program, call) and not is_ready:
            what = "extracts" if last_name(call.func) == "extractall" else "downloads"
            message = (
                f"{source.code(call.func)} {what} on every rank: "
                "all ranks write the same files at the same time"
            )
            severity = Severity.WARNING if is_shown_on_every_rank(program, call) else Severity.NOTE
            yield RULE.at(source, call, message, severity=severity)


def _downloads(program: Program, source: Source) -> Iterator[ast.Call]:
    for call in program.index(source).every(ast.Call) if "download" in source.text else ():
        option = argument(call, None, "download")
        is_on = option is not None and program.values(option) == {ConstantValue(True)}
        if is_on and program.name_of(call.func).startswith(_DATASETS):
            yield call
    for call in program.calls(source, *_FETCHING):
        if not is_own(program, argument(call, 1, "")):
            yield call
    for call in program.index(source).calls.get("extractall", ()):
        if not is_own(program, argument(call, 0, "path")):
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
