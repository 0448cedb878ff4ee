"""Where something is written to a file: what, and to which path."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

from drumline_lint.findings import Severity
from drumline_lint.flow.distributed import framework
from drumline_lint.flow.guards import is_on_every_rank
from drumline_lint.program.calls import argument, has_unknown_arguments
from drumline_lint.program.names import DISTRIBUTED_SAMPLER
from drumline_lint.program.origins import parts
from drumline_lint.program.program import Program
from drumline_lint.program.queries import cached_query
from drumline_lint.program.tree import ancestors, called_name, enclosing_function, last_name
from drumline_lint.program.value import ConstantValue, Rank
from drumline_lint.reading.source import Source

# Which argument is written, and which is the path, by position and name.
_WRITERS = {
    "torch.save": (0, "obj", 1, "f"),
    "safetensors.torch.save_file": (0, "tensors", 1, "filename"),
    "safetensors.torch.save_model": (0, "model", 1, "filename"),
    "numpy.save": (1, "arr", 0, "file"),
    "numpy.savez": (1, "", 0, "file"),
    "numpy.savez_compressed": (1, "", 0, "file"),
    "pickle.dump": (0, "obj", 1, "file"),
    "cloudpickle.dump": (0, "obj", 1, "file"),
    "joblib.dump": (0, "value", 1, "filename"),
}
_UNIQUE = ("tempfile.", "uuid.")
_OF_HOST = ("socket.gethostname", "socket.getfqdn", "platform.node", "os.uname", "os.getpid")
_HOST_WORDS = ("hostname", "host_name", "node_name", "nodename")
_LOCAL_FOLDERS = ("/tmp", "/var/tmp", "/dev/shm", "/local", "/dev/null")  # noqa: S108
_LOCAL_WORDS = ("tmp", "temp", "scratch", "node_local", "local_dir", "local_path", "local_folder")
_IN_MEMORY = ("io.BytesIO", "io.StringIO")
_PREPARING = tuple(
    "download cache extract fetch http prepare preprocess convert eval infer render demo visual".split()
)
# The same on all ranks, and small: whoever writes it last, the file is the same.
_SETTINGS = re.compile(
    r"(^|[_.\W])(args?|config\w*|cfg|hparams|hps|opts?|options|vocab|dict|labels?)([_.\W]|$)"
)
# Of what each rank has its own.
_ITEM = re.compile(r"(^|_)(idx|index|batch|chunk|shard|part)(_|\d|$)")
_MEMORY_WORDS = ("buf", "buffer", "stream", "bytes_io", "bio")


@dataclass(frozen=True)
class Save:
    """One call that writes: `torch.save(model.state_dict(), "model.pt")`."""

    call: ast.Call
    what: ast.expr | None
    """`model.state_dict()`"""
    path: ast.expr | None
    """`"model.pt"`"""


@cached_query
def saves(program: Program, source: Source) -> list[Save]:
    """All that a file writes with the functions of libraries."""
    of_pretrained = [] if framework(program, source) else list(_of_pretrained(program, source))
    return [*_of_writers(program, source), *of_pretrained]


def _of_writers(program: Program, source: Source) -> Iterator[Save]:
    """What functions write to a file of this machine, if their arguments are all written out."""
    for call in program.calls(source, *_WRITERS):
        content_at, content_name, path_at, path_name = _WRITERS[program.name_of(call.func)]
        content = argument(call, content_at, content_name)
        path = argument(call, path_at, path_name)

        if not is_in_memory(program, path) and not has_unknown_arguments(call):
            yield Save(call, content, path)


def _of_pretrained(program: Program, source: Source) -> Iterator[Save]:
    """`model.save_pretrained(folder)`, unless an argument names the main process; and the same of
    a dataset."""
    calls = program.index(source).calls

    for call in (*calls.get("save_pretrained", ()), *calls.get("save_to_disk", ())):
        if not isinstance(call.func, ast.Attribute) or program.function_of(call) is not None:
            continue

        keywords = {keyword.arg for keyword in call.keywords}
        if not keywords & {"is_main_process", None}:
            folder = argument(call, 0, "save_directory") or argument(call, 0, "dataset_path")
            yield Save(call, call.func.value, folder)


# Whose path it is.


def is_in_memory(program: Program, path: ast.expr | None) -> bool:
    """Whether it is no path, but bytes that are held by this process: `io.BytesIO()`, `buffer`."""
    for part in parts(program, path):
        if program.made(part, *_IN_MEMORY) or last_name(part).lower() in _MEMORY_WORDS:
            return True

    return False


def is_own(program: Program, path: ast.expr | None) -> bool:
    """Whether each rank has a path of its own, or a lock lets one after the other.

    Its rank or one of its samples is in it, or it is made up each time: `f"{rank}.pt"`,
    `folder / f"batch_{batch_idx}.pt"`, `tempfile.mkdtemp()`.
    """
    if _is_locked(path):
        return True

    for part in parts(program, path):
        if _is_unique(program, part) or _kinds(program, part):
            return True
        if _is_of_host(program, part) or _ITEM.search(last_name(part).lower()):
            return True

    return False


def _is_locked(path: ast.expr | None) -> bool:
    """`with FileLock(path):`"""
    blocks = () if path is None else ancestors(path)
    items = [item for block in blocks if isinstance(block, ast.With) for item in block.items]
    calls = [item.context_expr for item in items if isinstance(item.context_expr, ast.Call)]
    return any("lock" in called_name(call).lower() for call in calls)


def is_own_of_node(program: Program, path: ast.expr | None) -> bool:
    """Whether each node has a path of its own: with its name or rank in it, or on a disk that no
    other sees."""
    for part in parts(program, path):
        if _is_unique(program, part) or _kinds(program, part) - {"local"}:
            return True
        if _is_of_host(program, part) or _is_local(program, part):
            return True

    return False


def _kinds(program: Program, part: ast.expr) -> set[str]:
    """The kinds of ranks that it may be: `{"local"}` of `local_rank`."""
    return {value.kind for value in program.values(part) if isinstance(value, Rank)}


def _is_unique(program: Program, part: ast.expr) -> bool:
    """Whether it is made up each time, as by `uuid.uuid4()`, or is a rank's part of the data."""
    if not isinstance(part, ast.Call):
        return False

    return program.name_of(part.func).startswith((*_UNIQUE, DISTRIBUTED_SAMPLER))


