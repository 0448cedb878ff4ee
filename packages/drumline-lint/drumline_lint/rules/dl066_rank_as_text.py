"""DL066: a rank from the environment, which is text, is compared with a number."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from drumline_lint.findings import Finding, rule
from drumline_lint.program.origins import written_values
from drumline_lint.program.program import Program
from drumline_lint.program.ranks import OF_VARIABLE
from drumline_lint.reading.source import Source

RULE = rule("DL066", only_distributed=False)
_READING = ("os.getenv", "os.environ.get")


def check(program: Program, source: Source) -> Iterator[Finding]:
    """`os.environ["RANK"] == 0` never holds."""
    if "environ" not in source.text and "getenv" not in source.text:
        return
    for compare in program.index(source).every(ast.Compare):
        number = compare.comparators[0]
        is_number = isinstance(number, ast.Constant) and type(number.value) is int
        origins = written_values(program, compare.left) if is_number else []
        if origins and all(_is_variable(program, origin) for origin in origins):
            message = (
                f"{source.code(compare.left)} is text, so {source.code(compare)} "
                "is the same on every rank"
            )
            yield RULE.at(source, compare, message)


def _is_variable(program: Program, origin: ast.expr) -> bool:
    """A variable of the launcher, as it is; its default may be a number."""
    key: ast.expr | None = None
    if isinstance(origin, ast.Subscript) and program.name_of(origin.value) == "os.environ":
        key = origin.slice
    elif isinstance(origin, ast.Call) and program.name_of(origin.func) in _READING and origin.args:
        key = origin.args[0]
    return isinstance(key, ast.Constant) and key.value in OF_VARIABLE
