"""Imports go one way, the public names are pinned, and what must start fast does not load torch."""

from __future__ import annotations

import ast
import functools
import os
import re
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest

import drumline
from benchmarks.size import LINTER, VAGUE_NAMES, assigned_names, is_packed

PACKAGE = Path(drumline.__file__).parent
# Each part may import from those before it in this list, and from itself: the order of a run.
PARTS = (
    "base",
    "config",
    "runs",
    "net",
    "storage",
    "metrics",
    "watch",
    "rank",
    "parallel",
    "data",
    "checkpoint",
    "training",
    "launch",
    "report",
    "tools",
    "cli",
    "__main__",
)
WITHOUT_TORCH = ("config", "runs", "net", "storage", "watch", "report")


@functools.cache
def nodes(path: Path) -> list[ast.AST]:
    """Of a module; read once, for all tests."""
    return list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


def dotted(node: ast.expr) -> str:
    """`sys.stdout.write`; of what is no name, as in `f().write`, the end: `.write`."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def modules() -> list[Path]:
    return [path for path in sorted(PACKAGE.rglob("*.py")) if path != PACKAGE / "__init__.py"]


def part_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_parts(path: Path) -> set[str]:
    """Every part that a module imports, anywhere in it, function bodies included."""
    parts = set()
    for node in nodes(path):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        parts.update(name.split(".")[1] for name in names if name.startswith("drumline."))
    return parts


def reads_environment(path: Path) -> bool:
    return any(
        isinstance(node, ast.Attribute) and dotted(node) == "os.environ" for node in nodes(path)
    )


def is_module(name: str) -> bool:
    path = PACKAGE.parent.joinpath(*name.split("."))
    return path.is_dir() or path.with_suffix(".py").is_file()


def test_the_parts_are_these() -> None:
    assert modules()
    assert {part_of(path) for path in modules()} == set(PARTS)


def test_imports_go_one_way() -> None:
    wrong = [
        f"{path.relative_to(PACKAGE)} imports {part}"
        for path in modules()
        for part in imported_parts(path) - {part_of(path)}
        if PARTS.index(part) >= PARTS.index(part_of(path))
    ]
    assert not wrong


def test_there_are_no_cycles_between_modules() -> None:
    graph = {}
    for path in modules():
        name = ".".join(
            ("drumline", *path.relative_to(PACKAGE).with_suffix("").parts)
        ).removesuffix(".__init__")
        graph[name] = {
            target
            for node in nodes(path)
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("drumline.")
            for alias in node.names
            for target in [
                f"{node.module}.{alias.name}"
                if is_module(f"{node.module}.{alias.name}")
                else node.module or ""
            ]
        }
    done: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, " -> ".join((*trail, name))
        if name not in done:
            for target in graph[name] & graph.keys() - {name}:
                visit(target, (*trail, name))
            done.add(name)

    for name in graph:
        visit(name, ())


def test_tools_are_imported_by_the_command_line_alone() -> None:
    assert {part_of(path) for path in modules() if "tools" in imported_parts(path)} <= {
        "tools",
        "cli",
    }


def test_some_parts_never_import_torch() -> None:
    wrong = [
        f"{path.relative_to(PACKAGE)}:{node.lineno}"
        for path in modules()
        if part_of(path) in WITHOUT_TORCH
        for node in nodes(path)
        if (
            isinstance(node, ast.Import)
            and any(alias.name.partition(".")[0] == "torch" for alias in node.names)
        )
        or (isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch")
    ]
    assert wrong == []


def test_environment_variables_are_read_where_a_process_begins() -> None:
    readers = {part_of(path) for path in modules() if reads_environment(path)}
    assert readers == {"base", "training", "launch", "cli"}


def test_text_has_an_encoding_of_its_own_not_that_of_the_machine() -> None:
    """Else a letter that the locale lacks ends a job, and a file that one node wrote cannot be read
    on another."""
    calls = [
        f"{path.relative_to(PACKAGE)}:{call.lineno}"
        for path in modules()
        for call in text_calls_without_encoding(path)
    ]
    assert calls == []


def text_calls_without_encoding(path: Path) -> Iterator[ast.Call]:
    for call in nodes(path):
        if not isinstance(call, ast.Call) or any(
            keyword.arg == "encoding" for keyword in call.keywords
        ):
            continue
        name = (
            call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
        )
        modes = [
            argument.value
            for argument in call.args
            if isinstance(argument, ast.Constant) and isinstance(argument.value, str)
        ]
        opens_text = name in ("open", "fdopen") and any(
            set(mode) <= set("rwax+t") for mode in modes
        )
        runs_text = any(keyword.arg in ("text", "universal_newlines") for keyword in call.keywords)
        if (
            name in ("read_text", "write_text")
            or opens_text
            or (runs_text and name in ("run", "Popen"))
        ):
            yield call


# What leaves a process past Python's streams: prepared bytes of a handler, and the lines of a
# screen.
WRITES_TO_FILE_NUMBERS = {"base/json_output.py", "base/startup.py", "launch/ssh/screen.py"}


def test_one_module_writes_to_the_terminal() -> None:
    """What others wrote must not steer it: drumline/base/text.py makes it harmless."""
    wrong = [
        f"{path.relative_to(PACKAGE)}:{node.lineno}: {what}"
        for path in modules()
        if path != PACKAGE / "base/text.py"
        for node, what in terminal_writes(path)
    ]
    assert wrong == []


def terminal_writes(path: Path) -> Iterator[tuple[ast.expr, str]]:
    for node in nodes(path):
        if not isinstance(node, ast.Call):
            continue
        name = dotted(node.func)
        is_number = name == "os.write" and isinstance(node.args[0], ast.Constant)
        if is_number and str(path.relative_to(PACKAGE)) in WRITES_TO_FILE_NUMBERS:
            continue
        of_stream = name.startswith("sys.") and name.endswith((".write", ".writelines"))
        of_others = (
            name.startswith(("traceback.print_", "rich.print", "pprint."))
            or name == "logging.getLogger"
        )
        of_rich = name.rpartition(".")[2] == "Console"
        is_log = name == "logging.getLogger" and path.name in ("errors.py", "local.py")
        if not is_log and (name == "print" or is_number or of_stream or of_others or of_rich):
            yield node, name


def test_the_public_names_are_these() -> None:
    assert drumline.__all__ == [
        "EMA",
        "BatchDataset",
        "Checkpoint",
        "Config",
        "DDPManager",
        "Draws",
        "DrumlineError",
        "EarlyStopping",
        "EvaluationLoader",
        "Hook",
        "Loader",
        "LogSamples",
        "Loss",
        "Result",
        "Run",
        "Task",
        "TwoPartDataset",
        "Unfreeze",
        "WatchConfig",
        "load",
        "load_checkpoint",
        "register_model",
        "train",
    ]
    for name in drumline.__all__:
        assert getattr(drumline, name) is not None
    assert dir(drumline) == sorted([*drumline.__all__, "__version__"])
    assert drumline.__version__ == version("drumline")
    with pytest.raises(AttributeError, match="module 'drumline' has no attribute 'Trainer'"):
        drumline.Trainer  # noqa: B018


LIGHT = [
    "drumline",
    "drumline.cli",
    "drumline.cli.train_command",
    "drumline.cli.evaluate_command",
    "drumline.cli.export_command",
    "drumline.cli.predict_command",
    "drumline.cli.profile_command",
    "drumline.cli.find_batch_command",
    "drumline.cli.find_lr_command",
    "drumline.cli.launch_command",
    "drumline.cli.lint_command",
    "drumline.cli.aws_command",
    "drumline.cli.doctor_command",
    "drumline.cli.tune_command",
    "drumline.cli.verify_command",
    "drumline.cli.watch_command",
    "drumline.cli.prove_resume_command",
    "drumline.cli.report_command",
    "drumline.cli.runs_command",
    "drumline.cli.scale_command",
    "drumline.config",
    "drumline.launch.ssh.supervisor",
    "drumline.training.python_api",
    "drumline.base.user_code",
]
IMPORTS_EACH = """
import importlib, sys
for module in sys.argv[1:]:
    importlib.import_module(module)
    if heavy := {'torch', 'numpy', 'rich'} & sys.modules.keys():
        sys.exit(f'{module} loads {sorted(heavy)}')
