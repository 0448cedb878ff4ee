"""DL062: ranks read a file that rank 0 may still be writing, or that is only on its node.

Calls write, prepare, read and wait by their names. Between a branch of rank 0 that writes a file
and a call of all ranks that reads it, there must be one that waits.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence

from drumline_lint.findings import Finding, Severity, rule
from drumline_lint.flow.collectives import collectives_in
from drumline_lint.flow.conditions import rank_tests, rank_tests_at, rest_of_block
from drumline_lint.flow.distributed import is_of_ranks
from drumline_lint.flow.guards import is_single_process
from drumline_lint.flow.loops import loop_around
from drumline_lint.flow.option_values import option_of
from drumline_lint.flow.shown_runs import ShownRun, shown_launches, shown_runs
from drumline_lint.program.calls import argument
from drumline_lint.program.origins import parts
from drumline_lint.program.program import Program
from drumline_lint.program.tree import ancestors, called_name, nodes_in
from drumline_lint.reading.allocation import started_on_nodes
from drumline_lint.reading.launchers import PYTHON, Launch
from drumline_lint.reading.rendezvous import least_nodes
from drumline_lint.reading.source import Source

RULE = rule("DL062")

_WRITING = re.compile(r"save|dump|write|download|urlretrieve|extract|to_csv|to_parquet")
_PREPARING = re.compile(r"prepare|preprocess|system|check_call|run|build|make|get_data|cache")
_READING = re.compile(
    r"(?<!down)(?<!up)load|open|read|from_file|from_pretrained|from_disk|loadtxt|memmap"
)
_WAITING = re.compile(r"barrier|wait|sync|broadcast|gather|reduce|backward")

# What fills a folder, and classes that read one.
_FILLING = re.compile(r"extract|unpack|untar|unzip|copy|download|rsync|urlretrieve")
_COPYING = re.compile(r"copy|rsync")
_MADE = re.compile(r"^[A-Z]\w*(?:Data|Set|Folder|Files)|(?:[Dd]ataset|[Ff]older)s?$")
_OF_NODE = re.compile(r"/(?:tmp|dev/shm|lscratch|local[-_]?(?:scratch|ssd|disk|nvme)?)(?:/|$)")
_OF_ENVIRONMENT = re.compile(r"SLURM_TMPDIR|gettempdir\(\)")

# What an argument is called that is a path, and one that is not written by this program.
_OF_FILES = re.compile(
    r"path|file|dir|folder|ckpt|checkpoint|cache|dest|archive|[\"'][^\"']+\.\w+[\"']"
)
_FROM_ELSEWHERE = re.compile(r"pretrained|base_model")


def check(program: Program, source: Source) -> Iterator[Finding]:
    """Files that rank 0 writes and all ranks read, with nothing between that waits; and sleeping
    instead of waiting.

    For example:

        if rank == 0:
            torch.save(model.state_dict(), path)
        state = torch.load(path)
    """
    for branch in program.index(source).every(ast.If):
        yield from _on_one_node(program, source, branch)
        if not _prepares(branch):
            continue

        tests = rank_tests(program, branch.test)
        is_by_rank = any(test.is_main is not None for test in tests)
        if not is_by_rank or _waits(program, branch):
            continue

        yield from _sleeping(program, source, branch)
        if any(test.is_main for test in tests):
            yield from _read_too_early(program, source, branch)


def _prepares(branch: ast.If) -> bool:
    """Whether it writes or prepares something, by the names of what it calls.

    For example:

        if rank == 0:
            prepare_data(folder)
    """
    for call in nodes_in(branch, ast.Call):
        name = called_name(call).lower()
        if _is_writing(call) or _PREPARING.search(name) or _downloads(call):
            return True
    return False


def _downloads(call: ast.Call) -> bool:
    """`CIFAR10(root, download=True)`"""
    option = argument(call, None, "download")
    return isinstance(option, ast.Constant) and option.value is True


def _waits(program: Program, node: ast.AST) -> bool:
    """Whether ranks wait for each other in it, by a collective or by anything whose name says so.

    For example:

        dist.barrier()
        wait_for_rank_0()
    """
    names = [called_name(call).lower() for call in nodes_in(node, ast.Call)]
    is_named = any(_WAITING.search(name) for name in names)
    return is_named or any(collectives_in(program, node))


def _sleeping(program: Program, source: Source, branch: ast.If) -> Iterator[Finding]:
    """Ranks that wait for a fixed time: nothing says that the work of rank 0 takes less.

    For example:

        if rank == 0:
            download()
        else:
            time.sleep(60)
    """
    following = rest_of_block(branch)[:1]
    if any(_waits(program, statement) for statement in following):
        return

    for call in nodes_in(branch, ast.Call):
        is_sleep = program.name_of(call.func) == "time.sleep"
        if not is_sleep or loop_around(call) is not loop_around(branch):
            continue

        if any(test.is_main is False for test in rank_tests_at(program, call)):
            message = "the other ranks wait for rank 0 by the clock, however long its work takes"
            yield RULE.at(source, call, message, fix="wait with dist.barrier()")


def _read_too_early(program: Program, source: Source, branch: ast.If) -> Iterator[Finding]:
    """Calls on all ranks that read what the branch of rank 0 writes.

    For example:

        if rank == 0:
            tokenizer.save("tokenizer.json")
        tokenizer = Tokenizer.from_file("tokenizer.json")
    """
    calls = [call for statement in branch.body for call in nodes_in(statement, ast.Call)]
    written = {path for call in calls for path in _written_by(program, call)}
    if not written:
        return

    for call in _reads_after(program, branch):
        if written.isdisjoint({*_paths(call), _dataset(call)}):
            continue

        is_for_all = not any(rank_tests_at(program, call))
        if is_for_all and not is_single_process(program, call):
            message = (
                f"every rank comes to {source.code(call.func)} without waiting for rank 0, "
                f"which writes the file ({source.where(branch)})"
            )
            severity = None if is_of_ranks(program, source) else Severity.NOTE
            yield RULE.at(source, call, message, severity=severity)


# A disk of each node


def _on_one_node(program: Program, source: Source, branch: ast.If) -> Iterator[Finding]:
    """Data that rank 0 of all ranks puts on the disk of its node, where all launches start
    several nodes, whose ranks all read it.

    For `srun torchrun --nnodes=4 train.py --scratch /local_scratch/$SLURM_JOB_ID`:

        if rank == 0:
            unpack(args.scratch)
        dist.barrier()
        dataset = Tiles(args.scratch)
    """
    tests = rank_tests(program, branch.test)
    is_for_first = any(test.is_main and test.kind == "global" for test in tests)
    filling = [call for call in nodes_in(branch, ast.Call) if _fills_folder(program, call)]
    if not is_for_first or branch.orelse or not filling:
        return

    if not all(map(_is_on_several_nodes, shown_launches(program, source))):
        return

    runs = shown_runs(program, source)
    read = _texts_read_after(program, branch) if runs else set()
    for call in filling:
        arguments = [part for part in _destinations(call) if ast.unparse(part) in read]
        if any(_is_of_node(program, part, runs) for part in arguments):
            message = (
                f"only rank 0 of all nodes comes to {source.code(call.func)}, and each node has a disk "
                "of its own there: the ranks of the others find nothing"
            )
            fix = "let local rank 0 of each node do it"
            yield RULE.at(source, call, message, fix=fix)


def _is_on_several_nodes(launch: Launch) -> bool:
    """`torchrun --nnodes=4 train.py`, `srun --nodes=4 python train.py`"""
    expected = least_nodes(launch) if launch.kind != PYTHON else None
    started = started_on_nodes(launch) if launch.srun is not None else None
    return max(expected or 1, started or 1) > 1


def _fills_folder(program: Program, call: ast.Call) -> bool:
    """`archive.extractall(folder)`, `shutil.copytree(source, folder)`, by their names, or a function
    that does it."""
    function = program.function_of(call)
    inner = [] if function is None else nodes_in(function, ast.Call)
    return any(_FILLING.search(called_name(part).lower()) for part in (call, *inner))


def _destinations(call: ast.Call) -> list[ast.expr]:
    """The arguments that may be the folder that it fills: of `shutil.copytree(source, folder)` only
    the second."""
    destination = argument(call, 1, "dst") if _COPYING.search(called_name(call).lower()) else None
    return _arguments(call) if destination is None else [destination]


def _arguments(call: ast.Call) -> list[ast.expr]:
    return [*call.args, *(keyword.value for keyword in call.keywords)]


def _is_of_node(program: Program, path: ast.expr, runs: Sequence[ShownRun]) -> bool:
    """Whether it is below a folder that each node has for itself: by its beginning in the code or in
    the option of a launch, or by Slurm's variable."""
    if isinstance(path, ast.Constant) or _OF_ENVIRONMENT.search(ast.unparse(path)):
        written = [path]
    else:
        written = [*parts(program, path)]

    for part in written:
        value = part.value if isinstance(part, ast.Constant) else None
        if isinstance(value, str) and _OF_NODE.match(value):
            return True
        if _OF_ENVIRONMENT.search(ast.unparse(part)):
            return True

        option = option_of(part)
        if option and any(_OF_NODE.match(run.options.get(option) or "") for run in runs):
            return True
    return False


