"""The linter's own folders: imports go one way without cycles, and names are used once."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import drumline_lint

PACKAGE = Path(drumline_lint.__file__).parent
# Each folder may import from those before it, and every one from the modules beside them that are
# below the rules.
LAYERS = ("reading", "program", "flow", "training", "rules", "output")
TREES = {path: ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}


def imports(tree: ast.Module) -> Iterator[str]:
    """Modules of the distribution that one imports, anywhere in it."""
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.ImportFrom)
            and node.module
            and node.module.startswith("drumline_lint")
        ):
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                yield (
                    whole
                    if PACKAGE.parent.joinpath(*whole.split(".")).with_suffix(".py").exists()
                    else node.module
                )


def test_imports_go_one_way() -> None:
    assert {path.name for path in PACKAGE.iterdir() if path.is_dir()} - {"__pycache__"} == set(
        LAYERS
    )
    wrong = [
        f"{path.relative_to(PACKAGE)} imports {name}"
        for number, layer in enumerate(LAYERS)
        for path, tree in TREES.items()
        if path.parent.name == layer
        for name in imports(tree)
        if name.startswith(tuple(f"drumline_lint.{above}" for above in LAYERS[number + 1 :]))
    ]
    assert wrong == []


def test_there_are_no_cycles() -> None:
    graph = {
        ".".join(("drumline_lint", *path.relative_to(PACKAGE).with_suffix("").parts)): set(
            imports(tree)
        )
        for path, tree in TREES.items()
    }
    done: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, " -> ".join((*trail, name))
        if name not in done:
            for target in graph.get(name, set()):
                visit(target, (*trail, name))
            done.add(name)

    for name in graph:
        visit(name, ())


def test_no_module_and_no_class_has_the_name_of_another() -> None:
    modules = [path.stem for path in TREES if not path.stem.startswith("__")]
    classes = [
        node.name
        for tree in TREES.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    ]
    assert [name for name, count in Counter([*modules, *classes]).items() if count > 1] == []


def test_only_one_module_prints() -> None:
    calls = [
        path.name
        for path, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and ast.unparse(node.func) in ("print", "sys.stdout.write", "sys.stderr.write")
    ]
    assert calls == []


def test_python_code_is_read_by_python_alone() -> None:
    # PyYAML is imported by the first manifest.
    code = "import sys, drumline_lint.command, drumline_lint.rules as r; r.all_rules(); print(*sys.modules)"
    command = [
        sys.executable,
        "-S",
        "-c",
        f"import sys; sys.path.insert(0, {str(PACKAGE.parent)!r}); {code}",
    ]
    loaded = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    others = (
        {name.partition(".")[0] for name in loaded}
        - set(sys.stdlib_module_names)
        - {"drumline_lint", "__main__"}
    )
    assert {name for name in others if not name.startswith("_")} == set()