"""


def test_what_starts_a_command_does_not_load_torch() -> None:
    # this checkout's, installed or not
    linter = PACKAGE.parent / "packages/drumline-lint"
    environment = {**os.environ, "PYTHONPATH": str(linter)}
    done = subprocess.run(
        [sys.executable, "-c", IMPORTS_EACH, *LIGHT],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_no_module_and_no_class_has_the_name_of_another() -> None:
    homes: dict[str, list[str]] = defaultdict(list)
    for path in modules():
        if path.name != "__init__.py":
            homes[path.stem].append(str(path.relative_to(PACKAGE)))
        for node in nodes(path):
            if isinstance(node, ast.ClassDef):
                homes[node.name].append(str(path.relative_to(PACKAGE)))
    assert {name: places for name, places in homes.items() if len(places) > 1} == {}


def test_no_test_module_has_the_name_of_another() -> None:
    """Their folders are no packages: pytest would load the first one in place of the second."""
    names = Counter(path.name for path in Path(__file__).parents[1].rglob("test_*.py"))
    assert [name for name, count in names.items() if count > 1] == []


# A key of `drumline doctor --json`.
VAGUE_FIELD = "tools/doctor/pairs/survey.py: others"


def test_names_say_what_a_thing_is() -> None:
    vague = {
        f"{path.relative_to(folder)}: {name}"
        for folder in (PACKAGE, LINTER)
        for path in folder.rglob("*.py")
        for name in assigned_names(nodes(path)[0])
        if name.strip("_") in VAGUE_NAMES
    }
    assert vague == {VAGUE_FIELD}


def test_a_statement_assigns_one_thing() -> None:
    """`a, b = x, y` hides the second; what a call returns may be unpacked, and two be swapped."""
    packed = [
        f"{path}:{node.lineno}"
        for folder in (PACKAGE, LINTER)
        for path in folder.rglob("*.py")
        for node in nodes(path)
        if isinstance(node, ast.Assign) and is_packed(node)
    ]
    assert packed == []


MODULE_PATH = re.compile(r"(?<![\w/.-])(?:[a-z_]+/)+[a-z_0-9]+\.py\b")


def test_modules_that_comments_name_are_there() -> None:
    missing = [
        f"{path.relative_to(PACKAGE)}: {name}"
        for path in PACKAGE.rglob("*.py")
        for name in MODULE_PATH.findall(path.read_text(encoding="utf-8"))
        if not name.startswith("path/")  # an example
        and not any((folder / name).exists() for folder in (PACKAGE, PACKAGE.parent, *path.parents))
    ]
    assert missing == []