def _texts_read_after(program: Program, branch: ast.If) -> set[str]:
    """The arguments of what all ranks make or read after it, in its block."""
    texts: set[str] = set()
    for statement in rest_of_block(branch):
        for call in nodes_in(statement, ast.Call):
            name = called_name(call)
            is_read = _READING.search(name.lower()) or _MADE.search(name)
            if (
                is_read
                and not _WRITING.search(name.lower())
                and not any(rank_tests_at(program, call))
            ):
                texts |= {ast.unparse(part) for part in _arguments(call)}
    return texts


# What is written, and what is read


def _written_by(program: Program, call: ast.Call) -> set[str]:
    """The files that a call writes, itself or in the function that it calls: there, only what is
    named outside of the function.

    For example:

        def save_vocabulary(words):
            json.dump(words, open(VOCABULARY_FILE, "w"))
    """
    if _downloads(call):
        return {_dataset(call)} - {""}
    if _is_writing(call):
        return _paths(call)

    function = program.function_of(call)
    inner = [] if function is None else nodes_in(function, ast.Call)
    writes = [part for part in inner if _is_writing(part)]
    if not writes:
        return set()

    names = {path for part in writes for path in _paths(part)}
    return _paths(call) | {name for name in names if name.isupper()}


def _is_writing(call: ast.Call) -> bool:
    """`torch.save(state, path)` and `frame.to_csv(path)`, by their names, and `open(path, "wb")`."""
    name = called_name(call).lower()
    if name == "open":
        mode = argument(call, 1, "mode")
        return isinstance(mode, ast.Constant) and str(mode.value)[:1] in ("w", "x")

    return _WRITING.search(name) is not None


