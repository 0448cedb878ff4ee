"""DL086: every rank names a folder or a file by its own clock.

Ranks do not start in the same second, and have clocks of their own.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from drumline_lint.findings import Finding, Severity, rule
from drumline_lint.flow.distributed import is_of_ranks
from drumline_lint.flow.guards import is_on_every_rank
from drumline_lint.program.calls import argument
from drumline_lint.program.imports import any_text_near
from drumline_lint.program.origins import parts
from drumline_lint.program.program import Program
from drumline_lint.program.tree import (
    FunctionNode,
    called_name,
    dotted,
    nodes_in,
    owner_of,
    parent_of,
)
from drumline_lint.program.value import Function, Instance
from drumline_lint.reading.source import Source

RULE = rule("DL086", in_tests=False)

_MAKING = ("os.makedirs", "os.mkdir", "pathlib.Path.mkdir")
_PATH_AT = {"torch.save": 1, "torch.load": 0} | dict.fromkeys(_MAKING, 0)
_CLOCKS = ("time.time", "datetime.datetime.now")


def check(program: Program, source: Source) -> Iterator[Finding]:
    """Paths with a time to the second in them, which all ranks create, write or read.

    For example:

        folder = "runs/" + time.strftime("%Y%m%d-%H%M%S")
        os.makedirs(folder)
    """
    if any_text_near(program, source, "broadcast"):
        return

    severity = None if is_of_ranks(program, source) else Severity.NOTE
    for call in program.calls(source, *_PATH_AT):
        number = _PATH_AT[program.name_of(call.func)]
        path = call.args[number] if call.args[number:] else owner_of(call)
        clocks = [part for part in _parts(program, path) if _is_clock(program, part)]

        if clocks and is_on_every_rank(program, call):
            where = program.source_of(clocks[0])
            message = (
                f"every rank makes a path of its own clock, {where.code(clocks[0])}: "
                "ranks that are a second apart use different files"
            )
            yield RULE.at(where, clocks[0], message, severity=severity)


def _parts(program: Program, path: ast.expr | None) -> Iterator[ast.expr]:
    """What a path is made of, also by the function that gives a field of a dataclass its default.

    It is `new_folder()` for `settings.folder`, of:

        @dataclass
        class Settings:
            folder: Path = field(default_factory=new_folder)
    """
    for part in parts(program, path):
        yield part
        if isinstance(part, ast.Attribute):
            for function in _factories(program, part):
                for statement in nodes_in(function, ast.Return):
                    yield from parts(program, statement.value)


def _factories(program: Program, attribute: ast.Attribute) -> Iterator[FunctionNode]:
    """The functions of the given files that make the default of a field."""
    owners = [value.of for value in program.values(attribute.value) if isinstance(value, Instance)]
    for statement in (statement for owner in owners for statement in owner.body):
        if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.value, ast.Call):
            continue
        if dotted(statement.target) != attribute.attr or called_name(statement.value) != "field":
            continue

        factory = argument(statement.value, None, "default_factory")
        for value in program.values(factory):
            if isinstance(value, Function) and isinstance(value.node, ast.FunctionDef):
                yield value.node


def _is_clock(program: Program, part: ast.expr) -> bool:
    """Whether it is the time to the second.

    For example:

        time.strftime("%H%M%S")
        str(time.time())
    """
    if not isinstance(part, ast.Call):
        return False

    name = program.name_of(part.func)
    if name.endswith(".strftime"):
        return name.startswith(("time.", "datetime.")) and "%S" in ast.unparse(part)

    # not of `datetime.now().year`
    return name in _CLOCKS and not isinstance(parent_of(part), ast.Attribute)