def _is_of_host(program: Program, part: ast.expr) -> bool:
    """Whether it is the name of this machine: `socket.gethostname()`, `args.hostname`."""
    if isinstance(part, ast.Call) and program.name_of(part.func) in _OF_HOST:
        return True

    return any(word in _word(part) for word in _HOST_WORDS)


def _is_local(program: Program, part: ast.expr) -> bool:
    """Whether it is a folder that each machine has: `"/tmp/cache"`, `args.scratch`."""
    for value in program.values(part):
        constant = value.value if isinstance(value, ConstantValue) else None
        if isinstance(constant, str) and constant.startswith(_LOCAL_FOLDERS):
            return True

    return any(word in _word(part) for word in _LOCAL_WORDS)


def _word(part: ast.expr) -> str:
    """The name of it, or of the variable of the environment that it is.

    `scratch` of `args.scratch`, and `slurm_tmpdir` of `os.environ["SLURM_TMPDIR"]`.
    """
    if isinstance(part, ast.Constant) and isinstance(part.value, str) and part.value.isupper():
        return part.value.lower()

    return last_name(part).lower()


# What it costs that all ranks write.


def severity_of_race(program: Program, call: ast.Call) -> Severity | None:
    """Of something that all ranks do to the same file: none where that is not shown, and a note for
    what is prepared once, which is often there before ranks start, and for settings and tools."""
    if not is_on_every_rank(program, call):
        return None

    function = enclosing_function(call)
    name = "" if function is None else function.name.lower()
    stem = program.source_of(call).path.stem.lower()
    is_mild = any(word in name or word in stem for word in _PREPARING)

    return Severity.NOTE if is_mild or _is_of_settings(call) else Severity.WARNING


def _is_of_settings(call: ast.Call) -> bool:
    """`pickle.dump(vars(args), file)`, `open("config.json", "w")`"""
    if called_name(call) not in ("open", "dump"):
        return False

    return _SETTINGS.search(ast.unparse(call).lower()) is not None
