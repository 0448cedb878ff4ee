"""DL042: every rank downloads the dataset.

All ranks of a node write to the same files while the first to come already reads them. With one
rank on each node, and a disk for each, nothing is wrong.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from drumline_lint.findings import Finding, Severity, rule
from drumline_lint.flow.conditions import conditions, rank_tests_at
from drumline_lint.flow.distributed import is_of_ranks
from drumline_lint.flow.guards import WAITING, is_on_every_rank
from drumline_lint.program.calls import argument
from drumline_lint.program.imports import calls_near, connected
from drumline_lint.program.names import ACCELERATOR, DDP, DEEPSPEED, FABRIC, FSDP, INIT
from drumline_lint.program.program import Program
from drumline_lint.program.tree import (
    called_name,
    calls_beside,
    enclosing_function,
    is_after,
    parent_of,
)
from drumline_lint.program.value import ConstantValue
from drumline_lint.reading.allocation import processes_per_node
from drumline_lint.reading.launchers import PYTHON
from drumline_lint.reading.source import Source
from drumline_lint.training.saves import is_own

RULE = rule("DL042", in_tests=False)
_FETCHING = tuple(
    "urllib.request.urlretrieve torch.hub.download_url_to_file wget.download gdown.download "
    "torchvision.datasets.utils.download_url "
    "torchvision.datasets.utils.download_and_extract_archive "
    "torchvision.datasets.utils.download_file_from_google_drive".split()
)
_OF_NODES = re.compile(r"(\w+\.)*(num_?|n_?)?nodes")
_WRAPPING_LEFT_OUT = re.compile(r"^[ \t]*#.*\b(?:DistributedDataParallel|DDP)\(", re.MULTILINE)
_DATASETS = ("torchvision.datasets.", "torchaudio.datasets.", "torchtext.datasets.")


def check(program: Program, source: Source) -> Iterator[Finding]:
    """Datasets with `download=True` on every rank.

    It is right if some ranks make the same dataset before the others, which then find its files. Of
    several calls for one dataset, the first is reported.
    """
    is_sure = is_of_ranks(program, source) and not _is_for_one(program, source)
    severity = None if is_sure else Severity.NOTE
    downloads = list(_downloads(program, source))
    guarded = [call for call in downloads if not is_on_every_rank(program, call)]
    names = {program.name_of(call.func) for call in guarded}

    for call in downloads:
        name = program.name_of(call.func)
        if call in guarded or name in names or _is_done_before(program, call):
            continue

        if name.startswith(_DATASETS):
            names.add(name)

        verb = "extracts" if called_name(call) == "extractall" else "downloads"
        message = (
            f"{source.code(call.func)} {verb} on every rank: "
            "all ranks write the same files at the same time"
        )
        yield RULE.at(source, call, message, severity=severity)


def _downloads(program: Program, source: Source) -> Iterator[ast.Call]:
    """The calls that download or extract to a path that is the same on all ranks.

    Examples: `MNIST(root, download=True)`, `wget.download(url)`, `archive.extractall(path)`.
    Of datasets, an option that is off, or not known, says nothing: `download=args.download`.
    """
    for keyword in program.index(source).every(ast.keyword):
        call = parent_of(keyword)
        if keyword.arg != "download" or not isinstance(call, ast.Call):
            continue

        is_on = program.values(keyword.value) == {ConstantValue(True)}
        if is_on and program.name_of(call.func).startswith(_DATASETS):
            yield call

    for call in program.calls(source, *_FETCHING):
        if not is_own(program, argument(call, 1, "")):
            yield call

    for call in program.index(source).calls.get("extractall", ()):
        if not is_own(program, argument(call, 0, "path")):
            yield call


def _is_done_before(program: Program, call: ast.Call) -> bool:
    """Whether some ranks call its function before the others, which then find what is there.

    if rank == 0:
        make_dataset()
    dist.barrier()
    """
    function = enclosing_function(call)
    is_dataset = program.name_of(call.func).startswith(_DATASETS)
    if function is None or not (is_dataset or any(conditions(program, call))):
        return False

    for caller in program.callers(function):
        if not any(rank_tests_at(program, caller)):
            continue

        later_calls = [later for later in calls_beside(caller) if is_after(later, caller)]
        if any(called_name(later) in WAITING for later in later_calls):
            return True

    return False


# Whether there is one rank, or one on each disk.


def _is_for_one(program: Program, source: Source) -> bool:
    """Whether one process may run it, or each rank has a disk of its own.

    A file that has its `DDP(model)` in a comment is run by one process today.
    """
    if source.is_notebook or _has_one_rank_a_node(program, source):
        return True

    wrappings = program.calls(source, DDP, *FSDP, ACCELERATOR, FABRIC, DEEPSPEED)
    is_wrapping = next(wrappings, None) is not None
    return not is_wrapping and _WRAPPING_LEFT_OUT.search(source.text) is not None


def _has_one_rank_a_node(program: Program, source: Source) -> bool:
    """Whether scripts start one rank on each node, or the world is counted in nodes.

    dist.init_process_group("gloo", world_size=args.num_nodes)
    """
    sizes = [argument(init, None, "world_size") for init in calls_near(program, source, INIT)]
    counted = [ast.unparse(size).lower() for size in sizes if size is not None]
    if counted and all(map(_OF_NODES.fullmatch, counted)):
        return True

    files = connected(program, source)
    launches = [launch for file in files for launch in program.starts_of(file)]
    launched = [launch for launch in launches if launch.kind != PYTHON]
    return bool(launched) and all(processes_per_node(launch) == 1 for launch in launched)
