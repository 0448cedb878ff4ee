"""The linter's own rooms: imports go one way, and torch is never loaded."""

from __future__ import annotations

import ast
from pathlib import Path

import drumline_lint

PACKAGE = Path(drumline_lint.__file__).parent


def test_imports_go_one_way() -> None:
    """From what is read to what is reported."""
    floors = ["reading", "program", "flow", "training", "rules", "output"]
    wrong = [
        f"{path.relative_to(PACKAGE)} imports {node.module}"
        for number, floor in enumerate(floors)
        for path in sorted((PACKAGE / floor).rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and node.module
        for above in floors[number + 1 :]
        if node.module.startswith(f"drumline_lint.{above}")
    ]
    assert wrong == []
    assert {path.name for path in PACKAGE.iterdir() if path.is_dir()} - {"__pycache__"} == set(floors)
