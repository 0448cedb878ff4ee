"""Which files run in several processes, and which files belong together in one program."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence

from drumline_lint.flow.conditions import conditions, is_dead
from drumline_lint.flow.left_out import is_left_out
from drumline_lint.program.calls import argument
from drumline_lint.program.files import Files, package_of
from drumline_lint.program.imports import (
    connected,
    imported_sources,
    importers,
    with_imported,
)
from drumline_lint.program.names import (
    ACCELERATOR,
    DDP,
    DEEPSPEED,
    FABRIC,
    FRAMEWORKS,
    FSDP,
    INIT,
    STARTS,
)
from drumline_lint.program.program import Program
from drumline_lint.program.queries import cached_query
from drumline_lint.program.tree import Binding, enclosing_function
from drumline_lint.program.value import ConstantValue
from drumline_lint.reading.allocation import (
    processes_per_node,
    started_on_nodes,
    tasks_per_node,
)
from drumline_lint.reading.launchers import PYTHON, Launch
from drumline_lint.reading.rendezvous import least_nodes, most_nodes, variable
from drumline_lint.reading.source import Source

_WORDS = (
    "torch.distributed",
    "DistributedDataParallel",
    "DistributedSampler",
    "import distributed",
    "torch.nn.parallel",
    "DDPManager",
    "accelerate",
    "Fabric",
    "deepspeed",
)
_TRAINERS = (
    "transformers.Trainer",
    "transformers.TrainingArguments",
    "transformers.Seq2SeqTrainer",
    "transformers.Seq2SeqTrainingArguments",
)


@cached_query
def distributed_sources(program: Program) -> set[Source]:
    """The files that train on several processes, and all given files that they import.

    A file does if it calls torch.distributed's functions, DDP or the like, or a function of another
    file that does. Importing from such a file, or reading a rank, is not enough.
    """
    sources = with_imported(program, _starting(program))
    return {source for source in sources if not _is_mocked(source)}


# Files that start several processes.


_SPAWN = "torch.multiprocessing.spawn"
_BEGINNINGS = (INIT, DDP, *FSDP, ACCELERATOR, FABRIC, DEEPSPEED, _SPAWN, "drumline.DDPManager")
_ONE_GPU = re.compile(r"(^|\s)(-g|--(n_?|num_?)?gpus)[ =]1(\s|$)")
_FOR_ONE = re.compile(r"(single|one|1)_?(gpu|process|device)|no_?ddp|non_?dist")


@cached_query
def starts_ranks(program: Program, source: Source) -> bool:
    """Whether this very file starts several processes, joins a group or wraps a model, itself or by
    a function that begins a group, and is not known to be started as one process.

    A file that is imported by such a file may be of a program with one process as well.

    Examples: `dist.init_process_group()`, `mp.spawn(train)`, `setup_distributed()` of another file.
    """
    if _is_for_one(program, source) or _never_joins(program, source):
        return False

    for call in program.calls(source, *_BEGINNINGS):
        if not is_dead(program, call) and not is_left_out(program, call):
            return True

    functions = {enclosing_function(call) for call in program.all_calls(INIT)} - {None}
    names = {function.name for function in functions if function is not None}
    calls = [call for name in names for call in program.index(source).calls.get(name, ())]
    return any(program.function_of(call) in functions for call in calls)


def _is_for_one(program: Program, source: Source) -> bool:
    """Whether its name says so, as `train_single_gpu.py` does, or it is only started so."""
    if _FOR_ONE.search(source.path.stem.lower()):
        return True

    return _spawns_one_process(program, source) or _is_started_alone(program, source)


def _spawns_one_process(program: Program, source: Source) -> bool:
    """`spawn(train, nprocs=1)`, `notebook_launcher(train, num_processes=1)`"""
    counts = [argument(call, 2, "nprocs") for call in _spawns(program, source)]
    notebooks = program.index(source).calls.get("notebook_launcher", ())
    counts += [argument(call, 2, "num_processes") for call in notebooks]

    return bool(counts) and all(ConstantValue(1) in program.values(count) for count in counts)


def _spawns(program: Program, source: Source) -> list[ast.Call]:
    """`mp.spawn(train, nprocs=8)`, `mp.start_processes(train)`"""
    calls = program.index(source).calls
    return [call for name in _SPAWNS for call in calls.get(name, ())]


_JOINS = re.compile(
    r"init_(?:process_group|dist|device_mesh|ddp)|(?:setup|initialize|init|start|launch)_?\w*(?:dist|ddp)"
    r"|deepspeed|Accelerator|Fabric|DDPManager|hvd\.|lightning|pl\.",
    re.IGNORECASE,
)


def _never_joins(program: Program, source: Source) -> bool:
    """Whether it is a program by itself, and neither it nor what it imports may join a group: as
    several processes it stops where it wraps its model."""
    if "__main__" not in source.text or any(importers(program, source)):
        return False

    files = with_imported(program, [source])
    return not any(_matches(program, file, _JOINS) for file in files)


@cached_query
def _matches(program: Program, source: Source, pattern: re.Pattern[str]) -> bool:
    """A large program asks the same of its files for each of its parts."""
    return pattern.search(source.text) is not None


def is_of_ranks(program: Program, source: Source) -> bool:
    """Whether only programs that start several processes run this file: it is one, or every file
    that imports it, directly or not, and that nothing else imports, is one."""
    if starts_ranks(program, source):
        return True

    with_ranks, without_ranks = _run_by_main_files(program)
    return source in with_ranks and source not in without_ranks


@cached_query
def _run_by_main_files(program: Program) -> tuple[set[Source], set[Source]]:
    """What is run by files that start several processes and that nothing but tests imports, and
    what is run by other files that nothing imports."""
    main_files = [source for source in program.sources if _is_main_file(program, source)]
    starting = [source for source in main_files if starts_ranks(program, source)]
    plain = [source for source in main_files if not starts_ranks(program, source)]

    return run_by(program, starting), run_by(program, plain)


@cached_query
def programs_of_ranks(program: Program) -> list[Source]:
    """The files that are started and may have several processes: they, or files that they import,
    start ranks. A file with code for `__main__` is one also where others import it."""
    programs: list[Source] = []

    for source in program.sources:
        if source.is_test or not (_is_main_file(program, source) or "__main__" in source.text):
            continue
        if not _is_for_one(program, source) and _may_have_ranks(program, source):
            programs.append(source)

    return programs


def _may_have_ranks(program: Program, main_file: Source) -> bool:
    """Whether a framework starts its ranks, or a file that it runs does."""
    if framework(program, main_file) or _surely_has_ranks(program, main_file):
        return True

    return any(starts_ranks(program, file) for file in run_by(program, [main_file]))


def _is_main_file(program: Program, source: Source) -> bool:
    """Whether only tests import it, or a script or a README starts it."""
    if source.is_test:
        return False

    return bool(program.starts_of(source)) or all(
        user.is_test for user in importers(program, source)
    )


def run_by(program: Program, sources: list[Source]) -> set[Source]:
    """Files with all that they import, directly or through files that are not tests."""
    reached = set(sources)
    pending = list(sources)

    while pending:
        for imported in imported_sources(program, pending.pop()):
            if imported in reached:
                continue
            reached.add(imported)
            if not imported.is_test:
                pending.append(imported)

    return reached


# How scripts start them.


_NODES = re.compile(
    r"--nnodes[= ](?!\$|1\b)|--nodes[= ](?!\$|1\b)|\b[2-9] nodes|\bmulti[-_ ]?node", re.IGNORECASE
)


def has_several_nodes(program: Program, source: Source) -> bool:
    """Whether scripts start its program on several nodes, or a text of the file says so."""
    most = 0
    for file in connected(program, source):
        for launch in program.launches_of(file):
            most = max(most, least_nodes(launch) or 0, started_on_nodes(launch) or 0)

    return most > 1 if most else _NODES.search(source.text) is not None


# Code that may start its ranks itself, or take their numbers from a scheduler.
_MAY_START_RANKS = re.compile(
    r"\bspawn\(|Process\(|start_processes|Popen|(?:check_)?call\(|subprocess\.run|submitit\.|launcher\(|\blaunch\("
)
_OF_SCHEDULERS = re.compile(r"SLURM_|OMPI_|MPI")

# `args.rank, args.gpu, args.world_size = 0, 0, 1`, where no launcher has set the variables.
_GOES_ALONE = re.compile(r"world_size\s*=(?:[^=\n]*,)?\s*1\s*$", re.MULTILINE)
_SPAWNS = ("spawn", "start_processes")
_OF_LAUNCHERS = "RANK LOCAL_RANK WORLD_SIZE SLURM_PROCID SLURM_NTASKS OMPI_COMM_WORLD_RANK".split()


def _is_started_alone(program: Program, source: Source) -> bool:
    """Whether scripts or a README start it, and each with one process."""
    started = program.starts_of(source)
    if not started:
        return False

    spawns = next(program.calls(source, _SPAWN), None) is not None
    files = connected(program, source)

    def any_matches(pattern: re.Pattern[str]) -> bool:
        return any(_matches(program, file, pattern) for file in files)

    needs_launcher = not any_matches(_GOES_ALONE) and (
        any_matches(_OF_SCHEDULERS) or any(_starts_ranks(program, file) for file in files)
    )
    is_plain = not needs_launcher and not any_matches(_MAY_START_RANKS)

    return all(_is_of_one_process(launch, spawns, is_plain) for launch in started)


@cached_query
def _starts_ranks(program: Program, source: Source) -> bool:
    """Whether a file surely starts ranks, or cannot run without a launcher."""
    starts = [*program.calls(source, INIT), *_spawns(program, source)]
    if any(is_always_run(program, call) for call in starts):
        return True

    for read in program.index(source).every(ast.Subscript):
        if _is_launchers_variable(program, read) and not any(conditions(program, read)):
            return True

    return False


def _is_launchers_variable(program: Program, read: ast.Subscript) -> bool:
    """`os.environ["LOCAL_RANK"]`, where it is read: an error if no launcher has set it."""
    if not isinstance(read.slice, ast.Constant) or read.slice.value not in _OF_LAUNCHERS:
        return False

    return isinstance(read.ctx, ast.Load) and program.name_of(read.value) == "os.environ"


def programs_with_ranks(program: Program, source: Source) -> tuple[int, int]:
    """How many programs run a file, and how many of them surely have several processes: they cannot
    run without a launcher, or are started with several."""
    main_files = _main_files_by_source(program)[source] or [source]
    with_ranks = [main_file for main_file in main_files if _surely_has_ranks(program, main_file)]
    return len(main_files), len(with_ranks)


@cached_query
def _surely_has_ranks(program: Program, main_file: Source) -> bool:
    """Whether it is started as several processes, or a file that it runs starts ranks."""
    if _is_for_one(program, main_file):
        return False
    if _is_launched(program, main_file):
        return True

    return any(_starts_ranks(program, file) for file in run_by(program, [main_file]))


@cached_query
def _is_launched(program: Program, source: Source) -> bool:
    """Whether a script or a README starts it as several processes."""
    launches = [launch for launch in program.starts_of(source) if launch.kind != PYTHON]
    return not all(_is_of_one_process(each, spawns=True, is_plain=False) for each in launches)


@cached_query
def _main_files_by_source(program: Program) -> dict[Source, list[Source]]:
    """The main files that run each file."""
    main_files: dict[Source, list[Source]] = {source: [] for source in program.sources}

    for main_file in program.sources:
        if _is_main_file(program, main_file):
            for source in run_by(program, [main_file]):
                main_files[source].append(main_file)

    return main_files


def is_always_run(program: Program, call: ast.Call) -> bool:
    """Whether no condition is around it, nor around some call of its function."""
    function = enclosing_function(call)
    callers = program.callers(function) if function is not None else []
    if callers and not any(_is_unconditional(program, caller) for caller in callers):
        return False

    return _is_unconditional(program, call)


def _is_unconditional(program: Program, call: ast.Call) -> bool:
    """Whether no condition is around it in its function, but for `if __name__ == "__main__":`."""
    return all("__name__" in ast.unparse(test) for test, _ in conditions(program, call))


def _is_of_one_process(launch: Launch, spawns: bool, is_plain: bool) -> bool:
    """Whether a launch starts one process; of `torchrun`, one on one node.

    Examples for `python`: `python train.py --gpus 1`, `CUDA_VISIBLE_DEVICES=0 python train.py`.

    `spawns`: whether its file starts ranks; `is_plain`: whether nothing in its program does, or
    needs a launcher.
    """
    if launch.kind != PYTHON:
        return processes_per_node(launch) == 1 and most_nodes(launch) == 1

    if _ONE_GPU.search(" ".join(word.text for word in launch.arguments)):
        return True  # it is told so

    is_here = launch.srun is None and not launch.is_elsewhere and "RANK" not in launch.script.text
    if is_here and is_plain:
        return True

    visible = variable(launch, "CUDA_VISIBLE_DEVICES")
    if visible is not None and variable(launch, "RANK") is None:
        return (visible.constant or "").isdecimal()

    is_task = launch.srun is not None and not spawns
    return is_task and tasks_per_node(launch) == 1 and started_on_nodes(launch) == 1


# Which files use torch.distributed at all.


def _is_mocked(source: Source) -> bool:
    """Whether it is a test that replaces the process group: one process stands for all."""
    return source.is_test and ("mock" in source.text or "monkeypatch" in source.text)


@cached_query
def framework(program: Program, source: Source) -> str:
    """The framework that handles samplers and wrapping for a file; empty if there is none."""
    for scope in program.index(source).scopes.values():
        for bindings in scope.names.values():
            for binding in bindings:
                if _is_framework(program, binding, source):
                    return binding.imported.partition(".")[0]
    return ""


def _is_framework(program: Program, binding: Binding, source: Source) -> bool:
    """`import pytorch_lightning`, `from transformers import Trainer`"""
    root = binding.imported.partition(".")[0]
    if root in FRAMEWORKS:
        return program.module(root, source) is None  # a given file may have that name

    return binding.imported in _TRAINERS


def _starting(program: Program) -> set[Source]:
    """Files with such a call, and files that call a function that makes one, directly or not."""
    speaking = [source for source in program.sources if speaks_of_ranks(source)]
    pending = [call for source in speaking for call in program.calls(source, *STARTS)]
    sources = set()
    functions = set()

    while pending:
        call = pending.pop()
        sources.add(program.source_of(call))

        function = enclosing_function(call)
        if function is not None and function not in functions:
            functions.add(function)
            pending += program.callers(function)

    return sources


def speaks_of_ranks(source: Source) -> bool:
    """Whether it contains a word that all distributed code has."""
    return any(word in source.text for word in _WORDS)


# Which files belong together.


_IMPORT = re.compile(
    r"^[ \t]*(?:from[ \t]+(?P<package>[.\w]+)[ \t]+import[ \t]+(?P<parts>\([^)]*\)|[^\n#]+)"
    r"|import[ \t]+(?P<modules>[^\n#]+))",
    re.MULTILINE,
)
_NAME = re.compile(r"(?<!\bas )[.\w]+")


def projects(sources: Sequence[Source]) -> list[list[Source]]:
    """Groups of files that import each other, or read what another saves, in the order in which
    they were given."""
    everything = Files(sources)
    group = {source: {source} for source in sources}
    savers = _savers(sources)

    for source in sources:
        for related in (*_imported(everything, source), *_saving_for(source, savers)):
            if group[related] is group[source]:
                continue
            smaller, larger = sorted((group[source], group[related]), key=len)
            larger |= smaller
            group.update(dict.fromkeys(smaller, larger))

    number = {source: place for place, source in enumerate(sources)}
    groups = {id(members): members for members in group.values()}
    return [sorted(members, key=number.__getitem__) for members in groups.values()]


_CHECKPOINT = re.compile(r"[\w.-]+\.(?:pth?|ckpt|pkl|bin|tar)\b(?=[\"'])")


def _savers(sources: Sequence[Source]) -> dict[tuple[str, str], list[Source]]:
    """The files that save a checkpoint, by their folder and by how its name ends.

    `best.pt` of `torch.save(state, folder + "best.pt")`.
    """
    savers: dict[tuple[str, str], list[Source]] = defaultdict(list)

    for source in sources:
        if "torch.save(" in source.text:
            for name in set(_CHECKPOINT.findall(source.text)):
                savers[source.folder, name].append(source)

    return savers


def _saving_for(source: Source, savers: dict[tuple[str, str], list[Source]]) -> list[Source]:
    """The files beside it that save a checkpoint of the name that this one loads."""
    if "load_state_dict(" not in source.text:
        return []

    names = set(_CHECKPOINT.findall(source.text))
    return [saver for name in names for saver in savers.get((source.folder, name), ())]


def _imported(everything: Files, source: Source) -> Iterator[Source]:
    """The files that it imports, with the packages around them."""
    for name in set(_names(source.text)):
        while name:
            imported = everything.module(name, source)
            if imported is not None:
                yield imported
            name = package_of(name)


def _names(text: str) -> Iterator[str]:
    """All modules that may be imported: for `from a.b import c`, a.b and a.b.c."""
    for statement in _IMPORT.finditer(text):
        if statement["modules"]:
            yield from _NAME.findall(statement["modules"])
            continue

        package = statement["package"]
        joint = "" if package.endswith(".") else "."
        yield package
        yield from (f"{package}{joint}{name}" for name in _NAME.findall(statement["parts"]))