def _reads_after(program: Program, branch: ast.If) -> Iterator[ast.Call]:
    """The calls that read after it, in its block and in those around it, until ranks wait.

    It is `json.load` here, and not `torch.load`:

        if args.prepare:
            if rank == 0:
                prepare_data(folder)
        words = json.load(open(path))
        dist.barrier()
        torch.load(path)
    """
    for outer in (branch, *ancestors(branch)):
        if isinstance(outer, ast.FunctionDef | ast.AsyncFunctionDef | ast.With):
            return

        for statement in rest_of_block(outer) if isinstance(outer, ast.stmt) else ():
            if _waits(program, statement):
                return

            for call in nodes_in(statement, ast.Call):
                if _reads(program, call) or _is_of_library(program, call):
                    yield call


def _reads(program: Program, call: ast.Call) -> bool:
    """By its name, or the names of what a class of the given files calls as it is made.

    For example:

        class Words:
            def __init__(self, path):
                self.words = json.load(open(path))
    """
    function = program.function_of(call)
    is_made = getattr(function, "name", "") == "__init__"
    inner = nodes_in(function, ast.Call) if function is not None and is_made else []
    return any(_READING.search(called_name(part).lower()) for part in (call, *inner))


def _is_of_library(program: Program, call: ast.Call) -> bool:
    """`torchvision.datasets.CIFAR10(root)`, which reads the files in its folder."""
    return program.name_of(call.func).startswith(("torchvision.", "torchaudio."))


def _dataset(call: ast.Call) -> str:
    """The dataset of a library, by its class and folder: `CIFAR10 in root`."""
    root = argument(call, 0, "root")
    return "" if root is None else f"{called_name(call)} in {ast.unparse(root)}"


def _paths(call: ast.Call) -> set[str]:
    """What it is given that may be a file, as it is written, its owner included.

    For example:

        read_table(args.csv_path)       # args.csv_path
        checkpoint_path.open()          # checkpoint_path
    """
    values = [*call.args, *(keyword.value for keyword in call.keywords)]
    if isinstance(call.func, ast.Attribute):
        values.append(call.func.value)

    texts = {ast.unparse(value) for value in values}
    if called_name(call) not in ("save", "load"):
        texts = {text for text in texts if _OF_FILES.search(text.lower())}
    return {text for text in texts if not _FROM_ELSEWHERE.search(text.lower())}
